"""A place to add gradients up in."""

import torch
from torch import Tensor

from polyscan.problem import Direction, SSDInputs, SSDProblem
from polyscan.reference import covered_rows

from .elementwise import discretise_backward


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

    def add_step_sizes(self, problem: SSDProblem, direction: Direction, ddt: Tensor) -> None:
        """Take a direction's gradient of dt after clamp, softplus and bias back to before them.

        ddt (batch, seqlen, nheads); rows that no sequence covers give nothing, whatever is there.
        """
        given = direction.parameters(self._inputs)
        ddt = discretise_backward(
            ddt, given.dt, given.dt_bias, problem.dt_softplus, problem.dt_limit
        )
        ddt = covered_rows(problem, self._inputs, ddt)
        self[direction.dt].add_(ddt)
        if given.dt_bias is not None:
            self[direction.dt_bias].add_(ddt.sum((0, 1)))

    def result(self, **ready: Tensor) -> dict[str, Tensor]:
        """A gradient for every floating-point argument that was given.

        ``ready`` are those that needed no sum, in their arguments' dtypes.
        """
        return {
            name: ready[name] if name in ready else self[name].to(argument.dtype)
            for name, argument in zip(self._inputs._fields, self._inputs, strict=True)
            if argument is not None and argument.is_floating_point()
        }
