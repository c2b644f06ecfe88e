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

The heads of a group add up ``G * dt`` and the parts of dB and dC that come from states; the products
with B and C are left to the end.
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
from .tile import TILE


class SharedGradients(NamedTuple):
    """What the heads of a group add up in a tile."""

    Gdt: Any  # (TILE, TILE)
    B: Any  # (d_state, TILE)
    C: Any  # (d_state, TILE)


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
    G: Any  # (TILE,), a row of it
    pairs: Any  # (TILE,), per column, times dt: the sum over rows from one on
    states: Any  # (TILE,), likewise of dC with C, dB with B
    product: Any  # (d_state, TILE)


@njit(**FUNCTION)
def new_shared_gradients(state):
    d_state = state.shape[0]
    return SharedGradients(
        zeros((TILE, TILE), state), zeros((d_state, TILE), state), zeros((d_state, TILE), state)
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
        zeros((TILE,), state),
        zeros((TILE,), state),
        zeros((TILE,), state),
        zeros((d_state, TILE), state),
    )


@njit(**FUNCTION)
def differentiate(grads, sums, tile, shared, h, E, step):
    """The equations at the top but that of dE, from dM, dout, doutᵀ and xᵀ."""
    differentiate_pairs(grads, sums.Gdt, tile, shared.CB, step)

    set_product(grads.product, h, grads.doutT, ALL)
    add_columns(sums.C, grads.states, grads.product, tile.enter, shared.C)
    add_rows_after(grads.dlog_decay, grads.states, tile.enter, step)

    set_product(grads.product, E, grads.xT, ALL)
    add_columns(sums.B, grads.states, grads.product, tile.feed, shared.B)
    for i in range(grads.ddt.shape[0]):
        grads.ddt[i] += tile.leave[i] * grads.states[i]
    crossing = tile.across[0] * inner_product(h, E)
    add_columns_before(grads.dlog_decay, grads.states, tile.feed, crossing, step)

    set_product(grads.dx, shared.B.T, E, ALL)
    add_product(grads.dx, tile.leave, grads.WCB.T, grads.dout, UPPER if step > 0 else LOWER)


@njit(**FUNCTION)
def differentiate_pairs(grads, Gdt, tile, CB, step):
    """What passes from token to token: W * CB, the sum of G * dt, and shares of ddt and dlog_decay."""
    G, pairs, ddt, dt = grads.G, grads.pairs, grads.ddt, tile.dt
    ddt[:] = 0
    pairs[:] = 0
    for k in range(TILE - 1, -1, -1):
        i = k if step > 0 else TILE - 1 - k
        dM, W, CB_row, WCB, Gdt_row = grads.dM[i], tile.W[i], CB[i], grads.WCB[i], Gdt[i]
        for j in range(G.shape[0]):
            G[j] = dM[j] * W[j]
            WCB[j] = W[j] * CB_row[j]
        for j in range(G.shape[0]):
            Gdt_row[j] += G[j] * dt[j]
        # pairs[j] sums column j over all rows from i on.
        for j in range(G.shape[0]):
            pair = G[j] * CB_row[j]
            ddt[j] += pair
            pairs[j] += pair * dt[j]
        grads.dlog_decay[i] = sum_of(pairs[:i]) if step > 0 else sum_of(pairs[i + 1 :])


@njit(**FUNCTION)
def add_columns(out, dots, product, factor, other):
    """Add to ``out`` the columns of ``product``, scaled; ``dots`` are their products with other's."""
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
    total = a.dtype.type(0)
    for n in range(a.shape[0]):
        for p in range(a.shape[1]):
            total += a[n, p] * b[n, p]
    return total


@njit(**SUM)
def sum_of(terms):
    total = terms.dtype.type(0)
    for i in range(terms.shape[0]):
        total += terms[i]
    return total


@njit(**FUNCTION)
def finish_shared(sums, product, rows, shared, dB, dC, b, g, t, length):
    """Add the products with ``G * dt``, and the whole to dB and dC (batch, seqlen, ngroups, d_state)."""
    set_product(product, shared.C, sums.Gdt, ALL)
    add_rows(dB, rows, sums.B, product, b, g, t, length)
    transpose(shared.CB, sums.Gdt)  # CB has served
    set_product(product, shared.B, shared.CB, ALL)
    add_rows(dC, rows, sums.C, product, b, g, t, length)
    sums.Gdt[:] = 0
    sums.B[:] = 0
    sums.C[:] = 0


@njit(**FUNCTION)
def add_rows(out, rows, columns, more, b, g, t, length):
    """Add (d_state, TILE) to the rows of ``out``."""
    for n in range(columns.shape[0]):
        target, source = more[n], columns[n]
        for i in range(target.shape[0]):
            target[i] += source[i]
    transpose(rows, more)
    for i in range(length):
        target, source = out[b, t + i, g], rows[i]
        for n in range(target.shape[0]):
            target[n] += source[n]
