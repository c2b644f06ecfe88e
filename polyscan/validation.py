"""Every check of the arguments: wrong kinds raise TypeError, wrong values raise ValueError.

Messages name the argument, what came and what was wanted. Nothing here reads a tensor's contents,
except :func:`check_borders`, which runs where that costs no device synchronisation.
"""

from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from .problem import INTEGER_INPUTS, SSDInputs, SSDOptions

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
BORDER_INTEGERS = (torch.int32, torch.int64)


def check_inputs(inputs: SSDInputs) -> None:
    """Kinds, dtypes, devices and shapes of all tensors."""
    for name, tensor in zip(inputs._fields, inputs, strict=True):
        if tensor is not None or name in ("x", "dt", "A", "B", "C"):
            _check_tensor(name, tensor, inputs.x)
    _check_shapes(inputs)


def _check_tensor(name: str, tensor: Any, x: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    allowed: tuple[torch.dtype, ...]
    if name == "cu_seqlens":
        allowed = BORDER_INTEGERS
    elif name in INTEGER_INPUTS:
        allowed = INTEGERS
    else:
        allowed = FLOATS
    if tensor.dtype not in allowed:
        wanted = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise TypeError(
            f"{name} must have one of the dtypes {wanted}; "
            f"got {str(tensor.dtype).removeprefix('torch.')}"
        )
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} must be a strided tensor, got layout {tensor.layout}")
    if tensor.device != x.device:
        raise ValueError(f"{name} is on {tensor.device}, but x is on {x.device}")


def _check_shapes(inputs: SSDInputs) -> None:
    x, B = inputs.x, inputs.B
    if x.dim() != 4:
        raise ValueError(f"x must be (batch, seqlen, nheads, headdim), got {_shape(x)}")
    batch, seqlen, nheads, headdim = x.shape
    if B.dim() != 4:
        raise ValueError(f"B must be (batch, seqlen, ngroups, d_state), got {_shape(B)}")
    ngroups, d_state = B.shape[2], B.shape[3]
    sizes = {
        "batch": batch,
        "seqlen": seqlen,
        "nheads": nheads,
        "headdim": headdim,
        "ngroups": ngroups,
        "d_state": d_state,
    }
    for size in ("nheads", "headdim", "ngroups", "d_state"):
        if sizes[size] < 1:
            name = "B" if size in ("ngroups", "d_state") else "x"
            raise ValueError(
                f"{name} must have {size} at least 1, got {_shape(getattr(inputs, name))}"
            )
    if nheads % ngroups:
        raise ValueError(
            f"nheads must be a multiple of ngroups: x has {nheads} heads, B has {ngroups} groups"
        )

    per_token, per_head = ("batch", "seqlen", "nheads"), ("nheads",)
    grouped = ("batch", "seqlen", "ngroups", "d_state")
    for suffix in ("", "_rev"):
        _expect(inputs, "dt" + suffix, sizes, per_token)
        _expect(inputs, "A" + suffix, sizes, per_head)
        _expect(inputs, "B" + suffix, sizes, grouped)
        _expect(inputs, "C" + suffix, sizes, grouped)
        _expect(inputs, "dt_bias" + suffix, sizes, per_head)
    _expect(inputs, "D", sizes, per_head, ("nheads", "headdim"), per_token)
    _expect(inputs, "z", sizes, ("batch", "seqlen", "nheads", "headdim"))
    _check_packing(inputs, sizes)


def _check_packing(inputs: SSDInputs, sizes: dict[str, int]) -> None:
    cu_seqlens, seq_idx = inputs.cu_seqlens, inputs.seq_idx
    if cu_seqlens is not None and seq_idx is not None:
        raise ValueError("cu_seqlens and seq_idx are two ways to say the same: give at most one")
    states = {
        name: getattr(inputs, name)
        for name in ("initial_states", "initial_states_rev")
        if getattr(inputs, name) is not None
    }
    rows = "batch"
    if cu_seqlens is not None:
        if sizes["batch"] != 1:
            raise ValueError(
                "cu_seqlens packs sequences into one row: x must have batch 1, "
                f"got batch {sizes['batch']}"
            )
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
            raise ValueError(
                f"cu_seqlens must be (number of sequences + 1,), got {_shape(cu_seqlens)}"
            )
        rows = "number of sequences"
        sizes[rows] = cu_seqlens.shape[0] - 1
    if seq_idx is not None:
        _expect(inputs, "seq_idx", sizes, ("batch", "seqlen"))
        for name in states:
            _refuse_states_with_seq_idx(name)
    for name in states:
        _expect(inputs, name, sizes, (rows, "nheads", "headdim", "d_state"))


def _refuse_states_with_seq_idx(name: str) -> None:
    raise ValueError(
        f"{name} cannot go with seq_idx: the number of sequences would have to be read from the "
        "device. Use cu_seqlens"
    )


def check_mask(inputs: SSDInputs, mask: Any) -> None:
    """``mask`` is (batch, seqlen), bool, beside x."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask must be a tensor, got {type(mask).__name__}")
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must have dtype bool, got {str(mask.dtype).removeprefix('torch.')}")
    if mask.device != inputs.x.device:
        raise ValueError(f"mask is on {mask.device}, but x is on {inputs.x.device}")
    batch, seqlen = inputs.x.shape[:2]
    if mask.shape != (batch, seqlen):
        raise ValueError(f"mask must be (batch {batch}, seqlen {seqlen}), got {_shape(mask)}")


def check_options(inputs: SSDInputs, options: SSDOptions) -> None:
    """The arguments that are not tensors."""
    for name in ("shift", "dt_softplus", "return_final_states"):
        value = getattr(options, name)
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be a bool, got {_kind(value)}")
    chunk_size = options.chunk_size
    if chunk_size is not None:
        if isinstance(chunk_size, bool) or not isinstance(chunk_size, Integral):
            raise TypeError(f"chunk_size must be an int, got {type(chunk_size).__name__}")
        if chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    if options.return_final_states and inputs.seq_idx is not None:
        _refuse_states_with_seq_idx("return_final_states")


def check_dt_limit(dt_limit: Any) -> tuple[float, float]:
    """``dt_limit`` as two floats, 0 <= low <= high."""
    if not isinstance(dt_limit, tuple | list) or len(dt_limit) != 2:
        raise TypeError(f"dt_limit must be a pair (low, high), got {dt_limit!r}")
    low, high = dt_limit
    # float once more, for Real is slow to tell
    if not (isinstance(low, (float, Real)) and isinstance(high, (float, Real))):
        raise TypeError(f"dt_limit must hold two numbers, got {dt_limit!r}")
    low, high = float(low), float(high)
    if not 0 <= low <= high:  # also where one of them is NaN
        raise ValueError(f"dt_limit must satisfy 0 <= low <= high, got ({low}, {high})")
    return low, high


def check_borders(inputs: SSDInputs) -> None:
    """The contents of cu_seqlens, where they lie on the host."""
    borders = inputs.cu_seqlens
    if borders is None or borders.device.type != "cpu":
        return
    seqlen = inputs.x.shape[1]
    if borders[0] < 0 or borders[-1] > seqlen or bool((borders[1:] < borders[:-1]).any()):
        raise ValueError(
            f"cu_seqlens must not decrease and must stay within 0 and seqlen {seqlen}, "
            f"got {borders.tolist() if borders.numel() <= 16 else borders}"
        )


def _expect(inputs: SSDInputs, name: str, sizes: dict[str, int], *layouts: tuple[str, ...]) -> None:
    """Raise unless the argument is absent or has the shape of one of the layouts."""
    tensor = getattr(inputs, name)
    if tensor is None:
        return
    if any(tensor.shape == tuple(sizes[axis] for axis in layout) for layout in layouts):
        return
    wanted = " or ".join(
        "("
        + ", ".join(f"{axis} {sizes[axis]}" for axis in layout)
        + ("," * (len(layout) == 1))
        + ")"
        for layout in layouts
    )
    raise ValueError(f"{name} must be {wanted}, got {_shape(tensor)}")


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _kind(value: Any) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
