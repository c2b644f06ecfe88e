"""One process of a data-parallel training step on the CPU: what tests/test_distributed.py starts.

    python tests/data_parallel.py {ddp,fsdp} BACKEND RANK PORT FOLDER

The processes meet at the TCPStore behind PORT. Each leaves its parameters' whole gradients in
FOLDER, by name.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from calling import Layer, layer_inputs

PROCESSES = 2
BATCH = 6
TIMEOUT = timedelta(seconds=60)


def share_of(rank=None):
    """The global batch, or a process's equal share of it."""
    inputs = layer_inputs("cpu", batch=BATCH, seqlen=9)
    return inputs if rank is None else tuple(t.chunk(PROCESSES)[rank] for t in inputs)


def make_layer(backend):
    torch.manual_seed(0)
    return Layer(backend)


def backward(layer, inputs):
    """A loss that is a mean over the batch, as data-parallel training supposes."""
    sum(output.square().mean() for output in layer(*inputs)).backward()


def whole(gradient):
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def main(kind, backend, rank, port, folder):
    rank, folder = int(rank), Path(folder)
    store = distributed.TCPStore("127.0.0.1", int(port), timeout=TIMEOUT)
    distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=PROCESSES, timeout=TIMEOUT
    )
    layer = make_layer(backend)
    if kind == "ddp":
        parallel = DistributedDataParallel(layer)
    else:
        parallel = fully_shard(layer, mesh=init_device_mesh("cpu", (PROCESSES,)))
        assert all(isinstance(parameter, DTensor) for parameter in layer.parameters())
    backward(parallel, share_of(rank))
    gradients = {name: whole(parameter.grad) for name, parameter in layer.named_parameters()}
    torch.save(gradients, folder / f"{rank}.pt")
    distributed.barrier()
    # Not the usual way out: DDP's reducer, destroyed under the GIL, joins gloo's thread, and that
    # may be waiting for the GIL to drop its last work (torch 2.13).
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
