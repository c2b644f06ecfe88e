"""What is to be computed, without the tensors: sizes, dtypes, device and options.

A problem is frozen and hashable, so that the choice of a backend, launch plans and tables can be
keyed by it. Everything that follows from the arguments alone is decided here and nowhere else:
which argument stands in for an omitted one, the dtypes, the shapes of the outputs.
"""

from dataclasses import dataclass
from functools import reduce
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

DirectionName = Literal["both", "forward", "reverse"]
PackingName = Literal["cu_seqlens", "seq_idx"]
SkipName = Literal["head", "channel", "token"]


class SSDInputs(NamedTuple):
    """The tensors of one call, under the names of the public arguments."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None = None
    z: Tensor | None = None
    dt_bias: Tensor | None = None
    dt_rev: Tensor | None = None
    A_rev: Tensor | None = None
    B_rev: Tensor | None = None
    C_rev: Tensor | None = None
    dt_bias_rev: Tensor | None = None
    initial_states: Tensor | None = None
    initial_states_rev: Tensor | None = None
    cu_seqlens: Tensor | None = None
    seq_idx: Tensor | None = None


INTEGER_INPUTS = ("cu_seqlens", "seq_idx")


class SSDOptions(NamedTuple):
    """The arguments of one call that are not tensors.

    ``tf32``: whether float32 products may be rounded to TF32; None in compiled code, which cannot
    ask torch before it runs, and whose op then asks.
    """

    direction: DirectionName = "both"
    shift: bool = False
    dt_softplus: bool = False
    dt_min: float = 0.0
    dt_max: float = float("inf")
    return_final_states: bool = False
    chunk_size: int | None = None
    tf32: bool | None = None


class SSDOutputs(NamedTuple):
    """What a forward returns and, as gradients, what a backward receives."""

    y: Tensor
    final_states: Tensor | None = None
    final_states_rev: Tensor | None = None
    pre_gate: Tensor | None = None


class Parameters(NamedTuple):
    """What one direction of the scan reads, besides x."""

    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    dt_bias: Tensor | None
    initial_states: Tensor | None


class Direction(NamedTuple):
    """One direction of the scan, as the names of the arguments that it reads and the output it has.

    An omitted ``*_rev`` argument falls back on its forward twin here. A backend reads its tensors
    and adds its gradients under these names, and so needs no rule of its own.
    """

    reverse: bool
    dt: str
    A: str
    B: str
    C: str
    dt_bias: str
    initial_states: str
    final_states: str

    def parameters(self, inputs: SSDInputs) -> Parameters:
        return Parameters(*(getattr(inputs, name) for name in self[1:7]))


def _direction(inputs: SSDInputs, reverse: bool) -> Direction:
    def name(argument: str) -> str:
        given = reverse and getattr(inputs, f"{argument}_rev") is not None
        return f"{argument}_rev" if given else argument

    suffix = "_rev" if reverse else ""
    return Direction(
        reverse=reverse,
        dt=name("dt"),
        A=name("A"),
        B=name("B"),
        C=name("C"),
        dt_bias=name("dt_bias"),
        initial_states="initial_states" + suffix,
        final_states="final_states" + suffix,
    )


@dataclass(frozen=True)
class SSDProblem:
    """The bidirectional (or one-directional) SSD scan of one call.

    ``nsequences`` counts the rows of the states: the batch, or with cu_seqlens the packed
    sequences. It is None with seq_idx, where it would have to be read from the device.
    """

    operation: ClassVar[str] = "ssd"

    batch: int
    seqlen: int
    nheads: int
    headdim: int
    ngroups: int
    d_state: int
    nsequences: int | None
    device: torch.device
    x_dtype: torch.dtype
    product_dtype: torch.dtype
    directions: tuple[Direction, ...]
    shift: bool
    dt_softplus: bool
    dt_limit: tuple[float, float]
    D: SkipName | None
    has_z: bool
    has_initial_states: bool
    return_final_states: bool
    packing: PackingName | None
    chunk_size: int | None
    tf32: bool
    needs_grad: bool

    @classmethod
    def describe(cls, inputs: SSDInputs, options: SSDOptions, needs_grad: bool) -> "SSDProblem":
        """The problem that a call with these (valid) arguments poses."""
        batch, seqlen, nheads, headdim = inputs.x.shape
        ngroups, d_state = inputs.B.shape[2:]
        nsequences: int | None = batch
        packing: PackingName | None = None
        if inputs.cu_seqlens is not None:
            nsequences, packing = inputs.cu_seqlens.shape[0] - 1, "cu_seqlens"
        elif inputs.seq_idx is not None:
            nsequences, packing = None, "seq_idx"
        skip: SkipName | None = None
        if inputs.D is not None:
            skip = ("head", "channel", "token")[inputs.D.dim() - 1]
        products = (inputs.x, inputs.B, inputs.C, inputs.B_rev, inputs.C_rev)
        return cls(
            batch=batch,
            seqlen=seqlen,
            nheads=nheads,
            headdim=headdim,
            ngroups=ngroups,
            d_state=d_state,
            nsequences=nsequences,
            device=inputs.x.device,
            x_dtype=inputs.x.dtype,
            product_dtype=reduce(torch.promote_types, (t.dtype for t in products if t is not None)),
            directions=tuple(
                _direction(inputs, reverse)
                for reverse in (False, True)
                if options.direction in ("both", "reverse" if reverse else "forward")
            ),
            shift=options.shift,
            dt_softplus=options.dt_softplus,
            dt_limit=(options.dt_min, options.dt_max),
            D=skip,
            has_z=inputs.z is not None,
            has_initial_states=(
                inputs.initial_states is not None or inputs.initial_states_rev is not None
            ),
            return_final_states=options.return_final_states,
            packing=packing,
            chunk_size=options.chunk_size,
            tf32=bool(options.tf32),
            needs_grad=needs_grad,
        )

    @property
    def accumulation_dtype(self) -> torch.dtype:
        """The dtype of dt, A, the biases, D and the states, and of every sum."""
        return torch.float64 if self.x_dtype == torch.float64 else torch.float32

    @property
    def heads_per_group(self) -> int:
        return self.nheads // self.ngroups

    @property
    def is_empty(self) -> bool:
        """No token at all: nothing to scan, final states are initial states."""
        return self.batch == 0 or self.seqlen == 0

    @property
    def saves_pre_gate(self) -> bool:
        """The output before the gate is what the gradient of z needs."""
        return self.has_z and self.needs_grad

    def allocate_outputs(self, inputs: SSDInputs) -> SSDOutputs:
        """Uninitialised outputs in their final shapes, dtypes and memory layout.

        The one place that knows them: backends write into these, and tracing sees nothing else.
        """

        y = torch.empty_like(inputs.x, memory_format=torch.contiguous_format)
        outputs = SSDOutputs(y, pre_gate=torch.empty_like(y) if self.saves_pre_gate else None)
        if not self.return_final_states or self.nsequences is None:
            return outputs
        shape = (self.nsequences, self.nheads, self.headdim, self.d_state)
        final_states = {
            direction.final_states: y.new_empty(shape, dtype=self.accumulation_dtype)
            for direction in self.directions
        }
        return outputs._replace(**final_states)
