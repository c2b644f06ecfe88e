"""The backward: a function of the inputs, of dy and of the final states' gradients.

For a slab of units at a time, states and adjoints walk through the units once more and are kept for
each tile; then every tile gives its gradients. A slab is as large as the memory for them allows.
Directions with the same parameters and no shift go together, others one after the other.
"""

import torch
import triton
from torch import Tensor

from polyscan.problem import Direction, SSDInputs, SSDOutputs, SSDProblem

from .call import Call, strided
from .kernels.gate import gate_gradients
from .passage import Carried, Passage
from .passes import KeyPass, TokenPass
from .plan import padded


def backward(
    problem: SSDProblem, inputs: SSDInputs, pre_gate: Tensor | None, grads: SSDOutputs
) -> dict[str, Tensor]:
    return Backward(problem, inputs, pre_gate, grads).run()


class Backward:
    """One backward. ``totals`` are the gradients by argument name, as they come together."""

    def __init__(
        self, problem: SSDProblem, inputs: SSDInputs, pre_gate: Tensor | None, grads: SSDOutputs
    ) -> None:
        self.problem = problem
        self.given = inputs
        self.call = Call(problem, inputs, backward=True)
        self.grads = grads
        self.totals: dict[str, Tensor] = {}
        self.dy = grads.y if grads.y.stride(-1) == 1 else grads.y.contiguous()
        if pre_gate is not None:
            self._through_gate(pre_gate)
        self.totals["x"] = self.call.inputs.x.new_empty(inputs.x.shape)

    def run(self) -> dict[str, Tensor]:
        directions = self.problem.directions
        passes = [directions] if self.call.plan.fused else [(d,) for d in directions]
        for index, together in enumerate(passes):
            self._directions(together, first=index == 0)
        return {
            name: self._result(name, argument)
            for name, argument in zip(self.given._fields, self.given, strict=True)
            if argument is not None and argument.is_floating_point()
        }

    def add(self, name: str, value: Tensor) -> None:
        """Add to a gradient; the first value becomes it."""
        if name in self.totals:
            self.totals[name] += value
        else:
            self.totals[name] = value

    def target(self, name: str, parts: int = 1) -> Tensor:
        """What kernels write the gradient of an argument to, (parts, *shape), or add to.

        In the argument's dtype where it is written once.
        """
        if name not in self.totals:
            argument = getattr(self.given, name)
            once = parts == 1 and self.readers(name) == 1
            dtype = argument.dtype if once else torch.float32
            self.totals[name] = argument.new_empty((parts, *argument.shape), dtype=dtype)
        return self.totals[name]

    def readers(self, name: str) -> int:
        """How many passes read the argument."""
        if self.call.plan.fused:
            return 1
        return sum(name in direction for direction in self.problem.directions)

    def _result(self, name: str, argument: Tensor) -> Tensor:
        total = self.totals[name]
        if total.dim() > argument.dim():
            total = total.sum(0) if len(total) > 1 else total[0]
        return total.to(argument.dtype)

    def _through_gate(self, pre_gate: Tensor) -> None:
        """dy before the gate, and dz."""
        problem, z = self.problem, self.call.inputs.z
        assert z is not None
        before = pre_gate.new_empty(pre_gate.shape, dtype=problem.product_dtype)
        dz = z.new_empty(z.shape)
        tokens = problem.batch * problem.seqlen
        width = padded(problem.headdim)
        rows = max(1, 2048 // width)
        gate_gradients[(triton.cdiv(tokens * problem.nheads, rows),)](
            **strided("dy", self.dy, "head"),
            **strided("z", z, "head"),
            pre_gate=pre_gate,
            before=before,
            dz=dz,
            cu_seqlens=self.call.inputs.cu_seqlens,
            nsequences=self.call.nsequences,
            tokens=tokens,
            seqlen=problem.seqlen,
            nheads=problem.nheads,
            TABLE=self.call.table is not None,
            HEADDIM=problem.headdim,
            ROWS=rows,
            P=width,
        )
        self.dy, self.totals["z"] = before, dz

    def _directions(self, together: tuple[Direction, ...], first: bool) -> None:
        """Add the gradients of one direction, or of two with the same parameters."""
        call, plan = self.call, self.call.plan
        carried = [self._state(d) for d in together] + [self._adjoint(d) for d in together]
        passage = Passage(call, carried, self.dy)
        slab = plan.slab if passage.moves else plan.units
        kept = None
        if passage.moves:
            kept = call.states(len(carried), slab * plan.tiles_per_unit, dtype=call.product)
        leaving = None
        if plan.units_are_sequences and any(one.final is not None for one in carried):
            leaving = call.states(len(carried), plan.units)
        token_pass = TokenPass(self, together, kept, first)
        key_pass = KeyPass(self, together, kept, first)
        for start in range(0, plan.units, slab):
            units = range(start, min(start + slab, plan.units))
            if passage.moves or leaving is not None:
                passage.launch(units, kept=kept, leaving=leaving)
            token_pass.launch(units)
            key_pass.launch(units)
        token_pass.finish()
        for index, one in enumerate(carried):
            if leaving is not None and one.final is not None:
                one.final.copy_(leaving[index])

    def _state(self, direction: Direction) -> Carried:
        initial = direction.parameters(self.call.inputs).initial_states
        return Carried(direction, False, initial, None)

    def _adjoint(self, direction: Direction) -> Carried:
        """What leaves a sequence is the initial state's gradient."""
        initial = direction.parameters(self.call.inputs).initial_states
        leaves = None
        if initial is not None:
            leaves = initial.new_empty(initial.shape, dtype=torch.float32)
            self.totals[direction.initial_states] = leaves
        return Carried(direction, True, getattr(self.grads, direction.final_states), leaves)
