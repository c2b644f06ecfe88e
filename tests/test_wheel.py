"""The wheel holds every source file and works away from the checkout.

Built without isolation and without an index, so that the test needs no network, and from a copy, so
that neither old build output gets in nor new output is left behind.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = {".py", ".typed", ".cu", ".cuh"}

# Two tokens in units of ln 2: forward states 1, 2.5 and backward states 2, 2; y is their sum.
USE = """
import importlib.metadata, math, sys
from pathlib import Path
import torch
import polyscan

unpacked = Path(sys.argv[1])
assert Path(polyscan.__file__).is_relative_to(unpacked), polyscan.__file__
assert polyscan.__version__ == importlib.metadata.version("polyscan")

entry_points = importlib.metadata.distribution("polyscan").entry_points
for entry in entry_points.select(group="polyscan.backends"):
    assert entry.load().name == entry.name
    file = sys.modules[entry.module].__file__
    assert Path(file).is_relative_to(unpacked), file

x = torch.tensor([1.0, 2.0], dtype=torch.float64).reshape(1, 2, 1, 1)
dt = torch.full((1, 2, 1), math.log(2), dtype=torch.float64)
A = torch.tensor([-1.0], dtype=torch.float64)
B = C = torch.ones(1, 2, 1, 1, dtype=torch.float64)
expected = torch.tensor([3.0, 4.5], dtype=torch.float64)
for backend in ("auto", "reference", "torch"):
    y = polyscan.bidi_ssd(x, dt, A, B, C, backend=backend)
    torch.testing.assert_close(y.flatten() / math.log(2), expected, rtol=1e-12, atol=0)
"""


def run(*command, cwd, **env):
    environment = {k: v for k, v in os.environ.items() if k != "POLYSCAN_BACKEND"}
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**environment, **env},
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """A folder with the content of a freshly built wheel."""
    source, dist, target = (tmp_path_factory.mktemp(name) for name in ("source", "dist", "wheel"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, source)
    for folder in ("polyscan", "backends"):
        shutil.copytree(
            ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index")
    run(*pip, "--no-deps", "--no-build-isolation", "--wheel-dir", str(dist), ".", cwd=source)
    (wheel,) = dist.glob("polyscan-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def test_wheel_holds_every_source_file(unpacked):
    on_disk = {
        (installed / path.relative_to(ROOT / folder)).as_posix()
        for folder, installed in (
            ("polyscan", Path("polyscan")),
            ("backends", Path("polyscan/backends")),
        )
        for path in (ROOT / folder).rglob("*")
        if path.suffix in SHIPPED
    }
    in_wheel = {
        path.relative_to(unpacked).as_posix()
        for path in unpacked.rglob("*")
        if path.is_file() and not path.parts[len(unpacked.parts)].endswith(".dist-info")
    }
    assert in_wheel == on_disk
    assert "polyscan/py.typed" in in_wheel


def test_wheel_works_from_another_folder(unpacked, tmp_path):
    run(
        *(sys.executable, "-c", USE, str(unpacked)),
        cwd=tmp_path,
        PYTHONPATH=str(unpacked),
    )
