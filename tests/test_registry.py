"""What is installed: how backends are listed, and what those that cannot be loaded say."""

import dataclasses
import importlib.metadata
import pickle
import sys

import pytest
import torch

import polyscan
from fakes import BUILT_IN, MODULE, arguments, mark_of, set_up
from polyscan import registry

pytestmark = pytest.mark.usefixtures("nothing_requested")


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
