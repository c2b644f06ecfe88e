"""The forward: states in registers, one walk through the unit for each direction.

With the inclusive sums ``c`` of log decays within a tile, in the direction's own order::

    y_i += exp(c_i) C_i stateᵀ + sum over visible j of exp(c_i - c_j) (C_i · B_j) dt_j x_j
    state <- exp(total) state + sum over j of exp(total - c_j) dt_j x_j B_jᵀ

Under the shift C and c of row i are those of its source, the row before it.

The reverse direction goes first and leaves its share in y, where the forward one picks it up. Where
both have the same parameters and there is no shift (FUSED), the matrix of both is that of one, with
the smaller of two exponents, and the forward walk does it alone.
"""

import triton
import triton.language as tl

from .common import between, load_state, locate, offset, power, put, segments, store_state, tile
from .steps import log_decay, tile_steps

# Which pairs of a tile a walk takes care of.
NO_PAIRS = tl.constexpr(0)
OWN_PAIRS = tl.constexpr(1)
ALL_PAIRS = tl.constexpr(2)


@triton.jit
def walk(
    x, dt, sums, sums_rev, A, dt_bias, B, C,
    y, pre_gate, z, D, borders, entering, leaving,
    dt_low, dt_high, head, length, room, links, p, n, q,
    x_stride, dt_stride, sums_stride, B_stride, C_stride, y_stride, z_stride, D_stride,
    REVERSE: tl.constexpr, PAIRS: tl.constexpr, ADD: tl.constexpr, STORE: tl.constexpr,
    LAST: tl.constexpr, ENTERS: tl.constexpr, MOVES: tl.constexpr, LEAVES: tl.constexpr,
    SHIFT: tl.constexpr, PREPARED: tl.constexpr, SOFTPLUS: tl.constexpr, BIAS: tl.constexpr,
    BORDERS: tl.constexpr, FULL: tl.constexpr, SKIP: tl.constexpr, GATE: tl.constexpr,
    SAVE: tl.constexpr,
    HEADDIM: tl.constexpr, D_STATE: tl.constexpr, Q: tl.constexpr,
    PRODUCT: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One direction through one unit; pointers are those of the unit's first token."""
    if ENTERS:
        state = load_state(entering, p, n, HEADDIM, D_STATE).to(tl.float32)
    else:
        state = tl.zeros([p.shape[0], n.shape[0]], tl.float32)
    source: tl.constexpr = SHIFT if REVERSE else -SHIFT
    before = -(links & 1)
    after = length + (links >> 1)
    tiles = tl.cdiv(room, Q)
    for step in tl.range(0, tiles, num_stages=STAGES):
        index = tiles - 1 - step if REVERSE else step
        first = index * Q
        xt = tile(x, first, q, p, x_stride, 0, length, HEADDIM, FULL, PRODUCT)
        Bt = tile(B, first, q, n, B_stride, 0, length, D_STATE, FULL, PRODUCT)
        Ct = tile(
            C, first + source, q, n, C_stride, before, after, D_STATE, FULL and SHIFT == 0, PRODUCT
        )
        if PREPARED:
            place = index.to(tl.int64) * sums_stride
            inclusive = tl.load(sums + place + q)
            total = tl.load(sums + place + (0 if REVERSE else Q - 1))
            d = tl.load(dt + place + q)
        else:
            d, inclusive, total = tile_steps(
                dt, A, dt_bias, head, first, q, dt_stride, length, dt_low, dt_high,
                REVERSE, SOFTPLUS, BIAS, EXACT,
            )  # fmt: skip
        row = inclusive
        if SHIFT:
            row = inclusive - log_decay(d, tl.load(A + head), inclusive.dtype)
        enter = power(row)
        leave = power(total - inclusive) * d
        across = power(total)
        if BORDERS:
            segment, last = segments(borders, first, q, length)
            enter = tl.where(segment == (last if REVERSE else 0), enter, 0.0)
            leave = tl.where(segment == (0 if REVERSE else last), leave, 0.0)
            across = tl.where(last == 0, across, 0.0)

        if PAIRS != NO_PAIRS:
            CB = tl.dot(Ct, tl.trans(Bt), input_precision=PRECISION)
            exponent = between(row, inclusive, EXACT)
            if PAIRS == ALL_PAIRS:
                if PREPARED:
                    inclusive = tl.load(sums_rev + place + q)
                else:
                    inclusive = total - inclusive + log_decay(d, tl.load(A + head), inclusive.dtype)
                exponent = tl.minimum(exponent, between(inclusive, inclusive, EXACT))
            weights = CB * (tl.exp2(exponent) * d[None, :])
            if PAIRS == ALL_PAIRS:
                weights = tl.where(q[:, None] == q[None, :], weights + weights, weights)
            elif REVERSE:
                weights = tl.where(q[None, :] >= q[:, None] + SHIFT, weights, 0.0)
            else:
                weights = tl.where(q[None, :] + SHIFT <= q[:, None], weights, 0.0)
            if BORDERS:
                weights = tl.where(segment[:, None] == segment[None, :], weights, 0.0)
        out = tl.zeros([Q, p.shape[0]], tl.float32)
        if ENTERS or MOVES:
            out = tl.dot(Ct, tl.trans(state.to(PRODUCT)), input_precision=PRECISION)
            out = out * enter[:, None]
        if ADD:
            out += tile(y, first, q, p, y_stride, 0, length, HEADDIM, FULL, tl.float32)
        if PAIRS != NO_PAIRS:
            out = tl.dot(weights.to(PRODUCT), xt, out, input_precision=PRECISION)
        if MOVES or LEAVES:
            weighted = (xt.to(tl.float32) * leave[:, None]).to(PRODUCT)
            state = tl.dot(tl.trans(weighted), Bt, state * across, input_precision=PRECISION)

        if LAST:
            rows = first + q
            if SKIP == "head":
                out += tl.load(D).to(tl.float32) * xt.to(tl.float32)
            elif SKIP == "channel":
                scale = tl.load(D + p, mask=p < HEADDIM, other=0.0).to(tl.float32)
                out += scale[None, :] * xt.to(tl.float32)
            elif SKIP == "token":
                scale = tl.load(D + rows.to(tl.int64) * D_stride, mask=rows < length, other=0.0)
                out += scale.to(tl.float32)[:, None] * xt.to(tl.float32)
            if GATE:
                if SAVE:
                    put(pre_gate, first, q, p, y_stride, room, out, HEADDIM, FULL)
                gate = tile(z, first, q, p, z_stride, 0, length, HEADDIM, FULL, tl.float32)
                out = out * (gate / (1.0 + tl.exp(-gate)))
        if STORE:
            put(y, first, q, p, y_stride, room, out, HEADDIM, FULL)
    if LEAVES:
        store_state(leaving, p, n, state, HEADDIM, D_STATE)


@triton.jit(
    do_not_specialize=[
        "seqlen",
        "unit_size",
        "units_per_row",
        "x_batch",
        "dt_batch",
        "dt_rev_batch",
        "B_batch",
        "C_batch",
        "B_rev_batch",
        "C_rev_batch",
        "z_batch",
        "D_batch",
    ]
)
def scan(
    x, z, D, y, pre_gate, table, borders,
    dt, sums, A, dt_bias, B, C, entering, leaving,
    dt_rev, sums_rev, A_rev, dt_bias_rev, B_rev, C_rev, entering_rev, leaving_rev,
    seqlen, nheads, heads_per_group, unit_size, units_per_row, dt_low, dt_high,
    x_batch, x_token, x_head, z_batch, z_token, z_head, D_batch, D_token, D_head,
    dt_batch, dt_token, dt_head, dt_rev_batch, dt_rev_token, dt_rev_head,
    B_batch, B_token, B_group, C_batch, C_token, C_group,
    B_rev_batch, B_rev_token, B_rev_group, C_rev_batch, C_rev_token, C_rev_group,
    FORWARD: tl.constexpr, REVERSE: tl.constexpr, FUSED: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr,
    ENTERS: tl.constexpr, ENTERS_REV: tl.constexpr, MOVES: tl.constexpr,
    LEAVES: tl.constexpr, LEAVES_REV: tl.constexpr,
    SHIFT: tl.constexpr, PREPARED: tl.constexpr, SOFTPLUS: tl.constexpr, BIAS: tl.constexpr,
    BIAS_REV: tl.constexpr,
    SKIP: tl.constexpr, GATE: tl.constexpr, SAVE: tl.constexpr,
    TABLE: tl.constexpr, BORDERS: tl.constexpr, FULL: tl.constexpr,
    ALIGNED: tl.constexpr, ALIGNED_KEYS: tl.constexpr,
    HEADDIM: tl.constexpr, D_STATE: tl.constexpr,
    Q: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    PRODUCT: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program per unit, slice of P channels, and head.

    FORWARD, REVERSE: the directions to walk in. FIRST: another launch will add the other one, D and
    the gate; SECOND: it has gone before. PREPARED: ``dt`` and ``sums`` are what ``discretise``
    wrote, (tiles, nheads, Q).
    """
    SLICES: tl.constexpr = (HEADDIM + P - 1) // P
    program = tl.program_id(0)
    head = program % nheads
    part = (program // nheads) % SLICES
    unit = program // (nheads * SLICES)
    row, start, length, room, links = locate(table, unit, seqlen, unit_size, units_per_row, TABLE)
    if room == 0:
        return
    group = head // heads_per_group
    q = tl.arange(0, Q)
    p = part * P + tl.arange(0, P)
    n = tl.arange(0, N)
    y_token = nheads * HEADDIM
    here = (row.to(tl.int64) * seqlen + start) * y_token + head * HEADDIM
    x += offset(row, start, x_batch, x_token, ALIGNED) + head * x_head
    if GATE:
        z += offset(row, start, z_batch, z_token, ALIGNED) + head * z_head
    if SKIP == "token":
        D += offset(row, start, D_batch, D_token, False) + head * D_head
    elif SKIP == "channel":
        D += head * HEADDIM
    elif SKIP == "head":
        D += head
    if BORDERS:
        borders += row.to(tl.int64) * seqlen + start
    sums_stride = nheads * Q
    if PREPARED:
        prepared = (unit.to(tl.int64) * tl.cdiv(unit_size, Q) * nheads + head) * Q
        dt += prepared
        sums += prepared
        dt_rev += prepared
        sums_rev += prepared
    else:
        dt += offset(row, start, dt_batch, dt_token, False) + head * dt_head
        dt_rev += offset(row, start, dt_rev_batch, dt_rev_token, False) + head * dt_rev_head
    B_rev += offset(row, start, B_rev_batch, B_rev_token, ALIGNED_KEYS)
    C_rev += offset(row, start, C_rev_batch, C_rev_token, ALIGNED_KEYS)
    head_state = (unit.to(tl.int64) * nheads + head) * (HEADDIM * D_STATE)
    PAIRS: tl.constexpr = ALL_PAIRS if FUSED else OWN_PAIRS
    PAIRS_REV: tl.constexpr = NO_PAIRS if FUSED else OWN_PAIRS
    STORE_REV: tl.constexpr = (not FUSED) or MOVES or ENTERS_REV
    if REVERSE and (STORE_REV or LEAVES_REV):
        walk(
            x, dt_rev, sums_rev, sums, A_rev, dt_bias_rev,
            B_rev + group * B_rev_group,
            C_rev + group * C_rev_group,
            y + here, pre_gate + here, z, D, borders,
            entering_rev + head_state if ENTERS_REV else entering_rev,
            leaving_rev + head_state if LEAVES_REV else leaving_rev,
            dt_low, dt_high, head, length, room, links, p, n, q,
            x_token, dt_rev_token, sums_stride, B_rev_token, C_rev_token,
            y_token, z_token, D_token,
            True, PAIRS_REV, False, STORE_REV, not (FORWARD or FIRST),
            ENTERS_REV, MOVES, LEAVES_REV,
            SHIFT, PREPARED, SOFTPLUS, BIAS_REV, BORDERS, FULL, SKIP, GATE, SAVE,
            HEADDIM, D_STATE, Q, PRODUCT, PRECISION, EXACT, STAGES,
        )  # fmt: skip
        tl.debug_barrier()  # what it stored, other threads of the program load
    if FORWARD:
        walk(
            x, dt, sums, sums_rev, A, dt_bias,
            B + offset(row, start, B_batch, B_token, ALIGNED_KEYS) + group * B_group,
            C + offset(row, start, C_batch, C_token, ALIGNED_KEYS) + group * C_group,
            y + here, pre_gate + here, z, D, borders,
            entering + head_state if ENTERS else entering,
            leaving + head_state if LEAVES else leaving,
            dt_low, dt_high, head, length, room, links, p, n, q,
            x_token, dt_token, sums_stride, B_token, C_token, y_token, z_token, D_token,
            False, PAIRS, (SECOND or REVERSE) and STORE_REV, True, True, ENTERS, MOVES, LEAVES,
            SHIFT, PREPARED, SOFTPLUS, BIAS, BORDERS, FULL, SKIP, GATE, SAVE,
            HEADDIM, D_STATE, Q, PRODUCT, PRECISION, EXACT, STAGES,
        )  # fmt: skip
