"""The backward: every segment of some heads on its own, given what enters it from both ends.

A task walks its tiles twice. Against the order of time it keeps, for each tile, what moves that
way: the gradients of the forward direction's states, and the states of the reverse direction. In
the order of time the other two move along, and a tile has all that its gradients need
(``gradients.py``), those of both directions at once.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit, prange

from .floats import narrow, widen
from .gradients import (
    differentiate,
    finish_sums,
    multiply_dout,
    new_gradients,
    new_sums,
)
from .products import FUNCTION, KERNEL, empty, transpose, zeros
from .segments import carry_states, entering_states, pass_along
from .tile import (
    Rows,
    advance,
    along,
    begins,
    continues,
    copy,
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


class Targets(NamedTuple):
    """Where a direction's gradients go, and the one that it starts from.

    dA (batch, segments, nheads), dB and dC (blocks of heads in a group, batch, seqlen, ngroups,
    d_state) are parts of sums, and added to; ddt (batch, nheads, seqlen). dfinal and dinitial are
    (nsequences, nheads, headdim, d_state), without rows where there are none.
    """

    dfinal: Any
    ddt: Any
    dA: Any
    dB: Any
    dC: Any
    dinitial: Any


@njit(**KERNEL)
def scan_backward(
    x, headdim, forwards, backwards, goes_forwards, goes_backwards, sequences, starts, heads,
    shift, entering, adjoints, D, z, pre_gate, dy, to_forwards, to_backwards,
    dx, dz, dD_token, dD_channel,
):  # fmt: skip
    """Write or add to all gradients.

    dD_channel (batch, segments, nheads, headdim) has parts of a sum; it, dD_token and dz have no
    elements where there are none. A task takes ``heads`` heads of one group.
    """
    batch, nheads, _ = forwards.dt.shape
    blocks, segments = nheads // heads, starts.shape[0] - 1
    _, _, _, _, d_state, width = entering.shape
    for task in prange(batch * blocks * segments):
        b, rest = divmod(np.int64(task), blocks * segments)
        block, s = divmod(rest, segments)
        h, start, stop = block * heads, starts[s], starts[s + 1]
        sequence = sequences[b]
        tiles = cut_into_tiles(sequence, start, stop)
        gated = zeros((heads, stop - start + 2, width), entering)
        rows = zeros((heads, stop - start, width), entering)
        for i in range(heads):
            gate_rows(gated[i], dy, z, pre_gate, dz, sequence, b, h + i, start, stop, headdim)

        # Of each direction, what moves against the order of time, and what moves with it.
        kept = empty((2, tiles.shape[0], heads, d_state, width), entering)
        if goes_forwards:
            carry_adjoints(
                entering_states(adjoints[0, b], h, heads, s), kept[0], gated, headdim, forwards,
                sequence, tiles, b, h, start, shift, to_forwards.dfinal, to_forwards.dinitial,
            )  # fmt: skip
        if goes_backwards:
            carry_states(
                entering_states(entering[1, b], h, heads, s), kept[1], x, headdim, backwards,
                sequence, tiles, b, h,
            )  # fmt: skip
        states = entering_states(entering[0, b], h, heads, s)
        adjoints_rev = entering_states(adjoints[1, b], h, heads, s)
        differentiate_tiles(
            rows, states, adjoints_rev, kept, gated, x, headdim, forwards, backwards,
            goes_forwards, goes_backwards, to_forwards, to_backwards, sequence, tiles, b, h, s,
            start, shift,
        )  # fmt: skip
        for i in range(heads):
            write_rows(
                rows[i], gated[i], x, D, dx, dD_token, dD_channel, sequence, b, h + i, s, start,
                headdim,
            )  # fmt: skip


@njit(**FUNCTION)
def differentiate_tiles(
    rows, states, adjoints_rev, kept, gated, x, headdim, forwards, backwards,
    goes_forwards, goes_backwards, to_forwards, to_backwards, sequence, tiles, b, first_head, s,
    start, shift,
):  # fmt: skip
    """All gradients of a task's tiles: adds to ``rows``, those of dx."""
    g, place = divmod(first_head, forwards.dt.shape[1] // forwards.B.shape[2])
    part = place // rows.shape[0]
    some = states[0]
    grads = new_gradients(some)
    tile, shared, sums = new_tile(some), new_shared(some), new_sums(some)
    tile_rev, shared_rev, sums_rev = new_tile(some), new_shared(some), new_sums(some)
    for k in range(tiles.shape[0]):
        t, length = tiles[k, 0], tiles[k, 1]
        if goes_forwards:
            read_shared(shared, forwards, b, g, t, length)
        if goes_backwards:
            read_shared(shared_rev, backwards, b, g, t, length)
        for i in range(rows.shape[0]):
            h = first_head + i
            read_rows(tile.x, x, b, h, t, length, headdim)
            transpose(grads.xT, tile.x)
            if goes_forwards:
                read_dout(grads.dout, gated[i], sequence, t, length, shift, start)
                multiply_dout(grads)
                if begins(sequence, t, length, forwards.step):
                    restart(states[i], forwards.initial, sequence[t], h)
                read_decays(tile, forwards, b, h, t, length)
                differentiate(grads, sums, tile, shared, states[i], kept[0, k, i], forwards.step)
                write_tile(rows[i], to_forwards, grads, tile, forwards.A, b, h, s, t, length, start)
                advance(states[i], tile, shared.B, tile.feed, tile.x)
            if goes_backwards:
                if shift > 0 or not goes_forwards:
                    read_dout(grads.dout, gated[i], sequence, t, length, -shift, start)
                    multiply_dout(grads)
                if begins(sequence, t, length, forwards.step):
                    restart(adjoints_rev[i], to_backwards.dfinal, sequence[t], h)
                read_decays(tile_rev, backwards, b, h, t, length)
                differentiate(
                    grads,
                    sums_rev,
                    tile_rev,
                    shared_rev,
                    kept[1, k, i],
                    adjoints_rev[i],
                    backwards.step,
                )
                write_tile(
                    rows[i], to_backwards, grads, tile_rev, backwards.A, b, h, s, t, length, start
                )
                advance(adjoints_rev[i], tile_rev, shared_rev.C, tile_rev.enter, grads.dout)
                if begins(sequence, t, length, backwards.step):
                    write_state(to_backwards.dinitial, adjoints_rev[i], sequence[t], h)
        if goes_forwards:
            finish_sums(sums, grads, shared, to_forwards, part, b, g, t, length)
        if goes_backwards:
            finish_sums(sums_rev, grads, shared_rev, to_backwards, part, b, g, t, length)


@njit(**FUNCTION)
def write_tile(rows, to, grads, tile, A, b, h, s, t, length, start):
    """ddt; adds to dA and to the rows of dx."""
    total = 0.0
    for i in range(length):
        to.ddt[b, h, t + i] = grads.ddt[i] + A[h] * grads.dlog_decay[i]
        total += np.float64(grads.dlog_decay[i]) * np.float64(tile.dt[i])
        row, source, weight = rows[t + i - start], grads.dx[i], tile.dt[i]
        for p in range(row.shape[0]):
            row[p] += weight * source[p]
    to.dA[b, s, h] += total


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
            read_row(row, dy, b, h, t, headdim)
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
    low = 1 if shift < 0 and not continues(sequence, t, shift) else 0
    high = length - 1 if shift > 0 and not continues(sequence, t + length - 1, shift) else length
    before = t + shift - start + 1
    copy(out[low:high], gated[before + low : before + high])


@njit(**KERNEL)
def compute_entering_adjoints(
    adjoints, x, headdim, forwards, backwards, goes_forwards, goes_backwards, sequences, starts,
    shift, z, pre_gate, dy, to_forwards, to_backwards,
):  # fmt: skip
    """Fill ``adjoints``, shaped like the entering states, with what enters from the far end."""
    _, batch, nheads, segments, d_state, width = adjoints.shape
    for task in prange(batch * nheads * segments):
        b, rest = divmod(np.int64(task), nheads * segments)
        h, s = divmod(rest, segments)
        sequence, start, stop = sequences[b], starts[s], starts[s + 1]
        tiles = cut_into_tiles(sequence, start, stop)
        gated = zeros((1, stop - start + 2, width), adjoints)
        no_dz = Rows(dy.memory[:0], 0, 0, 0, 0)
        gate_rows(gated[0], dy, z, pre_gate, no_dz, sequence, b, h, start, stop, headdim)
        nowhere = empty((0, 1, d_state, width), adjoints)
        if goes_forwards:
            states = zeros((1, d_state, width), adjoints)
            carry_adjoints(
                states, nowhere, gated, headdim, forwards, sequence, tiles, b, h, start,
                shift, to_forwards.dfinal, to_forwards.dinitial[:0],
            )  # fmt: skip
            copy(adjoints[0, b, h, s], states[0])
        if goes_backwards:
            states = zeros((1, d_state, width), adjoints)
            carry_adjoints(
                states, nowhere, gated, headdim, backwards, sequence, tiles, b, h, start,
                shift, to_backwards.dfinal, to_backwards.dinitial[:0],
            )  # fmt: skip
            copy(adjoints[1, b, h, s], states[0])
    for task in prange(batch * nheads):
        b, h = divmod(np.int64(task), nheads)
        pass_along(adjoints[0, b, h], forwards.decay[b, h], sequences[b], starts, backwards.step)
        pass_along(adjoints[1, b, h], backwards.decay[b, h], sequences[b], starts, forwards.step)


@njit(**FUNCTION)
def carry_adjoints(
    adjoints, kept, gated, headdim, stream, sequence, tiles, b, first_head, start,
    shift, dfinal, dinitial,
):  # fmt: skip
    """Move the gradients of the states against the direction, as ``carry_states`` does with it."""
    step = stream.step
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
                copy(kept[place, i], adjoints[i])
            read_dout(tile.x, gated[i], sequence, t, length, shift * step, start)
            read_decays(tile, stream, b, h, t, length)
            advance(adjoints[i], tile, shared.C, tile.enter, tile.x)
            if begins(sequence, t, length, step):
                write_state(dinitial, adjoints[i], sequence[t], h)


@njit(**FUNCTION)
def write_rows(rows, gated, x, D, dx, dD_token, dD_channel, sequence, b, h, s, start, headdim):
    """dx with what the skip adds, rounded once; dD."""
    for i in range(rows.shape[0]):
        t = start + i
        row, dy = rows[i], gated[i + 1]
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
        write_row(dx, b, h, t, row, headdim)
