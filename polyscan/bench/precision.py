"""The precisions that are measured: a dtype, and whether float32 products may be rounded."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import torch

# tf32: float32 tensors whose products may be rounded to TF32.
PrecisionName = Literal["bfloat16", "float16", "tf32", "float32"]

PRECISIONS: tuple[PrecisionName, ...] = get_args(PrecisionName)
DTYPES: dict[PrecisionName, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "tf32": torch.float32,
    "float32": torch.float32,
}


@contextmanager
def products_in(precision: PrecisionName) -> Iterator[None]:
    """Within the ``with`` block, float32 products on GPUs are as ``precision`` says."""
    matmul = torch.backends.cuda.matmul
    usual = matmul.fp32_precision
    matmul.fp32_precision = "tf32" if precision == "tf32" else "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = usual
