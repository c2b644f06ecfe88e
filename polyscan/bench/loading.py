"""Imports a module from deep in a library without running the ``__init__`` of its top packages.

Those import all that the library has, compiled extensions and model hubs included, of which the
kernels need nothing.
"""

import json
import sys
import warnings
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from importlib.util import find_spec, module_from_spec
from typing import Any

# Whose __init__ is not run.
HOLLOW = ("fla", "fla.ops", "mamba_ssm", "ssd")


def load(module: str) -> Any:
    """The module; the warnings of the library's own import are its own affair."""
    top = module.partition(".")[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for package in HOLLOW:
            if package.partition(".")[0] == top and package not in sys.modules:
                _import_hollow(package)
        return import_module(module)


def library_version(module: str) -> str | None:
    """Of the distribution that a module came with, and its commit; None where it is unknown."""
    try:
        found = distribution(packages_distributions()[module.partition(".")[0]][0])
    except (KeyError, PackageNotFoundError):
        return None
    source = json.loads(found.read_text("direct_url.json") or "{}")
    commit = source.get("vcs_info", {}).get("commit_id")
    return found.version + (f" ({commit})" if commit else "")


def _import_hollow(package: str) -> None:
    spec = find_spec(package)
    if spec is None:
        raise ModuleNotFoundError(f"no module named {package!r}", name=package)
    module = module_from_spec(spec)
    module.__dict__["__version__"] = (library_version(package) or "unknown").partition(" ")[0]
    sys.modules[package] = module
    parent, _, child = package.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
