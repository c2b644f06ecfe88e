"""Stored results of a sequential float64 loop, and a few that were worked out by hand.

Everything else in this suite is measured against the oracle; here the oracle is measured too.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import oracle
from bounds import assert_within_bound
from cases import Call, packed
from running import evaluate, run, skip_unsupported

FILES = sorted((Path(__file__).parent / "golden").glob("*.npz"))


def load(path: Path, device: torch.device) -> tuple[Call, dict[str, torch.Tensor]]:
    """The call of a file, and its results by name."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    options = json.loads(str(arrays.pop("options")))
    tensors = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
    direction = "both"
    if options.pop("ssd", False):
        direction = "reverse" if options.pop("reverse") else "forward"
    low, high = options.get("dt_limit", (0.0, None))
    borders = {
        name: torch.tensor(options[name], dtype=torch.int32, device=device)
        for name in ("cu_seqlens", "seq_idx")
        if options.get(name) is not None
    }
    call = Call(
        direction,
        {name.removeprefix("in_"): t for name, t in tensors.items() if name.startswith("in_")}
        | borders,
        {
            "shift": options["shift"],
            "dt_softplus": options.get("dt_softplus", False),
            "dt_limit": (low, math.inf if high is None else high),
            "return_final_states": "seq_idx" not in borders,  # states do not go with seq_idx
            "chunk_size": None,
        },
        {
            name: tensors["d" + name]
            for name in ("y", "final_states", "final_states_rev")
            if "d" + name in tensors
        },
    )
    results = {name: tensors[name] for name in call.outputs}
    results |= {name: t for name, t in tensors.items() if name.startswith("grad_")}
    return call, results


def test_there_are_golden_files():
    assert len(FILES) == 20


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_golden_oracle(path):
    call, stored = load(path, torch.device("cpu"))
    exact, absolute = oracle.expected(call)
    assert stored.keys() == exact.keys() == absolute.keys()
    assert_within_bound(call, exact, exact=stored)
    # The sums over absolute values are no smaller than any sum of the same terms.
    for name, value in stored.items():
        assert torch.all(value.abs() <= absolute[name] * (1 + 1e-12)), name


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_golden(path, backend, device):
    call, stored = load(path, device)
    skip_unsupported(call, backend)
    results = run(call, backend)
    assert results.keys() == stored.keys()
    assert_within_bound(call, results, exact=stored)


# x = 1, 2, 3, 4, dt = ln 2 (so the decay is 1/2) and A = -1: y in units of ln 2.
BY_HAND = {
    "plain": ({}, [4.25, 7, 9.25, 10.125]),
    "shift": ({"shift": True}, [4.5, 6, 6.5, 4.25]),
    # It is the output C_t h_t that moves, not the state under a C that stays.
    "shift-C": ({"shift": True, "C": [1, 2, 3, 4]}, [9, 16, 21, 12.75]),
    "packed": ({"cu_seqlens": packed(2, 2)}, [3, 4.5, 8, 9.5]),
    "packed-shift": ({"cu_seqlens": packed(2, 2), "shift": True}, [2, 1, 4, 3]),
    "seq_idx": ({"seq_idx": [[7, 7, -1, -1]]}, [3, 4.5, 8, 9.5]),
    "seq_idx-shift": ({"seq_idx": [[7, 7, -1, -1]], "shift": True}, [2, 1, 4, 3]),
    "one": ({"x": [1]}, [2]),
    "one-shift": ({"x": [1], "shift": True}, [0]),
    "one-shift-D": ({"x": [1], "shift": True, "D": [math.log(2)]}, [1]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name, dtype, backend, device):
    given, wanted = BY_HAND[name]
    given = dict(given)
    x = given.pop("x", [1, 2, 3, 4])
    rows = (1, len(x), 1, 1)

    def values(numbers, *shape):
        return torch.tensor(numbers, dtype=dtype, device=device).reshape(shape)

    tensors = {
        "x": values(x, *rows),
        "dt": values([math.log(2)] * len(x), *rows[:3]),
        "A": values([-1.0], 1),
        "B": values([1.0] * len(x), *rows),
        "C": values(given.pop("C", [1.0] * len(x)), *rows),
    }
    if "D" in given:
        tensors["D"] = values(given.pop("D"), 1)
    for borders in ("cu_seqlens", "seq_idx"):
        if borders in given:
            tensors[borders] = torch.tensor(given.pop(borders), device=device)
    options = {"dt_softplus": False, "dt_limit": (0.0, math.inf), "return_final_states": False}
    call = Call("both", tensors, {"shift": False, "chunk_size": None, **options, **given}, {})
    skip_unsupported(call, backend)
    y = evaluate(call, backend)["y"].flatten()
    # exp and ln 2 are rounded: a few units in the last place.
    wanted = values(wanted, len(x)) * math.log(2)
    torch.testing.assert_close(y, wanted, rtol=8 * torch.finfo(dtype).eps, atol=0)
