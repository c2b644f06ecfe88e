"""What passes from tile to tile, and between the segments that a sequence is cut into.

A sequence is cut where batch and heads are few. A segment's summary is the state that it leaves
when zero enters. From the summaries of all and the decays across them, a short loop makes the state
that enters each.
"""

import numpy as np
from numba import njit, prange

from .products import FUNCTION, KERNEL, zeros
from .tile import (
    advance,
    along,
    begins,
    cut_into_tiles,
    new_shared,
    new_tile,
    read_columns,
    read_decays,
    read_rows,
    restart,
)


@njit(**KERNEL)
def compute_entering(entering, x, headdim, forwards, backwards, first, last, sequences, starts):
    """Fill ``entering`` (2, batch, nheads, segments, d_state, headdim), padded, zero before."""
    _, batch, nheads, segments, d_state, width = entering.shape
    for task in prange(2 * batch * nheads * segments):
        d, rest = divmod(np.int64(task), batch * nheads * segments)
        b, rest = divmod(rest, nheads * segments)
        h, s = divmod(rest, segments)
        streams = (forwards, backwards)  # made here: loops take no nested tuples from outside
        if first <= d < last:
            tiles = cut_into_tiles(sequences[b], starts[s], starts[s + 1])
            states = zeros((1, d_state, width), entering)
            nowhere = zeros((0, 1, d_state, width), entering)
            carry_states(
                states, nowhere, x, headdim, streams[d], sequences[b], tiles, b, h, 1 - 2 * d
            )
            entering[d, b, h, s] = states[0]
    for task in prange(2 * batch * nheads):
        d, rest = divmod(np.int64(task), batch * nheads)
        b, h = divmod(rest, nheads)
        streams = (forwards, backwards)
        pass_along(entering[d, b, h], streams[d].decay[b, h], sequences[b], starts, 1 - 2 * d)


@njit(**FUNCTION)
def carry_states(states, kept, x, headdim, stream, sequence, tiles, b, first_head, step):
    """Move the states of a task's heads through all tiles, in place.

    ``kept`` (tiles, heads, d_state, headdim) gets those before each tile, unless it is empty.
    """
    g = first_head // (stream.dt.shape[1] // stream.B.shape[2])
    shared, tile = new_shared(states[0]), new_tile(states[0])
    for k in range(tiles.shape[0]):
        place, t, length = along(tiles, k, step)
        read_columns(shared.B, shared.rows, stream.B, b, g, t, length)
        for i in range(states.shape[0]):
            h = first_head + i
            if begins(sequence, t, length, step):
                restart(states[i], stream.initial, sequence[t], h)
            if kept.shape[0] > 0:
                kept[place, i] = states[i]
            read_rows(tile.x, x, b, h, t, length, headdim)
            read_decays(tile, stream, b, h, t, length, step)
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
