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

from .._shared.elementwise import skip_gradient, skip_term
from .._shared.gradients import GradientSums
from .states import Passage, pass_all, per_head
from .tiles import OutputGradient, Tiles, add_product


def backward(
    problem: SSDProblem, inputs: SSDInputs, pre_gate: Tensor | None, grads: SSDOutputs
) -> dict[str, Tensor]:
    tiles = Tiles(problem, inputs, grads.y)
    output_gradient = OutputGradient(tiles, pre_gate, grads.y)
    sums = GradientSums(inputs, tiles.dtype)
    scans = [_DirectionBackward(tiles, direction, grads, sums) for direction in problem.directions]
    pass_all(
        tiles,
        [scan.states for scan in scans],
        [scan.adjoints for scan in scans],
        output_gradient,
    )
    # Not every token need be in a sequence.
    allocate = torch.zeros_like if problem.packing == "cu_seqlens" else torch.empty_like
    dx = allocate(inputs.x, memory_format=torch.contiguous_format)
    dz = None if inputs.z is None else allocate(inputs.z, memory_format=torch.contiguous_format)
    for block in tiles.blocks():
        dy, dz_block = output_gradient.read(block)
        if dz is not None and dz_block is not None:
            tiles.chunks.put(dz.flatten(0, 1), block, dz_block)
        dx_block = _scan_backward(tiles, scans, block, tiles.heads_first("dy", dy))
        if inputs.D is not None and problem.D is not None:
            dx_block += _skip_backward(tiles, sums["D"], block, dy)
        tiles.chunks.put(dx.flatten(0, 1), block, dx_block)
    for scan in scans:
        scan.finish()
    return sums.result(x=dx) if dz is None else sums.result(x=dx, z=dz)


def _scan_backward(
    tiles: Tiles, scans: list["_DirectionBackward"], block: slice, dy: Tensor
) -> Tensor:
    """Add to the sums what a block gives; returns its dx, (chunks, size, nheads, headdim)."""
    x = tiles.x(block)
    dx = tiles.wide("dx", block, tiles.problem.headdim).zero_()
    dmatrix = torch.matmul(dy, x.mT, out=tiles.square("dmatrix", block))
    matrix: Tensor | None = None
    for scan in scans:
        part = scan.add(block, x, dy, dmatrix, dx)
        matrix = part if matrix is None else matrix.add_(part)
    assert matrix is not None
    return add_product(dx, matrix.mT, dy).transpose(1, 2)


def _skip_backward(tiles: Tiles, dD: Tensor, block: slice, dy: Tensor) -> Tensor:
    """Add to D's gradient; returns what D gives to dx."""
    kind = tiles.problem.D
    assert kind is not None and tiles.inputs.D is not None
    D = tiles.inputs.D.to(tiles.dtype)
    gradient = skip_gradient(dy, tiles.read(tiles.rows["x"], block), kind)
    if kind == "token":
        D = tiles.read(tiles.rows["D"], block)
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
        grads: SSDOutputs,
        sums: GradientSums,
    ) -> None:
        self.tiles = tiles
        self.direction = direction
        self.sums = sums
        self.given = direction.parameters(tiles.inputs)
        initial, final = self.given.initial_states, getattr(grads, direction.final_states)
        self.states = Passage(tiles, direction.reverse, initial, wants_leaving=False)
        self.adjoints = Passage(
            tiles, not direction.reverse, final, wants_leaving=initial is not None
        )
        self.ddt = self.given.dt.new_zeros(self.given.dt.shape, dtype=tiles.dtype)
        size = tiles.chunks.size
        square = tiles.inputs.x.new_ones(size, size, dtype=tiles.dtype)
        # [j, k]: whether token k comes after column j along the direction, and so decays it.
        self.beyond = square.tril(-1) if direction.reverse else square.triu(1)
        # [i, k]: whether row i's source is at token k or after it.
        self.seen = tiles.hide(direction, square)

    def add(self, block: slice, x: Tensor, dy: Tensor, dmatrix: Tensor, dx: Tensor) -> Tensor:
        """Add a block's gradients, to dx what comes through the states; returns the matrix M."""
        tiles, dtype = self.tiles, self.tiles.dtype
        d_state = tiles.problem.d_state
        side = tiles.side(self.direction, block)
        out = tiles.square("part" if self.direction.reverse else "matrix", block)
        weights = tiles.weights(self.direction, side, block, out)
        CB = tiles.scores(self.direction, side, block)

        dCB = torch.mul(dmatrix, weights, out=tiles.square("dCB", block))
        pairs = self._times(dCB, CB, tiles.square("pairs", block))
        ddt = pairs.sum(-2)
        dlog_decay = self._between(pairs.mul_(side.dt[:, :, None, :]), block)
        dCB = self._sum_heads(dCB.mul_(side.dt[:, :, None, :]))
        dC, dB = dCB @ side.B, dCB.mT @ side.C

        if self.states.entering is not None:
            states = self.states.entering[block]
            through = torch.matmul(dy, states, out=tiles.wide("through", block, d_state))
            through.mul_(side.decay.enter[..., None])
            dC += self._sum_heads(through)
            dlog_decay += self._times(through, side.C, through).sum(-1) @ self.seen
        if self.adjoints.entering is not None:
            adjoints = self.adjoints.entering[block]
            leave = side.decay.leave
            through = torch.matmul(x, adjoints, out=tiles.wide("through", block, d_state))
            through.mul_(leave[..., None])
            keys = tiles.wide("keys", block, d_state)
            cols = self._times(through, side.B, keys).sum(-1)
            ddt += cols
            dlog_decay += (cols * side.dt) @ self.beyond
            dB += self._sum_heads(through.mul_(side.dt[..., None]))
            add_product(dx, per_head(side.B, leave * side.dt, keys), adjoints.mT)
        if self.states.entering is not None and self.adjoints.entering is not None:
            both = tiles.scratch("crossing", *self.states.entering[block].shape)
            torch.mul(self.states.entering[block], self.adjoints.entering[block], out=both)
            dlog_decay += both.sum((-2, -1))[..., None] * side.decay.across

        ddt += dlog_decay * self.given.A.to(dtype)[:, None]
        self.sums[self.direction.A].add_((dlog_decay * side.dt).sum((0, 2)))
        tiles.chunks.put(self.ddt.flatten(0, 1), block, ddt.transpose(1, 2))
        self._add(self.direction.B, block, dB)
        self._add(self.direction.C, block, dC, tiles.source_offset(self.direction))
        return self._times(weights, CB, weights).mul_(side.dt[:, :, None, :])

    def finish(self) -> None:
        """The gradients of the initial states, and of dt before clamp, softplus and bias."""
        adjoints = self.adjoints
        if adjoints.leaving is not None:
            total = self.sums[self.direction.initial_states]
            if adjoints.initial is not None:
                total.copy_(adjoints.initial)  # an empty sequence hands it through
            total[self.tiles.chunks.run_state] = adjoints.leaving
        self.sums.add_step_sizes(self.tiles.problem, self.direction, self.ddt)

    def _between(self, pairs: Tensor, block: slice) -> Tensor:
        """For every k the sum of pairs[i, j] over the rows and columns that k lies between."""
        before = torch.matmul(pairs, self.beyond, out=self.tiles.square("between", block))
        return before.mul_(self.seen).sum(-2)

    def _times(self, per_head: Tensor, per_group: Tensor, out: Tensor) -> Tensor:
        """(chunks, nheads, ...) times (chunks, ngroups, ...)."""
        groups = (per_group.shape[1], -1)
        torch.mul(
            per_head.unflatten(1, groups), per_group[:, :, None], out=out.unflatten(1, groups)
        )
        return out

    def _sum_heads(self, per_head: Tensor) -> Tensor:
        """(chunks, nheads, ...) -> (chunks, ngroups, ...)."""
        return torch.sum(per_head.unflatten(1, (self.tiles.problem.ngroups, -1)), 2)

    def _add(self, name: str, block: slice, values: Tensor, offset: int = 0) -> None:
        self.tiles.chunks.add(self.sums[name].flatten(0, 1), block, values.transpose(1, 2), offset)
