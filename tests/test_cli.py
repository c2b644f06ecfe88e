"""The command line: what `python -m polyscan` reports, and that the demo trains and draws."""

import importlib.metadata
import os
import platform
import subprocess
import sys

import pytest
import torch

import polyscan
from polyscan.cli import DEMO_PACKAGES, main

PNG = b"\x89PNG\r\n\x1a\n"


def sections(text):
    """The report by section: each a dict from a line's first word to the rest of the line."""
    found = {}
    for block in text.split("\n\n"):
        title, *lines = block.splitlines()
        found[title] = {first: " ".join(rest) for first, *rest in map(str.split, lines)}
    return found


@pytest.fixture
def environment(monkeypatch):
    """Sets POLYSCAN_BACKEND, or by default unsets it."""

    def set_to(name):
        monkeypatch.setenv("POLYSCAN_BACKEND", name)

    monkeypatch.delenv("POLYSCAN_BACKEND", raising=False)
    return set_to


@pytest.fixture
def report(environment, capsys):
    """Runs `python -m polyscan` here and gives its sections."""

    def run():
        assert main([]) == 0
        return sections(capsys.readouterr().out)

    return run


def test_module_runs_as_a_command_and_imports_nothing_optional(tmp_path):
    code = """
import runpy, sys
sys.argv = ["polyscan"]
try:
    runpy.run_module("polyscan", run_name="__main__")
except SystemExit as end:
    optional = {"matplotlib", "rich", "sklearn"} & set(sys.modules)
    assert not end.code and not optional, (end.code, optional)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "POLYSCAN_BACKEND"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert list(sections(done.stdout)) == ["versions", "hardware", "backends", "choice"]


def test_versions_and_hardware(report):
    versions, hardware = report()["versions"], report()["hardware"]
    assert versions["polyscan"] == polyscan.__version__
    assert versions["python"] == platform.python_version()
    assert versions["torch"] == torch.__version__
    assert versions["numpy"] == importlib.metadata.version("numpy")
    assert {"cpu", "cuda"} <= {kind.partition(":")[0] for kind in hardware}


def test_every_backend_is_listed_with_its_state(report):
    backends = report()["backends"]
    known = polyscan.available_backends()
    assert set(backends) == set(known)
    assert {"reference", "torch"} <= set(known)
    for name, line in backends.items():
        assert line.endswith("available" if known[name].available else known[name].reason)
        assert known[name].version in line


def test_choice_without_the_variable(environment, capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert sections(out)["choice"]["POLYSCAN_BACKEND"] == "not set"
    assert "  not reference: can do it, but is only ever taken by name\n" in out


def test_the_variable_is_reported_and_auto_does_not_follow_it(report, environment):
    without = report()["choice"]["auto"]
    environment("reference")
    choice = report()["choice"]
    assert choice["POLYSCAN_BACKEND"] == "reference"
    assert choice["auto"] == without


def test_a_wrong_variable_is_an_error_in_the_report(report, environment):
    environment("nonsense")
    choice = report()["choice"]
    assert choice["POLYSCAN_BACKEND"] == "nonsense"
    assert choice["error:"].startswith("POLYSCAN_BACKEND must be one of auto")
    assert choice["error:"].endswith("got 'nonsense'")


def test_unknown_command_is_refused(capsys):
    with pytest.raises(SystemExit) as end:
        main(["nonsense"])
    assert end.value.code == 2
    assert "demo" in capsys.readouterr().err


@pytest.mark.parametrize("module", DEMO_PACKAGES)
def test_demo_names_what_is_missing(module, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    assert main(["demo"]) == 1
    assert capsys.readouterr().err == (
        f"polyscan: the demo needs {DEMO_PACKAGES[module]}: pip install polyscan[demo]\n"
    )


def test_demo_packages_are_those_of_the_extra():
    requirements = importlib.metadata.requires("polyscan")
    extra = {line.partition(";")[0].strip() for line in requirements if 'extra == "demo"' in line}
    assert extra == set(DEMO_PACKAGES.values())


@pytest.fixture
def demo(environment):
    """The demo's module; skips where its packages are not installed."""
    for module in DEMO_PACKAGES:
        pytest.importorskip(module)
    from polyscan.cli import demo

    return demo


@pytest.fixture
def run_demo(demo, capsys, tmp_path):
    """Runs the demo and gives exit code, stdout, stderr and the picture's path."""

    def run(*arguments):
        output = tmp_path / "made" / "here"
        code = main(["demo", "--output", str(output), *arguments])
        return code, *capsys.readouterr(), output / "digits.png"

    return run


def test_demo_that_learned_too_little_fails_and_still_draws(run_demo):
    code, out, err, picture = run_demo("--epochs", "1")
    assert code == 1
    assert err.startswith("polyscan: a held-out accuracy of ")
    assert err.endswith(" is too low: it should reach 95%\n")
    assert picture.read_bytes().startswith(PNG)
    assert out.count("\n") < 20 + len(polyscan.available_backends())


def test_demo_that_learned_enough_succeeds(run_demo, demo, monkeypatch):
    monkeypatch.setattr(demo, "REQUIRED_ACCURACY", 0.0)
    code, out, err, picture = run_demo("--epochs", "1", "--backend", "torch", "--seed", "1")
    assert (code, err) == (0, "")
    assert "backend   torch, by polyscan.use_backend\n" in out
    assert str(picture) in out


@pytest.mark.parametrize("name", ["nonsense", ""])
def test_demo_refuses_an_unknown_backend(run_demo, name):
    code, _, err, picture = run_demo("--backend", name)
    assert code == 1
    assert err.startswith("polyscan: ") and err.endswith(f"; got {name!r}\n")
    assert not picture.exists()


def test_demo_refuses_a_wrong_variable(run_demo, environment):
    environment("nonsense")
    code, _, err, _ = run_demo()
    assert code == 1
    assert err.startswith("polyscan: POLYSCAN_BACKEND must be one of auto")


@pytest.mark.parametrize("epochs", ["0", "-1", "many"])
def test_demo_refuses_a_wrong_number_of_epochs(epochs, capsys):
    with pytest.raises(SystemExit) as end:
        main(["demo", "--epochs", epochs])
    assert end.value.code == 2
    assert "--epochs" in capsys.readouterr().err
