"""Benchmarks: every backend that can run here and the peers that are installed, side by side.

``python -m polyscan bench`` and ``pytest benchmarks/`` are two faces of this package. A case goes
one way through it:

=================== ================================================================
``presets``         which sizes, and the tensors of a case; ``precision``
``operations``      what is computed: both directions, or the part that a peer can do
``implementations`` who computes: polyscan's backends, ``plain`` PyTorch, ``peers``
``verify``          whether the result is right; a wrong one has no number
``timing``          how long it takes, what it allocates and launches
``measure``         the above for one case, as ``records``
``counts``          the least that any program must move and compute
``machine``         what the machine is, and what it can do at most
``pictures``        records as plots
=================== ================================================================
"""
