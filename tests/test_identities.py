"""What must hold between calls, whatever the numbers are.

Two results that should be equal are each within one bound of the truth, so within two of each
other; where a side is the sum of two results, within 1 + √2.
"""

from dataclasses import replace

import pytest
import torch

from bounds import assert_within_bound
from cases import CASES, REV_ARGUMENTS, Call, Case, make
from oracle import sequences
from running import differentiate, evaluate, run, skip_unsupported

# float64 where a backend has it, and float32 for those that do not.
both_dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
PER_TOKEN = ("x", "z", "y", "dt", "B", "C")
LONG = CASES["seqlen-130"]


def call_for(case, dtype, backend, device) -> Call:
    call = make(case, device, dtype)
    skip_unsupported(call, backend)
    return call


@both_dtypes
@pytest.mark.parametrize(
    "name", ["hydra", "hydra-shift", "packed-uncovered", "packed-uncovered-shift", "ssd-forward"]
)
def test_flipping_time_swaps_the_directions(name, dtype, backend, device):
    call = call_for(CASES[name], dtype, backend, device)
    flipped = mirrored(call)
    results = mirrored_results(flipped, run(flipped, backend))
    assert_within_bound(call, results, exact=run(call, backend), factor=2)


def mirrored(call: Call) -> Call:
    """The call on the reversed sequence, with each side's arguments given to the other side."""
    tensors = mirrored_results(call, call.tensors)
    if "cu_seqlens" in tensors:
        tensors["cu_seqlens"] = call.tensors["x"].shape[1] - tensors["cu_seqlens"].flip(0)
    direction = {"forward": "reverse", "reverse": "forward", "both": "both"}[call.direction]
    return Call(direction, tensors, call.options, mirrored_results(call, call.cotangents))


def mirrored_results(call, tensors):
    return dict(mirror(call, name, tensor) for name, tensor in tensors.items())


def mirror(call, name, tensor):
    bare = name.removeprefix("grad_").removesuffix("_rev")
    per_token = bare in PER_TOKEN or (bare == "D" and tensor.dim() == 3)
    if per_token:
        tensor = tensor.flip(1)
    elif bare in ("initial_states", "final_states") and "cu_seqlens" in call.tensors:
        tensor = tensor.flip(0)  # the sequences come in the opposite order
    has_twin = bare in ("dt", "A", "B", "C", "dt_bias", "initial_states", "final_states")
    if call.direction == "both" and has_twin:
        name = name.removesuffix("_rev") if name.endswith("_rev") else name + "_rev"
    return name, tensor


@both_dtypes
@pytest.mark.parametrize("shift", [False, True])
def test_linear_in_x(shift, dtype, backend, device):
    case = replace(LONG, shift=shift, D="channel", z=True, rev=("B_rev", "dt_rev"))
    call = call_for(case, dtype, backend, device)
    x = call.tensors["x"]
    y = evaluate(call, backend)["y"]
    tripled = evaluate(call.with_tensors(x=3 * x), backend)["y"]
    assert_within_bound(call, {"y": tripled / 3}, exact={"y": y}, factor=2)
    # Parts that do not overlap: then the terms of the parts are the terms of the whole.
    kept = torch.rand_like(x) < 0.5
    parts = [evaluate(call.with_tensors(x=x * keep), backend)["y"] for keep in (kept, ~kept)]
    assert_within_bound(call, {"y": sum(parts)}, exact={"y": y}, factor=1 + 2**0.5)


@both_dtypes
@pytest.mark.parametrize("name", ["hydra", "hydra-shift", "packed-states", "seq_idx-shift"])
def test_chunk_size_is_only_a_hint(name, dtype, backend, device):
    call = call_for(CASES[name], dtype, backend, device)
    plain = run(call, backend)
    for chunk_size in (1, 5, 64, 1000):
        hinted = run(call.with_options(chunk_size=chunk_size), backend)
        assert_within_bound(call, hinted, exact=plain, factor=2)


@both_dtypes
@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("name", ["states", "packed-states", "seq_idx"])
def test_shift_moves_the_output_along_its_direction(name, direction, dtype, backend, device):
    case = replace(CASES[name], direction=direction, D=None, z=False, initial_states_rev=False)
    call = call_for(case, dtype, backend, device)
    plain = evaluate(call, backend)
    shifted = evaluate(call.with_options(shift=True), backend)
    step = -1 if direction == "reverse" else 1
    sequence = sequences(call)
    same = sequence.roll(step, 1) == sequence
    same[:, -1 if direction == "reverse" else 0] = False
    moved = torch.where(same[..., None, None], plain["y"].roll(step, 1), 0)
    assert torch.all(shifted["y"][~same] == 0)
    assert_within_bound(call, shifted, exact={**plain, "y": moved}, factor=2)


@both_dtypes
@pytest.mark.parametrize("name", ["hydra", "hydra-shift", "states-shift", "packed-states"])
def test_both_directions_are_the_sum_of_each(name, dtype, backend, device):
    """Before D and z, with their gradients: those of shared arguments add up."""
    call = call_for(CASES[name], dtype, backend, device).without("D", "z")
    results = [run(one_direction(call, *side), backend) for side in call.sides]
    totals = {}
    for (suffix, _), result in zip(call.sides, results, strict=True):
        for name, value in result.items():
            total = belongs_to(call, name, suffix)
            totals[total] = totals.get(total, 0) + value
    assert_within_bound(call, run(call, backend), exact=totals, factor=1 + 2**0.5)


def one_direction(call: Call, suffix: str, reverse: bool) -> Call:
    names = ("dt", "A", "B", "C", "dt_bias", "initial_states")
    tensors = {name: t for name, t in call.tensors.items() if name in ("x", "cu_seqlens")}
    for name in names:
        read = belongs_to(call, name, suffix)
        if read in call.tensors:
            tensors[name] = call.tensors[read]
    cotangents = {"y": call.cotangents["y"]}
    cotangents["final_states"] = call.cotangents["final_states" + suffix]
    return Call("reverse" if reverse else "forward", tensors, call.options, cotangents)


def belongs_to(call: Call, name: str, suffix: str) -> str:
    """The name that a side's argument, gradient or final state has in the call of both."""
    prefix, bare = ("grad_", name[5:]) if name.startswith("grad_") else ("", name)
    if bare in ("initial_states", "final_states"):
        return prefix + bare + suffix
    return prefix + (call.argument(bare, suffix) or bare)


@both_dtypes
@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("split", [1, 14, 64, 129])
def test_chained_states_are_the_unsplit_sequence(split, shift, direction, dtype, backend, device):
    """With gradients through the state: the first part feels the loss of the second."""
    case = replace(
        LONG, direction=direction, shift=shift, initial_states=True, return_final_states=True
    )
    call = call_for(case, dtype, backend, device)
    if shift:
        # Each part begins with a row of zero; in the whole that row is what the state gives.
        missing = split if direction == "forward" else split - 1
        y = call.cotangents["y"].clone()
        y[:, missing] = 0
        call = replace(call, cotangents={**call.cotangents, "y": y})
    whole = run(call, backend)
    chained = differentiate(call, lambda given: chain(given, split, backend))
    if shift:
        assert torch.all(chained["y"][:, missing] == 0)
        assert torch.any(whole["y"][:, missing] != 0)
        whole["y"][:, missing] = 0
    assert_within_bound(call, chained, exact=whole, factor=2)


def chain(call: Call, split: int, backend: str):
    spans = [slice(None, split), slice(split, None)]
    if call.direction == "reverse":
        spans.reverse()
    state, y = call.tensors["initial_states"], []
    for span in spans:
        tokens = {name: call.tensors[name][:, span] for name in ("x", "dt", "B", "C")}
        outputs = evaluate(call.with_tensors(**tokens, initial_states=state), backend)
        y.append(outputs["y"])
        state = outputs["final_states"]
    if call.direction == "reverse":
        y.reverse()
    return {"y": torch.cat(y, 1), "final_states": state}


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_gradient_of_the_decay_from_those_of_B_and_C(direction, shift, backend, device):
    """An exact identity that no backend computes with, as it cancels: here to 1e-10 of the terms.

    A state's gradient reaches B and C with the factors that it reaches the decays with.
    """
    reverse = direction == "reverse"
    case = Case(
        "decay",
        ngroups=2,
        direction=direction,
        shift=shift,
        initial_states=True,
        return_final_states=True,
    )
    call = call_for(case, torch.float64, backend, device)
    t, results = call.tensors, run(call, backend)
    rows = (results["grad_C"] * t["C"]).sum(-1)
    columns = (results["grad_B"] * t["B"]).sum(-1)
    if reverse:
        later = (columns - rows).flip(1).cumsum(1).flip(1)
        across = t["initial_states"] * results["grad_initial_states"]
        da = torch.cat([later[:, 1:], torch.zeros_like(later[:, :1])], 1)
    else:
        across = results["final_states"] * call.cotangents["final_states"]
        da = (rows - columns).flip(1).cumsum(1).flip(1)
    da = da + across.sum((-2, -1))[:, None]
    dv_x = (results["grad_x"] * t["x"]).sum(-1) / t["dt"]
    exact = {"grad_dt": dv_x + t["A"] * da, "grad_A": (t["dt"] * da).sum((0, 1))}
    assert_within_bound(call, {name: results[name] for name in exact}, exact=exact, factor=100)


def test_every_rev_argument_is_mirrored():
    call = make(CASES["hydra"], torch.device("cpu"), torch.float64)
    assert {mirror(call, name, call.tensors[name])[0] for name in REV_ARGUMENTS} == {
        name.removesuffix("_rev") for name in REV_ARGUMENTS
    }
