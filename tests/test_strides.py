"""Any strides, of inputs and of the gradients that arrive, give what contiguous tensors give."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bounds import assert_within_bound
from cases import CASES, make
from running import run, skip_unsupported


def _garbage(tensor: Tensor, *shape: int) -> Tensor:
    """A buffer around a tensor, whose other elements nobody may use."""
    garbage = torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max
    return torch.full(shape, garbage, dtype=tensor.dtype, device=tensor.device)


def _filled(view: Tensor, tensor: Tensor) -> Tensor:
    view.copy_(tensor)
    return view


def transposed(tensor: Tensor) -> Tensor:
    order = tuple(reversed(range(tensor.dim())))
    return tensor.permute(order).contiguous().permute(order)


def heads_first(tensor: Tensor) -> Tensor:
    """(batch, nheads, seqlen, ...) in memory, as attention code has it."""
    if tensor.dim() < 3:
        return tensor
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def wide_buffer(tensor: Tensor) -> Tensor:
    """As a slice of the last axis, the way x, B and C are cut out of one projection."""
    *leading, last = tensor.shape
    return _filled(_garbage(tensor, *leading, last + 5)[..., 3 : 3 + last], tensor)


def stepped(tensor: Tensor) -> Tensor:
    """Every second element of every axis."""
    buffer = _garbage(tensor, *(2 * size for size in tensor.shape))
    return _filled(buffer[(slice(None, None, 2),) * tensor.dim()], tensor)


def misaligned(tensor: Tensor) -> Tensor:
    """One element after where an allocation begins."""
    return _filled(_garbage(tensor, tensor.numel() + 1)[1:].view(tensor.shape), tensor)


def odd_rows(tensor: Tensor) -> Tensor:
    """Rows of the last axis that no vector load of more than one element can be aligned to."""
    *leading, last = tensor.shape
    return _filled(_garbage(tensor, *leading, last + 1)[..., 1:], tensor)


LAYOUTS = (transposed, heads_first, wide_buffer, stepped, misaligned, odd_rows)
NAMES = ("hydra-shift", "packed-uncovered", "seq_idx-shift")


def with_layout(call, layout):
    lay = {name: layout(tensor) for name, tensor in call.tensors.items()}
    cotangents = {name: layout(tensor) for name, tensor in call.cotangents.items()}
    for name, tensor in call.tensors.items():
        assert torch.equal(lay[name], tensor)
    return replace(call, tensors=lay, cotangents=cotangents)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_any_strides(layout, dtype, name, backend, device):
    call = make(CASES[name], device, dtype)
    skip_unsupported(call, backend)
    assert_within_bound(call, run(with_layout(call, layout), backend))


@pytest.mark.parametrize("name", NAMES)
def test_expanded_gradients(name, backend, device):
    """``y.sum().backward()`` hands over one element with all strides 0."""
    call = make(CASES[name], device, torch.float32)
    skip_unsupported(call, backend)
    ones = {
        name: cotangent.new_ones(()).expand(cotangent.shape)
        for name, cotangent in call.cotangents.items()
    }
    call = replace(call, cotangents=ones)
    assert_within_bound(call, run(call, backend))


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_expanded_inputs(axis, backend, device):
    """One stored value stands for a whole axis; gradients are those of every element."""
    call = make(CASES["hydra-shift"], device, torch.float32)
    skip_unsupported(call, backend)
    expanded = {
        name: tensor.narrow(axis, 0, 1).expand(tensor.shape) if tensor.dim() > 2 else tensor
        for name, tensor in call.tensors.items()
    }
    assert any(0 in tensor.stride() for tensor in expanded.values())
    call = call.with_tensors(**expanded)
    assert_within_bound(call, run(call, backend))
