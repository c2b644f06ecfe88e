"""The bound itself: what it must never let pass."""

import pytest
import torch

from bounds import SIXTEEN_BITS, assert_within_bound
from cases import CASES, DTYPES, Case, make
from oracle import expected, straightforward

CPU = torch.device("cpu")


def results(call, dtype):
    return {name: value.to(dtype, copy=True) for name, value in expected(call).exact.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exact_values_pass_once_rounded(dtype):
    call = make(CASES["hydra-shift"], CPU, dtype)
    assert_within_bound(call, results(call, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_one_nan_or_infinity_never_passes(bad, dtype):
    call = make(CASES["hydra-shift"], CPU, dtype)
    for name, value in results(call, dtype).items():
        value[(0,) * value.dim()] = bad
        with pytest.raises(AssertionError, match=name):
            assert_within_bound(call, {name: value})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_error_of_one_percent_never_passes(dtype):
    call = make(CASES["seqlen-130"], CPU, dtype)
    absolute = expected(call).absolute
    for name, value in expected(call).exact.items():
        off = (value + 0.01 * absolute[name].norm() / value.numel() ** 0.5).to(dtype)
        with pytest.raises(AssertionError, match=name):
            assert_within_bound(call, {name: off})


def test_zero_must_be_zero():
    """One token under the shift: y is exactly 0, and so is its gradient for C."""
    call = make(Case("one", 1, 1, shift=True), CPU, torch.float32)
    zero = torch.zeros_like(call.tensors["x"])
    assert_within_bound(call, {"y": zero})
    with pytest.raises(AssertionError, match="y"):
        assert_within_bound(call, {"y": zero + 1e-30})


def test_shapes_must_agree():
    call = make(CASES["states"], CPU, torch.float32)
    y = results(call, torch.float32)["y"]
    with pytest.raises(AssertionError, match="instead of"):
        assert_within_bound(call, {"y": y[:, :1]})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits_are_held_to_plain_torch(dtype):
    """Three times its error does not pass, nor anything beyond the limit."""
    call = make(CASES["hydra"], CPU, dtype)
    exact = expected(call).exact["y"]
    plain = straightforward(call)["y"].double() - exact
    assert_within_bound(call, {"y": exact + 1.9 * plain})
    with pytest.raises(AssertionError, match="y"):
        assert_within_bound(call, {"y": (exact + 3 * plain).to(torch.float64)})
    scale = max(exact.norm(), expected(call).absolute["y"].norm())
    assert 2 * plain.norm() <= SIXTEEN_BITS * scale


def test_terms_that_cancel_do_not_shrink_the_scale():
    """ddt = dv·x + A da: with A < 0 the two may cancel to nothing, but not in the scale."""
    call = make(CASES["seqlen-130"], CPU, torch.float64)
    exact, absolute = expected(call)
    for name, value in exact.items():
        assert torch.all(value.abs() <= absolute[name] * (1 + 1e-12)), name
    assert torch.all(absolute["grad_dt"] > 0)
