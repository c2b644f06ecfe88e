"""The usual way to a bidirectional SSD in plain PyTorch, which the CPU backends are compared with.

Flip, concatenate along the batch, one causal pass in chunks as in the listing of the Mamba-2 paper
(arXiv:2405.21060), roll, add; gradients by autograd.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_SIZE = 64


def bidi_ssd(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *, shift: bool) -> Tensor:
    """y for seqlen a multiple of CHUNK_SIZE and parameters shared by both directions."""
    heads = x.shape[2] // B.shape[2]

    def both(tensor: Tensor) -> Tensor:
        return torch.cat([tensor, tensor.flip(1)])

    y = causal_ssd(
        both(x * dt[..., None]),
        both(dt * A),
        both(B.repeat_interleave(heads, 2)),
        both(C.repeat_interleave(heads, 2)),
    )
    if shift:
        y = y.roll(1, dims=1).index_fill(1, torch.zeros(1, dtype=torch.int64), 0.0)
    forward, reverse = y.chunk(2)
    return forward + reverse.flip(1)


def causal_ssd(v: Tensor, log_decay: Tensor, B: Tensor, C: Tensor) -> Tensor:
    v, log_decay, B, C = (t.unflatten(1, (-1, CHUNK_SIZE)) for t in (v, log_decay, B, C))
    log_decay = log_decay.permute(0, 3, 1, 2)  # (batch, nheads, chunks, size)
    total = log_decay.cumsum(-1)
    within = torch.einsum("bclhn,bcshn,bhcls,bcshp->bclhp", C, B, decays(log_decay), v)
    leave = torch.exp(total[..., -1:] - total)
    states = torch.einsum("bclhn,bhcl,bclhp->bchpn", B, leave, v)
    states = torch.cat([torch.zeros_like(states[:, :1]), states], dim=1)
    across = decays(F.pad(total[..., -1], (1, 0)))
    states = torch.einsum("bhzc,bchpn->bzhpn", across, states)[:, :-1]
    between = torch.einsum("bclhn,bchpn,bhcl->bclhp", C, states, total.exp())
    return (within + between).flatten(1, 2)


def decays(log_decay: Tensor) -> Tensor:
    """[..., i, j] = exp of the sum over j+1 .. i, 0 above the diagonal."""
    size = log_decay.shape[-1]
    lower = torch.ones(size, size, dtype=torch.bool).tril()
    sums = log_decay[..., None].expand(*log_decay.shape, size).masked_fill(~lower.tril(-1), 0)
    return sums.cumsum(-2).masked_fill(~lower, -torch.inf).exp()
