"""``python -m polyscan bench``: measures, and shows what was measured.

A table per group grows while it is measured and stays when it is done. What is asked of the command
line is checked before anything runs; the JSON file is written after every group, so that a run that
is stopped leaves what it has.
"""

import argparse
import os
from collections.abc import Iterable, Sequence

import torch
from rich.console import Console
from rich.console import Group as Together
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from polyscan.bench import implementations, presets
from polyscan.bench.counts import floor
from polyscan.bench.machine import facts
from polyscan.bench.measure import QUICK, THOROUGH, Bench
from polyscan.bench.operations import BOTH
from polyscan.bench.presets import PASSES, VARIANTS, Case, Preset
from polyscan.bench.records import Change, Group, Record, Run, compare, grouped
from polyscan.hardware import usable

HEADINGS = ("ms", "p20-p80", "ratio", "host µs", "GB/s", "TFLOP/s", "MiB", "kernels")
COLORS = {"wrong": "red", "failed": "red", "skipped": "dim"}
# Without a terminal a table is as wide as it needs to be.
WIDTH_IN_A_FILE = 200


def bench(options: argparse.Namespace) -> int:
    """Do what the command line asks for, and return the exit code.

    Raises:
        ValueError: it names what there is not.
        OSError: a file cannot be read or written.
    """
    console = Console(width=None if os.isatty(1) else WIDTH_IN_A_FILE)
    if options.compare:
        before, after = map(Run.load, options.compare)
        show_comparison(console, before, after)
        return 0
    if options.load:
        run = Run.load(options.load)
        for group, records in grouped(run.records).items():
            console.print(table(group, records))
    else:
        device = usable(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        chosen = presets.find(options.presets) if options.presets else presets.for_device(device)
        if options.list:
            show_presets(console, chosen)
            return 0
        run = measure(console, options, device, chosen)
    if options.plot:
        from polyscan.bench.pictures import draw

        for path in draw(run, options.plot):
            console.print(f"wrote {path}")
    return 1 if any(is_own_failure(record) for record in run.records) else 0


def measure(
    console: Console, options: argparse.Namespace, device: torch.device, chosen: list[Preset]
) -> Run:
    competitors = implementations.find(options.backends)
    passes = options.passes or PASSES
    runnable = []
    for one in competitors:
        reason = one.missing(device)
        if reason is None:
            runnable.append(one)
        else:
            console.print(f"without {one.name}: {reason}", style="dim", markup=False)
    cases = [
        Case(preset, variant, precision)
        for preset in chosen
        for variant in options.variants or VARIANTS
        for precision in options.dtypes or preset.precisions
    ]
    effort = THOROUGH if options.thorough else QUICK
    run = Run({**facts(device), "effort": effort.name}, [])
    if options.commit:
        run.machine["commit"] = options.commit
    run.machine["missing"] = {
        one.name: one.missing(device) for one in competitors if one not in runnable
    }
    bar = progress_bar()
    task = bar.add_task("measuring", total=len(cases) * len(runnable))
    machine = Bench(device, effort)
    with Live(bar, console=console, refresh_per_second=4) as live:
        for case in cases:
            records: list[Record] = []
            for one in runnable:
                bar.update(task, description=f"{case.preset.name}, {case.variant}, {one.name}")
                records += machine.measure(case, one, passes)
                bar.advance(task)
                live.update(Together(*tables(records), bar))
            live.update(bar)
            for finished in tables(records):
                console.print(finished)
            run.records.extend(records)
            run.machine["limits"] = {
                name: most._asdict() for name, most in machine.measured_limits.items()
            }
            if options.json:
                run.save(options.json)
    return run


def tables(records: Iterable[Record]) -> list[Table]:
    return [table(group, of_group) for group, of_group in grouped(list(records)).items()]


def table(group: Group, records: Sequence[Record]) -> Table:
    """One group; columns in which there is nothing are left out."""
    own = [r.time_ms for r in records if r.time_ms is not None and is_backend(r)]
    rows = [cells(record, min(own, default=None)) for record in records]
    headings = [heading for heading in HEADINGS if any(heading in row for row in rows)]
    shown = Table(title=str(group), title_justify="left", title_style="bold")
    shown.add_column("")
    for heading in headings:
        shown.add_column(heading, justify="right")
    shown.add_column("")
    for record, row in zip(records, rows, strict=True):
        shown.add_row(
            record.implementation,
            *(row.get(heading, "-") for heading in headings),
            remark(record),
            style=COLORS.get(record.status),
        )
    return shown


def is_backend(record: Record) -> bool:
    return isinstance(
        implementations.implementations().get(record.implementation), implementations.Backend
    )


def cells(record: Record, best_ms: float | None) -> dict[str, str]:
    """What is known, by heading; ``ratio`` is to the fastest of polyscan's backends."""
    found = {}
    if record.time_ms is not None:
        found["ms"] = f"{record.time_ms:.4g}"
        found["p20-p80"] = f"{record.time_ms_p20:.4g}-{record.time_ms_p80:.4g}"
        found["GB/s"] = f"{record.gb_per_s:.3g} {record.bandwidth_fraction:4.0%}"
        found["TFLOP/s"] = f"{record.tflop_per_s:.3g} {record.matrix_fraction:4.0%}"
        if best_ms is not None:
            found["ratio"] = f"{record.time_ms / best_ms:.2f}"
    if record.host_us is not None:
        found["host µs"] = f"{record.host_us:.0f} ({record.add_us:.0f})"
    if record.extra_mib is not None:
        found["MiB"] = f"{record.extra_mib:.1f}"
    if record.kernels is not None:
        found["kernels"] = str(record.kernels)
    return found


def remark(record: Record) -> str:
    if record.status != "timed":
        return f"{record.status}: {record.reason}"
    chunk = None if record.chunk_size is None else f"chunk {record.chunk_size}"
    method = "by events: not capturable" if record.method == "events" else None
    return "; ".join(filter(None, (chunk, method, record.note)))


def is_own_failure(record: Record) -> bool:
    """Something of polyscan's that is wrong or broke."""
    one = implementations.implementations().get(record.implementation)
    return one is not None and one.own and record.status in ("wrong", "failed")


def show_presets(console: Console, chosen: list[Preset]) -> None:
    """Their sizes, and the floors of their first precision."""
    shown = Table(title="presets", title_justify="left", title_style="bold")
    for heading in ("sizes", "precisions", "variant", "pass", "MB", "GFLOP", "Mexp"):
        shown.add_column(heading, justify="left" if heading in ("sizes", "precisions") else "right")
    for preset in chosen:
        for variant in VARIANTS:
            for what in PASSES[:2]:
                least = floor(BOTH, Case(preset, variant, preset.precisions[0]), what)
                shown.add_row(
                    *(str(preset), ", ".join(preset.precisions), variant, what),
                    *(f"{value:.4g}" for value in (least.nbytes / 1e6, least.flop / 1e9)),
                    f"{least.exps / 1e6:.4g}",
                )
    console.print(shown)


def show_comparison(console: Console, before: Run, after: Run) -> None:
    for name in ("device", "driver", "torch", "polyscan", "commit"):
        old, new = before.machine.get(name), after.machine.get(name)
        console.print(f"{name}: {old}" + ("" if old == new else f" -> {new}"), markup=False)
    shown = Table()
    for heading in ("group", "", "before", "after", "times as fast"):
        shown.add_column(heading, justify="left" if heading in ("group", "") else "right")
    changes = compare(before, after)
    for change in changes:
        shown.add_row(*change_cells(change))
    console.print(shown)
    for title, one, other in (("before", before, after), ("after", after, before)):
        alone = {r.key for r in one.records} - {r.key for r in other.records}
        console.print(f"only {title}: {len(alone)}")


def change_cells(change: Change) -> list[str]:
    times = [
        record.status if record.time_ms is None else f"{record.time_ms:.4g} ms"
        for record in (change.before, change.after)
    ]
    ratio = "-" if change.ratio is None else f"{change.ratio:.2f}"
    return [str(change.after.group), change.after.implementation, *times, ratio]


def progress_bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    )
