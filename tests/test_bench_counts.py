"""The floors: bytes against real tensors, the rest against sums written out; and NOTES.md."""

import re
from pathlib import Path

import pytest
import torch

from polyscan.bench.counts import floor
from polyscan.bench.operations import ATTENTION, BOTH, CAUSAL
from polyscan.bench.presets import PASSES, PRESETS, VARIANTS, Case, Preset
from polyscan.bench.verify import results

NOTES = Path(__file__).resolve().parent.parent / "benchmarks" / "NOTES.md"
ROW = re.compile(r"^\| `([\w-]+)` \| (sum|hydra) \| (forward|backward) \|(.*)\|$", re.MULTILINE)
SMALL = Preset("small", 2, 5, 4, 3, 2, ngroups=2)


def nbytes(*tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("variant", VARIANTS)
def test_bytes_are_those_of_arguments_and_results(variant):
    case = Case(SMALL, variant, "bfloat16")
    task = BOTH.task(case, "cpu")
    leaves = {name: leaf.requires_grad_() for name, leaf in task.leaves.items()}
    y = BOTH.compute(leaves, task.options, "torch")
    got = results(y, leaves, torch.ones_like(y))
    arguments = nbytes(*leaves.values())
    grads = nbytes(*(grad for name, grad in got.items() if name != "y"))
    assert floor(BOTH, case, "forward").nbytes == arguments + nbytes(got["y"])
    assert floor(BOTH, case, "backward").nbytes == arguments + nbytes(y) + grads


def test_a_scan_token_by_token():
    """d_state 1: a tile of one token, h = a h + v b, y = h c; two FLOP a term."""
    preset = Preset("one", 1, 7, 1, 3, 1)
    states, scores, values = 4 * 3, 1, 3
    least = floor(CAUSAL, Case(preset, "sum", "float32"), "forward")
    assert least.flop == 7 * (states + scores + values)
    assert least.exps == 7 * (2 + 1)  # into and out of the tile, softplus


def test_the_design_study_s_counts():
    """8pn + 2Qn + 2Qp FLOP per token and head for both directions, with tiles of 64 tokens."""
    for name, d_state in (("lm", 128), ("hydra-bert", 64), ("dna", 64)):
        preset = PRESETS[name]
        per_head = 8 * 64 * d_state + 2 * 64 * d_state + 2 * 64 * 64
        for variant in VARIANTS:
            least = floor(BOTH, Case(preset, variant, "bfloat16"), "forward")
            assert least.flop == preset.tokens * preset.nheads * per_head


def test_backward_written_out():
    P, N, Q, tokens, heads, groups = 3, 2, 2, 10, 4, 2
    least = floor(BOTH, Case(SMALL, "hydra", "float32"), "backward")
    states = 2 * P * N * (1 + 1 + 3)
    within = Q * N + Q * P + Q * P
    assert least.flop == 2 * tokens * (heads * (states + within) + groups * 2 * Q * N)
    assert least.exps == tokens * heads * (2 * (1 / 2 + 2) + 2)


def test_one_direction_is_half_of_two():
    case = Case(PRESETS["lm"], "sum", "bfloat16")
    for what in PASSES:
        assert 2 * floor(CAUSAL, case, what).flop == floor(BOTH, case, what).flop


def test_without_step_sizes_there_is_no_softplus():
    case = Case(SMALL, "sum", "float32")
    tokens_and_heads = SMALL.tokens * SMALL.nheads
    with_softplus, without = (floor(one, case, "forward").exps for one in (CAUSAL, ATTENTION))
    assert with_softplus - without == tokens_and_heads


@pytest.mark.parametrize("variant", VARIANTS)
def test_both_passes_together(variant):
    case = Case(SMALL, variant, "float32")
    forward, backward, both = (floor(BOTH, case, what) for what in PASSES)
    assert both == tuple(a + b for a, b in zip(forward, backward, strict=True))


def test_a_tile_is_no_longer_than_a_sequence():
    long, short = (Preset("p", 1, 64, 1, 4, 64, lengths=n) for n in ((64,), (8,) * 8))
    flop = [floor(CAUSAL, Case(p, "sum", "float32"), "forward").flop for p in (long, short)]
    assert flop[0] - flop[1] == 64 * (64 - 8) * (64 + 4)


def test_seconds_are_those_of_the_slower_one():
    least = floor(BOTH, Case(SMALL, "sum", "float32"), "forward")
    assert least.seconds(1, float("inf")) == least.nbytes
    assert least.seconds(float("inf"), 1) == least.flop


def test_counting_allocates_nothing(monkeypatch):
    drawn = []
    real = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *a, **k: drawn.append(real(*a, **k)) or drawn[-1])
    floor(BOTH, Case(PRESETS["dna"], "hydra", "bfloat16"), "backward")
    assert drawn and all(tensor.device.type == "meta" for tensor in drawn)


def noted(preset, variant, what):
    """The row of NOTES.md: MB, GFLOP, millions of exps."""
    least = floor(BOTH, Case(preset, variant, preset.precisions[0]), what)
    numbers = (least.nbytes / 1e6, least.flop / 1e9, least.exps / 1e6)
    return f"| `{preset.name}` | {variant} | {what} | " + " | ".join(f"{n:.4g}" for n in numbers)


def test_notes_hold_every_floor():
    in_notes = {m[0].rsplit(" |", 1)[0] for m in ROW.finditer(NOTES.read_text(encoding="utf-8"))}
    wanted = {
        noted(preset, variant, what)
        for preset in PRESETS.values()
        if preset.device == "cuda" and not preset.name.startswith("sweep-")
        for variant in VARIANTS
        for what in PASSES[:2]
    }
    assert in_notes == wanted
