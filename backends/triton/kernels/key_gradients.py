"""Gradients of what the heads of a group share: B and C.

With ``pair_ij = exp(c_i - c_j) dt_j dy_i · x_j``, S what enters the tile and G the adjoint that
enters it from the other end, summed over heads::

    dC_i = sum over j of pair_ij B_j + exp(c_i) dy_i S
    dB_j = sum over i of pair_ij C_i + exp(total - c_j) dt_j x_j G

One is the other with the roles of the rows exchanged.
"""

import triton
import triton.language as tl

from .common import between, load_state, locate, offset, power, put, segments, tile
from .sweep import shifted


@triton.jit
def gradient(
    x, dy, steps, sums, sums_rev, other, borders, states, states_rev, out,
    tile_index, kept_index, low, high, nheads, first, length, room, links, q, n,
    x_token, x_head, dy_token, dy_head, other_token, out_token,
    OF_B: tl.constexpr, REVERSE: tl.constexpr, FUSED: tl.constexpr, ADD: tl.constexpr,
    MOVES: tl.constexpr, SHIFT: tl.constexpr, BORDERS: tl.constexpr, FULL: tl.constexpr,
    HEADDIM: tl.constexpr, D_STATE: tl.constexpr, Q: tl.constexpr, P: tl.constexpr,
    PRODUCT: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Of B or C at one tile, summed over the heads from ``low`` on.

    ``other`` is C where OF_B, else B; ``states`` are then the adjoints, else the states.
    """
    SLICES: tl.constexpr = (HEADDIM + P - 1) // P
    if BORDERS:
        segment, last = segments(borders, first, q, length)
        same = segment[:, None] == segment[None, :]
    diagonal = q[:, None] == q[None, :]
    # Rows are i and columns j for C, and the other way round for B.
    if REVERSE == OF_B:
        seen = q[None, :] <= q[:, None]
    else:
        seen = q[None, :] >= q[:, None]

    pairs = tl.zeros([Q, Q], tl.float32)
    result = tl.zeros([Q, n.shape[0]], tl.float32)
    for head in tl.range(low, high, num_stages=STAGES):
        prepared = (tile_index * nheads + head) * Q
        d = tl.load(steps + prepared + q)
        inclusive = tl.load(sums + prepared + q)
        total = tl.load(sums + prepared + (0 if REVERSE else Q - 1))
        weight = power(total - inclusive) * d if OF_B else power(inclusive)
        exponent = between(inclusive, inclusive, EXACT)
        exponent = -exponent if OF_B else exponent
        if FUSED:
            inclusive = tl.load(sums_rev + prepared + q)
            weight_rev = power(total - inclusive) * d if OF_B else power(inclusive)
            exponent_rev = between(inclusive, inclusive, EXACT)
            exponent = tl.minimum(exponent, -exponent_rev if OF_B else exponent_rev)
        if BORDERS:
            weight = tl.where(segment == (0 if REVERSE == OF_B else last), weight, 0.0)
            if FUSED:
                weight_rev = tl.where(segment == (0 if OF_B else last), weight_rev, 0.0)
        products = tl.zeros([Q, Q], tl.float32)
        for piece in tl.static_range(SLICES):
            p = piece * P + tl.arange(0, P)
            X = tile(x + head * x_head, first, q, p, x_token, 0, length, HEADDIM, FULL, PRODUCT)
            Y = shifted(
                dy + head * dy_head, borders, first, q, p, dy_token, length, links,
                REVERSE, SHIFT, BORDERS, HEADDIM, FULL, PRODUCT,
            )  # fmt: skip
            own = X if OF_B else Y
            products = tl.dot(own, tl.trans(Y if OF_B else X), products, input_precision=PRECISION)
            place = (kept_index * nheads + head) * (HEADDIM * D_STATE)
            wide = own.to(tl.float32)
            if MOVES:
                S = load_state(states + place, p, n, HEADDIM, D_STATE).to(PRODUCT)
                weighted = (wide * weight[:, None]).to(PRODUCT)
                result = tl.dot(weighted, S, result, input_precision=PRECISION)
            if MOVES and FUSED:
                S_rev = load_state(states_rev + place, p, n, HEADDIM, D_STATE).to(PRODUCT)
                weighted = (wide * weight_rev[:, None]).to(PRODUCT)
                result = tl.dot(weighted, S_rev, result, input_precision=PRECISION)
        products = products * (tl.exp2(exponent) * (d[:, None] if OF_B else d[None, :]))
        if FUSED:
            pairs += tl.where(diagonal, products + products, products)
        else:
            pairs += tl.where(seen, products, 0.0)
    if BORDERS:
        pairs = tl.where(same, pairs, 0.0)
    keys = tile(other, first, q, n, other_token, 0, length, D_STATE, FULL, PRODUCT)
    result = tl.dot(pairs.to(PRODUCT), keys, result, input_precision=PRECISION)
    if ADD:
        result += tile(out, first, q, n, out_token, 0, length, D_STATE, FULL, tl.float32)
    put(out, first, q, n, out_token, room, result, D_STATE, FULL)


@triton.jit(
    do_not_specialize=[
        "unit_offset", "seqlen", "unit_size", "units_per_row", "part_stride",
        "x_batch", "dy_batch", "B_batch", "C_batch",
    ]
)  # fmt: skip
def key_gradients(
    x, dy, steps, sums, sums_rev, B, C, table, borders,
    states, states_rev, adjoints, adjoints_rev, dB, dC,
    unit_offset, seqlen, nheads, heads_per_group, heads_per_part, unit_size, units_per_row,
    part_stride,
    x_batch, x_token, x_head, dy_batch, dy_token, dy_head,
    B_batch, B_token, B_group, C_batch, C_token, C_group,
    REVERSE: tl.constexpr, FUSED: tl.constexpr, ADD_B: tl.constexpr, ADD_C: tl.constexpr,
    MOVES: tl.constexpr, SHIFT: tl.constexpr, TABLE: tl.constexpr, BORDERS: tl.constexpr,
    FULL: tl.constexpr, ALIGNED: tl.constexpr, ALIGNED_KEYS: tl.constexpr,
    HEADDIM: tl.constexpr, D_STATE: tl.constexpr,
    Q: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    PRODUCT: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program per tile, group, part of the group's heads, and B or C.

    ``dB`` and ``dC`` (parts, batch, seqlen, ngroups, d_state) are to be added up over the parts.
    """
    tiles_per_unit = tl.cdiv(unit_size, Q)
    ngroups = nheads // heads_per_group
    parts = tl.cdiv(heads_per_group, heads_per_part)
    program = tl.program_id(0)
    part = program % parts
    of_B = (program // parts) % 2
    group = (program // (2 * parts)) % ngroups
    index = (program // (2 * parts * ngroups)) % tiles_per_unit
    local = program // (2 * parts * ngroups * tiles_per_unit)
    unit = local + unit_offset
    row, start, length, room, links = locate(table, unit, seqlen, unit_size, units_per_row, TABLE)
    first = index * Q
    if first >= room:
        return
    q = tl.arange(0, Q)
    n = tl.arange(0, N)
    token = row.to(tl.int64) * seqlen + start
    x += offset(row, start, x_batch, x_token, ALIGNED)
    dy += offset(row, start, dy_batch, dy_token, ALIGNED)
    B += offset(row, start, B_batch, B_token, ALIGNED_KEYS) + group * B_group
    C += offset(row, start, C_batch, C_token, ALIGNED_KEYS) + group * C_group
    if BORDERS:
        borders += token
    low = group * heads_per_group + part * heads_per_part
    high = tl.minimum(low + heads_per_part, (group + 1) * heads_per_group)
    here = part.to(tl.int64) * part_stride + (token * ngroups + group) * D_STATE
    tile_index = unit.to(tl.int64) * tiles_per_unit + index
    kept_index = local.to(tl.int64) * tiles_per_unit + index
    if of_B == 1:
        gradient(
            x, dy, steps, sums, sums_rev, C, borders, adjoints, adjoints_rev,
            dB + here, tile_index, kept_index, low, high, nheads, first, length, room, links, q, n,
            x_token, x_head, dy_token, dy_head, C_token, ngroups * D_STATE,
            True, REVERSE, FUSED, ADD_B, MOVES, SHIFT, BORDERS, FULL,
            HEADDIM, D_STATE, Q, P, PRODUCT, PRECISION, EXACT, STAGES,
        )  # fmt: skip
    else:
        gradient(
            x, dy, steps, sums, sums_rev, B, borders, states, states_rev,
            dC + here, tile_index, kept_index, low, high, nheads, first, length, room, links, q, n,
            x_token, x_head, dy_token, dy_head, B_token, ngroups * D_STATE,
            False, REVERSE, FUSED, ADD_C, MOVES, SHIFT, BORDERS, FULL,
            HEADDIM, D_STATE, Q, P, PRODUCT, PRECISION, EXACT, STAGES,
        )  # fmt: skip
