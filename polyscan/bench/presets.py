"""The sizes that are measured, and the tensors of a case.

Every case has D, dt_bias and softplus, as the layers have. The variants are those of the layers:
``sum``, both directions with the same parameters (Bi-Mamba2), and ``hydra``, shifted and with
separate dt, B and C (Hydra, which shares A and has one D per token).
"""

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from .precision import DTYPES, PrecisionName

VariantName = Literal["sum", "hydra"]
PassName = Literal["forward", "backward", "forward+backward"]

VARIANTS: tuple[VariantName, ...] = get_args(VariantName)
PASSES: tuple[PassName, ...] = get_args(PassName)
# On the CPU nothing is rounded to TF32, and no processor is promised fast 16-bit products.
ON_CPU: tuple[PrecisionName, ...] = ("float32",)
BOTH_FLOAT32: tuple[PrecisionName, ...] = ("tf32", "float32")


@dataclass(frozen=True)
class Preset:
    """Sizes of a problem, the kind of device it is meant for, and its usual precisions.

    ``lengths`` are those of packed sequences, in one row of ``seqlen`` tokens.
    """

    name: str
    batch: int
    seqlen: int
    nheads: int
    headdim: int
    d_state: int
    ngroups: int = 1
    precisions: tuple[PrecisionName, ...] = ("bfloat16",)
    device: str = "cuda"
    lengths: tuple[int, ...] | None = None

    @property
    def tokens(self) -> int:
        return self.batch * self.seqlen

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.seqlen if self.lengths is None else max(self.lengths)

    def __str__(self) -> str:
        packed = "" if self.lengths is None else f", {len(self.lengths)} packed sequences"
        groups = "" if self.ngroups == 1 else f", ngroups {self.ngroups}"
        return (
            f"{self.name}: {self.batch} × {self.seqlen} × {self.nheads} × {self.headdim}, "
            f"d_state {self.d_state}{groups}{packed}"
        )


class Case(NamedTuple):
    """One problem: what all implementations are given alike."""

    preset: Preset
    variant: VariantName
    precision: PrecisionName


def _packed_lengths(total: int, shortest: int, longest: int) -> tuple[int, ...]:
    """Lengths from shortest to longest in even steps, up and down again, that sum to total."""
    steps = [*range(shortest, longest + 1, 200), *range(longest - 100, shortest, -200)]
    ends = list(accumulate(steps * math.ceil(total / sum(steps))))
    inner = [end for end in ends if end <= total - shortest]
    return tuple(stop - start for start, stop in pairwise([0, *inner, total]))


def _edge(number: int, seqlen: int, nheads: int) -> tuple[Preset, ...]:
    """A user's detector, whole and in rows of 1,024 tokens."""
    whole = Preset(f"edge{number}", 1, seqlen, nheads, 64, 1, precisions=BOTH_FLOAT32)
    row = 1024
    if seqlen <= row:
        return (whole,)
    lengths = (row,) * (seqlen // row) + ((seqlen % row,) if seqlen % row else ())
    packed = Preset(
        f"{whole.name}-packed", 1, seqlen, nheads, 64, 1, precisions=BOTH_FLOAT32, lengths=lengths
    )
    return whole, packed


def _all_presets() -> tuple[Preset, ...]:
    """In the order in which they run. A sweep's longest comes first: the peers' autotuners keep
    what they choose there, and do not choose by a sequence of two tokens."""
    edges = ((198656, 1), (70656, 2), (18432, 4), (5120, 8), (994, 16))
    return (
        Preset("lm", 8, 4096, 32, 64, 128),
        Preset("hydra-bert", 32, 512, 24, 64, 64),
        Preset("dna", 1, 131072, 32, 64, 64),
        Preset("vision", 64, 197, 12, 64, 16),
        Preset("caduceus", 1, 131072, 8, 64, 16),
        Preset("audio", 12, 513, 24, 64, 16),
        Preset("packed", 1, 32768, 16, 64, 16, lengths=_packed_lengths(32768, 100, 1500)),
        *(preset for number, sizes in enumerate(edges) for preset in _edge(number, *sizes)),
        *(
            Preset(f"sweep-{2**k}", 2, 2**k, 4, 16, 16, ngroups=4, precisions=BOTH_FLOAT32)
            for k in range(14, 0, -1)
        ),
        Preset("tiny", 1, 64, 1, 16, 16),
        Preset("cpu-lm", 2, 2048, 8, 64, 64, precisions=ON_CPU, device="cpu"),
        Preset("cpu-bert", 2, 512, 24, 64, 16, precisions=ON_CPU, device="cpu"),
        Preset("cpu-dna", 1, 16384, 4, 64, 16, precisions=ON_CPU, device="cpu"),
        Preset("cpu-short", 64, 64, 8, 16, 16, precisions=ON_CPU, device="cpu"),
        *(
            Preset(f"cpu-sweep-{4**k}", 2, 4**k, 4, 16, 16, 4, precisions=ON_CPU, device="cpu")
            for k in range(6, 1, -1)
        ),
    )


PRESETS = {preset.name: preset for preset in _all_presets()}


def find(patterns: list[str]) -> list[Preset]:
    """The presets that any of the patterns, such as ``sweep-*``, names.

    Raises:
        ValueError: a pattern names none.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in PRESETS):
            raise ValueError(f"no preset is called {pattern!r}; there are {', '.join(PRESETS)}")
    return [
        preset
        for name, preset in PRESETS.items()
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    ]


def for_device(device: torch.device) -> list[Preset]:
    """The presets that are meant for such a device."""
    return [preset for preset in PRESETS.values() if preset.device == device.type]


def tensors(case: Case, device: torch.device | str) -> dict[str, Tensor]:
    """The floating-point arguments of :func:`polyscan.bidi_ssd`.

    Decays last from a few tokens to hundreds, so that both what happens within a chunk and what
    is carried from one to the next counts.
    """
    preset, dtype = case.preset, DTYPES[case.precision]
    generator = None
    if torch.device(device).type != "meta":  # where there is nothing to draw
        generator = torch.Generator(device).manual_seed(0)
    tokens = (preset.batch, preset.seqlen)
    heads, states = (*tokens, preset.nheads), (*tokens, preset.ngroups, preset.d_state)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    def wide(*shape: int) -> Tensor:
        return normal(*shape, dtype=torch.float32)

    given = {
        "x": normal(*heads, preset.headdim),
        "dt": normal(*heads),
        # from 0.01 to 1, evenly on a log scale
        "A": -torch.exp(
            math.log(0.01)
            * torch.rand(preset.nheads, generator=generator, device=device, dtype=torch.float32)
        ),
        "B": normal(*states),
        "C": normal(*states),
        "D": normal(*heads) if case.variant == "hydra" else wide(preset.nheads),
        "dt_bias": wide(preset.nheads) / 2 - 1,
    }
    if case.variant == "hydra":
        given |= {"dt_rev": normal(*heads), "B_rev": normal(*states), "C_rev": normal(*states)}
    return given


def cu_seqlens(preset: Preset, device: torch.device | str) -> Tensor | None:
    """(number of sequences + 1,), or None where nothing is packed."""
    if preset.lengths is None:
        return None
    return torch.tensor([0, *accumulate(preset.lengths)], dtype=torch.int32, device=device)


def steps(dt: Tensor, dt_bias: Tensor) -> Tensor:
    """The step sizes, as the operation makes them: float32 or wider."""
    return F.softplus(dt + dt_bias)
