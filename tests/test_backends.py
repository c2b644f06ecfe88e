"""Every backend on every case in every dtype: outputs and all gradients within the bound."""

from itertools import product

import pytest
import torch

from bounds import assert_within_bound
from cases import CASES, DTYPES, Dtypes, make
from running import describe, run, same_bits, skip_unsupported

f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64

MIXES = (
    # As under autocast: what comes out of a linear layer is narrow, parameters are wide.
    Dtypes("narrow-activations", f32, dict.fromkeys(("x", "dt", "B", "C", "z"), bf16)),
    Dtypes("narrow-x", f32, {"x": bf16}),
    Dtypes("narrow-x-wide-z", bf16, {"z": f32}),
    Dtypes("narrow-dt", f32, {"dt": bf16, "dt_rev": f16}),
    Dtypes("narrow-parameters", f32, dict.fromkeys(("A", "D", "dt_bias"), bf16)),
    Dtypes("narrow-states", f32, dict.fromkeys(("initial_states", "initial_states_rev"), bf16)),
    Dtypes("wide-states", bf16, dict.fromkeys(("initial_states", "initial_states_rev"), f32)),
    Dtypes("half-and-bfloat", f16, {"B": bf16}),
    Dtypes("half-x", bf16, {"x": f16}),
    Dtypes("double-x", f32, {"x": f64}),
    Dtypes("double-B", f32, {"B": f64}),
    Dtypes("half-with-double-parameters", f16, {"A": f64, "dt": f64}),
)
# x, dt, B and C in bfloat16 or float32, all sixteen combinations
SIXTEEN = tuple(
    Dtypes("-".join(str(dtype).removeprefix("torch.") for dtype in dtypes), f32, overrides)
    for dtypes in product((f32, bf16), repeat=4)
    for overrides in [dict(zip(("x", "dt", "B", "C"), dtypes, strict=True))]
)


def assert_right(call, backend):
    """Within the bound, and in the dtypes and shapes that were promised."""
    results = run(call, backend)
    _, problem = describe(call)
    assert results["y"].dtype == call.tensors["x"].dtype
    for name in call.outputs[1:]:
        assert results[name].dtype == problem.accumulation_dtype
    assert {name for name in results if name.startswith("grad_")} == {
        f"grad_{name}" for name in call.floats
    }
    assert_within_bound(call, results)


@pytest.mark.parametrize("case", CASES.values(), ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_case(case, dtype, backend, device):
    call = make(case, device, dtype)
    skip_unsupported(call, backend)
    assert_right(call, backend)


@pytest.mark.parametrize("name", ["hydra-shift", "packed-uncovered", "ssd-reverse"])
@pytest.mark.parametrize("dtypes", MIXES, ids=str)
def test_mixed_dtypes(name, dtypes, backend, device):
    call = make(CASES[name], device, dtypes)
    skip_unsupported(call, backend)
    assert_right(call, backend)


@pytest.mark.parametrize("dtypes", SIXTEEN, ids=str)
def test_sixteen_mixes_with_and_without_autocast(dtypes, backend, device):
    call = make(CASES["seqlen-17-shift"], device, dtypes)
    skip_unsupported(call, backend)
    assert_right(call, backend)
    plain = run(call, backend)
    with torch.autocast(device.type, torch.bfloat16):
        autocast = run(call, backend)
    for name, value in plain.items():
        assert autocast[name].dtype == value.dtype, name
        assert same_bits(autocast[name], value), name


def test_tf32_only_where_it_is_allowed(backend, device, monkeypatch):
    if device.type != "cuda":
        pytest.skip("TF32 exists on NVIDIA GPUs only")
    call = make(CASES["seqlen-130"], device, torch.float32)
    skip_unsupported(call, backend)
    assert_right(call, backend)
    monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32")
    assert_right(call, backend)
