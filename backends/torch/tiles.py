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

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from polyscan.hardware import has_float64
from polyscan.problem import Direction, SSDInputs, SSDProblem
from polyscan.reference import compute_dtype, discretise

from .._shared.elementwise import gate_backward
from .chunks import cut

# 2 to this power is 0 in float64, and sooner in float32. A stronger decay would only cost the sums
# digits, or give inf - inf.
STRONGEST_LOG2_DECAY = -1080.0


class Decay(NamedTuple):
    """A direction's decays in a block of chunks, from sums of the logarithms to base 2.

    Powers of 2, because torch's exp is tens of times slower where it under- or overflows.

    row, col: (chunks, nheads, size), the sums, wide.
    enter: (chunks, nheads, size), exp(row): what is left at each row of the entering state.
    leave: (chunks, nheads, size), exp(total - col): what is left of a column in the leaving state.
    across: (chunks, nheads, 1), exp(total): what is left of the entering state in the leaving one.
    """

    row: Tensor
    col: Tensor
    enter: Tensor
    leave: Tensor
    across: Tensor

    def between(self, out: Tensor) -> Tensor:
        """exp(row_i - col_j), also where it overflows: (chunks, nheads, size, size)."""
        row, col = self.row.to(out.dtype), self.col.to(out.dtype)
        torch.sub(row[..., :, None], col[..., None, :], out=out)
        if row.dtype != self.row.dtype:
            # The digits that did not fit into row and col, one after the other: in two cheap
            # passes what a subtraction in float64 would do in one slow one.
            out += (self.row - row).to(out.dtype)[..., :, None]
            out -= (self.col - col).to(out.dtype)[..., None, :]
        return out.exp2_()


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

    def __init__(self, problem: SSDProblem, inputs: SSDInputs, dy: Tensor | None = None) -> None:
        self.problem = problem
        self.inputs = inputs
        self.dtype = compute_dtype(problem)
        self.chunks = cut(problem, inputs, dy)
        # Flattened once, since that is a copy where the strides do not allow a view.
        self.rows = {
            name: argument.flatten(0, 1)
            for name, argument in zip(inputs._fields, inputs, strict=True)
            if argument is not None and argument.shape[:2] == inputs.x.shape[:2]
        }
        self._steps: dict[tuple[str, str], Tensor] = {}
        self._sides: dict[tuple[Direction, int], Side] = {}
        self._buffers: dict[str, Tensor] = {}

    def blocks(self) -> list[slice]:
        return list(self.chunks.blocks(self.problem.nheads, self.dtype.itemsize))

    def scratch(self, name: str, *shape: int) -> Tensor:
        """An uninitialised buffer that every block of the call gets again under that name.

        Memory fresh from the system costs more than the arithmetic that is done in it.
        """
        size = math.prod(shape)
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers[name] = self.inputs.x.new_empty(size, dtype=self.dtype)
        return self._buffers[name][:size].view(shape)

    def square(self, name: str, block: slice) -> Tensor:
        """A buffer (chunks, nheads, size, size)."""
        size = self.chunks.size
        return self.scratch(name, block.stop - block.start, self.problem.nheads, size, size)

    def wide(self, name: str, block: slice, width: int) -> Tensor:
        """A buffer (chunks, nheads, size, width)."""
        chunks = block.stop - block.start
        return self.scratch(name, chunks, self.problem.nheads, self.chunks.size, width)

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

    def read(self, rows: Tensor, block: slice, offset: int = 0) -> Tensor:
        """(batch * seqlen, ...) -> (chunks, size, ...), in the dtype of the computation."""
        return self.chunks.take(rows, block, offset).to(self.dtype)

    def heads_first(self, name: str, rows: Tensor) -> Tensor:
        """(chunks, size, nheads, n) -> (chunks, nheads, size, n), contiguous, in a buffer."""
        chunks, size, nheads, width = rows.shape
        return self.scratch(name, chunks, nheads, size, width).copy_(rows.transpose(1, 2))

    def x(self, block: slice) -> Tensor:
        """x of a block: (chunks, nheads, size, headdim)."""
        return self.heads_first("x", self.chunks.take(self.rows["x"], block))

    def side(self, direction: Direction, block: slice) -> Side:
        """A direction's share of a block; kept, since every block is visited more than once."""
        key = (direction, block.start)
        if key not in self._sides:
            dt = self.read(self.step_sizes(direction).flatten(0, 1), block)
            dt = dt.transpose(1, 2).contiguous()
            B = self.read(self.rows[direction.B], block)
            C = self.read(self.rows[direction.C], block, self.source_offset(direction))
            A = direction.parameters(self.inputs).A
            decay = self._decay(dt, A, direction.reverse)
            self._sides[key] = Side(dt, B.transpose(1, 2), C.transpose(1, 2), decay)
        return self._sides[key]

    def source_offset(self, direction: Direction) -> int:
        """Where a row's C stands, relative to the row."""
        if not self.problem.shift:
            return 0
        return 1 if direction.reverse else -1

    def hide(self, direction: Direction, square: Tensor) -> Tensor:
        """Zero, in place, where the source of row i comes before column j: (..., size, size)."""
        strict = 1 if self.problem.shift else 0
        # Overwritten, not multiplied by 0: what is not seen may have overflowed.
        return square.triu_(strict) if direction.reverse else square.tril_(-strict)

    def weights(self, direction: Direction, side: Side, block: slice, out: Tensor) -> Tensor:
        """exp(row_i - col_j) where row i sees column j, else 0: (chunks, nheads, size, size)."""
        return self._hide_all(direction, block, side.decay.between(out))

    def scores(self, direction: Direction, side: Side, block: slice) -> Tensor:
        """C of row i's source times B_j where row i sees it, else 0: (chunks, ngroups, size, size).

        Zero although the weights are: a product that nobody sees may be infinite.
        """
        return self._hide_all(direction, block, side.C @ side.B.mT)

    def _hide_all(self, direction: Direction, block: slice, square: Tensor) -> Tensor:
        square = self.hide(direction, square)
        if self.chunks.segment is not None:
            segment = self.chunks.take(self.chunks.segment, block)
            square.masked_fill_((segment[:, :, None] != segment[:, None, :])[:, None], 0)
        return square

    def _decay(self, dt: Tensor, A: Tensor, reverse: bool) -> Decay:
        wide = torch.float64 if has_float64(dt.device) else dt.dtype
        log_decay = dt.to(wide) * (A.to(wide) * math.log2(math.e))[:, None]
        log_decay = log_decay.clamp_(min=STRONGEST_LOG2_DECAY)
        if reverse:
            inclusive = log_decay.flip(-1).cumsum(-1).flip(-1)
            exclusive = F.pad(inclusive[..., 1:], (0, 1))
            total = inclusive[..., :1]
        else:
            inclusive = log_decay.cumsum(-1)
            exclusive = F.pad(inclusive[..., :-1], (1, 0))
            total = inclusive[..., -1:]
        row = exclusive if self.problem.shift else inclusive
        return Decay(
            row=row,
            col=inclusive,
            enter=row.exp2().to(self.dtype),
            leave=(total - inclusive).exp2().to(self.dtype),
            across=total.exp2().to(self.dtype),
        )


def add_product(out: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """``out += left @ right`` without a temporary; all (chunks, nheads, ..., ...)."""
    out.flatten(0, 1).baddbmm_(left.flatten(0, 1), right.flatten(0, 1))
    return out


class OutputGradient:
    """dy as the scan sees it, before the gate, and dz."""

    def __init__(self, tiles: Tiles, pre_gate: Tensor | None, dy: Tensor) -> None:
        self._tiles = tiles
        self._dy = dy.flatten(0, 1)
        self._pre_gate = None if pre_gate is None else pre_gate.flatten(0, 1)

    def read(self, block: slice) -> tuple[Tensor, Tensor | None]:
        """(chunks, size, nheads, headdim), both."""
        tiles = self._tiles
        dy = tiles.read(self._dy, block)
        if self._pre_gate is None:
            return dy, None
        z = tiles.read(tiles.rows["z"], block)
        return gate_backward(dy, z, tiles.read(self._pre_gate, block))
