"""A place to add gradients up in."""

import torch
from torch import Tensor

from polyscan.problem import SSDInputs


class GradientSums:
    """Gradients by argument name, summed in one dtype and handed out in each argument's own.

    Both directions add under the names that they read, so a shared argument gets the sum.
    """

    def __init__(self, inputs: SSDInputs, dtype: torch.dtype) -> None:
        self._inputs = inputs
        self._dtype = dtype
        self._sums: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        """The running sum, zero to begin with; add to it in place."""
        if name not in self._sums:
            argument = getattr(self._inputs, name)
            self._sums[name] = argument.new_zeros(argument.shape, dtype=self._dtype)
        return self._sums[name]

    def result(self) -> dict[str, Tensor]:
        """A gradient for every floating-point argument that was given."""
        return {
            name: self[name].to(argument.dtype)
            for name, argument in zip(self._inputs._fields, self._inputs, strict=True)
            if argument is not None and argument.is_floating_point()
        }
