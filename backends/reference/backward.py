"""Gradients by the recurrence of the adjoint state, one token after the other.

With E_t the gradient of the state h_t, and ``out_t = h_t C_t`` before any shift::

    E_t      = dout_t C_tᵀ + exp(log_decay_{t+1}) E_{t+1}      E_last also gets dfinal
    dC_t     = h_tᵀ dout_t
    dv_t     = E_t B_t
    dB_t     = E_tᵀ v_t
    dlog_decay_t = exp(log_decay_t) <E_t, h_{t-1}>
    dinitial = exp(log_decay_0) E_0

No term is ever subtracted from another, so nothing cancels.
"""

import math

import torch
from torch import Tensor

from polyscan.problem import Direction, SSDInputs, SSDOutputs, SSDProblem
from polyscan.reference import (
    Streams,
    compute_dtype,
    covered_rows,
    cut,
    outer,
    prepare,
    scan,
    sequences,
)

from .._shared.elementwise import gate_backward, skip_gradient, skip_term
from .._shared.gradients import GradientSums


def backward(
    problem: SSDProblem, inputs: SSDInputs, pre_gate: Tensor | None, grads: SSDOutputs
) -> dict[str, Tensor]:
    dtype = compute_dtype(problem)
    sums = GradientSums(inputs, dtype)
    x = covered_rows(problem, inputs, inputs.x.to(dtype))
    dy = grads.y.to(dtype)
    if inputs.z is not None and pre_gate is not None:
        dy, dz = gate_backward(dy, inputs.z.to(dtype), pre_gate.to(dtype))
        sums["z"].copy_(covered_rows(problem, inputs, dz))
    dy = covered_rows(problem, inputs, dy)
    if inputs.D is not None and problem.D is not None:
        sums["D"].copy_(skip_gradient(dy, x, problem.D))
        sums["x"].copy_(skip_term(inputs.D.to(dtype), dy, problem.D))
    for direction in problem.directions:
        _add_direction(sums, problem, inputs, direction, x, dy, grads)
    return sums.result()


def _add_direction(
    sums: GradientSums,
    problem: SSDProblem,
    inputs: SSDInputs,
    direction: Direction,
    x: Tensor,
    dy: Tensor,
    grads: SSDOutputs,
) -> None:
    """Add what one direction contributes to every gradient."""
    streams, dt = prepare(problem, inputs, direction, x)
    given = direction.parameters(inputs)
    dfinal_states = getattr(grads, direction.final_states)
    if dfinal_states is None:
        dfinal_states = torch.zeros_like(streams.initial_states)
    dstates = dfinal_states.to(x.dtype).clone()
    dstreams = Streams(*(torch.zeros_like(stream) for stream in streams))
    for sequence in sequences(problem, inputs):
        dout = dy[sequence.rows, sequence.tokens]
        if direction.reverse:
            dout = dout.flip(1)
        if problem.shift:
            dout = torch.cat([dout[:, 1:], torch.zeros_like(dout[:, :1])], dim=1)
        pieces = scan_backward(
            cut(streams, sequence, direction.reverse), dout, dstates[sequence.states]
        )
        for total, piece in zip(dstreams[:4], pieces[:4], strict=True):
            total[sequence.rows, sequence.tokens] = piece.flip(1) if direction.reverse else piece
        if problem.packing != "seq_idx":
            dstates[sequence.states] = pieces.initial_states

    A = given.A.to(x.dtype)
    ddt = (dstreams.v * x).sum(-1) + dstreams.log_decay * A
    sums.add_step_sizes(problem, direction, ddt)
    per_group = (problem.ngroups, problem.heads_per_group)
    sums["x"].add_(dt[..., None] * dstreams.v)
    sums[direction.A].add_((dt * dstreams.log_decay).sum((0, 1)))
    sums[direction.B].add_(dstreams.B.unflatten(2, per_group).sum(3))
    sums[direction.C].add_(dstreams.C.unflatten(2, per_group).sum(3))
    if given.initial_states is not None:
        sums[direction.initial_states].add_(dstates)


def scan_backward(streams: Streams, dout: Tensor, dstate: Tensor) -> Streams:
    """Gradients of :func:`polyscan.reference.scan`, as streams; ``initial_states`` is dinitial.

    Keeps the states at every √seqlen-th token and recomputes those between: memory O(√seqlen).
    """
    log_decay, v, B, C, state = streams
    seqlen = v.shape[1]
    step = math.isqrt(seqlen - 1) + 1
    starts = range(0, seqlen, step)
    entering = []
    for start in starts:
        entering.append(state)
        part = slice(start, start + step)
        _, state = scan(log_decay[:, part], v[:, part], B[:, part], C[:, part], state)

    dlog_decay, dv = torch.empty_like(log_decay), torch.empty_like(v)
    dB, dC = torch.empty_like(B), torch.empty_like(C)
    for start, first in zip(reversed(starts), reversed(entering), strict=True):
        span = range(start, min(start + step, seqlen))
        states = [first]
        for t in span:
            decay = log_decay[:, t, :, None, None].exp()
            states.append(decay * states[-1] + outer(v[:, t], B[:, t]))
        for t in reversed(span):
            after, before = states[t - start + 1], states[t - start]
            decay = log_decay[:, t, :, None, None].exp()
            dstate = dstate + outer(dout[:, t], C[:, t])
            dC[:, t] = (dout[:, t, :, None, :] @ after)[..., 0, :]
            dB[:, t] = (v[:, t, :, None, :] @ dstate)[..., 0, :]
            dv[:, t] = (dstate @ B[:, t, :, :, None])[..., 0]
            dlog_decay[:, t] = (decay * dstate * before).sum((-2, -1))
            dstate = decay * dstate
    return Streams(dlog_decay, dv, dB, dC, dstate)
