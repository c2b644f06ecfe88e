"""polyscan as torch.library, torch.compile and torch.export see it: one opaque op.

Every test runs on every backend, on the first device that it takes.
"""

import copy
import io
from functools import partial

import pytest
import torch

import polyscan
from calling import (
    FLOATS,
    OPTIONAL,
    REQUIRED,
    STATES,
    Layer,
    first_device,
    gradients,
    layer_inputs,
    tensors,
)
from polyscan import dispatch
from polyscan.problem import SSDInputs, SSDOptions


@pytest.fixture
def device(backend):
    return first_device(backend)


@pytest.fixture
def bidi_ssd_states(backend):
    """With every output there is."""
    return partial(polyscan.bidi_ssd, backend=backend, return_final_states=True)


@pytest.fixture
def given(device):
    """The required arguments, all with gradients."""
    return tensors(device=device, grad=FLOATS)


# Calls of torch.ops.polyscan: optional tensors, borders, and options.
OPCHECK = {
    "gate": (("z", "D"), {}, SSDOptions(shift=True)),
    "everything": (
        (*OPTIONAL, *STATES),
        {},
        SSDOptions(dt_softplus=True, dt_max=1.0, return_final_states=True, chunk_size=2),
    ),
    "reverse": (
        ("initial_states_rev",),
        {},
        SSDOptions(direction="reverse", return_final_states=True),
    ),
    "cu_seqlens": (("z",), {"cu_seqlens": [0, 2, 2, 5]}, SSDOptions(return_final_states=True)),
    "seq_idx": ((), {"seq_idx": [[0, 0, 1, 1, 1]]}, SSDOptions()),
}


@pytest.mark.parametrize("names, borders, options", OPCHECK.values(), ids=OPCHECK.keys())
def test_opcheck_forward(backend, device, names, borders, options):
    grad = FLOATS if options.return_final_states else ()  # the longer samples: with gradients
    inputs = opcheck_inputs(names, borders, device, grad)
    call = (*inputs, *options, bool(grad), backend)
    torch.library.opcheck(torch.ops.polyscan.ssd_forward.default, call)


@pytest.mark.parametrize("names, borders, options", OPCHECK.values(), ids=OPCHECK.keys())
def test_opcheck_backward(backend, device, names, borders, options):
    inputs = opcheck_inputs(names, borders, device, grad=())
    outputs = torch.ops.polyscan.ssd_forward.default(*inputs, *options, False, backend)
    y, *final_states = [torch.ones_like(output) for output in outputs]
    dstates = {"both": final_states, "forward": final_states, "reverse": [None, *final_states]}
    dstates = (*dstates[options.direction], None, None)[:2]
    pre_gate = torch.ones_like(y) if inputs.z is not None else None
    # not all that could be had
    wanted = [name in (*REQUIRED, *names) and name != "dt" for name in inputs._fields]
    grad = FLOATS if options.return_final_states else ()
    inputs = opcheck_inputs(names, borders, device, grad)
    call = (*inputs, *options, y, *dstates, pre_gate, wanted, backend)
    torch.library.opcheck(torch.ops.polyscan.ssd_backward.default, call)


def opcheck_inputs(names, borders, device, grad):
    arguments = tensors(*names, device=device, grad=grad, batch=1 if borders else 2)
    borders = {name: torch.tensor(value, device=device) for name, value in borders.items()}
    return SSDInputs(**arguments, **borders)


class TestCompile:
    """torch.compile sees one opaque op, compiles it once for all lengths, and changes nothing."""

    @pytest.fixture
    def graphs(self):
        """The graphs that were compiled so far."""
        return []

    @pytest.fixture
    def compiles(self, graphs):
        """torch.compile without leave to break the graph."""

        def compile_graph(graph, inputs):
            graphs.append(graph)
            return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

        torch._dynamo.reset()
        yield partial(torch.compile, fullgraph=True, dynamic=True, backend=compile_graph)
        torch._dynamo.reset()

    def assert_equal(self, compiled, eager, calls, graphs):
        """On all calls, with gradients where arguments have some; only the first one compiles."""
        counts = []
        for arguments in calls:
            found, expected = compiled(**arguments), eager(**arguments)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
            leaves = {name: t for name, t in arguments.items() if t.requires_grad}
            if leaves:
                expected = gradients(expected, leaves)
                for name, gradient in gradients(found, leaves).items():
                    torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-4)
            counts.append(len(graphs))
        assert counts[0] and set(counts) == {counts[0]}

    @pytest.mark.parametrize(
        "names, grad",
        [((), ()), (FLOATS, FLOATS), (STATES, {"A"})],
        ids=["required without gradient", "everything", "some"],
    )
    def test_changing_seqlen(self, compiles, graphs, bidi_ssd_states, device, names, grad):
        function = partial(bidi_ssd_states, dt_limit=(0.1, 0.9), shift=True)
        calls = [tensors(*names, device=device, grad=grad, seqlen=n) for n in (100, 101, 7)]
        self.assert_equal(compiles(function), function, calls, graphs)

    def test_packed(self, compiles, graphs, bidi_ssd_states, device):
        calls = []
        # no size equals another one, which torch.compile would take for a rule
        for lengths in ([2, 1, 0, 8, 3, 1, 9], [4] * 9, [1, 0, 20, 0, 1, 0, 13, 2]):
            cu_seqlens = torch.tensor([0, *lengths], device=device).cumsum(0)
            arguments = tensors(device=device, grad=FLOATS, batch=1, seqlen=sum(lengths))
            calls.append({**arguments, "cu_seqlens": cu_seqlens})
        self.assert_equal(compiles(bidi_ssd_states), bidi_ssd_states, calls, graphs)

    @pytest.mark.parametrize("reverse", [False, True])
    def test_ssd(self, compiles, graphs, backend, given, reverse):
        function = partial(polyscan.ssd, reverse=reverse, backend=backend)
        self.assert_equal(compiles(function), function, [given], graphs)

    @pytest.mark.parametrize("where", ["context", "environment"])
    def test_a_later_request_is_heard(self, compiles, monkeypatch, backend, device, where):
        """Who is asked for is no constant of the compiled code."""
        chosen = []

        def select(*arguments):
            chosen.append(original(*arguments))
            return chosen[-1]

        original = dispatch.select
        monkeypatch.setattr(dispatch, "select", select)
        monkeypatch.delenv(dispatch.ENVIRONMENT_VARIABLE, raising=False)
        arguments = tensors(device=device)
        automatic = polyscan.explain(**arguments).backend
        compiled = compiles(polyscan.bidi_ssd)
        compiled(**arguments)
        if where == "environment":
            with monkeypatch.context() as patch:
                patch.setenv(dispatch.ENVIRONMENT_VARIABLE, backend)
                compiled(**arguments)
        else:
            with polyscan.use_backend(backend):
                compiled(**arguments)
        compiled(**arguments)
        assert [choice.name for choice in chosen] == [automatic, backend, automatic]


@pytest.fixture
def layer(backend, device):
    return Layer(backend).to(device)


def assert_alike(function, layer, inputs):
    """The same outputs, and the same gradients of the parameters."""
    found, expected = function(*inputs), layer(*inputs)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    parameters = {
        name.removeprefix("_orig_mod."): parameter
        for name, parameter in function.named_parameters()
    }
    torch.testing.assert_close(
        gradients(found, parameters),
        gradients(expected, dict(layer.named_parameters())),
        rtol=1e-4,
        atol=1e-4,
    )


class TestModule:
    @pytest.fixture(autouse=True)
    def nothing_compiled(self):
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    @pytest.fixture
    def exported(self, layer, device):
        """For any batch and seqlen."""
        tokens = {0: torch.export.Dim("batch"), 1: torch.export.Dim("seqlen")}
        inputs = layer_inputs(device, batch=2, seqlen=7)
        return torch.export.export(layer, inputs, dynamic_shapes=(tokens,) * len(inputs))

    def test_reduce_overhead(self, layer, device):
        """On a GPU: CUDA graphs, which warm up, then record, then replay."""
        compiled = torch.compile(layer, mode="reduce-overhead", fullgraph=True)
        for seqlen in (7, 7, 7, 9):
            torch.compiler.cudagraph_mark_step_begin()
            assert_alike(compiled, layer, layer_inputs(device, seqlen=seqlen))

    @pytest.mark.parametrize("batch, seqlen", [(2, 7), (3, 100), (5, 2)])
    def test_exported_for_other_sizes(self, layer, device, exported, batch, seqlen):
        inputs = layer_inputs(device, batch=batch, seqlen=seqlen)
        assert_alike(exported.module(), layer, inputs)

    def test_exported_without_gradient_and_differentiated_all_the_same(self, layer, device):
        inputs = layer_inputs(device)
        with torch.no_grad():
            exported = torch.export.export(layer, inputs)
        assert_alike(exported.module(), layer, inputs)

    def test_exported_saved_and_loaded(self, layer, device, exported):
        file = io.BytesIO()
        torch.export.save(exported, file)
        file.seek(0)
        loaded = torch.export.load(file).module()
        assert_alike(loaded, layer, layer_inputs(device, seqlen=9))

    @pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # from torch.export itself
    @pytest.mark.parametrize("what", ["eager", "compiled", "exported"])
    def test_deepcopy(self, request, layer, device, what):
        inputs = layer_inputs(device)
        if what == "exported":
            original = request.getfixturevalue("exported")
            copied = copy.deepcopy(original).module()
        else:
            original = torch.compile(layer, backend="aot_eager") if what == "compiled" else layer
            original(*inputs)
            copied = copy.deepcopy(original)
        assert_alike(copied, layer, inputs)
        own = {id(parameter) for parameter in layer.parameters()}
        assert not own & {id(parameter) for parameter in copied.parameters()}
