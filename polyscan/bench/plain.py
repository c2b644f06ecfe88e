"""The usual way to a bidirectional scan: flip, concatenate, one causal pass, roll, add.

The causal pass is that of a library, or the one here in plain PyTorch: in chunks, as in the listing
of the Mamba-2 paper (arXiv:2405.21060), with gradients by autograd.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .presets import steps

CHUNK_SIZE = 64
# (x, dt, A, B, C, dt_bias) -> y, without D
CausalPass = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def both_directions(
    causal: CausalPass,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    dt_rev: Tensor | None = None,
    B_rev: Tensor | None = None,
    C_rev: Tensor | None = None,
    *,
    shift: bool,
) -> Tensor:
    """What :func:`polyscan.bidi_ssd` computes with these arguments and softplus."""

    def pair(forward: Tensor, reverse: Tensor | None) -> Tensor:
        return torch.cat([forward, (forward if reverse is None else reverse).flip(1)])

    y: Tensor = causal(pair(x, None), pair(dt, dt_rev), A, pair(B, B_rev), pair(C, C_rev), dt_bias)
    if shift:
        y = y.roll(1, dims=1)
        y[:, 0] = 0
    batch = x.shape[0]
    return (y[:batch] + y[batch:].flip(1) + x * D[..., None]).to(x.dtype)


def causal_pass(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, dt_bias: Tensor) -> Tensor:
    """Products in x's dtype; step sizes, decays and y in float32 or wider."""
    heads, seqlen = x.shape[2] // B.shape[2], x.shape[1]
    dt = steps(dt, dt_bias)

    def chunks(tensor: Tensor) -> Tensor:
        padding = (0, 0) * (tensor.dim() - 2) + (0, -seqlen % CHUNK_SIZE)
        chunked: Tensor = F.pad(tensor, padding).unflatten(1, (-1, CHUNK_SIZE))
        return chunked

    v = chunks((x * dt[..., None]).to(x.dtype))
    B, C = (chunks(t.repeat_interleave(heads, 2)) for t in (B, C))
    log_decay = chunks(dt * A).permute(0, 3, 1, 2)  # (batch, nheads, chunks, size)

    total = log_decay.cumsum(-1)
    within = torch.einsum("bclhn,bcshn,bhcls,bcshp->bclhp", C, B, _decays(log_decay, x.dtype), v)
    leave = torch.exp(total[..., -1:] - total).to(x.dtype)
    states = torch.einsum("bclhn,bhcl,bclhp->bchpn", B, leave, v)
    states = torch.cat([torch.zeros_like(states[:, :1]), states], dim=1)
    across = _decays(F.pad(total[..., -1], (1, 0)), x.dtype)
    states = torch.einsum("bhzc,bchpn->bzhpn", across, states)[:, :-1]
    between = torch.einsum("bclhn,bchpn,bhcl->bclhp", C, states, total.exp().to(x.dtype))
    y: Tensor = (within.to(dt.dtype) + between).flatten(1, 2)[:, :seqlen]
    return y


def _decays(log_decay: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., i, j] = exp of the sum over j+1 .. i, 0 above the diagonal."""
    size = log_decay.shape[-1]
    lower = torch.ones(size, size, dtype=torch.bool, device=log_decay.device).tril()
    sums = log_decay[..., None].expand(*log_decay.shape, size).masked_fill(~lower.tril(-1), 0)
    return sums.cumsum(-2).masked_fill(~lower, -torch.inf).exp().to(dtype)
