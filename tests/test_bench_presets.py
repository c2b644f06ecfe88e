"""The presets of the benchmarks, and the tensors that are drawn for them."""

import pytest
import torch

import polyscan
from polyscan.bench.operations import BOTH
from polyscan.bench.precision import DTYPES, PRECISIONS, products_in
from polyscan.bench.presets import (
    PRESETS,
    VARIANTS,
    Case,
    Preset,
    cu_seqlens,
    find,
    for_device,
    tensors,
)

SMALL = Preset("small", 2, 5, 4, 3, 6, ngroups=2)


def test_the_two_devices_have_presets_of_their_own():
    for device in ("cpu", "cuda"):
        chosen = for_device(torch.device(device))
        assert chosen and {preset.device for preset in chosen} == {device}


@pytest.mark.parametrize("preset", PRESETS.values(), ids=lambda preset: preset.name)
def test_sizes_go_together(preset):
    assert preset.nheads % preset.ngroups == 0
    assert set(preset.precisions) <= set(PRECISIONS)
    if preset.lengths is not None:
        assert preset.batch == 1 and sum(preset.lengths) == preset.seqlen
        assert min(preset.lengths) > 0


def test_packed_holds_lengths_of_all_sizes():
    lengths = PRESETS["packed"].lengths
    assert min(lengths) == 100 and max(lengths) == 1500
    assert len(set(lengths)) > 10


def test_patterns_name_presets_in_their_order():
    assert [preset.name for preset in find(["tiny", "edge[01]"])] == ["edge0", "edge1", "tiny"]
    with pytest.raises(ValueError, match="no preset is called 'edge9'"):
        find(["lm", "edge9"])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_case_is_a_valid_call(variant, precision):
    task = BOTH.task(Case(SMALL, variant, precision), "cpu")
    why = polyscan.explain(**task.leaves, **task.options)
    assert why.backend is not None
    for name in ("x", "dt", "B", "C"):
        assert task.leaves[name].dtype == DTYPES[precision]
    for name in ("A", "dt_bias"):
        assert task.leaves[name].dtype == torch.float32
    assert task.options["shift"] == (variant == "hydra")
    assert ("B_rev" in task.leaves) == (variant == "hydra")
    assert "A_rev" not in task.leaves


def test_numbers_are_the_same_every_time_and_differ_from_each_other():
    case = Case(SMALL, "hydra", "float32")
    first, second = tensors(case, "cpu"), tensors(case, "cpu")
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["B"], first["B_rev"])
    assert first["A"].max() < 0 and first["A"].min() >= -1


def test_borders_of_packed_sequences():
    preset = Preset("packed", 1, 9, 1, 1, 1, lengths=(4, 0, 5))
    assert cu_seqlens(preset, "cpu").tolist() == [0, 4, 4, 9]
    assert cu_seqlens(SMALL, "cpu") is None
    task = BOTH.task(Case(preset, "sum", "float32"), "cpu")
    assert task.options["cu_seqlens"].tolist() == [0, 4, 4, 9]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_precision_is_set_and_put_back(precision):
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    with products_in(precision):
        assert matmul.fp32_precision == ("tf32" if precision == "tf32" else "ieee")
    assert matmul.fp32_precision == before
