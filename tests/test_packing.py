"""Packed sequences are computed exactly as if each ran alone, and nothing else is touched."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from bounds import assert_within_bound
from cases import CASES, Call, Case, make, packed, repeated
from running import evaluate, run, same_bits, skip_unsupported

TOKENS = ("x", "dt", "B", "C", "z", "y", "dt_rev", "B_rev", "C_rev")
STATES = {"initial_states": True, "initial_states_rev": True, "return_final_states": True}
LENGTHS = {
    "ragged": (1, 2, 63, 64, 65, 1),
    "chunk-borders": (15, 16, 17, 31, 32, 33),
    "short": (1, 2, 3, 4) * 8,
    "ones": (1,) * 20,
    "empty": (0, 0, 5, 0, 4, 0),
}
every_lengths = pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
both_shifts = pytest.mark.parametrize("shift", [False, True], ids=["plain", "shift"])


def packed_case(lengths, **options) -> Case:
    borders = packed(*lengths)
    return Case("packed", 1, borders[-1], cu_seqlens=borders, rev=("B_rev", "dt_rev"), **options)


def is_per_token(name, tensor):
    bare = name.removeprefix("grad_")
    return bare in TOKENS or (bare == "D" and tensor.dim() == 3)


def alone(call: Call, index: int, start: int, stop: int) -> Call:
    """The call of one of the sequences."""

    def piece(tensors):
        return slices(tensors, index, start, stop, state_rows=slice(index, index + 1))

    return replace(
        call.without("cu_seqlens"),
        tensors=piece(call.without("cu_seqlens").tensors),
        cotangents=piece(call.cotangents),
    )


def slices(tensors, index, start, stop, state_rows):
    cut = {}
    for name, tensor in tensors.items():
        if is_per_token(name, tensor):
            cut[name] = tensor[:, start:stop]
        else:
            cut[name] = tensor[state_rows] if "states" in name else tensor
    return cut


@every_lengths
@both_shifts
@pytest.mark.parametrize("states", [False, True], ids=["", "states"])
def test_packed_is_each_alone(lengths, shift, states, backend, device):
    """One sequence's numbers are 1000 times the others', so that a leak shows in the small ones."""
    case = packed_case(lengths, shift=shift, D="token", **(STATES if states else {}))
    call = make(case, device, torch.float32)
    skip_unsupported(call, backend)
    borders = list(enumerate(pairwise(case.cu_seqlens)))
    x = call.tensors["x"].clone()
    x[:, slice(*max(pairwise(case.cu_seqlens), key=lambda ends: ends[1] - ends[0]))] *= 1000
    call = call.with_tensors(x=x)
    results = run(call, backend)
    own = {n: t for n, t in results.items() if is_per_token(n, t) or "states" in n}
    for index, (start, stop) in borders:
        part = slices(own, index, start, stop, state_rows=slice(index, index + 1))
        assert_within_bound(alone(call, index, start, stop), part)
    assert_within_bound(call, results)  # the gradients that sum over the sequences


@every_lengths
@both_shifts
def test_seq_idx_is_cu_seqlens(lengths, shift, backend, device):
    call = make(packed_case(lengths, shift=shift, D="head"), device, torch.float32)
    skip_unsupported(call, backend)
    results = run(with_ids(call, lengths, torch.int32), backend)
    assert_within_bound(call, results, exact=run(call, backend), factor=2)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int64], ids=str)
def test_any_integers_for_seq_idx(dtype, backend, device):
    lengths = LENGTHS["empty"]
    call = make(packed_case(lengths, shift=True), device, torch.float32)
    skip_unsupported(call, backend)
    wanted = run(with_ids(call, lengths, torch.int32), backend)
    for name, value in run(with_ids(call, lengths, dtype), backend).items():
        assert same_bits(value, wanted[name]), name


def with_ids(call: Call, lengths, dtype) -> Call:
    """The same packing by seq_idx, with ids that return and are negative: only changes count."""
    first = 0 if dtype == torch.uint8 else -1
    runs = enumerate(filter(None, lengths))
    ids = repeated(*((first + i % 2, length) for i, length in runs))
    seq_idx = torch.tensor([ids], dtype=dtype, device=call.tensors["x"].device)
    return call.without("cu_seqlens").with_tensors(seq_idx=seq_idx)


def test_both_integers_for_cu_seqlens(backend, device):
    call = make(CASES["packed-uncovered-shift"], device, torch.float32)
    skip_unsupported(call, backend)
    results = run(call, backend)
    wide = run(call.with_tensors(cu_seqlens=call.tensors["cu_seqlens"].long()), backend)
    for name, value in results.items():
        assert same_bits(wide[name], value), name


@both_shifts
def test_rows_of_a_batch_have_their_own_borders(shift, backend, device):
    case = replace(CASES["seq_idx"], shift=shift)
    call = make(case, device, torch.float32)
    skip_unsupported(call, backend)
    y = evaluate(call, backend)["y"]
    for row in range(case.batch):
        tensors = {
            name: tensor[row : row + 1] if tensor.dim() > 1 else tensor
            for name, tensor in call.tensors.items()
        }
        single = replace(
            call, tensors=tensors, cotangents={"y": call.cotangents["y"][row : row + 1]}
        )
        assert_within_bound(single, {"y": y[row : row + 1]})


@both_shifts
def test_an_empty_sequence_hands_its_state_on(shift, backend, device):
    call = make(packed_case((0, 5, 0, 4), shift=shift, **STATES), device, torch.float32)
    skip_unsupported(call, backend)
    results = run(call, backend)
    for suffix in ("", "_rev"):
        for empty in (0, 2):
            given = call.tensors["initial_states" + suffix][empty]
            assert torch.equal(results["final_states" + suffix][empty], given)
            wanted = call.cotangents["final_states" + suffix][empty]
            assert torch.equal(results["grad_initial_states" + suffix][empty], wanted)


@pytest.mark.parametrize("garbage", [1e4, torch.inf, torch.nan], ids=str)
@pytest.mark.parametrize("name", ["packed-uncovered", "packed-uncovered-shift"])
def test_rows_outside_every_sequence_do_not_exist(name, garbage, backend, device):
    """They are zero in y and in every gradient, whatever is in them, and give nothing to others."""
    clean = make(CASES[name], device, torch.float32)
    skip_unsupported(clean, backend)
    start, *_, stop = CASES[name].cu_seqlens
    outside = torch.ones(CASES[name].seqlen, dtype=torch.bool, device=device)
    outside[start:stop] = False

    def spoil(tensors):
        return {
            name: tensor.masked_fill(outside.view(1, -1, *[1] * (tensor.dim() - 2)), garbage)
            if is_per_token(name, tensor)
            else tensor
            for name, tensor in tensors.items()
        }

    call = replace(clean, tensors=spoil(clean.tensors), cotangents=spoil(clean.cotangents))
    results = run(call, backend)
    for name, value in results.items():
        if is_per_token(name, value):
            assert torch.all(value[:, outside] == 0), name
    assert_within_bound(clean, results)
