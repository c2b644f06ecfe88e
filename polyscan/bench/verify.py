"""Whether a result is right: held to float64 before anything is timed.

What is right is computed by the backend ``torch`` in float64 on the same, rounded, numbers, for the
whole problem, on the device where it is measured. The tests hold that backend to the sequential
reference. An error is ‖got − exact‖ / ‖exact‖, or ‖got‖ where what is right is nothing, as A's
gradient for two tokens under the shift.

The gradients are those of ‖y‖²/2: there dA, dD and ddt_bias add up over the tokens instead of
cancelling to a number that rounding errors could hide in.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from polyscan.checking import FLOAT32, FLOAT32_STEPS, SIXTEEN_BITS, STEPS, TF32

from .operations import Task, Tensors
from .precision import PrecisionName

EXACT_BACKEND = "torch"
# float64's rounding errors, where numbers are about 1.
NOTHING = 1e-12


class Check(NamedTuple):
    """``error`` and ``limit`` of ``worst``, the result that came closest to its limit or furthest
    beyond."""

    error: float
    limit: float
    worst: str

    @property
    def passed(self) -> bool:
        return self.error <= self.limit

    def __str__(self) -> str:
        return f"the error of {self.worst} is {self.error:.2g}, at most {self.limit:.2g}"


class Exact(NamedTuple):
    """``results`` in float64, and y's gradient in y's dtype: y itself, of root mean square 1."""

    results: Tensors
    dy: Tensor


def exact(task: Task) -> Exact:
    leaves = {name: leaf.detach().double().requires_grad_() for name, leaf in task.leaves.items()}
    with torch.enable_grad():
        y = task.operation.compute(leaves, task.options, EXACT_BACKEND)
        scale = y.detach().square().mean().sqrt()
        dy = (y.detach() / scale).to(task.like_y.dtype)
        return Exact(results(y, leaves, dy.double()), dy)


def results(y: Tensor, leaves: Tensors, dy: Tensor) -> Tensors:
    """y as "y", and the gradients as "grad_" + a leaf's name."""
    grads = torch.autograd.grad(y, list(leaves.values()), dy)
    return {"y": y.detach()} | {
        f"grad_{name}": grad for name, grad in zip(leaves, grads, strict=True)
    }


def check(got: Tensors, exact: Mapping[str, Tensor], precision: PrecisionName) -> Check:
    """Of all that was computed, the worst."""
    checks = []
    for name, value in got.items():
        wanted = exact[name]
        if value.shape != wanted.shape:
            raise ValueError(f"{name} is {tuple(value.shape)} instead of {tuple(wanted.shape)}")
        checks.append(Check(_error(value, wanted), _limit(name, precision), name))
    return max(checks, key=lambda check: check.error / check.limit)


def _error(got: Tensor, exact: Tensor) -> float:
    difference = torch.linalg.vector_norm(got.double() - exact).item()
    size = torch.linalg.vector_norm(exact).item()
    error = difference / (size if size > NOTHING else 1.0)
    return error if math.isfinite(error) else math.inf


def _limit(name: str, precision: PrecisionName) -> float:
    if precision in ("bfloat16", "float16"):
        return SIXTEEN_BITS
    if precision == "tf32":
        return TF32
    return FLOAT32_STEPS if name in STEPS else FLOAT32
