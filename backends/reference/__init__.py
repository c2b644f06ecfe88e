"""The yardstick: one token after the other, on any device, in any dtype.

The forward is ``polyscan.reference``. The backward is the recurrence of the adjoint state written
out, since a backend cannot call autograd; the tests hold it to autograd over the same forward.
"""

import torch
from torch import Tensor

from polyscan import reference
from polyscan.problem import SSDInputs, SSDOutputs, SSDProblem

from .backward import backward


class ReferenceBackend:
    name = "reference"

    def version(self) -> str:
        return f"torch {torch.__version__}"

    def unavailable_reason(self) -> None:
        return None

    def unsupported_reason(self, problem: SSDProblem) -> None:
        return None

    def forward(self, problem: SSDProblem, inputs: SSDInputs) -> SSDOutputs:
        return reference.evaluate(problem, inputs)

    def backward(
        self, problem: SSDProblem, inputs: SSDInputs, pre_gate: Tensor | None, grads: SSDOutputs
    ) -> dict[str, Tensor]:
        return backward(problem, inputs, pre_gate, grads)


BACKEND = ReferenceBackend()
