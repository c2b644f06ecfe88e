"""What passes between the segments that a sequence is cut into where batch and heads are few.

A segment's summary is the state that it leaves when zero enters, and how much is left of a state
that crosses it. From the summaries of all, a short loop makes the state that enters each.
"""

import numpy as np
from numba import njit, prange

from .products import FUNCTION, KERNEL
from .tile import advance, continues, new_tile, read_tile, restart, tile_length


@njit(**KERNEL)
def compute_entering(entering, x, headdim, forwards, backwards, first, last, sequences, starts):
    """Fill ``entering`` (2, batch, nheads, segments, d_state, headdim), padded, zero before."""
    _, batch, nheads, segments, _, _ = entering.shape
    across = np.zeros((2, batch, nheads, segments), entering.dtype)
    for task in prange(2 * batch * nheads * segments):
        d, rest = divmod(np.int64(task), batch * nheads * segments)
        b, rest = divmod(rest, nheads * segments)
        h, s = divmod(rest, segments)
        streams = (forwards, backwards)  # made here: loops take no nested tuples from outside
        if first <= d < last:
            across[d, b, h, s] = summarise(
                entering[d, b, h, s], x, headdim, streams[d], sequences[b], b, h,
                starts[s], starts[s + 1], 1 - 2 * d,
            )  # fmt: skip
    for task in prange(2 * batch * nheads):
        d, rest = divmod(np.int64(task), batch * nheads)
        b, h = divmod(rest, nheads)
        pass_along(entering[d, b, h], across[d, b, h], d == 1)


@njit(**FUNCTION)
def pass_along(states, across, reverse):
    """Turn the summaries of the segments into the states that enter them, in place."""
    segments = across.shape[0]
    carry = np.zeros_like(states[0])
    for i in range(segments):
        s = segments - 1 - i if reverse else i
        for n in range(carry.shape[0]):
            for p in range(carry.shape[1]):
                leaving = across[s] * carry[n, p] + states[s, n, p]
                states[s, n, p] = carry[n, p]
                carry[n, p] = leaving


@njit(**FUNCTION)
def summarise(state, x, headdim, stream, sequence, b, h, start, stop, step):
    """The state after the segment, into ``state`` (zero before); returns what is left across it."""
    tile = new_tile(state)
    left = stream.dt.dtype.type(1)
    t = start if step > 0 else stop - 1
    while start <= t < stop:
        length = tile_length(sequence, t, start, stop, step)
        if sequence[t] < 0:
            left = stream.dt.dtype.type(0)
        else:
            if not continues(sequence, t, -step):
                restart(state, stream.initial, sequence[t], h)
                left = stream.dt.dtype.type(0)
            total = read_tile(tile, x, stream, b, h, t, length, step, headdim)
            advance(state, tile, total)
            left *= total
        t += length * step
    return left
