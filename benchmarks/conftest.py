"""Which cases are measured, and what is recorded about the machine.

``pytest benchmarks/ --preset 'sweep-*' --implementation torch`` (both repeatable, both patterns)
measures some of them only, ``--thorough`` gives peers more chunk sizes and autotuning.
"""

import pytest
import torch

from polyscan.bench import implementations, presets
from polyscan.bench.machine import facts
from polyscan.bench.measure import QUICK, THOROUGH, Bench
from polyscan.bench.presets import VARIANTS, Case

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pytest_addoption(parser):
    group = parser.getgroup("polyscan's benchmarks")
    for name in ("preset", "implementation"):
        group.addoption(f"--{name}", action="append", metavar="NAME", help="or a pattern")
    group.addoption("--thorough", action="store_true", help="look harder for the peers' best times")


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        cases = _cases(metafunc.config.getoption("preset"))
        metafunc.parametrize("case", cases, ids=lambda case: "-".join(map(_name, case)))
    if "implementation" in metafunc.fixturenames:
        chosen = implementations.find(metafunc.config.getoption("implementation"))
        metafunc.parametrize("implementation", chosen, ids=lambda one: one.name)


def _cases(patterns):
    chosen = presets.for_device(DEVICE) if patterns is None else presets.find(patterns)
    return [
        Case(preset, variant, precision)
        for preset in chosen
        for variant in VARIANTS
        for precision in preset.precisions
    ]


def _name(part):
    return getattr(part, "name", part)


@pytest.fixture(scope="session")
def bench(pytestconfig):
    return Bench(DEVICE, THOROUGH if pytestconfig.getoption("thorough") else QUICK)


def pytest_benchmark_update_machine_info(config, machine_info):
    machine_info |= facts(DEVICE)
