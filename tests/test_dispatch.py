"""Which backend runs: the order of preference, requests, and what a named backend raises.

Everything is tried with backends of another package, installed as pip would install them.
"""

import threading

import pytest

import polyscan
from fakes import AUTOMATIC, BUILT_IN, VARIABLE, arguments, mark_of, set_up

pytestmark = pytest.mark.usefixtures("nothing_requested")


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
