"""Fused bidirectional state-space scans: Mamba-2's SSD in both directions, Hydra's shift included.

:func:`bidi_ssd` is the operation, :func:`ssd` one direction of it. :func:`explain` tells which
backend a call would take and why, :func:`available_backends` what is installed, :func:`check`
whether it computes the right thing on this machine.
"""

from importlib.metadata import version

from .api import bidi_ssd, explain, ssd
from .checking import CheckReport, check
from .dispatch import BackendInfo, Explanation, available_backends, use_backend
from .errors import (
    BackendError,
    BackendUnavailable,
    PolyscanError,
    SecondDerivativeError,
    TransformError,
    UnsupportedProblem,
)

__version__ = version("polyscan")

__all__ = [
    "BackendError",
    "BackendInfo",
    "BackendUnavailable",
    "CheckReport",
    "Explanation",
    "PolyscanError",
    "SecondDerivativeError",
    "TransformError",
    "UnsupportedProblem",
    "__version__",
    "available_backends",
    "bidi_ssd",
    "check",
    "explain",
    "ssd",
    "use_backend",
]
