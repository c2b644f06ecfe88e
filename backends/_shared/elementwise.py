"""Derivatives of the steps around the scan: step sizes, skip and gate. Any leading axes."""

from torch import Tensor
from torch.nn import functional as F

from polyscan.problem import SkipName
from polyscan.reference import SOFTPLUS_THRESHOLD


def discretise_backward(
    ddt: Tensor,
    dt: Tensor,
    dt_bias: Tensor | None,
    softplus: bool,
    limit: tuple[float, float],
) -> Tensor:
    """Gradient of dt before bias, softplus and clamp, from ``ddt``, the one after them.

    Everything (..., nheads), computed in ddt's dtype. Like ``torch.clamp``, the clamp passes the
    gradient at its limits and between them.
    """
    raw = dt.to(ddt.dtype)
    if dt_bias is not None:
        raw = raw + dt_bias.to(ddt.dtype)
    low, high = limit
    step = F.softplus(raw, threshold=SOFTPLUS_THRESHOLD) if softplus else raw
    ddt = ddt.masked_fill((step < low) | (step > high), 0)
    return ddt * raw.sigmoid() if softplus else ddt


def gate_backward(dy: Tensor, z: Tensor, pre_gate: Tensor) -> tuple[Tensor, Tensor]:
    """For ``y = pre_gate * silu(z)``: the gradients of pre_gate and of z."""
    sigmoid = z.sigmoid()
    dz = dy * pre_gate * (sigmoid * (1 + z * (1 - sigmoid)))
    return dy * (z * sigmoid), dz


def skip_term(D: Tensor, x: Tensor, kind: SkipName) -> Tensor:
    """``D * x`` for x (..., nheads, headdim) and D in any of its three shapes."""
    return (D if kind == "channel" else D[..., None]) * x


def skip_gradient(dy: Tensor, x: Tensor, kind: SkipName) -> Tensor:
    """Gradient of D: ``dy * x``, (..., nheads, headdim), summed over the axes that D lacks."""
    product = dy * x
    if kind == "token":
        return product.sum(-1)
    per_channel = product.flatten(0, -3).sum(0)
    return per_channel if kind == "channel" else per_channel.sum(-1)
