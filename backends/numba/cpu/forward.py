"""The forward: every segment of some heads on its own, given the states that enter it."""

import numpy as np
from numba import njit, prange

from .floats import widen
from .products import ALL, FUNCTION, KERNEL, LOWER, UPPER, add_product, set_product, zeros
from .segments import entering_states
from .tile import (
    TILE,
    advance,
    along,
    begins,
    compute_W,
    continues,
    cut_into_tiles,
    new_shared,
    new_tile,
    read_decays,
    read_rows,
    read_shared,
    restart,
    write_row,
    write_state,
)


@njit(**KERNEL)
def scan_forward(
    x, headdim, forwards, backwards, goes_forwards, goes_backwards, sequences, starts, heads,
    shift, entering, D, z, y, pre_gate, final, final_rev,
):  # fmt: skip
    """Write y, pre_gate and the final states (of a direction; no rows where nobody wants them).

    x, D, z, y and pre_gate are Rows; D, z and pre_gate without memory where there are none.
    A task takes ``heads`` heads of one group.
    """
    batch, nheads, _ = forwards.dt.shape
    blocks, segments = nheads // heads, starts.shape[0] - 1
    for task in prange(batch * blocks * segments):
        b, rest = divmod(np.int64(task), blocks * segments)
        block, s = divmod(rest, segments)
        h, start, stop = block * heads, starts[s], starts[s + 1]
        sequence = sequences[b]
        tiles = cut_into_tiles(sequence, start, stop)
        out = zeros((heads, stop - start, entering.shape[5]), entering)
        if goes_forwards:
            add_direction(
                out, x, headdim, forwards, sequence, tiles, b, h, start, shift,
                entering_states(entering[0, b], h, heads, s), final,
            )  # fmt: skip
        if goes_backwards:
            add_direction(
                out, x, headdim, backwards, sequence, tiles, b, h, start, shift,
                entering_states(entering[1, b], h, heads, s), final_rev,
            )  # fmt: skip
        for i in range(heads):
            write_rows(out[i], x, D, z, y, pre_gate, sequence, b, h + i, start, headdim)


@njit(**FUNCTION)
def add_direction(
    out, x, headdim, stream, sequence, tiles, b, first_head, start, shift, states, final
):
    """Add one direction's output to ``out``, the rows of a segment; moves ``states`` along."""
    step = stream.step
    g = first_head // (stream.dt.shape[1] // stream.B.shape[2])
    shared, tile = new_shared(states[0]), new_tile(states[0])
    M = zeros((TILE, TILE), out)
    rows = zeros((TILE, out.shape[2]), out)
    if shift > 0:
        add_row_from_before(out, stream, sequence, b, g, start, states)
    for k in range(tiles.shape[0]):
        _, t, length = along(tiles, k, step)
        read_shared(shared, stream, b, g, t, length)
        # The rows that leave the segment, or would enter another sequence, are dropped.
        low, high = t + shift * step, t + length + shift * step
        if shift > 0 and begins(sequence, t, length, -step):
            low, high = max(low, t), min(high, t + length)
        low, high = max(low, start), min(high, start + out.shape[1])
        for i in range(states.shape[0]):
            h, state = first_head + i, states[i]
            if begins(sequence, t, length, step):
                restart(state, stream.initial, sequence[t], h)
            read_rows(tile.x, x, b, h, t, length, headdim)
            read_decays(tile, stream, b, h, t, length)
            compute_W(tile, step)
            weigh(M, tile.W, shared.CB, tile.dt)
            set_product(rows, shared.C.T, state, ALL)
            add_product(rows, tile.enter, M, tile.x, LOWER if step > 0 else UPPER)
            for target in range(low, high):
                row, source = out[i, target - start], rows[target - shift * step - t]
                for p in range(row.shape[0]):
                    row[p] += source[p]
            advance(state, tile, shared.B, tile.feed, tile.x)
            if begins(sequence, t, length, -step):
                write_state(final, state, sequence[t], h)


@njit(**FUNCTION)
def add_row_from_before(out, stream, sequence, b, g, start, states):
    """With the shift, the first row is the output at the last token of the segment before."""
    step = stream.step
    t = start if step > 0 else start + out.shape[1] - 1
    if sequence[t] >= 0 and continues(sequence, t, -step):
        for i in range(states.shape[0]):
            for n in range(stream.C.shape[3]):
                for p in range(out.shape[2]):
                    out[i, t - start, p] += stream.C[b, t - step, g, n] * states[i, n, p]


@njit(**FUNCTION)
def weigh(M, W, CB, dt):
    """W * CB * dt"""
    for i in range(TILE):
        row, weights, products = M[i], W[i], CB[i]
        for j in range(row.shape[0]):
            row[j] = weights[j] * products[j] * dt[j]


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
        if pre_gate.memory.size > 0:
            write_row(pre_gate, b, h, t, row, headdim)
        if z.memory.size > 0 and sequence[t] >= 0:
            at_z = b * z.batch + t * z.token + h * z.head
            for p in range(headdim):
                gate = widen(z.memory, at_z + p * z.channel)
                row[p] *= gate / (1 + np.exp(-gate))
        write_row(y, b, h, t, row, headdim)
