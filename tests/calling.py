"""Small random calls, their gradients, a layer, and where a backend takes them."""

from functools import partial

import pytest
import torch

import polyscan

REQUIRED = ("x", "dt", "A", "B", "C")
OPTIONAL = ("D", "z", "dt_bias", "dt_rev", "A_rev", "B_rev", "C_rev", "dt_bias_rev")
STATES = ("initial_states", "initial_states_rev")
FLOATS = (*REQUIRED, *OPTIONAL, *STATES)
SIZES = {"batch": 2, "seqlen": 5, "nheads": 4, "headdim": 3, "ngroups": 2, "d_state": 5}

# The same kernels on the same data; room only for a backend that adds up in any order.
assert_same = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)


def tensors(*names, device="cpu", dtype=torch.float32, grad=(), **sizes):
    """Random arguments, the required ones and those named; ``grad`` holds which are to have one."""
    batch, seqlen, nheads, headdim, ngroups, d_state = (SIZES | sizes).values()
    shapes = {
        "x": (batch, seqlen, nheads, headdim),
        "dt": (batch, seqlen, nheads),
        "A": (nheads,),
        "B": (batch, seqlen, ngroups, d_state),
        "C": (batch, seqlen, ngroups, d_state),
        "D": (nheads, headdim),
        "z": (batch, seqlen, nheads, headdim),
        "dt_bias": (nheads,),
        "initial_states": (batch, nheads, headdim, d_state),
    }
    generator = torch.Generator().manual_seed(0)
    arguments = {}
    for name in FLOATS:
        if name in REQUIRED or name in names:
            shape = shapes[name.removesuffix("_rev")]
            value = torch.rand(shape, generator=generator, dtype=dtype).to(device)
            value = -value if name.startswith("A") else value
            arguments[name] = value.requires_grad_(name in grad)
    return arguments


def first_device(backend):
    """The first device on which the backend takes these calls; skips where there is none."""
    for device in ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",):
        explanation = polyscan.explain(**tensors(*FLOATS, device=device), backend=backend)
        if explanation.backend == backend:
            return device
    return pytest.skip(explanation.reasons[backend])


def loss_of(outputs):
    """A number to which every element of every output gives something else."""
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return sum((output * output.detach().cos()).sum() for output in outputs)


def gradients(outputs, arguments):
    """By name, without touching ``grad``."""
    found = torch.autograd.grad(loss_of(outputs), tuple(arguments.values()))
    return dict(zip(arguments, found, strict=True))


def assert_grads(arguments, expected):
    for name, value in arguments.items():
        assert_same(value.grad, expected[name], msg=lambda text, name=name: f"d{name}: {text}")


class Layer(torch.nn.Module):
    """A module that calls polyscan between operations of PyTorch's own."""

    NAMES = ("x", "dt", "B", "C", "z")

    def __init__(self, backend):
        super().__init__()
        self.backend = backend
        self.mix = torch.nn.Linear(3, 3)
        self.A = torch.nn.Parameter(-torch.rand(4))
        self.D = torch.nn.Parameter(torch.rand(4, 3))

    def forward(self, x, dt, B, C, z):
        ssd = partial(polyscan.bidi_ssd, shift=True, return_final_states=True, backend=self.backend)
        y, *final_states = ssd(self.mix(x), dt, self.A, B, C, D=self.D, z=z)
        return y.relu(), *final_states


def layer_inputs(device, **sizes):
    arguments = tensors("z", device=device, **sizes)
    return tuple(arguments[name] for name in Layer.NAMES)
