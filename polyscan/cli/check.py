"""``python -m polyscan check``: whether the backends compute the right thing here."""

from collections.abc import Sequence

import polyscan


def check(backends: Sequence[str] | None, device: str | None) -> bool:
    """Print the table; whether all is well."""
    report = polyscan.check(backends, device)
    print(report)
    return report.passed
