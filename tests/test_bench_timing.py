"""Timing, with a GPU that is pretended: what is captured, flushed and counted."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from polyscan.bench import autotuning
from polyscan.bench.timing import CALLS_BEFORE, HOST, Budget, CPUTimer, CUDATimer, Timing, addition

CPU = torch.device("cpu")


def test_a_budget_bounds_the_number_of_samples():
    budget = Budget(1.0, 3, 10)
    assert [budget.samples(seconds) for seconds in (0, 0.01, 0.2, 5)] == [10, 10, 5, 3]


def test_median_and_percentiles():
    timing = Timing([float(ms) for ms in (5, 1, 2, 4, 3, 6)], "wall")
    assert timing.median_ms == 3.5
    assert (timing.percentile_ms(20), timing.percentile_ms(80)) == (2, 5)
    assert Timing([7.0], "wall").percentile_ms(80) == 7


def test_on_the_cpu_each_call_is_a_sample():
    calls = []
    timing = CPUTimer(Budget(0, 4, 4)).time(lambda: calls.append(1))
    assert len(timing.samples_ms) == 4 and timing.method == "wall"
    assert len(calls) == 4 + 2
    assert CPUTimer(Budget(0, 1, 1)).extra_mib(lambda: None) is None


class PretendedGPU:
    """Takes ``duration`` ms for a call or its replay, and writes down what happens."""

    def __init__(self, duration):
        self.now = 0.0
        self.log = []
        self.duration = duration
        self.capturing = False

    def run(self):
        if self.capturing:
            self.log.append("captured")
        else:
            self.log.append("run")
            self.now += self.duration


@pytest.fixture
def gpu(monkeypatch):
    gpu = PretendedGPU(2.0)

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = gpu.now

        def elapsed_time(self, other):
            return other.at - self.at

    class Graph:
        def replay(self):
            gpu.log.append("replay")
            gpu.now += gpu.duration

    @contextmanager
    def capture(graph, pool, stream):
        assert pool == "pool"
        gpu.capturing = True
        try:
            yield
        finally:
            gpu.capturing = False

    pretended = {
        "Stream": lambda device: SimpleNamespace(synchronize=lambda: None),
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": capture,
        "graph_pool_handle": lambda: "pool",
        "current_device": lambda: 0,
        "synchronize": lambda device: None,
        "get_device_properties": lambda device: SimpleNamespace(L2_cache_size=2**20),
    }
    for name, stand_in in pretended.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(
        torch._C,
        "_cuda_endAllocateToPool",
        lambda index, pool: gpu.log.append(f"{pool} given back"),
    )
    return gpu


@pytest.fixture
def timer(gpu):
    timer = CUDATimer(CPU, Budget(0.02, 3, 10))

    def zero_():
        gpu.log.append("flush")
        gpu.now += 100

    timer._flush = SimpleNamespace(zero_=zero_)
    return timer


def test_the_cache_is_flushed_by_twice_its_size(gpu):
    assert CUDATimer(CPU, Budget(1, 1, 1))._flush.numel() >= 2 * 2**20


def test_a_graph_is_captured_once_and_replayed_behind_a_flush(gpu, timer):
    timing = timer.time(gpu.run)
    assert timing == Timing([2.0] * 10, "graph")  # the flush is outside of the events
    assert gpu.log == ["run"] * CALLS_BEFORE + ["captured"] + ["flush", "replay"] * 11


def test_what_cannot_be_captured_is_timed_by_events(gpu, timer):
    def run():
        gpu.run()
        if gpu.capturing:
            raise RuntimeError("operation not permitted when stream is capturing")

    timing = timer.time(run)
    assert timing == Timing([2.0] * 10, "events")
    assert gpu.log[CALLS_BEFORE:] == ["captured", "pool given back"] + ["flush", "run"] * 11


def test_too_little_memory_is_no_reason_to_use_events(gpu, timer):
    def run():
        if gpu.capturing:
            raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        timer.time(run)
    assert gpu.log == ["pool given back"]


def test_host_time_is_per_call(gpu, timer, monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    calls = []
    # One call took a second, so the fewest that are allowed follow, and take one together.
    assert timer.host_us(lambda: calls.append(1)) == pytest.approx(1e6 / HOST.fewest)
    assert len(calls) == 1 + 1 + HOST.fewest


def test_the_addition_adds():
    add = addition(CPU)
    assert add() is add() and add().item() == 3


def test_extra_memory_is_the_peak_above_what_was_there(timer, monkeypatch):
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2**20)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 4 * 2**20)
    assert timer.extra_mib(lambda: None) == 3


def test_kernels_are_counted_and_copies_are_not(timer, monkeypatch):
    from torch.profiler import DeviceType

    events = []

    @contextmanager
    def profile(activities):
        yield SimpleNamespace(events=lambda: events)

    monkeypatch.setattr("torch.profiler.profile", profile)
    assert timer.kernels(lambda: None) is None  # the profiler saw nothing
    events += [
        SimpleNamespace(device_type=DeviceType.CUDA, name=name)
        for name in ("a_kernel", "Memcpy DtoD", "Memset (Device)", "another")
    ]
    events.append(SimpleNamespace(device_type=DeviceType.CPU, name="aten::add"))
    assert timer.kernels(lambda: None) == 2


class TestAutotuning:
    @pytest.fixture
    def autotuner(self):
        return pytest.importorskip("triton.runtime.autotuner").Autotuner

    def test_it_is_brief_within_the_block_only(self, autotuner, monkeypatch):
        seen = []
        monkeypatch.setattr(autotuning, "_time", lambda call, quantiles: seen.append(quantiles))
        usual = autotuner.prune_configs, autotuner.do_bench
        tuner = object.__new__(autotuner)
        with autotuning.brief():
            tuner.do_bench(None, quantiles=(0.5,))
        assert seen == [(0.5,)]
        assert (autotuner.prune_configs, autotuner.do_bench) == usual

    def test_every_configuration_is_compiled_before_any_is_timed(self, autotuner, monkeypatch):
        log = []

        def run(*arguments, warmup, grid, size):
            log.append(("compile" if warmup else "run", size))

        monkeypatch.setattr(
            autotuning, "_time", lambda call, quantiles: (log.append("timed"), [1.0] * 3)[1]
        )
        tuner = self.tuner(autotuner, run, sizes=(16, 32))
        with autotuning.brief():
            tuner.run(3, grid=(1,), warmup=False)
            tuner.run(3, grid=(1,), warmup=False)
        assert log == [
            ("compile", 16),
            ("compile", 32),
            *("timed", "timed"),
            *(("run", 16), ("run", 16)),
        ]

    def test_forgetting_makes_it_choose_again(self, autotuner, monkeypatch):
        timed = []
        monkeypatch.setattr(
            autotuning, "_time", lambda call, quantiles: (timed.append(1), [1.0] * 3)[1]
        )
        tuner = self.tuner(autotuner, lambda *_, **__: None, sizes=(16, 32))
        with autotuning.brief():
            for _ in range(2):
                tuner.run(3, grid=(1,), warmup=False)
                autotuning.forget()
        assert len(timed) == 4

    def test_without_triton_nothing_happens(self, monkeypatch):
        monkeypatch.setattr(autotuning, "find_spec", lambda name: None)
        with autotuning.brief():
            pass

    def tuner(self, autotuner, run, sizes):
        import triton

        def kernel(x, size):
            """Stands in for a compiled function."""

        function = SimpleNamespace(run=run, fn=kernel)
        configs = [triton.Config({"size": size}, num_warps=None) for size in sizes]
        for config in configs:
            config.num_warps = config.num_ctas = config.num_stages = config.maxnreg = None
        return autotuner(function, ["x", "size"], configs, ["x"], None, None)
