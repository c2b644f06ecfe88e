"""What the machine is, and what it can do at most."""

import os
import platform
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import torch

import polyscan
from polyscan.hardware import cpu_name, describe_devices, driver_version

from .loading import library_version
from .precision import DTYPES, PrecisionName, products_in
from .timing import MIB, CPUTimer, CUDATimer

LIBRARIES = ("triton", "cupy", "numba", "numpy", "mamba_ssm", "fla", "ssd")


class Limits(NamedTuple):
    """Bytes read and written by a copy, and FLOP of a matrix product on random numbers."""

    bytes_per_s: float
    flop_per_s: float


def limits(device: torch.device, timer: CPUTimer | CUDATimer, precision: PrecisionName) -> Limits:
    nbytes, size = 256 * MIB, 2048
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        nbytes, size = min(4096 * MIB, free // 4), 8192
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_ms = timer.time(lambda: target.copy_(source)).median_ms
    generator = torch.Generator(device).manual_seed(0)
    a, b = (
        torch.randn(size, size, generator=generator, device=device, dtype=DTYPES[precision])
        for _ in range(2)
    )
    with products_in(precision):
        product_ms = timer.time(lambda: a @ b).median_ms
    return Limits(2 * nbytes / copy_ms * 1e3, 2 * size**3 / product_ms * 1e3)


def facts(device: torch.device) -> dict[str, Any]:
    """For the record: device, driver, versions and the commit."""
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else cpu_name(),
        "devices": describe_devices(),
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "polyscan": polyscan.__version__,
        "torch": torch.__version__,
        **{name: found for name in LIBRARIES if (found := library_version(name)) is not None},
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "commit": commit(),
    }


def commit() -> str | None:
    """Of the checkout that polyscan runs from, with a "+" where files differ; else None."""
    root = Path(polyscan.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        head, changes = (
            subprocess.run(
                ["git", "-C", str(root), *command], check=True, capture_output=True, text=True
            ).stdout.strip()
            for command in (["rev-parse", "HEAD"], ["status", "--porcelain"])
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changes else "")
