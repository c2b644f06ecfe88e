"""Installs packages that bring a backend, as pip would, for the length of a test."""

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from polyscan import dispatch

Install = Callable[[str, str, Mapping[str, str]], None]


@contextmanager
def site_packages(folder: Path) -> Iterator[Install]:
    """Yields ``install(module, source, {name: entry point})``: a distribution of one module."""
    installed = []

    def install(module: str, source: str, entries: Mapping[str, str]) -> None:
        (folder / f"{module}.py").write_text(source, encoding="utf-8")
        info = folder / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        lines = [f"{name} = {value}" for name, value in entries.items()]
        (info / "entry_points.txt").write_text("\n".join(["[polyscan.backends]", *lines, ""]))
        importlib.invalidate_caches()
        installed.append(module)
        dispatch.clear_caches()

    folder.mkdir()
    sys.path.insert(0, str(folder))
    try:
        yield install
    finally:
        sys.path.remove(str(folder))
        for module in installed:
            sys.modules.pop(module, None)
        dispatch.clear_caches()
