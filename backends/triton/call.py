"""One call in the terms of the kernels: tensors by rows, units, what every launch is given."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from polyscan.problem import Direction, SSDInputs, SSDProblem

from . import tables
from .kernels import borders as border_kernels
from .kernels.steps import discretise
from .machine import machine_of
from .plan import Plan, plan

BLOCK = 1024
KEYS = ("B", "C", "B_rev", "C_rev")
DTYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
}


class Steps(NamedTuple):
    """What ``discretise`` makes of a direction's dt: both (tiles, nheads, Q)."""

    steps: Tensor
    sums: Tensor


class Call:
    """The arguments as kernels read them: last axis contiguous, everything else strided.

    ``table`` and ``first_unit`` describe the packed sequences of cu_seqlens, ``borders`` those of
    seq_idx.
    """

    def __init__(self, problem: SSDProblem, inputs: SSDInputs, backward: bool) -> None:
        self.problem = problem
        self.machine = machine_of(problem.device)
        self.plan: Plan = plan(problem, self.machine, backward)
        self.inputs = inputs._replace(
            **{
                name: _rows(getattr(inputs, name))
                for name in ("x", "z", *KEYS)
                if getattr(inputs, name) is not None
            },
            **{
                name: getattr(inputs, name).contiguous()
                for name in ("A", "A_rev", "dt_bias", "dt_bias_rev", "cu_seqlens")
                if getattr(inputs, name) is not None
            },
        )
        keys = [name for name in KEYS if getattr(self.inputs, name) is not None]
        if len({getattr(self.inputs, name).dtype for name in keys}) > 1:
            # A kernel chooses between them, so they are of one kind.
            wide = {n: getattr(self.inputs, n).to(problem.product_dtype) for n in keys}
            self.inputs = self.inputs._replace(**wide)
        self.table: Tensor | None = None
        self.first_unit: Tensor | None = None
        self.borders: Tensor | None = None
        if problem.packing == "cu_seqlens":
            self._cut()
        elif problem.packing == "seq_idx":
            self._mark()
        product = problem.product_dtype
        if self.machine.interpreted:
            product = torch.float32  # the interpreter multiplies the bits of a bfloat16
        self.product = product
        #: Differences of sums of log decays are wanted to the last digit of float32.
        self.exact = problem.product_dtype == torch.float32 and not problem.tf32
        self._steps: dict[Direction, Steps] = {}
        #: What every kernel on units is given by name.
        self.units: dict[str, Any] = {
            "table": self.table,
            "seqlen": problem.seqlen,
            "nheads": problem.nheads,
            "unit_size": self.plan.unit_size,
            "units_per_row": self.plan.units_per_row,
            "TABLE": self.table is not None,
            "Q": self.plan.tile,
        }
        #: And how dt becomes a step size.
        self.discretisation: dict[str, Any] = {
            "dt_low": problem.dt_limit[0],
            "dt_high": problem.dt_limit[1],
            "SOFTPLUS": problem.dt_softplus,
        }
        #: And what those are given that multiply matrices.
        self.tiles: dict[str, Any] = {
            **self.units,
            "borders": self.borders,
            "heads_per_group": problem.heads_per_group,
            "BORDERS": self.borders is not None,
            "FULL": self.table is None and problem.seqlen % self.plan.tile == 0,
            "SHIFT": int(problem.shift),
            "HEADDIM": problem.headdim,
            "D_STATE": problem.d_state,
            "P": self.plan.slice,
            "N": self.plan.width,
            "PRODUCT": DTYPES[product],
            "PRECISION": "tf32" if problem.tf32 else "ieee",
        }

    @property
    def nsequences(self) -> int:
        """Rows that a state may begin in."""
        problem = self.problem
        return problem.batch if problem.nsequences is None else problem.nsequences

    def steps(self, direction: Direction) -> "Steps":
        """The step sizes of a direction and the sums of its log decays, once they are wanted."""
        if direction not in self._steps:
            problem, given = self.problem, direction.parameters(self.inputs)
            both = self.plan.fused
            tiles = self.plan.units * self.plan.tiles_per_unit
            shape = (tiles, problem.nheads, self.plan.tile)
            new = self.inputs.x.new_empty
            steps = new(shape, dtype=torch.float32)
            wide = torch.float64 if self.exact else torch.float32
            sums = [new(shape, dtype=wide) for _ in range(2 if both else 1)]
            discretise[(tiles,)](
                **self.units,
                **self.discretisation,
                **strided("dt", given.dt, "head"),
                A=given.A,
                dt_bias=given.dt_bias,
                steps=steps,
                sums=sums[0],
                sums_rev=sums[-1],
                REVERSE=direction.reverse and not both,
                BOTH=both,
                BIAS=given.dt_bias is not None,
                HEADS=min(16, triton.next_power_of_2(problem.nheads)),
                num_warps=4,
            )
            for one in problem.directions if both else (direction,):
                self._steps[one] = Steps(steps, sums[-1] if one.reverse else sums[0])
        return self._steps[direction]

    def options(self, kernel: str) -> dict[str, int]:
        """Warps, and stages of the software pipeline where a kernel has a loop."""
        return tables.options(kernel, self.problem, self.plan)

    def states(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Room for states: (*shape, nheads, headdim, d_state), in float32 unless said."""
        problem = self.problem
        return self.inputs.x.new_empty(
            (*shape, problem.nheads, problem.headdim, problem.d_state),
            dtype=dtype or problem.accumulation_dtype,
        )

    def _cut(self) -> None:
        problem, cu_seqlens = self.problem, self.inputs.cu_seqlens
        assert problem.nsequences is not None and cu_seqlens is not None
        new = cu_seqlens.new_empty
        self.table = new((self.plan.units, 4), dtype=torch.int32)
        self.first_unit = new(problem.nsequences + 3, dtype=torch.int32)
        border_kernels.cut[(1,)](
            cu_seqlens,
            self.first_unit,
            self.table,
            problem.nsequences,
            problem.seqlen,
            self.plan.unit_size,
            self.plan.units,
            (problem.nsequences + 2).bit_length(),
            BLOCK=BLOCK,
        )

    def _mark(self) -> None:
        problem, seq_idx = self.problem, self.inputs.seq_idx
        assert seq_idx is not None
        self.borders = seq_idx.new_empty((problem.batch, problem.seqlen), dtype=torch.int8)
        tokens = problem.batch * problem.seqlen
        border_kernels.mark[(triton.cdiv(tokens, BLOCK),)](
            seq_idx, self.borders, tokens, problem.seqlen, *seq_idx.stride(), BLOCK=BLOCK
        )


def strided(name: str, tensor: Tensor | None, third: str) -> dict[str, Any]:
    """A tensor (batch, tokens, heads or groups, ...) and its strides, as kernels are given them."""
    strides = (0, 0, 0) if tensor is None else tensor.stride()[:3]
    if tensor is not None and tensor.shape[0] == 1:
        strides = (0, *strides[1:])  # says nothing, and would make kernels compile anew
    axes = ("batch", "token", third)
    return {name: tensor} | {
        f"{name}_{axis}": stride for axis, stride in zip(axes, strides, strict=True)
    }


def aligned(arguments: Mapping[str, Any], *names: str) -> bool:
    """Whether the batch strides leave rows as aligned as their tensors are."""
    return all(arguments[f"{name}_batch"] % 16 == 0 for name in names)


def _rows(tensor: Tensor) -> Tensor:
    """The tensor itself where its last axis is contiguous."""
    fits = tensor.stride(-1) == 1 or tensor.shape[-1] == 1
    return tensor if fits else tensor.contiguous()
