"""A result is checked before it is timed; a wrong one has no number."""

import math

import pytest
import torch

from polyscan.bench import measure, verify
from polyscan.bench.implementations import Backend, Implementation, Plain, can_run, find
from polyscan.bench.machine import Limits
from polyscan.bench.measure import Bench, Effort
from polyscan.bench.operations import ATTENTION, BOTH, CAUSAL, LIGHTNING, lightning_decay
from polyscan.bench.presets import PASSES, VARIANTS, Case, Preset
from polyscan.bench.timing import Budget, Timing

CPU = torch.device("cpu")
SMALL = Preset("small", 2, 9, 4, 3, 6, ngroups=2)
LONG = Preset("long", 1, 150, 2, 4, 3)
PACKED = Preset("packed", 1, 70, 2, 4, 3, lengths=(1, 65, 4))
ONCE = Budget(0, 1, 1)


class Fake(Implementation):
    """Right but for what it is told."""

    def __init__(self, name="fake", own=True, refuses=None, **spoil):
        super().__init__(name)
        self.own = own
        self.refuses = refuses
        self.spoil = spoil
        self.chunk_sizes = (256, 128, 64)
        self.calls = []

    def missing(self, device):
        return None

    def refusal(self, task, device):
        return self.refuses

    def compute(self, leaves, options, chunk_size):
        self.calls.append(chunk_size)
        y = BOTH.compute(leaves, options, "torch")
        if "error" in self.spoil:
            raise self.spoil["error"]
        if "gradient" in self.spoil and y.requires_grad:
            y = y.detach() + self.spoil["gradient"] * (y - y.detach())
        return y * self.spoil.get("factor", 1)


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.setattr(measure, "ON_CPU", ONCE)
    monkeypatch.setattr(measure, "limits", lambda *_: Limits(1e9, 1e12))

    def make(effort=measure.QUICK):
        return Bench(CPU, effort)

    return make


def records_of(bench, one, case=None, passes=PASSES):
    case = case or Case(SMALL, "hydra", "float32")
    return {record.what: record for record in bench.measure(case, one, passes)}


def test_a_right_result_has_numbers(bench):
    records = records_of(bench(), Fake())
    assert list(records) == list(PASSES)
    for what, record in records.items():
        assert record.status == "timed" and record.reason is None
        assert record.time_ms > 0 and record.samples_ms == (record.time_ms,)
        assert record.method == "wall" and record.what == what
        assert record.error <= record.limit
        assert record.gb_per_s == pytest.approx(record.bandwidth_fraction)  # of 1 GB/s
        assert record.tflop_per_s == pytest.approx(record.matrix_fraction)  # of 1 TFLOP/s
        assert record.host_us is record.extra_mib is record.kernels is None


def test_a_wrong_result_has_none(bench):
    one = Fake(factor=1.001)
    for record in records_of(bench(), one).values():
        assert record.status == "wrong"
        assert record.reason.startswith(f"the error of {record.worst} is ")
        assert record.error == pytest.approx(1e-3, rel=0.01) and record.limit < 1e-3
        assert record.time_ms is record.samples_ms is record.gb_per_s is None
    assert len(one.calls) == 2  # forward, and with gradients: neither was timed


def test_a_gradient_that_is_nothing_is_held_to_one(bench):
    """With two tokens and a shift, no decay is between them."""
    case = Case(Preset("two", 1, 2, 2, 3, 4), "hydra", "float32")
    assert records_of(bench(), Fake(), case)["backward"].status == "timed"
    exact = {"grad_A": torch.zeros(2)}
    assert verify.check({"grad_A": torch.full((2,), 1e-3)}, exact, "float32").error > 1e-3


def test_a_wrong_gradient_leaves_the_forward_its_number(bench):
    records = records_of(bench(), Fake(gradient=1.001))
    assert [records[what].status for what in PASSES] == ["timed", "wrong", "wrong"]
    assert records["backward"].worst.startswith("grad_")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_no_number_is_beyond_every_limit(bench, value):
    record = records_of(bench(), Fake(factor=value))["forward"]
    assert record.status == "wrong" and record.error == math.inf


def test_what_is_raised_is_the_reason_and_the_next_has_its_turn(bench):
    one_bench = bench()
    broken = Fake(error=RuntimeError("\n  no such kernel\nand more"))
    for record in records_of(one_bench, broken).values():
        assert (record.status, record.reason) == ("failed", "RuntimeError: no such kernel")
        assert record.time_ms is None
    assert records_of(one_bench, Fake())["forward"].status == "timed"


def test_too_little_memory_is_no_failure(bench):
    for record in records_of(bench(), Fake(error=torch.OutOfMemoryError("oh"))).values():
        assert record.status == "skipped" and "does not fit" in record.reason


def test_a_wrong_shape_is_a_failure(bench):
    class Flat(Fake):
        def compute(self, leaves, options, chunk_size):
            return super().compute(leaves, options, chunk_size).flatten(2)

    record = records_of(bench(), Flat(), passes=["forward"])["forward"]
    assert record.status == "failed" and "y is (2, 9, 12) instead of (2, 9, 4, 3)" in record.reason


def test_a_refusal_is_reported_and_nothing_runs(bench):
    one = Fake(refuses="knows no shift")
    for record in records_of(bench(), one).values():
        assert (record.status, record.reason) == ("skipped", "knows no shift")
    assert one.calls == []


def test_only_the_passes_that_are_asked_for(bench):
    assert list(records_of(bench(), Fake(), passes=["backward"])) == ["backward"]


def test_quick_takes_the_usual_chunk_size_and_thorough_the_best(bench, monkeypatch):
    one = Fake(own=False)
    quick = records_of(bench(), one, passes=["forward"])["forward"]
    assert set(one.calls) == {256} and quick.chunk_size == 256

    times = iter([3.0, 1.0, 2.0])
    monkeypatch.setattr(
        measure.CPUTimer,
        "time",
        lambda self, run: Timing([next(times)], "wall"),
    )
    best = records_of(bench(Effort("thorough", 3, 1, ONCE)), one, passes=["forward"])["forward"]
    assert (best.chunk_size, best.time_ms) == (128, 1.0)


def test_polyscans_own_do_not_tune_again(bench):
    mine, others = Fake(own=True), Fake(own=False)
    for one in (mine, others):
        records_of(bench(Effort("thorough", 1, 3, ONCE)), one, passes=["forward"])
    assert len(others.calls) == 3 * len(mine.calls)


@pytest.mark.parametrize("preset", [SMALL, LONG, PACKED], ids=lambda preset: preset.name)
@pytest.mark.parametrize("variant", VARIANTS)
def test_exact_values_are_the_reference_s(preset, variant):
    for operation in (BOTH, CAUSAL, ATTENTION, LIGHTNING):
        if operation is not BOTH and variant == "hydra":
            continue
        task = operation.task(Case(preset, variant, "float32"), CPU)
        leaves = {n: leaf.double().requires_grad_() for n, leaf in task.leaves.items()}
        y = operation.compute(leaves, task.options, "reference")
        exact = verify.exact(task)
        wanted = verify.results(y, leaves, exact.dy.double())
        for name, value in exact.results.items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("operation", [ATTENTION, LIGHTNING], ids=lambda one: one.name)
def test_linear_attention_written_out(operation):
    task = operation.task(Case(SMALL, "sum", "float32"), CPU)
    q, k, v = (task.leaves[name].double() for name in "qkv")
    decay = lightning_decay(SMALL.nheads, CPU).double().expand(v.shape[:3])
    if "g" in task.leaves:
        decay = task.leaves["g"].double()
    total = decay.cumsum(1)
    scores = torch.einsum("bihn,bjhn->bhij", q, k)
    weights = (total[:, :, None] - total[:, None]).permute(0, 3, 1, 2).exp().tril()
    wanted = torch.einsum("bhij,bjhp->bihp", scores * weights, v)
    torch.testing.assert_close(verify.exact(task).results["y"], wanted)


def test_linear_attention_is_the_causal_scan_on_the_same_numbers():
    case = Case(SMALL, "sum", "float32")
    causal, attention = (
        verify.exact(one.task(case, CPU)).results["y"] for one in (CAUSAL, ATTENTION)
    )
    leaves = CAUSAL.task(case, CPU).leaves
    skip = leaves["x"] * leaves["D"][:, None]
    torch.testing.assert_close(attention + skip, causal, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("preset", [SMALL, LONG], ids=lambda preset: preset.name)
def test_plain_pytorch_is_right(bench, preset, variant, precision):
    case = Case(preset, variant, precision)
    for record in records_of(bench(), Plain("plain", compiled=False), case).values():
        assert record.status == "timed", record.reason


def test_plain_pytorch_refuses_packed_sequences():
    reason = can_run(Plain("plain", compiled=False), Case(PACKED, "sum", "float32"), CPU)
    assert reason == "does not know packed sequences"


def test_a_backend_is_asked_about_the_device_that_it_will_run_on(monkeypatch):
    asked = []
    monkeypatch.setattr(
        measure.can_run.__globals__["registry"],
        "unsupported_reason",
        lambda name, problem: asked.append(problem),
    )
    assert can_run(Backend("torch"), Case(PACKED, "hydra", "tf32"), torch.device("cuda")) is None
    (problem,) = asked
    assert problem.device.type == "cuda" and problem.tf32
    assert problem.shift and problem.packing == "cu_seqlens" and problem.needs_grad


def test_what_is_slow_runs_only_when_it_is_named():
    usual = {one.name for one in find(None)}
    assert {"torch", "plain", "mamba-causal"} <= usual
    assert not usual & {"reference", "plain-compiled"}
    assert [one.name for one in find(["plain*", "reference"])] == [
        "reference",
        "plain",
        "plain-compiled",
    ]
    with pytest.raises(ValueError, match="nothing is called 'nonsense'"):
        find(["torch", "nonsense"])
