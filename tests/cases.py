"""Named problems that the tests and the benchmarks share.

A :class:`Case` is sizes and options; :func:`make` draws its tensors and gives a :class:`Call`.
"""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

Results = dict[str, Tensor]  # outputs by name, gradients as "grad_" + the argument's name
REV_ARGUMENTS = ("dt_rev", "A_rev", "B_rev", "C_rev", "dt_bias_rev")


@dataclass(frozen=True)
class Case:
    """Sizes, options, and which of the optional tensors are given."""

    name: str
    batch: int = 2
    seqlen: int = 37
    nheads: int = 2
    headdim: int = 8
    ngroups: int = 1
    d_state: int = 4
    direction: str = "both"  # or "forward" or "reverse": those are polyscan.ssd
    shift: bool = False
    D: str | None = None  # "head", "channel" or "token"
    z: bool = False
    dt_bias: bool = False
    dt_softplus: bool = False
    dt_limit: tuple[float, float] = (0.0, math.inf)
    rev: tuple[str, ...] = ()  # which of REV_ARGUMENTS are given
    initial_states: bool = False
    initial_states_rev: bool = False
    return_final_states: bool = False
    cu_seqlens: tuple[int, ...] | None = None
    seq_idx: tuple[tuple[int, ...], ...] | None = None
    chunk_size: int | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def cost(self) -> int:
        """Updates of one number of a state: what a sequential executor's time goes with."""
        directions = 2 if self.direction == "both" else 1
        tokens = self.batch * self.seqlen
        return tokens * self.nheads * self.headdim * self.d_state * directions

    @property
    def nsequences(self) -> int:
        return self.batch if self.cu_seqlens is None else len(self.cu_seqlens) - 1


@dataclass(frozen=True)
class Dtypes:
    """One dtype for all arguments but those in ``overrides``."""

    name: str
    default: torch.dtype
    overrides: dict[str, torch.dtype] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return self.name

    def of(self, argument: str) -> torch.dtype:
        return self.overrides.get(argument, self.default)


@dataclass(frozen=True, eq=False)
class Call:
    """The arguments of one call under their public names, and its outputs' gradients."""

    direction: str
    tensors: dict[str, Tensor]
    options: dict[str, Any]
    cotangents: dict[str, Tensor]

    @cached_property
    def sides(self) -> tuple[tuple[str, bool], ...]:
        """(suffix of the side's own arguments and outputs, whether it is the reverse direction)."""
        if self.direction == "both":
            return ("", False), ("_rev", True)
        return (("", self.direction == "reverse"),)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of what the call returns, in order."""
        if not self.options["return_final_states"]:
            return ("y",)
        return ("y", *(f"final_states{suffix}" for suffix, _ in self.sides))

    @property
    def floats(self) -> dict[str, Tensor]:
        return {name: t for name, t in self.tensors.items() if t.is_floating_point()}

    def argument(self, name: str, suffix: str) -> str | None:
        """The argument that a side reads: its own, else its forward twin, else None."""
        return next((n for n in (name + suffix, name) if n in self.tensors), None)

    def with_tensors(self, **tensors: Tensor) -> "Call":
        return replace(self, tensors={**self.tensors, **tensors})

    def with_options(self, **options: Any) -> "Call":
        return replace(self, options={**self.options, **options})

    def without(self, *names: str) -> "Call":
        return replace(self, tensors={n: t for n, t in self.tensors.items() if n not in names})


class _Draw:
    """Random numbers in ranges where every term of the operation counts."""

    def __init__(self, device: torch.device, dtypes: Dtypes, seed: int) -> None:
        self.device = device
        self.dtypes = dtypes
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, name: str, *shape: int, scale: float = 1.0) -> Tensor:
        return self._put(name, scale * self._randn(shape))

    def uniform(self, name: str, *shape: int, low: float, high: float) -> Tensor:
        return self._put(name, low + (high - low) * self._rand(shape))

    def decay_rate(self, name: str, *shape: int) -> Tensor:
        """-exp(uniform): from slow (0.1 a unit of dt) to fast (5)."""
        return self._put(name, -torch.exp(-2.3 + 3.9 * self._rand(shape)))

    def _rand(self, shape: tuple[int, ...]) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def _randn(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def _put(self, name: str, values: Tensor) -> Tensor:
        return values.to(self.device, self.dtypes.of(name))


@lru_cache(maxsize=32)
def make(case: Case, device: torch.device, dtype: torch.dtype | Dtypes, seed: int = 0) -> Call:
    """Draw a case's tensors. The same arguments give the same call: nobody may write to it."""
    dtypes = dtype if isinstance(dtype, Dtypes) else Dtypes(str(dtype), dtype)
    draw = _Draw(device, dtypes, seed)
    tokens = (case.batch, case.seqlen)
    tensors = {"x": draw.normal("x", *tokens, case.nheads, case.headdim)}
    tensors |= _side(case, draw, "")
    if case.D is not None:
        shapes = {"head": (), "channel": (case.headdim,)}
        shape = (case.nheads, *shapes[case.D]) if case.D in shapes else (*tokens, case.nheads)
        tensors["D"] = draw.normal("D", *shape)
    if case.z:
        tensors["z"] = draw.normal("z", *tokens, case.nheads, case.headdim)
    tensors |= _side(case, draw, "_rev")
    state = (case.nsequences, case.nheads, case.headdim, case.d_state)
    for name in ("initial_states", "initial_states_rev"):
        if getattr(case, name):
            tensors[name] = draw.normal(name, *state)
    if case.cu_seqlens is not None:
        tensors["cu_seqlens"] = torch.tensor(case.cu_seqlens, dtype=torch.int32, device=device)
    if case.seq_idx is not None:
        rows = torch.tensor(case.seq_idx, dtype=torch.int32, device=device)
        tensors["seq_idx"] = rows.reshape(tokens)

    names = ("shift", "dt_softplus", "dt_limit", "return_final_states", "chunk_size")
    call = Call(case.direction, tensors, {name: getattr(case, name) for name in names}, {})
    accumulation = torch.float64 if dtypes.of("x") == torch.float64 else torch.float32
    for name in call.outputs:
        shape = tuple(tensors["x"].shape) if name == "y" else state
        cotangent = draw.normal("x" if name == "y" else name, *shape, scale=case.headdim**-0.5)
        call.cotangents[name] = cotangent.to(dtypes.of("x") if name == "y" else accumulation)
    return call


def _side(case: Case, draw: _Draw, suffix: str) -> dict[str, Tensor]:
    """What one direction reads besides x: those of its arguments that are given."""

    def given(name: str) -> bool:
        if suffix:
            return name + suffix in case.rev
        return name != "dt_bias" or case.dt_bias

    tokens = (case.batch, case.seqlen)
    heads, groups = (case.nheads,), (*tokens, case.ngroups, case.d_state)
    tensors = {}
    if given("dt") and case.dt_softplus:
        tensors["dt"] = draw.normal("dt" + suffix, *tokens, *heads)
    elif given("dt"):
        tensors["dt"] = draw.uniform("dt" + suffix, *tokens, *heads, low=0.02, high=1.0)
    if given("A"):
        tensors["A"] = draw.decay_rate("A" + suffix, *heads)
    # Scaled, so that products over d_state stay near 1 and sums within float16's range.
    for name in ("B", "C"):
        if given(name):
            scale = case.d_state**-0.25
            tensors[name] = draw.normal(name + suffix, *groups, scale=scale)
    if given("dt_bias"):
        tensors["dt_bias"] = draw.uniform("dt_bias" + suffix, *heads, low=-0.5, high=0.5)
    return {name + suffix: tensor for name, tensor in tensors.items()}


def packed(*lengths: int) -> tuple[int, ...]:
    """cu_seqlens of sequences that lie one after the other."""
    return (0, *accumulate(lengths))


def repeated(*runs: tuple[int, int]) -> tuple[int, ...]:
    """A row of seq_idx from (id, length) pairs."""
    return tuple(i for i, length in runs for _ in range(length))


_STATES = {"initial_states": True, "initial_states_rev": True, "return_final_states": True}
_ONE_STATE = {"initial_states": True, "return_final_states": True}
_RAGGED = (1, 2, 63, 64, 65, 1)

# Options are tried on 37 tokens with a chunk hint of 16, so that even there states pass borders.
_SMALL = Case("small", chunk_size=16)
_PLAIN = (
    # Sizes
    Case("seqlen-63", seqlen=63, ngroups=2),
    Case("seqlen-65", seqlen=65),
    Case("seqlen-130", seqlen=130, nheads=4, headdim=16, ngroups=2, d_state=16),
    *(Case(f"seqlen-{seqlen}", seqlen=seqlen) for seqlen in (1, 2, 3, 7, 8, 15, 16, 17)),
    Case("one-head", batch=1, nheads=1),
    *(replace(_SMALL, name=f"ngroups-{n}", nheads=4, ngroups=n) for n in (1, 2, 4)),
    *(replace(_SMALL, name=f"d_state-{n}", d_state=n) for n in (1, 3, 16, 64, 100)),
    *(replace(_SMALL, name=f"headdim-{n}", headdim=n) for n in (1, 7, 64)),
    Case("batch-0", batch=0, D="channel", z=True, **_STATES),
    Case("seqlen-0", seqlen=0, D="token", z=True, **_STATES),
    Case("seqlen-0-packed", batch=1, seqlen=0, cu_seqlens=(0, 0, 0), **_STATES),
    *(
        Case(f"chunk_size-{size}", seqlen=67, chunk_size=size, **_STATES)
        for size in (1, 5, 64, 1000)
    ),
    # Options
    *(replace(_SMALL, name=f"D-{kind}", D=kind) for kind in ("head", "channel", "token")),
    replace(_SMALL, name="z", z=True),
    replace(_SMALL, name="bias", dt_bias=True),
    replace(_SMALL, name="softplus", dt_softplus=True),
    replace(
        _SMALL, name="limit", dt_bias=True, dt_softplus=True, dt_limit=(0.4, 1.2), rev=("dt_rev",)
    ),
    *(
        replace(_SMALL, name=f"only-{name}", dt_bias=True, dt_softplus=True, rev=(name,))
        for name in REV_ARGUMENTS
    ),
    replace(_SMALL, name="only-dt_bias_rev-no-bias", rev=("dt_bias_rev",)),
    replace(_SMALL, name="states", **_STATES),
    replace(_SMALL, name="initial_states", initial_states=True),
    replace(_SMALL, name="initial_states_rev", initial_states_rev=True),
    replace(_SMALL, name="final_states", return_final_states=True),
    *(
        replace(
            _SMALL, name=f"ssd-{direction}", direction=direction, D="head", z=True, **_ONE_STATE
        )
        for direction in ("forward", "reverse")
    ),
    # Packing
    Case("packed", batch=1, seqlen=sum(_RAGGED), cu_seqlens=packed(*_RAGGED), ngroups=2),
    Case("packed-states", batch=1, seqlen=sum(_RAGGED), cu_seqlens=packed(*_RAGGED), **_STATES),
    replace(_SMALL, name="packed-empty", batch=1, cu_seqlens=(0, 0, 5, 5, 9, 37, 37), **_STATES),
    replace(
        _SMALL,
        name="packed-uncovered",
        batch=1,
        cu_seqlens=(3, 10, 31),
        D="head",
        z=True,
        dt_bias=True,
        dt_softplus=True,
        rev=REV_ARGUMENTS,
        **_STATES,
    ),
    replace(_SMALL, name="packed-nothing", batch=1, cu_seqlens=(0,), D="channel", **_STATES),
    replace(_SMALL, name="packed-short", batch=1, cu_seqlens=packed(*[1, 2, 3, 1, 4] * 3, 4)),
    replace(
        _SMALL,
        name="packed-forward",
        batch=1,
        direction="forward",
        cu_seqlens=packed(7, 30),
        **_ONE_STATE,
    ),
    replace(
        _SMALL,
        name="seq_idx",
        # A returning id is a new sequence, a negative one is an id like any other.
        seq_idx=(repeated((5, 6), (-1, 3), (5, 28)), repeated((0, 1), (7, 35), (0, 1))),
        D="token",
        z=True,
    ),
    # All of it, over several chunks of any size
    Case(
        "hydra",
        seqlen=130,
        nheads=4,
        headdim=16,
        d_state=16,
        D="token",
        z=True,
        dt_bias=True,
        dt_softplus=True,
        rev=REV_ARGUMENTS,
        **_STATES,
    ),
)

# By name; every one with and without the shift.
CASES = {
    case.name: case
    for plain in _PLAIN
    for case in (plain, replace(plain, name=f"{plain.name}-shift", shift=True))
}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
