"""What passes between chunks: the states, and in the backward pass their adjoints.

Both are the same two steps. A chunk's summary is ``S = sum_i w_i value_i key_iᵀ``; along a run,
``leaving = exp(total) entering + S``. For a state, values are x and keys B, weighted by what is
left of a column in the leaving state, and it passes in the direction of the scan. For an adjoint,
values are dy and keys C, weighted by what is left of the entering state in a row, and it passes the
other way.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from polyscan.problem import Direction

from .chunks import Chunks
from .tiles import OutputGradient, Side, Tiles


class Passed(NamedTuple):
    """States (or adjoints) after passing.

    entering: (chunks, nheads, headdim, d_state), for each chunk; None where all are zero.
    leaving: (nsequences, nheads, headdim, d_state), at the end of each sequence; None where
        nobody asked for them.
    """

    entering: Tensor | None
    leaving: Tensor | None


def per_head(rows: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """rows (chunks, ngroups, size, n) times weight (chunks, nheads, size), for each head."""
    chunks, ngroups, size, width = rows.shape
    grouped = weight.view(chunks, ngroups, -1, size, 1)
    torch.mul(rows[:, :, None], grouped, out=out.view(chunks, ngroups, -1, size, width))
    return out


def pass_states(
    tiles: Tiles, direction: Direction, initial: Tensor | None, wants_leaving: bool
) -> Passed:
    """The states of one direction."""

    def summary(side: Side, block: slice) -> tuple[Tensor, Tensor, Tensor]:
        return tiles.x(block), side.B, side.dt * side.decay.leave(tiles.dtype)

    return _pass(tiles, direction, summary, direction.reverse, initial, wants_leaving)


def pass_adjoints(
    tiles: Tiles,
    direction: Direction,
    output_gradient: OutputGradient,
    final: Tensor | None,
    wants_leaving: bool,
) -> Passed:
    """The gradients of the states; ``final``, those of the final states, is where they start."""

    def summary(side: Side, block: slice) -> tuple[Tensor, Tensor, Tensor]:
        dy, _ = output_gradient.read(block)
        return tiles.heads_first("dy", dy), side.C, side.decay.enter(tiles.dtype)

    return _pass(tiles, direction, summary, not direction.reverse, final, wants_leaving)


def _pass(
    tiles: Tiles,
    direction: Direction,
    summary: Callable[[Side, slice], tuple[Tensor, Tensor, Tensor]],
    reverse: bool,
    initial: Tensor | None,
    wants_leaving: bool,
) -> Passed:
    """Summarise every chunk from its (values, keys, weights), then pass along the runs."""
    if not (tiles.chunks.linked or wants_leaving):
        return Passed(_spread(tiles.chunks, initial, tiles.dtype), None)
    problem, x, count = tiles.problem, tiles.inputs.x, tiles.chunks.count
    shape = (count, problem.nheads, problem.headdim, problem.d_state)
    summaries = x.new_empty(shape, dtype=tiles.dtype)
    across = x.new_empty((count, problem.nheads, 1), dtype=tiles.dtype)
    for block in tiles.blocks():
        side = tiles.side(direction, block)
        values, rows, weight = summary(side, block)
        keys = per_head(rows, weight, tiles.wide("keys", block, problem.d_state))
        torch.matmul(values.mT, keys, out=summaries[block])
        across[block] = side.decay.across(tiles.dtype)
    return _pass_on(tiles.chunks, summaries, across, reverse, initial, wants_leaving)


def _spread(chunks: Chunks, initial: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The entering states where every run is one chunk."""
    if initial is None:
        return None
    entering = initial.new_empty((chunks.count, *initial.shape[1:]), dtype=dtype)
    entering[chunks.run_start] = initial[chunks.run_state].to(dtype)
    return entering


def _pass_on(
    chunks: Chunks,
    summaries: Tensor,
    across: Tensor,
    reverse: bool,
    initial: Tensor | None,
    wants_leaving: bool,
) -> Passed:
    """Turn the summaries into the entering states, in place."""
    if initial is None:
        state = summaries.new_zeros((len(chunks.run_length), *summaries.shape[1:]))
    else:
        state = initial[chunks.run_state].to(summaries.dtype)
    for active, step in chunks.steps(reverse):
        entering = state[:active]
        leaving = torch.addcmul(summaries[step], across[step][..., None], entering)
        summaries[step] = entering
        entering.copy_(leaving)
    return Passed(summaries, state if wants_leaving else None)
