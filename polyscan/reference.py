"""The operation written down once more, as plainly as possible: one token after the other.

This is the meaning that every backend is held to. It is ordinary differentiable PyTorch, runs on
any device in any dtype, and is slow. Nothing is validated.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .problem import Direction, DirectionName, SSDInputs, SSDOptions, SSDOutputs, SSDProblem

# log1p(exp(v)) is v to the last bit of a double from here on, and exp(v) still far from overflow.
SOFTPLUS_THRESHOLD = 40.0


def discretise(
    dt: Tensor,
    dt_bias: Tensor | None,
    softplus: bool,
    limit: tuple[float, float],
    dtype: torch.dtype,
) -> Tensor:
    """``clamp(softplus(dt + dt_bias), *limit)`` in ``dtype``: (batch, seqlen, nheads)."""
    dt = dt.to(dtype)
    if dt_bias is not None:
        dt = dt + dt_bias.to(dtype)
    if softplus:
        dt = F.softplus(dt, threshold=SOFTPLUS_THRESHOLD)
    return dt.clamp(*limit)


def scan(
    log_decay: Tensor, v: Tensor, B: Tensor, C: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """``h_t = exp(log_decay_t) h_{t-1} + v_t B_tᵀ``, ``y_t = h_t C_t``, over axis 1.

    log_decay (batch, seqlen, nheads), v (batch, seqlen, nheads, headdim), B and C
    (batch, seqlen, nheads, d_state), state (batch, nheads, headdim, d_state) the one before the
    first token. Returns y, shaped like v, and the state after the last token.
    """
    outputs = []
    for t in range(v.shape[1]):
        state = log_decay[:, t, :, None, None].exp() * state + outer(v[:, t], B[:, t])
        outputs.append((state @ C[:, t, :, :, None])[..., 0])
    return torch.stack(outputs, dim=1), state


def outer(v: Tensor, B: Tensor) -> Tensor:
    """(batch, nheads, headdim), (batch, nheads, d_state) -> (batch, nheads, headdim, d_state)."""
    return v[..., :, None] * B[..., None, :]


class Sequence(NamedTuple):
    """A piece that is scanned on its own: rows and tokens of x, and rows of the states.

    Without packing all rows of the batch are one such piece. With seq_idx there are no states, and
    every sequence starts from the one row of zeros.
    """

    rows: slice
    tokens: slice
    states: slice


def sequences(problem: SSDProblem, inputs: SSDInputs) -> Iterator[Sequence]:
    """The sequences of a problem; those without a token are left out. Reads the borders' values."""
    if inputs.cu_seqlens is not None:
        borders = inputs.cu_seqlens.tolist()
        for i, (start, stop) in enumerate(pairwise(borders)):
            if stop > start:
                yield Sequence(slice(0, 1), slice(start, stop), slice(i, i + 1))
    elif inputs.seq_idx is not None:
        for row, ids in enumerate(inputs.seq_idx):
            changes = (ids[1:] != ids[:-1]).nonzero()[:, 0] + 1
            borders = [0, *changes.tolist(), problem.seqlen]
            for start, stop in pairwise(borders):
                yield Sequence(slice(row, row + 1), slice(start, stop), slice(0, 1))
    elif problem.seqlen > 0:
        whole = slice(None)
        yield Sequence(whole, whole, whole)


def covered_rows(problem: SSDProblem, inputs: SSDInputs, rows: Tensor) -> Tensor:
    """Zero where no sequence covers a token, whatever stands there."""
    if problem.packing != "cu_seqlens":
        return rows
    kept = torch.zeros_like(rows)
    for sequence in sequences(problem, inputs):
        kept[:, sequence.tokens] = rows[:, sequence.tokens]
    return kept


def shift_rows(y: Tensor) -> Tensor:
    """Move y one step along axis 1; a zero row enters and the last row leaves."""
    return torch.cat([torch.zeros_like(y[:, :1]), y[:, :-1]], dim=1)


def evaluate(problem: SSDProblem, inputs: SSDInputs) -> SSDOutputs:
    """The whole operation, in the dtype that its products and sums ask for together."""
    dtype = compute_dtype(problem)
    x = covered_rows(problem, inputs, inputs.x.to(dtype))
    y = torch.zeros_like(x)
    final_states: dict[str, Tensor] = {}
    for direction in problem.directions:
        y_direction, states = _one_direction(problem, inputs, direction, x)
        y = y + y_direction
        if problem.return_final_states:
            final_states[direction.final_states] = states.to(problem.accumulation_dtype)
    if inputs.D is not None:
        D = inputs.D.to(dtype)
        y = y + (D if problem.D == "channel" else D[..., None]) * x
    y = covered_rows(problem, inputs, y)
    pre_gate = y.to(problem.x_dtype) if problem.saves_pre_gate else None
    if inputs.z is not None:
        y = covered_rows(problem, inputs, y * F.silu(inputs.z.to(dtype)))
    return SSDOutputs(y.to(problem.x_dtype), **final_states, pre_gate=pre_gate)


def compute_dtype(problem: SSDProblem) -> torch.dtype:
    """Products and sums in one dtype: no narrower than either asks for."""
    return torch.promote_types(problem.product_dtype, problem.accumulation_dtype)


def bidi_ssd(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **arguments: Any) -> Any:
    """:func:`polyscan.bidi_ssd` as plain PyTorch: any number of derivatives, nothing fused."""
    return _call("both", SSDInputs(x, dt, A, B, C), arguments)


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    reverse: bool = False,
    **arguments: Any,
) -> Any:
    """:func:`polyscan.ssd` as plain PyTorch: any number of derivatives, nothing fused."""
    if reverse:
        arguments["initial_states_rev"] = arguments.pop("initial_states", None)
    return _call("reverse" if reverse else "forward", SSDInputs(x, dt, A, B, C), arguments)


def _call(direction: DirectionName, inputs: SSDInputs, arguments: dict[str, Any]) -> Any:
    for hint in ("backend", "chunk_size"):
        arguments.pop(hint, None)
    dt_min, dt_max = arguments.pop("dt_limit", (0.0, float("inf")))
    tensors = {name: arguments.pop(name) for name in SSDInputs._fields if name in arguments}
    options = SSDOptions(direction=direction, dt_min=dt_min, dt_max=dt_max, **arguments)
    inputs = inputs._replace(**tensors)
    problem = SSDProblem.describe(inputs, options, needs_grad=False)
    outputs = [t for t in evaluate(problem, inputs) if t is not None]
    return tuple(outputs) if len(outputs) > 1 else outputs[0]


class Streams(NamedTuple):
    """What :func:`scan` reads of a direction, per token and head, and the states that enter."""

    log_decay: Tensor
    v: Tensor
    B: Tensor
    C: Tensor
    initial_states: Tensor


def prepare(
    problem: SSDProblem, inputs: SSDInputs, direction: Direction, x: Tensor
) -> tuple[Streams, Tensor]:
    """A direction's streams in natural time order and x's dtype, and dt after its transform."""
    given = direction.parameters(inputs)
    dt = discretise(given.dt, given.dt_bias, problem.dt_softplus, problem.dt_limit, x.dtype)
    dt = covered_rows(problem, inputs, dt)
    shape = (problem.nheads, problem.headdim, problem.d_state)
    if given.initial_states is not None:
        states = given.initial_states.to(x.dtype)
    elif problem.nsequences is not None:
        states = x.new_zeros(problem.nsequences, *shape)
    else:
        states = x.new_zeros(1, *shape)
    repeat = problem.heads_per_group
    streams = Streams(
        dt * given.A.to(x.dtype),
        dt[..., None] * x,
        given.B.to(x.dtype).repeat_interleave(repeat, dim=2),
        given.C.to(x.dtype).repeat_interleave(repeat, dim=2),
        states,
    )
    return streams, dt


def cut(streams: Streams, sequence: Sequence, reverse: bool) -> Streams:
    """One sequence of the streams, in the direction's own order."""

    def piece(stream: Tensor) -> Tensor:
        tokens = stream[sequence.rows, sequence.tokens]
        return tokens.flip(1) if reverse else tokens

    log_decay, v, B, C, initial_states = streams
    return Streams(piece(log_decay), piece(v), piece(B), piece(C), initial_states[sequence.states])


def _one_direction(
    problem: SSDProblem, inputs: SSDInputs, direction: Direction, x: Tensor
) -> tuple[Tensor, Tensor]:
    streams, _ = prepare(problem, inputs, direction, x)
    y = torch.zeros_like(x)
    final_states = streams.initial_states.clone()
    for sequence in sequences(problem, inputs):
        y_sequence, state = scan(*cut(streams, sequence, direction.reverse))
        if problem.shift:
            y_sequence = shift_rows(y_sequence)
        y[sequence.rows, sequence.tokens] = y_sequence.flip(1) if direction.reverse else y_sequence
        final_states[sequence.states] = state
    return y, final_states
