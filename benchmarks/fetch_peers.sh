#!/usr/bin/env bash
# Puts the peers into ./peers, as pure Python: their Triton parts, without compiled extensions.
#
#     benchmarks/fetch_peers.sh
#     PYTHONPATH=peers python -m polyscan bench
#
# Run it where there is a network; the folder can be carried to where there is none. $PYTHON needs
# pip, setuptools, wheel and torch, of any version, to build them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python3}
GITHUB=${GITHUB:-https://github.com}
TARGET=${TARGET:-peers}

rm -rf "$TARGET"
# Without their dependencies: those that the kernels do not need compile for long.
"$PYTHON" -m pip install --quiet --no-deps --no-build-isolation --no-compile --target "$TARGET" \
    "git+$GITHUB/state-spaces/mamba@e9594ce1c732d97440f0332fdc43170a2294dbfa" \
    "git+$GITHUB/fla-org/flash-linear-attention@bc3b101dcb713ddc5bd8924b66754eb68b5ccf89" \
    "git+$GITHUB/Hprairie/Bi-Mamba2@08b3cd3cf6d60ee2f4e712f6efecebe86ec15f92"
"$PYTHON" -m pip install --quiet --no-deps --no-compile --target "$TARGET" einops packaging

# Bi-Mamba2 calls tl.flip without the axis, which Triton does not accept any more.
sed -i 's/tl\.flip(tl\.cumsum(tl\.flip(dA, dim=1), axis=1))/tl.flip(tl.cumsum(tl.flip(dA, dim=1), axis=1), dim=1)/' \
    "$TARGET/ssd/bi/ssd_chunk_state.py"
du -sh "$TARGET"
