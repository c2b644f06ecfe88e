"""Tables in plain text."""

from collections.abc import Iterable, Sequence


def aligned(rows: Iterable[Sequence[str]]) -> str:
    """Rows as lines; every column but a row's last is as wide as its widest cell."""
    rows = list(rows)
    widths: dict[int, int] = {}
    for row in rows:
        for column, cell in enumerate(row[:-1]):
            widths[column] = max(widths.get(column, 0), len(cell))
    return "\n".join(
        "  ".join(cell.ljust(widths.get(column, 0)) for column, cell in enumerate(row)).rstrip()
        for row in rows
    )
