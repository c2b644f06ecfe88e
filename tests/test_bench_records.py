"""Records as JSON, compared and drawn."""

import json
import math
from dataclasses import fields, replace

import pytest

from polyscan.bench.presets import PASSES
from polyscan.bench.records import SCHEMA, Record, Run, compare, grouped

TIMED = Record(
    *("cpu-sweep-16", "hydra", "float32", "forward", "torch", "timed"),
    error=1e-7,
    limit=1e-5,
    worst="y",
    time_ms=2.0,
    time_ms_p20=1.5,
    time_ms_p80=2.5,
    samples_ms=(1.5, 2.0, 2.5),
    method="wall",
    gb_per_s=1.0,
    tflop_per_s=0.1,
    bandwidth_fraction=0.5,
    matrix_fraction=0.25,
)
WRONG = replace(TIMED, status="wrong", reason="it is", error=math.inf, time_ms=None)


@pytest.fixture
def saved(tmp_path):
    """Saves records and gives the path."""

    def save(*records, name="run.json", **machine):
        path = tmp_path / "deep" / name
        Run({"device": "some", **machine}, list(records)).save(path)
        return path

    return save


def test_a_file_gives_back_what_was_saved(saved):
    run = Run.load(saved(TIMED, replace(WRONG, error=3.0)))
    assert run.machine == {"device": "some"}
    assert run.records == [TIMED, replace(WRONG, error=3.0)]


def test_the_file_is_strict_json_with_a_schema(saved):
    def refuse(constant):
        raise AssertionError(constant)

    content = json.loads(saved(TIMED, WRONG).read_text(), parse_constant=refuse)
    assert content.keys() == {"schema", "machine", "records"}
    assert content["schema"] == SCHEMA
    timed, wrong = content["records"]
    assert "error" not in wrong  # infinity
    assert timed.keys() <= {field.name for field in fields(Record)}
    assert timed["samples_ms"] == [1.5, 2.0, 2.5]
    assert "host_us" not in timed


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"schema": 0}', f'{{"schema": {SCHEMA}, "machine": {{}}, "records": [1]}}'],
)
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"other\.json"):
        Run.load(path)


def test_unknown_fields_are_refused(saved):
    path = saved(TIMED)
    path.write_text(path.read_text().replace('"method"', '"means"'))
    with pytest.raises(ValueError, match="means"):
        Run.load(path)


def test_a_missing_file_is_an_error_of_the_system(tmp_path):
    with pytest.raises(OSError, match="none"):
        Run.load(tmp_path / "none")


def test_right_before_wrong_before_broken_and_then_the_faster():
    failed = replace(WRONG, status="failed")
    faster = replace(TIMED, time_ms=1.0)
    order = [faster, TIMED, WRONG, failed]
    for i, better in enumerate(order):
        for worse in order[i + 1 :]:
            assert better.is_better_than(worse)
            assert not worse.is_better_than(better)


def test_groups_hold_what_is_compared():
    others = [replace(TIMED, what=what, implementation=name) for what in PASSES for name in "ab"]
    groups = grouped(others)
    assert [group.what for group in groups] == list(PASSES)
    assert all([r.implementation for r in records] == ["a", "b"] for records in groups.values())


def test_comparing_pairs_what_both_hold():
    before = Run({}, [TIMED, replace(TIMED, implementation="gone")])
    after = Run({}, [replace(TIMED, implementation="new"), replace(TIMED, time_ms=0.5)])
    (change,) = compare(before, after)
    assert change.ratio == 4
    (change,) = compare(before, Run({}, [WRONG]))
    assert change.ratio is None


def test_pictures_are_written_as_png_and_svg(tmp_path):
    pytest.importorskip("matplotlib")
    from polyscan.bench.pictures import draw

    records = [
        replace(TIMED, preset=preset, implementation=name, what=what, time_ms=ms)
        for preset, ms in (("cpu-sweep-16", 1.0), ("cpu-sweep-64", 2.0), ("cpu-lm", 3.0))
        for name in ("torch", "plain", "unheard-of")
        for what in ("forward", "backward")
    ]
    written = draw(Run({"device": "some"}, [*records, WRONG]), tmp_path / "made")
    names = {"seqlen-cpu-sweep-hydra-float32", "ratios-hydra-float32"}
    assert {path.name for path in written} == {f"{n}.{s}" for n in names for s in ("png", "svg")}
    for path in written:
        head = path.read_bytes()[:200]
        assert head.startswith(b"\x89PNG") if path.suffix == ".png" else b"<?xml" in head


def test_nothing_timed_gives_no_picture(tmp_path):
    pytest.importorskip("matplotlib")
    from polyscan.bench.pictures import draw

    assert draw(Run({}, [WRONG]), tmp_path) == []
