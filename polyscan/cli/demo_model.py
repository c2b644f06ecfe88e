"""Hydra (arXiv:2407.09941) on :func:`polyscan.bidi_ssd`, and a classifier made of it.

Everything that a model needs to use the scan is here, to be copied and changed. In the comments,
d_inner = nheads * headdim is the width inside of a layer.
"""

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polyscan


class Hydra(nn.Module):
    """A bidirectional state-space layer, (batch, seqlen, d_model) to the same.

    Each token gathers what stands before it and what stands after it in two scans, and itself
    through the skip ``D``, whose weight per head depends on the token.
    """

    def __init__(
        self, d_model: int, d_state: int = 16, d_conv: int = 7, expand: int = 2, headdim: int = 16
    ) -> None:
        super().__init__()
        self.d_inner = expand * d_model
        self.d_state = d_state
        self.headdim = headdim
        self.nheads = self.d_inner // headdim
        self.d_conv_in = self.d_inner + 4 * d_state  # x, and B and C of both directions

        d_in_proj = self.d_inner + self.d_conv_in + 2 * self.nheads
        self.in_proj = nn.Linear(d_model, d_in_proj, bias=False)
        self.conv1d = nn.Conv1d(
            self.d_conv_in, self.d_conv_in, d_conv, padding=d_conv // 2, groups=self.d_conv_in
        )
        # Step sizes start between 0.001 and 0.1, evenly on a log scale; log(expm1(dt)) undoes the
        # softplus that the scan applies.
        dt = torch.empty(self.nheads).uniform_(math.log(0.001), math.log(0.1)).exp()
        self.dt_bias = nn.Parameter(torch.expm1(dt).log())
        self.A_log = nn.Parameter(torch.empty(self.nheads).uniform_(1, 16).log())
        self.D = nn.Parameter(torch.ones(self.nheads))
        self.fc_D = nn.Linear(self.d_inner, self.nheads, bias=False)
        self.norm = nn.RMSNorm(self.d_inner, eps=1e-5)
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=False)

    def forward(self, u: Tensor) -> Tensor:
        arguments, z = self.project(u)
        y: Tensor = polyscan.bidi_ssd(**arguments)  # (batch, seqlen, nheads, headdim)
        y = self.norm(y.flatten(2)) * F.silu(z)  # (batch, seqlen, d_inner)
        out: Tensor = self.out_proj(y)
        return out

    def project(self, u: Tensor) -> tuple[dict[str, Any], Tensor]:
        """The arguments of the scan and the gate z (batch, seqlen, d_inner)."""
        # z (batch, seqlen, d_inner), xBC (batch, seqlen, d_conv_in), dt (batch, seqlen, nheads)
        z, xBC, dt, dt_rev = self.in_proj(u).split(
            [self.d_inner, self.d_conv_in, self.nheads, self.nheads], dim=-1
        )
        xBC = F.silu(self.conv1d(xBC.mT).mT)  # a convolution over time, each channel on its own
        # x (batch, seqlen, d_inner), B and C (batch, seqlen, d_state)
        x, B, C, B_rev, C_rev = xBC.split([self.d_inner, *[self.d_state] * 4], dim=-1)
        arguments = {
            "x": x.unflatten(-1, (self.nheads, self.headdim)),
            "dt": dt,
            "A": -self.A_log.exp(),  # (nheads,)
            "B": B.unsqueeze(2),  # (batch, seqlen, 1, d_state): all heads share it
            "C": C.unsqueeze(2),
            "D": self.fc_D(x) + self.D,  # (batch, seqlen, nheads)
            "shift": True,
            "dt_bias": self.dt_bias,  # (nheads,)
            "dt_softplus": True,
            "dt_rev": dt_rev,
            "B_rev": B_rev.unsqueeze(2),
            "C_rev": C_rev.unsqueeze(2),
        }
        return arguments, z


class Block(nn.Module):
    """A layer with what surrounds it in a deep model: normalise, mix, add."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(d_model)
        self.mixer = Hydra(d_model)

    def forward(self, u: Tensor) -> Tensor:
        mixed: Tensor = self.mixer(self.norm(u))
        return u + mixed


class DigitClassifier(nn.Module):
    """Scores (batch, 10) for images (batch, 8, 8), read as sequences of 16 patches of 2x2."""

    patch, seqlen = 2, 16

    def __init__(self, d_model: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(self.patch**2, d_model)
        self.position = nn.Parameter(0.02 * torch.randn(self.seqlen, d_model))
        self.blocks = nn.Sequential(*(Block(d_model) for _ in range(depth)))
        self.norm = nn.RMSNorm(d_model)
        self.head = nn.Linear(d_model, 10)

    def forward(self, images: Tensor) -> Tensor:
        u = self.blocks(self.tokens(images))  # (batch, seqlen, d_model)
        scores: Tensor = self.head(self.norm(u).mean(dim=1))
        return scores

    def tokens(self, images: Tensor) -> Tensor:
        """(batch, 8, 8) to (batch, seqlen, d_model): the patches, row by row, embedded."""
        patches = images.unfold(1, self.patch, self.patch).unfold(2, self.patch, self.patch)
        tokens: Tensor = self.embed(patches.flatten(3).flatten(1, 2))
        return tokens + self.position

    def explain(self, images: Tensor) -> polyscan.Explanation:
        """Which backend runs the first layer's scan on these images, and why."""
        block = cast(Block, self.blocks[0])
        arguments, _ = block.mixer.project(block.norm(self.tokens(images)))
        return polyscan.explain(**arguments)
