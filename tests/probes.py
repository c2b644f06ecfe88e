"""Problems with closed forms at any size: what should come out are constants.

ones: A = 0 and all else 1, so that states count tokens. local: A = -100 and all else 1, so that the
decay is 0 for all purposes and only neighbours count. big_dt: A = -16 and dt = 100, the same with
exponents of -1600. A fault at a border, a tail or a limit of some index shows as a wrong constant.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from bounds import FLOAT32_STEPS, FLOAT64
from cases import Call, Case, Dtypes, Results, make


class Probe(NamedTuple):
    """A call with the loss ``y.sum()``, and its results: per token (seqlen,), or one number."""

    call: Call
    wanted: Results


def ones(case: Case, device: torch.device, dtype: torch.dtype | Dtypes) -> Probe:
    """y = N(L + 1), under the shift N(L - 1), with each sequence's own length L."""
    P, N, shift = case.headdim, case.d_state, case.shift

    def count(length: int) -> Tensor:
        return torch.full((length,), length - 1 if shift else length + 1)

    def count_of_C(length: int) -> Tensor:
        counts = torch.full((length,), length + 1)
        if shift:  # the first and the last row are read by one direction, where there is another
            counts[[0, -1]] = min(length - 1, 1)
        return counts

    def pairs(length: int) -> int:
        return length * (length - 1) * (length - 2 if shift else length + 1) // 3

    counts = _per_token(case, count)
    wanted = {
        "y": N * counts,
        "grad_x": N * counts,
        "grad_dt": P * N * counts,
        "grad_B": P * counts,
        "grad_C": P * _per_token(case, count_of_C),
        "grad_A": torch.tensor(case.batch * P * N * sum(map(pairs, _lengths(case)))),
    }
    return Probe(_filled(case, device, dtype, A=0.0), wanted)


def local(case: Case, device: torch.device, dtype: torch.dtype | Dtypes) -> Probe:
    """y = 2; under the shift the number of neighbours. Wants headdim and d_state 1."""
    counts = _per_token(case, _neighbours(case.shift))
    names = ("y", "grad_x", "grad_dt", "grad_B", "grad_C")
    return Probe(_filled(case, device, dtype, A=-100.0), dict.fromkeys(names, counts))


def big_dt(case: Case, device: torch.device, dtype: torch.dtype | Dtypes) -> Probe:
    """y = 200; under the shift 100 for each neighbour. Wants headdim and d_state 1."""
    counts = _per_token(case, _neighbours(case.shift))
    wanted = dict.fromkeys(("y", "grad_x", "grad_B", "grad_C"), 100 * counts)
    wanted |= {"grad_dt": counts, "grad_A": torch.tensor(0)}
    return Probe(_filled(case, device, dtype, A=-16.0, dt=100.0), wanted)


def assert_constants(got: Results, wanted: Results, dtype: torch.dtype) -> None:
    """Raise unless each result is what is wanted, where ``dtype`` is the narrowest on the way.

    Exactly, while that dtype holds every integer up to the largest; no partial sum is larger, as
    nothing is negative. Beyond that within float32's and float64's own bounds, and in 16 bits
    within four roundings: of a product, a state, a sum and the result.
    """
    eps = torch.finfo(dtype).eps
    relative = {torch.float64: FLOAT64, torch.float32: FLOAT32_STEPS}.get(dtype, 2 * eps)
    for name, result in got.items():
        if name not in wanted:
            continue
        value = wanted[name].to(result.device, torch.float64)
        if value.dim():
            value = value.view(1, -1, *[1] * (result.dim() - 2))
        exact = value.numel() == 0 or value.max() <= 2 / eps
        torch.testing.assert_close(
            result.double(),
            value.expand(result.shape),
            rtol=0 if exact else relative,
            atol=0,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def _filled(case: Case, device: torch.device, dtype: torch.dtype | Dtypes, **values: float) -> Call:
    call = make(replace(case, ngroups=case.nheads), device, dtype)
    filled = {name: torch.full_like(t, values.get(name, 1.0)) for name, t in call.floats.items()}
    cotangents = {"y": torch.ones_like(call.cotangents["y"])}
    return replace(call.with_tensors(**filled), cotangents=cotangents)


def _neighbours(shift: bool) -> Callable[[int], Tensor]:
    """How many directions reach each token: with the shift, from a neighbour."""

    def count(length: int) -> Tensor:
        counts = torch.full((length,), 2)
        if shift:
            counts[0] -= 1
            counts[-1] -= 1
        return counts

    return count


def _spans(case: Case) -> list[tuple[int, int]]:
    spans = pairwise(case.cu_seqlens or (0, case.seqlen))
    return [(start, stop) for start, stop in spans if stop > start]


def _lengths(case: Case) -> list[int]:
    return [stop - start for start, stop in _spans(case)]


def _per_token(case: Case, values: Callable[[int], Tensor]) -> Tensor:
    """``values(length)`` for each sequence in its place, and 0 for tokens in none."""
    row = torch.zeros(case.seqlen, dtype=torch.int64)
    for start, stop in _spans(case):
        row[start:stop] = values(stop - start)
    return row
