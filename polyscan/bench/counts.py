"""The least that a program must move and compute, by formula: what a time is judged against.

Bytes: every argument is read once and every result written once. A backward reads the forward's
arguments again, and y's gradient, and writes a gradient for each argument. Nothing in between
touches memory.

FLOP (2 for a multiplication with an addition) and exps: those of a scan in tiles of Q tokens, with
the state carried from tile to tile and no product computed twice. Per token, head and direction,
with P = headdim and N = d_state:

========  ===================  ==============================================================
          forward              backward
========  ===================  ==============================================================
states    2PN made, 2PN read   2PN made again, 2PN for their gradients; 2PN each to make the
                               gradients of x, B and C from the two
scores    QN, half a square    QN made again; 2QN per group, not head, for what they give to
                               the gradients of B and C
values    QP                   QP for the gradient of x, QP for that of the scores
exps      (Q - 1) / 2 within   the same again
          the tile, 2 to enter
          and to leave it
========  ===================  ==============================================================

and an exp per step size for softplus. Q is 64, from where on tensor cores reach their full rate,
but no more than N, from where on the products within a tile cost more than the state, and no more
than the longest sequence.
"""

from typing import NamedTuple

from torch import Tensor

from .operations import Operation
from .presets import Case, PassName

TILE = 64


class Floor(NamedTuple):
    """Bytes moved, floating-point operations in products, exponentials."""

    nbytes: int
    flop: int
    exps: int

    def seconds(self, bytes_per_s: float, flop_per_s: float) -> float:
        """What it takes at these rates, moving and computing at the same time."""
        return max(self.nbytes / bytes_per_s, self.flop / flop_per_s)


def floor(operation: Operation, case: Case, what: PassName) -> Floor:
    if what == "forward+backward":
        forward, backward = (floor(operation, case, each) for each in ("forward", "backward"))
        return Floor(*map(sum, zip(forward, backward, strict=True)))
    task = operation.task(case, "meta")
    arguments, y = sum(map(_nbytes, task.leaves.values())), _nbytes(task.like_y)
    preset = case.preset
    P, N = preset.headdim, preset.d_state
    Q = min(TILE, N, preset.longest)
    if what == "forward":
        nbytes = arguments + y
        per_head, per_group = 4 * P * N + Q * N + Q * P, 0
    else:
        nbytes = 2 * arguments + y
        per_head, per_group = 10 * P * N + Q * N + 2 * Q * P, 2 * Q * N
    per_token = preset.nheads * per_head + preset.ngroups * per_group
    step_sizes = sum(name in task.leaves for name in ("dt", "dt_rev"))
    exps = preset.nheads * (operation.directions * ((Q - 1) / 2 + 2) + step_sizes)
    return Floor(
        nbytes, operation.directions * preset.tokens * per_token, round(preset.tokens * exps)
    )


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
