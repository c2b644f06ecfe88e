"""Records as pictures: time against seqlen, and how many times as long as polyscan others take."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from .implementations import Backend, implementations
from .presets import PASSES, PRESETS
from .records import Group, Record, Run, grouped

FORMATS = ("png", "svg")
# A sweep is the presets whose names differ in a last number, their seqlen.
SWEEP = re.compile(r"(.*)-\d+")


def draw(run: Run, folder: Path) -> list[Path]:
    """Save the pictures that the records allow, and return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in [*_sweeps(run), *_ratios(run)]:
        for suffix in FORMATS:
            written.append(folder / f"{name}.{suffix}")
            figure.savefig(written[-1], dpi=150)
    return written


def _sweeps(run: Run) -> Iterator[tuple[str, Figure]]:
    """One figure per sweep, variant and precision, with the passes side by side."""
    families: dict[tuple[str, ...], list[Record]] = {}
    for record in run.records:
        match = SWEEP.fullmatch(record.preset)
        if match is not None and record.time_ms is not None and record.preset in PRESETS:
            family = (match[1], record.variant, record.precision)
            families.setdefault(family, []).append(record)
    for key, records in families.items():
        if len({record.preset for record in records}) > 1:
            yield "-".join(("seqlen", *key)), _sweep(run, ", ".join(key), records)


def _sweep(run: Run, title: str, records: Sequence[Record]) -> Figure:
    passes = [what for what in PASSES if any(record.what == what for record in records)]
    figure, all_axes = _figure(run, title, len(passes), height=4.5)
    for axes, what in zip(all_axes, passes, strict=True):
        lines: dict[str, dict[int, float]] = {}
        for record in records:
            if record.what == what and record.time_ms is not None:
                line = lines.setdefault(record.implementation, {})
                line[PRESETS[record.preset].seqlen] = record.time_ms
        for name, line in lines.items():
            points = sorted(line.items())
            axes.plot(*zip(*points, strict=True), label=name, color=_color(name), marker="o")
        axes.set(yscale="log", title=what, xlabel="seqlen", ylabel="ms")
        axes.set_xscale("log", base=2)
        _plain_numbers(axes.xaxis, base=2)
        _plain_numbers(axes.yaxis)
    all_axes[0].legend(fontsize="small")
    return figure


def _ratios(run: Run) -> Iterator[tuple[str, Figure]]:
    """One figure per variant and precision: the others' times over polyscan's fastest backend's."""
    by_figure: dict[tuple[str, str], dict[Group, dict[str, float]]] = {}
    for group, records in grouped(run.records).items():
        if SWEEP.fullmatch(group.preset):
            continue
        times = {r.implementation: r.time_ms for r in records if r.time_ms is not None}
        own = [ms for name, ms in times.items() if isinstance(implementations().get(name), Backend)]
        if own and len(times) > 1:
            ratios = {name: ms / min(own) for name, ms in times.items()}
            by_figure.setdefault((group.variant, group.precision), {})[group] = ratios
    for key, groups in by_figure.items():
        yield "-".join(("ratios", *key)), _bars(run, ", ".join(key), groups)


def _bars(run: Run, title: str, groups: dict[Group, dict[str, float]]) -> Figure:
    passes = [what for what in PASSES if any(group.what == what for group in groups)]
    names = list(dict.fromkeys(name for ratios in groups.values() for name in ratios))
    bars = sum(map(len, groups.values())) / len(passes)
    figure, all_axes = _figure(run, title, len(passes), height=max(4.5, 0.15 * bars))
    height = 0.8 / len(names)
    for axes, what in zip(all_axes, passes, strict=True):
        shown = [group for group in groups if group.what == what]
        for number, name in enumerate(names):
            places = [
                (row + (number + 0.5) * height - 0.4, groups[group][name])
                for row, group in enumerate(shown)
                if name in groups[group]
            ]
            drawn = axes.barh(
                [place for place, _ in places],
                [ratio - 1 for _, ratio in places],
                height,
                left=1,
                label=name,
                color=_color(name),
            )
            labels = [f"{ratio:.2g}" for _, ratio in places]
            axes.bar_label(drawn, labels, padding=2, fontsize="x-small")
        axes.set_yticks(range(len(shown)), [group.preset for group in shown])
        axes.invert_yaxis()
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set(xscale="log", title=what, xlabel="time / that of polyscan's fastest backend")
        _plain_numbers(axes.xaxis)
        axes.margins(x=0.1)
    all_axes[0].legend(fontsize="small")
    return figure


def _figure(run: Run, title: str, columns: int, height: float) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(5 * columns, height), layout="constrained")
    figure.suptitle(f"{title}; {run.machine.get('device')}")
    grid: Any = figure.subplots(1, columns, squeeze=False)
    all_axes: list[Axes] = list(grid.flat)
    for axes in all_axes:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, all_axes


def _plain_numbers(axis: Axis, base: int = 10) -> None:
    """Ticks such as 1, 2, 5, 10, ... or 1, 2, 4, ..., written without powers."""
    axis.set_major_locator(LogLocator(base, subs=(1, 2, 5) if base == 10 else (1,)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def _color(name: str) -> str:
    """The same for an implementation in every picture."""
    return f"C{list(implementations()).index(name) % 10}" if name in implementations() else "black"
