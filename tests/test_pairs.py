"""Backend objects on their own: every forward with every backward, and what they promise.

Autograd casts a gradient to its argument's dtype without a word, so dtypes are checked here.
"""

import pytest
import torch

from bounds import assert_within_bound
from cases import CASES, DTYPES, Dtypes, make
from running import describe, run_pair, skip_unsupported

PAIRED = ("hydra", "hydra-shift", "z", "packed-uncovered-shift", "seq_idx-shift", "ssd-reverse")
MIXED = Dtypes(
    "mixed",
    torch.float32,
    {"x": torch.bfloat16, "dt_rev": torch.float16, "A": torch.bfloat16, "z": torch.float16},
)


@pytest.mark.parametrize("name", PAIRED)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, MIXED], ids=str)
def test_every_forward_with_every_backward(name, dtype, backend, backward_backend, device):
    call = make(CASES[name], device, dtype)
    skip_unsupported(call, backend, backward_backend)
    assert_within_bound(call, run_pair(call, backend, backward_backend))


@pytest.mark.parametrize("name", ["hydra-shift", "packed-uncovered"])
@pytest.mark.parametrize("dtype", [*DTYPES, MIXED], ids=str)
def test_what_a_backend_returns(name, dtype, backend, device):
    call = make(CASES[name], device, dtype)
    skip_unsupported(call, backend)
    inputs, problem = describe(call)
    results = run_pair(call, backend, backend)
    arguments = {f"grad_{name}": tensor for name, tensor in call.floats.items()}
    for name, wanted in {"y": inputs.x, **arguments}.items():
        assert (results[name].shape, results[name].dtype) == (wanted.shape, wanted.dtype), name
    for name, result in results.items():
        assert result.is_contiguous(), name
        assert not any(_share_memory(result, t) for t in call.tensors.values()), name
        assert not result.requires_grad, name
    for name in call.outputs[1:]:
        assert results[name].dtype == problem.accumulation_dtype, name


def _share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.numel() > 0 and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
