"""The only file that asks about devices."""

import torch


def tf32_allowed(device: torch.device) -> bool:
    """Whether float32 products may be rounded to TF32 on this device, by torch's own setting."""
    return device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32"


def has_float64(device: torch.device) -> bool:
    """Apple's GPUs have no double precision."""
    return device.type != "mps"


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
