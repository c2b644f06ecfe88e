"""The CPU half: compiled loops, parallel over batch, heads and segments of the sequence.

================ ========================================================================
``launch.py``    torch tensors to arrays, the plan of a call, allocation
``forward.py``   y and the final states
``backward.py``  all gradients: the way through the tiles, twice
``gradients.py`` the gradients within a tile
``segments.py``  what passes from tile to tile, and between the segments of a sequence
``tile.py``      a tile of tokens: how it is read, its decays, its state update
``products.py``  small matrix products, transposition, aligned memory
``floats.py``    16-bit floats, which Numba's CPU target lacks, from their bits
================ ========================================================================

Compiled kernels are kept on disk. Numba renews a kernel's entry when the kernel's own file changes,
not when a file it calls into does: after editing one of these files, delete ``__pycache__``.
"""
