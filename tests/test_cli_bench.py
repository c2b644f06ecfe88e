"""`python -m polyscan bench`: what it measures, shows, saves and refuses."""

import importlib.metadata
import json
import sys

import pytest

from polyscan.bench import implementations, measure
from polyscan.bench.machine import Limits, facts
from polyscan.bench.presets import PRESETS, Preset
from polyscan.bench.records import Record, Run
from polyscan.bench.timing import Budget
from polyscan.cli import BENCH_PACKAGES, main

TINY = ["--presets", "small", "--device", "cpu"]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A preset that is measured at once."""
    for module in BENCH_PACKAGES:
        pytest.importorskip(module)
    monkeypatch.setitem(PRESETS, "small", Preset("small", 1, 5, 2, 3, 2, precisions=("float32",)))
    monkeypatch.setattr(measure, "ON_CPU", Budget(0, 1, 1))
    monkeypatch.setattr(measure, "limits", lambda *_: Limits(1e9, 1e12))


@pytest.fixture
def bench(capsys):
    """Runs the command and gives exit code, stdout and stderr."""

    def run(*arguments):
        return main(["bench", *map(str, arguments)]), *capsys.readouterr()

    return run


def test_a_table_for_each_group(bench):
    code, out, err = bench(*TINY, "--backends", "torch", "plain", "--passes", "forward")
    assert (code, err) == (0, "")
    for variant in ("sum", "hydra"):
        assert f"small, {variant}, float32, forward" in out
    assert out.count("│ torch │") == out.count("│ plain │") == 2
    assert "backward" not in out


def test_what_cannot_run_is_named_with_its_reason(bench, monkeypatch):
    monkeypatch.setitem(sys.modules, "ssd", None)
    monkeypatch.setitem(sys.modules, "einops", None)
    monkeypatch.setitem(sys.modules, "packaging", None)
    code, out, _ = bench(*TINY, "--backends", "torch", "bimamba2", "--passes", "forward")
    assert code == 0
    assert "without bimamba2: needs ssd, einops, packaging, which is not installed" in out


def test_the_json_file_says_what_ran_and_on_what(bench, tmp_path):
    path = tmp_path / "made" / "run.json"
    code, _, _ = bench(*TINY, "--backends", "torch", "bimamba2", "--json", path, "--commit", "c0")
    assert code == 0
    run = Run.load(path)
    assert [r.implementation for r in run.records] == ["torch"] * 6
    assert {r.status for r in run.records} == {"timed"}
    wanted = {**facts(measure.torch.device("cpu")), "commit": "c0"}
    assert {name: run.machine[name] for name in wanted} == json.loads(json.dumps(wanted))
    assert {"device", "driver", "torch", "polyscan", "python", "commit"} <= run.machine.keys()
    assert run.machine["effort"] == "quick"
    assert run.machine["limits"] == {"float32": {"bytes_per_s": 1e9, "flop_per_s": 1e12}}
    assert list(run.machine["missing"]) == ["bimamba2"]


def test_something_wrong_of_ours_is_an_error_and_of_others_is_not(bench, monkeypatch):
    class Wrong(implementations.Plain):
        def compute(self, leaves, options, chunk_size):
            return 2 * super().compute(leaves, options, chunk_size)

    one = Wrong("wrong", compiled=False)
    known = {**implementations.implementations(), "wrong": one}
    monkeypatch.setattr(implementations, "implementations", lambda: known)
    arguments = (*TINY, "--backends", "wrong", "--passes", "forward", "--variants", "sum")
    code, out, _ = bench(*arguments)
    assert code == 1 and "wrong: the error of y is 1, at most 1e-05" in out
    one.own = False
    assert bench(*arguments)[0] == 0


def test_pictures_and_a_saved_file(bench, tmp_path):
    path, folder = tmp_path / "run.json", tmp_path / "pictures"
    bench(*TINY, "--backends", "torch", "plain", "--passes", "forward", "--json", path)
    code, out, _ = bench("--load", path, "--plot", folder)
    assert code == 0
    assert "small, hydra, float32, forward" in out
    assert {p.name for p in folder.iterdir()} == {
        f"ratios-{variant}-float32.{suffix}"
        for variant in ("sum", "hydra")
        for suffix in ("png", "svg")
    }
    assert all(str(p) in out.replace("\n", "") for p in folder.iterdir())


def test_comparing_two_files(bench, tmp_path):
    paths = [tmp_path / name for name in ("old.json", "new.json")]
    for path, device, ms in zip(paths, ("a", "b"), (3.0, 2.0), strict=True):
        record = Record("small", "sum", "float32", "forward", "torch", "timed", time_ms=ms)
        Run({"device": device, "torch": "2"}, [record]).save(path)
    code, out, _ = bench("--compare", *paths)
    assert code == 0
    assert "device: a -> b" in out and "torch: 2\n" in out
    assert "3 ms" in out and "2 ms" in out and "1.50" in out
    assert "only before: 0" in out


def test_the_list_shows_floors_and_runs_nothing(bench):
    code, out, _ = bench("--list", *TINY)
    assert code == 0
    assert "small: 1 × 5 × 2 × 3, d_state 2" in out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--presets", "nonsense"), "no preset is called 'nonsense'; there are lm"),
        ((*TINY, "--backends", "nonsense"), "nothing is called 'nonsense'; there are "),
        (("--load", "no/such/file"), "No such file"),
        (("--compare", "no/such/file", "other"), "No such file"),
        (("--device", "nonsense"), "nonsense"),
    ],
)
def test_what_there_is_not_is_an_error(bench, arguments, message):
    code, _, err = bench(*arguments)
    assert code == 1
    assert err.startswith("polyscan: ") and message in err


@pytest.mark.parametrize("option", ["--passes", "--dtypes", "--variants"])
def test_a_wrong_choice_is_refused_with_the_choices(option, capsys):
    with pytest.raises(SystemExit) as end:
        main(["bench", option, "nonsense"])
    assert end.value.code == 2
    assert "invalid choice: 'nonsense'" in capsys.readouterr().err


@pytest.mark.parametrize("module", BENCH_PACKAGES)
def test_it_names_what_is_missing(module, monkeypatch, bench):
    monkeypatch.setitem(sys.modules, module, None)
    code, _, err = bench(*TINY)
    assert code == 1
    assert err == (
        f"polyscan: the benchmarks need {BENCH_PACKAGES[module]}: pip install polyscan[bench]\n"
    )


def test_the_packages_are_in_the_extra():
    requirements = importlib.metadata.requires("polyscan")
    extra = {line.partition(";")[0].strip() for line in requirements if 'extra == "bench"' in line}
    assert set(BENCH_PACKAGES.values()) <= extra
