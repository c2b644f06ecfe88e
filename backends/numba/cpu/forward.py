"""The forward: every segment of every head on its own, given the states that enter it."""

import numpy as np
from numba import njit, prange

from .floats import narrow, widen
from .products import ALL, FUNCTION, KERNEL, LOWER, set_product
from .tile import (
    TILE,
    advance,
    compute_CB,
    compute_W,
    continues,
    new_tile,
    read_C,
    read_tile,
    restart,
    tile_length,
)


@njit(**KERNEL)
def scan_forward(
    x,
    headdim,
    forwards,
    backwards,
    first,
    last,
    sequences,
    starts,
    shift,
    entering,
    D,
    z,
    y,
    pre_gate,
    final,
):
    """Write y, pre_gate and the final states (per direction; no rows where nobody wants them).

    x, D, z, y and pre_gate are Rows; D, z and pre_gate without memory where there are none.
    """
    batch, nheads, _ = forwards.dt.shape
    segments = starts.shape[0] - 1
    for task in prange(batch * nheads * segments):
        b, rest = divmod(np.int64(task), nheads * segments)
        h, s = divmod(rest, segments)
        start, stop = starts[s], starts[s + 1]
        streams = (forwards, backwards)  # made here: loops take no nested tuples from outside
        out = np.zeros((stop - start, entering.shape[5]), entering.dtype)
        for d in range(first, last):
            add_direction(
                out, x, streams[d], sequences[b], b, h, start, stop, 1 - 2 * d, shift, headdim,
                entering[d, b, h, s], final[d],
            )  # fmt: skip
        write_rows(out, x, D, z, y, pre_gate, sequences[b], b, h, start, headdim)


@njit(**FUNCTION)
def add_direction(
    out, x, stream, sequence, b, h, start, stop, step, shift, headdim, entering, final
):
    """Add one direction's output to ``out``, the rows of a segment."""
    d_state = stream.B.shape[3]
    tile = new_tile(entering)
    M = np.empty((TILE, TILE), out.dtype)
    within = np.empty((TILE, out.shape[1]), out.dtype)
    through = np.empty((TILE, out.shape[1]), out.dtype)
    state = entering.copy()
    t = start if step > 0 else stop - 1
    if shift > 0 and sequence[t] >= 0 and continues(sequence, t, -step):
        # The first row's output stands at the last token of the segment before.
        g = h // (stream.dt.shape[1] // stream.B.shape[2])
        for n in range(d_state):
            for p in range(headdim):
                out[t - start, p] += stream.C[b, t - step, g, n] * state[n, p]
    while start <= t < stop:
        length = tile_length(sequence, t, start, stop, step)
        if sequence[t] >= 0:
            if not continues(sequence, t, -step):
                restart(state, stream.initial, sequence[t], h)
            total = read_tile(tile, x, stream, b, h, t, length, step, headdim)
            read_C(tile, stream, b, h, t, length, step)
            compute_W(tile)
            compute_CB(tile)
            for i in range(TILE):
                for j in range(TILE):
                    M[i, j] = tile.W[i, j] * tile.CB[i, j] * tile.dt[j]
            set_product(within, M, tile.x, LOWER)
            set_product(through, tile.C.T, state, ALL)
            advance(state, tile, total)
            for i in range(length):
                target = t + (i + shift) * step
                if start <= target < stop and sequence[target] == sequence[t]:
                    row, enter = out[target - start], tile.enter[i]
                    for p in range(row.shape[0]):
                        row[p] += within[i, p] + enter * through[i, p]
            end = t + (length - 1) * step
            if final.shape[0] > 0 and not continues(sequence, end, step):
                for n in range(d_state):
                    for p in range(headdim):
                        final[sequence[t], h, p, n] = state[n, p]
        t += length * step


@njit(**FUNCTION)
def write_rows(out, x, D, z, y, pre_gate, sequence, b, h, start, headdim):
    """Add the skip, apply the gate, round once; zeros where no sequence covers a token."""
    for i in range(out.shape[0]):
        t = start + i
        row = out[i]
        if D.memory.size > 0 and sequence[t] >= 0:
            at_x = b * x.batch + t * x.token + h * x.head
            at_D = b * D.batch + t * D.token + h * D.head
            for p in range(headdim):
                skip = widen(D.memory, at_D + p * D.channel)
                row[p] += skip * widen(x.memory, at_x + p * x.channel)
        at_y = b * y.batch + t * y.token + h * y.head
        if z.memory.size > 0 and sequence[t] >= 0:
            at_z = b * z.batch + t * z.token + h * z.head
            for p in range(headdim):
                if pre_gate.memory.size > 0:
                    narrow(pre_gate.memory, at_y + p, row[p])
                gate = widen(z.memory, at_z + p * z.channel)
                row[p] *= gate / (1 + np.exp(-gate))
        elif pre_gate.memory.size > 0:
            for p in range(headdim):
                narrow(pre_gate.memory, at_y + p, row[p])
        for p in range(headdim):
            narrow(y.memory, at_y + p, row[p])
