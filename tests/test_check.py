"""``polyscan.check`` and its command: what is right passes, and what is wrong is named."""

import importlib

import pytest
import torch

import polyscan
from polyscan import dispatch
from polyscan.checking import FLOAT32
from polyscan.cli import main

PROBES = [
    *("ones", "local", "bigdt"),
    *("ones shifted", "local shifted", "bigdt shifted"),
    "random",
]
# Another package's backend that is right until a test changes it.
MODULE = """
from polyscan.backends.reference import ReferenceBackend

class Foreign(ReferenceBackend):
    name = "foreign"

BACKEND = Foreign()
"""


@pytest.fixture
def foreign(install):
    install("foreign_package", MODULE, {"foreign": "foreign_package:BACKEND"})
    return importlib.import_module("foreign_package").BACKEND


@pytest.fixture
def change(foreign, monkeypatch):
    """Has one of the foreign backend's methods replaced: ``change(method, function)``."""

    def change(method, function):
        monkeypatch.setattr(foreign, method, function)
        dispatch.clear_caches()

    return change


@pytest.fixture
def run(capsys):
    """Runs the command and gives its exit code and what it printed."""

    def run(*arguments):
        code = main(["check", *arguments])
        return code, *capsys.readouterr()

    return run


def on_cpu(*backends):
    return polyscan.check(backends, device="cpu")


def scaled(function, name, factor):
    """``function``, with one of its results multiplied."""

    def wrong(*args):
        results = function(*args)
        if isinstance(results, dict):
            results[name] = results[name] * factor
            return results
        return results._replace(**{name: getattr(results, name) * factor})

    return wrong


def test_backend_is_right(backend, device):
    report = polyscan.check([backend], device)
    if all(row.reason for row in report.rows):
        pytest.skip(f"{backend}: {report.rows[0].reason}")
    assert report.passed, str(report)
    assert [row.probe for row in report.rows] == PROBES
    assert all(row.error <= row.limit and row.worst for row in report.rows)


def test_default_is_every_backend_on_every_kind_of_device(foreign):
    report = polyscan.check()
    kinds = {"cpu", "cuda"} if torch.cuda.is_available() else {"cpu"}
    assert {row.backend for row in report.rows} == set(polyscan.available_backends())
    assert {row.device.partition(":")[0] for row in report.rows} == kinds
    assert report.passed, str(report)


def test_without_gradients_and_with_other_defaults(foreign):
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad(), torch.device("meta"):
            assert on_cpu("foreign") == on_cpu("foreign")
            assert on_cpu("foreign").passed
    finally:
        torch.set_default_dtype(torch.float32)


def test_leaves_the_random_state_alone(foreign):
    before = torch.get_rng_state()
    on_cpu("foreign")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["y", "grad_x"])
def test_wrong_numbers_fail_with_error_and_limit(name, foreign, change, run):
    argument = name.removeprefix("grad_")
    method = "backward" if name.startswith("grad_") else "forward"
    change(method, scaled(getattr(foreign, method), argument, 1.01))
    report = on_cpu("foreign")
    assert not report.passed
    for row in report.rows:
        assert (row.passed, row.worst, row.limit) == (False, name, FLOAT32), row
        assert row.error == pytest.approx(0.01, rel=1e-3)
    code, out, err = run("--backend", "foreign", "--device", "cpu")
    assert (code, err) == (1, "")
    assert out.count(f"float32  1.0e-02  1.0e-05  failed: {name}\n") == len(PROBES)
    assert out.endswith(f"\n\n0 passed, {len(PROBES)} failed, 0 skipped\n")


@pytest.mark.parametrize(
    "name", ["D", "z", "dt_rev", "A_rev", "dt_bias_rev", "C_rev", "initial_states_rev"]
)
def test_every_gradient_counts(name, foreign, change):
    right = foreign.backward

    def backward(*args):
        return {key: 1.01 * g if key == name else g for key, g in right(*args).items()}

    change("backward", backward)
    report = on_cpu("foreign")
    assert [(row.probe, row.worst) for row in report.rows if not row.passed] == [
        ("random", f"grad_{name}")
    ]


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_what_is_no_number_fails(factor, foreign, change):
    change("forward", scaled(foreign.forward, "y", factor))
    report = on_cpu("foreign")
    assert all(row.passed is False and row.error == float("inf") for row in report.rows)


def test_a_gradient_that_should_vanish_must(foreign, change):
    right = foreign.backward

    def backward(*args):
        return {key: g + 1e-6 if key == "A" else g for key, g in right(*args).items()}

    change("backward", backward)
    failed = [row for row in on_cpu("foreign").rows if not row.passed]
    assert [row.probe for row in failed] == ["bigdt", "bigdt shifted"]


def test_wrong_shape_fails(foreign, change):
    right = foreign.forward
    change("forward", lambda *args: right(*args)._replace(y=torch.ones(())))
    report = on_cpu("foreign")
    assert not any(row.passed for row in report.rows)
    assert all(row.reason for row in report.rows)


def test_exception_fails_with_its_text(change, run):
    def forward(problem, inputs):
        raise RuntimeError("launch failed:\n  no such kernel")

    change("forward", forward)
    report = on_cpu("foreign")
    assert [(row.probe, row.passed) for row in report.rows] == [(name, False) for name in PROBES]
    assert {row.reason for row in report.rows} == {"RuntimeError: launch failed:\n  no such kernel"}
    code, out, _ = run("--backend", "foreign", "--backend", "reference", "--device", "cpu")
    assert code == 1
    assert out.count("  failed: RuntimeError: launch failed: no such kernel\n") == len(PROBES)
    assert out.endswith(f"\n\n{len(PROBES)} passed, {len(PROBES)} failed, 0 skipped\n")


def test_unavailable_is_a_row_and_fails_only_if_named(change, run):
    change("unavailable_reason", lambda: "libforeign is not installed")
    code, out, _ = run("--device", "cpu")
    assert code == 0
    assert "skipped: libforeign is not installed\n" in out
    (row,) = (row for row in polyscan.check(device="cpu").rows if row.backend == "foreign")
    assert (row.probe, row.passed, row.error) == ("all", None, None)
    code, out, _ = run("--backend", "foreign", "--backend", "reference", "--device", "cpu")
    assert code == 1
    assert "failed: libforeign is not installed\n" in out


def test_what_a_backend_refuses_is_skipped(change, run):
    change(
        "unsupported_reason",
        lambda problem: "packing is not supported" if problem.packing else None,
    )
    code, out, _ = run("--backend", "foreign", "--device", "cpu")
    assert code == 0
    assert "skipped: packing is not supported\n" in out
    assert out.endswith("\n\n6 passed, 0 failed, 1 skipped\n")


def test_nothing_that_ran_is_not_passed(change):
    assert not polyscan.check([]).passed
    change("unsupported_reason", lambda problem: "not on a Tuesday")
    (row,) = on_cpu("foreign").rows
    assert (row.probe, row.passed, row.reason) == ("all", False, "not on a Tuesday")


def test_table_is_aligned(foreign):
    header, *rows = str(on_cpu("foreign", "reference")).partition("\n\n")[0].splitlines()
    assert header.split() == ["backend", "device", "probe", "dtype", "error", "limit", "result"]
    assert len(rows) == 2 * len(PROBES)
    assert {row.index("passed") for row in rows} == {header.index("result")}
    assert {row.index("float32") for row in rows} == {header.index("dtype")}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--backend", "nonsense"], "backends must be of "),
        (["--device", "nonsense"], "device 'nonsense' cannot be used: "),
        (["--device", "cuda:99"], "device 'cuda:99' cannot be used: "),
    ],
)
def test_unknown_names_are_refused(arguments, message, run):
    code, out, err = run(*arguments)
    assert (code, out) == (1, "")
    assert err.startswith(f"polyscan: {message}")
