"""No intermediate as large as seqlen x seqlen, or as a state for every token."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cases import Case, make
from running import run_pair, skip_unsupported

SEQLEN = 1024


class LargestTensor(TorchDispatchMode):
    """Notes the bytes of the largest storage that any torch operation returns."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.nbytes = max(self.nbytes, leaf.untyped_storage().nbytes())
        return result


def largest(case, backend, device):
    call = make(case, device, torch.float32)
    skip_unsupported(call, backend)
    with (
        LargestTensor() as seen
    ):  # around the backend itself: torch.library ops hide what is inside
        run_pair(call, backend, backend)
    return seen.nbytes


def test_memory_is_linear_in_seqlen(backend, device):
    case = Case("memory", 1, SEQLEN, 4, 16, d_state=32, D="head", z=True, shift=True)
    nbytes = largest(case, backend, device)
    x = SEQLEN * case.nheads * case.headdim * 4
    assert nbytes >= x, "the probe saw the output at least"
    assert nbytes < SEQLEN * SEQLEN * 4, "less than one number per pair of tokens"
    assert nbytes < x * case.d_state / 4, "far less than one state per token"


def test_the_probe_sees_what_is_large():
    x = torch.ones(SEQLEN, 1)
    with LargestTensor() as seen:
        (x @ x.mT).sum()
    assert seen.nbytes == SEQLEN * SEQLEN * 4
