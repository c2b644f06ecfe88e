"""polyscan among PyTorch's own functions: autograd, grad modes, autocast, transforms.

What is computed is tested elsewhere; here it is that each way to call it gives the same, or an
error that says why not. Every test runs on every backend, on the first device that it takes.
"""

import random
import threading
from functools import partial

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import polyscan
import polyscan.reference
from calling import (
    FLOATS,
    OPTIONAL,
    REQUIRED,
    STATES,
    assert_grads,
    assert_same,
    first_device,
    gradients,
    loss_of,
    tensors,
)
from polyscan.problem import SSDInputs, SSDOptions


@pytest.fixture
def device(backend):
    return first_device(backend)


@pytest.fixture
def bidi_ssd(backend):
    return partial(polyscan.bidi_ssd, backend=backend)


@pytest.fixture
def bidi_ssd_states(backend):
    """With every output there is."""
    return partial(polyscan.bidi_ssd, backend=backend, return_final_states=True)


@pytest.fixture
def given(device):
    """The required arguments, all with gradients."""
    return tensors(device=device, grad=FLOATS)


@pytest.fixture
def everything(device):
    """Every floating-point argument, all with gradients."""
    return tensors(*FLOATS, device=device, grad=FLOATS)


class TestSecondDerivative:
    def test_gradient_penalty_raises(self, bidi_ssd, given):
        y = bidi_ssd(**given)
        (dx,) = torch.autograd.grad(y.square().sum(), given["x"], create_graph=True)
        with pytest.raises(polyscan.SecondDerivativeError, match="polyscan.reference.bidi_ssd"):
            (y.sum() + dx.square().sum()).backward()

    @pytest.mark.parametrize("first", REQUIRED)
    @pytest.mark.parametrize("second", REQUIRED)
    def test_of_a_linear_loss_raises(self, bidi_ssd, given, first, second):
        """Here dy is a constant, which must not make the gradient pass for one."""
        y = bidi_ssd(**given)
        (gradient,) = torch.autograd.grad(y.sum(), given[first], create_graph=True)
        with pytest.raises(polyscan.SecondDerivativeError):
            torch.autograd.grad(gradient.sum(), given[second], allow_unused=True)

    @pytest.mark.parametrize("name", FLOATS)
    def test_of_each_argument_alone_raises(self, bidi_ssd_states, device, name):
        arguments = tensors(*FLOATS, device=device, grad={name})
        loss = loss_of(bidi_ssd_states(**arguments))
        (gradient,) = torch.autograd.grad(loss, arguments[name], create_graph=True)
        with pytest.raises(polyscan.SecondDerivativeError):
            gradient.sum().backward()

    def test_by_the_incoming_gradient_raises(self, bidi_ssd, given):
        """The gradient is linear in dy; the double-backward trick differentiates by it."""
        dy = torch.ones_like(given["x"], requires_grad=True)
        (dx,) = torch.autograd.grad(bidi_ssd(**given), given["x"], dy, create_graph=True)
        with pytest.raises(polyscan.SecondDerivativeError):
            torch.autograd.grad(dx.sum(), dy)

    def test_hessian_raises(self, bidi_ssd, device):
        rest = tensors(device=device)
        A = rest.pop("A")
        with pytest.raises(polyscan.SecondDerivativeError):
            torch.autograd.functional.hessian(lambda A: bidi_ssd(**rest, A=A).sum(), A)

    def test_create_graph_alone_changes_nothing(self, bidi_ssd_states, everything):
        expected = gradients(bidi_ssd_states(**everything), everything)
        loss = loss_of(bidi_ssd_states(**everything))
        loss = loss + torch.ones((), requires_grad=True)
        found = torch.autograd.grad(loss, tuple(everything.values()), create_graph=True)
        for gradient, name in zip(found, everything, strict=True):
            assert_same(gradient.detach(), expected[name])


@pytest.mark.parametrize("shift", [False, True])
def test_reference_function_is_differentiable_twice(shift):
    names = ("D", "z", "dt_bias", "initial_states")
    tiny = {"batch": 1, "seqlen": 3, "nheads": 1, "headdim": 2, "ngroups": 1, "d_state": 2}
    arguments = tensors(*names, dtype=torch.float64, grad=FLOATS, **tiny)

    def function(*values):
        named = dict(zip(arguments, values, strict=True))
        return polyscan.reference.bidi_ssd(
            **named, shift=shift, dt_softplus=True, return_final_states=True
        )

    assert torch.autograd.gradgradcheck(function, tuple(arguments.values()))


class TestGraph:
    def test_leaves_get_their_gradient(self, bidi_ssd_states, everything):
        loss_of(bidi_ssd_states(**everything)).backward()
        for name, value in everything.items():
            assert value.is_leaf
            assert value.grad.shape == value.shape and value.grad.dtype == value.dtype, name
            assert value.grad.isfinite().all() and value.grad.count_nonzero(), name

    @pytest.mark.parametrize("name", FLOATS)
    def test_one_argument_alone(self, bidi_ssd_states, device, everything, name):
        expected = gradients(bidi_ssd_states(**everything), everything)
        arguments = tensors(*FLOATS, device=device, grad={name})
        loss_of(bidi_ssd_states(**arguments)).backward()
        assert [other for other in FLOATS if arguments[other].grad is not None] == [name]
        assert_same(arguments[name].grad, expected[name])

    @pytest.mark.parametrize("seed", range(12))
    def test_any_arguments_with_and_without_gradient(self, bidi_ssd_states, device, seed):
        """None exactly where no gradient was asked for, whatever else is given or omitted."""
        choose = random.Random(seed)
        names = [name for name in (*OPTIONAL, *STATES) if choose.random() < 0.5]
        present = (*REQUIRED, *names)
        grad = {name for name in present if choose.random() < 0.5} | {choose.choice(present)}
        every = tensors(*names, device=device, grad=FLOATS)
        expected = gradients(bidi_ssd_states(**every), every)
        arguments = tensors(*names, device=device, grad=grad)
        loss_of(bidi_ssd_states(**arguments)).backward()
        assert {name for name in present if arguments[name].grad is not None} == grad
        assert_grads({name: arguments[name] for name in grad}, expected)

    @pytest.mark.parametrize("index", range(3))
    def test_loss_of_one_output(self, bidi_ssd_states, everything, index):
        """The other outputs' gradients do not arrive at all, which must mean zero."""
        inputs = tuple(everything.values())
        outputs = bidi_ssd_states(**everything)
        weights = [torch.zeros_like(output) for output in outputs]
        weights[index] = torch.rand_like(outputs[index])
        expected = torch.autograd.grad(outputs, inputs, weights, retain_graph=True)
        found = torch.autograd.grad(outputs[index], inputs, weights[index], materialize_grads=True)
        for name, one, other in zip(everything, found, expected, strict=True):
            assert_same(one, other, msg=lambda text, name=name: f"d{name}: {text}")

    @pytest.mark.parametrize("name", FLOATS)
    def test_input_changed_before_the_backward_raises(self, bidi_ssd_states, everything, name):
        loss = loss_of(bidi_ssd_states(**everything))
        with torch.no_grad():
            everything[name].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    @pytest.mark.parametrize("packing", ["cu_seqlens", "seq_idx"])
    def test_borders_changed_before_the_backward_raises(self, bidi_ssd, device, packing):
        borders = torch.tensor([0, 2, 5] if packing == "cu_seqlens" else [[0, 0, 1, 1, 1]])
        borders = borders.to(device)
        y = bidi_ssd(**tensors(device=device, grad=FLOATS, batch=1), **{packing: borders})
        borders += 0
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()

    @pytest.mark.parametrize("names", [(), ("z",)], ids=["plain", "gated"])
    def test_output_may_be_changed_before_the_backward(self, bidi_ssd, device, names):
        """The backward does not read y, not even with a gate."""
        arguments = tensors(*names, device=device, grad=FLOATS)
        inputs = tuple(arguments.values())
        expected = torch.autograd.grad(2 * bidi_ssd(**arguments).sum(), inputs)
        found = torch.autograd.grad(bidi_ssd(**arguments).mul_(2).sum(), inputs)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)

    def test_backward_twice_over_a_retained_graph(self, bidi_ssd_states, everything):
        loss = loss_of(bidi_ssd_states(**everything))
        loss.backward(retain_graph=True)
        first = {name: value.grad.clone() for name, value in everything.items()}
        loss.backward()
        assert_grads(everything, {name: 2 * gradient for name, gradient in first.items()})

    def test_gradients_accumulate_over_calls(self, bidi_ssd, given):
        once = gradients(bidi_ssd(**given), given)
        for _ in range(3):
            loss_of(bidi_ssd(**given)).backward()
        assert_grads(given, {name: 3 * gradient for name, gradient in once.items()})

    def test_one_tensor_for_two_arguments(self, bidi_ssd, given):
        apart = {**given, "C": given["B"].detach().clone().requires_grad_()}
        expected = gradients(bidi_ssd(**apart), apart)
        expected["B"] = expected["B"] + expected["C"]
        together = {name: value for name, value in given.items() if name != "C"}
        loss_of(bidi_ssd(**together, C=together["B"])).backward()
        assert_grads(together, expected)

    def test_backward_in_another_thread(self, bidi_ssd, given):
        expected = gradients(bidi_ssd(**given), given)
        thread = threading.Thread(target=loss_of(bidi_ssd(**given)).backward)
        thread.start()
        thread.join(30)
        assert_grads(given, expected)

    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_checkpoint(self, bidi_ssd, given, use_reentrant):
        expected = gradients(bidi_ssd(**given), given)
        y = checkpoint(bidi_ssd, *given.values(), use_reentrant=use_reentrant)
        loss_of(y).backward()
        assert_grads(given, expected)


class TestModes:
    def test_no_grad(self, bidi_ssd, everything):
        expected = bidi_ssd(**everything)
        assert expected.requires_grad
        with torch.no_grad():
            y = bidi_ssd(**everything)
        assert not y.requires_grad
        assert_same(y, expected.detach())

    def test_inference_mode(self, bidi_ssd, everything):
        expected = bidi_ssd(**everything).detach()
        with torch.inference_mode():
            y = bidi_ssd(**everything)
            inputs = {name: value.clone() for name, value in everything.items()}
        assert y.is_inference()
        assert_same(y.clone(), expected)
        # tensors made in inference mode are good for a call without gradients anywhere
        assert_same(bidi_ssd(**inputs), expected)

    def test_arguments_without_gradient_make_no_graph(self, bidi_ssd_states, device):
        outputs = bidi_ssd_states(**tensors(*FLOATS, device=device))
        assert not any(output.requires_grad for output in outputs)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_autocast_changes_nothing(self, bidi_ssd_states, everything, device, dtype):
        outputs = bidi_ssd_states(**everything)
        expected = gradients(outputs, everything)
        with torch.autocast(device, dtype):
            autocast_outputs = bidi_ssd_states(**everything)
            found = gradients(autocast_outputs, everything)
        for one, other in zip(autocast_outputs, outputs, strict=True):
            assert one.dtype == other.dtype
            assert_same(one.detach(), other.detach())
        for name in everything:
            assert_same(found[name], expected[name])

    def test_meta_tensors(self, bidi_ssd_states, everything):
        """Shapes and dtypes without any computation, for tools that count memory."""
        meta = {
            name: value.detach().to("meta").requires_grad_() for name, value in everything.items()
        }
        outputs = bidi_ssd_states(**meta)
        for one, other in zip(outputs, bidi_ssd_states(**everything), strict=True):
            assert (one.device.type, one.shape, one.dtype) == ("meta", other.shape, other.dtype)
        for name, gradient in gradients(outputs, meta).items():
            assert (gradient.device.type, gradient.shape) == ("meta", meta[name].shape)


class TestTransforms:
    """Forward-mode derivatives and vmap have no rule: they must fail, and say what to use."""

    def forward_ad(self, function, value):
        with forward_ad.dual_level():
            return function(forward_ad.make_dual(value, torch.ones_like(value)))

    def jvp(self, function, value):
        return torch.func.jvp(function, (value,), (torch.ones_like(value),))

    def jacfwd(self, function, value):
        return torch.func.jacfwd(function)(value)

    def vmap(self, function, value):
        return torch.vmap(function)(torch.stack([value, value]))

    def per_sample_gradients(self, function, value):
        return torch.vmap(torch.func.grad(lambda v: function(v).sum()))(torch.stack([value] * 2))

    def grad(self, function, value):
        return torch.func.grad(lambda v: function(v).sum())(value)

    TRANSFORMS = ("forward_ad", "jvp", "jacfwd", "vmap", "grad", "per_sample_gradients")

    @pytest.mark.parametrize("transform", TRANSFORMS)
    @pytest.mark.parametrize("name", ["x", "A", "C"])
    @pytest.mark.parametrize("grad", [(), FLOATS], ids=["no_gradient", "gradient"])
    def test_it_raises(self, bidi_ssd, device, transform, name, grad):
        rest = tensors(device=device, grad=grad)
        value = rest.pop(name).detach()
        with pytest.raises(polyscan.TransformError, match="polyscan.reference.bidi_ssd"):
            getattr(self, transform)(lambda v: bidi_ssd(**rest, **{name: v}), value)

    def test_batched_backward_raises(self, bidi_ssd, given):
        y = bidi_ssd(**given)
        with pytest.raises(polyscan.TransformError, match="polyscan.reference.bidi_ssd"):
            torch.autograd.grad(y, given["x"], y.new_ones(3, *y.shape), is_grads_batched=True)

    def test_tangent_of_the_incoming_gradient_raises(self, bidi_ssd, given):
        """Forward over reverse: the gradient is linear in dy, and its tangent must not be lost."""
        y = bidi_ssd(**given)
        with forward_ad.dual_level():
            dy = forward_ad.make_dual(torch.ones_like(y), torch.ones_like(y))
            with pytest.raises(polyscan.TransformError, match="forward-mode"):
                torch.autograd.grad(y, given["x"], dy)

    def test_tangent_raises_where_the_op_itself_is_called(self, backend, device):
        inputs = SSDInputs(**tensors(device=device))
        with forward_ad.dual_level():
            dual = inputs._replace(x=forward_ad.make_dual(inputs.x, torch.ones_like(inputs.x)))
            with pytest.raises(polyscan.TransformError, match="forward-mode"):
                torch.ops.polyscan.ssd_forward(*dual, *SSDOptions(), False, backend)

    def test_constants_under_a_transform_are_no_business_of_it(self, bidi_ssd, device):
        rest = tensors(device=device)
        expected = bidi_ssd(**rest)
        found = torch.vmap(lambda v: v * bidi_ssd(**rest))(torch.ones(2, device=device))
        assert_same(found, torch.stack([expected] * 2))
        with forward_ad.dual_level():
            assert_same(bidi_ssd(**rest), expected)

    def test_constants_with_gradient_under_a_transform_raise(self, bidi_ssd, given, device):
        with pytest.raises(polyscan.TransformError):
            torch.vmap(lambda v: v * bidi_ssd(**given))(torch.ones(2, device=device))

    @pytest.mark.parametrize("transform", TRANSFORMS)
    def test_reference_function_goes_with_it(self, transform):
        rest = tensors()
        value = rest.pop("x")
        getattr(self, transform)(lambda x: polyscan.reference.bidi_ssd(**rest, x=x), value)


@pytest.mark.parametrize("name", FLOATS)
def test_complex_input_raises(bidi_ssd, everything, name):
    everything[name] = everything[name].detach().to(torch.complex64)
    with pytest.raises(TypeError, match=f"^{name} must have one of the dtypes .* got complex64"):
        bidi_ssd(**everything)
