"""From what leaves each unit alone to what enters it: along the units of every sequence."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["units_per_row"])
def pass_states(
    states, factors, first_unit, initial, final, nheads, units_per_row,
    TABLE: tl.constexpr, BACKWARDS: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr,
    CELLS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per sequence, head, and block of a state's cells; ``states`` in place.

    states (units, nheads, CELLS), factors (units, nheads); initial, final (sequences, nheads,
    CELLS). The units of sequence s are ``first_unit[s]`` to ``first_unit[s + 1] - 1``.
    """
    BLOCKS: tl.constexpr = (CELLS + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    cells = (program % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    head = (program // BLOCKS) % nheads
    sequence = program // (BLOCKS * nheads)
    if TABLE:
        first = tl.load(first_unit + sequence)
        count = tl.load(first_unit + sequence + 1) - first
    else:
        first = sequence * units_per_row
        count = units_per_row
    keep = cells < CELLS
    own = (sequence.to(tl.int64) * nheads + head) * CELLS
    if INITIAL:
        state = tl.load(initial + own + cells, mask=keep, other=0.0).to(tl.float32)
    else:
        state = tl.zeros([BLOCK], tl.float32)
    for step in tl.range(0, count, num_stages=4):
        unit = first + (count - 1 - step if BACKWARDS else step)
        place = unit.to(tl.int64) * nheads + head
        added = tl.load(states + place * CELLS + cells, mask=keep, other=0.0)
        factor = tl.load(factors + place)
        tl.store(states + place * CELLS + cells, state, mask=keep)
        state = state * factor + added
    if FINAL:
        tl.store(final + own + cells, state, mask=keep)
