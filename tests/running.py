"""Runs a call: through the public functions, or through the backend objects themselves."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import polyscan
from cases import Call, Results
from polyscan import registry
from polyscan.hardware import tf32_allowed
from polyscan.problem import SSDInputs, SSDOptions, SSDOutputs, SSDProblem


def evaluate(call: Call, backend: str, library: ModuleType = polyscan) -> Results:
    """The outputs by name. ``library`` is polyscan or polyscan.reference."""
    arguments: dict[str, Any] = {**call.tensors, **call.options, "backend": backend}
    if call.direction == "both":
        outputs = library.bidi_ssd(**arguments)
    else:
        outputs = library.ssd(**arguments, reverse=call.direction == "reverse")
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    return dict(zip(call.outputs, outputs, strict=True))


def run(call: Call, backend: str, library: ModuleType = polyscan) -> Results:
    """Outputs and gradients of a call."""
    return differentiate(call, lambda given: evaluate(given, backend, library))


def differentiate(call: Call, compute: Callable[[Call], Results]) -> Results:
    """``compute``'s outputs and gradients, with every floating-point argument a leaf.

    Fails where an argument was written to, and where autograd gets no gradient for one.
    """
    before = {name: tensor.clone() for name, tensor in call.tensors.items()}
    leaves = {name: t.detach().requires_grad_() for name, t in call.floats.items()}
    outputs = compute(call.with_tensors(**leaves))
    grads = torch.autograd.grad(
        [outputs[name] for name in call.cotangents],
        list(leaves.values()),
        list(call.cotangents.values()),
    )
    for name, tensor in call.tensors.items():
        assert same_bits(tensor, before[name]), f"{name} was written to"
    results = {name: output.detach() for name, output in outputs.items()}
    return results | {f"grad_{name}": grad for name, grad in zip(leaves, grads, strict=True)}


def run_pair(call: Call, forward: str, backward: str) -> Results:
    """The forward of one backend object and the backward of another, without autograd between."""
    inputs, problem = describe(call)
    grads = {_own_name(call, name): cotangent for name, cotangent in call.cotangents.items()}
    with torch.no_grad():
        outputs = registry.load(forward).forward(problem, inputs)
        gradients = registry.load(backward).backward(
            problem, inputs, outputs.pre_gate, SSDOutputs(**grads)
        )
    results = {name: getattr(outputs, _own_name(call, name)) for name in call.outputs}
    public = {_own_name(call, name): name for name in call.floats}
    assert set(gradients) == set(public), "one gradient for every floating-point argument"
    return results | {f"grad_{public[name]}": grad for name, grad in gradients.items()}


def describe(call: Call) -> tuple[SSDInputs, SSDProblem]:
    """What a backend is given for a call whose gradient is wanted."""
    inputs = SSDInputs(**{_own_name(call, name): t for name, t in call.tensors.items()})
    options = dict(call.options)
    dt_min, dt_max = options.pop("dt_limit")
    tf32 = tf32_allowed(inputs.x.device)
    options = SSDOptions(call.direction, dt_min=dt_min, dt_max=dt_max, tf32=tf32, **options)
    return inputs, SSDProblem.describe(inputs, options, needs_grad=True)


def _own_name(call: Call, name: str) -> str:
    """``polyscan.ssd(reverse=True)`` calls initial_states what the problem calls its reverse's."""
    states = name in ("initial_states", "final_states")
    return f"{name}_rev" if states and call.direction == "reverse" else name


def skip_unsupported(call: Call, *backends: str) -> None:
    """Skip the test where a backend says that it cannot do the call, in the backend's words."""
    _, problem = describe(call)
    for backend in backends:
        reason = registry.load(backend).unsupported_reason(problem)
        if reason is not None:
            pytest.skip(f"{backend}: {reason}")


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one dtype hold the same bits, NaN included."""
    a, b = (t.detach().flatten().contiguous() for t in (a, b))
    return a.numel() == 0 == b.numel() or torch.equal(a.view(torch.uint8), b.view(torch.uint8))
