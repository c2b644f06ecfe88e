"""The CPU backends and the usual way in plain PyTorch, side by side.

    pytest benchmarks/test_cpu.py --benchmark-json=benchmarks/results/cpu-2-cores.json

Each case is checked against the reference in float64 before it is timed, and has no number when the
check fails.
"""

from functools import cache

import plain
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import polyscan

# (batch, seqlen, nheads, headdim, d_state), ngroups 1, float32
SHAPES = {
    "2x2048x8x64, d_state 64": (2, 2048, 8, 64, 64),
    "1x16384x4x64, d_state 16": (1, 16384, 4, 64, 16),
    "2x512x24x64, d_state 16": (2, 512, 24, 64, 16),
    "64x64x8x16, d_state 16": (64, 64, 8, 16, 16),
    "64x16x8x16, d_state 16": (64, 16, 8, 16, 16),
}
IMPLEMENTATIONS = ("torch", "numba", "plain")
# The bound of the tests in float32.
TOLERANCE = 5e-5


@cache
def arguments(shape: str) -> dict[str, Tensor]:
    batch, seqlen, nheads, headdim, d_state = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator)

    tensors = {
        "x": normal(batch, seqlen, nheads, headdim),
        "dt": F.softplus(normal(batch, seqlen, nheads) - 1),
        "A": -torch.rand(nheads, generator=generator) - 0.1,
        "B": normal(batch, seqlen, 1, d_state),
        "C": normal(batch, seqlen, 1, d_state),
    }
    return {name: tensor.requires_grad_() for name, tensor in tensors.items()}


def run(implementation: str, shift: bool, tensors: dict[str, Tensor]) -> Tensor:
    if implementation == "plain":
        return plain.bidi_ssd(**tensors, shift=shift)
    return polyscan.bidi_ssd(**tensors, shift=shift, backend=implementation)


def results(implementation: str, shift: bool, tensors: dict[str, Tensor]) -> list[Tensor]:
    """y and all gradients of a fixed weighting of it."""
    y = run(implementation, shift, tensors)
    return [y.detach(), *torch.autograd.grad(y, list(tensors.values()), weights(y))]


def weights(y: Tensor) -> Tensor:
    return torch.linspace(-1, 1, y.shape[1], dtype=y.dtype)[:, None, None].expand(y.shape)


@cache
def exact(shape: str, shift: bool) -> list[Tensor]:
    wide = {name: t.detach().double().requires_grad_() for name, t in arguments(shape).items()}
    return results("reference", shift, wide)


def check(implementation: str, shape: str, shift: bool) -> None:
    got = results(implementation, shift, arguments(shape))
    for result, wanted in zip(got, exact(shape, shift), strict=True):
        error = torch.linalg.vector_norm(result - wanted) / torch.linalg.vector_norm(wanted)
        assert error <= TOLERANCE


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("what", ["forward", "forward+backward"])
@pytest.mark.parametrize("shift", [False, True], ids=["sum", "shift"])
@pytest.mark.parametrize("shape", SHAPES)
def test_cpu(benchmark, shape, shift, what, implementation):
    seqlen = SHAPES[shape][1]
    if implementation == "plain" and seqlen % plain.CHUNK_SIZE:
        pytest.skip(f"plain needs whole chunks of {plain.CHUNK_SIZE} tokens, seqlen is {seqlen}")
    check(implementation, shape, shift)
    tensors = arguments(shape)
    benchmark.group = f"{shape}, {'shift' if shift else 'sum'}, {what}"
    benchmark.extra_info |= {
        "implementation": implementation,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }

    def forward() -> None:
        with torch.no_grad():
            run(implementation, shift, tensors)

    def forward_backward() -> None:
        y = run(implementation, shift, tensors)
        torch.autograd.grad(y, list(tensors.values()), weights(y))

    timed = forward if what == "forward" else forward_backward
    benchmark.pedantic(timed, rounds=11, warmup_rounds=2)
