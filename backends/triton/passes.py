"""The two launches that gradients come from, for one direction or two together."""

from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor

from polyscan.problem import Direction

from .call import Call, aligned, strided
from .forward import skip_arguments
from .kernels.key_gradients import key_gradients
from .kernels.steps import discretise_gradients
from .kernels.token_gradients import PARTIALS, token_gradients

if TYPE_CHECKING:
    from .backward import Backward

# Programs per multiprocessor that gradients of keys want, and what their shares may take, of x.
KEY_PROGRAMS = 4
KEY_SHARE = 1 / 2


class TokenPass:
    """The launches of :mod:`token_gradients` for one direction, or two together."""

    def __init__(
        self, owner: "Backward", together: tuple[Direction, ...], kept: Tensor | None, first: bool
    ) -> None:
        call, problem, direction = owner.call, owner.problem, together[0]
        self.owner, self.direction, self.first = owner, direction, first
        x, fused = call.inputs.x, len(together) == 2
        self.skip = problem.D if first and problem.D is not None else ""
        self.tiles = call.plan.units * call.plan.tiles_per_unit

        def new(*shape: int) -> Tensor:
            return x.new_empty((self.tiles, *shape), dtype=torch.float32)

        self.ddt = new(problem.nheads, call.plan.tile)
        self.partials = new(PARTIALS.value, problem.nheads)
        self.channel_partials = self.partials
        if self.skip == "channel":
            self.channel_partials = new(problem.nheads, problem.headdim)
        given = direction.parameters(call.inputs)
        tensors = {
            **strided("x", x, "head"),
            **strided("dy", owner.dy, "head"),
            **strided("B", given.B, "group"),
            **strided("C", given.C, "group"),
        }
        states = states_rev = adjoints = adjoints_rev = None
        if kept is not None:
            states, states_rev = kept[0], kept[len(together) - 1]
            adjoints, adjoints_rev = kept[len(together)], kept[-1]
        self.arguments: dict[str, Any] = {
            **call.tiles,
            **tensors,
            **skip_arguments(call),
            "A": given.A,
            "steps": call.steps(direction).steps,
            "sums": call.steps(direction).sums,
            "sums_rev": call.steps(together[-1]).sums,
            "states": states,
            "adjoints": adjoints,
            "states_rev": states_rev,
            "adjoints_rev": adjoints_rev,
            "dx": owner.totals["x"],
            "ddt": self.ddt,
            "dD": owner.target("D") if self.skip == "token" else self.partials,
            "partials": self.partials,
            "channel_partials": self.channel_partials,
            "REVERSE": direction.reverse,
            "FUSED": fused,
            "ADD": not first,
            "MOVES": kept is not None,
            "SKIP": self.skip,
            "EXACT": call.exact,
            "ALIGNED": aligned(tensors, "x", "dy"),
            "ALIGNED_KEYS": aligned(tensors, "B", "C"),
            **call.options("token_gradients"),
        }

    def launch(self, units: range) -> None:
        programs = len(units) * self.owner.call.plan.tiles_per_unit * self.owner.problem.nheads
        token_gradients[(programs,)](**self.arguments, unit_offset=units.start)

    def finish(self) -> None:
        """Add the tiles' sums up, and go back to dt and its bias."""
        owner, direction = self.owner, self.direction
        of_A, of_D = self.partials.sum(0)
        owner.add(direction.A, of_A)
        if self.skip == "head":
            owner.add("D", of_D)
        elif self.skip == "channel":
            owner.add("D", self.channel_partials.sum(0))
        call = owner.call
        given = direction.parameters(call.inputs)
        bias_partials = self.partials.new_empty((self.tiles, owner.problem.nheads))
        add = direction.dt in owner.totals
        discretise_gradients[(self.tiles,)](
            **call.units,
            **call.discretisation,
            **strided("dt", given.dt, "head"),
            dt_bias=given.dt_bias,
            given=self.ddt,
            ddt=owner.target(direction.dt),
            bias_sums=bias_partials,
            BIAS=given.dt_bias is not None,
            ADD=add,
            HEADS=min(16, triton.next_power_of_2(owner.problem.nheads)),
            num_warps=4,
        )
        if given.dt_bias is not None:
            owner.add(direction.dt_bias, bias_partials.sum(0))


class KeyPass:
    """The launches of :mod:`key_gradients` for one direction, or two together."""

    def __init__(
        self, owner: "Backward", together: tuple[Direction, ...], kept: Tensor | None, first: bool
    ) -> None:
        call, direction = owner.call, together[0]
        self.owner = owner
        given = direction.parameters(call.inputs)
        self.parts, heads_per_part = self._parts(call)
        dB, dC = owner.target(direction.B, self.parts), owner.target(direction.C, self.parts)
        states = states_rev = adjoints = adjoints_rev = None
        if kept is not None:
            states, states_rev = kept[0], kept[len(together) - 1]
            adjoints, adjoints_rev = kept[len(together)], kept[-1]
        tensors = {
            **strided("x", call.inputs.x, "head"),
            **strided("dy", owner.dy, "head"),
            **strided("B", given.B, "group"),
            **strided("C", given.C, "group"),
        }
        self.arguments: dict[str, Any] = {
            **call.tiles,
            **tensors,
            "sums": call.steps(direction).sums,
            "steps": call.steps(direction).steps,
            "sums_rev": call.steps(together[-1]).sums,
            "states": states,
            "states_rev": states_rev,
            "adjoints": adjoints,
            "adjoints_rev": adjoints_rev,
            "dB": dB,
            "dC": dC,
            "heads_per_part": heads_per_part,
            "part_stride": dB.stride(0),
            "REVERSE": direction.reverse,
            "FUSED": len(together) == 2,
            "ADD_B": not first and owner.readers(direction.B) > 1,
            "ADD_C": not first and owner.readers(direction.C) > 1,
            "MOVES": kept is not None,
            "EXACT": call.exact,
            "ALIGNED": aligned(tensors, "x", "dy"),
            "ALIGNED_KEYS": aligned(tensors, "B", "C"),
            **call.options("key_gradients"),
        }

    def launch(self, units: range) -> None:
        plan, problem = self.owner.call.plan, self.owner.problem
        programs = 2 * len(units) * plan.tiles_per_unit * problem.ngroups * self.parts
        key_gradients[(programs,)](**self.arguments, unit_offset=units.start)

    def _parts(self, call: Call) -> tuple[int, int]:
        """Into how many parts a group's heads go, and how many heads a part has."""
        problem, plan = call.problem, call.plan
        programs = 2 * plan.slab * plan.tiles_per_unit * problem.ngroups
        wanted = KEY_PROGRAMS * call.machine.multiprocessors // programs
        x = problem.nheads * problem.headdim * problem.x_dtype.itemsize
        share = 2 * problem.ngroups * problem.d_state * torch.float32.itemsize
        parts = max(1, min(wanted, int(KEY_SHARE * x / share), problem.heads_per_group))
        heads = -(-problem.heads_per_group // parts)
        return -(-problem.heads_per_group // heads), heads
