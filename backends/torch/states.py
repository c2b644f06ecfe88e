"""What passes between chunks: the states, and in the backward pass their adjoints.

Both are the same two steps. A chunk's summary is ``S = sum_i w_i value_i key_iᵀ``; along a run,
``leaving = exp(total) entering + S``. For a state, values are x and keys B, weighted by what is
left of a column in the leaving state, and it passes in the direction of the scan. For an adjoint,
values are dy and keys C, weighted by what is left of the entering state in a row, and it passes the
other way.
"""

import torch
from torch import Tensor

from .tiles import OutputGradient, Tiles


def per_head(rows: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """rows (chunks, ngroups, size, n) times weight (chunks, nheads, size), for each head."""
    chunks, ngroups, size, width = rows.shape
    grouped = weight.view(chunks, ngroups, -1, size, 1)
    torch.mul(rows[:, :, None], grouped, out=out.view(chunks, ngroups, -1, size, width))
    return out


class Passage:
    """States or adjoints on their way along the runs of chunks.

    ``entering`` then has them for each chunk, (chunks, nheads, headdim, d_state), and is None where
    all are zero; ``leaving`` has them at the end of each run, where that is wanted.
    """

    def __init__(
        self, tiles: Tiles, reverse: bool, initial: Tensor | None, wants_leaving: bool
    ) -> None:
        self.tiles = tiles
        self.reverse = reverse
        self.initial = initial
        self.wants_leaving = wants_leaving
        self.entering: Tensor | None = None
        self.leaving: Tensor | None = None
        problem = tiles.problem
        self.moves = tiles.chunks.linked or wants_leaving
        if self.moves or initial is not None:
            shape = (tiles.chunks.count, problem.nheads, problem.headdim, problem.d_state)
            self.entering = tiles.inputs.x.new_empty(shape, dtype=tiles.dtype)

    def summarise(self, block: slice, values: Tensor, keys: Tensor, weight: Tensor) -> None:
        """values (chunks, nheads, size, headdim), keys (chunks, ngroups, size, d_state)."""
        if self.moves and self.entering is not None:
            weighted = self.tiles.wide("keys", block, self.tiles.problem.d_state)
            per_head(keys, weight, weighted)
            torch.matmul(values.mT, weighted, out=self.entering[block])

    def pass_on(self, across: Tensor) -> None:
        """Turn the summaries into what enters each chunk, in place."""
        chunks = self.tiles.chunks
        if self.entering is None:
            return
        if self.initial is None:
            state = self.entering.new_zeros((len(chunks.run_length), *self.entering.shape[1:]))
        else:
            state = self.initial[chunks.run_state].to(self.entering.dtype)
        if not self.moves:
            self.entering[chunks.run_start] = state
            return
        for active, step in chunks.steps(self.reverse):
            moving = state[:active]
            leaving = torch.addcmul(self.entering[step], across[step][..., None], moving)
            self.entering[step] = moving
            if active == len(state):
                state = leaving
            else:
                moving.copy_(leaving)
        if self.wants_leaving:
            self.leaving = state


def pass_all(
    tiles: Tiles,
    states: list[Passage],
    adjoints: list[Passage] | None = None,
    output_gradient: OutputGradient | None = None,
) -> None:
    """Summarise every chunk for all that passes, one passage per direction, then pass it on."""
    directions, x = tiles.problem.directions, tiles.inputs.x
    shape = (len(directions), tiles.chunks.count, tiles.problem.nheads, 1)
    across = x.new_empty(shape, dtype=tiles.dtype)
    states_move = any(passage.moves for passage in states)
    adjoints_move = any(passage.moves for passage in adjoints or ())
    for block in tiles.blocks() if states_move or adjoints_move else ():
        for direction, left in zip(directions, across, strict=True):
            left[block] = tiles.side(direction, block).decay.across
        if states_move:
            values = tiles.x(block)
            for direction, passage in zip(directions, states, strict=True):
                side = tiles.side(direction, block)
                passage.summarise(block, values, side.B, side.dt * side.decay.leave)
        if adjoints_move and output_gradient is not None:
            values = tiles.heads_first("dy", output_gradient.read(block)[0])
            for direction, passage in zip(directions, adjoints or (), strict=True):
                side = tiles.side(direction, block)
                passage.summarise(block, values, side.C, side.decay.enter)
    for passages in (states, adjoints or ()):
        for passage, left in zip(passages, across, strict=False):
            passage.pass_on(left)
