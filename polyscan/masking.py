"""Padding: ``mask`` is served here, above the backends, which never see a padded row.

The real tokens of each row move to its front, in their order; behind them the pads become tokens
that do nothing: x, B, C, z and the step size are 0. Afterwards y moves back. All of it stays on the
device, in differentiable torch operations, so pads get zero gradients and give nothing to a sum.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .problem import SSDInputs, SSDOptions, SSDProblem
from .reference import discretise

PER_TOKEN = ("x", "B", "C", "B_rev", "C_rev", "z", "seq_idx")


class Compacted(NamedTuple):
    """A call without padding, and what moves its y back to the padded rows."""

    inputs: SSDInputs
    options: SSDOptions
    position: Tensor

    def restore(self, y: Tensor) -> Tensor:
        """y (batch, seqlen, nheads, headdim) as the padded rows have it; pads are 0."""
        return _take(y, self.position)


def compact(inputs: SSDInputs, options: SSDOptions, mask: Tensor) -> Compacted:
    """The call that has only the tokens where ``mask`` (batch, seqlen) is True, and idle ones."""
    order = mask.logical_not().to(torch.uint8).argsort(dim=1, stable=True)
    position = order.argsort(dim=1)
    real = mask.gather(1, order)

    def move(tensor: Tensor) -> Tensor:
        moved = _take(tensor, order)
        return _idle(moved, real) if moved.is_floating_point() else moved

    def step_size(dt: Tensor, dt_bias: Tensor | None) -> Tensor:
        # Idle before the transform too: its derivative at what pads hold could be NaN.
        steps = discretise(move(dt), dt_bias, options.dt_softplus, limit, dtype)
        return _idle(steps, real)

    problem = SSDProblem.describe(inputs, options, needs_grad=False)
    limit, dtype = problem.dt_limit, problem.accumulation_dtype
    changed = {
        name: move(tensor) for name in PER_TOKEN if (tensor := getattr(inputs, name)) is not None
    }
    if inputs.D is not None and inputs.D.dim() == 3:
        changed["D"] = move(inputs.D)
    for direction in problem.directions:
        given = direction.parameters(inputs)
        differs = direction.reverse and (direction.dt, direction.dt_bias) != ("dt", "dt_bias")
        name = "dt_rev" if differs else "dt"
        if name not in changed:
            changed[name] = step_size(given.dt, given.dt_bias)
    if inputs.cu_seqlens is not None:
        borders = inputs.cu_seqlens
        before = torch.cat([mask.new_zeros(1, dtype=torch.int64), mask[0].cumsum(0)])
        changed["cu_seqlens"] = before[borders.long().clamp(0, mask.shape[1])].to(borders.dtype)
    inputs = inputs._replace(**changed, dt_bias=None, dt_bias_rev=None)
    options = options._replace(dt_softplus=False, dt_min=0.0, dt_max=math.inf)
    return Compacted(inputs, options, position)


def _idle(tensor: Tensor, real: Tensor) -> Tensor:
    """0 wherever the token is not real."""
    return tensor.masked_fill(~real.view(*real.shape, *[1] * (tensor.dim() - 2)), 0)


def _take(tensor: Tensor, index: Tensor) -> Tensor:
    """tensor[b, index[b, t]] for all b and t."""
    index = index.view(*index.shape, *[1] * (tensor.dim() - 2))
    return tensor.gather(1, index.expand(tensor.shape))
