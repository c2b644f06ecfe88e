"""The backward: a function of the inputs, of dy and of the final states' gradients.

States and adjoints are passed between the chunks again, then each block of chunks gives all its
gradients. With ``dM = dy xᵀ`` shared by both directions, and S the gradient of an exponent::

    dCB = dM * weights * dt       dC = dCB B + enter * (dy state)        summed over a group's heads
    S   = dCB * CB                dB = dCBᵀ C + leave * dt * (x adjoint)
    dx  = Mᵀ dy + leave * dt * (B adjointᵀ)
    ddt = column sums of dM * weights * CB + leave * (x adjoint · B) + A dlog_decay

The gradient of ``log_decay_k`` is the sum of S over all rows that see k and columns beyond which k
lies, plus the like for entering state, leaving state, and the state that crosses the whole chunk.
Written as sums over those pairs only, never as a difference of larger sums: the shorter formula
``dC·C - dB·B`` cancels, and loses all digits in long sequences.
"""

import torch
from torch import Tensor

from polyscan.problem import Direction, SSDInputs, SSDOutputs, SSDProblem

from .._shared.elementwise import discretise_backward, skip_gradient, skip_term
from .._shared.gradients import GradientSums
from .states import pass_adjoints, pass_states, per_head
from .tiles import Tiles


def backward(
    problem: SSDProblem, inputs: SSDInputs, pre_gate: Tensor | None, grads: SSDOutputs
) -> dict[str, Tensor]:
    tiles = Tiles(problem, inputs)
    sums = GradientSums(inputs, tiles.dtype)
    scans = [
        _DirectionBackward(tiles, direction, pre_gate, grads, sums)
        for direction in problem.directions
    ]
    # Not every token need be in a sequence.
    allocate = torch.zeros_like if problem.packing == "cu_seqlens" else torch.empty_like
    dx = allocate(inputs.x, memory_format=torch.contiguous_format)
    dz = None if inputs.z is None else allocate(inputs.z, memory_format=torch.contiguous_format)
    for block in tiles.blocks():
        dy, dz_block = tiles.output_gradient(pre_gate, grads, block)
        if dz is not None and dz_block is not None:
            tiles.chunks.put(dz.flatten(0, 1), block, dz_block)
        dx_block = _scan_backward(tiles, scans, block, dy.transpose(1, 2).contiguous())
        if inputs.D is not None and problem.D is not None:
            dx_block += _skip_backward(tiles, sums["D"], block, dy)
        tiles.chunks.put(dx.flatten(0, 1), block, dx_block)
    for scan in scans:
        scan.finish()
    gradients = {**sums.result(), "x": dx}
    return gradients if dz is None else {**gradients, "z": dz}


def _scan_backward(
    tiles: Tiles, scans: list["_DirectionBackward"], block: slice, dy: Tensor
) -> Tensor:
    """Add to the sums what a block gives; returns its dx, (chunks, size, nheads, headdim)."""
    x = tiles.heads_first(tiles.inputs.x, block)
    dmatrix = dy @ x.mT
    matrix: Tensor | None = None
    dx = torch.zeros_like(x)
    for scan in scans:
        part = scan.add(block, x, dy, dmatrix, dx)
        matrix = part if matrix is None else matrix.add_(part)
    assert matrix is not None
    dx += matrix.mT @ dy
    return dx.transpose(1, 2)


def _skip_backward(tiles: Tiles, dD: Tensor, block: slice, dy: Tensor) -> Tensor:
    """Add to D's gradient; returns what D gives to dx."""
    kind = tiles.problem.D
    assert kind is not None and tiles.inputs.D is not None
    D = tiles.inputs.D.to(tiles.dtype)
    gradient = skip_gradient(dy, tiles.read(tiles.inputs.x, block), kind)
    if kind == "token":
        D = tiles.read(D, block)
        tiles.chunks.put(dD.flatten(0, 1), block, gradient)
    else:
        dD += gradient
    return skip_term(D, dy, kind)


class _DirectionBackward:
    """One direction: what enters its chunks from both ends, and the sums it adds to."""

    def __init__(
        self,
        tiles: Tiles,
        direction: Direction,
        pre_gate: Tensor | None,
        grads: SSDOutputs,
        sums: GradientSums,
    ) -> None:
        self.tiles = tiles
        self.direction = direction
        self.sums = sums
        self.given = direction.parameters(tiles.inputs)
        initial = self.given.initial_states
        self.states, _ = pass_states(tiles, direction, initial, wants_leaving=False)
        self.adjoints, dinitial = pass_adjoints(
            tiles, direction, pre_gate, grads, wants_leaving=initial is not None
        )
        if dinitial is not None:
            total = sums[direction.initial_states]
            dfinal = getattr(grads, direction.final_states)
            if dfinal is not None:
                total.copy_(dfinal)  # of an empty sequence, it is the initial state's gradient
            total[tiles.chunks.run_state] = dinitial
        self.ddt = torch.zeros_like(tiles.step_sizes(direction), dtype=tiles.dtype)
        self.sees = tiles.sees(direction).to(tiles.dtype)
        self.beyond = tiles.beyond(direction).to(tiles.dtype)

    def add(self, block: slice, x: Tensor, dy: Tensor, dmatrix: Tensor, dx: Tensor) -> Tensor:
        """Add a block's gradients, to dx what comes through the states; returns the matrix M."""
        tiles, dtype = self.tiles, self.tiles.dtype
        side = tiles.side(self.direction, block)
        weights = tiles.weights(self.direction, side, block)
        CB = (side.C @ side.B.mT)[:, :, None]
        per_group = (side.B.shape[1], -1)

        dCB = dmatrix * weights
        dM_M = (dCB.unflatten(1, per_group) * CB).flatten(1, 2)
        ddt = dM_M.sum(-2)
        dlog_decay = self._between(dM_M.mul_(side.dt[:, :, None, :]))
        dCB = dCB.mul_(side.dt[:, :, None, :]).unflatten(1, per_group).sum(2)
        dC, dB = dCB @ side.B, dCB.mT @ side.C

        if self.states is not None:
            states = self.states[block]
            through = (dy @ states) * side.decay.enter(dtype)[..., None]
            dC += through.unflatten(1, per_group).sum(2)
            rows = (through.unflatten(1, per_group) * side.C[:, :, None]).flatten(1, 2).sum(-1)
            dlog_decay += rows @ self.sees
        if self.adjoints is not None:
            adjoints = self.adjoints[block]
            leave = side.decay.leave(dtype)
            through = (x @ adjoints) * leave[..., None]
            cols = (through.unflatten(1, per_group) * side.B[:, :, None]).flatten(1, 2).sum(-1)
            ddt += cols
            dlog_decay += (cols * side.dt) @ self.beyond
            dB += (through * side.dt[..., None]).unflatten(1, per_group).sum(2)
            dx += per_head(side.B, leave * side.dt) @ adjoints.mT
        if self.states is not None and self.adjoints is not None:
            crossing = (self.states[block] * self.adjoints[block]).sum((-2, -1))
            dlog_decay += crossing[..., None] * side.decay.across(dtype)

        ddt += dlog_decay * self.given.A.to(dtype)[:, None]
        self.sums[self.direction.A].add_((dlog_decay * side.dt).sum((0, 2)))
        tiles.chunks.put(self.ddt.flatten(0, 1), block, ddt.transpose(1, 2))
        self._add(self.direction.B, block, dB)
        self._add(self.direction.C, block, dC, tiles.source_offset(self.direction))
        weights.unflatten(1, per_group).mul_(CB)
        return weights.mul_(side.dt[:, :, None, :])

    def finish(self) -> None:
        """Take the gradient of dt back through clamp, softplus and bias."""
        problem, given = self.tiles.problem, self.given
        ddt = discretise_backward(
            self.ddt, given.dt, given.dt_bias, problem.dt_softplus, problem.dt_limit
        )
        self.sums[self.direction.dt].add_(ddt)
        if given.dt_bias is not None:
            self.sums[self.direction.dt_bias].add_(ddt.sum((0, 1)))

    def _between(self, pairs: Tensor) -> Tensor:
        """For every k the sum of pairs[i, j] over the rows and columns that k lies between."""
        return ((pairs @ self.beyond) * self.sees).sum(-2)

    def _add(self, name: str, block: slice, values: Tensor, offset: int = 0) -> None:
        self.tiles.chunks.add(self.sums[name].flatten(0, 1), block, values.transpose(1, 2), offset)
