"""Chunked matrix products in plain PyTorch: runs on any device that torch has.

The sequence is cut into chunks; within a chunk both directions become one matrix
(``tiles.py``), and between chunks only the states pass (``states.py``). Memory is linear in
seqlen: a state per chunk, and blocks of chunks small enough for a processor's cache.

Packed sequences are cut on the host, so on a GPU each call reads the borders back once.
"""

import torch
from torch import Tensor

from polyscan.problem import SSDInputs, SSDOutputs, SSDProblem

from .backward import backward
from .forward import forward


class TorchBackend:
    name = "torch"

    def version(self) -> str:
        return f"torch {torch.__version__}"

    def unavailable_reason(self) -> None:
        return None

    def unsupported_reason(self, problem: SSDProblem) -> str | None:
        wide = torch.float64 in (problem.x_dtype, problem.product_dtype)
        if wide and problem.device.type == "mps":
            return "dtype is float64, which mps devices do not have"
        return None

    def forward(self, problem: SSDProblem, inputs: SSDInputs) -> SSDOutputs:
        return forward(problem, inputs)

    def backward(
        self, problem: SSDProblem, inputs: SSDInputs, pre_gate: Tensor | None, grads: SSDOutputs
    ) -> dict[str, Tensor]:
        return backward(problem, inputs, pre_gate, grads)


BACKEND = TorchBackend()
