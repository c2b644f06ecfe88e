"""The backward: every segment of some heads on its own, given what enters it from both ends.

A task walks its tiles twice. Against the order of time it keeps, for each tile, what moves that
way: the gradients of the forward direction's states, and the states of the reverse direction. In
the order of time the other two move along, and a tile has all that its gradients need
(``gradients.py``), those of both directions at once.
"""

import numpy as np
from numba import njit, prange

from .floats import narrow, widen
from .gradients import differentiate, finish_shared, new_gradients, new_shared_gradients
from .products import ALL, FUNCTION, KERNEL, empty, set_product, transpose, zeros
from .segments import carry_states, pass_along
from .tile import (
    TILE,
    Rows,
    advance,
    along,
    begins,
    compute_W,
    continues,
    cut_into_tiles,
    new_shared,
    new_tile,
    read_columns,
    read_decays,
    read_row,
    read_rows,
    read_shared,
    restart,
    write_row,
    write_state,
)


@njit(**KERNEL)
def scan_backward(
    x, headdim, forwards, backwards, first, last, sequences, starts, heads,
    shift, entering, adjoints, D, z, pre_gate, dy, dfinal,
    dx, dz, ddt, dA, dB, dC, dD_token, dD_channel, dinitial,
):  # fmt: skip
    """Write or, for dB and dC, add to all gradients.

    Pairs of arrays have one for each direction. dA (batch, segments, nheads), dB and dC (blocks of
    heads in a group, batch, seqlen, ngroups, d_state) and dD_channel (batch, segments, nheads,
    headdim) are parts of sums; dD_token, dD_channel, dz, dfinal and dinitial have no elements where
    there are none. A task takes ``heads`` heads of one group.
    """
    batch, nheads, _ = forwards.dt.shape
    blocks, segments = nheads // heads, starts.shape[0] - 1
    for task in prange(batch * blocks * segments):
        b, rest = divmod(np.int64(task), blocks * segments)
        block, s = divmod(rest, segments)
        h, start, stop = block * heads, starts[s], starts[s + 1]
        streams = (forwards, backwards)  # made here: loops take no nested tuples from outside
        sequence = sequences[b]
        tiles = cut_into_tiles(sequence, start, stop)
        _, _, _, _, d_state, width = entering.shape
        gated = zeros((heads, stop - start + 2, width), entering)
        rows = zeros((heads, stop - start, width), entering)
        for i in range(heads):
            gate_rows(gated[i], dy, z, pre_gate, dz, sequence, b, h + i, start, stop, headdim)

        # Per direction, what moves against the order of time, and what moves with it.
        kept = empty((2, tiles.shape[0], heads, d_state, width), entering)
        moving = zeros((2, heads, d_state, width), entering)
        states = zeros((heads, d_state, width), entering)
        if first == 0:
            moving[0] = entering[0, b, h : h + heads, s]
            states[:] = adjoints[0, b, h : h + heads, s]
            carry_adjoints(
                states, kept[0], gated, headdim, streams[0], sequence, tiles, b, h, start, 1,
                shift, dfinal[0], dinitial[0],
            )  # fmt: skip
        if last == 2:
            moving[1] = adjoints[1, b, h : h + heads, s]
            states[:] = entering[1, b, h : h + heads, s]
            carry_states(states, kept[1], x, headdim, streams[1], sequence, tiles, b, h, -1)
        differentiate_tiles(
            rows, moving, kept, gated, x, headdim, streams, first, last, sequence, tiles,
            b, h, s, start, shift, dfinal, ddt, dA, dB, dC, dinitial,
        )  # fmt: skip
        for i in range(heads):
            write_rows(
                rows[i], gated[i], x, D, dx, dD_token, dD_channel, sequence, b, h + i, s, start,
                headdim,
            )  # fmt: skip


@njit(**FUNCTION)
def differentiate_tiles(
    rows, moving, kept, gated, x, headdim, streams, first, last, sequence, tiles,
    b, first_head, s, start, shift, dfinal, ddt, dA, dB, dC, dinitial,
):  # fmt: skip
    """All gradients of a task's tiles: adds to dx (its rows), dB and dC; moves ``moving`` along."""
    heads = rows.shape[0]
    state = moving[0, 0]
    nheads, ngroups = streams[0].dt.shape[1], streams[0].B.shape[2]
    g, block = divmod(first_head, nheads // ngroups)
    part = block // heads
    shared = (new_shared(state), new_shared(state))
    sums = (new_shared_gradients(state), new_shared_gradients(state))
    tile = (new_tile(state), new_tile(state))
    grads = new_gradients(state)
    for k in range(tiles.shape[0]):
        t, length = tiles[k, 0], tiles[k, 1]
        for d in range(first, last):
            read_shared(shared[d], streams[d], b, g, t, length)
        for i in range(heads):
            h = first_head + i
            read_rows(tile[0].x, x, b, h, t, length, headdim)
            transpose(grads.xT, tile[0].x)
            for d in range(first, last):
                step = 1 - 2 * d
                if d == first or shift > 0:
                    read_dout(grads.dout, gated[i], sequence, t, length, shift * step, start)
                    transpose(grads.doutT, grads.dout)
                    set_product(grads.dM, grads.dout, grads.xT, ALL)
                read_decays(tile[d], streams[d], b, h, t, length, step)
                compute_W(tile[d], step)
                if begins(sequence, t, length, 1):
                    initial = streams[0].initial if d == 0 else dfinal[1]
                    restart(moving[d, i], initial, sequence[t], h)
                if d == 0:
                    state, adjoint = moving[0, i], kept[0, k, i]
                else:
                    state, adjoint = kept[1, k, i], moving[1, i]
                differentiate(grads, sums[d], tile[d], shared[d], state, adjoint, step)
                decay_rate = streams[d].A[h]
                total = 0.0
                for n in range(length):
                    ddt[d][b, h, t + n] = grads.ddt[n] + decay_rate * grads.dlog_decay[n]
                    total += np.float64(grads.dlog_decay[n]) * np.float64(tile[d].dt[n])
                dA[d][b, s, h] += total
                for n in range(length):
                    row, source, weight = rows[i, t + n - start], grads.dx[n], tile[d].dt[n]
                    for p in range(row.shape[0]):
                        row[p] += weight * source[p]
                if d == 0:
                    advance(moving[0, i], tile[0], shared[0].B, tile[0].feed, tile[0].x)
                else:
                    advance(moving[1, i], tile[1], shared[1].C, tile[1].enter, grads.dout)
                    if begins(sequence, t, length, -1):
                        write_state(dinitial[1], moving[1, i], sequence[t], h)
        for d in range(first, last):
            finish_shared(
                sums[d], grads.product, shared[d].rows, shared[d], dB[d][part], dC[d][part],
                b, g, t, length,
            )  # fmt: skip


@njit(**FUNCTION)
def gate_rows(gated, dy, z, pre_gate, dz, sequence, b, h, start, stop, headdim):
    """The gradient before the gate, of the segment's rows and one more at either end; writes dz."""
    for i in range(gated.shape[0]):
        t = start - 1 + i
        row = gated[i]
        row[:] = 0
        writes_dz = start <= t < stop and dz.memory.size > 0
        covered = 0 <= t < sequence.shape[0] and sequence[t] >= 0
        at_dz = b * dz.batch + t * dz.token + h * dz.head
        if covered:
            read_row(row[:headdim], dy, b, h, t)
        if covered and z.memory.size > 0:
            at = b * z.batch + t * z.token + h * z.head
            at_before = b * pre_gate.batch + t * pre_gate.token + h * pre_gate.head
            for p in range(headdim):
                gate = widen(z.memory, at + p * z.channel)
                sigmoid = 1 / (1 + np.exp(-gate))
                if writes_dz:
                    before = widen(pre_gate.memory, at_before + p)
                    slope = sigmoid * (1 + gate * (1 - sigmoid))
                    narrow(dz.memory, at_dz + p, row[p] * before * slope)
                row[p] *= gate * sigmoid
        elif writes_dz:
            for p in range(headdim):
                narrow(dz.memory, at_dz + p, row[p])


@njit(**FUNCTION)
def read_dout(out, gated, sequence, t, length, shift, start):
    """dout of a tile: the rows of the gradient where its outputs stand, zeros beyond."""
    out[:] = 0
    for i in range(length):
        if shift == 0 or continues(sequence, t + i, shift):
            out[i] = gated[t + i + shift - start + 1]


@njit(**KERNEL)
def compute_entering_adjoints(
    adjoints, x, headdim, forwards, backwards, first, last, sequences, starts,
    shift, z, pre_gate, dy, dfinal,
):  # fmt: skip
    """Fill ``adjoints``, shaped like the entering states, with what enters from the far end."""
    _, batch, nheads, segments, d_state, width = adjoints.shape
    for task in prange(batch * nheads * segments):
        b, rest = divmod(np.int64(task), nheads * segments)
        h, s = divmod(rest, segments)
        streams = (forwards, backwards)  # made here: loops take no nested tuples from outside
        start, stop = starts[s], starts[s + 1]
        tiles = cut_into_tiles(sequences[b], start, stop)
        gated = zeros((1, stop - start + 2, width), adjoints)
        no_dz = Rows(dy.memory[:0], 0, 0, 0, 0)
        gate_rows(gated[0], dy, z, pre_gate, no_dz, sequences[b], b, h, start, stop, headdim)
        nowhere = zeros((0, 1, d_state, width), adjoints)
        for d in range(first, last):
            states = zeros((1, d_state, width), adjoints)
            carry_adjoints(
                states, nowhere, gated, headdim, streams[d], sequences[b], tiles, b, h, start,
                1 - 2 * d, shift, dfinal[d], dfinal[d][:0],
            )  # fmt: skip
            adjoints[d, b, h, s] = states[0]
    for task in prange(2 * batch * nheads):
        d, rest = divmod(np.int64(task), batch * nheads)
        b, h = divmod(rest, nheads)
        streams = (forwards, backwards)
        pass_along(adjoints[d, b, h], streams[d].decay[b, h], sequences[b], starts, 2 * d - 1)


@njit(**FUNCTION)
def carry_adjoints(
    adjoints, kept, gated, headdim, stream, sequence, tiles, b, first_head, start,
    step, shift, dfinal, dinitial,
):  # fmt: skip
    """Move the gradients of the states against the direction, as ``carry_states`` does with it."""
    g = first_head // (stream.dt.shape[1] // stream.B.shape[2])
    shared, tile = new_shared(adjoints[0]), new_tile(adjoints[0])
    for k in range(tiles.shape[0]):
        place, t, length = along(tiles, k, -step)
        read_columns(shared.C, shared.rows, stream.C, b, g, t, length)
        for i in range(adjoints.shape[0]):
            h = first_head + i
            if begins(sequence, t, length, -step):
                restart(adjoints[i], dfinal, sequence[t], h)
            if kept.shape[0] > 0:
                kept[place, i] = adjoints[i]
            read_dout(tile.x, gated[i], sequence, t, length, shift * step, start)
            read_decays(tile, stream, b, h, t, length, step)
            advance(adjoints[i], tile, shared.C, tile.enter, tile.x)
            if begins(sequence, t, length, step):
                write_state(dinitial, adjoints[i], sequence[t], h)


@njit(**FUNCTION)
def write_rows(rows, gated, x, D, dx, dD_token, dD_channel, sequence, b, h, s, start, headdim):
    """dx with what the skip adds, rounded once; dD."""
    for i in range(rows.shape[0]):
        t = start + i
        row, dy = rows[i, :headdim], gated[i + 1]
        if D.memory.size > 0:
            token = row.dtype.type(0)
            if sequence[t] >= 0:
                at_x = b * x.batch + t * x.token + h * x.head
                at_D = b * D.batch + t * D.token + h * D.head
                for p in range(headdim):
                    row[p] += dy[p] * widen(D.memory, at_D + p * D.channel)
                    dskip = dy[p] * widen(x.memory, at_x + p * x.channel)
                    token += dskip
                    if dD_channel.shape[0] > 0:
                        dD_channel[b, s, h, p] += dskip
            if dD_token.shape[0] > 0:
                dD_token[b, t, h] = token
        write_row(dx, b, h, t, row)
