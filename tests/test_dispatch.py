"""Which backend runs, and what is said about it: order, requests, refusals, explanations.

Everything is tried with a backend of another package, installed as pip would install it. It writes
one constant, so that every result tells who computed it, and keeps a record of what it was asked.
"""

import dataclasses
import importlib
import importlib.metadata
import inspect
import math
import pickle
import sys
import threading

import pytest
import torch

import polyscan
from polyscan import dispatch, registry

VARIABLE = "POLYSCAN_BACKEND"
BUILT_IN = {
    entry.name
    for entry in importlib.metadata.distribution("polyscan").entry_points
    if entry.group == "polyscan.backends"
}
AUTOMATIC = BUILT_IN - {"reference"}


class Fake:
    """A backend that fills everything with ``mark``; missing and refusal are set by a test."""

    def __init__(self, name, mark):
        self.name = name
        self.mark = mark
        self.missing = None
        self.refusal = None
        self.asked = []
        self.ran = []  # (step, problem, whether autograd or autocast was on)

    def version(self):
        return f"{self.name} 1.0"

    def unavailable_reason(self):
        return self.missing

    def unsupported_reason(self, problem):
        self.asked.append(problem)
        return self.refusal

    def forward(self, problem, inputs):
        self._record("forward", problem)
        outputs = problem.allocate_outputs(inputs)
        for output in outputs:
            if output is not None:
                output.fill_(self.mark)
        return outputs

    def backward(self, problem, inputs, pre_gate, grads):
        self._record("backward", problem)
        return {
            name: tensor.new_full(tensor.shape, self.mark)
            for name, tensor in inputs._asdict().items()
            if tensor is not None and tensor.is_floating_point()
        }

    def _record(self, step, problem):
        mode = torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")
        self.ran.append((step, problem, mode))

    def steps(self):
        return [step for step, _, _ in self.ran]


MODULE = f"""
import torch

{inspect.getsource(Fake)}

BACKEND = Fake("fake", 7.0)
OTHER = Fake("other", 11.0)
"""


@pytest.fixture(autouse=True)
def nothing_requested(monkeypatch):
    """The suite itself may be run under the environment variable."""
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.fixture
def third_party(install):
    """The module of the package "third-party", with the backends fake and other."""
    install("third_party", MODULE, {"other": "third_party:OTHER", "fake": "third_party:BACKEND"})
    return importlib.import_module("third_party")


@pytest.fixture
def fake(third_party):
    return third_party.BACKEND


@pytest.fixture
def other(third_party):
    return third_party.OTHER


@pytest.fixture
def built_ins_refuse(monkeypatch):
    """Every automatic built-in backend refuses every problem; returns their reasons."""
    reasons = {name: f"{name} was told to refuse 3 of 2" for name in AUTOMATIC}
    for name, reason in reasons.items():
        monkeypatch.setattr(registry.load(name), "unsupported_reason", lambda _, text=reason: text)
    dispatch.clear_caches()
    return {name: registry.unavailable_reason(name) or text for name, text in reasons.items()}


def set_up(backend, **attributes):
    """Change what a fake backend says; answers are cached, for a backend gives always the same."""
    vars(backend).update(attributes)
    dispatch.clear_caches()


def arguments(**changes):
    batch, seqlen, nheads, headdim, ngroups, d_state = 3, 5, 4, 7, 2, 6
    tensors = {
        "x": torch.ones(batch, seqlen, nheads, headdim),
        "dt": torch.ones(batch, seqlen, nheads),
        "A": -torch.ones(nheads),
        "B": torch.ones(batch, seqlen, ngroups, d_state),
        "C": torch.ones(batch, seqlen, ngroups, d_state),
    }
    return {**tensors, **changes}


def mark_of(**changes):
    """The constant in y; None if it is no constant, as for any real backend."""
    y = polyscan.bidi_ssd(**arguments(**changes))
    values = y.unique()
    return values.item() if values.numel() == 1 else None


class TestAutomaticOrder:
    def test_built_ins_come_before_other_packages(self, fake, other):
        assert mark_of() is None
        assert polyscan.explain(**arguments()).backend in AUTOMATIC
        assert fake.steps() == other.steps() == []

    def test_other_packages_come_next_by_name(self, fake, other, built_ins_refuse):
        assert mark_of() == fake.mark
        set_up(fake, refusal="no")
        assert mark_of() == other.mark

    def test_reference_is_never_automatic(self, fake, other, built_ins_refuse):
        for backend in (fake, other):
            set_up(backend, refusal="no")
        with pytest.raises(polyscan.UnsupportedProblem) as caught:
            mark_of()
        assert "reference" not in caught.value.reasons
        assert polyscan.explain(**arguments()).backend is None
        # it can do the call, so nothing but the rule keeps it out
        assert polyscan.explain(**arguments(backend="reference")).backend == "reference"

    def test_an_unavailable_backend_is_passed_over(self, fake, other, built_ins_refuse):
        set_up(fake, missing="no such hardware")
        assert mark_of() == other.mark
        assert fake.asked == []  # it might need the missing library to answer

    def test_all_refusing_raises_with_every_reason(self, fake, other, built_ins_refuse):
        set_up(fake, refusal="d_state is 6, at most 4")
        set_up(other, missing="needs the library libother, which is not installed")
        with pytest.raises(polyscan.UnsupportedProblem) as caught:
            mark_of()
        assert caught.value.reasons == {
            **built_ins_refuse,
            "fake": fake.refusal,
            "other": other.missing,
        }
        for name, reason in caught.value.reasons.items():
            assert f"{name}: {reason}" in str(caught.value)
        assert fake.steps() == other.steps() == []


class TestRequests:
    def test_argument(self, fake):
        assert mark_of(backend="fake") == fake.mark

    def test_environment(self, fake, monkeypatch):
        monkeypatch.setenv(VARIABLE, "fake")
        assert mark_of() == fake.mark

    def test_context(self, fake):
        with polyscan.use_backend("fake"):
            assert mark_of() == fake.mark
        assert mark_of() is None

    def test_context_overrules_environment(self, fake, other, monkeypatch):
        monkeypatch.setenv(VARIABLE, "fake")
        with polyscan.use_backend("other"):
            assert mark_of() == other.mark
        assert mark_of() == fake.mark

    def test_argument_overrules_context_and_environment(self, fake, other, monkeypatch):
        monkeypatch.setenv(VARIABLE, "other")
        with polyscan.use_backend("other"):
            assert mark_of(backend="fake") == fake.mark

    def test_auto_as_argument_is_no_request(self, fake, monkeypatch):
        with polyscan.use_backend("fake"):
            assert mark_of(backend="auto") == fake.mark
        monkeypatch.setenv(VARIABLE, "fake")
        assert mark_of(backend="auto") == fake.mark

    def test_auto_as_context_overrules_environment(self, fake, monkeypatch):
        monkeypatch.setenv(VARIABLE, "fake")
        with polyscan.use_backend("auto"):
            assert mark_of() is None

    @pytest.mark.parametrize("value", ["", "auto"])
    def test_environment_without_a_request(self, fake, monkeypatch, value):
        monkeypatch.setenv(VARIABLE, value)
        assert mark_of() is None

    def test_inner_context_wins_and_the_outer_one_returns(self, fake, other):
        with polyscan.use_backend("fake"):
            with polyscan.use_backend("other"):
                assert mark_of() == other.mark
            with polyscan.use_backend("auto"):
                assert mark_of() is None
            assert mark_of() == fake.mark

    def test_context_ends_with_an_exception(self, fake):
        with pytest.raises(KeyError), polyscan.use_backend("fake"):
            raise KeyError
        assert mark_of() is None

    def test_context_is_of_its_thread_only(self, fake, other):
        inside, done = threading.Event(), threading.Event()
        marks = []

        def work():
            with polyscan.use_backend("fake"):
                inside.set()
                done.wait(10)
                marks.append(mark_of())

        thread = threading.Thread(target=work)
        thread.start()
        try:
            assert inside.wait(10)
            assert mark_of() is None
            with polyscan.use_backend("other"):
                done.set()
                thread.join(10)
                assert mark_of() == other.mark
        finally:
            done.set()
            thread.join(10)
        assert marks == [fake.mark]

    def test_ssd_asks_like_bidi_ssd(self, fake, monkeypatch):
        monkeypatch.setenv(VARIABLE, "fake")
        for reverse in (False, True):
            assert polyscan.ssd(**arguments(), reverse=reverse).eq(fake.mark).all()
        assert [p.directions[0].reverse for _, p, _ in fake.ran] == [False, True]

    @pytest.mark.parametrize("call", [polyscan.bidi_ssd, polyscan.ssd, polyscan.explain])
    @pytest.mark.parametrize("where", ["backend", "use_backend", VARIABLE])
    @pytest.mark.parametrize("name", ["fak", "Fake", " fake"])
    def test_unknown_name_raises_and_names_the_known_ones(
        self, fake, monkeypatch, call, where, name
    ):
        def ask():
            if where == "backend":
                return call(**arguments(backend=name))
            if where == VARIABLE:
                monkeypatch.setenv(VARIABLE, name)
                return call(**arguments())
            with polyscan.use_backend(name):
                return call(**arguments())

        with pytest.raises(ValueError, match=rf"^{where} ") as caught:
            ask()
        assert repr(name) in str(caught.value)
        for known in ("auto", "fake", "other", *BUILT_IN):
            assert known in str(caught.value)

    def test_unknown_context_changes_nothing(self, fake):
        with polyscan.use_backend("fake"):
            with pytest.raises(ValueError, match="nonesuch"), polyscan.use_backend("nonesuch"):
                pass
            assert mark_of() == fake.mark

    @pytest.mark.parametrize("name", [None, 3, ["fake"]])
    def test_context_must_be_a_string(self, name):
        wanted = f"use_backend must be a string, got {type(name).__name__}"
        with pytest.raises(TypeError, match=wanted), polyscan.use_backend(name):
            pass


class TestNamedBackendIsNeverReplaced:
    @pytest.fixture(params=["argument", "context", "environment"])
    def call(self, request, fake, monkeypatch):
        """A call that asks for fake in one of three ways."""
        if request.param == "environment":
            monkeypatch.setenv(VARIABLE, "fake")
        if request.param == "context":
            with polyscan.use_backend("fake"):
                yield mark_of
        else:
            given = {"backend": "fake"} if request.param == "argument" else {}
            yield lambda: mark_of(**given)

    @pytest.mark.parametrize(
        "attribute, error",
        [("missing", polyscan.BackendUnavailable), ("refusal", polyscan.UnsupportedProblem)],
    )
    def test_it_raises_its_reason(self, fake, call, attribute, error):
        reason = "d_state is 6, at most 4"
        set_up(fake, **{attribute: reason})
        with pytest.raises(error) as caught:
            call()
        assert type(caught.value) is error
        assert caught.value.reasons == {"fake": reason}
        assert "'fake'" in str(caught.value) and reason in str(caught.value)
        assert fake.steps() == []

    def test_its_own_error_passes_through(self, fake, call, monkeypatch):
        def fail(problem, inputs):
            raise MemoryError("the launch needs 3 GiB, 2 are free")

        monkeypatch.setattr(fake, "forward", fail)
        with pytest.raises(MemoryError, match="3 GiB"):
            call()


class TestErrors:
    def test_families(self):
        for error in (polyscan.BackendUnavailable, polyscan.UnsupportedProblem):
            assert issubclass(error, polyscan.BackendError)
        assert issubclass(polyscan.BackendError, polyscan.PolyscanError)
        assert issubclass(polyscan.BackendUnavailable, RuntimeError)
        assert issubclass(polyscan.UnsupportedProblem, ValueError)

    @pytest.mark.parametrize("error", [polyscan.BackendUnavailable, polyscan.UnsupportedProblem])
    def test_it_survives_the_way_out_of_a_worker_process(self, error):
        raised = error("headline:", {"fake": "d_state is 6, at most 4"})
        arrived = pickle.loads(pickle.dumps(raised))
        assert type(arrived) is error
        assert str(arrived) == str(raised)
        assert arrived.reasons == raised.reasons


# What goes wrong in the module of an entry point, and what its reason must tell.
BROKEN = {
    "library missing": (
        "raise ImportError('libquantum.so.2: cannot open')",
        "ImportError: libquantum.so.2",
    ),
    "fails on import": ("1 / 0", "ZeroDivisionError"),
    "syntax": ("def", "SyntaxError"),
    "no such attribute": ("", "BACKEND"),
    "not a backend": ("BACKEND = object()", "name"),
    "another name": (MODULE, "'fake'"),
}


class TestBrokenEntryPoints:
    @pytest.fixture(params=BROKEN.values(), ids=BROKEN.keys())
    def told(self, request, install):
        """A package whose backend "broken" cannot be loaded; what the reason must tell."""
        source, told = request.param
        install("broken_package", source, {"broken": "broken_package:BACKEND"})
        return told

    def test_it_is_listed_as_unavailable_with_the_reason(self, told):
        info = polyscan.available_backends()["broken"]
        assert not info.available
        assert told in info.reason

    def test_it_breaks_nothing_else(self, told):
        before = {name for name, info in polyscan.available_backends().items() if info.available}
        assert {"reference", "torch"} <= before
        assert mark_of() is None

    def test_asked_for_by_name_it_raises_the_reason(self, told):
        with pytest.raises(polyscan.BackendUnavailable) as caught:
            mark_of(backend="broken")
        assert told in caught.value.reasons["broken"]
        assert told in str(caught.value)

    def test_explain_tells_the_reason(self, told):
        assert told in polyscan.explain(**arguments()).reasons["broken"]

    def test_without_its_library_it_has_no_version(self, fake, monkeypatch):
        def version():
            raise importlib.metadata.PackageNotFoundError("libfake")

        monkeypatch.setattr(fake, "version", version)
        set_up(fake, missing="needs libfake, which is not installed")
        assert polyscan.available_backends()["fake"].reason == fake.missing


def test_nobody_replaces_a_built_in(install):
    before = {name: registry.load(name) for name in BUILT_IN}
    install("impostor", MODULE, dict.fromkeys(BUILT_IN, "impostor:BACKEND"))
    assert set(registry.names()) == BUILT_IN
    for name in BUILT_IN:
        assert registry.load(name) is before[name]
    assert mark_of() is None
    assert "impostor" not in sys.modules


class TestAvailableBackends:
    def test_polyscans_own_come_first(self, third_party):
        names = list(polyscan.available_backends())
        assert set(names[: len(BUILT_IN)]) == BUILT_IN
        assert names[len(BUILT_IN) :] == ["fake", "other"]

    def test_the_two_that_need_only_torch_are_available(self):
        for name in ("reference", "torch"):
            info = polyscan.available_backends()[name]
            assert (info.name, info.available, info.reason) == (name, True, None)
            assert torch.__version__ in info.version

    def test_version_and_reason(self, fake):
        set_up(fake, missing="no such hardware")
        listed = polyscan.available_backends()
        assert listed["fake"] == polyscan.BackendInfo("fake", "fake 1.0", "no such hardware")
        assert not listed["fake"].available
        assert listed["other"] == polyscan.BackendInfo("other", "other 1.0", None)

    def test_an_info_is_frozen(self):
        with pytest.raises(dataclasses.FrozenInstanceError):
            polyscan.available_backends()["torch"].reason = "none"


class TestExplain:
    def test_it_has_the_parameters_of_bidi_ssd(self):
        explained = inspect.signature(polyscan.explain)
        assert explained.parameters == inspect.signature(polyscan.bidi_ssd).parameters
        assert explained.return_annotation is polyscan.Explanation

    def test_it_runs_nothing(self, fake):
        x = torch.ones(3, 5, 4, 7, requires_grad=True)
        assert polyscan.explain(**arguments(x=x), backend="fake").backend == "fake"
        assert fake.asked
        assert fake.steps() == []

    def test_it_is_frozen(self):
        explanation = polyscan.explain(**arguments())
        with pytest.raises(dataclasses.FrozenInstanceError):
            explanation.backend = "other"
        with pytest.raises(TypeError):
            explanation.reasons["torch"] = "none"

    def test_sources(self, fake, monkeypatch):
        def decided():
            explanation = polyscan.explain(**arguments())
            return explanation.source, explanation.backend

        by_table = polyscan.explain(**arguments())
        assert by_table.source == "table" and by_table.backend in AUTOMATIC
        monkeypatch.setenv(VARIABLE, "fake")
        assert decided() == ("environment", "fake")
        with polyscan.use_backend("other"):
            assert decided() == ("context", "other")
            by_argument = polyscan.explain(**arguments(), backend="fake")
            assert (by_argument.source, by_argument.backend) == ("argument", "fake")
        with polyscan.use_backend("auto"):
            assert decided() == ("table", by_table.backend)

    @pytest.mark.parametrize("name", ["auto", "fake", "reference", "torch"])
    def test_every_other_backend_has_a_reason(self, fake, name):
        explanation = polyscan.explain(**arguments(), backend=name)
        assert set(explanation.reasons) == set(registry.names()) - {explanation.backend}
        assert all(explanation.reasons.values())

    def test_reasons_of_backends_that_could(self, fake):
        by_table = polyscan.explain(**arguments())
        assert f"{by_table.backend} comes first" in by_table.reasons["fake"]
        assert "only ever taken by name" in by_table.reasons["reference"]
        by_name = polyscan.explain(**arguments(), backend="other")
        assert "other was asked for by name" in by_name.reasons["fake"]

    def test_reasons_of_backends_that_cannot(self, fake, other):
        set_up(fake, refusal="d_state is 6, at most 4")
        set_up(other, missing="no such hardware")
        for backend in ("auto", "torch"):
            reasons = polyscan.explain(**arguments(), backend=backend).reasons
            assert reasons["fake"] == fake.refusal
            assert reasons["other"] == other.missing

    @pytest.mark.parametrize("attribute", ["missing", "refusal"])
    def test_a_named_backend_that_cannot(self, fake, attribute):
        set_up(fake, **{attribute: "d_state is 6, at most 4"})
        explanation = polyscan.explain(**arguments(), backend="fake")
        assert explanation.backend is None
        assert set(explanation.reasons) == set(registry.names())
        assert explanation.reasons["fake"] == "d_state is 6, at most 4"

    def test_text(self, fake):
        set_up(fake, refusal="d_state is 6, at most 4")
        first, *rest = str(polyscan.explain(**arguments(), backend="torch")).splitlines()
        assert "torch" in first and "argument" in first
        assert len(rest) == len(registry.names()) - 1
        assert any("fake" in line and fake.refusal in line for line in rest)

    def test_text_where_nothing_can(self, fake):
        set_up(fake, refusal="d_state is 6, at most 4")
        first, *rest = str(polyscan.explain(**arguments(), backend="fake")).splitlines()
        assert "no backend" in first
        assert any("fake" in line and fake.refusal in line for line in rest)

    def test_text_tells_who_decided(self, fake, monkeypatch):
        def headline():
            return str(polyscan.explain(**arguments())).splitlines()[0]

        assert "order of preference" in headline()
        monkeypatch.setenv(VARIABLE, "fake")
        assert VARIABLE in headline()
        with polyscan.use_backend("fake"):
            assert "use_backend" in headline()

    @pytest.mark.parametrize("grad", [False, True])
    def test_it_asks_about_the_problem_of_the_call(self, fake, grad):
        given = arguments(x=torch.ones(3, 5, 4, 7, requires_grad=grad), shift=True, chunk_size=32)
        polyscan.explain(**given, backend="fake")
        (explained,) = fake.asked
        polyscan.bidi_ssd(**given, backend="fake")
        ((_, computed, _),) = fake.ran
        assert explained == computed
        assert explained.needs_grad == grad
        with torch.no_grad():
            polyscan.explain(**given, backend="fake")
        assert not fake.asked[-1].needs_grad


class TestBackward:
    """The backward is the forward's backend's, whatever was asked for in between."""

    def leaf(self):
        return torch.ones(3, 5, 4, 7, requires_grad=True)

    def test_after_the_context_has_ended(self, fake, other):
        x = self.leaf()
        with polyscan.use_backend("fake"):
            y = polyscan.bidi_ssd(**arguments(x=x))
        with polyscan.use_backend("other"):
            y.sum().backward()
        assert fake.steps() == ["forward", "backward"]
        assert other.ran == []
        assert x.grad.eq(fake.mark).all()

    def test_after_the_environment_has_changed(self, fake, other, monkeypatch):
        monkeypatch.setenv(VARIABLE, "fake")
        y = polyscan.bidi_ssd(**arguments(x=self.leaf()))
        monkeypatch.setenv(VARIABLE, "other")
        y.sum().backward()
        assert fake.steps() == ["forward", "backward"]
        assert other.ran == []

    def test_of_an_automatic_choice(self, fake, built_ins_refuse):
        y = polyscan.bidi_ssd(**arguments(x=self.leaf()))
        with polyscan.use_backend("other"):
            y.sum().backward()
        assert fake.steps() == ["forward", "backward"]

    def test_in_a_thread_that_has_no_context(self, fake):
        with polyscan.use_backend("fake"):
            y = polyscan.bidi_ssd(**arguments(x=self.leaf()))
            thread = threading.Thread(target=y.sum().backward)
            thread.start()
            thread.join(10)
        assert fake.steps() == ["forward", "backward"]

    def test_forward_and_backward_are_given_one_problem(self, fake):
        polyscan.bidi_ssd(**arguments(x=self.leaf()), backend="fake").sum().backward()
        (_, forward, _), (_, backward, _) = fake.ran
        assert forward == backward


# Changes to the call, and fields of the problem that a backend must then see.
PROBLEMS = {
    "plain": (
        {},
        {
            "batch": 3,
            "seqlen": 5,
            "nheads": 4,
            "headdim": 7,
            "ngroups": 2,
            "d_state": 6,
            "nsequences": 3,
            "device": torch.device("cpu"),
            "x_dtype": torch.float32,
            "product_dtype": torch.float32,
            "accumulation_dtype": torch.float32,
            "shift": False,
            "dt_softplus": False,
            "dt_limit": (0.0, math.inf),
            "D": None,
            "has_z": False,
            "has_initial_states": False,
            "return_final_states": False,
            "packing": None,
            "chunk_size": None,
            "tf32": False,
            "needs_grad": False,
            "saves_pre_gate": False,
            "is_empty": False,
        },
    ),
    "options": (
        {"shift": True, "dt_softplus": True, "dt_limit": [1, 2], "chunk_size": 32},
        {"shift": True, "dt_softplus": True, "dt_limit": (1.0, 2.0), "chunk_size": 32},
    ),
    "half with bfloat16": (
        {"x": torch.ones(3, 5, 4, 7).half(), "C": torch.ones(3, 5, 2, 6).bfloat16()},
        {"x_dtype": torch.float16, "product_dtype": torch.float32},
    ),
    "bfloat16": (
        {name: torch.ones(3, 5, 2, 6).bfloat16() for name in "BC"}
        | {"x": torch.ones(3, 5, 4, 7).bfloat16()},
        {"product_dtype": torch.bfloat16, "accumulation_dtype": torch.float32},
    ),
    "float64 x": (
        {"x": torch.ones(3, 5, 4, 7).double()},
        {"product_dtype": torch.float64, "accumulation_dtype": torch.float64},
    ),
    "float64 B_rev": (
        {"B_rev": torch.ones(3, 5, 2, 6).double()},
        {"product_dtype": torch.float64, "accumulation_dtype": torch.float32},
    ),
    "D per head": ({"D": torch.ones(4)}, {"D": "head"}),
    "D per channel": ({"D": torch.ones(4, 7)}, {"D": "channel"}),
    "D per token": ({"D": torch.ones(3, 5, 4)}, {"D": "token"}),
    "gate": ({"z": torch.ones(3, 5, 4, 7)}, {"has_z": True, "saves_pre_gate": False}),
    "gate with gradient": (
        {"z": torch.ones(3, 5, 4, 7, requires_grad=True)},
        {"has_z": True, "needs_grad": True, "saves_pre_gate": True},
    ),
    "states": (
        {"initial_states_rev": torch.ones(3, 4, 7, 6), "return_final_states": True},
        {"has_initial_states": True, "return_final_states": True, "nsequences": 3},
    ),
    "seq_idx": (
        {"seq_idx": torch.zeros(3, 5, dtype=torch.uint8)},
        {"packing": "seq_idx", "nsequences": None},
    ),
    "cu_seqlens": (
        {
            **{name: torch.ones(1, 5, 2, 6) for name in "BC"},
            "x": torch.ones(1, 5, 4, 7),
            "dt": torch.ones(1, 5, 4),
            "cu_seqlens": torch.tensor([0, 2, 2, 5]),
        },
        {"packing": "cu_seqlens", "batch": 1, "nsequences": 3},
    ),
}


class TestProblem:
    @pytest.mark.parametrize("changes, fields", PROBLEMS.values(), ids=PROBLEMS.keys())
    def test_a_backend_is_asked_with_the_right_one(self, fake, changes, fields):
        polyscan.bidi_ssd(**arguments(**changes), backend="fake")
        (problem,) = fake.asked
        assert {name: getattr(problem, name) for name in fields} == fields
        assert fake.ran[0][1] == problem

    def test_directions_read_what_was_given(self, fake):
        changes = {"dt_rev": torch.ones(3, 5, 4), "dt_bias": torch.ones(4)}
        polyscan.bidi_ssd(**arguments(**changes), backend="fake")
        forward, reverse = fake.asked[0].directions
        assert (forward.reverse, reverse.reverse) == (False, True)
        assert (forward.dt, reverse.dt) == ("dt", "dt_rev")
        assert (forward.C, reverse.C) == ("C", "C")
        assert (forward.dt_bias, reverse.dt_bias) == ("dt_bias", "dt_bias")

    @pytest.mark.parametrize("axis", [0, 1])
    def test_no_token_never_reaches_a_backend(self, fake, axis):
        def cut(tensor):
            return tensor.narrow(axis, 0, 0).clone().requires_grad_()

        given = arguments()
        given |= {name: cut(given[name]) for name in ("x", "dt", "B", "C")}
        polyscan.bidi_ssd(**given, backend="fake").sum().backward()
        assert fake.steps() == []
        assert given["B"].grad.shape == given["B"].shape

    def test_backends_run_without_autograd_and_autocast(self, fake):
        x = torch.ones(3, 5, 4, 7, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            y = polyscan.bidi_ssd(**arguments(x=x), backend="fake")
            y.sum().backward()
            polyscan.bidi_ssd(**arguments(), backend="fake")  # nothing to record, but grad mode on
        assert fake.steps() == ["forward", "backward", "forward"]
        assert not any(mode for *_, mode in fake.ran)
