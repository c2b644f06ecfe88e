"""Peak memory of forward+backward on the CPU, each implementation in a process of its own.

    python benchmarks/memory.py benchmarks/results/memory.json     # all of them
    python benchmarks/memory.py torch 2 2048 8 64 64               # one, as JSON on standard output

Measured twice, and the two should agree: how far the process grew, as the kernel counts its pages
(VmHWM, set back to the present with /proc/self/clear_refs, so Linux only), and what torch's
allocator had handed out at most, from its profiler. The inputs stand before and do not count;
y, gradients and everything between do.
"""

import gc
import json
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor

import polyscan
from polyscan.bench import plain

MIB = 2**20
# batch, seqlen, nheads, headdim, d_state; ngroups 1, float32, shift
SHAPES = ((2, 2048, 8, 64, 64), (1, 65536, 4, 64, 16))
IMPLEMENTATIONS = ("plain", "torch")


def arguments(batch: int, seqlen: int, nheads: int, headdim: int, d_state: int) -> list[Tensor]:
    tensors = [
        torch.randn(batch, seqlen, nheads, headdim),
        torch.randn(batch, seqlen, nheads),
        -torch.rand(nheads) - 0.1,
        torch.randn(batch, seqlen, 1, d_state),
        torch.randn(batch, seqlen, 1, d_state),
        torch.randn(nheads),
        -torch.rand(nheads) - 1,
    ]
    return [tensor.requires_grad_() for tensor in tensors]


def forward_backward(implementation: str, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    if implementation == "plain":
        y = plain.both_directions(plain.causal_pass, *tensors, shift=True)
    else:
        x, dt, A, B, C, D, dt_bias = tensors
        options = {"D": D, "dt_bias": dt_bias, "dt_softplus": True, "shift": True}
        y = polyscan.bidi_ssd(x, dt, A, B, C, **options, backend=implementation)
    return torch.autograd.grad(y, tensors, torch.ones(()).expand(y.shape))


def resident(field: str) -> float:
    """VmRSS, what the process holds now, or VmHWM, the most it held; in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.removesuffix("kB")) * 1024 / MIB
    raise LookupError(field)


def grown_by(implementation: str, tensors: list[Tensor]) -> float:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    forward_backward(implementation, tensors)
    return resident("VmHWM") - before


def allocated_by(implementation: str, tensors: list[Tensor]) -> float:
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        forward_backward(implementation, tensors)
    now = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most / MIB


def prepare(implementation: str, *shape: int) -> list[Tensor]:
    """The arguments; what threads and libraries take for themselves, once, is taken before."""
    torch.manual_seed(0)
    batch, _, *sizes = shape
    for _ in range(2):
        forward_backward(implementation, arguments(batch, plain.CHUNK_SIZE * 2, *sizes))
    return arguments(*shape)


def measure(implementation: str, *shape: int) -> dict[str, object]:
    tensors = prepare(implementation, *shape)
    return {
        "implementation": implementation,
        "shape": shape,
        "grown_mib": grown_by(implementation, tensors),
        "allocated_mib": allocated_by(implementation, tensors),
        "inputs_mib": sum(tensor.nbytes for tensor in tensors) / MIB,  # and so are the gradients
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def measure_apart(implementation: str, *shape: int) -> dict[str, object]:
    """In a process of its own, which nothing else has grown."""
    command = [sys.executable, __file__, implementation, *map(str, shape)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        rows = [measure_apart(name, *shape) for shape in SHAPES for name in IMPLEMENTATIONS]
        Path(sys.argv[1]).write_text(json.dumps(rows, indent=1) + "\n")
    else:
        print(json.dumps(measure(sys.argv[1], *map(int, sys.argv[2:]))))
