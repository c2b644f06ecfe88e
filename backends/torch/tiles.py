"""Reads the arguments chunk by chunk, in the form in which both directions are the same.

Per chunk and head, with ``log_decay = dt A`` summed *along the direction* from the border where the
state enters (inclusive: the token's own decay counts; exclusive: it does not)::

    row_i = inclusive_i, or with the shift exclusive_i       col_j = inclusive_j
    y_i  += sum_j (C_source(i) · B_j) exp(row_i - col_j) dt_j x_j    over the j that i sees
    y_i  += exp(row_i) state C_source(i)                             the entering state
    state' = exp(total) state + sum_j exp(total - col_j) dt_j x_j B_jᵀ      the leaving state

where source(i) is i or, with the shift, the token before i in the direction. So the shift is an
offset when C is read, an exclusive instead of an inclusive sum, and a stricter mask.

Sums of logarithms are kept in float64 where the device has it: a chunk may hold both -1e6 and
-0.01, and the difference of two float32 sums would lose the small one.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from polyscan.hardware import has_float64
from polyscan.problem import Direction, SSDInputs, SSDOutputs, SSDProblem
from polyscan.reference import compute_dtype, discretise

from .._shared.elementwise import gate_backward
from .chunks import cut

# exp underflows to 0 below this in float64, and sooner in float32. A stronger decay would only cost
# the sums digits, or give inf - inf.
STRONGEST_LOG_DECAY = -750.0


class Decay(NamedTuple):
    """Sums in a chunk: row and col (chunks, nheads, size), total (chunks, nheads, 1)."""

    row: Tensor
    col: Tensor
    total: Tensor

    def enter(self, dtype: torch.dtype) -> Tensor:
        """exp(row): what is left at each row of the entering state."""
        return self.row.exp().to(dtype)

    def leave(self, dtype: torch.dtype) -> Tensor:
        """exp(total - col): what is left of each column in the leaving state."""
        return (self.total - self.col).exp().to(dtype)

    def across(self, dtype: torch.dtype) -> Tensor:
        """exp(total): what is left of the entering state in the leaving one."""
        return self.total.exp().to(dtype)


class Side(NamedTuple):
    """One direction's share of a block of chunks.

    dt (chunks, nheads, size); B and C (chunks, ngroups, size, d_state), C of the source row and
    zero where there is none.
    """

    dt: Tensor
    B: Tensor
    C: Tensor
    decay: Decay


class Tiles:
    """The arguments of a call, read block by block."""

    def __init__(self, problem: SSDProblem, inputs: SSDInputs) -> None:
        self.problem = problem
        self.inputs = inputs
        self.dtype = compute_dtype(problem)
        self.chunks = cut(problem, inputs)
        self._steps: dict[tuple[str, str], Tensor] = {}
        size, device = self.chunks.size, problem.device
        self._order = torch.ones(size, size, dtype=torch.bool, device=device)

    def blocks(self) -> list[slice]:
        return list(self.chunks.blocks(self.problem.nheads, self.dtype.itemsize))

    def step_sizes(self, direction: Direction) -> Tensor:
        """dt after bias, softplus and clamp: (batch, seqlen, nheads)."""
        key = (direction.dt, direction.dt_bias)
        if key not in self._steps:
            given = direction.parameters(self.inputs)
            self._steps[key] = discretise(
                given.dt,
                given.dt_bias,
                self.problem.dt_softplus,
                self.problem.dt_limit,
                self.problem.accumulation_dtype,
            )
        return self._steps[key]

    def read(self, argument: Tensor, block: slice, offset: int = 0) -> Tensor:
        """(batch, seqlen, ...) -> (chunks, size, ...), in the dtype of the computation."""
        return self.chunks.take(argument.flatten(0, 1), block, offset).to(self.dtype)

    def heads_first(self, argument: Tensor, block: slice) -> Tensor:
        """(batch, seqlen, nheads, n) -> (chunks, nheads, size, n), contiguous."""
        return self.read(argument, block).transpose(1, 2).contiguous()

    def side(self, direction: Direction, block: slice) -> Side:
        given = direction.parameters(self.inputs)
        dt = self.read(self.step_sizes(direction), block).transpose(1, 2)
        return Side(
            dt,
            self.read(given.B, block).transpose(1, 2),
            self.read(given.C, block, self.source_offset(direction)).transpose(1, 2),
            self._decay(dt, given.A, direction.reverse),
        )

    def source_offset(self, direction: Direction) -> int:
        """Where a row's C stands, relative to the row."""
        if not self.problem.shift:
            return 0
        return 1 if direction.reverse else -1

    def sees(self, direction: Direction) -> Tensor:
        """(size, size): [i, j], whether the source of row i comes at or after column j.

        The same matrix tells whether row i's decay holds that of token k: [i, k].
        """
        strict = 1 if self.problem.shift else 0
        return self._order.triu(strict) if direction.reverse else self._order.tril(-strict)

    def beyond(self, direction: Direction) -> Tensor:
        """(size, size): [j, k], whether token k comes after column j, and so decays it."""
        return self._order.tril(-1) if direction.reverse else self._order.triu(1)

    def weights(self, direction: Direction, side: Side, block: slice) -> Tensor:
        """exp(row_i - col_j) where row i sees column j, else 0: (chunks, nheads, size, size)."""
        row, col, _ = side.decay
        exponent = torch.empty(*row.shape, row.shape[-1], dtype=self.dtype, device=row.device)
        torch.sub(row[..., :, None], col[..., None, :], out=exponent)
        hidden = ~self.sees(direction)
        if self.chunks.segment is not None:
            segment = self.chunks.take(self.chunks.segment, block)
            hidden = (hidden | (segment[:, :, None] != segment[:, None, :]))[:, None]
        # Masked before the exponential: what is not seen may be as large as exp(1e6).
        return exponent.masked_fill_(hidden, -torch.inf).exp_()

    def output_gradient(
        self, pre_gate: Tensor | None, grads: SSDOutputs, block: slice
    ) -> tuple[Tensor, Tensor | None]:
        """The gradient before the gate, and that of z: (chunks, size, nheads, headdim)."""
        dy = self.read(grads.y, block)
        if self.inputs.z is None or pre_gate is None:
            return dy, None
        return gate_backward(dy, self.read(self.inputs.z, block), self.read(pre_gate, block))

    def _decay(self, dt: Tensor, A: Tensor, reverse: bool) -> Decay:
        wide = torch.float64 if has_float64(dt.device) else dt.dtype
        log_decay = dt.to(wide) * A.to(self.problem.accumulation_dtype).to(wide)[:, None]
        log_decay = log_decay.clamp(min=STRONGEST_LOG_DECAY)
        if reverse:
            inclusive = log_decay.flip(-1).cumsum(-1).flip(-1)
            exclusive = F.pad(inclusive[..., 1:], (0, 1))
            total = inclusive[..., :1]
        else:
            inclusive = log_decay.cumsum(-1)
            exclusive = F.pad(inclusive[..., :-1], (1, 0))
            total = inclusive[..., -1:]
        return Decay(exclusive if self.problem.shift else inclusive, inclusive, total)
