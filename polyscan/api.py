"""The public functions: validate, put the arguments in order, and hand over to the operation."""

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from . import dispatch, eager
from .dispatch import Explanation, Request
from .eager import Signature
from .hardware import tf32_allowed
from .masking import Compacted, compact
from .op import SSD
from .problem import DirectionName, SSDInputs, SSDOptions, SSDOutputs, SSDProblem
from .validation import check_borders, check_dt_limit, check_inputs, check_mask, check_options

NO_LIMIT = (0.0, math.inf)
# A hint beyond any sequence says no more than this, and fits into an op's argument.
LARGEST_CHUNK_SIZE = 2**31
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def bidi_ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    shift: bool = False,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = NO_LIMIT,
    dt_rev: Tensor | None = None,
    A_rev: Tensor | None = None,
    B_rev: Tensor | None = None,
    C_rev: Tensor | None = None,
    dt_bias_rev: Tensor | None = None,
    initial_states: Tensor | None = None,
    initial_states_rev: Tensor | None = None,
    return_final_states: bool = False,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    mask: Tensor | None = None,
    chunk_size: int | None = None,
    backend: str = "auto",
) -> Any:
    r"""The state-space scan of Mamba-2 (SSD) in both directions at once.

    With ``dt = clamp(softplus?(dt + dt_bias), *dt_limit)`` the forward direction is

    .. math:: h_t = e^{dt_t A} h_{t-1} + dt_t x_t B_t^\top, \qquad SS(x)_t = h_t C_t

    and the reverse direction the same on the time-reversed sequence. The result is their sum, plus
    ``D * x``, times ``silu(z)``. A token sees itself through both directions, so the diagonal
    counts twice. With ``shift=True`` (Hydra, arXiv:2407.09941) each direction's output moves one
    step along its own direction and a zero enters, so a token sees itself through ``D`` only:

    .. math:: y_t = C_{t-1} h_{t-1} + C'_{t+1} g_{t+1} + D x_t

    SSD is that of Mamba-2 (arXiv:2405.21060). All tensors are on one device; floating-point dtypes
    float16, bfloat16, float32 and float64 may be mixed. Any strides will do, and no argument is
    ever written to. Every floating-point argument has a first derivative.

    Args:
        x: (batch, seqlen, nheads, headdim). batch and seqlen may be 0.
        dt: (batch, seqlen, nheads), the step sizes.
        A: (nheads,), at most 0: exp(dt * A) is the decay. Not checked. A positive A gives the
            formula's value on the backend ``reference``, on ``torch`` where no product of
            decays over a chunk overflows, and no promise elsewhere.
        B, C: (batch, seqlen, ngroups, d_state); nheads must be a multiple of ngroups.
        D: (nheads,), (nheads, headdim) or (batch, seqlen, nheads), the skip from x to y.
        z: like x, the gate.
        shift: False for Bi-Mamba2's sum, True for Hydra's.
        dt_bias: (nheads,), added to dt.
        dt_softplus: whether softplus is applied to dt, after the bias.
        dt_limit: (low, high), where dt is clamped after that; low at least 0. The gradient passes
            at the limits and between them.
        dt_rev, A_rev, B_rev, C_rev, dt_bias_rev: the reverse direction's own parameters, in
            natural time order. Each falls back on its forward twin, one by one.
        initial_states: (batch, nheads, headdim, d_state), the state before the first token.
        initial_states_rev: the same for the reverse direction: it enters after the last token.
        return_final_states: whether to return the states that leave the sequence as well.
        cu_seqlens: (number of sequences + 1,), int32 or int64: x is one row (batch 1) of packed
            sequences, and sequence i holds the tokens cu_seqlens[i] to cu_seqlens[i+1] - 1. Each is
            computed exactly as if it were alone, in both directions. Sequences may be empty; rows
            that none covers are zero in y and in every gradient. States then have one row per
            sequence.
        seq_idx: (batch, seqlen), any integers: a sequence ends wherever the number changes. Goes
            with neither states nor cu_seqlens.
        mask: (batch, seqlen), bool, True for a real token. Exactly as if only the real tokens
            existed, wherever the padding is; its rows are zero in y and in every gradient. Costs a
            copy. With cu_seqlens or seq_idx, padding is dropped first.
        chunk_size: a hint how many tokens to compute at a time. Never changes what is computed.
        backend: "auto", or the name of one of :func:`available_backends`. A named backend runs or
            raises; it is never replaced. Without a name, :func:`use_backend` and then the
            environment variable ``POLYSCAN_BACKEND`` decide.

    Returns:
        y, shaped like x and in its dtype; with ``return_final_states`` a tuple (y, final_states,
        final_states_rev), the states in float32 (float64 where x is). final_states is the state
        after the last token, final_states_rev the reverse direction's state at the first one.

    Raises:
        TypeError: an argument is of the wrong kind or dtype.
        ValueError: a shape, device or value does not fit. Names the argument, what came and what
            was wanted.
        UnsupportedProblem: the named backend, or every one, cannot do this call.
        BackendUnavailable: the named backend cannot run on this machine.
        SecondDerivativeError: a gradient of this function was differentiated again.
        TransformError: it was called under vmap, a torch.func transform or forward-mode AD.
    """
    call = _prepare(
        SSDInputs(
            *(x, dt, A, B, C, D, z, dt_bias, dt_rev, A_rev, B_rev, C_rev, dt_bias_rev),
            *(initial_states, initial_states_rev, cu_seqlens, seq_idx),
        ),
        *("both", shift, dt_softplus, dt_limit, return_final_states, mask, chunk_size, backend),
    )
    outputs = call.run()
    if outputs.final_states is None or outputs.final_states_rev is None:
        return outputs.y
    return outputs.y, outputs.final_states, outputs.final_states_rev


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    shift: bool = False,
    reverse: bool = False,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = NO_LIMIT,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    mask: Tensor | None = None,
    chunk_size: int | None = None,
    backend: str = "auto",
) -> Any:
    """One direction of :func:`bidi_ssd`, whose arguments these are.

    ``bidi_ssd(...)`` equals ``ssd(...) + ssd(..., reverse=True)`` before D and z, which it applies
    once. With ``reverse=True``, ``initial_states`` enters after the last token and the final state
    is that at the first one. Splitting a sequence and handing the final states of one part to the
    next as initial states gives the whole; under ``shift`` except for the first row of each part,
    which is zero.

    Returns:
        y, shaped like x; with ``return_final_states`` a tuple (y, final_states).
    """
    if not isinstance(reverse, bool):
        raise TypeError(f"reverse must be a bool, got {type(reverse).__name__}")
    inputs = SSDInputs(
        *(x, dt, A, B, C, D, z, dt_bias),
        initial_states=initial_states,
        cu_seqlens=cu_seqlens,
        seq_idx=seq_idx,
    )
    direction: DirectionName = "reverse" if reverse else "forward"
    call = _prepare(
        inputs,
        *(direction, shift, dt_softplus, dt_limit, return_final_states, mask, chunk_size, backend),
    )
    outputs = call.run()
    final_states = outputs.final_states_rev if reverse else outputs.final_states
    return outputs.y if final_states is None else (outputs.y, final_states)


def _takes_arguments_of(
    function: Callable[Arguments, object],
) -> Callable[[Callable[..., Result]], Callable[Arguments, Result]]:
    """Declare, to people and type checkers, that a function has another one's parameters."""

    def declare(wrapped: Callable[..., Result]) -> Callable[Arguments, Result]:
        signature = inspect.signature(function).replace(return_annotation=Explanation)
        wrapped.__signature__ = signature  # type: ignore[attr-defined]
        return wrapped

    return declare


@_takes_arguments_of(bidi_ssd)
def explain(*args: Any, **kwargs: Any) -> Explanation:
    """Which backend a call of :func:`bidi_ssd` with these arguments would take, and why.

    Runs nothing. Arguments are checked like those of a call. Where no backend can do the call, the
    explanation's ``backend`` is None.

    Returns:
        An :class:`Explanation`: ``backend``, ``source`` ("argument", "context", "environment" or
        "table") and ``reasons``, for each other backend why it was passed over.
    """
    bound = inspect.signature(bidi_ssd).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    call = _prepare(
        SSDInputs(**{name: given[name] for name in SSDInputs._fields}),
        direction="both",
        shift=given["shift"],
        dt_softplus=given["dt_softplus"],
        dt_limit=given["dt_limit"],
        return_final_states=given["return_final_states"],
        mask=given["mask"],
        chunk_size=given["chunk_size"],
        backend=given["backend"],
    )
    needs_grad = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in call.inputs
    )
    check_borders(call.inputs)
    problem = SSDProblem.describe(call.inputs, call.options, needs_grad)
    return dispatch.explain(problem, call.request)


class _Call(NamedTuple):
    """A call whose arguments have been checked and put in order."""

    inputs: SSDInputs
    options: SSDOptions
    request: Request
    padding: Compacted | None
    signature: Signature | None

    def run(self) -> SSDOutputs:
        outputs = SSD(self.inputs, self.options, self.request.name, self.signature)
        if self.padding is None:
            return outputs
        return outputs._replace(y=self.padding.restore(outputs.y))


def _prepare(
    inputs: SSDInputs,
    direction: DirectionName,
    shift: bool,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    return_final_states: bool,
    mask: Tensor | None,
    chunk_size: int | None,
    backend: str,
) -> _Call:
    signature = eager.signature(inputs)
    eager.recall(signature, check_inputs, inputs)
    options = SSDOptions(
        direction,
        shift,
        dt_softplus,
        *check_dt_limit(dt_limit),
        return_final_states,
        chunk_size,
        None if torch.compiler.is_compiling() else tf32_allowed(inputs.x.device),
    )
    check_options(inputs, options)
    if chunk_size is not None:
        options = options._replace(chunk_size=min(int(chunk_size), LARGEST_CHUNK_SIZE))
    if direction == "reverse":
        inputs = inputs._replace(initial_states=None, initial_states_rev=inputs.initial_states)
        signature = eager.signature(inputs)
    padding = None
    if mask is not None:
        check_mask(inputs, mask)
        if not torch.compiler.is_compiling():
            check_borders(inputs)  # the op will see only those between real tokens
        padding = compact(inputs, options, mask)
        inputs, options = padding.inputs, padding.options
        signature = eager.signature(inputs)
    return _Call(inputs, options, dispatch.resolve_request(backend), padding, signature)
