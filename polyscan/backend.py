"""What a backend is: the contract between dispatch and the code that computes.

A backend is one object, named by an entry point of the group ``polyscan.backends``. It knows
nothing of autograd, of environment variables or of other backends.

A backend may assume that its tensors are valid (``polyscan.validation`` has run), that batch and
seqlen are at least 1, and that it runs without autograd and autocast. It must accept any strides,
read every input without writing to it, and return contiguous tensors of its own, fully written.
"""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from .problem import SSDInputs, SSDOutputs, SSDProblem


class Backend(Protocol):
    """One way to compute. ``name`` is the string that users pass as ``backend=``."""

    name: str

    def version(self) -> str:
        """Version of the library that this backend stands on, for people."""
        ...

    def unavailable_reason(self) -> str | None:
        """None where this backend can run on this machine, else why not.

        Missing libraries and missing hardware belong here. Imports the library lazily, allocates
        nothing, and answers the same every time.
        """
        ...

    def unsupported_reason(self, problem: SSDProblem) -> str | None:
        """None where this backend can do ``problem``, else every reason, with value and limit."""
        ...

    def forward(self, problem: SSDProblem, inputs: SSDInputs) -> SSDOutputs:
        """Compute the outputs; ``pre_gate`` only where ``problem.saves_pre_gate``."""
        ...

    def backward(
        self,
        problem: SSDProblem,
        inputs: SSDInputs,
        pre_gate: Tensor | None,
        grads: SSDOutputs,
    ) -> Mapping[str, Tensor]:
        """Gradients by argument name, each in its argument's shape and dtype.

        ``grads`` holds the gradients of the outputs: ``y`` always, the final states or None.
        Nothing else is carried over from the forward, so any backend's backward may follow any
        backend's forward. There is one for every floating-point argument that was given.
        """
        ...
