"""Data-parallel training, DDP and FSDP2: gradients are those of one process on the whole batch."""

import subprocess
import sys
import time

import pytest
import torch

import data_parallel
import polyscan
from calling import Layer, layer_inputs

# Processes that wait for one another must end at some time. Numba may have to compile.
TIME_LIMIT_S = 240


@pytest.fixture
def on_cpu(backend):
    """The name of a backend that takes the layer's calls on the CPU."""
    with polyscan.use_backend(backend):
        try:
            Layer("auto")(*layer_inputs("cpu"))
        except polyscan.BackendError as refusal:
            pytest.skip("; ".join(refusal.reasons.values()))
    return backend


def run_processes(kind, backend, folder):
    """What each process found the gradients to be."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = range(data_parallel.PROCESSES)
    logs = [folder / f"{rank}.log" for rank in ranks]
    processes = []
    for rank, log in zip(ranks, logs, strict=True):
        arguments = (kind, backend, str(rank), str(store.port), str(folder))
        with log.open("w") as output:
            processes.append(
                subprocess.Popen(
                    [sys.executable, data_parallel.__file__, *arguments],
                    stdout=output,
                    stderr=output,
                )
            )
    deadline = time.monotonic() + TIME_LIMIT_S
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes) or time.monotonic() > deadline:
            break  # one failed, and the other waits for it; or they wait for one another
        time.sleep(0.05)
    for process in processes:
        process.kill()
    told = "\n".join(log.read_text() for log in logs)
    assert [process.wait() for process in processes] == [0, 0], told
    return [torch.load(folder / f"{rank}.pt") for rank in ranks]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_gradients_are_those_of_one_process(request, on_cpu, kind, tmp_path):
    if (kind, on_cpu) == ("fsdp", "numba"):
        reason = "Tensor.numpy() fixes the size of its arguments' storages, which FSDP2 must free"
        request.applymarker(pytest.mark.xfail(reason=reason))
    layer = data_parallel.make_layer(on_cpu)
    data_parallel.backward(layer, data_parallel.share_of())
    expected = {name: parameter.grad for name, parameter in layer.named_parameters()}
    assert all(gradient.count_nonzero() for gradient in expected.values())
    for gradients in run_processes(kind, on_cpu, tmp_path):
        torch.testing.assert_close(gradients, expected, rtol=1e-5, atol=1e-6)
