"""The only file that asks about devices."""

import platform
import subprocess
from pathlib import Path

import torch


def tf32_allowed(device: torch.device) -> bool:
    """Whether float32 products may be rounded to TF32 on this device, by torch's own setting."""
    return device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32"


def has_float64(device: torch.device) -> bool:
    """Apple's GPUs have no double precision."""
    return device.type != "mps"


def usable(device: torch.device | str) -> torch.device:
    """The device, with its index where it has one.

    Raises:
        ValueError: torch cannot use it here.
    """
    try:
        return torch.empty(0, device=device).device
    except (AssertionError, RuntimeError) as error:  # the former from a torch without CUDA
        raise ValueError(f"device {str(device)!r} cannot be used: {error}") from error


def cpu_name() -> str:
    """The processor's model where Linux tells it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def describe_devices() -> list[str]:
    """One line per kind of device that torch can see, for people."""
    lines = [f"cpu: {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            lines.append(
                f"cuda:{index}: {properties.name}, capability "
                f"{properties.major}.{properties.minor}, "
                f"{properties.total_memory / 2**30:.0f} GiB"
            )
    else:
        lines.append("cuda: none that torch can use")
    return lines


def driver_version() -> str | None:
    """Of the NVIDIA driver; None where there is none to ask."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer.stdout.split("\n")[0].strip() or None
