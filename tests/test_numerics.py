"""Faults of rounding and range that users of such libraries have met."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

import polyscan
from bounds import assert_within_bound
from cases import CASES, REV_ARGUMENTS, Call, Case, make
from running import evaluate, run, skip_unsupported

both_shifts = pytest.mark.parametrize("shift", [False, True], ids=["plain", "shift"])


def single(device, dtype=torch.float32, **rows) -> Call:
    """One head, one channel, one state; every argument 1 but those given, a list of tokens each."""
    seqlen = max(len(row) for row in rows.values())
    case = Case("single", 1, seqlen, 1, 1, d_state=1)
    call = make(case, device, dtype)
    filled = {name: torch.ones_like(tensor) for name, tensor in call.floats.items()}
    filled["A"] = -filled["A"]
    for name, row in rows.items():
        filled[name] = torch.tensor(row, dtype=dtype, device=device).view(filled[name].shape)
    return call.with_tensors(**filled)


def test_a_sum_of_decays_is_no_difference_of_larger_sums(backend, device):
    """Suffix = total - prefix would leave exponents in steps of 1/32 here."""
    x = [0.0] * 63 + [1.0]
    call = single(device, x=x, dt=[1e4] * 32 + [1e-3] * 32)
    skip_unsupported(call, backend)
    y = evaluate(call, backend)["y"].flatten()
    # The reverse direction decays over the tokens 40 to 62; the forward one has not come to x yet.
    assert y[40].item() == pytest.approx(math.exp(-0.023) * 1e-3, rel=1e-5)


@both_shifts
@pytest.mark.parametrize("place", [0, 31, 70, 127])
def test_one_huge_decay_costs_the_others_nothing(place, shift, backend, device):
    """Exponents of -1e6 and of -0.01 in one sum: float32 has no digits left for the second."""
    case = Case("huge", 1, 128, 2, 4, shift=shift, rev=REV_ARGUMENTS[:-1])
    call = make(case, device, torch.float32)
    skip_unsupported(call, backend)
    tensors = {}
    for suffix in ("", "_rev"):
        tensors["dt" + suffix] = torch.full_like(call.tensors["dt"], 0.01)
        tensors["dt" + suffix][:, place] = 1e6
        tensors["A" + suffix] = -torch.ones_like(call.tensors["A"])
    # With its own x it would be all there is to see in a norm.
    tensors["x"] = call.tensors["x"].clone()
    tensors["x"][:, place] = 0
    call = call.with_tensors(**tensors)
    results = run(call, backend)
    assert_within_bound(call, {"y": results["y"]})
    assert all(torch.all(torch.isfinite(result)) for result in results.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_softplus_keeps_small_steps_and_large_ones(dtype, backend, device):
    """log(1 + exp(-20)) is 2e-9, not 0, and of 200 it is 200, not inf."""
    call = single(device, dtype, dt=[-20.0], x=[1e4]).with_options(dt_softplus=True)
    skip_unsupported(call, backend)
    rounding = 2 * torch.finfo(dtype).eps
    results = run(call, backend)
    small = math.log1p(math.exp(-20))
    assert results["y"].item() == pytest.approx(2 * small * 1e4, rel=rounding)
    # dt enters v of both directions, with the cotangent that was drawn.
    slope = 2e4 * call.cotangents["y"].item() / (1 + math.exp(20))
    assert results["grad_dt"].item() == pytest.approx(slope, rel=rounding)
    call = call.with_tensors(dt=torch.full_like(call.tensors["dt"], 200.0))
    call = call.with_tensors(x=torch.ones_like(call.tensors["x"]))
    assert evaluate(call, backend)["y"].item() == 400


@both_shifts
def test_rows_past_the_end_add_nothing(shift, backend, device):
    """With a bias, a row that only fills up a chunk would have a step size of softplus(3)."""
    case = Case("tail", 1, 65, shift=shift, dt_bias=True, dt_softplus=True, chunk_size=64)
    call = make(case, device, torch.float32)
    skip_unsupported(call, backend)
    call = call.with_tensors(dt_bias=torch.full_like(call.tensors["dt_bias"], 3.0))
    assert_within_bound(call, run(call, backend))


@both_shifts
def test_packed_float32_differs_from_alone_by_rounding_only(shift, backend, device):
    case = Case("packed", 1, 700, 2, 8, d_state=8, shift=shift, cu_seqlens=(0, 300, 700))
    call = make(case, device, torch.float32)
    skip_unsupported(call, backend)
    y = evaluate(call, backend)["y"]
    for start, stop in ((0, 300), (300, 700)):
        part = {name: call.tensors[name][:, start:stop] for name in ("x", "dt", "B", "C")}
        alone = evaluate(call.without("cu_seqlens").with_tensors(**part), backend)["y"]
        difference = (y[:, start:stop] - alone).abs().max()
        assert difference <= 1e-5 * alone.abs().max()


@both_shifts
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradient_of_the_decay_does_not_cancel(dtype, shift, backend, device):
    """The shorter formula dC·C - dB·B loses all digits over long sequences with strong decay."""
    case = Case("strong", 1, 1024, 1, 4, shift=shift, dt_softplus=True)
    call = make(case, device, dtype)
    skip_unsupported(call, backend)
    call = call.with_tensors(A=torch.full_like(call.tensors["A"], -16.0))
    assert_within_bound(call, run(call, backend))


def test_a_deep_stack_has_the_gradient_of_float32(backend, device):
    """24 layers in bfloat16: the gradient's norm within 2 % of the recurrence's in float32."""
    case = Case("stack", 1, 96, 2, 8, d_state=8, dt_softplus=True, shift=True)
    call = make(case, device, torch.bfloat16)
    skip_unsupported(call, backend)
    call = call.with_tensors(A=torch.tensor([-1.0, -16.0], device=device))

    def gradient(dtype, name):
        tensors = {key: t.to(dtype, copy=True) for key, t in call.tensors.items()}
        tensors["A"] = call.tensors["A"]
        leaf = y = tensors.pop("x").requires_grad_()
        for layer in range(24):
            # Other numbers in every layer, from the same few tensors.
            rolled = {key: t.roll(layer, -1) for key, t in tensors.items()}
            y = F.rms_norm(y, y.shape[-1:])
            y = y + polyscan.bidi_ssd(y, **rolled, dt_softplus=True, shift=True, backend=name)
        (y * call.cotangents["y"].to(dtype)).sum().backward()
        return leaf.grad.double().norm()

    norm = gradient(torch.bfloat16, backend)
    assert torch.isfinite(norm)
    assert norm.item() == pytest.approx(gradient(torch.float32, "reference").item(), rel=0.02)


@both_shifts
def test_states_of_another_dtype_than_x(shift, backend, device):
    """Final states are float32 whatever came in."""
    for x_dtype, state_dtype in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        call = make(replace(CASES["states"], shift=shift), device, x_dtype)
        names = ("initial_states", "initial_states_rev")
        call = call.with_tensors(**{name: call.tensors[name].to(state_dtype) for name in names})
        skip_unsupported(call, backend)
        results = run(call, backend)
        assert results["final_states"].dtype == torch.float32
        assert results["grad_initial_states"].dtype == state_dtype
        assert_within_bound(call, results)
