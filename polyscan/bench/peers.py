"""Other libraries' kernels as implementations, each loaded when it first runs.

They are Triton kernels, so they need a GPU. Their float32 products are TF32, whatever torch's
setting is, so they have no number in IEEE float32.
"""

from collections.abc import Callable
from functools import cached_property, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from .implementations import Implementation
from .loading import load
from .operations import ATTENTION, CAUSAL, LIGHTNING, Task, Tensors
from .plain import both_directions


class Peer(Implementation):
    """A function of another library: ``packages`` must be installed, ``module`` holds it."""

    own = False
    packages: tuple[str, ...]
    module: str
    function: str

    def missing(self, device: torch.device) -> str | None:
        absent = [name for name in ("triton", *self.packages) if find_spec(name) is None]
        if absent:
            return f"needs {', '.join(absent)}, which is not installed"
        return None if device.type == "cuda" else "runs on GPUs only"

    def refusal(self, task: Task, device: torch.device) -> str | None:
        reasons = self._refusals(task)
        if task.case.precision == "float32":
            reasons.append("its float32 products are TF32")
        return "; ".join(reasons) or None

    def _refusals(self, task: Task) -> list[str]:
        return []

    @cached_property
    def call(self) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(load(self.module), self.function)
        return function


class _OneDirection(Peer):
    """Stands beside the sum of two directions, where it is a yardstick: half of the work."""

    def _refusals(self, task: Task) -> list[str]:
        if task.case.variant == "hydra":
            return ["one direction, measured beside the variant sum"]
        return []


class MambaCausal(_OneDirection):
    """mamba_ssm's scan in one direction."""

    operation = CAUSAL
    chunk_sizes = (256, 128, 64)
    packages = ("mamba_ssm", "einops", "packaging")
    module = "mamba_ssm.ops.triton.ssd_combined"
    function = "mamba_chunk_scan_combined"

    def compute(self, leaves: Tensors, options: dict[str, Any], chunk_size: int | None) -> Tensor:
        borders = options.get("cu_seqlens")
        seq_idx = None if borders is None else _numbers(borders, leaves["x"].shape[1])
        y: Tensor = self.call(**leaves, dt_softplus=True, seq_idx=seq_idx, chunk_size=chunk_size)
        return y


class MambaFlipped(Peer):
    """Both directions by one pass of mamba_ssm's scan over flipped copies: Hydra's way."""

    chunk_sizes = MambaCausal.chunk_sizes
    packages = MambaCausal.packages
    module = MambaCausal.module
    function = MambaCausal.function

    def _refusals(self, task: Task) -> list[str]:
        if "cu_seqlens" in task.options:
            return ["moves rows across the borders of packed sequences"]
        return []

    def compute(self, leaves: Tensors, options: dict[str, Any], chunk_size: int | None) -> Tensor:
        return both_directions(partial(self._causal, chunk_size), **leaves, shift=options["shift"])

    def _causal(self, chunk_size: int | None, *arguments: Tensor) -> Tensor:
        x, dt, A, B, C, dt_bias = arguments
        y: Tensor = self.call(x, dt, A, B, C, chunk_size, dt_bias=dt_bias, dt_softplus=True)
        return y


class BiMamba2(Peer):
    """Bi-Mamba2's fused sum of both directions."""

    chunk_sizes = (256, 128, 64)
    packages = ("ssd", "einops", "packaging")
    module = "ssd.bi.ssd_combined"
    function = "bimamba_chunk_scan_combined"

    def _refusals(self, task: Task) -> list[str]:
        reasons = []
        if task.options["shift"]:
            reasons.append("has no shift and no separate parameters")
        if "cu_seqlens" in task.options:
            reasons.append("does not know packed sequences")
        return reasons

    def compute(self, leaves: Tensors, options: dict[str, Any], chunk_size: int | None) -> Tensor:
        y: Tensor = self.call(**leaves, dt_softplus=True, chunk_size=chunk_size)
        return y


class SimpleGLA(_OneDirection):
    """flash-linear-attention's chunked kernel with a decay per token and head."""

    operation = ATTENTION
    chunk_sizes = (64, 128, 256)
    packages = ("fla", "einops", "packaging")
    module = "fla.ops.simple_gla.chunk"
    function = "chunk_simple_gla"
    note = "its refusal of Triton 3.4 to 3.7.0 on Hopper is lifted, its results are checked"

    def compute(self, leaves: Tensors, options: dict[str, Any], chunk_size: int | None) -> Tensor:
        y: Tensor
        y, _ = self.call(**leaves, **options, scale=1.0, chunk_size=chunk_size)
        return y

    @cached_property
    def call(self) -> Callable[..., Any]:
        # The backward refuses these versions for results that they may give wrong. Here, a wrong
        # result has no number.
        load("fla.ops.common.chunk_o").TRITON_ABOVE_3_7_1 = True
        return super().call


class Lightning(_OneDirection):
    """flash-linear-attention's lightning attention."""

    operation = LIGHTNING
    chunk_sizes = SimpleGLA.chunk_sizes
    packages = SimpleGLA.packages
    module = "fla.ops.lightning_attn.chunk"
    function = "chunk_lightning_attn"

    def compute(self, leaves: Tensors, options: dict[str, Any], chunk_size: int | None) -> Tensor:
        y: Tensor
        y, _ = self.call(
            **leaves, **options, layer_idx=0, num_layers=1, scale=1.0, chunk_size=chunk_size
        )
        return y


def _numbers(borders: Tensor, seqlen: int) -> Tensor:
    """(1, seqlen), int32: each token's sequence."""
    tokens = torch.arange(seqlen, device=borders.device, dtype=borders.dtype)
    return torch.bucketize(tokens, borders[1:], right=True).to(torch.int32)[None]


PEERS = (
    MambaCausal("mamba-causal"),
    MambaFlipped("mamba-flipped"),
    BiMamba2("bimamba2"),
    SimpleGLA("fla-simple-gla"),
    Lightning("fla-lightning"),
)
