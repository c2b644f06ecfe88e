"""Fused kernels in Triton, for NVIDIA and AMD GPUs.

A program holds a state in registers and walks along its sequence, or a unit of it where sequences
are few and long. ``plan.py`` decides on sizes, ``forward.py`` and ``backward.py`` launch, and
``kernels/`` has the mathematics, one step per file. Triton is imported on first use.

Under ``TRITON_INTERPRET=1`` the same kernels run on CPU tensors, in Python, where named.
"""

import os
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch
from torch import Tensor

from polyscan.problem import SSDInputs, SSDOutputs, SSDProblem

LARGEST_SIZE = 256


class TritonBackend:
    name = "triton"

    def version(self) -> str:
        try:
            return "triton " + version("triton")
        except PackageNotFoundError:
            return "triton (not installed)"

    def unavailable_reason(self) -> str | None:
        if find_spec("triton") is None:
            return "triton is not installed: pip install polyscan[triton]"
        if not interprets() and not torch.cuda.is_available():
            return "torch can use no GPU (TRITON_INTERPRET=1 runs the kernels in Python instead)"
        return None

    def unsupported_reason(self, problem: SSDProblem) -> str | None:
        reasons = []
        wanted = "cpu" if interprets() else "cuda"
        if problem.device.type != wanted:
            reasons.append(f"x is on {problem.device}, only {wanted} tensors are supported")
        if torch.float64 in (problem.x_dtype, problem.product_dtype):
            reasons.append("dtype is float64, at most float32 is supported")
        for name in ("headdim", "d_state"):
            size = getattr(problem, name)
            if size > LARGEST_SIZE:
                reasons.append(f"{name} is {size}, at most {LARGEST_SIZE} is supported")
        return "; ".join(reasons) or None

    def forward(self, problem: SSDProblem, inputs: SSDInputs) -> SSDOutputs:
        from .forward import forward

        return forward(problem, inputs)

    def backward(
        self, problem: SSDProblem, inputs: SSDInputs, pre_gate: Tensor | None, grads: SSDOutputs
    ) -> dict[str, Tensor]:
        from .backward import backward

        return backward(problem, inputs, pre_gate, grads)


@cache
def interprets() -> bool:
    """Whether Triton's interpreter was asked for. Triton reads this once as well."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on")


BACKEND = TritonBackend()
