"""What every test runs under: which backends, which device, and poisoned memory.

``pytest --backend NAME`` (repeatable) runs the named backends only, and fails where one of them
cannot run here. Without it all installed backends are tested; one that is unavailable shows as
skipped, with its own reason.
"""

import importlib
import os

import pytest
import torch
from hypothesis import settings

import polyscan
from fakes import AUTOMATIC, MODULE, VARIABLE
from packages import site_packages
from polyscan import dispatch, registry

# A gate must answer the same every time. `--hypothesis-profile=explore` looks for new problems.
settings.register_profile("gate", derandomize=True, deadline=None, max_examples=60)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("gate")

# Arguments of tests that stand for a backend's name.
BACKEND_FIXTURES = ("backend", "backward_backend")


def pytest_addoption(parser):
    parser.addoption(
        "--backend",
        action="append",
        metavar="NAME",
        help="test this backend only, and fail if it cannot run (repeatable)",
    )


def pytest_configure(config):
    # The problems are tiny. More threads would mostly wait for one another, and by spinning.
    torch.set_num_threads(1)


def pytest_sessionstart(session):
    installed = polyscan.available_backends()
    for name in session.config.getoption("backend") or ():
        if name not in installed:
            raise pytest.UsageError(f"--backend {name}: installed are {', '.join(installed)}")
        if not installed[name].available:
            raise pytest.UsageError(f"--backend {name}: {installed[name].reason}")


def pytest_report_header(config):
    backends = (
        f"{info.name} ({info.version if info.available else info.reason})"
        for info in polyscan.available_backends().values()
    )
    return [f"device: {_device()}", f"backends: {', '.join(backends)}"]


# What Triton's interpreter, a thousand times slower than a GPU, runs of the shared suite: every
# option at least once, forward and backward. The rest of it runs where there is a GPU.
INTERPRETED = (
    "torch.float32-seqlen-17-triton",
    "torch.float32-seqlen-65-shift-triton",
    "torch.float32-ngroups-2-shift-triton",
    "torch.float32-d_state-3-triton",
    "torch.float32-headdim-7-shift-triton",
    "torch.float32-D-channel-triton",
    "torch.float32-limit-shift-triton",
    "torch.float32-only-B_rev-triton",
    "torch.float32-only-dt_bias_rev-shift-triton",
    "torch.float32-states-triton",
    "torch.float32-states-shift-triton",
    "torch.float32-ssd-reverse-shift-triton",
    "torch.float32-packed-states-triton",
    "torch.float32-packed-empty-shift-triton",
    "torch.float32-packed-uncovered-triton",
    "torch.float32-packed-short-shift-triton",
    "torch.float32-packed-nothing-triton",
    "torch.float32-seq_idx-triton",
    "torch.float32-seq_idx-shift-triton",
    "torch.bfloat16-z-triton",
    "torch.float16-chunk_size-64-shift-triton",
)


def pytest_collection_modifyitems(config, items):
    if os.environ.get("TRITON_INTERPRET", "0") != "1":
        return
    kept = [
        item for item in items if any(f"test_case[{name}]" in item.name for name in INTERPRETED)
    ]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


@pytest.hookimpl(trylast=True)  # so that the backend varies fastest, and they share exact values
def pytest_generate_tests(metafunc):
    for fixture in BACKEND_FIXTURES:
        if fixture in metafunc.fixturenames:
            metafunc.parametrize(fixture, _backends(metafunc.config))


def _backends(config):
    asked_for = config.getoption("backend")
    return [
        pytest.param(
            name,
            marks=() if info.available else pytest.mark.skip(reason=f"{name}: {info.reason}"),
        )
        for name, info in polyscan.available_backends().items()
        if not asked_for or name in asked_for
    ]


def _device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def device():
    """Where the tensors of a test live: the GPU, if there is one."""
    return _device()


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def install(tmp_path):
    """Install a distribution of one module: ``install(module, source, {name: entry point})``."""
    with site_packages(tmp_path / "site-packages") as install:
        yield install


@pytest.fixture
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


@pytest.fixture(autouse=True, scope="session")
def _poisoned_memory():
    """Fill what torch hands out uninitialised, so that an output that nobody wrote shows."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (torch, "empty"),
            (torch, "empty_like"),
            (torch, "empty_strided"),
            (torch.Tensor, "new_empty"),
        ):
            patch.setattr(owner, name, _poisoning(getattr(owner, name)))
        yield


def _poisoning(allocate):
    def poisoned(*args, **kwargs):
        tensor = allocate(*args, **kwargs)
        if tensor.is_floating_point() or tensor.is_complex():
            with torch.no_grad():  # some ask for a leaf that requires grad
                return tensor.fill_(torch.nan)
        if tensor.dtype == torch.bool:
            return tensor.fill_(True)
        return tensor.fill_(torch.iinfo(tensor.dtype).max // 3)

    return poisoned
