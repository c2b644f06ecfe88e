"""More threads than heads: a backend may cut the sequence, and must join the pieces again."""

import pytest
import torch

from bounds import assert_within_bound
from cases import CASES, make
from running import run, skip_unsupported

# Pieces with sequences inside, across their borders and over several; with nothing, too.
NAMES = ("packed-states", "packed-uncovered", "packed-short", "ssd-reverse", "seqlen-3", "states")


@pytest.fixture(params=[7, 64])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("shift", ["", "-shift"])
@pytest.mark.parametrize("name", NAMES)
def test_many_threads(name, shift, threads, backend, device):
    call = make(CASES[name + shift], device, torch.float64)
    skip_unsupported(call, backend)
    assert_within_bound(call, run(call, backend))
