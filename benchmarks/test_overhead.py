"""What polyscan itself costs a call: checks, choice of a backend, autograd; no computing.

    pytest benchmarks/test_overhead.py --benchmark-json=benchmarks/results/overhead.json

The backend only allocates. Beside it, on the same tensors in the same process, an autograd.Function
that allocates the same and does nothing else: what any operation with a backward of its own costs.
"""

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import pytest
import torch

import polyscan
from packages import site_packages

BACKEND = """
import torch

class Allocate:
    name = "allocate"

    def version(self):
        return "1.0"

    def unavailable_reason(self):
        return None

    def unsupported_reason(self, problem):
        return None

    def forward(self, problem, inputs):
        return problem.allocate_outputs(inputs)

    def backward(self, problem, inputs, pre_gate, grads):
        return {
            name: torch.empty_like(tensor)
            for name, tensor in zip(inputs._fields, inputs)
            if tensor is not None
        }

BACKEND = Allocate()
"""
# polyscan's time is at most so many times that of the bare Function.
LIMIT = 5
REPETITIONS, CALLS = 31, 200


class Bare(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, *others):
        ctx.save_for_backward(x, *others)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, dy):
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors)


@pytest.fixture(scope="module", autouse=True)
def allocate(tmp_path_factory):
    with site_packages(tmp_path_factory.mktemp("allocate") / "site-packages") as install:
        install("allocate", BACKEND, {"allocate": "allocate:BACKEND"})
        yield


def arguments(grad: bool) -> tuple[torch.Tensor, ...]:
    batch, seqlen, nheads, headdim, ngroups, d_state = 1, 64, 1, 16, 1, 16
    shapes = (
        (batch, seqlen, nheads, headdim),
        (batch, seqlen, nheads),
        (nheads,),
        (batch, seqlen, ngroups, d_state),
        (batch, seqlen, ngroups, d_state),
    )
    return tuple(torch.zeros(shape, requires_grad=grad) for shape in shapes)


def forward_backward(function, tensors):
    y = function(*tensors)
    torch.autograd.grad(y, tensors, torch.ones_like(y))


CASES = {
    "no gradient": lambda function: partial(function, *arguments(grad=False)),
    "forward, gradient wanted": lambda function: partial(function, *arguments(grad=True)),
    "forward+backward": lambda function: partial(forward_backward, function, arguments(grad=True)),
}


def time_us(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        function()
    return (time.perf_counter() - start) / CALLS * 1e6


@pytest.mark.parametrize("case", CASES)
def test_overhead(benchmark, case):
    call = CASES[case](partial(polyscan.bidi_ssd, backend="allocate"))
    bare = CASES[case](Bare.apply)
    for function in (call, bare):
        time_us(function)
    # In turns, so that both see the same machine.
    pairs = [(time_us(call), time_us(bare)) for _ in range(REPETITIONS)]
    benchmark.group = case
    benchmark.extra_info |= {
        "polyscan_us": median(ours for ours, _ in pairs),
        "bare_us": median(theirs for _, theirs in pairs),
        "ratio": median(ours / theirs for ours, theirs in pairs),
        "torch": torch.__version__,
    }
    benchmark.pedantic(call, rounds=REPETITIONS, iterations=CALLS)
    assert benchmark.extra_info["ratio"] <= LIMIT
