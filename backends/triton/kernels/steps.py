"""Step sizes and sums of log decays, once per token and head, and the way back from them.

Other kernels walk along tokens, one head each; dt lies the other way round. Here every tile is read
with all its heads, and what comes out lies as the others read it: (tiles, nheads, Q).
"""

import triton
import triton.language as tl

from .common import LOG2_E, locate, offset

# exp2 of it is 0 in float32, and sums of it over a tile keep their digits.
STRONGEST_LOG2_DECAY = tl.constexpr(-160.0)
# log1p(exp(v)) is v to the last bit from here on.
SOFTPLUS_THRESHOLD = tl.constexpr(20.0)


@triton.jit
def softplus(v):
    """log1p(exp(v)); the quotient is what the rounding of 1 + e lost."""
    e = tl.exp(tl.minimum(v, SOFTPLUS_THRESHOLD))
    u = 1.0 + e
    small = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(v > SOFTPLUS_THRESHOLD, v, small)


@triton.jit
def clamp(v, low, high):
    """Comparisons let a NaN pass."""
    v = tl.where(v < low, low, v)
    return tl.where(v > high, high, v)


@triton.jit
def log_decay(d, rate, dtype: tl.constexpr):
    """log2 of each token's decay, for A ``rate``."""
    decay = d.to(dtype) * (rate.to(dtype) * LOG2_E)
    return tl.where(decay < STRONGEST_LOG2_DECAY, STRONGEST_LOG2_DECAY, decay)


@triton.jit
def tile_steps(
    dt, A, dt_bias, head, first, q, stride, length, dt_low, dt_high,
    REVERSE: tl.constexpr, SOFTPLUS: tl.constexpr, BIAS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """What :func:`discretise` has for a tile and head: step sizes, sums, and the total."""
    rows = first + q
    keep = rows < length
    d = tl.load(dt + rows.to(tl.int64) * stride, mask=keep, other=0.0).to(tl.float32)
    if BIAS:
        d += tl.load(dt_bias + head).to(tl.float32)
    if SOFTPLUS:
        d = softplus(d)
    d = tl.where(keep, clamp(d, dt_low, dt_high), 0.0)
    decay = log_decay(d, tl.load(A + head), tl.float64 if EXACT else tl.float32)
    sums = tl.cumsum(decay, 0, reverse=REVERSE)
    return d, sums, tl.sum(decay, 0)


@triton.jit
def raw_steps(dt, dt_bias, rows, heads, keep, stride, head_stride, nheads, BIAS: tl.constexpr):
    """dt with its bias: (Q, HEADS)."""
    pointers = dt + rows.to(tl.int64)[:, None] * stride + (heads * head_stride)[None, :]
    raw = tl.load(pointers, mask=keep, other=0.0).to(tl.float32)
    if BIAS:
        bias = tl.load(dt_bias + heads, mask=heads < nheads, other=0.0)
        raw += bias.to(tl.float32)[None, :]
    return raw


@triton.jit(do_not_specialize=["seqlen", "unit_size", "units_per_row", "dt_batch"])
def discretise(
    dt, A, dt_bias, table, steps, sums, sums_rev,
    seqlen, nheads, unit_size, units_per_row, dt_low, dt_high, dt_batch, dt_token, dt_head,
    REVERSE: tl.constexpr, BOTH: tl.constexpr, SOFTPLUS: tl.constexpr, BIAS: tl.constexpr,
    TABLE: tl.constexpr, Q: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """One program per tile and HEADS heads.

    ``steps`` gets dt after bias, softplus and clamp, 0 past the end. ``sums`` gets the inclusive
    sums of log2 decays within the tile, in the direction's own order: in float64, so that
    differences keep their digits, or in float32. BOTH: ``sums_rev`` gets those of the reverse
    direction, which has the same parameters.
    """
    tiles_per_unit = tl.cdiv(unit_size, Q)
    tile_index = tl.program_id(0)
    unit = tile_index // tiles_per_unit
    first = (tile_index % tiles_per_unit) * Q
    row, start, length, room, _ = locate(table, unit, seqlen, unit_size, units_per_row, TABLE)
    if first >= room:
        return
    q = tl.arange(0, Q)
    rows = first + q
    dt += offset(row, start, dt_batch, dt_token, False)
    blocks = tl.cdiv(nheads, HEADS)
    for block in range(blocks):
        heads = block * HEADS + tl.arange(0, HEADS)
        keep = (rows < length)[:, None] & (heads < nheads)[None, :]
        d = raw_steps(dt, dt_bias, rows, heads, keep, dt_token, dt_head, nheads, BIAS)
        if SOFTPLUS:
            d = softplus(d)
        d = tl.where(keep, clamp(d, dt_low, dt_high), 0.0)
        rate = tl.load(A + heads, mask=heads < nheads, other=0.0)
        decay = log_decay(d, rate[None, :], sums.dtype.element_ty)
        place = (tile_index.to(tl.int64) * nheads + heads)[None, :] * Q + q[:, None]
        kept = (heads < nheads)[None, :]
        tl.store(steps + place, d, mask=kept)
        tl.store(sums + place, tl.cumsum(decay, 0, reverse=REVERSE), mask=kept)
        if BOTH:
            tl.store(sums_rev + place, tl.cumsum(decay, 0, reverse=True), mask=kept)


@triton.jit(do_not_specialize=["seqlen", "unit_size", "units_per_row", "dt_batch"])
def discretise_gradients(
    given, dt, dt_bias, table, ddt, bias_sums,
    seqlen, nheads, unit_size, units_per_row, dt_low, dt_high, dt_batch, dt_token, dt_head,
    SOFTPLUS: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
    TABLE: tl.constexpr, Q: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """From the gradient of the steps, (tiles, nheads, Q), to that of dt, (batch, seqlen, nheads).

    ADD: to what stands in ``ddt``.
    ``bias_sums`` (tiles, nheads) gets each tile's share of the gradient of dt_bias.
    """
    tiles_per_unit = tl.cdiv(unit_size, Q)
    tile_index = tl.program_id(0)
    unit = tile_index // tiles_per_unit
    first = (tile_index % tiles_per_unit) * Q
    row, start, length, room, _ = locate(table, unit, seqlen, unit_size, units_per_row, TABLE)
    q = tl.arange(0, Q)
    rows = first + q
    dt += offset(row, start, dt_batch, dt_token, False)
    ddt += (row.to(tl.int64) * seqlen + start) * nheads
    blocks = tl.cdiv(nheads, HEADS)
    for block in range(blocks):
        heads = block * HEADS + tl.arange(0, HEADS)
        keep = (rows < length)[:, None] & (heads < nheads)[None, :]
        place = (tile_index.to(tl.int64) * nheads + heads)[None, :] * Q + q[:, None]
        change = tl.load(given + place, mask=keep, other=0.0)
        raw = raw_steps(dt, dt_bias, rows, heads, keep, dt_token, dt_head, nheads, BIAS)
        if SOFTPLUS:
            change = change / (1.0 + tl.exp(-raw))
            raw = softplus(raw)
        # The clamp passes the gradient at its limits too.
        change = tl.where((raw < dt_low) | (raw > dt_high), 0.0, change)
        tl.store(
            bias_sums + tile_index.to(tl.int64) * nheads + heads,
            tl.sum(change, 0),
            mask=heads < nheads,
        )
        pointers = ddt + rows.to(tl.int64)[:, None] * nheads + heads[None, :]
        if ADD:
            change += tl.load(pointers, mask=keep, other=0.0).to(tl.float32)
        written = (rows < room)[:, None] & (heads < nheads)[None, :]
        tl.store(pointers, change.to(ddt.dtype.element_ty), mask=written)
