"""16-bit floats from their bits: Numba's CPU target has neither float16 nor bfloat16.

An array of float16 travels as int16, one of bfloat16 as uint16. :func:`widen` and :func:`narrow`
convert single elements, and cost nothing where the array holds float32 or float64. Indices are
taken as unsigned: Numba would else look out for negative ones, element by element.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload


@intrinsic
def _float16_to_float32(typing_context: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.int16), generate


@intrinsic
def _float32_to_float16(typing_context: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), ir.IntType(16))

    return types.int16(types.float32), generate


@intrinsic
def _bits_to_float32(typing_context: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic
def _float32_to_bits(typing_context: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), generate


def widen(array: Any, index: int) -> Any:
    """Element ``index`` of a one-dimensional array, as float32 or float64."""
    raise NotImplementedError("compiled code only")


@overload(widen)
def _widen(array, index):
    if array.dtype == types.int16:
        return lambda array, index: _float16_to_float32(array[np.uintp(index)])
    if array.dtype == types.uint16:
        return lambda array, index: _bits_to_float32(
            np.uint32(array[np.uintp(index)]) << np.uint32(16)
        )
    return lambda array, index: array[np.uintp(index)]


def narrow(array: Any, index: int, value: Any) -> None:
    """Set element ``index``, rounding to nearest even where the array holds 16-bit floats."""
    raise NotImplementedError("compiled code only")


@overload(narrow)
def _narrow(array, index, value):
    if array.dtype == types.int16:

        def store(array, index, value):
            array[np.uintp(index)] = _float32_to_float16(np.float32(value))
    elif array.dtype == types.uint16:

        def store(array, index, value):
            bits = _float32_to_bits(np.float32(value))
            half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
            rounded = np.uint16((bits + half) >> np.uint32(16))
            # Rounding could carry a NaN over into a number.
            array[np.uintp(index)] = rounded if value == value else np.uint16(0x7FC0)
    else:

        def store(array, index, value):
            array[np.uintp(index)] = value

    return store
