"""What ``polyscan.explain`` says about a call, as values and as text."""

import dataclasses
import inspect

import pytest
import torch

import polyscan
from fakes import AUTOMATIC, VARIABLE, arguments, set_up
from polyscan import registry

pytestmark = pytest.mark.usefixtures("nothing_requested")


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
