"""The backends that are installed: entry points of the group ``polyscan.backends``, loaded on use.

An entry point that fails to load stays listed; the failure is its reason for being unavailable.
"""

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import NoReturn

from torch import Tensor

from .backend import Backend
from .problem import SSDInputs, SSDOutputs, SSDProblem

GROUP = "polyscan.backends"


@cache
def names() -> tuple[str, ...]:
    """The names of all installed backends, polyscan's own first. Loads none of them."""
    return tuple(_entries())


@cache
def load(name: str) -> Backend:
    """The backend of that name; one that cannot be loaded is returned as unavailable."""
    entry = _entries()[name]
    try:
        backend: Backend = entry.load()
        own_name = backend.name
    # Whatever a foreign module raises on import, the other backends must go on working.
    except Exception as error:
        return _Unloadable(name, f"cannot be loaded: {_describe(error)}")
    if own_name != name:
        return _Unloadable(name, f"calls itself {own_name!r}; the names must agree")
    return backend


@cache
def unavailable_reason(name: str) -> str | None:
    """Why the backend cannot run on this machine at all, or None."""
    try:
        return load(name).unavailable_reason()
    # As on loading: what goes wrong in one backend is that backend's reason.
    except Exception as error:
        return f"cannot tell whether it is available: {_describe(error)}"


def unsupported_reason(name: str, problem: SSDProblem) -> str | None:
    """Why the backend cannot do the problem, or None."""
    try:
        return load(name).unsupported_reason(problem)
    except Exception as error:
        return f"cannot tell whether it supports this: {_describe(error)}"


def version(name: str) -> str:
    """The version that the backend gives, for people."""
    try:
        return load(name).version()
    # Not worth losing the list of all backends for.
    except Exception as error:
        return f"unknown ({_describe(error)})"


def clear_caches() -> None:
    """Forget what is installed, for a process in which that changes."""
    for cached in (_entries, names, load, unavailable_reason):
        cached.cache_clear()


@cache
def _entries() -> Mapping[str, EntryPoint]:
    found = sorted(
        entry_points(group=GROUP),
        key=lambda entry: (not entry.value.startswith(GROUP + "."), entry.name),
    )
    # Reversed, so that nobody's entry point replaces one of polyscan's own.
    by_name = {entry.name: entry for entry in reversed(found)}
    return MappingProxyType(dict(reversed(by_name.items())))


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class _Unloadable:
    """Stands in for a backend whose module could not be imported."""

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        self._reason = reason

    def version(self) -> str:
        return "unknown"

    def unavailable_reason(self) -> str:
        return self._reason

    def unsupported_reason(self, problem: SSDProblem) -> str:
        return self._reason

    def forward(self, problem: SSDProblem, inputs: SSDInputs) -> NoReturn:
        raise AssertionError("dispatch never chooses an unavailable backend")

    def backward(
        self,
        problem: SSDProblem,
        inputs: SSDInputs,
        pre_gate: Tensor | None,
        grads: SSDOutputs,
    ) -> NoReturn:
        raise AssertionError("dispatch never chooses an unavailable backend")
