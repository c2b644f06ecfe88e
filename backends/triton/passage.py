"""States and adjoints across units: the summary of a unit, then along each sequence."""

from typing import NamedTuple

import triton
from torch import Tensor

from polyscan.problem import Direction

from .call import Call, aligned, strided
from .kernels.passing import pass_states
from .kernels.sweep import sweep

# Cells of a state that one program passes on.
CELLS = 1024


class Carried(NamedTuple):
    """A state, or an adjoint, on its way through the sequences.

    ``initial`` (sequences, nheads, headdim, d_state) enters them; ``final``, where given, receives
    what leaves them.
    """

    direction: Direction
    adjoint: bool
    initial: Tensor | None
    final: Tensor | None


class Passage:
    """Some states, and perhaps as many adjoints after them, that travel together.

    ``entering`` (carried, units, nheads, headdim, d_state) has what enters each unit, or is None
    where all of it is zero. ``dy`` is what adjoints take in.
    """

    def __init__(self, call: Call, carried: list[Carried], dy: Tensor | None = None) -> None:
        self.call = call
        self.carried = carried
        self.dy = dy
        self.entering = self._enter()

    @property
    def moves(self) -> bool:
        """Whether anything but zero may enter a tile."""
        return self.call.plan.moves or self.entering is not None

    def launch(
        self,
        units: range,
        *,
        kept: Tensor | None = None,
        leaving: Tensor | None = None,
        factors: Tensor | None = None,
    ) -> None:
        """Carry all through some of the units. See the kernel."""
        call, problem = self.call, self.call.problem
        directions = [one.direction for one in self.carried if not one.adjoint]
        first, last = (d.parameters(call.inputs) for d in (directions[0], directions[-1]))
        values = {
            **strided("x", call.inputs.x, "head"),
            **strided("dy", call.inputs.x if self.dy is None else self.dy, "head"),
        }
        keys = {
            **strided("B", first.B, "group"),
            **strided("C", first.C, "group"),
            **strided("B_rev", last.B, "group"),
            **strided("C_rev", last.C, "group"),
        }
        steps, steps_rev = call.steps(directions[0]), call.steps(directions[-1])
        state = problem.nheads * problem.headdim * problem.d_state
        slices = triton.cdiv(problem.headdim, call.plan.slice)
        sweep[(len(units) * len(self.carried) * slices * problem.nheads,)](
            **call.tiles,
            **values,
            **keys,
            steps=steps.steps,
            sums=steps.sums,
            steps_rev=steps_rev.steps,
            sums_rev=steps_rev.sums,
            entering=self.entering,
            kept=call.inputs.x if kept is None else kept,
            leaving=leaving,
            factors=factors,
            unit_offset=units.start,
            carried_stride=call.plan.units * state,
            kept_stride=0 if kept is None else kept.stride(0),
            DIRECTIONS=len(directions),
            REVERSE=directions[0].reverse,
            ADJOINTS=self.carried[-1].adjoint,
            ENTERS=self.entering is not None,
            KEEPS=kept is not None,
            LEAVES=leaving is not None,
            FACTORS=factors is not None,
            ALIGNED=aligned(values, "x", "dy"),
            ALIGNED_KEYS=aligned(keys, "B", "C", "B_rev", "C_rev"),
            **call.options("sweep"),
        )

    def _enter(self) -> Tensor | None:
        call, plan = self.call, self.call.plan
        initial = any(one.initial is not None for one in self.carried)
        final = any(one.final is not None for one in self.carried)
        if not plan.linked and not initial and (plan.units_are_sequences or not final):
            return None
        entering = call.states(len(self.carried), plan.units)
        if plan.units_are_sequences:
            for one, states in zip(self.carried, entering, strict=True):
                states.zero_() if one.initial is None else states.copy_(one.initial)
            return entering
        self.entering = None
        factors = entering.new_empty(entering.shape[:3])
        self.launch(range(plan.units), leaving=entering, factors=factors)
        for one, states, left in zip(self.carried, entering, factors, strict=True):
            self._pass(one, states, left)
        return entering

    def _pass(self, one: Carried, states: Tensor, factors: Tensor) -> None:
        """From what leaves each unit alone to what enters it, in place."""
        call, problem = self.call, self.call.problem
        cells = problem.headdim * problem.d_state
        blocks = triton.cdiv(cells, CELLS)
        pass_states[(blocks * problem.nheads * call.nsequences,)](
            states,
            factors,
            call.first_unit,
            None if one.initial is None else one.initial.contiguous(),
            one.final,
            problem.nheads,
            call.plan.units_per_row,
            TABLE=call.table is not None,
            BACKWARDS=one.direction.reverse != one.adjoint,
            INITIAL=one.initial is not None,
            FINAL=one.final is not None,
            CELLS=cells,
            BLOCK=CELLS,
            num_warps=4,
        )
