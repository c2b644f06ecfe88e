"""Loops in Python, compiled by Numba.

The CPU half is in ``cpu/``. Numba is imported on first use.
"""

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from torch import Tensor

from polyscan.problem import SSDInputs, SSDOutputs, SSDProblem


class NumbaBackend:
    name = "numba"

    def version(self) -> str:
        try:
            return "numba " + version("numba")
        except PackageNotFoundError:
            return "numba (not installed)"

    def unavailable_reason(self) -> str | None:
        if find_spec("numba") is None:
            return "numba is not installed: pip install polyscan[cpu]"
        return None

    def unsupported_reason(self, problem: SSDProblem) -> str | None:
        if problem.device.type != "cpu":
            return f"x is on {problem.device}, only cpu tensors are supported"
        return None

    def forward(self, problem: SSDProblem, inputs: SSDInputs) -> SSDOutputs:
        from .cpu import launch

        return launch.forward(problem, inputs)

    def backward(
        self, problem: SSDProblem, inputs: SSDInputs, pre_gate: Tensor | None, grads: SSDOutputs
    ) -> dict[str, Tensor]:
        from .cpu import launch

        return launch.backward(problem, inputs, pre_gate, grads)


BACKEND = NumbaBackend()
