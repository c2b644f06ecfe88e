"""What ``python -m polyscan`` prints: versions, hardware, backends, and which one is chosen."""

import os
import platform
from importlib.metadata import packages_distributions, version
from textwrap import indent

import torch

import polyscan
from polyscan.dispatch import ENVIRONMENT_VARIABLE
from polyscan.hardware import describe_devices
from polyscan.text import aligned

Row = tuple[str, ...]

# Looked up by the name they are imported by: CuPy alone is distributed under several others.
LIBRARIES = ("triton", "cupy", "numba", "numpy")


def status() -> str:
    """The whole report, as text."""
    sections = {
        "versions": _versions(),
        "hardware": _hardware(),
        "backends": _backends(),
        "choice": _choice(),
    }
    return "\n\n".join(
        f"{title}\n{indent(aligned(rows), '  ')}" for title, rows in sections.items()
    )


def _versions() -> list[Row]:
    installed = packages_distributions()
    return [
        ("polyscan", polyscan.__version__),
        ("python", platform.python_version()),
        ("torch", torch.__version__),
        *((name, version(installed[name][0])) for name in LIBRARIES if name in installed),
    ]


def _hardware() -> list[Row]:
    return [(kind, what) for kind, _, what in (line.partition(": ") for line in describe_devices())]


def _backends() -> list[Row]:
    return [
        (backend.name, backend.version, backend.reason or "available")
        for backend in polyscan.available_backends().values()
    ]


def _choice() -> list[Row]:
    with polyscan.use_backend("auto"):  # whatever the environment says
        auto, *reasons = str(_explain()).splitlines()
    return [
        *_environment(),
        ("auto", f"{auto}, for a small float32 problem on the CPU"),
        *(("", reason) for reason in reasons),
    ]


def _environment() -> list[Row]:
    name = os.environ.get(ENVIRONMENT_VARIABLE)
    rows: list[Row] = [(ENVIRONMENT_VARIABLE, name or "not set")]
    try:
        explanation = _explain()
    except ValueError as error:
        return [*rows, ("", f"error: {error}")]
    if explanation.backend is None:
        return [*rows, ("", f"error: cannot run this: {explanation.reasons[str(name)]}")]
    return rows


def _explain() -> polyscan.Explanation:
    x = torch.ones(1, 64, 4, 16)  # (batch, seqlen, nheads, headdim)
    dt = torch.ones(1, 64, 4)  # (batch, seqlen, nheads)
    A = -torch.ones(4)  # (nheads,)
    B = C = torch.ones(1, 64, 1, 16)  # (batch, seqlen, ngroups, d_state)
    return polyscan.explain(x, dt, A, B, C)
