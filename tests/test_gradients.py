"""Gradients as autograd users meet them: against finite differences, for any loss, used twice."""

from dataclasses import replace
from itertools import chain, combinations

import pytest
import torch

from bounds import assert_within_bound
from cases import CASES, REV_ARGUMENTS, Case, make
from running import evaluate, run, same_bits, skip_unsupported

STATES = {"initial_states": True, "initial_states_rev": True, "return_final_states": True}
TINY = Case("tiny", 1, 5, 2, 2, d_state=2, chunk_size=2)
both_shifts = pytest.mark.parametrize("shift", [False, True], ids=["plain", "shift"])


def case_for(case, backend, device, dtype=torch.float64):
    call = make(case, device, dtype)
    skip_unsupported(call, backend)
    return call


def gradcheck(call, backend, outputs):
    """Compare with finite differences, every output with every input."""
    leaves = {name: t.clone().requires_grad_() for name, t in call.floats.items()}

    def compute(*tensors):
        given = call.with_tensors(**dict(zip(leaves, tensors, strict=True)))
        results = evaluate(given, backend)
        return tuple(results[name] for name in outputs)

    return torch.autograd.gradcheck(compute, tuple(leaves.values()))


@both_shifts
def test_finite_differences(shift, backend, device):
    case = Case("differences", 1, 9, 2, 3, d_state=2, shift=shift, chunk_size=4)
    assert gradcheck(case_for(case, backend, device), backend, ["y"])


@both_shifts
@pytest.mark.parametrize("packing", [None, "cu_seqlens", "seq_idx"])
def test_finite_differences_with_every_argument(packing, shift, backend, device):
    case = replace(
        TINY,
        shift=shift,
        D="token",
        z=True,
        dt_bias=True,
        dt_softplus=True,
        rev=REV_ARGUMENTS,
        cu_seqlens=(0, 2, 2, 5) if packing == "cu_seqlens" else None,
        seq_idx=((1, 1, 0, 1, 1),) if packing == "seq_idx" else None,
        **({} if packing == "seq_idx" else STATES),
    )
    call = case_for(case, backend, device)
    assert gradcheck(call, backend, call.outputs)


@both_shifts
@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_finite_differences_of_one_direction(direction, shift, backend, device):
    states = {"initial_states": True, "return_final_states": True}
    case = replace(TINY, direction=direction, shift=shift, D="head", **states)
    call = case_for(case, backend, device)
    assert gradcheck(call, backend, call.outputs)


@both_shifts
@pytest.mark.parametrize("loss", [["final_states"], ["final_states_rev"], ["y"]], ids=str)
@pytest.mark.parametrize("name", ["hydra", "packed-uncovered"])
def test_loss_of_one_output(name, loss, shift, backend, device):
    """A final state alone has a gradient too; it gives nothing to C, D and z."""
    call = case_for(replace(CASES[name], shift=shift), backend, device, torch.float32)
    call = replace(call, cotangents={output: call.cotangents[output] for output in loss})
    results = run(call, backend)
    assert_within_bound(call, results)
    if loss != ["y"]:
        for argument in ("C", "C_rev", "D", "z"):
            assert torch.all(results[f"grad_{argument}"] == 0), argument
        assert torch.any(results["grad_x"] != 0)


@pytest.mark.parametrize("name", ["hydra-shift", "packed-uncovered", "seq_idx"])
def test_a_graph_can_be_walked_twice(name, backend, device):
    """Gradients double to the last bit: nothing saved was changed, and no sum depends on timing."""
    call = case_for(CASES[name], backend, device, torch.float32)
    leaves = {name: t.clone().requires_grad_() for name, t in call.floats.items()}
    outputs = evaluate(call.with_tensors(**leaves), backend)
    loss = sum((outputs[name] * cotangent).sum() for name, cotangent in call.cotangents.items())
    loss.backward(retain_graph=True)
    once = {name: leaf.grad.clone() for name, leaf in leaves.items()}
    loss.backward()
    for name, leaf in leaves.items():
        assert same_bits(leaf.grad, 2 * once[name]), name


OPTIONAL = ("D", "z", "dt_bias", "initial_states", "initial_states_rev", "cu_seqlens")
SUBSETS = tuple(chain.from_iterable(combinations(OPTIONAL, n) for n in range(len(OPTIONAL) + 1)))


@pytest.mark.parametrize(
    "rev", [(), REV_ARGUMENTS, REV_ARGUMENTS[::2]], ids=["none", "all", "some"]
)
def test_any_arguments_may_be_left_out(rev, backend, device):
    """A gradient for each argument that was given, none for what was not; 64 choices of six."""
    case = Case(
        "optional",
        batch=1,
        seqlen=3,
        headdim=2,
        d_state=2,
        D="channel",
        z=True,
        dt_bias=True,
        dt_softplus=True,
        rev=REV_ARGUMENTS,
        cu_seqlens=(0, 3),  # one sequence, as without it: so the states fit both
        **STATES,
    )
    full = case_for(case, backend, device)
    full = full.with_options(return_final_states=False)
    full = replace(full, cotangents={"y": full.cotangents["y"]})
    assert len(SUBSETS) == 64
    for given in SUBSETS:
        left_out = {*OPTIONAL, *REV_ARGUMENTS} - {*given, *rev}
        call = full.without(*left_out)
        leaves = {name: t.clone().requires_grad_() for name, t in call.floats.items()}
        absent = dict.fromkeys(left_out)
        y = evaluate(call.with_tensors(**leaves, **absent), backend)["y"]
        y.backward(call.cotangents["y"])
        grads = {f"grad_{name}": leaf.grad for name, leaf in leaves.items()}
        assert all(grad is not None for grad in grads.values()), given
        assert_within_bound(call, grads)


def test_only_the_gradients_that_are_asked_for(backend, device):
    call = case_for(replace(TINY, D="head", z=True, rev=REV_ARGUMENTS), backend, device)
    whole = run(call, backend)
    for wanted in call.floats:
        leaves = {name: t.clone() for name, t in call.floats.items()}
        leaves[wanted].requires_grad_()
        y = evaluate(call.with_tensors(**leaves), backend)["y"]
        y.backward(call.cotangents["y"])
        for name, leaf in leaves.items():
            assert (leaf.grad is None) == (name != wanted), f"{name}, asked for {wanted}"
        assert same_bits(leaves[wanted].grad, whole[f"grad_{wanted}"]), wanted


def test_the_clamp_passes_at_its_limits_and_between(backend, device):
    """Like torch.clamp."""
    call = case_for(
        Case("clamp", 1, 5, 1, 1, d_state=1, dt_limit=(0.25, 0.75)), backend, device, torch.float32
    )
    dt = torch.tensor([0.125, 0.25, 0.5, 0.75, 1.0], device=device).view(1, 5, 1)
    call = call.with_tensors(dt=dt)
    results = run(call, backend)
    assert (results["grad_dt"].flatten() != 0).tolist() == [False, True, True, True, False]
    assert_within_bound(call, results)
