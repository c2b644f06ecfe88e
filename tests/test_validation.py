"""Wrong arguments: the kind of error, and a message with the argument, what came, what was wanted.

The rules stand in one table, a change to a valid call per line. Each is tried on every public
function that has the arguments, and no backend may have been asked to run by then.
"""

import inspect
import math
import re
from functools import partial

import numpy as np
import pytest
import torch

import polyscan
from polyscan import dispatch

# All sizes differ, so that a message about the wrong axis shows.
SIZES = {"batch": 3, "seqlen": 5, "nheads": 4, "headdim": 7, "ngroups": 2, "d_state": 6}
TOKEN = ("batch", "seqlen", "nheads")
GROUP = ("batch", "seqlen", "ngroups", "d_state")
STATE = ("batch", "nheads", "headdim", "d_state")
AXES = {
    "x": (*TOKEN, "headdim"),
    "dt": TOKEN,
    "A": ("nheads",),
    "B": GROUP,
    "C": GROUP,
    "D": ("nheads",),
    "z": (*TOKEN, "headdim"),
    "dt_bias": ("nheads",),
    "dt_rev": TOKEN,
    "A_rev": ("nheads",),
    "B_rev": GROUP,
    "C_rev": GROUP,
    "dt_bias_rev": ("nheads",),
    "initial_states": STATE,
    "initial_states_rev": STATE,
    "seq_idx": ("batch", "seqlen"),
}
REQUIRED = ("x", "dt", "A", "B", "C")
INTEGER = ("seq_idx", "cu_seqlens")
FUNCTIONS = {
    "bidi_ssd": polyscan.bidi_ssd,
    "explain": polyscan.explain,
    "ssd": polyscan.ssd,
    "ssd reverse": partial(polyscan.ssd, reverse=True),
}


def tensor(name, grow=None, **sizes):
    """A valid argument of that name; one axis longer by one, or other sizes, where given."""
    shape = [{**SIZES, **sizes}[axis] + (axis == grow) for axis in AXES[name]]
    return torch.zeros(shape, dtype=torch.int32 if name in INTEGER else torch.float32)


def required(**sizes):
    return {name: tensor(name, **sizes) for name in REQUIRED}


def packed(*borders, dtype=torch.int32):
    """A valid call with cu_seqlens."""
    return {**required(batch=1), "cu_seqlens": torch.tensor(borders, dtype=dtype)}


def shape(tensor):
    return str(tuple(tensor.shape))


def rules():
    """Yields an id, a change to a valid call, the error, and what its message must hold.

    A name must be there as a whole word, so that B is not found in "Batch".
    """
    yield from wrong_kinds()
    yield from wrong_shapes()
    yield from wrong_packing()
    yield from wrong_options()


def wrong_kinds():
    for name in (*AXES, "cu_seqlens"):
        yield f"{name} a list", {name: [1.0]}, TypeError, [name, "tensor", "list"]
        yield f"{name} a number", {name: 1.0}, TypeError, [name, "tensor", "float"]
    for name in REQUIRED:
        yield f"{name} None", {name: None}, TypeError, [name, "tensor", "NoneType"]
    for name in AXES:
        valid = tensor(name)
        wanted = "int64" if name in INTEGER else "bfloat16"
        wrong = ["float32", "bool"] if name in INTEGER else ["int64", "complex64", "bool"]
        for dtype in wrong:
            change = {name: valid.to(getattr(torch, dtype))}
            yield f"{name} {dtype}", change, TypeError, [name, dtype, wanted]
        yield (
            f"{name} sparse",
            {name: valid.to_sparse()},
            TypeError,
            [name, "strided", "torch.sparse_coo"],
        )
        told = ["dt", "cpu", "x", "meta"] if name == "x" else [name, "meta", "x", "cpu"]
        yield f"{name} on another device", {name: valid.to("meta")}, ValueError, told
    for dtype in ("int16", "uint8", "float32"):
        change = packed(0, 5, dtype=getattr(torch, dtype))
        yield f"cu_seqlens {dtype}", change, TypeError, ["cu_seqlens", dtype, "int32", "int64"]
    change = {**packed(0, 5), "cu_seqlens": torch.zeros(2, dtype=torch.int32, device="meta")}
    yield "cu_seqlens on another device", change, ValueError, ["cu_seqlens", "meta", "x", "cpu"]


def wrong_shapes():
    for name, axes in AXES.items():
        wrong = tensor(name)[None]
        if name != "D":  # below: of three shapes
            told = [name, *axes, shape(wrong)]
            yield f"{name} with an axis too many", {name: wrong}, ValueError, told
        wrong = tensor(name).sum(0, dtype=tensor(name).dtype)
        told = [name, *axes, shape(wrong)]
        yield f"{name} with an axis too few", {name: wrong}, ValueError, told
        for axis in axes:
            if name != "x" and (name, axis) not in {("B", "ngroups"), ("B", "d_state")}:
                wrong = tensor(name, grow=axis)
                told = [name, f"{axis} {SIZES[axis]}", shape(wrong)]
                yield f"{name} with another {axis}", {name: wrong}, ValueError, told
    # x and B say what the sizes are, so that the others do not fit
    for axis, other in {"batch": "dt", "seqlen": "dt", "nheads": "dt", "headdim": "z"}.items():
        change = {"x": tensor("x", grow=axis), "z": tensor("z")}
        if axis == "nheads":  # 6, for the 2 groups
            change["x"] = tensor("x", nheads=6)
        told = [other, f"{axis} {change['x'].shape[AXES['x'].index(axis)]}", shape(tensor(other))]
        yield f"x with another {axis}", change, ValueError, told
    for axis, size in {"ngroups": 4, "d_state": 5}.items():
        told = ["C", f"{axis} {size}", shape(tensor("C"))]
        yield f"B with another {axis}", {"B": tensor("B", **{axis: size})}, ValueError, told
    for wrong in (torch.zeros(7), torch.zeros(4, 6), torch.zeros(3, 5, 7), torch.zeros(3, 5, 4, 7)):
        told = ["D", shape(wrong), "(nheads 4,)", "(nheads 4, headdim 7)"]
        told.append("(batch 3, seqlen 5, nheads 4)")
        yield f"D {shape(wrong)}", {"D": wrong}, ValueError, told
    for ngroups in (3, 8):
        told = ["nheads", "multiple", "ngroups", "x", "4", "B", str(ngroups)]
        yield f"4 heads in {ngroups} groups", required(ngroups=ngroups), ValueError, told
    for axis in ("nheads", "headdim", "ngroups", "d_state"):
        name = "x" if axis in AXES["x"] else "B"
        change = required(**{axis: 0})
        told = [name, axis, "at least 1", shape(change[name])]
        yield f"{axis} 0", change, ValueError, told


def wrong_packing():
    change = {"cu_seqlens": torch.tensor([0, 5])}
    yield "cu_seqlens with a batch", change, ValueError, ["cu_seqlens", "batch 1", "batch 3"]
    for borders in (torch.zeros(1, 2), torch.tensor(5), torch.zeros(0)):
        change = {**packed(0, 5), "cu_seqlens": borders.int()}
        told = ["cu_seqlens", "number of sequences + 1", shape(borders)]
        yield f"cu_seqlens {shape(borders)}", change, ValueError, told
    for borders in ((0, 4, 2, 5), (-1, 5), (0, 6), (6,), (5, 0)):
        for dtype in (torch.int32, torch.int64):
            told = ["cu_seqlens", "decrease", "seqlen 5", str(list(borders))]
            change = packed(*borders, dtype=dtype)
            yield f"cu_seqlens {borders} {dtype}", change, ValueError, told
    change = packed(*range(4), *range(17), 3)  # long: not written out
    yield "cu_seqlens of many", change, ValueError, ["cu_seqlens", "decrease", "seqlen 5"]
    ids = {"seq_idx": tensor("seq_idx", batch=1)}
    yield "both packings", packed(0, 5) | ids, ValueError, ["cu_seqlens", "seq_idx", "at most one"]

    ids = {"seq_idx": tensor("seq_idx")}
    for name in ("initial_states", "initial_states_rev"):
        change = {**ids, name: tensor(name)}
        yield f"{name} with seq_idx", change, ValueError, [name, "seq_idx", "Use cu_seqlens"]
        states = tensor(name, batch=1)  # one row, for two sequences
        told = [name, "number of sequences 2", shape(states)]
        yield f"{name} with cu_seqlens", packed(0, 2, 5) | {name: states}, ValueError, told
    change = {**ids, "return_final_states": True}
    told = ["return_final_states", "seq_idx", "Use cu_seqlens"]
    yield "return_final_states with seq_idx", change, ValueError, told


def wrong_options():
    for limit in (None, 1.0, "01", (1.0,), (0.0, 1.0, 2.0), {0.0, 1.0}, torch.tensor([0.0, 1.0])):
        told = ["dt_limit", "(low, high)", repr(limit)]
        yield f"dt_limit {limit!r}", {"dt_limit": limit}, TypeError, told
    for limit in (("0", "1"), (0.0, None), (0.0, 1j), (torch.tensor(0.0), 1.0)):
        told = ["dt_limit", "two numbers", repr(limit)]
        yield f"dt_limit {limit!r}", {"dt_limit": limit}, TypeError, told
    for low, high in ((1.0, 0.5), (-0.1, 1.0), (math.nan, 1.0), (0.0, math.nan), (-math.inf, 1.0)):
        told = ["dt_limit", "0 <= low <= high", f"({low}, {high})"]
        yield f"dt_limit {low}, {high}", {"dt_limit": (low, high)}, ValueError, told

    for size in (0, -1, np.int64(0)):
        told = ["chunk_size", "at least 1", str(size)]
        yield f"chunk_size {size!r}", {"chunk_size": size}, ValueError, told
    for size in (2.5, True, "64", [64], 64.0):
        told = ["chunk_size", "int", type(size).__name__]
        yield f"chunk_size {size!r}", {"chunk_size": size}, TypeError, told

    for flag in ("shift", "dt_softplus", "return_final_states"):
        for value in (1, 0, None, "yes", torch.tensor(True)):
            told = [flag, "bool", type(value).__name__]
            yield f"{flag} {value!r}", {flag: value}, TypeError, told
        # its type's name is "bool" too: "must be a bool, got bool" would tell nothing
        yield f"{flag} of numpy", {flag: np.bool_(True)}, TypeError, [flag, "numpy"]

    for backend in (None, 3, ["torch"]):
        told = ["backend", "string", type(backend).__name__]
        yield f"backend {backend!r}", {"backend": backend}, TypeError, told
    told = ["backend", "'nonesuch'", "auto", "reference", "torch"]
    yield "backend unknown", {"backend": "nonesuch"}, ValueError, told


def cases():
    """Every rule with every function that has the arguments of its change."""
    for name, change, error, told in rules():
        for title, function in FUNCTIONS.items():
            if change.keys() <= inspect.signature(function).parameters.keys():
                yield pytest.param(function, change, error, told, id=f"{title}-{name}")


@pytest.fixture
def nothing_runs(monkeypatch):
    """Fails a test in which a backend is looked for in order to run it."""

    def select(problem, name):
        pytest.fail("a backend was about to run")

    monkeypatch.setattr(dispatch, "select", select)


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("function, change, error, told", list(cases()))
def test_wrong_argument(function, change, error, told):
    with pytest.raises(error) as caught:
        function(**{**required(), **change})
    assert type(caught.value) is error  # no subclass: those say that a backend cannot
    message = str(caught.value)
    for text in told:
        found = re.search(rf"\b{text}\b", message) if text.isidentifier() else text in message
        assert found, f"{text!r} is not in {message!r}"
    if function is FUNCTIONS["ssd reverse"]:
        assert "_rev" not in message, "ssd has no such argument"


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("reverse", [None, 1, "reverse", torch.tensor(True)])
def test_reverse_must_be_a_bool(reverse):
    with pytest.raises(TypeError, match=f"^reverse must be a bool, got {type(reverse).__name__}$"):
        polyscan.ssd(**required(), reverse=reverse)


def test_the_guard_sees_a_backend_run(nothing_runs):
    """The tests above would pass without it if valid calls did not get as far."""
    for name in ("bidi_ssd", "ssd", "ssd reverse"):
        with pytest.raises(pytest.fail.Exception):
            FUNCTIONS[name](**required())


def everything():
    """A valid call that gives every tensor but seq_idx and cu_seqlens."""
    torch.manual_seed(0)
    given = {name: torch.rand(tensor(name).shape) for name in AXES if name not in INTEGER}
    return {**given, "A": -given["A"], "A_rev": -given["A_rev"]}


# Changes that a check could take for wrong, and the plain call that each must equal.
ALLOWED = {
    "numpy int64 chunk": ({"chunk_size": np.int64(64)}, {"chunk_size": 64}),
    "numpy int32 chunk": ({"chunk_size": np.int32(2)}, {"chunk_size": 2}),
    "chunk of 1": ({"chunk_size": 1}, {}),
    "chunk beyond seqlen": ({"chunk_size": 10**9}, {}),
    "chunk beyond memory": ({"chunk_size": 2**62}, {}),
    "chunk beyond 64 bits": ({"chunk_size": 2**70}, {}),
    "limit a list": ({"dt_limit": [0.1, 0.5]}, {"dt_limit": (0.1, 0.5)}),
    "limit of ints": ({"dt_limit": (0, 1)}, {"dt_limit": (0.0, 1.0)}),
    "limit of numpy": ({"dt_limit": (np.float32(0.5), np.int64(1))}, {"dt_limit": (0.5, 1.0)}),
    "limit of one point": (
        {"dt_limit": (0.5, 0.5)},
        {"dt": torch.full((3, 5, 4), 0.5), "dt_bias": None, "dt_bias_rev": None},
    ),
}


@pytest.mark.parametrize("change, plain", ALLOWED.values(), ids=ALLOWED.keys())
def test_allowed(change, plain):
    given = {**everything(), "dt_rev": None}
    y = polyscan.bidi_ssd(**given | change)
    torch.testing.assert_close(y, polyscan.bidi_ssd(**given | plain))
    polyscan.explain(**given | change)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_seq_idx_takes_any_integer(dtype):
    given = required()
    ids = tensor("seq_idx").to(dtype)
    assert polyscan.bidi_ssd(**given, seq_idx=ids).shape == given["x"].shape


@pytest.mark.parametrize("borders", [(0, 5), (0, 0, 5, 5), (2, 4), (3,), (0,)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_cu_seqlens_may_leave_rows_out(borders, dtype):
    y, *states = polyscan.bidi_ssd(**packed(*borders, dtype=dtype), return_final_states=True)
    assert y.shape == (1, 5, 4, 7)
    assert [s.shape for s in states] == [(len(borders) - 1, 4, 7, 6)] * 2


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"seqlen": 0}, {"batch": 0, "seqlen": 0}])
def test_batch_and_seqlen_may_be_0(sizes):
    y, *states = polyscan.bidi_ssd(**required(**sizes), return_final_states=True)
    merged = {**SIZES, **sizes}
    assert y.shape == (merged["batch"], merged["seqlen"], 4, 7)
    assert all(torch.equal(s, torch.zeros(merged["batch"], 4, 7, 6)) for s in states)


def test_a_valid_call_with_everything():
    given = everything()
    before = {name: value.clone() for name, value in given.items()}
    assert polyscan.bidi_ssd(**given).isfinite().all()
    for name, value in given.items():
        assert torch.equal(value, before[name]), f"{name} was written to"
