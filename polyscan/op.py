"""Operations as PyTorch sees them: the only place that knows autograd and torch.library.

An :class:`Operation` derives its two torch ops, forward and backward, from the fields of its inputs
and options, so a further operation needs no plumbing of its own. The ops are opaque to tracing, and
the backend is chosen inside them, where sizes are plain ints.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import dispatch
from .backend import Backend
from .eager import Signature, is_plain, is_transformed, recall, signature
from .errors import SecondDerivativeError, TransformError
from .hardware import tf32_allowed
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


class _Terms(NamedTuple):
    """What one call holds besides its tensors.

    ``backend`` is a name, "auto", or where compiled code defers the choice, empty. ``signature`` is
    that of the inputs, None where the call is not plain.
    """

    options: SSDOptions
    backend: str
    signature: Signature | None


class _Saved(NamedTuple):
    """The further tensors that the backward reads."""

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
        self._forward_op = self._define(
            f"{name}_forward({inputs}, {options}, bool needs_grad, str backend) -> Tensor[]",
            self._forward_real,
            self._forward_fake,
            self._forward_autograd,
        )
        self._backward_op = self._define(
            f"{name}_backward({inputs}, {options}, {_schema(_Saved)}, bool[] wanted, str backend)"
            " -> Tensor[]",
            self._backward_real,
            self._backward_fake,
            torch.library.fallthrough_kernel,
        )

    def __call__(
        self, inputs: SSDInputs, options: SSDOptions, backend: str, signature: Signature | None
    ) -> SSDOutputs:
        """Run on valid arguments."""
        terms = _Terms(options, backend, signature)
        needs_grad = _wants_gradient(inputs)
        if signature is None:
            _refuse_transforms(inputs, needs_grad)
        if needs_grad:
            outputs = _Run.apply(self, terms, *inputs)  # type: ignore[no-untyped-call]
        else:
            outputs = self.forward(inputs, terms, needs_grad=False)
        return self._unflatten(outputs, options)

    # A plain call goes past the dispatcher, which costs as much as everything else together.

    def forward(self, inputs: SSDInputs, terms: _Terms, needs_grad: bool) -> Sequence[Tensor]:
        if terms.signature is not None:
            return self._compute(inputs, terms, needs_grad)
        outputs: list[Tensor] = self._forward_op(*inputs, *terms.options, needs_grad, terms.backend)
        return outputs

    def backward(
        self, inputs: SSDInputs, terms: _Terms, saved: _Saved, wanted: Sequence[bool]
    ) -> Sequence[Tensor]:
        if terms.signature is not None and is_plain((*inputs, *saved)):
            return self._differentiate(inputs, terms, saved, wanted)
        _refuse_transforms((*inputs, *saved))
        gradients: list[Tensor] = self._backward_op(
            *inputs, *terms.options, *saved, list(wanted), terms.backend
        )
        return gradients

    def _compute(self, inputs: SSDInputs, terms: _Terms, needs_grad: bool) -> list[Tensor]:
        check_borders(inputs)
        problem, backend = self._choose(inputs, terms, needs_grad)
        compute = _forward_empty if problem.is_empty else backend.forward
        return _flatten(_apart(compute, problem, inputs))

    def _differentiate(
        self, inputs: SSDInputs, terms: _Terms, saved: _Saved, wanted: Sequence[bool]
    ) -> list[Tensor]:
        problem, backend = self._choose(inputs, terms, needs_grad=True)
        grads = SSDOutputs(saved.dy, saved.dfinal_states, saved.dfinal_states_rev)
        compute = _backward_empty if problem.is_empty else backend.backward
        gradients = _apart(compute, problem, inputs, saved.pre_gate, grads)
        names = [name for name, wants in zip(SSDInputs._fields, wanted, strict=True) if wants]
        missing = [name for name in names if name not in gradients]
        if missing:
            raise RuntimeError(
                f"the backend {backend.name!r} returned no gradient of {', '.join(missing)}"
            )
        return [gradients[name] for name in names]

    def _choose(
        self, inputs: SSDInputs, terms: _Terms, needs_grad: bool
    ) -> tuple[SSDProblem, Backend]:
        options = terms.options
        if options.tf32 is None:
            options = options._replace(tf32=tf32_allowed(inputs.x.device))
        problem = recall(terms.signature, self.problem.describe, inputs, options, needs_grad)
        return problem, dispatch.select(problem, terms.backend)

    # The two ops. Their signatures are the schemas: inputs, options, and what is named after them.

    def _forward_real(self, *arguments: Any) -> list[Tensor]:
        inputs, options, (needs_grad, backend) = _split(arguments)
        return self._compute(inputs, _Terms(options, backend, signature(inputs)), needs_grad)

    def _forward_fake(self, *arguments: Any) -> list[Tensor]:
        inputs, options, (needs_grad, _) = _split(arguments)
        problem = self.problem.describe(inputs, options, needs_grad)
        return _flatten(problem.allocate_outputs(inputs))

    def _forward_autograd(self, *arguments: Any) -> Sequence[Tensor]:
        """The derivative for who calls the op itself, such as an exported program."""
        inputs, options, (needs_grad, backend) = _split(arguments)
        if forward_ad._current_level >= 0:
            _refuse_transforms(inputs)
        if not _wants_gradient(inputs):
            with torch._C._AutoDispatchBelowAutograd():
                outputs: list[Tensor] = self._forward_op(*arguments)
            return outputs
        *results, pre_gate = _Run.apply(self, _Terms(options, backend, None), *inputs)  # type: ignore[no-untyped-call]
        return [*results, pre_gate] if needs_grad and pre_gate is not None else results

    def _backward_real(self, *arguments: Any) -> list[Tensor]:
        inputs, options, (*saved, wanted, backend) = _split(arguments)
        terms = _Terms(options, backend, signature(inputs))
        return self._differentiate(inputs, terms, _Saved(*saved), wanted)

    def _backward_fake(self, *arguments: Any) -> list[Tensor]:
        inputs, _, (*_, wanted, _) = _split(arguments)
        return [
            t.new_empty(t.shape)
            for t, wants in zip(inputs, wanted, strict=True)
            if wants and t is not None
        ]

    def _define(self, schema: str, real: Any, fake: Any, autograd: Any) -> Any:
        name = schema.partition("(")[0]
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, real, "CompositeExplicitAutograd")
        _LIBRARY.impl(name, autograd, "Autograd")
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
        ctx: Any, operation: Operation, terms: _Terms, *tensors: Any
    ) -> tuple[Tensor | None, ...]:
        inputs = SSDInputs(*tensors)
        outputs = operation.forward(inputs, terms, needs_grad=True)
        pre_gate = None
        if inputs.z is not None:
            *outputs, pre_gate = outputs
        ctx.save_for_backward(*inputs, pre_gate)
        ctx.set_materialize_grads(False)
        ctx.operation, ctx.terms = operation, terms
        if pre_gate is not None:
            ctx.mark_non_differentiable(pre_gate)
        return (*outputs, pre_gate)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        *inputs, pre_gate = ctx.saved_tensors
        wanted = ctx.needs_input_grad[2:]
        dy, dfinal_states, dfinal_states_rev, _ = ctx.operation._unflatten(grads, ctx.terms.options)
        if dy is None:
            dy = inputs[0].new_zeros(()).expand(inputs[0].shape)
        saved = (dy, dfinal_states, dfinal_states_rev, pre_gate)
        differentiate = _Gradient.apply if torch.is_grad_enabled() else _gradient
        gradients = iter(differentiate(ctx.operation, ctx.terms, wanted, *inputs, *saved))
        return (None, None, *(next(gradients) if wants else None for wants in wanted))


def _gradient(
    operation: Operation, terms: _Terms, wanted: Sequence[bool], *tensors: Any
) -> Sequence[Tensor]:
    n_inputs = len(SSDInputs._fields)
    inputs, saved = SSDInputs(*tensors[:n_inputs]), _Saved(*tensors[n_inputs:])
    return operation.backward(inputs, terms, saved, wanted)


class _Gradient(torch.autograd.Function):
    """The backward under ``create_graph=True``: differentiating it once more must fail loudly."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        return tuple(_gradient(*arguments))

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


def _backward_empty(
    problem: SSDProblem, inputs: SSDInputs, pre_gate: Tensor | None, grads: SSDOutputs
) -> dict[str, Tensor]:
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


def _wants_gradient(inputs: SSDInputs) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)


def _refuse_transforms(tensors: Sequence[Any], needs_grad: bool = False) -> None:
    """Past _Run a tangent would be lost silently; the rest would fail in words of PyTorch's own."""
    if torch.compiler.is_compiling():
        return
    if is_transformed(tensors) or (needs_grad and torch._C._are_functorch_transforms_active()):
        raise TransformError(
            "polyscan has one derivative, by autograd, and does not go with vmap, torch.func's "
            "transforms, batched gradients or forward-mode AD. polyscan.reference.bidi_ssd is "
            "plain PyTorch and goes with all of them"
        )


def _apart(compute: Callable[..., Any], problem: SSDProblem, *arguments: Any) -> Any:
    """Compute without autograd, and on the tensors that were passed: autocast changes none."""
    device = problem.device.type
    with torch.set_grad_enabled(False):  # half the cost of torch.no_grad()
        if not torch.is_autocast_enabled(device):
            return compute(problem, *arguments)
        with torch.autocast(device, enabled=False):
            return compute(problem, *arguments)


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
