"""Triton's kernels compile for GPUs that are not there, and spill no more than is on record."""

from pathlib import Path

import pytest
import torch

from cases import Case, make

pytest.importorskip("triton", reason="triton is not installed")
from polyscan.backends.triton import interprets

import ahead

if interprets():
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

OPTIONS = {"D": "head", "dt_bias": True, "dt_softplus": True}
REV = ("dt_rev", "B_rev", "C_rev")
SHAPES = {  # batch, seqlen, nheads, headdim, d_state
    "d_state-64": (1, 512, 2, 64, 64),
    "d_state-16": (1, 197, 2, 64, 16),
}
# Instructions that spill registers on sm_90 in bfloat16: of these kernels, and of no other.
SPILLS = {
    ("d_state-64", False, "scan"): 26,
    ("d_state-64", True, "scan"): 26,
    ("d_state-64", False, "token_gradients"): 125,
    ("d_state-64", False, "key_gradients"): 3,
    ("d_state-64", True, "key_gradients"): 14,
    ("d_state-16", True, "scan"): 137,
}


def launches(shape, shift):
    batch, seqlen, nheads, headdim, d_state = SHAPES[shape]
    rev = REV if shift else ()
    case = Case(shape, batch, seqlen, nheads, headdim, 1, d_state, shift=shift, rev=rev, **OPTIONS)
    call = make(case, torch.device("cpu"), torch.bfloat16)
    # Few multiprocessors, so that sequences are not cut.
    return {launch.kernel.__name__: launch for launch in ahead.launches(call, 1)}


@pytest.mark.parametrize("shift", [False, True], ids=["plain", "shift"])
@pytest.mark.parametrize("shape", SHAPES)
def test_spills_on_hopper(shape, shift):
    gpu = ahead.target("sm_90")
    for name, launch in launches(shape, shift).items():
        used = ahead.resources(ahead.compile(launch, gpu), gpu)
        assert used["spills"] <= SPILLS.get((shape, shift, name), 0), (name, used)


@pytest.mark.parametrize("name", ["sm_80", "sm_100", "gfx942"])
def test_compiles_for(name):
    gpu = ahead.target(name)
    for launch in launches("d_state-16", True).values():
        assert ahead.compile(launch, gpu).asm


def test_no_long_axis_in_a_launch_grid_but_the_first():
    """y and z of a grid end at 65,535."""
    folder = Path(ahead.triton_call.__file__).parent
    sources = "".join(file.read_text("utf-8") for file in folder.rglob("*.py"))
    assert "program_id(0)" in sources
    assert "program_id(1)" not in sources and "program_id(2)" not in sources
