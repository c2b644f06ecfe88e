"""From torch tensors to the arrays that the kernels take, and back."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from threading import Lock
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from torch import Tensor

from polyscan.problem import Direction, SSDInputs, SSDOutputs, SSDProblem
from polyscan.reference import compute_dtype, discretise

from ..._shared.gradients import GradientSums
from .backward import Targets, compute_entering_adjoints, scan_backward
from .forward import scan_forward
from .products import padded
from .segments import compute_entering
from .tile import TILE, Rows, Stream

# Of the heads that a task takes: what they share costs about as much as half a head has of its own;
# more than these save little; and their states should not fill the memory.
SHARED_WORK, MOST_HEADS, KEPT_BYTES = 0.5, 4, 2**26

# One call at a time: not every threading layer of Numba lets several threads start its loops.
_LOCK = Lock()


@contextmanager
def parallel() -> Iterator[None]:
    """Run kernels, on as many threads as torch would."""
    with _LOCK:
        numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]
        yield


class Plan(NamedTuple):
    """What forward and backward have in common: the arguments as the kernels take them."""

    x: Rows
    headdim: int
    forwards: Stream
    backwards: Stream
    goes_forwards: bool
    goes_backwards: bool
    sequences: Any
    starts: Any
    heads: int


def array(tensor: Tensor) -> Any:
    """The tensor's memory as NumPy sees it; 16-bit floats as their bits."""
    if tensor.dtype == torch.float16:
        tensor = tensor.view(torch.int16)
    elif tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    return tensor.detach().numpy()


def rows(tensor: Tensor) -> Rows:
    """A (batch, seqlen, nheads, headdim) tensor of any strides, without a copy."""
    extent = 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return Rows(array(tensor.as_strided((extent,), (1,))), *tensor.stride())


def no_rows(like: Tensor) -> Rows:
    return Rows(array(like.new_empty(0)), 0, 0, 0, 0)


def plan(problem: SSDProblem, inputs: SSDInputs, kept_states: int) -> Plan:
    """``kept_states`` is how many states a head of a task keeps for each tile."""
    given = {direction.reverse: direction for direction in problem.directions}
    some = problem.directions[0]
    stream = _Streams(problem, inputs)
    starts = segment_starts(problem)
    return Plan(
        x=rows(inputs.x),
        headdim=problem.headdim,
        forwards=stream.read(given.get(False, some), step=1),
        backwards=stream.read(given.get(True, some), step=-1),
        goes_forwards=False in given,
        goes_backwards=True in given,
        sequences=sequence_numbers(problem, inputs).numpy(),
        starts=starts,
        heads=heads_together(problem, len(starts) - 1, kept_states),
    )


def skip_rows(problem: SSDProblem, inputs: SSDInputs) -> Rows:
    """D, in any of its three shapes, as if it had x's."""
    dtype = compute_dtype(problem)
    if inputs.D is None:
        return no_rows(inputs.x.new_empty(0, dtype=dtype))
    D = inputs.D.to(dtype)
    return rows((D if problem.D == "channel" else D[..., None]).expand(inputs.x.shape))


def gate_rows(problem: SSDProblem, inputs: SSDInputs) -> Rows:
    """z; in x's dtype or that of the computation, so that there are few kernels to compile."""
    z = inputs.z
    if z is None:
        return no_rows(inputs.x)
    return rows(z if z.dtype == problem.x_dtype else z.to(compute_dtype(problem)))


class _Streams:
    """Reads the directions' arguments; what both share is converted once."""

    def __init__(self, problem: SSDProblem, inputs: SSDInputs) -> None:
        self.problem = problem
        self.inputs = inputs
        self.dtype = compute_dtype(problem)
        self.argument = cache(self._argument)
        self.step_sizes = cache(self._step_sizes)

    def read(self, direction: Direction, step: int) -> Stream:
        problem = self.problem
        initial = direction.parameters(self.inputs).initial_states
        if initial is None:
            shape = (0, problem.nheads, problem.headdim, problem.d_state)
            initial = self.inputs.x.new_empty(shape)
        dt, A = self.step_sizes(direction.dt, direction.dt_bias), self.argument(direction.A)
        return Stream(
            dt=array(dt),
            decay=array((dt * A[:, None]).exp_()),
            A=array(A),
            B=array(self.argument(direction.B)),
            C=array(self.argument(direction.C)),
            initial=array(initial.to(self.dtype).contiguous()),
            step=step,
        )

    def _argument(self, name: str) -> Tensor:
        argument: Tensor = getattr(self.inputs, name)
        return argument.to(self.dtype).contiguous()

    def _step_sizes(self, dt: str, dt_bias: str) -> Tensor:
        """dt after bias, softplus and clamp: (batch, nheads, seqlen)."""
        problem = self.problem
        steps = discretise(
            getattr(self.inputs, dt),
            getattr(self.inputs, dt_bias),
            problem.dt_softplus,
            problem.dt_limit,
            problem.accumulation_dtype,
        )
        return steps.movedim(1, -1).to(self.dtype).contiguous()


def sequence_numbers(problem: SSDProblem, inputs: SSDInputs) -> Tensor:
    """(batch, seqlen) int32: the sequence that each token belongs to, -1 where none does."""
    batch, seqlen = problem.batch, problem.seqlen
    if inputs.cu_seqlens is not None:
        borders = inputs.cu_seqlens.contiguous()
        tokens = torch.arange(seqlen, dtype=borders.dtype)
        numbers = torch.searchsorted(borders, tokens, right=True) - 1
        numbers.masked_fill_((tokens < borders[0]) | (tokens >= borders[-1]), -1)
        return numbers.to(torch.int32)[None]
    if inputs.seq_idx is not None:
        changes = inputs.seq_idx[:, 1:] != inputs.seq_idx[:, :-1]
        numbers = torch.zeros(batch, seqlen, dtype=torch.int32)
        numbers[:, 1:] = changes.cumsum(1)
        return numbers
    return torch.arange(batch, dtype=torch.int32)[:, None].repeat(1, seqlen)


def segment_starts(problem: SSDProblem) -> Any:
    """Where the segments begin, and where the last one ends; several only where tasks are few."""
    segments = -(-torch.get_num_threads() // (problem.batch * problem.nheads))
    return np.linspace(0, problem.seqlen, min(segments, problem.seqlen) + 1).astype(np.int64)


def heads_together(problem: SSDProblem, segments: int, kept_states: int) -> int:
    """How many heads of a group a task takes: they share work, but no thread should stand idle."""
    state_bytes = math.prod(padded(problem.d_state, problem.headdim, 4)) * 4
    per_head = kept_states * state_bytes * (problem.seqlen // TILE + 1)
    most = max(1, min(MOST_HEADS, KEPT_BYTES // max(per_head, 1)))

    def time(heads: int) -> float:
        tasks = problem.batch * segments * problem.nheads // heads
        return -(-tasks // torch.get_num_threads()) * (heads + SHARED_WORK)

    per_group = problem.nheads // problem.ngroups
    return min((n for n in range(1, most + 1) if per_group % n == 0), key=time)


def no_states(problem: SSDProblem, p: Plan) -> Any:
    """(direction, batch, nheads, segments, d_state, headdim), padded: zero enters every segment."""
    dtype = p.forwards.dt.dtype
    sizes = padded(problem.d_state, problem.headdim, dtype.itemsize)
    return np.zeros((2, problem.batch, problem.nheads, len(p.starts) - 1, *sizes), dtype)


def forward(problem: SSDProblem, inputs: SSDInputs) -> SSDOutputs:
    p = plan(problem, inputs, kept_states=0)
    outputs = problem.allocate_outputs(inputs)
    final = [final_states(problem, inputs, outputs, reverse) for reverse in (False, True)]
    pre_gate = no_rows(inputs.x) if outputs.pre_gate is None else rows(outputs.pre_gate)
    skip, gate = skip_rows(problem, inputs), gate_rows(problem, inputs)
    entering = no_states(problem, p)
    with parallel():
        if len(p.starts) > 2:
            compute_entering(entering, *p[:-1])
        scan_forward(
            *p, int(problem.shift), entering, skip, gate, rows(outputs.y), pre_gate, *final
        )
    return outputs


def final_states(problem: SSDProblem, inputs: SSDInputs, outputs: SSDOutputs, reverse: bool) -> Any:
    """Where a direction's final states go, filled with what an empty sequence leaves."""
    for direction in problem.directions:
        states: Tensor | None = getattr(outputs, direction.final_states)
        if direction.reverse == reverse and states is not None:
            initial = direction.parameters(inputs).initial_states
            states.zero_() if initial is None else states.copy_(initial)
            return states.numpy()
    shape = (0, problem.nheads, problem.headdim, problem.d_state)
    return np.empty(shape, array(inputs.x.new_empty(0, dtype=problem.accumulation_dtype)).dtype)


def backward(
    problem: SSDProblem, inputs: SSDInputs, pre_gate: Tensor | None, grads: SSDOutputs
) -> dict[str, Tensor]:
    p = plan(problem, inputs, kept_states=2)
    dtype, x = compute_dtype(problem), inputs.x
    sums = GradientSums(inputs, dtype)
    skip, gate = skip_rows(problem, inputs), gate_rows(problem, inputs)
    dy = rows(grads.y.to(problem.x_dtype))
    before = no_rows(x) if pre_gate is None else rows(pre_gate)
    dx = x.new_empty(x.shape)
    dz = None
    if inputs.z is not None:
        dz = x.new_empty(x.shape, dtype=x.dtype if inputs.z.dtype == x.dtype else dtype)
    segments = len(p.starts) - 1
    D_parts = x.new_zeros(
        (problem.batch, segments, problem.nheads, problem.headdim)
        if problem.D in ("head", "channel")
        else (0, 0, 0, 0),
        dtype=dtype,
    )
    D_tokens = sums["D"] if problem.D == "token" else x.new_empty((0, 0, 0), dtype=dtype)
    parts = _Parts(sums, problem.nheads // problem.ngroups // p.heads)
    sides = [
        _Side(problem, inputs, grads, sums, parts, reverse, segments) for reverse in (False, True)
    ]
    to = [side.targets() for side in sides]

    shift = int(problem.shift)
    entering, adjoints = no_states(problem, p), no_states(problem, p)
    to_rows = (rows(dx), no_rows(x) if dz is None else rows(dz))
    with parallel():
        if len(p.starts) > 2:
            compute_entering(entering, *p[:-1])
            compute_entering_adjoints(adjoints, *p[:-1], shift, gate, before, dy, *to)
        scan_backward(
            *p, shift, entering, adjoints, skip, gate, before, dy, *to, *to_rows,
            array(D_tokens), array(D_parts),
        )  # fmt: skip
    parts.finish()
    for side in sides:
        side.finish()
    if problem.D in ("head", "channel"):
        dD = D_parts.sum((0, 1))
        sums["D"].copy_(dD if problem.D == "channel" else dD.sum(-1))
    if inputs.z is None or dz is None:
        return sums.result(x=dx)
    return sums.result(x=dx, z=dz.to(inputs.z.dtype))


class _Parts:
    """Gradients of B and C as the sums that each block of a group's heads writes."""

    def __init__(self, sums: GradientSums, count: int) -> None:
        self._sums = sums
        self._count = count
        self._parts: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        """(blocks, batch, seqlen, ngroups, d_state), zero to begin with."""
        if name not in self._parts:
            whole = self._sums[name]
            alone = self._count == 1
            self._parts[name] = whole[None] if alone else whole.new_zeros(self._count, *whole.shape)
        return self._parts[name]

    def finish(self) -> None:
        for name, parts in self._parts.items():
            if self._count > 1:
                torch.sum(parts, 0, out=self._sums[name])


class _Side:
    """Where one direction's gradients go. Without such a direction, to nowhere."""

    def __init__(
        self,
        problem: SSDProblem,
        inputs: SSDInputs,
        grads: SSDOutputs,
        sums: GradientSums,
        parts: "_Parts",
        reverse: bool,
        segments: int,
    ) -> None:
        self.problem = problem
        self.sums = sums
        self.direction = next((d for d in problem.directions if d.reverse == reverse), None)
        new = partial(inputs.x.new_zeros, dtype=compute_dtype(problem))
        self.dinitial = self.dfinal = new((0, problem.nheads, problem.headdim, problem.d_state))
        if self.direction is None:
            self.ddt = self.dA = new((0, 0, 0))
            self.dB = self.dC = new((0, 0, 0, 0, 0))
            return
        self.ddt = new((problem.batch, problem.nheads, problem.seqlen))
        self.dA = new((problem.batch, segments, problem.nheads))
        self.dB, self.dC = parts[self.direction.B], parts[self.direction.C]
        dfinal = getattr(grads, self.direction.final_states)
        if dfinal is not None:
            self.dfinal = dfinal.to(self.ddt.dtype).contiguous()
        if self.direction.parameters(inputs).initial_states is not None:
            self.dinitial = sums[self.direction.initial_states]
            if dfinal is not None:
                self.dinitial.copy_(dfinal)  # of an empty sequence, it is the gradient

    def targets(self) -> Targets:
        return Targets(*(array(getattr(self, name)) for name in Targets._fields))

    def finish(self) -> None:
        """Add up dA, and take the gradient of dt back through clamp, softplus and bias."""
        if self.direction is None:
            return
        self.sums[self.direction.A].add_(self.dA.sum((0, 1)))
        self.sums.add_step_sizes(self.problem, self.direction, self.ddt.movedim(-1, 1))
