"""Products of small matrices at the speed of the processor's vector units, and transposition.

Numba compiles loop nests like these to a third of that speed: it keeps no block of ``out`` in
registers. So the innermost blocks are spelt out in the compiler's own language.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

# Fused multiply-adds only. The flags that drop NaN, infinities or the order of sums stay off.
FUNCTION: dict[str, Any] = {
    "fastmath": {"contract"},
    "error_model": "numpy",
    "no_cpython_wrapper": True,
}
# For sums where no order is better than another.
SUM: dict[str, Any] = {**FUNCTION, "fastmath": {"contract", "reassoc"}}
# Only what Python calls is kept on disk: it holds the functions that it calls.
KERNEL: dict[str, Any] = {
    "fastmath": {"contract"},
    "error_model": "numpy",
    "parallel": True,
    "cache": True,
}

# A block of ``out`` is ROWS rows of one or two vectors. All of it must fit into the registers, and
# hold twice as many sums as an addition takes cycles. Numba compiles anew for another processor.
WIDE_REGISTERS = "+avx512f" in cpu_target.target_context.codegen().magic_tuple()[2]
VECTOR_BYTES, ROWS = (64, 8) if WIDE_REGISTERS else (32, 4)
CACHE_LINE = 64

ALL, LOWER, UPPER = 0, 1, 2


def padded(d_state: int, headdim: int, itemsize: int) -> tuple[int, int]:
    """The sizes of a state that products and transposition ask for: whole vectors."""
    lanes = VECTOR_BYTES // itemsize
    return -(-d_state // lanes) * lanes, -(-headdim // lanes) * lanes


@njit(**FUNCTION)
def zeros(shape, like):
    out = empty(shape, like)
    out[:] = 0
    return out


@njit(**FUNCTION)
def empty(shape, like):
    """Of ``like``'s dtype, and aligned: no vector of a padded array lies across cache lines."""
    size = 1
    for extent in shape:
        size *= extent
    memory = np.empty(size + CACHE_LINE // like.itemsize, like.dtype)
    first = -memory.ctypes.data % CACHE_LINE // like.itemsize
    return memory[first : first + size].reshape(shape)


@njit(**FUNCTION)
def set_product(out, left, right, part):
    """``out = left @ right``, for a left that is full, lower or upper triangular.

    out and right are contiguous, left may be a transposed view. Sizes are padded.
    """
    rows, inner = left.shape
    width, step = out.shape[1], VECTOR_BYTES // out.itemsize
    for i in range(0, rows, ROWS):
        first = i if part == UPPER else 0
        last = i + ROWS if part == LOWER else inner
        for p in range(0, width - step, 2 * step):
            _set_wide_block(out, left, right, i, p, first, last)
        if width // step % 2 == 1:
            _set_block(out, left, right, i, width - step, first, last)


@njit(**FUNCTION)
def add_product(out, scale, left, right, part):
    """``out[i] = scale[i] * out[i] + (left @ right)[i]``, as above.

    What the scale makes smaller than the normal numbers becomes zero: computing with it takes long.
    """
    rows, inner = left.shape
    width, step = out.shape[1], VECTOR_BYTES // out.itemsize
    for i in range(0, rows, ROWS):
        first = i if part == UPPER else 0
        last = i + ROWS if part == LOWER else inner
        for p in range(0, width - step, 2 * step):
            _add_wide_block(out, scale, left, right, i, p, first, last)
        if width // step % 2 == 1:
            _add_block(out, scale, left, right, i, width - step, first, last)


@njit(**FUNCTION)
def transpose(out, matrix):
    """``out = matrix.T``, both contiguous, of padded sizes."""
    step = VECTOR_BYTES // out.itemsize
    for i in range(0, matrix.shape[0], step):
        for j in range(0, matrix.shape[1], step):
            _transpose_block(out, matrix, i, j)


class _Blocks:
    """Writes the code of a block of arrays."""

    def __init__(self, context: Any, builder: Any, kinds: Any, values: Any, vectors: int) -> None:
        self.context = context
        self.builder = builder
        self.kinds = kinds
        self.arrays = [
            context.make_array(kind)(context, builder, value)
            for kind, value in zip(kinds, values, strict=True)
        ]
        element = context.get_data_type(kinds[0].dtype)
        self.itemsize = element.get_abi_size(context.target_data)
        self.vector = ir.VectorType(element, vectors * VECTOR_BYTES // self.itemsize)

    def after(self, index: Any, count: int) -> list[Any]:
        """The indices from one on."""
        return [self.builder.add(index, ir.Constant(index.type, i)) for i in range(count)]

    def element_at(self, which: int, *index: Any) -> Any:
        return self.builder.load(self._pointer(which, index))

    def vector_at(self, which: int, *index: Any) -> Any:
        pointer = self.builder.bitcast(self._pointer(which, index), self.vector.as_pointer())
        return self.builder.load(pointer, align=self.itemsize)

    def store(self, vector: Any, which: int, *index: Any) -> None:
        pointer = self.builder.bitcast(self._pointer(which, index), self.vector.as_pointer())
        self.builder.store(vector, pointer, align=self.itemsize)

    def full(self, value: float) -> Any:
        return ir.Constant(self.vector, [value] * self.vector.count)

    def spread(self, scalar: Any) -> Any:
        """A vector full of it."""
        undefined = ir.Constant(self.vector, ir.Undefined)
        single = self.builder.insert_element(undefined, scalar, ir.Constant(ir.IntType(32), 0))
        return self.shuffle(single, undefined, [0] * self.vector.count)

    def shuffle(self, a: Any, b: Any, lanes: list[int]) -> Any:
        mask = ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes)
        return self.builder.shuffle_vector(a, b, mask)

    def flushed(self, vector: Any) -> Any:
        """Zero instead of what is smaller than the normal numbers."""
        smallest = self.full(2.0**-126 if self.itemsize == 4 else 2.0**-1022)
        kind = f"v{vector.type.count}f{8 * self.itemsize}"
        absolute = cgutils.get_or_insert_function(
            self.builder.module, ir.FunctionType(self.vector, [self.vector]), f"llvm.fabs.{kind}"
        )
        size = self.builder.call(absolute, [vector])
        vanishes = self.builder.fcmp_ordered("<", size, smallest)
        return self.builder.select(vanishes, self.full(0.0), vector)

    @contextmanager
    def loop(self, first: Any, last: Any) -> Iterator[Any]:
        one = ir.Constant(first.type, 1)
        with cgutils.for_range_slice(self.builder, first, last, one, first.type) as (k, _):
            yield k

    def _pointer(self, which: int, index: Any) -> Any:
        return cgutils.get_item_pointer(
            self.context,
            self.builder,
            self.kinds[which],
            self.arrays[which],
            list(index),
            wraparound=False,
        )


def _product(blocks: _Blocks, sums: list[Any], left: int, right: int, *place: Any) -> None:
    """Add ``(left @ right)[i:i+ROWS, p:p+lanes]`` to sums, which stay in registers all along."""
    i, p, first, last = place
    builder = blocks.builder
    rows = blocks.after(i, ROWS)
    with blocks.loop(first, last) as k:
        row_of_right = blocks.vector_at(right, k, p)
        for row, total in zip(rows, sums, strict=True):
            factor = blocks.spread(blocks.element_at(left, row, k))
            product = builder.fmul(factor, row_of_right, flags=("contract",))
            added = builder.fadd(builder.load(total), product, flags=("contract",))
            builder.store(added, total)
    for row, total in zip(rows, sums, strict=True):
        blocks.store(builder.load(total), 0, row, p)


def _set(vectors: int) -> Any:
    @intrinsic
    def set_block(typing_context, out, left, right, i, p, first, last):
        def generate(context, builder, signature, arguments):
            blocks = _Blocks(context, builder, signature.args[:3], arguments[:3], vectors)
            nothing = blocks.full(0.0)
            sums = [cgutils.alloca_once_value(builder, nothing) for _ in range(ROWS)]
            _product(blocks, sums, 1, 2, *arguments[3:])
            return context.get_dummy_value()

        return types.void(out, left, right, *[types.intp] * 4), generate

    return set_block


def _add(vectors: int) -> Any:
    """Scaling has no pass of its own: reading back what was just written in other pieces stalls."""

    @intrinsic
    def add_block(typing_context, out, scale, left, right, i, p, first, last):
        def generate(context, builder, signature, arguments):
            blocks = _Blocks(context, builder, signature.args[:4], arguments[:4], vectors)
            i, p = arguments[4:6]
            sums = []
            for row in blocks.after(i, ROWS):
                factor = blocks.spread(blocks.element_at(1, row))
                scaled = blocks.flushed(builder.fmul(factor, blocks.vector_at(0, row, p)))
                sums.append(cgutils.alloca_once_value(builder, scaled))
            _product(blocks, sums, 2, 3, *arguments[4:])
            return context.get_dummy_value()

        return types.void(out, scale, left, right, *[types.intp] * 4), generate

    return add_block


@intrinsic
def _transpose_block(typing_context: Any, out: Any, matrix: Any, i: Any, j: Any) -> Any:
    """A square of one vector's width: swap its quarters, then the quarters of these, and so on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        blocks = _Blocks(context, builder, signature.args[:2], arguments[:2], vectors=1)
        i, j = arguments[2:]
        lanes = blocks.vector.count
        rows = [blocks.vector_at(1, row, j) for row in blocks.after(i, lanes)]
        distance = lanes // 2
        while distance:
            # Lanes beyond ``lanes`` are those of the second vector.
            upper = [n + (lanes - distance) * bool(n & distance) for n in range(lanes)]
            lower = [lane + distance for lane in upper]
            for n in range(lanes):
                if not n & distance:
                    a, b = rows[n], rows[n + distance]
                    rows[n] = blocks.shuffle(a, b, upper)
                    rows[n + distance] = blocks.shuffle(a, b, lower)
            distance //= 2
        for row, vector in zip(blocks.after(j, lanes), rows, strict=True):
            blocks.store(vector, 0, row, i)
        return context.get_dummy_value()

    return types.void(out, matrix, types.intp, types.intp), generate


_set_block = _set(vectors=1)
_set_wide_block = _set(vectors=2)
_add_block = _add(vectors=1)
_add_wide_block = _add(vectors=2)
