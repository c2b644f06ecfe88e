"""A tile: up to TILE consecutive tokens of one sequence, for one head and direction.

Along the direction, with ``decay_t = exp(dt_t A)``, and h the state before the tile, stored as
(d_state, headdim)::

    W[i, j] = product of decay over the tokens after j up to i, 0 for j after i
    out     = (W * C Bᵀ * dt) x + enter * (C h)          enter_i = decay up to i
    h'      = total h + Bᵀ (leave * dt * x)              leave_j = decay after j

The decays are products of decays, never exponentials of differences of sums, so however strong they
are, nothing is lost. With the shift, ``out`` belongs one token further along the direction.

B and C are read transposed, (d_state, TILE), so that all later loops run along contiguous memory.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from .floats import widen
from .products import ALL, FUNCTION, add_product, set_product

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
    initial (nsequences, nheads, headdim, d_state), or no rows where all start from zero.
    """

    dt: Any
    decay: Any
    A: Any
    B: Any
    C: Any
    initial: Any


class Tile(NamedTuple):
    """The buffers of a tile, zero (decays 1) beyond its last token; sizes are padded."""

    x: Any  # (TILE, headdim)
    faded: Any  # (TILE, headdim), x times a factor per token
    B: Any  # (d_state, TILE)
    C: Any  # (d_state, TILE)
    dt: Any  # (TILE,)
    decay: Any  # (TILE,)
    enter: Any  # (TILE,)
    leave: Any  # (TILE,)
    W: Any  # (TILE, TILE)
    CB: Any  # (TILE, TILE)


@njit(**FUNCTION)
def new_tile(state):
    """Buffers for tiles beside states of this (padded) shape and dtype."""
    d_state, headdim = state.shape
    dtype = state.dtype
    return Tile(
        np.zeros((TILE, headdim), dtype),
        np.zeros((TILE, headdim), dtype),
        np.zeros((d_state, TILE), dtype),
        np.zeros((d_state, TILE), dtype),
        np.zeros(TILE, dtype),
        np.zeros(TILE, dtype),
        np.zeros(TILE, dtype),
        np.zeros(TILE, dtype),
        np.zeros((TILE, TILE), dtype),
        np.zeros((TILE, TILE), dtype),
    )


@njit(**FUNCTION)
def tile_length(sequence, t, start, stop, step):
    """How many tokens from t on, in steps of ``step``, are of t's sequence and in [start, stop)."""
    length = 1
    while length < TILE:
        following = t + length * step
        if following < start or following >= stop or sequence[following] != sequence[t]:
            break
        length += 1
    return length


@njit(**FUNCTION)
def continues(sequence, t, step):
    """Whether the token after t, in steps of ``step``, is of the same sequence."""
    following = t + step
    return 0 <= following < sequence.shape[0] and sequence[following] == sequence[t]


@njit(**FUNCTION)
def read_rows(out, rows, b, h, t, length, step, headdim):
    """Rows of x (or of a tensor like it) into a buffer; zeros beyond."""
    for i in range(length):
        base = b * rows.batch + (t + i * step) * rows.token + h * rows.head
        if rows.channel == 1:
            for p in range(headdim):
                out[i, p] = widen(rows.memory, base + p)
        else:
            for p in range(headdim):
                out[i, p] = widen(rows.memory, base + p * rows.channel)
    out[length:] = 0


@njit(**FUNCTION)
def read_columns(out, stream, b, g, t, length, step):
    """Rows of (batch, seqlen, ngroups, d_state) to (d_state, TILE); zeros beyond."""
    if length == TILE:
        for n in range(stream.shape[3]):
            for i in range(TILE):
                out[n, i] = stream[b, t + i * step, g, n]
    else:
        for n in range(stream.shape[3]):
            for i in range(TILE):
                out[n, i] = stream[b, t + i * step, g, n] if i < length else out.dtype.type(0)


@njit(**FUNCTION)
def read_tile(tile, x, stream, b, h, t, length, step, headdim):
    """Fill a tile, but for C, with ``length`` tokens from t on; returns the decay across it."""
    g = h // (stream.dt.shape[1] // stream.B.shape[2])
    read_rows(tile.x, x, b, h, t, length, step, headdim)
    read_columns(tile.B, stream.B, b, g, t, length, step)
    return read_decays(
        tile.dt, tile.decay, tile.enter, tile.leave, stream.dt[b, h], stream.decay[b, h],
        t, length, step,
    )  # fmt: skip


@njit(**FUNCTION)
def read_decays(tile_dt, tile_decay, enter, leave, dt, decay, t, length, step):
    """dt, the decays, and their products from either end; returns the product of all."""
    one = dt.dtype.type(1)
    tile_dt[length:] = 0
    tile_decay[length:] = 1
    total = one
    for i in range(length):
        tile_dt[i] = dt[t + i * step]
        factor = decay[t + i * step]
        tile_decay[i] = factor
        total *= factor
        enter[i] = total
    enter[length:] = total
    after = one
    for i in range(TILE - 1, -1, -1):
        leave[i] = after
        after *= tile_decay[i]
    return total


@njit(**FUNCTION)
def read_C(tile, stream, b, h, t, length, step):
    g = h // (stream.dt.shape[1] // stream.B.shape[2])
    read_columns(tile.C, stream.C, b, g, t, length, step)


@njit(**FUNCTION)
def compute_W(tile):
    """W, each row from the one before."""
    zero = tile.W.dtype.type(0)
    smallest = np.finfo(tile.W.dtype).tiny
    tile.W[0] = 0
    for i in range(TILE):
        if i > 0:
            for j in range(TILE):
                # Below the normal numbers a product is dropped: computing with it takes long.
                weight = tile.W[i - 1, j] * tile.decay[i]
                tile.W[i, j] = zero if weight < smallest else weight
        tile.W[i, i] = 1


@njit(**FUNCTION)
def compute_CB(tile):
    set_product(tile.CB, tile.C.T, tile.B, ALL)


@njit(**FUNCTION)
def scale_rows(out, rows, factor):
    """out[i] = factor[i] * rows[i], for (TILE, headdim)."""
    for i in range(TILE):
        target, row, weight = out[i], rows[i], factor[i]
        for p in range(row.shape[0]):
            target[p] = weight * row[p]


@njit(**FUNCTION)
def advance(h, tile, total):
    """h' = total h + Bᵀ (leave * dt * x), in place."""
    for i in range(TILE):
        factor = tile.leave[i] * tile.dt[i]
        for p in range(h.shape[1]):
            tile.faded[i, p] = factor * tile.x[i, p]
    add_product(h, total, tile.B, tile.faded)


@njit(**FUNCTION)
def restart(state, initial, sequence, head):
    """Set a state to the initial one of a sequence."""
    state[:] = 0
    if initial.shape[0] > 0:
        _, _, headdim, d_state = initial.shape
        for n in range(d_state):
            for p in range(headdim):
                state[n, p] = initial[sequence, head, p, n]
