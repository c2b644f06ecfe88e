"""Where sequences begin: the two spellings of packing, read on the device."""

import triton
import triton.language as tl

from .common import LENGTH, LINKS, ROOM, START, TABLE_WIDTH


@triton.jit
def span(cu_seqlens, sequence, nsequences, seqlen):
    """First token and one past the last, within [0, seqlen] whatever cu_seqlens holds.

    Number ``nsequences`` stands for the rows before all sequences, the next for those behind.
    """
    real = sequence < nsequences
    begin = tl.load(cu_seqlens + tl.minimum(sequence, nsequences))
    end = tl.load(cu_seqlens + tl.minimum(sequence + 1, nsequences))
    ahead = tl.load(cu_seqlens)
    begin = tl.where(real | (sequence > nsequences), begin, 0)
    end = tl.where(real, end, tl.where(sequence == nsequences, ahead, seqlen))
    begin = tl.minimum(tl.maximum(begin, 0), seqlen)
    end = tl.minimum(tl.maximum(end, begin), seqlen)
    return begin.to(tl.int32), end.to(tl.int32)


@triton.jit(do_not_specialize=["nsequences", "seqlen", "unit_size", "units", "halvings"])
def cut(
    cu_seqlens, first_unit, table, nsequences, seqlen, unit_size, units, halvings,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: the table of units, and where in it each sequence begins."""
    lanes = tl.arange(0, BLOCK)
    total = 0
    for base in range(0, nsequences + 2, BLOCK):
        sequence = base + lanes
        known = sequence < nsequences + 2
        begin, end = span(cu_seqlens, tl.minimum(sequence, nsequences + 1), nsequences, seqlen)
        count = tl.where(known, (end - begin + unit_size - 1) // unit_size, 0)
        first = total + tl.cumsum(count, 0) - count
        tl.store(first_unit + sequence, tl.minimum(first, units), mask=known)
        total += tl.sum(count, 0)
    total = tl.minimum(total, units)
    tl.store(first_unit + nsequences + 2, total)
    tl.debug_barrier()
    for base in range(0, units, BLOCK):
        unit = base + lanes
        # The last sequence whose first unit is not behind this one.
        low = tl.zeros([BLOCK], tl.int32)
        high = low + nsequences + 2
        for _ in range(halvings):
            middle = (low + high) // 2
            fits = tl.load(first_unit + middle) <= unit
            low = tl.where(fits, middle, low)
            high = tl.where(fits, high, middle)
        begin, end = span(cu_seqlens, low, nsequences, seqlen)
        start = begin + (unit - tl.load(first_unit + low)) * unit_size
        room = tl.minimum(end - start, unit_size)
        room = tl.where((unit < total) & (room > 0), room, 0)
        real = low < nsequences
        links = (start > begin).to(tl.int32) + 2 * (start + unit_size < end).to(tl.int32)
        entry = table + unit * TABLE_WIDTH
        write = unit < units
        tl.store(entry + START, tl.where(room > 0, start, 0), mask=write)
        tl.store(entry + LENGTH, tl.where(real, room, 0), mask=write)
        tl.store(entry + ROOM, room, mask=write)
        tl.store(entry + LINKS, tl.where(real, links, 0), mask=write)


@triton.jit(do_not_specialize=["tokens", "seqlen", "row_stride", "token_stride"])
def mark(seq_idx, borders, tokens, seqlen, row_stride, token_stride, BLOCK: tl.constexpr):
    """1 at each token that begins a sequence: where seq_idx changes, and at a row's first."""
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    keep = token < tokens
    place = token % seqlen
    pointers = seq_idx + (token // seqlen) * row_stride + place * token_stride
    own = tl.load(pointers, mask=keep, other=0)
    previous = tl.load(pointers - token_stride, mask=keep & (place > 0), other=0)
    begins = (place == 0) | (own != previous)
    tl.store(borders + token, begins.to(tl.int8), mask=keep)
