"""The forward: states pass between the chunks, then every chunk is one matrix product.

Both directions of a chunk are one matrix, for whichever parameters and with or without the shift::

    y = (sum over directions of (C Bᵀ) * weights * dt) x + sum over directions of enter * (C stateᵀ)
"""

from torch import Tensor
from torch.nn import functional as F

from polyscan.problem import SSDInputs, SSDOutputs, SSDProblem

from .._shared.elementwise import skip_term
from .states import Passage, pass_all, per_head
from .tiles import Tiles, add_product


def forward(problem: SSDProblem, inputs: SSDInputs) -> SSDOutputs:
    tiles = Tiles(problem, inputs)
    outputs = problem.allocate_outputs(inputs)
    if problem.packing == "cu_seqlens":
        for rows in (outputs.y, outputs.pre_gate):
            if rows is not None:
                rows.zero_()  # not every token need be in a sequence
    finals = [getattr(outputs, direction.final_states) for direction in problem.directions]
    passages = [
        Passage(
            tiles,
            direction.reverse,
            direction.parameters(inputs).initial_states,
            wants_leaving=final is not None,
        )
        for direction, final in zip(problem.directions, finals, strict=True)
    ]
    pass_all(tiles, passages)
    for states, final in zip(passages, finals, strict=True):
        if final is not None and states.leaving is not None:
            # An empty sequence leaves its initial state.
            final.zero_() if states.initial is None else final.copy_(states.initial)
            final[tiles.chunks.run_state] = states.leaving.to(final.dtype)

    for block in tiles.blocks():
        y = _scan(tiles, passages, block).transpose(1, 2)
        if inputs.D is not None and problem.D is not None:
            D = inputs.D.to(tiles.dtype)
            if problem.D == "token":
                D = tiles.read(tiles.rows["D"], block)
            y = y + skip_term(D, tiles.read(tiles.rows["x"], block), problem.D)
        if inputs.z is not None:
            if outputs.pre_gate is not None:
                tiles.chunks.put(outputs.pre_gate.flatten(0, 1), block, y)
            y = y * F.silu(tiles.read(tiles.rows["z"], block))
        tiles.chunks.put(outputs.y.flatten(0, 1), block, y)
    return outputs


def _scan(tiles: Tiles, passages: list[Passage], block: slice) -> Tensor:
    """The sum of the directions: (chunks, nheads, size, headdim)."""
    x = tiles.x(block)
    y = tiles.wide("y", block, tiles.problem.headdim).zero_()
    matrix: Tensor | None = None
    for direction, states in zip(tiles.problem.directions, passages, strict=True):
        side = tiles.side(direction, block)
        out = tiles.square("part" if direction.reverse else "matrix", block)
        part = tiles.weights(direction, side, block, out)
        CB = tiles.scores(direction, side, block)
        part.unflatten(1, (tiles.problem.ngroups, -1)).mul_(CB[:, :, None])
        part.mul_(side.dt[:, :, None, :])
        matrix = part if matrix is None else matrix.add_(part)
        if states.entering is not None:
            C = tiles.wide("keys", block, tiles.problem.d_state)
            add_product(y, per_head(side.C, side.decay.enter, C), states.entering[block].mT)
    assert matrix is not None
    return add_product(y, matrix, x)
