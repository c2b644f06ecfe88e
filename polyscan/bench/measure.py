"""Measures one case: checks each implementation's result, and times the right ones."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch

from . import autotuning, verify
from .counts import floor
from .implementations import Implementation, can_run
from .machine import Limits, limits
from .operations import Task, Tensors
from .precision import PrecisionName, products_in
from .presets import Case, PassName
from .records import Record
from .timing import Budget, CPUTimer, CUDATimer, Run, addition


class Effort(NamedTuple):
    """How hard to look for a peer's best time.

    ``chunk_sizes``: how many of its chunk sizes are tried. ``tunings``: how often its autotuner
    chooses anew for each case; 0 for what it chose on the first case with such sizes and dtypes.
    """

    name: str
    chunk_sizes: int
    tunings: int
    budget: Budget


QUICK = Effort("quick", 1, 0, Budget(0.1, 7, 21))
THOROUGH = Effort("thorough", 3, 3, Budget(0.2, 11, 51))
ON_CPU = Budget(0.3, 5, 21)
TOO_LARGE = "does not fit into the device's memory, beside the float64 values it is checked against"


class Bench:
    """Measures on one device, one case after another.

    What a case's implementations share, its tensors and the exact results, is kept until the next
    case.
    """

    def __init__(self, device: torch.device, effort: Effort) -> None:
        self.device = device
        self.effort = effort
        self.timer: CPUTimer | CUDATimer
        self.timer = CPUTimer(ON_CPU)
        if device.type == "cuda":
            self.timer = CUDATimer(device, effort.budget)
        self.measured_limits: dict[PrecisionName, Limits] = {}
        self._case: Case | None = None
        self._tasks: dict[str, tuple[Task, verify.Exact]] = {}

    def measure(
        self, case: Case, one: Implementation, passes: Sequence[PassName]
    ) -> Iterator[Record]:
        """A record for each pass."""
        note = "; ".join(filter(None, (one.operation.note, one.note))) or None
        blank = Record(
            *(case.preset.name, case.variant, case.precision),
            what="forward",
            implementation=one.name,
            status="skipped",
            note=note,
        )
        reason = can_run(one, case, self.device)
        if reason is not None:
            for what in passes:
                yield replace(blank, what=what, reason=reason)
            return
        best: dict[PassName, Record] = {}
        for chunk_size in one.chunk_sizes[: self.effort.chunk_sizes]:
            for _ in range(1 if one.own else max(1, self.effort.tunings)):
                if self.effort.tunings:
                    autotuning.forget()
                trial = self._trial(replace(blank, chunk_size=chunk_size), case, one, passes)
                for record in trial:
                    if record.what not in best or record.is_better_than(best[record.what]):
                        best[record.what] = record
        yield from best.values()

    def limits(self, precision: PrecisionName) -> Limits:
        """What the device can do, measured when it is first asked for."""
        if precision not in self.measured_limits:
            with self._stream():
                self.measured_limits[precision] = limits(self.device, self.timer, precision)
        return self.measured_limits[precision]

    def _trial(
        self, blank: Record, case: Case, one: Implementation, passes: Sequence[PassName]
    ) -> Iterator[Record]:
        """Every pass with one chunk size and one choice of the autotuner."""
        checks: dict[bool, verify.Check] = {}
        for what in passes:
            record = replace(blank, what=what)
            try:
                with self._stream(), products_in(case.precision), autotuning.brief():
                    task, exact = self._prepared(case, one)
                    call = Call(one, task, exact.dy, record.chunk_size)
                    grads = what != "forward"
                    if grads not in checks:
                        got = call.results() if grads else {"y": call.forward()}
                        checks[grads] = verify.check(got, exact.results, case.precision)
                        del got
                    yield self._judged(record, call, checks[grads])
            except torch.OutOfMemoryError:
                self._tasks.clear()
                yield replace(record, status="skipped", reason=TOO_LARGE)
            # Whatever it is, it belongs in the record, and the others have their turn.
            except Exception as raised:
                yield replace(record, status="failed", reason=_describe(raised))
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _judged(self, record: Record, call: "Call", check: verify.Check) -> Record:
        record = replace(record, error=check.error, limit=check.limit, worst=check.worst)
        if not check.passed:
            return replace(record, status="wrong", reason=str(check))
        run = call.prepared(record.what)
        extra_mib = self.timer.extra_mib(run)
        timing = self.timer.time(run)
        host_us = add_us = None
        if isinstance(self.timer, CUDATimer):
            host_us, add_us = map(self.timer.host_us, (run, addition(self.device)))
        least = floor(call.one.operation, call.task.case, record.what)
        seconds = timing.median_ms / 1e3
        most = self.limits(record.precision)
        return replace(
            record,
            status="timed",
            time_ms=timing.median_ms,
            time_ms_p20=timing.percentile_ms(20),
            time_ms_p80=timing.percentile_ms(80),
            samples_ms=tuple(timing.samples_ms),
            method=timing.method,
            host_us=host_us,
            add_us=add_us,
            gb_per_s=least.nbytes / seconds / 1e9,
            tflop_per_s=least.flop / seconds / 1e12,
            bandwidth_fraction=least.nbytes / seconds / most.bytes_per_s,
            matrix_fraction=least.flop / seconds / most.flop_per_s,
            extra_mib=extra_mib,
            kernels=self.timer.kernels(run),
        )

    def _prepared(self, case: Case, one: Implementation) -> tuple[Task, verify.Exact]:
        if case != self._case:
            self._tasks.clear()
            self._case = case
        name = one.operation.name
        if name not in self._tasks:
            task = one.operation.task(case, self.device)
            self._tasks[name] = (task, verify.exact(task))
        return self._tasks[name]

    def _stream(self) -> AbstractContextManager[object]:
        if isinstance(self.timer, CUDATimer):
            return torch.cuda.stream(self.timer.stream)
        return nullcontext()


class Call:
    """An implementation on the tensors of a case, as the passes that are timed."""

    def __init__(
        self, one: Implementation, task: Task, dy: torch.Tensor, chunk_size: int | None
    ) -> None:
        self.one = one
        self.task = task
        self.dy = dy
        self.chunk_size = chunk_size
        self.leaves = {name: leaf.detach().requires_grad_() for name, leaf in task.leaves.items()}

    def compute(self) -> torch.Tensor:
        return self.one.compute(self.leaves, self.task.options, self.chunk_size)

    @torch.no_grad()
    def forward(self) -> torch.Tensor:
        return self.compute()

    def results(self) -> Tensors:
        return verify.results(self.compute(), self.leaves, self.dy)

    def prepared(self, what: PassName) -> Run:
        """What to time; for the backward alone, behind a forward that is done here."""
        if what == "forward":
            return self.forward
        if what == "forward+backward":
            return lambda: self._gradients(self.compute(), keep=False)
        y = self.compute()
        return lambda: self._gradients(y, keep=True)

    def _gradients(self, y: torch.Tensor, keep: bool) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(y, list(self.leaves.values()), self.dy, retain_graph=keep)


def _describe(error: Exception) -> str:
    """Its name and the first line of what it says that is not empty."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'without a word'}"
