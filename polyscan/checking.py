"""Whether the backends compute the right thing on this machine.

Three probes with closed forms, so that what should come out owes nothing to any program, and one
random call with nearly every option, held to :mod:`polyscan.reference` in float64. All arguments
are float32; gradients are checked along with the outputs.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import reference
from .api import bidi_ssd
from .dispatch import available_backends
from .errors import BackendError
from .hardware import tf32_allowed, usable
from .text import aligned

Results = dict[str, Tensor]  # outputs by name, gradients as "grad_" + the argument's name

# Bounds on ‖got − exact‖, relative to ‖exact‖. The tests hold more dtypes and cases to them.
FLOAT32 = 1e-5
# Sums over seqlen, headdim and d_state of both signs, with the decays' own errors on top.
FLOAT32_STEPS = 5e-5
STEPS = tuple(f"grad_{name}{suffix}" for name in ("dt", "A", "dt_bias") for suffix in ("", "_rev"))
TF32 = 2e-3
# bfloat16 and float16
SIXTEEN_BITS = 5e-3

# No multiple of any tile or chunk, and more than two chunks of the usual 64 tokens.
BATCH, SEQLEN, NHEADS, HEADDIM, NGROUPS, D_STATE = 2, 131, 6, 7, 3, 5
# One token, none, one across the border of a chunk; the first and the last row are in no sequence.
CU_SEQLENS = (1, 2, 2, 67, 130)
OUTPUTS = ("y", "final_states", "final_states_rev")
RESULTS = ("passed", "failed", "skipped")


@dataclass(frozen=True)
class CheckRow:
    """One probe on one backend and device.

    ``passed`` is None where the backend did not run it; ``reason`` then tells why not, and after an
    exception what was raised. Otherwise ``error`` and ``limit``, both relative to the norm of what
    is right, are those of ``worst``: the output or gradient that came closest to its limit or went
    furthest beyond.
    """

    backend: str
    device: str
    probe: str
    dtype: str
    passed: bool | None
    error: float | None = None
    limit: float | None = None
    worst: str | None = None
    reason: str | None = None

    @property
    def result(self) -> str:
        return "skipped" if self.passed is None else "passed" if self.passed else "failed"


@dataclass(frozen=True)
class CheckReport:
    """What :func:`check` found; ``str()`` of it is the table for people."""

    rows: tuple[CheckRow, ...]

    @property
    def passed(self) -> bool:
        """Whether something ran and nothing failed."""
        results = {row.result for row in self.rows}
        return "passed" in results and "failed" not in results

    def __str__(self) -> str:
        header = ("backend", "device", "probe", "dtype", "error", "limit", "result")
        counts = Counter(row.result for row in self.rows)
        summary = ", ".join(f"{counts[result]} {result}" for result in RESULTS)
        return f"{aligned([header, *map(_cells, self.rows)])}\n\n{summary}"


def check(
    backends: Sequence[str] | None = None, device: torch.device | str | None = None
) -> CheckReport:
    """Run every backend on calls whose results are known, forward and backward.

    Args:
        backends: names of :func:`available_backends`, by default all. One that is unavailable, or
            refuses every call, is reported with its reason; if it was named, as failed.
        device: where to run; by default on the CPU and, if there is one, the current CUDA device.

    Raises:
        ValueError: no backend of such a name is installed, or the device cannot be used.
    """
    installed = available_backends()
    for name in backends or ():
        if name not in installed:
            raise ValueError(f"backends must be of {', '.join(installed)}; got {name!r}")
    devices = _default_devices() if device is None else [usable(device)]
    probes = list(_probes())
    rows: list[CheckRow] = []
    for name in installed if backends is None else dict.fromkeys(backends):
        of_backend = [row for where in devices for row in _check_on(where, name, probes)]
        if backends is not None and all(row.passed is None for row in of_backend):
            of_backend = [replace(row, passed=False) for row in of_backend]
        rows += of_backend
    return CheckReport(tuple(rows))


class _Probe(NamedTuple):
    """A call of bidi_ssd, the gradients of its outputs, and exact results; all on the CPU."""

    name: str
    arguments: dict[str, Any]
    cotangents: tuple[Tensor, ...]
    exact: Results


def _probes() -> Iterator[_Probe]:
    for shift in (False, True):
        reaching = torch.full((SEQLEN,), 2.0, dtype=torch.float64, device="cpu")
        if shift:  # a token is reached from its neighbours, and the outer ones have only one
            reaching[[0, -1]] = 1
        everything = torch.full_like(reaching, SEQLEN - 1 if shift else SEQLEN + 1)
        yield _constant("ones", shift, everything)
        yield _constant("local", shift, reaching, A=-100.0)
        yield _constant("bigdt", shift, reaching, A=-16.0, dt=100.0)
    yield _random()


def _constant(name: str, shift: bool, reaching: Tensor, A: float = 0.0, dt: float = 1.0) -> _Probe:
    """All else is 1, and decays are 1 or nothing: results count the tokens that reach a token."""

    def filled(value: float, *shape: int) -> Tensor:
        return torch.full(shape, value, dtype=torch.float32, device="cpu")

    tokens = (BATCH, SEQLEN)
    arguments: dict[str, Any] = {
        "x": filled(1, *tokens, NHEADS, HEADDIM),
        "dt": filled(dt, *tokens, NHEADS),
        "A": filled(A, NHEADS),
        "B": filled(1, *tokens, NGROUPS, D_STATE),
        "C": filled(1, *tokens, NGROUPS, D_STATE),
        "shift": shift,
    }
    y = (dt * D_STATE * reaching)[:, None, None].expand(arguments["x"].shape)
    exact = {"y": y, "grad_x": y}  # a token reaches as many as reach it
    if A * dt < -1000:  # exp of it is 0 in every dtype
        exact["grad_A"] = torch.zeros(NHEADS, dtype=torch.float64, device="cpu")
    suffix = " shifted" if shift else ""
    return _Probe(name + suffix, arguments, (torch.ones_like(arguments["x"]),), exact)


def _random() -> _Probe:
    """Hydra's form and more: packed, shifted, gated, own reverse parameters, states in and out."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

    x_shape = (1, SEQLEN, NHEADS, HEADDIM)
    state_shape = (len(CU_SEQLENS) - 1, NHEADS, HEADDIM, D_STATE)
    arguments: dict[str, Any] = {
        "x": normal(*x_shape),
        "D": normal(NHEADS, HEADDIM),
        "z": normal(*x_shape),
        "cu_seqlens": torch.tensor(CU_SEQLENS, device="cpu"),
        "shift": True,
        "dt_softplus": True,
        "return_final_states": True,
    }
    for suffix in ("", "_rev"):
        arguments |= {
            "dt" + suffix: normal(1, SEQLEN, NHEADS),
            "A" + suffix: -normal(NHEADS).exp(),
            "B" + suffix: normal(1, SEQLEN, NGROUPS, D_STATE),
            "C" + suffix: normal(1, SEQLEN, NGROUPS, D_STATE),
            "dt_bias" + suffix: normal(NHEADS),
            "initial_states" + suffix: normal(*state_shape),
        }
    cotangents = (normal(*x_shape), normal(*state_shape), normal(*state_shape))
    wide = {
        name: value.double() if _is_float(value) else value for name, value in arguments.items()
    }
    exact = _evaluate(reference.bidi_ssd, wide, [cotangent.double() for cotangent in cotangents])
    return _Probe("random", arguments, cotangents, exact)


def _check_on(device: torch.device, backend: str, probes: Sequence[_Probe]) -> list[CheckRow]:
    rows = [_check_probe(device, backend, probe) for probe in probes]
    if all(row.passed is None and row.reason == rows[0].reason for row in rows):
        return [replace(rows[0], probe="all")]
    return rows


def _check_probe(device: torch.device, backend: str, probe: _Probe) -> CheckRow:
    row = CheckRow(backend, str(device), probe.name, "float32", passed=None)
    there = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in probe.arguments.items()
    }
    cotangents = [cotangent.to(device) for cotangent in probe.cotangents]
    try:
        got = _evaluate(partial(bidi_ssd, backend=backend), there, cotangents)
        errors = {name: _error(got[name], exact) for name, exact in probe.exact.items()}
    except BackendError as refusal:
        return replace(row, reason="; ".join(refusal.reasons.values()))
    # Whatever it is, it belongs in the report, and the other backends have their turn.
    except Exception as raised:
        return replace(row, passed=False, reason=f"{type(raised).__name__}: {raised}")
    limits = {name: _limit(name, device) for name in errors}
    worst = max(errors, key=lambda name: errors[name] / limits[name])
    error, limit = errors[worst], limits[worst]
    return replace(row, passed=error <= limit, error=error, limit=limit, worst=worst)


def _evaluate(
    function: Callable[..., Any], arguments: dict[str, Any], cotangents: Sequence[Tensor]
) -> Results:
    """Outputs and gradients of a call."""
    leaves = {
        name: value.detach().requires_grad_()
        for name, value in arguments.items()
        if _is_float(value)
    }
    with torch.enable_grad():
        outputs = function(**{**arguments, **leaves})
        outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        grads = torch.autograd.grad(outputs, list(leaves.values()), cotangents)
    results = {name: t.detach() for name, t in zip(OUTPUTS, outputs, strict=False)}
    return results | {f"grad_{name}": grad for name, grad in zip(leaves, grads, strict=True)}


def _error(got: Tensor, exact: Tensor) -> float:
    """‖got − exact‖ / ‖exact‖; infinity where that is no number."""
    if got.shape != exact.shape:
        raise ValueError(f"shape {tuple(got.shape)} instead of {tuple(exact.shape)}")
    difference = torch.linalg.vector_norm(got.cpu().double() - exact).item()
    if difference == 0:
        return 0.0
    size = torch.linalg.vector_norm(exact).item()
    return difference / size if size and math.isfinite(difference) else math.inf


def _limit(name: str, device: torch.device) -> float:
    if tf32_allowed(device):
        return TF32
    return FLOAT32_STEPS if name in STEPS else FLOAT32


def _is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _default_devices() -> list[torch.device]:
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices.append(torch.device("cuda", torch.cuda.current_device()))
    return devices


def _cells(row: CheckRow) -> tuple[str, ...]:
    error, limit = ("-" if v is None else f"{v:.1e}" for v in (row.error, row.limit))
    note = " ".join((row.reason or row.worst or "").split())
    result = f"{row.result}: {note}" if row.passed is not True else row.result
    return (row.backend, row.device, row.probe, row.dtype, error, limit, result)
