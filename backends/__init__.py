"""Installed as ``polyscan.backends``: one folder per backend, named like the ``backend=`` string.

To add a backend:

1. Make a folder here whose ``__init__.py`` holds ``BACKEND``, an object that fulfils
   ``polyscan.backend.Backend``. Import its GPU library inside functions, on first use.
2. Let ``unsupported_reason`` refuse what it cannot do, each reason with value and limit.
3. Register it in pyproject.toml: the package, and the entry point in group ``polyscan.backends``.
4. Place it in the table of preferences in ``polyscan/dispatch.py``, by measurement.
5. Run ``pytest --backend NAME``: the whole shared suite runs on it.

Inside this tree import siblings relatively (``from .._shared import ...``) and the core by its full
name (``from polyscan.problem import ...``). A package of its own does the same without steps 3 and
4: it declares the entry point, and automatic choice takes it after polyscan's own.
"""
