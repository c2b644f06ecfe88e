"""Gradients of what belongs to a token and head: x, the step sizes and D, and with them A.

For a direction, with c the inclusive sums of log decays in its order, S what enters the tile, G the
adjoint that enters it from the other end, and dM_ij = dy_i · x_j::

    dv_j   = sum over i of exp(c_i - c_j) (C_i · B_j) dy_i + exp(total - c_j) G B_j
    pair_ij = exp(c_i - c_j) (C_i · B_j) dt_j dM_ij
    in_i   = exp(c_i) dy_i · S C_i               out_j = exp(total - c_j) dt_j x_j · G B_j
    da_k   = sum over pairs j < k <= i + sum over i >= k of in_i + sum over j < k of out_j
             + exp(total) <S, G>
    ddt_j  = x_j · dv_j + A da_j                 dx_j = dt_j dv_j + D dy_j

Nothing is summed beyond the tile, so nothing cancels in long sequences. Under the shift dy_i is
that of the row that token i is the source of.
"""

import triton
import triton.language as tl

from .common import between, load_state, locate, offset, power, put, segments, tile
from .sweep import shifted

# Sums per tile and head, to be added up over the tiles: for A and D.
PARTIALS = tl.constexpr(2)


@triton.jit
def decay_gradient(pairs_in, pairs_out, enters, leaves, constant, REVERSE: tl.constexpr):
    """da: (Q,). ``pairs_in``, ``pairs_out``: each token's pairs with earlier and later ones."""
    crossing = pairs_out - pairs_in + leaves
    crossing = tl.cumsum(crossing, 0, reverse=REVERSE) - crossing
    return crossing + tl.cumsum(enters, 0, reverse=not REVERSE) + constant


@triton.jit(
    do_not_specialize=[
        "unit_offset",
        "seqlen",
        "unit_size",
        "units_per_row",
        "x_batch",
        "dy_batch",
        "D_batch",
        "B_batch",
        "C_batch",
    ]
)
def token_gradients(
    x, dy, D, steps, sums, sums_rev, A, B, C, table, borders,
    states, adjoints, states_rev, adjoints_rev, dx, ddt, dD, partials, channel_partials,
    unit_offset, seqlen, nheads, heads_per_group, unit_size, units_per_row,
    x_batch, x_token, x_head, dy_batch, dy_token, dy_head, D_batch, D_token, D_head,
    B_batch, B_token, B_group, C_batch, C_token, C_group,
    REVERSE: tl.constexpr, FUSED: tl.constexpr, ADD: tl.constexpr,
    MOVES: tl.constexpr, SHIFT: tl.constexpr, SKIP: tl.constexpr,
    TABLE: tl.constexpr, BORDERS: tl.constexpr, FULL: tl.constexpr,
    ALIGNED: tl.constexpr, ALIGNED_KEYS: tl.constexpr,
    HEADDIM: tl.constexpr, D_STATE: tl.constexpr,
    Q: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    PRODUCT: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One program per tile and head. FUSED: both directions, which have the same parameters.

    ``ddt`` (tiles, nheads, Q) is that of the step sizes. ``partials`` (tiles, PARTIALS, nheads)
    and ``channel_partials`` (tiles, nheads, headdim) get each tile's
    share of the gradients of A and D. SKIP is "" where another launch takes care of D.
    """
    SLICES: tl.constexpr = (HEADDIM + P - 1) // P
    tiles_per_unit = tl.cdiv(unit_size, Q)
    program = tl.program_id(0)
    head = program % nheads
    index = (program // nheads) % tiles_per_unit
    local = program // (nheads * tiles_per_unit)
    unit = local + unit_offset
    row, start, length, room, links = locate(table, unit, seqlen, unit_size, units_per_row, TABLE)
    first = index * Q
    place = (unit.to(tl.int64) * tiles_per_unit + index) * (nheads * PARTIALS) + head
    if first >= room:
        for which in tl.static_range(PARTIALS):
            tl.store(partials + place + which * nheads, 0.0)
        if SKIP == "channel":
            none = (unit.to(tl.int64) * tiles_per_unit + index) * nheads + head
            for part in tl.static_range(SLICES):
                p = part * P + tl.arange(0, P)
                pointers = channel_partials + none * HEADDIM + p
                tl.store(pointers, tl.zeros([P], tl.float32), mask=p < HEADDIM)
        return
    group = head // heads_per_group
    q = tl.arange(0, Q)
    n = tl.arange(0, N)
    token = row.to(tl.int64) * seqlen + start
    y_token = nheads * HEADDIM
    x += offset(row, start, x_batch, x_token, ALIGNED) + head * x_head
    dy += offset(row, start, dy_batch, dy_token, ALIGNED) + head * dy_head
    dx += token * y_token + head * HEADDIM
    B += offset(row, start, B_batch, B_token, ALIGNED_KEYS) + group * B_group
    C += offset(row, start, C_batch, C_token, ALIGNED_KEYS) + group * C_group
    if BORDERS:
        borders += token
    head_state = ((local.to(tl.int64) * tiles_per_unit + index) * nheads + head) * (
        HEADDIM * D_STATE
    )

    rate = tl.load(A + head).to(tl.float32)
    prepared = ((unit.to(tl.int64) * tiles_per_unit + index) * nheads + head) * Q
    d = tl.load(steps + prepared + q)
    inclusive = tl.load(sums + prepared + q)
    total = tl.load(sums + prepared + (0 if REVERSE else Q - 1))
    enter = power(inclusive)
    leave = power(total - inclusive)
    across = power(total)
    if FUSED:
        inclusive_rev = tl.load(sums_rev + prepared + q)
        enter_rev = power(inclusive_rev)
        leave_rev = power(total - inclusive_rev)
    if BORDERS:
        segment, last = segments(borders, first, q, length)
        same = segment[:, None] == segment[None, :]
        enter = tl.where(segment == (last if REVERSE else 0), enter, 0.0)
        leave = tl.where(segment == (0 if REVERSE else last), leave, 0.0)
        across = tl.where(last == 0, across, 0.0)
        if FUSED:
            enter_rev = tl.where(segment == last, enter_rev, 0.0)
            leave_rev = tl.where(segment == 0, leave_rev, 0.0)

    # Transposed: rows are the columns j of the formulas.
    Bt = tile(B, first, q, n, B_token, 0, length, D_STATE, FULL, PRODUCT)
    Ct = tile(C, first, q, n, C_token, 0, length, D_STATE, FULL, PRODUCT)
    weights = tl.dot(Bt, tl.trans(Ct), input_precision=PRECISION)
    exponent = -between(inclusive, inclusive, EXACT)
    diagonal = q[:, None] == q[None, :]
    later = q[None, :] > q[:, None]  # row i of the formulas comes after column j
    if FUSED:
        exponent = tl.minimum(exponent, -between(inclusive_rev, inclusive_rev, EXACT))
        weights = weights * tl.exp2(exponent)
        weights = tl.where(diagonal, weights + weights, weights)
    else:
        seen = (q[None, :] <= q[:, None]) if REVERSE else (later | diagonal)
        weights = tl.where(seen, weights * tl.exp2(exponent), 0.0)
    if BORDERS:
        weights = tl.where(same, weights, 0.0)

    pairs = tl.zeros([Q, Q], tl.float32)
    straight = tl.zeros([Q], tl.float32)  # x · dv
    enters = tl.zeros([Q], tl.float32)
    leaves = tl.zeros([Q], tl.float32)
    constant = 0.0
    if FUSED:
        enters_rev = tl.zeros([Q], tl.float32)
        leaves_rev = tl.zeros([Q], tl.float32)
        constant_rev = 0.0
    skip = tl.zeros([Q], tl.float32)
    for part in tl.static_range(SLICES):
        p = part * P + tl.arange(0, P)
        X = tile(x, first, q, p, x_token, 0, length, HEADDIM, FULL, PRODUCT)
        Y = shifted(
            dy, borders, first, q, p, dy_token, length, links,
            REVERSE, SHIFT, BORDERS, HEADDIM, FULL, PRODUCT,
        )  # fmt: skip
        wide = X.to(tl.float32)
        pairs = tl.dot(X, tl.trans(Y), pairs, input_precision=PRECISION)
        dv = tl.dot(weights.to(PRODUCT), Y, input_precision=PRECISION)
        if MOVES:
            S = load_state(states + head_state, p, n, HEADDIM, D_STATE)
            read = tl.dot(Ct, tl.trans(S.to(PRODUCT)), input_precision=PRECISION)
            enters += tl.sum(read * Y.to(tl.float32), 1) * enter
            G = load_state(adjoints + head_state, p, n, HEADDIM, D_STATE)
            read = tl.dot(Bt, tl.trans(G.to(PRODUCT)), input_precision=PRECISION)
            leaves += tl.sum(read * wide, 1) * leave * d
            dv += read * leave[:, None]
            constant += tl.sum(S.to(tl.float32) * G.to(tl.float32)) * across
        if MOVES and FUSED:
            S = load_state(states_rev + head_state, p, n, HEADDIM, D_STATE)
            read = tl.dot(Ct, tl.trans(S.to(PRODUCT)), input_precision=PRECISION)
            enters_rev += tl.sum(read * Y.to(tl.float32), 1) * enter_rev
            G = load_state(adjoints_rev + head_state, p, n, HEADDIM, D_STATE)
            read = tl.dot(Bt, tl.trans(G.to(PRODUCT)), input_precision=PRECISION)
            leaves_rev += tl.sum(read * wide, 1) * leave_rev * d
            dv += read * leave_rev[:, None]
            constant_rev += tl.sum(S.to(tl.float32) * G.to(tl.float32)) * across
        straight += tl.sum(dv * wide, 1)
        dv = dv * d[:, None]
        if SKIP != "":
            if SHIFT:
                U = tile(dy, first, q, p, dy_token, 0, length, HEADDIM, FULL, tl.float32)
            else:
                U = Y.to(tl.float32)
            product = U * wide
            if SKIP == "channel":
                scale = tl.load(D + head * HEADDIM + p, mask=p < HEADDIM, other=0.0).to(tl.float32)
                dv += scale[None, :] * U
                where = (unit.to(tl.int64) * tiles_per_unit + index) * nheads + head
                pointers = channel_partials + where * HEADDIM + p
                tl.store(pointers, tl.sum(product, 0), mask=p < HEADDIM)
            else:
                skip += tl.sum(product, 1)
                if SKIP == "head":
                    dv += tl.load(D + head).to(tl.float32) * U
                else:
                    here = D + offset(row, start, D_batch, D_token, False) + head * D_head
                    rows = first + q
                    scale = tl.load(
                        here + rows.to(tl.int64) * D_token, mask=rows < length, other=0.0
                    )
                    dv += scale.to(tl.float32)[:, None] * U
        if ADD:
            dv += tile(dx, first, q, p, y_token, 0, length, HEADDIM, FULL, tl.float32)
        put(dx, first, q, p, y_token, room, dv, HEADDIM, FULL)

    pairs = pairs * weights * d[:, None]
    if FUSED:
        ahead = tl.where(later, pairs, 0.0)
        behind = tl.where(later | diagonal, 0.0, pairs)
        da = decay_gradient(
            tl.sum(ahead, 0), tl.sum(ahead, 1), enters, leaves, constant, False
        ) + decay_gradient(
            tl.sum(behind, 0), tl.sum(behind, 1), enters_rev, leaves_rev, constant_rev, True
        )
    else:
        pairs = tl.where(diagonal, 0.0, pairs)
        da = decay_gradient(tl.sum(pairs, 0), tl.sum(pairs, 1), enters, leaves, constant, REVERSE)
    rows = first + q
    tl.store(partials + place, tl.sum(da * d, 0))
    tl.store(partials + place + nheads, tl.sum(skip, 0))
    tl.store(ddt + prepared + q, straight + rate * da)
    if SKIP == "token":
        pointers = dD + (token + rows) * nheads + head
        tl.store(pointers, skip.to(dD.dtype.element_ty), mask=rows < room)
