"""How long a call takes, what it allocates, and how many kernels it launches.

On a GPU the time is that of one replay of a CUDA graph with nothing in the L2 cache, between two
events: no host time is in it. What cannot be captured is timed by events around the call, which
then hold the host's pauses too. What the host adds is measured apart: calls in a row and one
synchronisation, beside the same of an addition in place, as a CPU's speed drifts.
"""

import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, NamedTuple

import torch

Run = Callable[[], object]
MethodName = Literal["graph", "events", "wall"]

MIB = 2**20
CALLS_BEFORE = 3


class Budget(NamedTuple):
    """Seconds to spend on one time, and between how many samples that may be."""

    seconds: float
    fewest: int
    most: int

    def samples(self, seconds_each: float) -> int:
        return max(self.fewest, min(self.most, int(self.seconds / max(seconds_each, 1e-9))))


# For calls in a row.
HOST = Budget(0.05, 5, 200)


class Timing(NamedTuple):
    """Samples in milliseconds."""

    samples_ms: list[float]
    method: MethodName

    @property
    def median_ms(self) -> float:
        return statistics.median(self.samples_ms)

    def percentile_ms(self, percent: int) -> float:
        ordered = sorted(self.samples_ms)
        return ordered[round(percent / 100 * (len(ordered) - 1))]


class CPUTimer:
    """Wall-clock time of each call."""

    host_is_apart = False

    def __init__(self, budget: Budget) -> None:
        self.budget = budget

    def time(self, run: Run) -> Timing:
        warm = min(_seconds(run) for _ in range(2))
        samples = [_seconds(run) for _ in range(self.budget.samples(warm))]
        return Timing([1e3 * seconds for seconds in samples], "wall")

    def extra_mib(self, run: Run) -> float | None:
        return None  # torch does not count on the CPU

    def kernels(self, run: Run) -> int | None:
        return None


class CUDATimer:
    """Everything runs on one stream of its own, which must be the current one: a graph can only
    capture the backward of a forward that ran on the same stream."""

    host_is_apart = True

    def __init__(self, device: torch.device, budget: Budget) -> None:
        self.device = device
        self.budget = budget
        self.stream = torch.cuda.Stream(device)
        # Twice the cache, so that writing it leaves nothing else there.
        size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.empty(max(size, 64 * MIB), dtype=torch.uint8, device=device)

    def time(self, run: Run) -> Timing:
        for _ in range(CALLS_BEFORE):
            run()
        self.stream.synchronize()
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.graph(graph, pool=pool, stream=self.stream):
                run()
        except RuntimeError as error:
            self._abandon(pool)
            if isinstance(error, torch.OutOfMemoryError):
                raise
            # It synchronised, or did whatever else a capture does not allow.
            return Timing(self._samples(run), "events")
        return Timing(self._samples(graph.replay), "graph")

    def _abandon(self, pool: tuple[int, int]) -> None:
        """Take back the memory of a capture that failed: else the allocator waits for its end."""
        torch.cuda.synchronize(self.device)
        with suppress(RuntimeError):  # it has been taken back
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)

    def _samples(self, run: Run) -> list[float]:
        (first,) = self._replays(run, 1)
        return self._replays(run, self.budget.samples(first / 1e3))

    def _replays(self, run: Run, number: int) -> list[float]:
        pairs = []
        for _ in range(number):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._flush.zero_()
            start.record()
            run()
            end.record()
            pairs.append((start, end))
        self.stream.synchronize()
        return [start.elapsed_time(end) for start, end in pairs]

    def host_us(self, run: Run) -> float:
        """Microseconds per call, of calls in a row with one synchronisation at their end."""
        run()
        self.stream.synchronize()
        number = HOST.samples(self._calls(run, 1))
        return 1e6 * self._calls(run, number) / number

    def _calls(self, run: Run, number: int) -> float:
        start = time.perf_counter()
        for _ in range(number):
            run()
        self.stream.synchronize()
        return time.perf_counter() - start

    def extra_mib(self, run: Run) -> float | None:
        """The most that a call has allocated at a time, its results included."""
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        run()
        return (torch.cuda.max_memory_allocated(self.device) - before) / MIB

    def kernels(self, run: Run) -> int | None:
        """Launched by a call; None where the profiler sees none."""
        from torch.profiler import DeviceType, ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            run()
            self.stream.synchronize()
        launched = sum(
            event.device_type == DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset"))
            for event in profiler.events()
        )
        return launched or None


def addition(device: torch.device) -> Run:
    """The smallest call that torch makes, to judge host times by."""
    z = torch.zeros(1, device=device)
    return lambda: z.add_(1)


def _seconds(run: Run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
