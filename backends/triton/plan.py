"""How a problem is cut up, and the sizes of its tiles: everything decided before a launch."""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

import torch

from polyscan.problem import Direction, SSDProblem

from .machine import Machine

# Numbers of a state's tile that the registers of a program hold.
STATE_NUMBERS = 8192
# Programs per multiprocessor: with so many, sequences stay whole; else they are cut to have more.
ENOUGH = 1.9
PROGRAMS = 4
# Up to here, a launch costs more than working the step sizes out in the scan.
SHORT = 256
# Bytes of the states and adjoints that a backward keeps at a time: as many as x has, or these.
SLAB_BYTES = 1 << 26
# A slab is done in units of no fewer tokens.
SMALLEST_UNIT = 256


@dataclass(frozen=True)
class Plan:
    """Sizes shared by all kernels of a forward, or of a backward.

    tile: tokens of a tile (Q). slice: channels that one program keeps a state for (P), a power of
    two. width: d_state, padded to a power of two (N).
    unit_size: tokens of a unit, a multiple of tile. units: how many there are, or at most are.
    units_per_row: in each row of the batch, where there is no table.
    slab: units that a backward keeps states for at a time.
    units_are_sequences: whether every row of the batch is one sequence and one unit.
    linked: whether any sequence may have more than one unit.
    moves: whether any unit may have more than one tile.
    prepares: whether step sizes are worked out in a launch of their own.
    together: whether both directions of the forward go in one launch.
    fused: both directions in one matrix, for they have the same parameters and no shift.
    """

    tile: int
    slice: int
    width: int
    unit_size: int
    units: int
    units_per_row: int
    slab: int
    units_are_sequences: bool
    linked: bool
    moves: bool
    prepares: bool
    together: bool
    fused: bool

    @property
    def tiles_per_unit(self) -> int:
        return self.unit_size // self.tile


@lru_cache(maxsize=4096)
def plan(problem: SSDProblem, machine: Machine, backward: bool) -> Plan:
    width = padded(problem.d_state)
    slice_ = min(padded(problem.headdim), max(16, STATE_NUMBERS // width))
    fused = is_fused(problem.directions) and not problem.shift
    packed = problem.packing == "cu_seqlens"
    sequences = max(1, problem.nsequences or 1) if packed else problem.batch
    length = ceil(problem.batch * problem.seqlen / sequences)  # of a sequence, on average
    tile = tile_size(problem, length, backward)

    carried = (4 if fused else 2) if backward else 1
    programs = problem.nheads * ceil(problem.headdim / slice_) * carried
    multiprocessors = machine.multiprocessors
    per_sequence = 1
    if sequences * programs < ENOUGH * multiprocessors:
        per_sequence = max(1, round(PROGRAMS * multiprocessors / (programs * sequences)))
    unit_size = ceil(ceil(length / per_sequence) / tile) * tile
    slab_tokens = (
        _slab_tokens(problem, carried, tile) if backward else problem.batch * problem.seqlen
    )
    if slab_tokens < problem.batch * problem.seqlen:
        # A slab should fill the machine too.
        most = slab_tokens * programs / (PROGRAMS * multiprocessors)
        unit_size = min(unit_size, max(SMALLEST_UNIT, int(most)) // tile * tile)

    units_per_row = ceil(problem.seqlen / unit_size)
    units = problem.batch * units_per_row
    if packed:
        # Each sequence, and the rows before and behind all, may leave a unit in part empty.
        units = problem.seqlen // unit_size + (problem.nsequences or 0) + 2
    return Plan(
        tile=tile,
        slice=slice_,
        width=width,
        unit_size=unit_size,
        units=units,
        units_per_row=units_per_row,
        slab=min(units, max(1, slab_tokens // unit_size)) if backward else units,
        units_are_sequences=not packed and units_per_row == 1,
        linked=problem.seqlen > unit_size,
        moves=min(unit_size, problem.seqlen) > tile,
        prepares=backward or problem.seqlen > SHORT or problem.d_state > 16,
        together=together(problem, fused),
        fused=fused,
    )


def padded(size: int) -> int:
    """To a power of two that a matrix product takes."""
    return max(16, 1 << (size - 1).bit_length())


def is_fused(directions: tuple[Direction, ...]) -> bool:
    """Whether two directions read the same parameters."""
    names = {(d.dt, d.A, d.B, d.C, d.dt_bias) for d in directions}
    return len(directions) == 2 and len(names) == 1


def tile_size(problem: SSDProblem, length: int, backward: bool) -> int:
    """Tokens of a tile: as many as registers allow, no more than a sequence has."""
    width = padded(problem.d_state)
    exact = problem.product_dtype == torch.float32 and not problem.tf32
    short = width <= 16 and length < 512
    # Tiles of 64 rows with a group to each head gave a wrong gradient of B on an H200, Triton 3.6.
    alone = backward and problem.heads_per_group == 1
    tile = 32 if exact or width > 128 or short or alone else 64
    if problem.chunk_size is not None:
        tile = min(tile, padded(problem.chunk_size))
    return min(tile, padded(length))


def together(problem: SSDProblem, fused: bool) -> bool:
    """In one launch where launches cost most; apart, each direction has the registers to itself."""
    return problem.d_state <= 16 or (fused and problem.d_state <= 64)


def _slab_tokens(problem: SSDProblem, carried: int, tile: int) -> int:
    """Tokens whose tiles' states and adjoints may be kept at a time."""
    state = problem.nheads * problem.headdim * problem.d_state * problem.product_dtype.itemsize
    tokens = problem.batch * problem.seqlen
    x = tokens * problem.nheads * problem.headdim * problem.x_dtype.itemsize
    return max(SLAB_BYTES, x) // (carried * state) * tile
