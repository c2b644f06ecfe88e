"""What the plans need to know about the machine that they are for."""

from functools import cache
from typing import NamedTuple

import torch


class Machine(NamedTuple):
    """``interpreted``: Triton runs its kernels in Python, on CPU tensors."""

    multiprocessors: int
    interpreted: bool


# So few that even small problems are cut up, and so many that few programs run.
INTERPRETER = Machine(multiprocessors=4, interpreted=True)


def machine_of(device: torch.device) -> Machine:
    return INTERPRETER if device.type == "cpu" else _gpu(device)


@cache
def _gpu(device: torch.device) -> Machine:
    return Machine(torch.cuda.get_device_properties(device).multi_processor_count, False)
