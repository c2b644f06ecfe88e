"""What is computed: both directions, or the part of it that a peer can do.

An operation takes the tensors of a case, leaves those that need a gradient under names of its own,
and can compute itself through :mod:`polyscan`: in float64 that is what results are held to.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import polyscan

from .presets import Case, cu_seqlens, steps, tensors

Tensors = dict[str, Tensor]


class Task(NamedTuple):
    """An operation on the tensors of a case.

    ``leaves`` are the floating-point arguments, ``options`` the others.
    """

    operation: "Operation"
    case: Case
    leaves: Tensors
    options: dict[str, Any]

    @property
    def like_y(self) -> Tensor:
        """The leaf that has y's shape and dtype."""
        return self.leaves["x" if "x" in self.leaves else "v"]


class Operation(NamedTuple):
    """``note`` says what is left out of the two directions, "" where nothing is."""

    name: str
    note: str
    directions: int
    arguments: Callable[[Tensors, Case], tuple[Tensors, dict[str, Any]]]
    compute: Callable[[Tensors, dict[str, Any], str], Tensor]

    def task(self, case: Case, device: torch.device | str) -> Task:
        return Task(self, case, *self.arguments(tensors(case, device), case))


def _packing(case: Case, drawn: Tensors) -> dict[str, Any]:
    borders = cu_seqlens(case.preset, drawn["x"].device)
    return {} if borders is None else {"cu_seqlens": borders}


def _both_arguments(drawn: Tensors, case: Case) -> tuple[Tensors, dict[str, Any]]:
    options = {"shift": case.variant == "hydra", "dt_softplus": True, **_packing(case, drawn)}
    return drawn, options


def _both(leaves: Tensors, options: dict[str, Any], backend: str) -> Tensor:
    arguments: dict[str, Any] = {**leaves, **options, "backend": backend}
    y: Tensor = polyscan.bidi_ssd(**arguments)
    return y


def _causal_arguments(drawn: Tensors, case: Case) -> tuple[Tensors, dict[str, Any]]:
    return drawn, {"dt_softplus": True, **_packing(case, drawn)}


def _causal(leaves: Tensors, options: dict[str, Any], backend: str) -> Tensor:
    arguments: dict[str, Any] = {**leaves, **options, "backend": backend}
    y: Tensor = polyscan.ssd(**arguments)
    return y


def _attention_arguments(drawn: Tensors, case: Case) -> tuple[Tensors, dict[str, Any]]:
    """q, k, v and the log decay g, made of the same numbers: v is x · dt, and g is dt · A."""
    heads = case.preset.nheads // case.preset.ngroups
    dt = steps(drawn["dt"], drawn["dt_bias"])
    leaves = {
        "q": drawn["C"].repeat_interleave(heads, 2),
        "k": drawn["B"].repeat_interleave(heads, 2),
        "v": (drawn["x"] * dt[..., None]).to(drawn["x"].dtype),
        "g": dt * drawn["A"],
    }
    return leaves, _packing(case, drawn)


def _attention(leaves: Tensors, options: dict[str, Any], backend: str) -> Tensor:
    dt = -leaves["g"]
    A = dt.new_full(dt.shape[2:], -1.0)
    x = leaves["v"] / dt[..., None]
    y: Tensor = polyscan.ssd(x, dt, A, leaves["k"], leaves["q"], **options, backend=backend)
    return y


def _lightning_arguments(drawn: Tensors, case: Case) -> tuple[Tensors, dict[str, Any]]:
    leaves, options = _attention_arguments(drawn, case)
    del leaves["g"]
    return leaves, options


def lightning_decay(nheads: int, device: torch.device) -> Tensor:
    """(nheads,), the log decays of the first of one layer in lightning attention."""
    return -8 / nheads * torch.arange(nheads, device=device, dtype=torch.float32)


def _lightning(leaves: Tensors, options: dict[str, Any], backend: str) -> Tensor:
    v = leaves["v"]
    A = lightning_decay(v.shape[2], v.device).to(torch.promote_types(v.dtype, torch.float32))
    dt = A.new_ones(v.shape[:3])
    y: Tensor = polyscan.ssd(v, dt, A, leaves["k"], leaves["q"], **options, backend=backend)
    return y


BOTH = Operation("both directions", "", 2, _both_arguments, _both)
CAUSAL = Operation("causal", "one direction", 1, _causal_arguments, _causal)
ATTENTION = Operation(
    "gated linear attention",
    "one direction, without D; dt, x · dt and heads' own B, C made outside of the timing",
    1,
    _attention_arguments,
    _attention,
)
LIGHTNING = Operation(
    "lightning attention",
    "one direction, without D, a decay per head only",
    1,
    _lightning_arguments,
    _lightning,
)
