"""What passes between chunks: the states, and in the backward pass their adjoints.

Both are the same two steps. A chunk's summary is ``S = sum_i w_i value_i key_iᵀ``; along a run,
``leaving = exp(total) entering + S``. For a state, values are x and keys B, weighted by what is
left of a column in the leaving state, and it passes in the direction of the scan. For an adjoint,
values are dy and keys C, weighted by what is left of the entering state in a row, and it passes the
other way.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from polyscan.problem import Direction, SSDOutputs

from .chunks import Chunks
from .tiles import Tiles


class Passed(NamedTuple):
    """States (or adjoints) after passing.

    entering: (chunks, nheads, headdim, d_state), for each chunk; None where all are zero.
    leaving: (nsequences, nheads, headdim, d_state), at the end of each sequence; None where
        nobody asked for them.
    """

    entering: Tensor | None
    leaving: Tensor | None


def per_head(rows: Tensor, weight: Tensor) -> Tensor:
    """rows (chunks, ngroups, size, n) times weight (chunks, nheads, size), for each head."""
    chunks, ngroups, size, _ = rows.shape
    grouped = weight.view(chunks, ngroups, -1, size, 1)
    return (rows[:, :, None] * grouped).flatten(1, 2)


def pass_states(
    tiles: Tiles, direction: Direction, initial: Tensor | None, wants_leaving: bool
) -> Passed:
    """The states of one direction."""
    if not (tiles.chunks.linked or wants_leaving):
        return Passed(_spread(tiles.chunks, initial, tiles.dtype), None)
    summaries, across = _empty(tiles)
    for block in tiles.blocks():
        side = tiles.side(direction, block)
        keys = per_head(side.B, side.dt * side.decay.leave(tiles.dtype))
        values = tiles.heads_first(tiles.inputs.x, block)
        torch.matmul(values.mT, keys, out=summaries[block])
        across[block] = side.decay.across(tiles.dtype)
    return _pass_on(tiles.chunks, summaries, across, direction.reverse, initial, wants_leaving)


def pass_adjoints(
    tiles: Tiles,
    direction: Direction,
    pre_gate: Tensor | None,
    grads: SSDOutputs,
    wants_leaving: bool,
) -> Passed:
    """The gradients of the states: they start from those of the final states."""
    final = getattr(grads, direction.final_states)
    if not (tiles.chunks.linked or wants_leaving):
        return Passed(_spread(tiles.chunks, final, tiles.dtype), None)
    summaries, across = _empty(tiles)
    for block in tiles.blocks():
        side = tiles.side(direction, block)
        keys = per_head(side.C, side.decay.enter(tiles.dtype))
        dy, _ = tiles.output_gradient(pre_gate, grads, block)
        torch.matmul(dy.permute(0, 2, 3, 1), keys, out=summaries[block])
        across[block] = side.decay.across(tiles.dtype)
    return _pass_on(tiles.chunks, summaries, across, not direction.reverse, final, wants_leaving)


def _empty(tiles: Tiles) -> tuple[Tensor, Tensor]:
    problem, count = tiles.problem, tiles.chunks.count
    shape = (count, problem.nheads, problem.headdim, problem.d_state)
    x = tiles.inputs.x
    return (
        x.new_empty(shape, dtype=tiles.dtype),
        x.new_empty((count, problem.nheads, 1), dtype=tiles.dtype),
    )


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
    for step in chunks.steps(reverse):
        entering = state[: len(step)]
        leaving = torch.addcmul(summaries[step], across[step][..., None], entering)
        summaries[step] = entering
        state[: len(step)] = leaving
    return Passed(summaries, state if wants_leaving else None)
