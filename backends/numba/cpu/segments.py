"""What passes from tile to tile, and between the segments that a sequence is cut into.

A sequence is cut where batch and heads are few. A segment's summary is the state that it leaves
when zero enters. From the summaries of all and the decays across them, a short loop makes the state
that enters each.
"""

import numpy as np
from numba import njit, prange

from .products import FUNCTION, KERNEL, empty, zeros
from .tile import (
    advance,
    along,
    begins,
    copy,
    cut_into_tiles,
    new_shared,
    new_tile,
    read_columns,
    read_decays,
    read_rows,
    restart,
)


@njit(**KERNEL)
def compute_entering(
    entering, x, headdim, forwards, backwards, goes_forwards, goes_backwards, sequences, starts
):  # fmt: skip
    """Fill ``entering`` (2, batch, nheads, segments, d_state, headdim), padded, zero before."""
    _, batch, nheads, segments, d_state, width = entering.shape
    for task in prange(batch * nheads * segments):
        b, rest = divmod(np.int64(task), nheads * segments)
        h, s = divmod(rest, segments)
        sequence = sequences[b]
        tiles = cut_into_tiles(sequence, starts[s], starts[s + 1])
        nowhere = empty((0, 1, d_state, width), entering)
        if goes_forwards:
            states = zeros((1, d_state, width), entering)
            carry_states(states, nowhere, x, headdim, forwards, sequence, tiles, b, h)
            copy(entering[0, b, h, s], states[0])
        if goes_backwards:
            states = zeros((1, d_state, width), entering)
            carry_states(states, nowhere, x, headdim, backwards, sequence, tiles, b, h)
            copy(entering[1, b, h, s], states[0])
    for task in prange(batch * nheads):
        b, h = divmod(np.int64(task), nheads)
        pass_along(entering[0, b, h], forwards.decay[b, h], sequences[b], starts, forwards.step)
        pass_along(entering[1, b, h], backwards.decay[b, h], sequences[b], starts, backwards.step)


@njit(**FUNCTION)
def entering_states(entering, first_head, heads, s):
    """What enters segment s, of a task's heads: (heads, d_state, headdim)."""
    _, _, d_state, width = entering.shape
    states = empty((heads, d_state, width), entering)
    for i in range(heads):
        copy(states[i], entering[first_head + i, s])
    return states


@njit(**FUNCTION)
def carry_states(states, kept, x, headdim, stream, sequence, tiles, b, first_head):
    """Move the states of a task's heads through all tiles, in place.

    ``kept`` (tiles, heads, d_state, headdim) gets those before each tile, unless it is empty.
    """
    g = first_head // (stream.dt.shape[1] // stream.B.shape[2])
    shared, tile = new_shared(states[0]), new_tile(states[0])
    for k in range(tiles.shape[0]):
        place, t, length = along(tiles, k, stream.step)
        read_columns(shared.B, shared.rows, stream.B, b, g, t, length)
        for i in range(states.shape[0]):
            h = first_head + i
            if begins(sequence, t, length, stream.step):
                restart(states[i], stream.initial, sequence[t], h)
            if kept.shape[0] > 0:
                copy(kept[place, i], states[i])
            read_rows(tile.x, x, b, h, t, length, headdim)
            read_decays(tile, stream, b, h, t, length)
            advance(states[i], tile, shared.B, tile.feed, tile.x)


@njit(**FUNCTION)
def pass_along(states, decay, sequence, starts, step):
    """Turn the summaries of the segments into the states that enter them, in place."""
    segments = states.shape[0]
    carry = np.zeros_like(states[0])
    for i in range(segments):
        s = i if step > 0 else segments - 1 - i
        start, stop = starts[s], starts[s + 1]
        one_sequence = sequence[start] == sequence[stop - 1] and sequence[start] >= 0
        crosses = one_sequence and not begins(sequence, start, stop - start, step)
        across = states.dtype.type(1)
        for t in range(start, stop):
            across *= decay[t]
        for n in range(carry.shape[0]):
            for p in range(carry.shape[1]):
                leaving = states[s, n, p]
                if crosses:
                    leaving += across * carry[n, p]
                states[s, n, p] = carry[n, p]
                carry[n, p] = leaving
