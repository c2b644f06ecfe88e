"""Products of small matrices at the speed of the processor's vector units.

Numba compiles a loop nest like this one to a third of that speed: it keeps no block of ``out`` in
registers. So the innermost block is spelt out in the compiler's own language.
"""

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

# Fused multiply-adds only. The flags that drop NaN, infinities or the order of sums stay off.
FUNCTION: dict[str, Any] = {
    "fastmath": {"contract"},
    "error_model": "numpy",
    "no_cpython_wrapper": True,
}
# For sums over whole states, where no order is better than another.
SUM: dict[str, Any] = {**FUNCTION, "fastmath": {"contract", "reassoc"}}
# Only what Python calls is kept on disk: it holds the functions that it calls.
KERNEL: dict[str, Any] = {
    "fastmath": {"contract"},
    "error_model": "numpy",
    "parallel": True,
    "cache": True,
}

# A block of ``out`` is ROWS rows of one or two vectors; all of it must fit into the registers.
VECTOR_BYTES = 64
ROWS = 4

ALL, LOWER, UPPER = 0, 1, 2


def padded(d_state: int, headdim: int, itemsize: int) -> tuple[int, int]:
    """The sizes of a state that the products ask for: whole blocks of rows, whole vectors."""
    lanes = VECTOR_BYTES // itemsize
    return -(-d_state // ROWS) * ROWS, -(-headdim // lanes) * lanes


@njit(**FUNCTION)
def set_product(out, left, right, part):
    """``out = left @ right``, for a left that is full, lower or upper triangular.

    out and right are contiguous, left may be a transposed view. Sizes are padded.
    """
    rows, inner = left.shape
    width, step = out.shape[1], VECTOR_BYTES // out.itemsize
    for i in range(0, rows, ROWS):
        first = i if part == UPPER else 0
        last = min(i + ROWS, inner) if part == LOWER else inner
        for p in range(0, width - step, 2 * step):
            _set_wide_block(out, left, right, i, p, first, last, out.dtype.type(0))
        if width // step % 2 == 1:
            _set_block(out, left, right, i, width - step, first, last, out.dtype.type(0))


@njit(**FUNCTION)
def add_product(out, scale, left, right):
    """``out = scale * out + left @ right``.

    What the scale makes smaller than the normal numbers becomes zero: computing with it takes long.
    """
    rows, inner = left.shape
    width, step = out.shape[1], VECTOR_BYTES // out.itemsize
    for i in range(0, rows, ROWS):
        for p in range(0, width - step, 2 * step):
            _add_wide_block(out, left, right, i, p, 0, inner, scale)
        if width // step % 2 == 1:
            _add_block(out, left, right, i, width - step, 0, inner, scale)


def _block(adds: bool, vectors: int) -> Any:
    """``out[i:i+ROWS, p:p+lanes]`` as a product, alone or added to ``scale`` times what was there.

    The block is in registers all along. It is not cleared or scaled beforehand by other code, since
    reading back what was just written in other pieces would stall.
    """

    @intrinsic
    def block(typing_context, out, left, right, i, p, first, last, scale):
        signature = types.void(out, left, right, *[types.intp] * 4, out.dtype)

        def generate(context, builder, signature, arguments):
            kinds = signature.args[:3]
            arrays = [
                context.make_array(kind)(context, builder, value)
                for kind, value in zip(kinds, arguments[:3], strict=True)
            ]
            i, p, first, last, scale = arguments[3:]
            element = context.get_data_type(kinds[0].dtype)
            align = element.get_abi_size(context.target_data)
            vector = ir.VectorType(element, vectors * VECTOR_BYTES // align)

            def at(which, row, column):
                return cgutils.get_item_pointer(
                    context, builder, kinds[which], arrays[which], [row, column], wraparound=False
                )

            def vector_at(which, row, column):
                return builder.bitcast(at(which, row, column), vector.as_pointer())

            def spread(scalar):
                undefined = ir.Constant(vector, ir.Undefined)
                zero = ir.Constant(ir.IntType(32), 0)
                zeros = ir.Constant(ir.VectorType(ir.IntType(32), vector.count), [0] * vector.count)
                single = builder.insert_element(undefined, scalar, zero)
                return builder.shuffle_vector(single, undefined, zeros)

            nothing = ir.Constant(vector, [0.0] * vector.count)
            tiny = 2.0**-126 if align == 4 else 2.0**-1022
            smallest = ir.Constant(vector, [tiny] * vector.count)
            rows = [builder.add(i, ir.Constant(i.type, row)) for row in range(ROWS)]
            targets = [vector_at(0, row, p) for row in rows]
            sums = [cgutils.alloca_once(builder, vector) for _ in rows]
            for total, target in zip(sums, targets, strict=True):
                start = nothing
                if adds:
                    scaled = builder.fmul(spread(scale), builder.load(target, align=align))
                    size = builder.select(
                        builder.fcmp_ordered("<", scaled, nothing), builder.fneg(scaled), scaled
                    )
                    vanishes = builder.fcmp_ordered("<", size, smallest)
                    start = builder.select(vanishes, nothing, scaled)
                builder.store(start, total)
            one = ir.Constant(i.type, 1)
            with cgutils.for_range_slice(builder, first, last, one, i.type) as (k, _):
                row_of_right = builder.load(vector_at(2, k, p), align=align)
                for row, total in zip(rows, sums, strict=True):
                    factor = spread(builder.load(at(1, row, k)))
                    product = builder.fmul(factor, row_of_right, flags=("contract",))
                    added = builder.fadd(builder.load(total), product, flags=("contract",))
                    builder.store(added, total)
            for total, target in zip(sums, targets, strict=True):
                builder.store(builder.load(total), target, align=align)
            return context.get_dummy_value()

        return signature, generate

    return block


_set_block = _block(adds=False, vectors=1)
_set_wide_block = _block(adds=False, vectors=2)
_add_block = _block(adds=True, vectors=1)
_add_wide_block = _block(adds=True, vectors=2)
