"""Backends of another package, which record what they are asked, and calls to ask them with.

Each fills its results with a constant of its own, so that every result tells who computed it.
"""

import importlib.metadata
import inspect

import torch

import polyscan
from polyscan import dispatch

VARIABLE = "POLYSCAN_BACKEND"
BUILT_IN = {
    entry.name
    for entry in importlib.metadata.distribution("polyscan").entry_points
    if entry.group == "polyscan.backends"
}
AUTOMATIC = BUILT_IN - {"reference"}


class Fake:
    """A backend that fills everything with ``mark``; missing and refusal are set by a test."""

    def __init__(self, name, mark):
        self.name = name
        self.mark = mark
        self.missing = None
        self.refusal = None
        self.asked = []
        self.ran = []  # (step, problem, whether autograd or autocast was on)

    def version(self):
        return f"{self.name} 1.0"

    def unavailable_reason(self):
        return self.missing

    def unsupported_reason(self, problem):
        self.asked.append(problem)
        return self.refusal

    def forward(self, problem, inputs):
        self._record("forward", problem)
        outputs = problem.allocate_outputs(inputs)
        for output in outputs:
            if output is not None:
                output.fill_(self.mark)
        return outputs

    def backward(self, problem, inputs, pre_gate, grads):
        self._record("backward", problem)
        return {
            name: tensor.new_full(tensor.shape, self.mark)
            for name, tensor in inputs._asdict().items()
            if tensor is not None and tensor.is_floating_point()
        }

    def _record(self, step, problem):
        mode = torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")
        self.ran.append((step, problem, mode))

    def steps(self):
        return [step for step, _, _ in self.ran]


MODULE = f"""
import torch

{inspect.getsource(Fake)}

BACKEND = Fake("fake", 7.0)
OTHER = Fake("other", 11.0)
"""


def set_up(backend, **attributes):
    """Change what a fake backend says; answers are cached, for a backend gives always the same."""
    vars(backend).update(attributes)
    dispatch.clear_caches()


def arguments(**changes):
    batch, seqlen, nheads, headdim, ngroups, d_state = 3, 5, 4, 7, 2, 6
    tensors = {
        "x": torch.ones(batch, seqlen, nheads, headdim),
        "dt": torch.ones(batch, seqlen, nheads),
        "A": -torch.ones(nheads),
        "B": torch.ones(batch, seqlen, ngroups, d_state),
        "C": torch.ones(batch, seqlen, ngroups, d_state),
    }
    return {**tensors, **changes}


def mark_of(**changes):
    """The constant in y; None if it is no constant, as for any real backend."""
    y = polyscan.bidi_ssd(**arguments(**changes))
    values = y.unique()
    return values.item() if values.numel() == 1 else None
