"""The backward: every segment of every group on its own, given what enters it from both ends.

Per tile and direction, with ``dout`` the gradient of ``out`` (so of y, one token further with the
shift), E the gradient of the state after the tile, and the names of ``tile.py``::

    dM     = dout xᵀ                           G     = dM * W
    pairs  = G * CB                            dlog_decay_k = sum of pairs[i, j] dt_j, j < k <= i
    dC     = (G * dt) B + enter * (dout hᵀ)    dB    = dt * (Gᵀ C + leave * (x Eᵀ))
    dx     = dt * ((W * CB)ᵀ dout + leave * (B E))
    ddt    = column sums of pairs + leave * (x Eᵀ · B)
    dE     = total E + Cᵀ (enter * dout)

Every sum of dlog_decay has only those terms that contain the decay of token k; none is the
difference of larger ones.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit, prange

from .floats import narrow, widen
from .products import ALL, FUNCTION, KERNEL, SUM, UPPER, add_product, set_product
from .segments import pass_along
from .tile import (
    TILE,
    Rows,
    advance,
    compute_CB,
    compute_W,
    continues,
    new_tile,
    read_C,
    read_tile,
    restart,
    scale_rows,
    tile_length,
)


@njit(**KERNEL)
def scan_backward(
    x, headdim, forwards, backwards, first, last, sequences, starts,
    shift, entering, adjoints, D, z, pre_gate, dy, dfinal,
    dx, dz, ddt, dA, dB, dC, dD_token, dD_channel, dinitial,
):  # fmt: skip
    """Write or, for dB and dC, add to all gradients.

    Pairs of arrays have one for each direction. dA (batch, segments, nheads) and dD_channel (batch,
    segments, nheads, headdim) are parts of sums; dD_token, dD_channel, dz, dfinal and dinitial have
    no elements where there are none.
    """
    batch, _, ngroups, _ = forwards.B.shape
    segments = starts.shape[0] - 1
    heads = forwards.dt.shape[1] // ngroups
    for task in prange(batch * ngroups * segments):
        b, rest = divmod(np.int64(task), ngroups * segments)
        g, s = divmod(rest, segments)
        start, stop = starts[s], starts[s + 1]
        streams = (forwards, backwards)  # made here: loops take no nested tuples from outside
        width = entering.shape[5]
        gated = np.zeros((stop - start + 2, width), entering.dtype)
        rows = np.zeros((stop - start, width), entering.dtype)
        for h in range(g * heads, (g + 1) * heads):
            gate_rows(gated, dy, z, pre_gate, dz, sequences[b], b, h, start, stop, headdim)
            rows[:] = 0
            for d in range(first, last):
                dA[d][b, s, h] = add_direction(
                    rows, gated, x, streams[d], sequences[b], b, h, start, stop, 1 - 2 * d, shift,
                    headdim, entering[d, b, h, s], adjoints[d, b, h, s], dfinal[d],
                    ddt[d], dB[d], dC[d], dinitial[d],
                )  # fmt: skip
            write_rows(
                rows, gated, x, D, dx, dD_token, dD_channel, sequences[b], b, h, s, start, headdim
            )


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
            at = b * dy.batch + t * dy.token + h * dy.head
            for p in range(headdim):
                row[p] = widen(dy.memory, at + p * dy.channel)
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
def read_dout(out, gated, sequence, t, length, step, shift, start):
    """dout of a tile: the rows of the gradient where its outputs stand, zeros beyond."""
    out[:] = 0
    for i in range(length):
        token = t + i * step
        if shift == 0 or continues(sequence, token, step):
            out[i] = gated[token + shift * step - start + 1]


@njit(**KERNEL)
def compute_entering_adjoints(
    adjoints, x, headdim, forwards, backwards, first, last, sequences, starts,
    shift, z, pre_gate, dy, dfinal,
):  # fmt: skip
    """Fill ``adjoints``, shaped like the entering states, with what enters from the far end."""
    _, batch, nheads, segments, _, width = adjoints.shape
    across = np.zeros((2, batch, nheads, segments), adjoints.dtype)
    for task in prange(batch * nheads * segments):
        b, rest = divmod(np.int64(task), nheads * segments)
        h, s = divmod(rest, segments)
        streams = (forwards, backwards)  # made here: loops take no nested tuples from outside
        start, stop = starts[s], starts[s + 1]
        gated = np.zeros((stop - start + 2, width), adjoints.dtype)
        no_dz = Rows(dy.memory[:0], 0, 0, 0, 0)
        gate_rows(gated, dy, z, pre_gate, no_dz, sequences[b], b, h, start, stop, headdim)
        for d in range(first, last):
            across[d, b, h, s] = summarise_adjoint(
                adjoints[d, b, h, s], gated, x, headdim, streams[d], sequences[b], b, h,
                start, stop, 1 - 2 * d, shift, dfinal[d],
            )  # fmt: skip
    for task in prange(2 * batch * nheads):
        d, rest = divmod(np.int64(task), batch * nheads)
        b, h = divmod(rest, nheads)
        pass_along(adjoints[d, b, h], across[d, b, h], d == 0)


@njit(**FUNCTION)
def cut_into_tiles(sequence, start, stop, step):
    """(first token, length) of the tiles of a segment, along the direction."""
    tiles = np.empty((stop - start, 2), np.int64)
    count = 0
    t = start if step > 0 else stop - 1
    while start <= t < stop:
        length = tile_length(sequence, t, start, stop, step)
        if sequence[t] >= 0:
            tiles[count, 0], tiles[count, 1] = t, length
            count += 1
        t += length * step
    return tiles[:count]


@njit(**FUNCTION)
def summarise_adjoint(
    E, gated, x, headdim, stream, sequence, b, h, start, stop, step, shift, dfinal
):
    """The gradient of the state before the segment where none comes from behind it, into E.

    Returns what is left of one from behind.
    """
    one = E.dtype.type(1)
    left = one
    tile = new_tile(E)
    dout = np.zeros((TILE, E.shape[1]), E.dtype)
    tiles = cut_into_tiles(sequence, start, stop, step)
    covered = 0
    for k in range(tiles.shape[0] - 1, -1, -1):
        t, length = tiles[k, 0], tiles[k, 1]
        if not continues(sequence, t + (length - 1) * step, step):
            restart(E, dfinal, sequence[t], h)
            left = E.dtype.type(0)
        total = read_tile(tile, x, stream, b, h, t, length, step, headdim)
        read_C(tile, stream, b, h, t, length, step)
        read_dout(dout, gated, sequence, t, length, step, shift, start)
        scale_rows(tile.faded, dout, tile.enter)
        add_product(E, total, tile.C, tile.faded)
        left *= total
        covered += length
    # Tokens of no sequence let nothing through.
    return left if covered == stop - start else E.dtype.type(0)


@njit(**FUNCTION)
def add_direction(
    dx, gated, x, stream, sequence, b, h, start, stop, step, shift,
    headdim, entering, adjoint, dfinal, ddt, dB, dC, dinitial,
):  # fmt: skip
    """One direction of a segment: adds to dx (its rows), dB and dC; returns a part of dA."""
    tiles = cut_into_tiles(sequence, start, stop, step)
    states = np.empty((tiles.shape[0], *entering.shape), entering.dtype)
    tile = new_tile(entering)
    state = entering.copy()
    for k in range(tiles.shape[0]):
        t, length = tiles[k, 0], tiles[k, 1]
        if not continues(sequence, t, -step):
            restart(state, stream.initial, sequence[t], h)
        states[k] = state
        total = read_tile(tile, x, stream, b, h, t, length, step, headdim)
        advance(state, tile, total)

    d_state = stream.B.shape[3]
    g = h // (stream.dt.shape[1] // stream.B.shape[2])
    grads = new_gradients(entering)
    ones = np.ones(TILE, dx.dtype)
    E = adjoint.copy()
    dA = 0.0
    for k in range(tiles.shape[0] - 1, -1, -1):
        t, length = tiles[k, 0], tiles[k, 1]
        if not continues(sequence, t + (length - 1) * step, step):
            restart(E, dfinal, sequence[t], h)
        total = read_tile(tile, x, stream, b, h, t, length, step, headdim)
        read_C(tile, stream, b, h, t, length, step)
        read_dout(grads.dout, gated, sequence, t, length, step, shift, start)
        differentiate_tile(grads, tile, states[k], E, total)
        add_columns(dB, grads.dB, tile.dt, b, g, t, length, step)
        add_columns(dC, grads.dC, ones, b, g, t, length, step)
        for i in range(length):
            token = t + i * step
            ddt[b, h, token] = grads.ddt[i] + stream.A[h] * grads.dlog_decay[i]
            dA += np.float64(grads.dlog_decay[i]) * np.float64(tile.dt[i])
            row, weight, leave = dx[token - start], tile.dt[i], tile.leave[i]
            for p in range(row.shape[0]):
                row[p] += weight * (grads.within[i, p] + leave * grads.through[i, p])
        if dinitial.shape[0] > 0 and not continues(sequence, t, -step):
            for n in range(d_state):
                for p in range(headdim):
                    dinitial[sequence[t], h, p, n] = E[n, p]
    return dA


class Gradients(NamedTuple):
    """The gradients of a tile, and buffers on the way to them."""

    dout: Any  # (TILE, headdim)
    entered: Any  # (TILE, headdim), enter * dout
    within: Any  # (TILE, headdim), (W * CB)ᵀ dout
    through: Any  # (TILE, headdim), B E
    dB: Any  # (d_state, TILE), before the factor dt
    dC: Any  # (d_state, TILE)
    ddt: Any  # (TILE,), through dt x only
    dlog_decay: Any  # (TILE,)
    rows: Any  # (TILE,), what a row has from the entering state
    cols: Any  # (TILE,), what a column has from the leaving state
    rowsT: Any  # (headdim, TILE)
    G: Any  # (TILE, TILE)
    GdtT: Any  # (TILE, TILE)
    WCB: Any  # (TILE, TILE)


@njit(**FUNCTION)
def new_gradients(state):
    d_state, headdim = state.shape
    dtype = state.dtype
    return Gradients(
        np.zeros((TILE, headdim), dtype),
        np.zeros((TILE, headdim), dtype),
        np.zeros((TILE, headdim), dtype),
        np.zeros((TILE, headdim), dtype),
        np.zeros((d_state, TILE), dtype),
        np.zeros((d_state, TILE), dtype),
        np.zeros(TILE, dtype),
        np.zeros(TILE, dtype),
        np.zeros(TILE, dtype),
        np.zeros(TILE, dtype),
        np.zeros((headdim, TILE), dtype),
        np.zeros((TILE, TILE), dtype),
        np.zeros((TILE, TILE), dtype),
        np.zeros((TILE, TILE), dtype),
    )


@njit(**FUNCTION)
def differentiate_tile(grads, tile, h, E, total):
    """The equations at the top, for one tile; dE replaces E."""
    compute_W(tile)
    compute_CB(tile)
    scale_rows(grads.entered, grads.dout, tile.enter)
    scale_rows(tile.faded, tile.x, tile.leave)

    transpose(grads.rowsT, tile.x)
    set_product(grads.G, grads.dout, grads.rowsT, ALL)
    within_tile(grads, tile)

    one = tile.dt.dtype.type(1)
    transpose(grads.rowsT, grads.entered)
    set_product(grads.dC, h, grads.rowsT, ALL)
    sum_states(grads.rows, grads.dC, tile.C)
    add_product(grads.dC, one, tile.B, grads.GdtT)

    transpose(grads.rowsT, tile.faded)
    set_product(grads.dB, E, grads.rowsT, ALL)
    sum_states(grads.cols, grads.dB, tile.B)
    add_product(grads.dB, one, tile.C, grads.G)

    set_product(grads.within, grads.WCB.T, grads.dout, UPPER)
    set_product(grads.through, tile.B.T, E, ALL)
    add_decays_of_states(grads, tile, total * inner_product(h, E))
    add_product(E, total, tile.C, grads.entered)


@njit(**FUNCTION)
def within_tile(grads, tile):
    """What passes from token to token: G (from dM), W * CB, and their shares of dt and decay."""
    zero = tile.dt.dtype.type(0)
    grads.ddt[:] = 0
    grads.rows[:] = 0
    for i in range(TILE - 1, -1, -1):
        G, W, CB, WCB = grads.G[i], tile.W[i], tile.CB[i], grads.WCB[i]
        for j in range(TILE):
            G[j] *= W[j]
            WCB[j] = W[j] * CB[j]
        # rows[j] sums the pairs of column j with all rows from i on.
        for j in range(TILE):
            pair = G[j] * CB[j]
            grads.ddt[j] += pair
            grads.rows[j] += pair * tile.dt[j]
        between = zero
        for j in range(i):
            between += grads.rows[j]
        grads.dlog_decay[i] = between
        for j in range(TILE):
            grads.GdtT[j, i] = G[j] * tile.dt[j]


@njit(**FUNCTION)
def sum_states(out, a, b):
    """out[i] = sum over n of a[n, i] * b[n, i]."""
    out[:] = 0
    for n in range(a.shape[0]):
        row_a, row_b = a[n], b[n]
        for i in range(TILE):
            out[i] += row_a[i] * row_b[i]


@njit(**FUNCTION)
def add_decays_of_states(grads, tile, crossing):
    """dlog_decay from what enters (rows that see k), leaves (columns before k) and crosses."""
    before = crossing
    for k in range(TILE):
        grads.dlog_decay[k] += before
        before += grads.cols[k] * tile.dt[k]
        grads.ddt[k] += grads.cols[k]
    after = grads.rows.dtype.type(0)
    for k in range(TILE - 1, -1, -1):
        after += grads.rows[k]
        grads.dlog_decay[k] += after


@njit(**SUM)
def inner_product(a, b):
    total = a.dtype.type(0)
    for n in range(a.shape[0]):
        for p in range(a.shape[1]):
            total += a[n, p] * b[n, p]
    return total


@njit(**FUNCTION)
def add_columns(out, columns, factor, b, g, t, length, step):
    """Add (d_state, TILE), times a factor per token, to the rows that were read transposed."""
    for i in range(length):
        for n in range(out.shape[3]):
            out[b, t + i * step, g, n] += columns[n, i] * factor[i]


@njit(**FUNCTION)
def transpose(out, matrix):
    for j in range(matrix.shape[1]):
        for i in range(TILE):
            out[j, i] = matrix[i, j]


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
        at_dx = b * dx.batch + t * dx.token + h * dx.head
        for p in range(headdim):
            narrow(dx.memory, at_dx + p, row[p])
