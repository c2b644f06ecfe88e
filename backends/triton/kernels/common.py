"""What all kernels share: where a unit lies, step sizes, decays, and loading of tiles.

A *unit* is a run of at most ``unit_size`` consecutive tokens of one sequence, that one program
walks through tile by tile. Rows are counted from the unit's first token. In a tile, ``q`` are the
rows 0, 1, ..., Q - 1.

Everything here is written for a direction in its own order: "inclusive" sums of log decays run from
the end where the direction begins. A reverse direction then has the same formulas as a forward one.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
# Columns of a row of the table of units.
START = tl.constexpr(0)
LENGTH = tl.constexpr(1)
ROOM = tl.constexpr(2)
LINKS = tl.constexpr(3)
TABLE_WIDTH = tl.constexpr(4)


@triton.jit
def locate(table, unit, seqlen, unit_size, units_per_row, TABLE: tl.constexpr):
    """Where a unit lies: (row of the batch, first token, tokens, rows to write, links).

    ``rows to write`` exceed ``tokens`` where rows belong to no sequence: those read as zero and
    come out as zero. Bit 0 of ``links``: the sequence goes on before the unit; bit 1: after it.
    """
    if TABLE:
        entry = table + unit * TABLE_WIDTH
        row = unit * 0
        start = tl.load(entry + START)
        length = tl.load(entry + LENGTH)
        room = tl.load(entry + ROOM)
        links = tl.load(entry + LINKS)
    else:
        row = unit // units_per_row
        start = (unit % units_per_row) * unit_size
        length = tl.minimum(unit_size, seqlen - start)
        room = length
        links = (start > 0).to(tl.int32) + 2 * (start + unit_size < seqlen).to(tl.int32)
    return row, start, length, room, links


@triton.jit
def offset(row, start, batch_stride, stride, ALIGNED: tl.constexpr):
    """Of a unit's first token, in 64 bits. ALIGNED: the batch stride is a multiple of 16."""
    across = row.to(tl.int64) * batch_stride
    if ALIGNED:
        across = tl.multiple_of(across, 16)
    return across + start.to(tl.int64) * stride


@triton.jit
def tile(
    base, first, q, columns, stride, low, high,
    WIDTH: tl.constexpr, FULL: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Rows ``first + q`` of (rows, WIDTH), those in [low, high); zero elsewhere: (Q, columns).

    FULL: all rows are in [low, high).
    """
    rows = first + q
    pointers = base + first.to(tl.int64) * stride + (q[:, None] * stride + columns[None, :])
    if FULL and columns.shape[0] == WIDTH:
        return tl.load(pointers).to(dtype)
    elif FULL:
        return tl.load(pointers, mask=(columns < WIDTH)[None, :], other=0.0).to(dtype)
    else:
        keep = ((rows >= low) & (rows < high))[:, None]
        if columns.shape[0] != WIDTH:
            keep = keep & (columns < WIDTH)[None, :]
        return tl.load(pointers, mask=keep, other=0.0).to(dtype)


@triton.jit
def put(
    base, first, q, columns, stride, high, values, WIDTH: tl.constexpr, FULL: tl.constexpr
):  # fmt: skip
    """The transpose of :func:`tile`, for rows below ``high``."""
    pointers = base + first.to(tl.int64) * stride + (q[:, None] * stride + columns[None, :])
    values = values.to(base.dtype.element_ty)
    if FULL and columns.shape[0] == WIDTH:
        tl.store(pointers, values)
    else:
        keep = (first + q < high)[:, None]
        if columns.shape[0] != WIDTH:
            keep = keep & (columns < WIDTH)[None, :]
        tl.store(pointers, values, mask=keep)


@triton.jit
def load_state(base, p, n, HEADDIM: tl.constexpr, D_STATE: tl.constexpr):
    """A state, (headdim, d_state): (P, N), in the dtype that it lies in."""
    cells = p[:, None] * D_STATE + n[None, :]
    if n.shape[0] == D_STATE and p.shape[0] == HEADDIM:
        return tl.load(base + cells)
    else:
        keep = (p < HEADDIM)[:, None] & (n < D_STATE)[None, :]
        return tl.load(base + cells, mask=keep, other=0.0)


@triton.jit
def store_state(base, p, n, state, HEADDIM: tl.constexpr, D_STATE: tl.constexpr):
    cells = p[:, None] * D_STATE + n[None, :]
    state = state.to(base.dtype.element_ty)
    if n.shape[0] == D_STATE and p.shape[0] == HEADDIM:
        tl.store(base + cells, state)
    else:
        keep = (p < HEADDIM)[:, None] & (n < D_STATE)[None, :]
        tl.store(base + cells, state, mask=keep)


@triton.jit
def between(row, column, EXACT: tl.constexpr):
    """``row_i - column_j`` in float32: (Q, Q). Rounded once only, in two parts, where EXACT."""
    if EXACT:
        row_high = row.to(tl.float32)
        column_high = column.to(tl.float32)
        row_low = (row - row_high.to(tl.float64)).to(tl.float32)
        column_low = (column - column_high.to(tl.float64)).to(tl.float32)
        high = row_high[:, None] - column_high[None, :]
        return high + (row_low[:, None] - column_low[None, :])
    else:
        return row[:, None] - column[None, :]


@triton.jit
def power(exponent):
    """2 to the exponent, in float32."""
    return tl.exp2(exponent.to(tl.float32))


@triton.jit
def segments(borders, first, q, length):
    """Number of borders up to each row of the tile, its own included: (Q,); and of all rows."""
    rows = first + q
    marks = tl.load(borders + rows.to(tl.int64), mask=rows < length, other=0).to(tl.int32)
    return tl.cumsum(marks, 0), tl.sum(marks, 0)


@triton.jit
def visible(q, SHIFT: tl.constexpr, REVERSE: tl.constexpr):
    """Whether row i sees column j, in a direction: (Q, Q)."""
    if REVERSE:
        return q[None, :] >= q[:, None] + SHIFT
    else:
        return q[None, :] + SHIFT <= q[:, None]
