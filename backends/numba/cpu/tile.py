"""A tile: up to TILE consecutive tokens of one sequence, for one head and direction.

Along the direction, with ``decay_t = exp(dt_t A)``, and h the state before the tile, stored as
(d_state, headdim)::

    W[i, j] = product of decay over the tokens after j up to i, 0 for j after i
    out     = (W * C Bᵀ * dt) x + enter * (C h)          enter_i = decay up to i
    h'      = across h + Bᵀ (feed * x)                   feed_j  = leave_j dt_j
                                                         leave_j = decay after j
                                                         across  = decay of all

The decays are products of decays, never exponentials of differences of sums, so however strong they
are, nothing is lost. With the shift, ``out`` belongs one token further along the direction.

The rows of a tile stand in the order of time for both directions, so that both cut a segment into
the same tiles: W is lower triangular forwards, upper triangular in reverse.

Inner loops run over a shape, not over TILE: LLVM takes a loop of known length apart into single
elements instead of vectors. It also finds no vectors in part of a row, so whole rows are passed.

B, C and C Bᵀ are the same for all heads of a group, so a task takes several heads through a tile.
B and C are turned to (d_state, TILE), so that all later loops run along contiguous memory.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from .floats import narrow, widen
from .products import ALL, FUNCTION, add_product, set_product, transpose, zeros

TILE = 32


class Rows(NamedTuple):
    """A (batch, seqlen, nheads, headdim) tensor: its memory, and the strides in elements."""

    memory: Any
    batch: int
    token: int
    head: int
    channel: int


class Stream(NamedTuple):
    """What a direction reads besides x: contiguous, in the dtype of the computation.

    dt and decay (batch, nheads, seqlen), A (nheads,), B and C (batch, seqlen, ngroups, d_state),
    initial (nsequences, nheads, headdim, d_state), or no rows where all start from zero; step is 1
    forwards, -1 in reverse.
    """

    dt: Any
    decay: Any
    A: Any
    B: Any
    C: Any
    initial: Any
    step: int


class Shared(NamedTuple):
    """What the heads of a group share in a tile, zero beyond its last token; sizes are padded."""

    B: Any  # (d_state, TILE)
    C: Any  # (d_state, TILE)
    CB: Any  # (TILE, TILE)
    rows: Any  # (TILE, d_state), B or C before it is turned


class Tile(NamedTuple):
    """What a head has of its own, zero (decays 1) beyond the last token; sizes are padded."""

    x: Any  # (TILE, headdim)
    faded: Any  # (TILE, headdim), rows times a factor per token
    dt: Any  # (TILE,)
    decay: Any  # (TILE,)
    enter: Any  # (TILE,)
    leave: Any  # (TILE,)
    feed: Any  # (TILE,)
    across: Any  # (d_state,), the same in all
    W: Any  # (TILE, TILE)


@njit(**FUNCTION)
def new_shared(state):
    """Buffers for tiles beside states of this (padded) shape and dtype."""
    d_state = state.shape[0]
    return Shared(
        zeros((d_state, TILE), state),
        zeros((d_state, TILE), state),
        zeros((TILE, TILE), state),
        zeros((TILE, d_state), state),
    )


@njit(**FUNCTION)
def new_tile(state):
    """Likewise."""
    d_state, headdim = state.shape
    return Tile(
        zeros((TILE, headdim), state),
        zeros((TILE, headdim), state),
        zeros((TILE,), state),
        zeros((TILE,), state),
        zeros((TILE,), state),
        zeros((TILE,), state),
        zeros((TILE,), state),
        zeros((d_state,), state),
        zeros((TILE, TILE), state),
    )


@njit(**FUNCTION)
def cut_into_tiles(sequence, start, stop):
    """(first token, length) of the tiles of a segment, in the order of time."""
    tiles = np.empty((stop - start, 2), np.int64)
    count = 0
    t = start
    while t < stop:
        length = 1
        while length < TILE and t + length < stop and sequence[t + length] == sequence[t]:
            length += 1
        if sequence[t] >= 0:
            tiles[count, 0], tiles[count, 1] = t, length
            count += 1
        t += length
    return tiles[:count]


@njit(**FUNCTION)
def along(tiles, k, step):
    """Of a direction's k-th tile: its place among the tiles, first token and length."""
    place = k if step > 0 else tiles.shape[0] - 1 - k
    return place, tiles[place, 0], tiles[place, 1]


@njit(**FUNCTION)
def begins(sequence, t, length, step):
    """Whether a sequence begins with the tile, along the direction."""
    return not continues(sequence, t if step > 0 else t + length - 1, -step)


@njit(**FUNCTION)
def continues(sequence, t, step):
    """Whether the token after t, in steps of ``step``, is of the same sequence."""
    following = t + step
    return 0 <= following < sequence.shape[0] and sequence[following] == sequence[t]


@njit(**FUNCTION)
def read_row(out, rows, b, h, t, headdim):
    base = b * rows.batch + t * rows.token + h * rows.head
    if rows.channel == 1:
        source = rows.memory[base : base + headdim]
        for p in range(source.shape[0]):
            out[p] = widen(source, p)
    else:
        for p in range(headdim):
            out[p] = widen(rows.memory, base + p * rows.channel)


@njit(**FUNCTION)
def read_rows(out, rows, b, h, t, length, headdim):
    """Rows of x (or of a tensor like it) into a buffer; zeros beyond."""
    for i in range(length):
        read_row(out[i], rows, b, h, t + i, headdim)
    out[length:] = 0


@njit(**FUNCTION)
def write_row(rows, b, h, t, row, headdim):
    """One row of a tensor whose channels are contiguous."""
    base = b * rows.batch + t * rows.token + h * rows.head
    target = rows.memory[base : base + headdim]
    for p in range(target.shape[0]):
        narrow(target, p, row[p])


@njit(**FUNCTION)
def read_columns(out, rows, columns, b, g, t, length):
    """Rows of (batch, seqlen, ngroups, d_state) to (d_state, TILE); zeros beyond."""
    for i in range(length):
        source = columns[b, t + i, g]
        for n in range(source.shape[0]):
            rows[i, n] = source[n]
    rows[length:] = 0
    transpose(out, rows)


@njit(**FUNCTION)
def read_shared(shared, stream, b, g, t, length):
    read_columns(shared.B, shared.rows, stream.B, b, g, t, length)
    read_columns(shared.C, shared.rows, stream.C, b, g, t, length)
    set_product(shared.CB, shared.C.T, shared.B, ALL)


@njit(**FUNCTION)
def read_decays(tile, stream, b, h, t, length):
    """dt, the decays, and their products from either end."""
    tile.dt[length:] = 0
    tile.decay[length:] = 1
    for i in range(length):
        tile.dt[i] = stream.dt[b, h, t + i]
        tile.decay[i] = stream.decay[b, h, t + i]
    step = stream.step
    first, last = (0, TILE - 1) if step > 0 else (TILE - 1, 0)
    up_to = after = stream.dt.dtype.type(1)
    for k in range(TILE):
        i, j = first + k * step, last - k * step
        up_to *= tile.decay[i]
        tile.enter[i] = up_to
        tile.leave[j] = after
        after *= tile.decay[j]
    for i in range(TILE):
        tile.feed[i] = tile.leave[i] * tile.dt[i]
    tile.across[:] = up_to


@njit(**FUNCTION)
def compute_W(tile, step):
    """W, each row from the one before; the other triangle stays zero."""
    zero = tile.W.dtype.type(0)
    smallest = np.finfo(tile.W.dtype).tiny
    for k in range(TILE):
        i = k if step > 0 else TILE - 1 - k
        first, last = (0, i) if step > 0 else (i + 1, TILE)
        for j in range(first, last):
            # Below the normal numbers a product is dropped: computing with it takes long.
            weight = tile.W[i - step, j] * tile.decay[i]
            tile.W[i, j] = zero if weight < smallest else weight
        tile.W[i, i] = 1


@njit(**FUNCTION)
def scale_rows(out, rows, factor):
    """out[i] = factor[i] * rows[i], for (TILE, headdim)."""
    for i in range(TILE):
        target, row, weight = out[i], rows[i], factor[i]
        for p in range(row.shape[0]):
            target[p] = weight * row[p]


@njit(**FUNCTION)
def advance(state, tile, columns, factor, rows):
    """``across * state + columns (factor * rows)``, in place.

    So a state moves along the direction (B, feed, x), and its gradient against it (C, enter, dout).
    """
    scale_rows(tile.faded, rows, factor)
    add_product(state, tile.across, columns, tile.faded, ALL)


@njit(**FUNCTION)
def copy(out, state):
    """Assigning an array does the same, but takes Numba seconds to compile."""
    for n in range(out.shape[0]):
        target, source = out[n], state[n]
        for p in range(target.shape[0]):
            target[p] = source[p]


@njit(**FUNCTION)
def restart(state, initial, sequence, head):
    """Set a state to the initial one of a sequence."""
    state[:] = 0
    if initial.shape[0] > 0:
        _, _, headdim, d_state = initial.shape
        for n in range(d_state):
            for p in range(headdim):
                state[n, p] = initial[sequence, head, p, n]


@njit(**FUNCTION)
def write_state(out, state, sequence, head):
    """The state of a sequence to (nsequences, nheads, headdim, d_state), if anybody wants it."""
    if out.shape[0] > 0:
        _, _, headdim, d_state = out.shape
        for p in range(headdim):
            for n in range(d_state):
                out[sequence, head, p, n] = state[n, p]
