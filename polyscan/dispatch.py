"""Which backend runs, and why: the request, the refusals, and the one table of preferences.

"Can it" is the backend's own answer; "should it" is the table here. A backend that was asked for by
name runs or raises; it is never replaced.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch

from . import registry
from .backend import Backend
from .errors import BackendUnavailable, UnsupportedProblem
from .problem import SSDProblem

AUTO = "auto"
# What compiled code passes on where no backend was named: the choice falls when it runs.
DEFERRED = ""
ENVIRONMENT_VARIABLE = "POLYSCAN_BACKEND"
# The yardstick: right everywhere, fast nowhere.
NEVER_AUTOMATIC = frozenset({"reference"})

Source = Literal["argument", "context", "environment", "table"]


class Preference(NamedTuple):
    """A row of the table: for these problems, try the backends in this order."""

    where: str
    applies: Callable[[SSDProblem], bool]
    order: tuple[str, ...]


# Measured on two cores (benchmarks/results/cpu-2-cores.json): numba computes tiles of 32 tokens and
# loses to torch where most sequences leave theirs half empty.
SHORT = 48


def _long_on_cpu(problem: SSDProblem) -> bool:
    sequences = problem.nsequences or problem.batch
    return problem.device.type == "cpu" and problem.batch * problem.seqlen >= SHORT * sequences


# The first row that applies decides. Backends that no row names, from other packages, come last.
PREFERENCES: tuple[Preference, ...] = (
    Preference(f"cpu, {SHORT} tokens a sequence or more", _long_on_cpu, ("numba", "torch")),
    Preference("any", lambda problem: True, ("torch", "numba")),
)

_context: ContextVar[str | None] = ContextVar("polyscan_backend", default=None)


class Request(NamedTuple):
    """A backend's name or "auto", and who asked for it."""

    name: str
    source: Source


@dataclass(frozen=True)
class Explanation:
    """How a backend would be chosen for a call; ``str()`` of it is the text for people.

    ``backend`` is None where nothing can run the call; ``source`` tells who decided; ``reasons``
    holds for each backend that was not taken why it was passed over.
    """

    backend: str | None
    source: Source
    reasons: MappingProxyType[str, str]

    def __hash__(self) -> int:
        return hash((self.backend, self.source, frozenset(self.reasons.items())))

    def __reduce__(self) -> tuple[Callable[..., "Explanation"], tuple[object, ...]]:
        return _explanation, (self.backend, self.source, dict(self.reasons))

    def __str__(self) -> str:
        chosen = self.backend or "no backend"
        by = {
            "argument": "the argument backend=",
            "context": "polyscan.use_backend",
            "environment": f"the environment variable {ENVIRONMENT_VARIABLE}",
            "table": "polyscan's order of preference",
        }[self.source]
        lines = [f"{chosen}, by {by}"]
        lines += [f"  not {name}: {reason}" for name, reason in self.reasons.items()]
        return "\n".join(lines)


def _explanation(backend: str | None, source: Source, reasons: dict[str, str]) -> Explanation:
    return Explanation(backend, source, MappingProxyType(reasons))


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Within the ``with`` block, calls that name no backend take this one (or "auto").

    Raises:
        ValueError: no backend of that name is installed.
    """
    token = _context.set(_known(name, "use_backend"))
    try:
        yield
    finally:
        _context.reset(token)


def resolve_request(backend: str) -> Request:
    """Argument, else context, else environment, else the table.

    Under torch.compile only the argument is known; :func:`select` then does the rest.
    """
    if torch.compiler.is_compiling():
        return Request(DEFERRED if backend == AUTO else backend, "argument")
    if backend != AUTO:
        return Request(_known(backend, "backend"), "argument")
    name = _context.get()
    if name is not None and name != AUTO:
        return Request(name, "context")
    # An "auto" in the context overrules the environment: inner choices win.
    name = os.environ.get(ENVIRONMENT_VARIABLE) if name is None else None
    if name and name != AUTO:
        return Request(_known(name, ENVIRONMENT_VARIABLE), "environment")
    return Request(AUTO, "table")


def select(problem: SSDProblem, name: str) -> Backend:
    """The backend that runs ``problem``, for a name or "auto".

    Raises:
        BackendUnavailable: the named backend cannot run on this machine.
        UnsupportedProblem: the named backend, or every one, cannot do this problem.
    """
    name = resolve_request(AUTO).name if name == DEFERRED else _known(name, "backend")
    chosen, reasons = _choose(problem, name)
    if chosen is not None:
        return registry.load(chosen)
    if name == AUTO:
        raise UnsupportedProblem("No installed backend can do this call:", reasons)
    headline = f"The backend {name!r} was asked for by name and "
    if registry.unavailable_reason(name) is not None:
        raise BackendUnavailable(headline + "is not available here:", reasons)
    raise UnsupportedProblem(headline + "cannot do this call:", reasons)


def explain(problem: SSDProblem, request: Request) -> Explanation:
    """What :func:`select` would do, with a reason for every backend that it would not take."""
    if request.name == DEFERRED:
        request = resolve_request(AUTO)
    chosen, reasons = _choose(problem, request.name)
    passed_over = dict(reasons)
    for name in registry.names():
        if name == chosen or name in passed_over:
            continue
        passed_over[name] = _refusal(problem, name) or _not_preferred(
            problem, request, name, chosen
        )
    return Explanation(chosen, request.source, MappingProxyType(passed_over))


@dataclass(frozen=True)
class BackendInfo:
    """An installed backend: ``reason`` is None where it can run, else why it cannot."""

    name: str
    version: str
    reason: str | None

    @property
    def available(self) -> bool:
        return self.reason is None


def available_backends() -> dict[str, BackendInfo]:
    """Every installed backend by name, with its version or the reason why it cannot run here."""
    return {
        name: BackendInfo(name, registry.version(name), registry.unavailable_reason(name))
        for name in registry.names()
    }


def clear_caches() -> None:
    """Forget what is installed and what was chosen."""
    registry.clear_caches()
    _choose.cache_clear()


@lru_cache(maxsize=4096)
def _choose(problem: SSDProblem, name: str) -> tuple[str | None, MappingProxyType[str, str]]:
    """The first candidate without a refusal, and the refusals of those before it."""
    reasons: dict[str, str] = {}
    for candidate in candidates(problem) if name == AUTO else (name,):
        reason = _refusal(problem, candidate)
        if reason is None:
            return candidate, MappingProxyType(reasons)
        reasons[candidate] = reason
    return None, MappingProxyType(reasons)


def candidates(problem: SSDProblem) -> tuple[str, ...]:
    """The backends that auto tries for a problem, in order."""
    installed = registry.names()
    row = next(row for row in PREFERENCES if row.applies(problem))
    named_anywhere = {name for row in PREFERENCES for name in row.order}
    others = (n for n in installed if n not in named_anywhere and n not in NEVER_AUTOMATIC)
    return (*(name for name in row.order if name in installed), *others)


def _refusal(problem: SSDProblem, name: str) -> str | None:
    return registry.unavailable_reason(name) or registry.unsupported_reason(name, problem)


def _not_preferred(problem: SSDProblem, request: Request, name: str, chosen: str | None) -> str:
    if request.name != AUTO:
        return f"can do it, but {request.name} was asked for by name"
    if name in NEVER_AUTOMATIC:
        return "can do it, but is only ever taken by name"
    if name not in candidates(problem):
        return "can do it, but is not in the order of preference for such problems"
    return f"can do it, but {chosen} comes first"


def _known(name: str, where: str) -> str:
    if not isinstance(name, str):
        raise TypeError(f"{where} must be a string, got {type(name).__name__}")
    if name != AUTO and name not in registry.names():
        installed = ", ".join((AUTO, *registry.names()))
        raise ValueError(f"{where} must be one of {installed}; got {name!r}")
    return name
