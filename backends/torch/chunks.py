"""Where the chunks lie: one table of token indices for plain and for packed sequences.

A chunk is ``size`` slots for consecutive tokens. The chunks of one sequence form a *run*, along
which the state passes. Short packed sequences share a chunk where they fit into one, told apart by
their segment numbers; no state enters or leaves such a chunk. So there are at most about
2 seqlen / size chunks, however short the sequences are.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from polyscan.problem import SSDInputs, SSDProblem
from polyscan.reference import sequences

# Bytes of one (chunks, nheads, size, size) temporary of a block. Large enough to hide the cost of
# a torch call, small enough that the dozen or so of them stay in a processor's cache.
BLOCK_BYTES = 1 << 21
DEFAULT_SIZE = 64
# Work and memory grow with the size, and nothing was ever gained beyond the default.
LARGEST_SIZE = 256


@dataclass(frozen=True)
class Chunks:
    """The table. Tokens are counted over the flattened (batch, seqlen).

    size: slots of a chunk.
    tokens: (count, size), the token in each slot; any where there is none.
    valid: (count, size), whether there is one; None where every slot is filled and chunk k holds
        the tokens k * size, k * size + 1, ...
    slots: the filled slots, counted over (count, size), in order.
    filled: how many slots are filled before each chunk and, at the end, in all.
    first, last: (batch * seqlen,), whether a token is the first or last of its sequence.
    segment: (batch * seqlen,), a number per sequence; None where no chunk is shared.
    run_start: (runs,), the first chunk of each run, longest run first.
    run_length: how many chunks each run has.
    run_state: (runs,), the row of the states that belongs to each run.
    """

    size: int
    tokens: Tensor
    valid: Tensor | None
    slots: Tensor
    filled: list[int]
    first: Tensor
    last: Tensor
    segment: Tensor | None
    run_start: Tensor
    run_length: list[int]
    run_state: Tensor

    @property
    def count(self) -> int:
        return self.tokens.shape[0]

    @property
    def uniform(self) -> bool:
        """Whether the runs are equally long and in order."""
        return self.count == len(self.run_length) * max(self.run_length, default=0)

    @property
    def linked(self) -> bool:
        """Whether a state passes from any chunk to another."""
        return bool(self.run_length) and self.run_length[0] > 1

    def blocks(self, nheads: int, itemsize: int) -> Iterator[slice]:
        """Slices of the chunks that are computed at a time."""
        step = max(1, BLOCK_BYTES // (nheads * self.size * self.size * itemsize))
        for start in range(0, self.count, step):
            yield slice(start, min(start + step, self.count))

    def steps(self, reverse: bool) -> Iterator[tuple[int, Tensor | slice]]:
        """The chunks that states enter together: the first of every run, then the second, ...

        With each step the number of runs that have so many chunks: the first ones of all.
        """
        longest = max(self.run_length, default=0)
        if self.uniform:
            for step in range(longest):
                first = longest - 1 - step if reverse else step
                yield len(self.run_length), slice(first, None, longest)
            return
        lengths = torch.tensor(self.run_length, device=self.run_start.device)
        ends = self.run_start + lengths - 1
        active = len(self.run_length)
        for step in range(longest):
            while self.run_length[active - 1] <= step:
                active -= 1
            yield active, (ends[:active] - step if reverse else self.run_start[:active] + step)

    def take(self, rows: Tensor, block: slice, offset: int = 0) -> Tensor:
        """(batch * seqlen, ...) -> (chunks, size, ...): the row ``offset`` after each slot's token.

        Zero where the slot is empty, or where that row is not of the same sequence.
        """
        if self.valid is None and offset == 0:
            span = rows[self._span(block)]
            return span.view(-1, self.size, *rows.shape[1:])
        tokens, keep = self._neighbours(block, offset)
        return rows[tokens].masked_fill_(~_like(keep, rows), 0)

    def put(self, rows: Tensor, block: slice, values: Tensor) -> None:
        """Write (chunks, size, ...) to the rows of the slots' tokens."""
        span = self._span(block)
        if self.valid is None:
            rows[span] = values.flatten(0, 1).to(rows.dtype)
        else:
            slots = self.slots[span]
            tokens = self.tokens.flatten()[slots]
            rows[tokens] = values.flatten(0, 1)[slots - block.start * self.size].to(rows.dtype)

    def add(self, rows: Tensor, block: slice, values: Tensor, offset: int = 0) -> None:
        """The transpose of :meth:`take`: add to the rows that it would read."""
        if self.valid is None and offset == 0:
            rows[self._span(block)] += values.flatten(0, 1)
        else:
            tokens, keep = self._neighbours(block, offset)
            values = values.masked_fill(~_like(keep, rows), 0)
            rows.index_add_(0, tokens.flatten(), values.flatten(0, 1))

    def _span(self, block: slice) -> slice:
        return slice(self.filled[block.start], self.filled[block.stop])

    def _neighbours(self, block: slice, offset: int) -> tuple[Tensor, Tensor]:
        """The token ``offset`` after each slot's, and whether it exists in the same sequence."""
        tokens = self.tokens[block]
        keep = torch.ones_like(tokens, dtype=torch.bool)
        if self.valid is not None:
            keep &= self.valid[block]
        if offset:
            keep &= ~(self.first if offset < 0 else self.last)[tokens]
        return (tokens + offset).where(keep, 0), keep


def all_finite(*tensors: Tensor | None) -> bool:
    """Sequences that share a chunk meet as 0 times each other, which is not 0 for NaN and inf."""
    return all(t is None or not t.is_floating_point() or bool(t.isfinite().all()) for t in tensors)


def _like(keep: Tensor, rows: Tensor) -> Tensor:
    return keep.view(*keep.shape, *[1] * (rows.dim() - 1))


def cut(problem: SSDProblem, inputs: SSDInputs, dy: Tensor | None = None) -> Chunks:
    """Cut the sequences of a problem into chunks; dy is what else will be read with them."""
    seqlen, device = problem.seqlen, problem.device
    pieces = []  # (first token, one past the last, row of the states)
    for sequence in sequences(problem, inputs):
        start, stop, _ = sequence.tokens.indices(seqlen)
        for row in range(*sequence.rows.indices(problem.batch)):
            state = row if problem.packing is None else sequence.states.start
            pieces.append((row * seqlen + start, row * seqlen + stop, state))
    size = min(problem.chunk_size or DEFAULT_SIZE, LARGEST_SIZE)
    size = max(1, min(size, max((stop - start for start, stop, _ in pieces), default=1)))
    may_share = (
        len(pieces) > problem.batch
        and not (problem.has_initial_states or problem.return_final_states)
        and all_finite(*inputs, dy)
    )

    starts: list[int] = []
    ends: list[int] = []
    runs: list[tuple[int, int, int]] = []  # (first chunk, chunks, row of the states)
    shared = False
    for start, stop, state in pieces:
        joins = (
            may_share
            and bool(runs)
            and runs[-1][1] == 1
            and ends[-1] == start
            and stop - starts[-1] <= size
        )
        if joins:
            ends[-1], shared = stop, True
            continue
        runs.append((len(starts), -(-(stop - start) // size), state))
        starts += range(start, stop, size)
        ends += [min(token + size, stop) for token in range(start, stop, size)]
    runs.sort(key=lambda run: -run[1])

    def on_device(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    def flags(tokens: list[int]) -> Tensor:
        marked = torch.zeros(problem.batch * seqlen, dtype=torch.bool, device=device)
        marked[on_device(tokens)] = True
        return marked

    slots = torch.arange(size, device=device)
    tokens = on_device(starts)[:, None] + slots
    valid = tokens < on_device(ends)[:, None]
    first = flags([start for start, _, _ in pieces])
    lengths = [end - start for start, end in zip(starts, ends, strict=True)]
    filled = [0, *accumulate(lengths)]
    dense = filled[-1] == len(starts) * size == problem.batch * seqlen
    return Chunks(
        size=size,
        tokens=tokens.where(valid, 0),
        valid=None if dense else valid,
        slots=torch.empty(0) if dense else valid.flatten().nonzero()[:, 0],
        filled=filled,
        first=first,
        last=flags([stop - 1 for _, stop, _ in pieces]),
        segment=first.cumsum(0) if shared else None,
        run_start=on_device([first_chunk for first_chunk, _, _ in runs]),
        run_length=[length for _, length, _ in runs],
        run_state=on_device([state for _, _, state in runs]),
    )
