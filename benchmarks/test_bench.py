"""Every backend that can run here, plain PyTorch and the peers, side by side.

    pytest benchmarks/test_bench.py --benchmark-json=FILE

A group is a preset, a variant, a precision and a pass. The measuring is polyscan.bench's, the same
as that of ``python -m polyscan bench``: on a GPU, no clock around a call gives its time. So what
pytest-benchmark gets is a clock that is moved on by each sample.
"""

import pytest

from polyscan.bench.presets import PASSES


class ReplayedClock:
    """Stands still but for the samples that it is moved on by."""

    def __init__(self):
        self._seconds = 0.0

    def read(self):
        return self._seconds

    def replay(self, samples_ms):
        self._seconds += next(samples_ms) / 1e3


CLOCK = ReplayedClock()


@pytest.fixture(scope="module")
def measured(bench):
    """Gives the record of a case, an implementation and a pass; all passes are measured at once."""
    latest = {}

    def get(case, implementation, what):
        key = case, implementation.name
        if key not in latest:
            latest.clear()
            latest[key] = {
                record.what: record for record in bench.measure(case, implementation, PASSES)
            }
        return latest[key][what]

    return get


@pytest.mark.benchmark(timer=CLOCK.read)
@pytest.mark.parametrize("what", PASSES)
def test_bench(benchmark, measured, case, implementation, what):
    record = measured(case, implementation, what)
    benchmark.group = str(record.group)
    benchmark.extra_info |= record.as_json()
    if record.status == "skipped":
        pytest.skip(record.reason)
    if record.status != "timed":
        # Nothing of ours may be wrong; of others we say so.
        (pytest.fail if implementation.own else pytest.xfail)(f"{record.status}: {record.reason}")
    samples_ms = record.samples_ms
    benchmark.pedantic(CLOCK.replay, args=(iter(samples_ms),), rounds=len(samples_ms))
