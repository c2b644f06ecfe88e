"""The way back through ``y = pre_gate * silu(z)``."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["nsequences", "tokens", "seqlen", "dy_batch", "z_batch"])
def gate_gradients(
    dy, z, pre_gate, before, dz, cu_seqlens, nsequences, tokens, seqlen, nheads,
    dy_batch, dy_token, dy_head, z_batch, z_token, z_head,
    TABLE: tl.constexpr, HEADDIM: tl.constexpr, ROWS: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """``before`` gets the gradient of pre_gate; it, dz and pre_gate are contiguous."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # of (tokens, nheads)
    p = tl.arange(0, P)
    token = rows // nheads
    head = rows % nheads
    batch = token // seqlen
    place = token % seqlen
    keep = (rows < tokens * nheads)[:, None] & (p < HEADDIM)[None, :]
    from_dy = batch * dy_batch + place * dy_token + head * dy_head
    from_z = batch * z_batch + place * z_token + head * z_head
    own = rows[:, None] * HEADDIM + p[None, :]
    g = tl.load(dy + from_dy[:, None] + p[None, :], mask=keep, other=0.0).to(tl.float32)
    v = tl.load(z + from_z[:, None] + p[None, :], mask=keep, other=0.0).to(tl.float32)
    y = tl.load(pre_gate + own, mask=keep, other=0.0).to(tl.float32)
    if TABLE:  # rows of no sequence hold anything, and have no gradient
        covered = (token >= tl.load(cu_seqlens)) & (token < tl.load(cu_seqlens + nsequences))
        g = tl.where(covered[:, None], g, 0.0)
        v = tl.where(covered[:, None], v, 0.0)
    sigmoid = 1.0 / (1.0 + tl.exp(-v))
    tl.store(before + own, (g * v * sigmoid).to(before.dtype.element_ty), mask=keep)
    slope = sigmoid * (1.0 + v * (1.0 - sigmoid))
    tl.store(dz + own, (g * y * slope).to(dz.dtype.element_ty), mask=keep)
