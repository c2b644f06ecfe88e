"""The gradients within a tile, for one head and direction.

With ``dout`` the gradient of ``out`` (so of y, one token further with the shift), E the gradient of
the state after the tile, and the names of ``tile.py``::

    dM     = dout xᵀ                           G     = dM * W
    pairs  = G * CB                            dlog_decay_k = sum of pairs[i, j] dt_j, j < k <= i
    dC     = (G * dt) B + enter * (dout hᵀ)    dB    = (G * dt)ᵀ C + feed * (x Eᵀ)
    dx     = dt * ((W * CB)ᵀ dout + leave * (B E))
    ddt    = column sums of pairs + leave * (x Eᵀ · B)
    dE     = across E + Cᵀ (enter * dout)

Every sum of dlog_decay has only those terms that contain the decay of token k; none is the
difference of larger ones ("before" and "after" are meant along the direction).

The heads of a group add up ``G * dt`` and the parts of dB and dC that come from states; the
products with B and C are left to the end.
"""

from typing import Any, NamedTuple

from numba import njit

from .products import (
    ALL,
    FUNCTION,
    LOWER,
    SUM,
    UPPER,
    add_product,
    set_product,
    transpose,
    zeros,
)
from .tile import TILE, compute_W


class Sums(NamedTuple):
    """What a direction adds up in a tile: over the heads of a group; of a head, over the rows."""

    Gdt: Any  # (TILE, TILE)
    B: Any  # (d_state, TILE)
    C: Any  # (d_state, TILE)
    later: Any  # (TILE, TILE)


class Gradients(NamedTuple):
    """The gradients of a tile, and buffers on the way to them."""

    dout: Any  # (TILE, headdim)
    doutT: Any  # (headdim, TILE)
    xT: Any  # (headdim, TILE)
    dx: Any  # (TILE, headdim), before the factor dt
    ddt: Any  # (TILE,), through dt x only
    dlog_decay: Any  # (TILE,)
    dM: Any  # (TILE, TILE)
    WCB: Any  # (TILE, TILE)
    G: Any  # (TILE, TILE)
    dots: Any  # (TILE,)
    product: Any  # (d_state, TILE)
    rows: Any  # (TILE, d_state)


@njit(**FUNCTION)
def new_sums(state):
    d_state = state.shape[0]
    return Sums(
        zeros((TILE, TILE), state),
        zeros((d_state, TILE), state),
        zeros((d_state, TILE), state),
        zeros((TILE, TILE), state),
    )


@njit(**FUNCTION)
def new_gradients(state):
    d_state, headdim = state.shape
    return Gradients(
        zeros((TILE, headdim), state),
        zeros((headdim, TILE), state),
        zeros((headdim, TILE), state),
        zeros((TILE, headdim), state),
        zeros((TILE,), state),
        zeros((TILE,), state),
        zeros((TILE, TILE), state),
        zeros((TILE, TILE), state),
        zeros((TILE, TILE), state),
        zeros((TILE,), state),
        zeros((d_state, TILE), state),
        zeros((TILE, d_state), state),
    )


@njit(**FUNCTION)
def multiply_dout(grads):
    """doutᵀ and dM, which both directions share without the shift."""
    transpose(grads.doutT, grads.dout)
    set_product(grads.dM, grads.dout, grads.xT, ALL)


@njit(**FUNCTION)
def differentiate(grads, sums, tile, shared, h, E, step):
    """The equations at the top but that of dE, from dM, dout, doutᵀ and xᵀ."""
    compute_W(tile, step)
    differentiate_pairs(grads, sums, tile, shared.CB, step)

    set_product(grads.product, h, grads.doutT, ALL)
    add_columns(sums.C, grads.dots, grads.product, tile.enter, shared.C)
    add_rows_after(grads.dlog_decay, grads.dots, tile.enter, step)

    set_product(grads.product, E, grads.xT, ALL)
    add_columns(sums.B, grads.dots, grads.product, tile.feed, shared.B)
    for i in range(grads.ddt.shape[0]):
        grads.ddt[i] += tile.leave[i] * grads.dots[i]
    crossing = tile.across[0] * inner_product(h, E)
    add_columns_before(grads.dlog_decay, grads.dots, tile.feed, crossing, step)

    set_product(grads.dx, shared.B.T, E, ALL)
    add_product(grads.dx, tile.leave, grads.WCB.T, grads.dout, UPPER if step > 0 else LOWER)


@njit(**FUNCTION)
def differentiate_pairs(grads, sums, tile, CB, step):
    """What passes from token to token: W * CB, G * dt, and their shares of ddt and dlog_decay."""
    G, dM, W, WCB, dt = grads.G, grads.dM, tile.W, grads.WCB, tile.dt
    Gdt, later = sums.Gdt, sums.later
    size = W.shape[0]
    for i in range(size):
        for j in range(size):
            G[i, j] = dM[i, j] * W[i, j]
            WCB[i, j] = W[i, j] * CB[i, j]
    for i in range(size):
        for j in range(size):
            Gdt[i, j] += G[i, j] * dt[j]
    ddt = grads.ddt
    ddt[:] = 0
    for i in range(size):
        for j in range(size):
            ddt[j] += G[i, j] * CB[i, j]
    # later[i, j] sums pairs times dt over the rows from i on, for j before i; the rest stays zero.
    for k in range(size):
        i = size - 1 - k if step > 0 else k
        first, last = (0, i) if step > 0 else (i + 1, size)
        if k == 0:
            for j in range(first, last):
                later[i, j] = G[i, j] * CB[i, j] * dt[j]
        else:
            for j in range(first, last):
                later[i, j] = later[i + step, j] + G[i, j] * CB[i, j] * dt[j]
    transpose(G, later)  # G has served
    dlog_decay = grads.dlog_decay
    dlog_decay[:] = 0
    for j in range(size):
        for i in range(size):
            dlog_decay[i] += G[j, i]


@njit(**FUNCTION)
def add_columns(out, dots, product, factor, other):
    """Add the scaled columns of ``product``; ``dots`` are those, unscaled, times ``other``'s."""
    dots[:] = 0
    for n in range(out.shape[0]):
        row, target, with_row = product[n], out[n], other[n]
        for i in range(dots.shape[0]):
            target[i] += factor[i] * row[i]
            dots[i] += row[i] * with_row[i]


@njit(**FUNCTION)
def add_rows_after(dlog_decay, dots, enter, step):
    """What rows have from the entering state passes the decays of all tokens up to theirs."""
    after = dots.dtype.type(0)
    for k in range(TILE - 1, -1, -1):
        i = k if step > 0 else TILE - 1 - k
        after += enter[i] * dots[i]
        dlog_decay[i] += after


@njit(**FUNCTION)
def add_columns_before(dlog_decay, dots, feed, crossing, step):
    """What columns give to the leaving state, and what crosses the tile, passes those behind."""
    before = crossing
    for k in range(TILE):
        i = k if step > 0 else TILE - 1 - k
        dlog_decay[i] += before
        before += feed[i] * dots[i]


@njit(**SUM)
def inner_product(a, b):
    a, b = a.ravel(), b.ravel()
    total = a.dtype.type(0)
    for i in range(a.shape[0]):
        total += a[i] * b[i]
    return total


@njit(**FUNCTION)
def finish_sums(sums, grads, shared, to, part, b, g, t, length):
    """Add the products with ``G * dt``, and the whole to dB and dC; start again from zero."""
    set_product(grads.product, shared.C, sums.Gdt, ALL)
    add_rows(to.dB[part], grads, sums.B, b, g, t, length)
    transpose(shared.CB, sums.Gdt)  # CB has served
    set_product(grads.product, shared.B, shared.CB, ALL)
    add_rows(to.dC[part], grads, sums.C, b, g, t, length)
    sums.Gdt[:] = 0
    sums.B[:] = 0
    sums.C[:] = 0


@njit(**FUNCTION)
def add_rows(out, grads, columns, b, g, t, length):
    """Add the columns and those of ``grads.product`` to the rows of ``out``."""
    product, rows = grads.product, grads.rows
    for n in range(columns.shape[0]):
        target, source = product[n], columns[n]
        for i in range(target.shape[0]):
            target[i] += source[i]
    transpose(rows, product)
    for i in range(length):
        target, source = out[b, t + i, g], rows[i]
        for n in range(target.shape[0]):
            target[n] += source[n]
