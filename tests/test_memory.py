"""No intermediate as large as seqlen x seqlen, or as a state for every token."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
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


def test_long_sequence_needs_little_memory():
    """The backend torch at 1 x 65,536 x 4 x 64, d_state 16: 384 MiB beyond inputs and gradients.

    Of these, y is 64 MiB. Counted by the kernel, in a process that nothing else has grown.
    """
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("this system cannot set the record of a process's largest size back")
    code = """
import memory
tensors = memory.prepare("torch", 1, 65536, 4, 64, 16)
print(memory.grown_by("torch", tensors), sum(t.nbytes for t in tensors) / memory.MIB)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent.parent / "benchmarks",
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    grown, gradients = map(float, done.stdout.split())
    assert gradients < grown, "the probe saw the gradients at least"
    assert grown - gradients < 384
