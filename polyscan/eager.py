"""Calls in plain eager PyTorch: how they are told apart, and what is remembered of them.

What the checks of a call find, and which problem it poses, follows from its options and from the
shapes, dtypes and devices of its tensors: its signature. A call that is like an earlier one looks
that up. A call that anything else takes part in has no signature, and goes the whole way each time.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

Result = TypeVar("Result")

# How many signatures, and how many answers, are remembered at a time.
CAPACITY = 4096


class Signature:
    """Stands for all plain calls with tensors that are alike: while remembered, one object."""


_signatures: dict[tuple[Hashable, ...], Signature] = {}
_answers: dict[tuple[Hashable, ...], tuple[Any]] = {}
_attributes = attrgetter("shape", "dtype", "device", "layout")
_TYPES = frozenset({Tensor, torch.nn.Parameter, type(None)})
# What the dispatcher does for every call; modes, transforms and tracers add themselves to it.
_ORDINARY_KEYS = (
    torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)
    .add(torch._C.DispatchKey.ADInplaceOrView)
    .raw_repr()
)

# Tensors under vmap, PyTorch's older one too, and under torch.func's derivatives.
_TRANSFORM_KEYS = ("FuncTorchBatched", "Batched", "FuncTorchGradWrapper")


def is_plain(tensors: Sequence[Any]) -> bool:
    """Whether PyTorch alone takes part in a call with these tensors, any of which may be None.

    Not so while compiling or tracing, under a mode, a transform, forward-mode AD or the profiler,
    and with fake tensors or any other subclass. Meta tensors leave the computing to others, too.
    """
    if torch.compiler.is_compiling():  # first, for the rest cannot be traced
        return False
    keys: int = torch._C._dispatch_tls_local_include_set().raw_repr()
    return (
        not keys & ~_ORDINARY_KEYS
        and forward_ad._current_level < 0
        and not torch._C._is_torch_function_mode_enabled()
        and not torch._C._autograd._profiler_enabled()
        and _TYPES.issuperset(map(type, tensors))
        and not (tensors[0] is not None and tensors[0].is_meta)
    )


def is_transformed(tensors: Iterable[Any]) -> bool:
    """Whether vmap, torch.func or forward-mode AD would have a say in what becomes of these."""
    return any(
        any(torch._C._dispatch_keys(t).has(key) for key in _TRANSFORM_KEYS)
        or forward_ad.unpack_dual(t).tangent is not None
        for t in tensors
        if isinstance(t, Tensor)
    )


def signature(tensors: Sequence[Any]) -> Signature | None:
    """What calls with such tensors have in common; None where the call is not plain."""
    if not is_plain(tensors):
        return None
    alike = tuple([None if t is None else _attributes(t) for t in tensors])
    return _signatures.get(alike) or _remember(_signatures, alike, Signature())


def recall(
    signature: Signature | None, function: Callable[..., Result], tensors: Any, *options: Hashable
) -> Result:
    """``function(tensors, *options)``, computed once for all calls of one signature.

    The function must look at nothing but what the signature holds and the options. What it raises
    is not remembered.
    """
    if signature is None:
        return function(tensors, *options)
    question = (signature, function, options)
    answer: tuple[Result] | None = _answers.get(question)
    if answer is None:
        answer = _remember(_answers, question, (function(tensors, *options),))
    return answer[0]


def _remember(memory: dict[Any, Any], key: Hashable, value: Any) -> Any:
    if len(memory) >= CAPACITY:
        memory.clear()  # rare, and made good within a few calls
    memory[key] = value
    return value
