"""Compile Triton kernels for GPUs that are not there, as the backend would launch them.

:func:`launches` runs a call on the backend with every launch noted instead of done; :func:`compile`
turns one into machine code, and :func:`resources` reads what it takes.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from polyscan.backends.triton import call as triton_call
from polyscan.backends.triton.machine import Machine
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from cases import Call
from running import run_pair

TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
}
OPTIONS = ("num_warps", "num_stages")


@dataclass(frozen=True)
class Launch:
    kernel: JITFunction
    arguments: dict[str, Any]
    options: dict[str, int]


def launches(call: Call, multiprocessors: int) -> list[Launch]:
    """Every kernel that forward and backward of a call would launch, in order."""
    noted = []

    def launcher(kernel, grid):
        def launch(*args, **given):
            options = {name: given.pop(name) for name in OPTIONS if name in given}
            arguments = dict(zip(kernel.arg_names, args, strict=False)) | given
            noted.append(Launch(kernel, arguments, options))

        return launch

    machine = Machine(multiprocessors, interpreted=False)
    with (
        mock.patch.object(JITFunction, "__getitem__", launcher),
        mock.patch.object(triton_call, "machine_of", return_value=machine),
    ):
        run_pair(call, "triton", "triton")
    return noted


def target(name: str) -> GPUTarget:
    """'sm_90' or 'gfx942'."""
    if name.startswith("sm_"):
        return GPUTarget("cuda", int(name[3:]), 32)
    return GPUTarget("hip", name, 32 if name.startswith(("gfx10", "gfx11", "gfx12")) else 64)


def compile(launch: Launch, gpu: GPUTarget) -> Any:
    """The compiled kernel, specialised as a real launch would."""
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        kind, is_16 = "constexpr", False
        if not parameter.is_constexpr and value is not None:
            if isinstance(value, torch.Tensor):
                kind, is_16 = "*" + TYPES[value.dtype], True
            elif isinstance(value, float):
                kind = "fp32"
            elif value != 1 or parameter.do_not_specialize:
                kind = "i32" if abs(value) < 2**31 else "i64"
                is_16 = value % 16 == 0 and not parameter.do_not_specialize
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[(index,)] = value
        elif is_16:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, constants, attributes)
    return triton.compile(source, target=gpu, options=launch.options)


def resources(kernel: Any, gpu: GPUTarget) -> dict[str, int]:
    """Registers of a thread, instructions that spill them, bytes of shared memory."""
    shared = kernel.metadata.shared
    if gpu.backend == "hip":
        text = kernel.asm["amdgcn"]

        def number(pattern):
            return int(re.search(pattern + r":\s+(\d+)", text)[1])

        registers, spills = number(r"\.vgpr_count"), number(r"\.vgpr_spill_count")
        return {"registers": registers, "spills": spills, "shared": shared}
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _output(tools / "cuobjdump", "--dump-resource-usage", file.name)
        code = _output(tools / "nvdisasm", "-c", file.name)
    registers = int(re.search(r"REG:(\d+)", usage)[1])
    spills = len(re.findall(r"\b(?:STL|LDL)\b", code))
    return {"registers": registers, "spills": spills, "shared": shared}


def _output(*command: object) -> str:
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=True).stdout
