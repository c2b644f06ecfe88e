"""The peers' adapters, with stand-ins for the libraries: what they pass on, and what they refuse.

A stand-in computes with polyscan under the library's signature, and the ``__init__`` of its
packages raises: an adapter must load the kernels without it.
"""

import importlib
import sys

import pytest
import torch

from polyscan.bench import verify
from polyscan.bench.implementations import can_run, implementations
from polyscan.bench.loading import HOLLOW, library_version, load
from polyscan.bench.measure import Call
from polyscan.bench.peers import PEERS
from polyscan.bench.presets import VARIANTS, Case, Preset

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SMALL = Preset("small", 2, 9, 4, 3, 6, ngroups=2)
PACKED = Preset("packed", 1, 9, 4, 3, 6, lengths=(4, 5))
LIBRARIES = {"fla", "mamba_ssm", "ssd"}

MODULES = {
    "mamba_ssm/ops/triton/ssd_combined.py": """
import polyscan

def mamba_chunk_scan_combined(
    x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None,
    cu_seqlens=None, dt_softplus=False, dt_limit=(0.0, float("inf")), return_final_states=False,
):
    assert chunk_size == 128 and (seq_idx is None or str(seq_idx.dtype) == "torch.int32")
    return polyscan.ssd(
        x, dt, A, B, C, D=D, dt_bias=dt_bias, dt_softplus=dt_softplus, seq_idx=seq_idx
    )
""",
    "ssd/bi/ssd_combined.py": """
import polyscan

def bimamba_chunk_scan_combined(
    x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, dt_softplus=False,
    dt_limit=(0.0, float("inf")), return_final_states=False,
):
    assert chunk_size == 128
    return polyscan.bidi_ssd(x, dt, A, B, C, D=D, dt_bias=dt_bias, dt_softplus=dt_softplus)
""",
    "fla/ops/common/chunk_o.py": "TRITON_ABOVE_3_7_1 = False\n",
    "fla/ops/simple_gla/chunk.py": """
import fla
import polyscan
from fla.ops.common import chunk_o

def chunk_simple_gla(
    q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, output_final_state=False,
    cu_seqlens=None, chunk_size=None,
):
    assert chunk_size == 128 and scale == 1 and chunk_o.TRITON_ABOVE_3_7_1
    if g is None:
        g = g_gamma.expand(q.shape[:3])
    x = v / -g[..., None]
    return polyscan.ssd(x, -g, g.new_full(g.shape[2:], -1), k, q, cu_seqlens=cu_seqlens), None
""",
    "fla/ops/lightning_attn/chunk.py": """
import polyscan
import torch

def chunk_lightning_attn(
    q, k, v, layer_idx, num_layers, scale=None, initial_state=None, output_final_state=False,
    cu_seqlens=None, chunk_size=None,
):
    assert chunk_size == 128 and scale == 1
    heads = q.shape[2]
    A = -(8 / heads * (1 - layer_idx / num_layers)) * q.new_tensor(range(heads), dtype=torch.float)
    dt = torch.ones(q.shape[:3])
    return polyscan.ssd(v, dt, A, k, q, cu_seqlens=cu_seqlens), None
""",
}


@pytest.fixture
def libraries(tmp_path, monkeypatch):
    for file, source in MODULES.items():
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
        for folder in path.parents:
            if folder == tmp_path:
                break
            (folder / "__init__.py").touch()
    for package in HOLLOW:
        (tmp_path / package.replace(".", "/") / "__init__.py").write_text("raise ImportError\n")
    for name in [name for name in sys.modules if name.partition(".")[0] in LIBRARIES]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in LIBRARIES]:
        del sys.modules[name]
    for one in PEERS:
        one.__dict__.pop("call", None)


@pytest.mark.parametrize("preset", [SMALL, PACKED], ids=lambda preset: preset.name)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("one", PEERS, ids=lambda one: one.name)
def test_an_adapter_passes_on_what_it_is_given(libraries, one, variant, preset):
    task = one.operation.task(Case(preset, variant, "tf32"), CPU)
    if one.refusal(task, CUDA) is None:
        exact = verify.exact(task)
        got = Call(one, task, exact.dy, 128).results()
        found = verify.check(got, exact.results, "float32")
        assert found.passed, found


REFUSALS = {
    "mamba-causal": ({"hydra"}, False),
    "mamba-flipped": (set(), True),
    "bimamba2": ({"hydra"}, True),
    "fla-simple-gla": ({"hydra"}, False),
    "fla-lightning": ({"hydra"}, False),
}


@pytest.mark.parametrize("one", PEERS, ids=lambda one: one.name)
def test_what_they_refuse(one):
    variants, packed = REFUSALS[one.name]
    for variant in VARIANTS:
        for preset in (SMALL, PACKED):
            for precision in ("bfloat16", "tf32", "float32"):
                task = one.operation.task(Case(preset, variant, precision), "meta")
                reason = one.refusal(task, CUDA)
                refused = (
                    variant in variants or (packed and preset is PACKED) or precision == "float32"
                )
                assert (reason is not None) == refused, reason
                if precision == "float32":
                    assert "its float32 products are TF32" in reason


@pytest.mark.parametrize("one", PEERS, ids=lambda one: one.name)
def test_a_missing_library_is_the_reason(one, monkeypatch):
    for package in one.packages:
        monkeypatch.setitem(sys.modules, package, None)
    case = Case(SMALL, "sum", "tf32")
    reason = can_run(one, case, CUDA)
    assert reason == f"needs {', '.join(one.packages)}, which is not installed"


def test_an_installed_one_still_needs_a_gpu(monkeypatch):
    one = implementations()["bimamba2"]
    monkeypatch.setattr("polyscan.bench.peers.find_spec", lambda name: object())
    assert one.missing(CPU) == "runs on GPUs only"
    assert one.missing(CUDA) is None


def test_polyscan_is_not_measured_by_a_peer_s_rules():
    assert all(one.own is (one not in PEERS) for one in implementations().values())


def test_loading_what_is_not_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "ssd", None)
    with pytest.raises(ModuleNotFoundError):
        load("ssd.bi.ssd_combined")


def test_version_of_a_library():
    assert library_version("torch.nn") == library_version("torch") is not None
    assert library_version("no_such_library") is None
