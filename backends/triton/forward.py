"""The forward: what enters each unit where there are several, and then one launch for all."""

from typing import Any

import triton
from torch import Tensor

from polyscan.problem import Direction, SSDInputs, SSDOutputs, SSDProblem

from .call import Call, aligned, strided
from .kernels.scan import scan
from .passage import Carried, Passage


def forward(problem: SSDProblem, inputs: SSDInputs) -> SSDOutputs:
    call = Call(problem, inputs, backward=False)
    outputs = problem.allocate_outputs(inputs)
    x = call.inputs.x
    carried = [
        Carried(
            direction,
            False,
            direction.parameters(call.inputs).initial_states,
            getattr(outputs, direction.final_states),
        )
        for direction in problem.directions
    ]
    entering = Passage(call, carried).entering
    given: dict[str, Any] = {}
    # A direction that is not walked has to be given to the kernel all the same.
    for index, suffix in ((0, ""), (-1, "_rev")):
        leaving = carried[index].final if call.plan.units_are_sequences else None
        enters = None if entering is None else entering[index]
        given |= _direction(call, carried[index].direction, suffix, enters, leaving)
    tensors = {
        **strided("x", x, "head"),
        **strided("z", call.inputs.z, "head"),
        **skip_arguments(call),
    }
    slices = triton.cdiv(problem.headdim, call.plan.slice)
    for forward, reverse in _launches(call):
        scan[(call.plan.units * slices * problem.nheads,)](
            **call.tiles,
            **call.discretisation,
            **tensors,
            **given,
            y=outputs.y,
            pre_gate=outputs.y if outputs.pre_gate is None else outputs.pre_gate,
            FORWARD=forward,
            REVERSE=reverse,
            FIRST=reverse and not forward and len(problem.directions) == 2,
            SECOND=forward and not reverse and len(problem.directions) == 2,
            FUSED=call.plan.fused,
            MOVES=call.plan.moves,
            PREPARED=call.plan.prepares,
            SKIP=problem.D or "",
            GATE=problem.has_z,
            SAVE=outputs.pre_gate is not None,
            EXACT=call.exact,
            ALIGNED=aligned(tensors, "x", "z"),
            ALIGNED_KEYS=aligned(given, "B", "C", "B_rev", "C_rev"),
            **call.options("scan"),
        )
    return outputs


def _launches(call: Call) -> list[tuple[bool, bool]]:
    """Which directions go together, (forward, reverse), in order.

    In one launch where launches are what costs; apart, each has the registers to itself.
    """
    if len(call.problem.directions) == 2:
        return [(True, True)] if call.plan.together else [(False, True), (True, False)]
    reverse = call.problem.directions[0].reverse
    return [(not reverse, reverse)]


def skip_arguments(call: Call) -> dict[str, Any]:
    """D, with strides where it is one per token."""
    D = call.inputs.D
    if call.problem.D == "token":
        return strided("D", D, "head")
    return strided("D", None, "head") | {"D": None if D is None else D.contiguous()}


def _direction(
    call: Call, direction: Direction, suffix: str, entering: Tensor | None, leaving: Tensor | None
) -> dict[str, Any]:
    given = direction.parameters(call.inputs)
    dt = sums = given.dt  # the kernel works them out itself
    if call.plan.prepares:
        dt, sums = call.steps(direction)
    return {
        **strided("dt" + suffix, dt, "head"),
        **strided("B" + suffix, given.B, "group"),
        **strided("C" + suffix, given.C, "group"),
        "sums" + suffix: sums,
        "A" + suffix: given.A,
        "dt_bias" + suffix: given.dt_bias,
        "entering" + suffix: entering,
        "leaving" + suffix: leaving,
        "BIAS" + suffix.upper(): given.dt_bias is not None,
        "ENTERS" + suffix.upper(): entering is not None,
        "LEAVES" + suffix.upper(): leaving is not None,
    }
