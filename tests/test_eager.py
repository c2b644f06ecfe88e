"""What is remembered of plain calls, and what must never be: the checks, the problem, the op.

Counted, not timed: benchmarks/test_overhead.py has the times.
"""

import decimal

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import polyscan
from fakes import arguments, set_up
from polyscan import api, eager
from polyscan.op import SSD
from polyscan.problem import SSDProblem

pytestmark = pytest.mark.usefixtures("nothing_requested", "nothing_remembered")
OPS = ("polyscan::ssd_forward", "polyscan::ssd_backward")


@pytest.fixture
def nothing_remembered(monkeypatch):
    monkeypatch.setattr(eager, "_signatures", {})
    monkeypatch.setattr(eager, "_answers", {})


@pytest.fixture
def counted(monkeypatch):
    """How often arguments were checked, and how often a problem was described."""
    counts = {"checked": 0, "described": 0}
    check, describe = api.check_inputs, SSDProblem.describe

    def counting_check(inputs):
        counts["checked"] += 1
        return check(inputs)

    def counting_describe(cls, *arguments):
        counts["described"] += 1
        return describe(*arguments)

    monkeypatch.setattr(api, "check_inputs", counting_check)
    monkeypatch.setattr(SSDProblem, "describe", classmethod(counting_describe))
    return counts


def call(backend="fake", **changes):
    return polyscan.bidi_ssd(**arguments(**changes), backend=backend)


class TestRepeatedCalls:
    def test_are_checked_and_described_once(self, fake, counted):
        for _ in range(3):
            call()
        assert counted == {"checked": 1, "described": 1}
        assert fake.steps() == ["forward"] * 3

    def test_backward_takes_the_forwards_problem(self, fake, counted):
        for _ in range(3):
            call(x=torch.ones(3, 5, 4, 7, requires_grad=True)).sum().backward()
        assert counted == {"checked": 1, "described": 1}
        assert fake.steps() == ["forward", "backward"] * 3

    def test_strides_contents_and_parameters_make_no_difference(self, fake, counted):
        call()
        x = torch.zeros(7, 4, 5, 3).permute(3, 2, 1, 0)
        call(x=x, A=torch.nn.Parameter(-torch.ones(4), requires_grad=False))
        call(x=torch.full((3, 1, 1, 1), torch.nan).expand(3, 5, 4, 7))
        assert counted == {"checked": 1, "described": 1}

    def test_ssd(self, fake, counted):
        for _ in range(3):
            for reverse in (False, True):
                polyscan.ssd(**arguments(), reverse=reverse, backend="fake")
        assert counted == {"checked": 1, "described": 2}

    def test_do_not_pass_the_dispatcher(self, fake, monkeypatch):
        monkeypatch.setattr(SSD, "_forward_op", None)
        monkeypatch.setattr(SSD, "_backward_op", None)
        call(x=torch.ones(3, 5, 4, 7, requires_grad=True)).sum().backward()
        with torch.autocast("cpu"), torch.no_grad():
            call()
        with torch.inference_mode():
            call()
        assert fake.steps() == ["forward", "backward", "forward", "forward"]


# Changes to a call, and the fields of the problem that must follow.
CHANGES = {
    "batch": (
        {name: t[:2] for name, t in arguments().items() if name != "A"},
        {"batch": 2, "nsequences": 2},
    ),
    "headdim": ({"x": torch.ones(3, 5, 4, 8)}, {"headdim": 8}),
    "d_state": ({name: torch.ones(3, 5, 2, 3) for name in "BC"}, {"d_state": 3}),
    "dtype": ({"x": torch.ones(3, 5, 4, 7).double()}, {"x_dtype": torch.float64}),
    "dtype of C": ({"C": torch.ones(3, 5, 2, 6).double()}, {"product_dtype": torch.float64}),
    "given": ({"z": torch.ones(3, 5, 4, 7)}, {"has_z": True}),
    "the same shape elsewhere": (
        {"initial_states_rev": torch.ones(3, 4, 7, 6)},
        {"has_initial_states": True},
    ),
    "requires_grad": ({"x": torch.ones(3, 5, 4, 7, requires_grad=True)}, {"needs_grad": True}),
    "shift": ({"shift": True}, {"shift": True}),
    "dt_softplus": ({"dt_softplus": True}, {"dt_softplus": True}),
    "dt_limit": ({"dt_limit": (0.0, 2.0)}, {"dt_limit": (0.0, 2.0)}),
    "return_final_states": ({"return_final_states": True}, {"return_final_states": True}),
    "chunk_size": ({"chunk_size": 32}, {"chunk_size": 32}),
    "seq_idx": (
        {"seq_idx": torch.zeros(3, 5, dtype=torch.int32)},
        {"packing": "seq_idx", "nsequences": None},
    ),
}


class TestChangesAreSeen:
    @pytest.mark.parametrize("changes, fields", CHANGES.values(), ids=CHANGES.keys())
    def test_in_the_problem(self, fake, changes, fields):
        call()
        call(**changes)
        call()
        (_, before, _), (_, changed, _), (_, after, _) = fake.ran
        assert before == after
        assert {name: getattr(changed, name) for name in fields} == fields
        assert {name: getattr(before, name) for name in fields} != fields

    def test_direction(self, fake):
        polyscan.ssd(**arguments(), backend="fake")
        polyscan.ssd(**arguments(), reverse=True, backend="fake")
        assert [p.directions[0].reverse for _, p, _ in fake.ran] == [False, True]

    def test_grad_mode(self, fake):
        x = torch.ones(3, 5, 4, 7, requires_grad=True)
        call(x=x)
        with torch.no_grad():
            call(x=x)
        assert [p.needs_grad for _, p, _ in fake.ran] == [True, False]

    def test_tf32(self, fake, monkeypatch):
        for tf32 in (False, True, False):
            monkeypatch.setattr(api, "tf32_allowed", lambda device, tf32=tf32: tf32)
            call()
        assert [p.tf32 for _, p, _ in fake.ran] == [False, True, False]

    def test_tf32_of_compiled_code(self, fake, monkeypatch):
        """It asks when it runs, and each time."""
        inputs = api.SSDInputs(**arguments())
        for tf32 in (False, True):
            monkeypatch.setattr("polyscan.op.tf32_allowed", lambda device, tf32=tf32: tf32)
            torch.ops.polyscan.ssd_forward(*inputs, *api.SSDOptions(), False, "fake")
        assert [p.tf32 for _, p, _ in fake.ran] == [False, True]

    def test_backend(self, fake, other, monkeypatch):
        call(backend="fake")
        call(backend="other")
        with polyscan.use_backend("fake"):
            call(backend="auto")
        monkeypatch.setenv("POLYSCAN_BACKEND", "other")
        call(backend="auto")
        assert fake.steps() == other.steps() == ["forward"] * 2

    def test_a_backend_that_changes_its_mind(self, fake):
        call()
        set_up(fake, refusal="no more")
        with pytest.raises(polyscan.UnsupportedProblem, match="no more"):
            call()


# Calls that equal a valid one, or nearly, and are none.
INVALID = {
    "shape": ({"dt": torch.ones(3, 5, 3)}, ValueError, "dt must be"),
    "dtype": ({"x": torch.ones(3, 5, 4, 7).int()}, TypeError, "x must have one of the dtypes"),
    "device": ({"C": torch.ones(3, 5, 2, 6, device="meta")}, ValueError, "C is on meta"),
    "layout": ({"A": -torch.ones(4).to_sparse()}, TypeError, "A must be a strided tensor"),
    "kind": ({"A": [-1.0] * 4}, TypeError, "A must be a tensor, got list"),
    "none": ({"A": None}, TypeError, "A must be a tensor, got NoneType"),
    "int for bool": ({"shift": 0}, TypeError, "shift must be a bool"),
    "decimal": ({"dt_limit": (decimal.Decimal(0), 1.0)}, TypeError, "dt_limit must hold two"),
    "bool for int": ({"chunk_size": True}, TypeError, "chunk_size must be an int"),
    "float for int": ({"chunk_size": 1.0}, TypeError, "chunk_size must be an int"),
    "unknown backend": ({"backend": "nonesuch"}, ValueError, "backend must be one of"),
}


class TestErrors:
    @pytest.mark.parametrize("changes, error, message", INVALID.values(), ids=INVALID.keys())
    def test_raised_after_a_valid_call_and_every_time(self, fake, changes, error, message):
        for _ in range(2):
            call(dt_limit=(0.0, 1.0), chunk_size=1)
            with pytest.raises(error, match=message):
                call(**{"dt_limit": (0.0, 1.0), "chunk_size": 1, **changes})
        assert fake.steps() == ["forward"] * 2

    def test_contents_are_checked_every_time(self, fake):
        packed = {name: t[:1] if name != "A" else t for name, t in arguments().items()}
        call(**packed, cu_seqlens=torch.tensor([0, 2, 5]))
        with pytest.raises(ValueError, match="cu_seqlens must not decrease"):
            call(**packed, cu_seqlens=torch.tensor([0, 5, 2]))


@pytest.mark.parametrize("options", [False, True], ids=["tensors", "options"])
def test_memory_is_bounded(fake, monkeypatch, options):
    monkeypatch.setattr(eager, "CAPACITY", 5)
    for n in range(1, 20):
        changes = {"chunk_size": n} if options else {"x": torch.ones(3, 5, 4, n)}
        for _ in range(2):
            call(**changes)
        assert len(eager._signatures) <= 5 and len(eager._answers) <= 5
    assert len(fake.ran) == 38


class Ops(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.name().split(".")[0])
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Wrapped(torch.Tensor):
    seen = ()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Wrapped.seen = (*Wrapped.seen, str(func))
        return super().__torch_function__(func, types, args, kwargs or {})


def differentiate(x):
    (gradient,) = torch.autograd.grad(call(x=x).sum(), x)
    return gradient


def leaf():
    return torch.ones(3, 5, 4, 7, requires_grad=True)


class TestWhoeverWatchesSeesTheOp:
    """Also where the same call has just been a plain one."""

    @pytest.fixture(autouse=True)
    def plain_call(self, fake):
        differentiate(leaf())
        self.known = dict(eager._signatures)
        yield
        assert eager._signatures == self.known, "nothing but plain calls is remembered"

    def test_dispatch_mode(self):
        with Ops() as ops:
            differentiate(leaf())
        assert [name for name in ops.seen if name.startswith("polyscan")] == list(OPS)

    def test_function_mode(self):
        with Functions() as functions:
            call()
        assert "polyscan.ssd_forward.default" in functions.seen

    def test_subclass(self):
        call(A=-torch.ones(4).as_subclass(Wrapped))
        assert "polyscan.ssd_forward.default" in Wrapped.seen

    def test_subclass_as_gradient(self):
        y = call(x=leaf())
        Wrapped.seen = ()
        y.backward(torch.ones_like(y).as_subclass(Wrapped))
        assert "polyscan.ssd_backward.default" in Wrapped.seen

    def test_profiler(self):
        with torch.autograd.profiler.profile() as profile:
            differentiate(leaf())
        names = [event.name for event in profile.function_events]
        assert [name for name in names if name in OPS] == list(OPS)

    def test_fake_tensors(self, fake):
        steps = fake.steps()
        with FakeTensorMode() as mode:
            given = {name: mode.from_tensor(t) for name, t in arguments().items()}
            y = polyscan.bidi_ssd(**given, backend="fake")
        assert type(y) is type(given["x"]) and fake.steps() == steps

    @pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
    def test_make_fx(self, tracing_mode):
        graph = make_fx(differentiate, tracing_mode=tracing_mode)(leaf()).graph
        targets = [str(node.target) for node in graph.nodes]
        assert [t for t in targets if t.startswith("polyscan")] == [
            "polyscan.ssd_forward.default",
            "polyscan.ssd_backward.default",
        ]

    @pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # sizes become constants
    def test_jit_trace(self):
        traced = torch.jit.trace(lambda x: call(x=x), torch.ones(3, 5, 4, 7), check_trace=False)
        assert OPS[0] in str(traced.graph)

    def test_functionalize(self):
        def function(x):
            return call(x=x)

        graph = make_fx(torch.func.functionalize(function))(torch.ones(3, 5, 4, 7)).graph
        assert "polyscan.ssd_forward.default" in [str(node.target) for node in graph.nodes]

    def test_compile(self, fake):
        graphs = []

        def compile_graph(graph, inputs):
            graphs.append(graph)
            return graph

        torch._dynamo.reset()
        compiled = torch.compile(call, fullgraph=True, backend=compile_graph)
        compiled()
        torch._dynamo.reset()
        targets = [str(node.target) for node in graphs[0].graph.nodes]
        assert "polyscan.ssd_forward.default" in targets

    def test_meta_tensors(self, fake):
        steps = fake.steps()
        given = {name: t.to("meta") for name, t in arguments().items()}
        assert polyscan.bidi_ssd(**given, backend="fake").is_meta
        assert fake.steps() == steps
