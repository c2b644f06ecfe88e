"""Who computes: polyscan's backends, the usual way in plain PyTorch, and the peers.

An implementation gives a reason where it cannot run on this machine, and another where it cannot do
a case; both are reported, neither is a failure.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from polyscan import dispatch, registry
from polyscan.problem import SSDInputs, SSDOptions, SSDProblem

from .operations import BOTH, Operation, Task, Tensors
from .plain import both_directions, causal_pass
from .presets import Case


class Implementation(ABC):
    """``chunk_sizes`` are those to choose from, the usual one first; None where none is taken.

    ``own``: whether it is polyscan's, and a wrong result an error. ``slow``: whether it takes so
    long that it runs only when it is named. ``note``: what to know about its numbers.
    """

    operation: Operation = BOTH
    chunk_sizes: tuple[int | None, ...] = (None,)
    own: bool = True
    slow: bool = False
    note: str = ""

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def missing(self, device: torch.device) -> str | None:
        """Why it cannot run on this machine at all, or None."""

    @abstractmethod
    def refusal(self, task: Task, device: torch.device) -> str | None:
        """Why it cannot do this there, or None; the task's tensors may be on the device meta."""

    @abstractmethod
    def compute(self, leaves: Tensors, options: dict[str, Any], chunk_size: int | None) -> Tensor:
        """y, from the leaves and options of a task."""


class Backend(Implementation):
    """One of polyscan's."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.slow = name in dispatch.NEVER_AUTOMATIC

    def missing(self, device: torch.device) -> str | None:
        return registry.unavailable_reason(self.name)

    def refusal(self, task: Task, device: torch.device) -> str | None:
        options = dict(task.options)
        tensors = {name: options.pop(name) for name in ("cu_seqlens",) if name in options}
        problem = SSDProblem.describe(
            SSDInputs(**task.leaves, **tensors),
            SSDOptions(**options, tf32=task.case.precision == "tf32"),
            needs_grad=True,
        )
        return registry.unsupported_reason(self.name, replace(problem, device=device))

    def compute(self, leaves: Tensors, options: dict[str, Any], chunk_size: int | None) -> Tensor:
        return self.operation.compute(leaves, options, self.name)


class Plain(Implementation):
    """Flip, concatenate, one causal pass, roll, add; in PyTorch, compiled or not."""

    def __init__(self, name: str, compiled: bool) -> None:
        super().__init__(name)
        self.slow = compiled
        self._function: Callable[..., Tensor] = both_directions
        if compiled:
            self._function = torch.compile(both_directions, dynamic=False)

    def missing(self, device: torch.device) -> str | None:
        if self.slow and device.type == "cuda" and find_spec("triton") is None:
            return "needs triton, which is not installed"
        return None

    def refusal(self, task: Task, device: torch.device) -> str | None:
        return "does not know packed sequences" if "cu_seqlens" in task.options else None

    def compute(self, leaves: Tensors, options: dict[str, Any], chunk_size: int | None) -> Tensor:
        return self._function(causal_pass, **leaves, shift=options["shift"])


@cache
def implementations() -> Mapping[str, Implementation]:
    """All of them by name: backends first, then plain PyTorch, then the peers."""
    from .peers import PEERS

    found: list[Implementation] = [Backend(name) for name in registry.names()]
    found += [Plain("plain", compiled=False), Plain("plain-compiled", compiled=True), *PEERS]
    return {one.name: one for one in found}


def find(patterns: list[str] | None) -> list[Implementation]:
    """Those that any of the patterns names; without patterns, all but the slow ones.

    Raises:
        ValueError: a pattern names none.
    """
    known = implementations()
    if patterns is None:
        return [one for one in known.values() if not one.slow]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            raise ValueError(f"nothing is called {pattern!r}; there are {', '.join(known)}")
    return [
        one
        for name, one in known.items()
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    ]


def can_run(one: Implementation, case: Case, device: torch.device) -> str | None:
    """Why it cannot, on this machine or this case, or None. Allocates nothing."""
    reason = one.missing(device)
    return reason if reason is not None else one.refusal(one.operation.task(case, "meta"), device)
