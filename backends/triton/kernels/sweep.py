"""Walk through units for the state alone: what leaves a unit, or what enters each of its tiles.

A state takes in values x under keys B, weighted by what is left of a token where the tile ends, and
moves in its direction's order. The adjoint of a state takes in the output's gradient under keys C,
weighted by what is left of the entering state at a token, and moves against it::

    state   <- exp(total) state   + sum over j of exp(total - c_j) dt_j x_j B_jᵀ
    adjoint <- exp(total) adjoint + sum over i of exp(c_i) dy_i C_iᵀ

Under the shift dy_i is that of the row that token i is the source of.

A launch carries several of them, told apart by a number: the states of one or two directions, then
their adjoints.
"""

import triton
import triton.language as tl

from .common import load_state, locate, offset, power, segments, store_state, tile


@triton.jit
def begins(borders, first, q, high, reverse):
    """Whether the later of a source and its target begins a sequence: (Q,)."""
    later = first + q + tl.where(reverse, 0, 1)
    return tl.load(borders + later.to(tl.int64), mask=later < high, other=1) != 0


@triton.jit
def shifted(
    values, borders, first, q, p, stride, length, links,
    REVERSE: tl.constexpr, SHIFT: tl.constexpr, BORDERS: tl.constexpr, HEADDIM: tl.constexpr,
    FULL: tl.constexpr, PRODUCT: tl.constexpr,
):  # fmt: skip
    """The output's gradient at the rows whose sources are ``first + q``: (Q, P)."""
    if SHIFT:
        target = -1 if REVERSE else 1
        low = -(links & 1)
        high = length + (links >> 1)
        rows = tile(values, first + target, q, p, stride, low, high, HEADDIM, False, PRODUCT)
        if BORDERS:
            rows = tl.where(begins(borders, first, q, high, REVERSE)[:, None], 0.0, rows)
        return rows
    else:
        return tile(values, first, q, p, stride, 0, length, HEADDIM, FULL, PRODUCT)


@triton.jit(
    do_not_specialize=[
        "unit_offset",
        "carried_stride",
        "kept_stride",
        "seqlen",
        "unit_size",
        "units_per_row",
        "x_batch",
        "dy_batch",
        "B_batch",
        "C_batch",
        "B_rev_batch",
        "C_rev_batch",
    ]
)
def sweep(
    x, dy, B, C, B_rev, C_rev, steps, sums, steps_rev, sums_rev, table, borders,
    entering, kept, leaving, factors,
    unit_offset, carried_stride, kept_stride,
    seqlen, nheads, heads_per_group, unit_size, units_per_row,
    x_batch, x_token, x_head, dy_batch, dy_token, dy_head,
    B_batch, B_token, B_group, C_batch, C_token, C_group,
    B_rev_batch, B_rev_token, B_rev_group, C_rev_batch, C_rev_token, C_rev_group,
    DIRECTIONS: tl.constexpr, REVERSE: tl.constexpr, ADJOINTS: tl.constexpr,
    ENTERS: tl.constexpr, KEEPS: tl.constexpr, LEAVES: tl.constexpr, FACTORS: tl.constexpr,
    SHIFT: tl.constexpr, TABLE: tl.constexpr, BORDERS: tl.constexpr, FULL: tl.constexpr,
    ALIGNED: tl.constexpr, ALIGNED_KEYS: tl.constexpr,
    HEADDIM: tl.constexpr, D_STATE: tl.constexpr,
    Q: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    PRODUCT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program per unit from ``unit_offset`` on, what is carried, slice of P channels, and head.

    Of DIRECTIONS two, the second is the reverse one; one alone is reverse where REVERSE.
    ENTERS, LEAVES: ``entering`` and ``leaving`` (carried, units, nheads, headdim, d_state), what
    enters and leaves the units. KEEPS: ``kept`` (carried, units of this launch, tiles of a unit,
    nheads, headdim, d_state) gets what enters each tile. FACTORS: ``factors`` (carried, units,
    nheads) gets what is left of the entering state at the end.
    """
    SLICES: tl.constexpr = (HEADDIM + P - 1) // P
    CARRIED: tl.constexpr = 2 * DIRECTIONS if ADJOINTS else DIRECTIONS
    program = tl.program_id(0)
    head = program % nheads
    part = (program // nheads) % SLICES
    which = (program // (nheads * SLICES)) % CARRIED
    local = program // (nheads * SLICES * CARRIED)
    unit = local + unit_offset
    row, start, length, room, links = locate(table, unit, seqlen, unit_size, units_per_row, TABLE)
    if room == 0:
        return
    adjoint = which >= DIRECTIONS
    reverse = (which % 2 == 1) if DIRECTIONS == 2 else (which >= 0) & REVERSE
    backwards = adjoint != reverse
    group = head // heads_per_group
    q = tl.arange(0, Q)
    p = part * P + tl.arange(0, P)
    n = tl.arange(0, N)
    head_state = (unit.to(tl.int64) * nheads + head) * (HEADDIM * D_STATE)
    x += offset(row, start, x_batch, x_token, ALIGNED) + head * x_head
    keys = B + (offset(row, start, B_batch, B_token, ALIGNED_KEYS) + group * B_group)
    token_stride = x_token
    keys_stride = B_token
    if DIRECTIONS == 2:
        B_rev += offset(row, start, B_rev_batch, B_rev_token, ALIGNED_KEYS) + group * B_rev_group
        keys = tl.where(reverse, B_rev, keys)
        keys_stride = tl.where(reverse, B_rev_token, keys_stride)
        sums = tl.where(reverse, sums_rev, sums)
        steps = tl.where(reverse, steps_rev, steps)
    values = x
    if ADJOINTS:
        dy += offset(row, start, dy_batch, dy_token, ALIGNED) + head * dy_head
        values = tl.where(adjoint, dy, values)
        token_stride = tl.where(adjoint, dy_token, token_stride)
        C += offset(row, start, C_batch, C_token, ALIGNED_KEYS) + group * C_group
        other = C
        other_stride = C_token
        if DIRECTIONS == 2:
            C_rev += (
                offset(row, start, C_rev_batch, C_rev_token, ALIGNED_KEYS) + group * C_rev_group
            )
            other = tl.where(reverse, C_rev, other)
            other_stride = tl.where(reverse, C_rev_token, other_stride)
        keys = tl.where(adjoint, other, keys)
        keys_stride = tl.where(adjoint, other_stride, keys_stride)
    if BORDERS:
        borders += row.to(tl.int64) * seqlen + start
    # Under the shift an adjoint takes in the row that the token is the source of.
    target = tl.where(adjoint, tl.where(reverse, -SHIFT, SHIFT), 0)
    low = tl.where(target == 0, 0, -(links & 1))
    high = length + tl.where(target == 0, 0, links >> 1)
    carried = which.to(tl.int64) * carried_stride + head_state
    if ENTERS:
        state = load_state(entering + carried, p, n, HEADDIM, D_STATE).to(tl.float32)
    else:
        state = tl.zeros([P, N], tl.float32)
    factor = 1.0
    tiles = tl.cdiv(room, Q)
    tiles_per_unit = tl.cdiv(unit_size, Q)
    kept += which.to(tl.int64) * kept_stride
    for step in tl.range(0, tiles, num_stages=STAGES):
        index = tl.where(backwards, tiles - 1 - step, step)
        first = index * Q
        if KEEPS:
            place = (local.to(tl.int64) * tiles_per_unit + index) * nheads + head
            store_state(kept + place * (HEADDIM * D_STATE), p, n, state, HEADDIM, D_STATE)
        K = tile(keys, first, q, n, keys_stride, 0, length, D_STATE, FULL, PRODUCT)
        V = tile(
            values, first + target, q, p, token_stride, low, high, HEADDIM, FULL and SHIFT == 0,
            PRODUCT,
        )  # fmt: skip
        prepared = ((unit.to(tl.int64) * tiles_per_unit + index) * nheads + head) * Q
        total = tl.load(sums + prepared + tl.where(reverse, 0, Q - 1))
        inclusive = tl.load(sums + prepared + q)
        weight = power(total - inclusive) * tl.load(steps + prepared + q)
        if ADJOINTS:
            weight = tl.where(adjoint, power(inclusive), weight)
        across = power(total)
        if BORDERS:
            segment, last = segments(borders, first, q, length)
            weight = tl.where(segment == tl.where(backwards, 0, last), weight, 0.0)
            across = tl.where(last == 0, across, 0.0)
            if ADJOINTS and SHIFT:
                crosses = begins(borders, first, q, length + (links >> 1), reverse)
                weight = tl.where(adjoint & crosses, 0.0, weight)
        V = (V.to(tl.float32) * weight[:, None]).to(PRODUCT)
        state = tl.dot(tl.trans(V), K, state * across, input_precision=PRECISION)
        factor *= across
    if LEAVES:
        store_state(leaving + carried, p, n, state, HEADDIM, D_STATE)
    if FACTORS:  # every slice stores the same
        units = carried_stride // (nheads * HEADDIM * D_STATE)
        place = (which.to(tl.int64) * units + unit) * nheads + head
        tl.store(factors + place, factor)
