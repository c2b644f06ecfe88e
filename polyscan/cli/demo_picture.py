"""The demo's picture: how it learned, and what it reads on digits that it never saw."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import MaxNLocator, PercentFormatter

ROWS, COLUMNS = 5, 8
BLUE, GREEN, RED, GREY = "#1f5fa8", "#2a7f4f", "#c62828", "#555555"


def save_picture(
    path: Path,
    losses: Sequence[float],
    accuracies: Sequence[float],
    images: Any,
    labels: Sequence[int],
    predicted: Sequence[int],
) -> Path:
    """Draw and save; losses and accuracies per epoch, the rest per held-out image."""
    figure = Figure(figsize=(12, 5), layout="constrained")
    halves: Any = figure.subfigures(1, 2, width_ratios=(5, 7), wspace=0.03)
    _draw_curves(halves[0], losses, accuracies)
    _draw_digits(halves[1], images, labels, predicted)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def _draw_curves(figure: SubFigure, losses: Sequence[float], accuracies: Sequence[float]) -> None:
    epochs = range(1, len(losses) + 1)
    upper, lower = figure.subplots(2, 1, sharex=True)
    figure.suptitle(f"How it learns: {accuracies[-1]:.1%} after the last epoch")

    upper.plot(epochs, losses, color=BLUE, marker="o", markersize=3)
    upper.set_yscale("log")
    upper.set_ylabel("training loss")

    lower.plot(epochs, accuracies, color=GREEN, marker="o", markersize=3)
    lower.set_ylim(0, 1.05)
    lower.set_ylabel("held-out accuracy")
    lower.yaxis.set_major_formatter(PercentFormatter(1))
    lower.set_xlabel("epoch")
    lower.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))

    for axes in (upper, lower):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)


def _draw_digits(
    figure: SubFigure, images: Any, labels: Sequence[int], predicted: Sequence[int]
) -> None:
    """Misread digits first, at most half of the grid, then others."""
    numbers = range(len(labels))
    wrong = [i for i in numbers if predicted[i] != labels[i]]
    right = [i for i in numbers if predicted[i] == labels[i]]
    cells = ROWS * COLUMNS
    first = wrong[: max(cells // 2, cells - len(right))]
    shown = (first + right)[:cells]

    figure.suptitle(
        f"What it reads on unseen digits: {len(wrong)} of {len(labels)} wrong, shown in red"
    )
    grid = figure.subplots(ROWS, COLUMNS).flat
    for axes, i in zip(grid, shown, strict=False):
        _draw_digit(axes, images[i], labels[i], predicted[i])
    for axes in list(grid):
        axes.set_axis_off()


def _draw_digit(axes: Axes, image: Any, label: int, predicted: int) -> None:
    axes.imshow(image, cmap="gray_r", vmin=0, vmax=1)
    axes.set_xticks([])
    axes.set_yticks([])
    wrong = predicted != label
    axes.set_xlabel(
        f"{predicted}, is {label}" if wrong else f"{predicted}",
        color=RED if wrong else GREY,
        weight="bold" if wrong else "normal",
    )
    for spine in axes.spines.values():
        spine.set(color=RED if wrong else "#cccccc", linewidth=2.0 if wrong else 0.8)
