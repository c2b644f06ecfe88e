"""The bound on the error of any output or gradient, in one function.

    ‖got − exact‖ ≤ tolerance · max(‖exact‖, ‖the same sums over absolute values‖)

Exact is float64 on the same, rounded, inputs. The second norm is the size of the terms that were
added up: where they cancel, no program in finite precision can do better.

What is rounded to 16 bits anywhere on its way is measured instead: at most twice the error of
straightforward PyTorch, and at most ``SIXTEEN_BITS``.
"""

import math

import torch
from torch import Tensor

from cases import Call, Results
from oracle import expected, straightforward
from polyscan.checking import FLOAT32, FLOAT32_STEPS, SIXTEEN_BITS, STEPS, TF32
from polyscan.problem import SSDProblem
from running import describe

FLOAT64 = 1e-12


def assert_within_bound(
    call: Call, got: Results, exact: Results | None = None, factor: float = 1.0
) -> None:
    """Raise unless each result is within ``factor`` bounds of its exact value.

    ``exact`` may come from elsewhere, such as a file. Where it is another result in finite
    precision, both are within one bound of the truth, and so within two of each other.
    """
    _, problem = describe(call)
    exact = expected(call).exact if exact is None else exact
    failures = []
    for name, value in got.items():
        wanted = exact[name].to(value.device, torch.float64)
        assert value.shape == wanted.shape, f"{name}: {value.shape} instead of {wanted.shape}"
        error = _norm(value.double() - wanted)
        allowed = factor * _allowed(call, problem, name, value.dtype, wanted)
        if not error <= allowed:  # NaN compares as False
            failures.append(f"{name}: error {error:.3g}, allowed {allowed:.3g}")
    assert not failures, "; ".join(failures)


def _allowed(
    call: Call, problem: SSDProblem, name: str, dtype: torch.dtype, exact: Tensor
) -> float:
    scale = max(_norm(exact), _norm(expected(call).absolute[name]))
    dtypes = [problem.product_dtype, problem.accumulation_dtype, dtype]
    if name == "grad_z":
        dtypes.append(problem.x_dtype)  # in which the output before the gate is kept
    coarsest = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    if coarsest == torch.float64:
        return FLOAT64 * scale
    if coarsest == torch.float32:
        if problem.tf32:
            return TF32 * scale
        return (FLOAT32_STEPS if name in STEPS else FLOAT32) * scale
    plain = _norm(straightforward(call)[name].double() - exact)
    # In a tensor of few numbers the plain program may hit the exact value by luck. Two roundings of
    # the largest number, one on its way and one of the result, are always allowed.
    two_roundings = torch.finfo(coarsest).eps * _largest(exact)
    limit = SIXTEEN_BITS * scale
    return min(max(2 * plain, two_roundings), limit) if math.isfinite(plain) else limit


def _norm(values: Tensor) -> float:
    return torch.linalg.vector_norm(values.double()).item()


def _largest(values: Tensor) -> float:
    return values.abs().max().item() if values.numel() else 0.0
