"""Operations as PyTorch sees them: the only place that knows autograd and torch.library.

An :class:`Operation` derives its two torch ops, forward and backward, from the fields of its inputs
and options, so a further operation needs no plumbing of its own. The ops are opaque to tracing, and
the backend is chosen inside them, where sizes are plain ints.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import dispatch
from .errors import SecondDerivativeError
from .problem import DirectionName, SSDInputs, SSDOptions, SSDOutputs, SSDProblem
from .validation import check_borders

_LIBRARY = torch.library.Library("polyscan", "DEF")
_SCHEMA_TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    bool: "bool",
    bool | None: "bool?",
    float: "float",
    int | None: "int?",
    DirectionName: "str",
}


class _Saved(NamedTuple):
    """The further arguments of the backward op."""

    dy: Tensor
    dfinal_states: Tensor | None
    dfinal_states_rev: Tensor | None
    pre_gate: Tensor | None


class Operation:
    """A differentiable operation: ``operation(inputs, options, backend) -> SSDOutputs``."""

    def __init__(self, problem: type[SSDProblem]) -> None:
        self.problem = problem
        inputs, options = _schema(SSDInputs), _schema(SSDOptions)
        name = problem.operation
        self._forward = self._define(
            f"{name}_forward({inputs}, {options}, bool needs_grad, str backend) -> Tensor[]",
            self._forward_real,
            self._forward_fake,
        )
        self._backward = self._define(
            f"{name}_backward({inputs}, {options}, {_schema(_Saved)}, bool[] wanted, str backend)"
            " -> Tensor[]",
            self._backward_real,
            self._backward_fake,
        )

    def __call__(self, inputs: SSDInputs, options: SSDOptions, backend: str) -> SSDOutputs:
        """Run on valid arguments; ``backend`` is a name or "auto"."""
        needs_grad = torch.is_grad_enabled() and any(
            t is not None and t.requires_grad for t in inputs
        )
        # Forward-mode derivatives are refused by the Function; past it they would be lost silently.
        if needs_grad or forward_ad._current_level >= 0:
            outputs = _Run.apply(self, options, backend, *inputs)  # type: ignore[no-untyped-call]
        else:
            outputs = self._forward(*inputs, *options, False, backend)
        return self._unflatten(outputs, options)

    # The two ops. Their signatures are the schemas: inputs, options, and what is named after them.

    def _forward_real(self, *arguments: Any) -> list[Tensor]:
        inputs, options, (needs_grad, backend) = _split(arguments)
        check_borders(inputs)
        problem = self.problem.describe(inputs, options, needs_grad)
        chosen = dispatch.select(problem, backend)
        with _plain(problem.device):
            if problem.is_empty:
                return _flatten(_forward_empty(problem, inputs))
            return _flatten(chosen.forward(problem, inputs))

    def _forward_fake(self, *arguments: Any) -> list[Tensor]:
        inputs, options, (needs_grad, _) = _split(arguments)
        problem = self.problem.describe(inputs, options, needs_grad)
        return _flatten(problem.allocate_outputs(inputs))

    def _backward_real(self, *arguments: Any) -> list[Tensor]:
        inputs, options, rest = _split(arguments)
        *saved, wanted, backend = rest
        dy, dfinal_states, dfinal_states_rev, pre_gate = saved
        grads = SSDOutputs(dy, dfinal_states, dfinal_states_rev)
        problem = self.problem.describe(inputs, options, needs_grad=True)
        chosen = dispatch.select(problem, backend)
        with _plain(problem.device):
            if problem.is_empty:
                gradients = _backward_empty(problem, inputs, grads)
            else:
                gradients = dict(chosen.backward(problem, inputs, pre_gate, grads))
        names = [name for name, wants in zip(SSDInputs._fields, wanted, strict=True) if wants]
        missing = [name for name in names if name not in gradients]
        if missing:
            raise RuntimeError(
                f"the backend {chosen.name!r} returned no gradient of {', '.join(missing)}"
            )
        return [gradients[name] for name in names]

    def _backward_fake(self, *arguments: Any) -> list[Tensor]:
        inputs, _, (*_, wanted, _) = _split(arguments)
        return [
            t.new_empty(t.shape)
            for t, wants in zip(inputs, wanted, strict=True)
            if wants and t is not None
        ]

    def _define(self, schema: str, real: Any, fake: Any) -> Any:
        name = schema.partition("(")[0]
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, real, "CompositeExplicitAutograd")
        # _Run stands above; whoever calls the op itself gets no derivative.
        _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
        torch.library.register_fake(f"polyscan::{name}", fake, lib=_LIBRARY)
        return getattr(torch.ops.polyscan, name).default

    def _unflatten(self, outputs: Sequence[Tensor], options: SSDOptions) -> SSDOutputs:
        if not options.return_final_states:
            return SSDOutputs(outputs[0])
        if options.direction == "both":
            return SSDOutputs(*outputs[:3])
        name = "final_states" if options.direction == "forward" else "final_states_rev"
        return SSDOutputs(outputs[0], **{name: outputs[1]})


class _Run(torch.autograd.Function):
    """The forward with its derivative; saves the inputs and, for the gate, what stood before it."""

    @staticmethod
    def forward(
        ctx: Any, operation: Operation, options: SSDOptions, backend: str, *inputs: Tensor | None
    ) -> tuple[Tensor, ...]:
        outputs = operation._forward(*inputs, *options, True, backend)
        pre_gate = None
        if inputs[SSDInputs._fields.index("z")] is not None:
            *outputs, pre_gate = outputs
        ctx.save_for_backward(*inputs, pre_gate)
        ctx.set_materialize_grads(False)
        ctx.operation, ctx.options, ctx.backend = operation, options, backend
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        *inputs, pre_gate = ctx.saved_tensors
        wanted = ctx.needs_input_grad[3:]
        dy, dfinal_states, dfinal_states_rev, _ = ctx.operation._unflatten(grads, ctx.options)
        if dy is None:
            dy = inputs[0].new_zeros(()).expand(inputs[0].shape)
        arguments = (
            *(*inputs, *ctx.options),
            *(dy, dfinal_states, dfinal_states_rev, pre_gate),
            *(list(wanted), ctx.backend),
        )
        if torch.is_grad_enabled():
            gradients = iter(_Gradient.apply(ctx.operation, *arguments))  # type: ignore[no-untyped-call]
        else:
            gradients = iter(ctx.operation._backward(*arguments))
        return (None, None, None, *(next(gradients) if wants else None for wants in wanted))


class _Gradient(torch.autograd.Function):
    """The backward under ``create_graph=True``: differentiating it once more must fail loudly."""

    @staticmethod
    def forward(ctx: Any, operation: Operation, *arguments: Any) -> tuple[Tensor, ...]:
        return tuple(operation._backward(*arguments))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise SecondDerivativeError(
            "polyscan's gradients cannot be differentiated again: a loss that contains them, such "
            "as a gradient penalty, is not supported. polyscan.reference.bidi_ssd is plain PyTorch "
            "and can be differentiated any number of times"
        )


def _forward_empty(problem: SSDProblem, inputs: SSDInputs) -> SSDOutputs:
    """No token: the states pass through."""
    outputs = problem.allocate_outputs(inputs)
    for direction in problem.directions:
        final_states = getattr(outputs, direction.final_states)
        if final_states is not None:
            initial_states = direction.parameters(inputs).initial_states
            final_states.copy_(
                initial_states
            ) if initial_states is not None else final_states.zero_()
    return outputs


def _backward_empty(problem: SSDProblem, inputs: SSDInputs, grads: SSDOutputs) -> dict[str, Tensor]:
    gradients = {
        name: t.new_zeros(t.shape)
        for name, t in zip(inputs._fields, inputs, strict=True)
        if t is not None
    }
    for direction in problem.directions:
        dfinal_states = getattr(grads, direction.final_states)
        if dfinal_states is not None and direction.initial_states in gradients:
            gradients[direction.initial_states].copy_(dfinal_states)
    return gradients


def _plain(device: torch.device) -> ExitStack:
    """Backends see no autograd, and the tensors that were passed: autocast changes none of them."""
    stack = ExitStack()
    stack.enter_context(torch.no_grad())
    if torch.is_autocast_enabled(device.type):
        stack.enter_context(torch.autocast(device.type, enabled=False))
    return stack


def _split(arguments: Sequence[Any]) -> tuple[SSDInputs, SSDOptions, Sequence[Any]]:
    n_inputs, n_options = len(SSDInputs._fields), len(SSDOptions._fields)
    options = SSDOptions(*arguments[n_inputs : n_inputs + n_options])
    return SSDInputs(*arguments[:n_inputs]), options, arguments[n_inputs + n_options :]


def _flatten(outputs: SSDOutputs) -> list[Tensor]:
    return [t for t in outputs if t is not None]


def _schema(fields: type) -> str:
    return ", ".join(
        f"{_SCHEMA_TYPES[kind]} {name}" for name, kind in get_type_hints(fields).items()
    )


SSD = Operation(SSDProblem)
