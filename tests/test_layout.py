"""The files, pyproject.toml and the installed package agree, and imports stay as light as promised.

`packages` is written by hand, because backends/ is installed as polyscan.backends. A folder that is
missing from it works in an editable install and vanishes from the wheel, so it is compared here.
"""

import ast
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
GROUP = "polyscan.backends"
ENTRY_POINTS = PYPROJECT["project"]["entry-points"][GROUP]
FOLDERS = {"polyscan": "polyscan", "backends": "polyscan.backends"}  # folder -> package name


def dotted_name(folder):
    """The package name under which a folder of the checkout is installed."""
    top, *rest = folder.relative_to(ROOT).parts
    return ".".join((FOLDERS[top], *rest))


def source_files(*tops):
    return [path for top in tops for path in sorted((ROOT / top).rglob("*.py"))]


def test_package_dir_maps_both_top_level_folders():
    assert PYPROJECT["tool"]["setuptools"]["package-dir"] == {
        name: folder for folder, name in FOLDERS.items()
    }


def test_packages_equal_the_folders_that_exist():
    declared = PYPROJECT["tool"]["setuptools"]["packages"]
    existing = [
        dotted_name(path.parent) for path in source_files(*FOLDERS) if path.name == "__init__.py"
    ]
    assert sorted(declared) == sorted(existing)


def test_every_folder_with_python_files_is_a_package():
    folders = {path.parent for path in source_files(*FOLDERS)}
    assert not [str(f.relative_to(ROOT)) for f in folders if not (f / "__init__.py").is_file()]


def test_entry_points_equal_the_backend_folders():
    folders = [
        init.parent.name
        for init in (ROOT / "backends").glob("*/__init__.py")
        if not init.parent.name.startswith("_")
    ]
    assert {name: f"{GROUP}.{name}:BACKEND" for name in folders} == ENTRY_POINTS


def installed_entry_points():
    """polyscan's own: another package may add to the group."""
    return importlib.metadata.distribution("polyscan").entry_points.select(group=GROUP)


def test_installed_entry_points_are_those_of_pyproject():
    assert {entry.name: entry.value for entry in installed_entry_points()} == ENTRY_POINTS, (
        "the installed polyscan is older than pyproject.toml: install it again"
    )


@pytest.mark.parametrize("name", sorted(ENTRY_POINTS))
def test_entry_point_loads_a_backend_of_that_name(name):
    (entry,) = installed_entry_points().select(name=name)
    assert entry.load().name == name


@pytest.fixture(scope="module")
def fresh_import(tmp_path_factory):
    """What `import polyscan` does in a new interpreter that has imported torch and nothing else."""
    code = """
import json, sys
import torch
before = set(sys.modules)
import polyscan
print(json.dumps({
    "imported": sorted(set(sys.modules) - before),
    "absent": [name for name in polyscan.__all__ if not hasattr(polyscan, name)],
}))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path_factory.mktemp("elsewhere"),
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_import_takes_no_gpu_library(fresh_import):
    tops = {module.partition(".")[0] for module in fresh_import["imported"]}
    assert "polyscan" in tops
    assert not tops & {"triton", "cupy", "cupyx", "cupy_backends", "numba"}


def test_import_loads_no_backend(fresh_import):
    assert not [module for module in fresh_import["imported"] if module.startswith(GROUP)]


def test_every_public_name_exists(fresh_import):
    assert fresh_import["absent"] == []


@pytest.mark.parametrize("top", ["polyscan", "backends", "tests", "benchmarks"])
def test_no_file_imports_backends_by_its_short_name(top):
    """`import backends.torch` works from the checkout and gives a second, different module."""
    offending = []
    for path in source_files(top):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                modules = [node.module]
            else:
                continue
            if any(module.partition(".")[0] == "backends" for module in modules):
                offending.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert offending == []


def test_loaded_backends_have_their_long_name_only():
    for entry in installed_entry_points():
        entry.load()
    files = {
        name: getattr(module, "__dict__", {}).get("__file__")
        for name, module in sys.modules.items()
    }
    from_backends = [
        name
        for name, file in files.items()
        if isinstance(file, str) and Path(file).is_relative_to(ROOT / "backends")
    ]
    assert from_backends
    assert not [name for name in from_backends if not name.startswith(GROUP)]
