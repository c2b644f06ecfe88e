"""``mask``: exactly as if only the real tokens existed."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import polyscan

GOLDEN = sorted((Path(__file__).parent / "golden" / "mask").glob("*.npz"))
PER_HEAD = ("A", "A_rev", "dt_bias", "dt_bias_rev")
STATES = ("initial_states", "initial_states_rev")


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_golden(path, backend, device):
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    options = json.loads(str(arrays.pop("options")))
    stored = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
    tensors = {
        name.removeprefix("in_"): t.requires_grad_()
        for name, t in stored.items()
        if name.startswith("in_")
    }
    low, high = options["dt_limit"]
    outputs = polyscan.bidi_ssd(
        **tensors,
        shift=options["shift"],
        dt_softplus=options["dt_softplus"],
        dt_limit=(low, math.inf if high is None else high),
        mask=torch.tensor(options["mask"], dtype=torch.bool, device=device),
        return_final_states=True,
        backend=backend,
    )
    names = ("y", "final_states", "final_states_rev")
    cotangents = [stored["dy"], stored["dfinal_states"], stored["dfinal_states_rev"]]
    torch.autograd.backward(outputs, cotangents)
    results = dict(zip(names, outputs, strict=True))
    results |= {f"grad_{name}": tensor.grad for name, tensor in tensors.items()}
    for name, result in results.items():
        error = torch.linalg.vector_norm(result - stored[name])
        assert error <= 1e-12 * torch.linalg.vector_norm(stored[name]), name


# Rows of masks: padding on the right, on the left, holes, one token, none at all, no padding.
MASKS = {
    "right": [1] * 40 + [0] * 30,
    "left": [0] * 7 + [1] * 63,
    "holes": [1, 0] * 20 + [0] * 10 + [1] * 20,
    "one": [0] * 69 + [1],
    "none": [0] * 70,
    "all": [1] * 70,
}


def draw(device, batch, seqlen=70, nheads=2, headdim=3, d_state=4):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device)

    tokens = (batch, seqlen, nheads)
    return {
        "x": normal(*tokens, headdim),
        "dt": normal(*tokens),
        "A": -normal(nheads).exp(),
        "B": normal(batch, seqlen, 1, d_state),
        "C": normal(batch, seqlen, 1, d_state),
        "D": normal(*tokens),
        "z": normal(*tokens, headdim),
        "dt_bias": normal(nheads),
        "dt_rev": normal(*tokens),
        "C_rev": normal(batch, seqlen, 1, d_state),
        "dt_bias_rev": normal(nheads),
    }


def run(function, tensors, **options):
    """Outputs and gradients by name, for a fixed weighting of all outputs."""
    leaves = {name: t.detach().clone().requires_grad_() for name, t in tensors.items()}
    outputs = function(**leaves, **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    weights = [
        torch.sin(1.0 + torch.arange(o.numel(), device=o.device)).view_as(o) for o in outputs
    ]
    return leaves, outputs, weights


def keep_rows(tensors, row, kept):
    """One row of the batch without its padding."""
    return {
        name: t if name in PER_HEAD else t[row : row + 1] if name in STATES else t[row, kept][None]
        for name, t in tensors.items()
    }


@pytest.mark.parametrize("garbage", [0.0, 7.0, math.nan])
@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("states", [False, True])
def test_equals_the_unpadded_run(backend, device, states, shift, garbage):
    mask = torch.tensor(list(MASKS.values()), dtype=torch.bool, device=device)
    tensors = draw(device, len(mask))
    options = {"shift": shift, "dt_softplus": True, "return_final_states": states}
    options["backend"] = backend
    if states:
        shape = (len(mask), 2, 3, 4)
        tensors |= {name: torch.ones(shape, dtype=torch.float64, device=device) for name in STATES}
    for name, tensor in tensors.items():
        if name not in PER_HEAD and name not in STATES:
            tensor[~mask] = garbage

    leaves, outputs, weights = run(polyscan.bidi_ssd, tensors, mask=mask, **options)
    torch.autograd.backward(outputs, weights)
    assert torch.all(outputs[0][~mask] == 0)

    sums = {name: torch.zeros_like(leaves[name]) for name in PER_HEAD if name in leaves}
    for row, kept in enumerate(mask):
        alone, expected, _ = run(polyscan.bidi_ssd, keep_rows(tensors, row, kept), **options)
        torch.testing.assert_close(outputs[0][row, kept][None], expected[0])
        for state, expected_state in zip(outputs[1:], expected[1:], strict=True):
            torch.testing.assert_close(state[row : row + 1], expected_state)
        cotangents = [weights[0][row, kept][None], *(w[row : row + 1] for w in weights[1:])]
        torch.autograd.backward(expected, cotangents)
        for name, grad in keep_rows({n: t.grad for n, t in leaves.items()}, row, kept).items():
            if name in sums:
                sums[name] += alone[name].grad
            else:
                torch.testing.assert_close(grad, alone[name].grad)
    for name, total in sums.items():
        torch.testing.assert_close(leaves[name].grad, total)
    for name, leaf in leaves.items():
        if name not in PER_HEAD and name not in STATES:
            assert torch.all(leaf.grad[~mask] == 0), name


@pytest.mark.parametrize("shift", [False, True])
def test_padding_is_dropped_before_packing(backend, device, shift):
    mask = torch.tensor([MASKS["holes"]], dtype=torch.bool, device=device)
    tensors = draw(device, 1)
    cu_seqlens = torch.tensor([0, 3, 3, 41, 48, 70], dtype=torch.int32, device=device)
    real = torch.cat([torch.zeros(1, dtype=torch.int64, device=device), mask[0].cumsum(0)])
    y, *states = polyscan.bidi_ssd(
        **tensors,
        shift=shift,
        mask=mask,
        cu_seqlens=cu_seqlens,
        return_final_states=True,
        backend=backend,
    )
    expected, *expected_states = polyscan.bidi_ssd(
        **keep_rows(tensors, 0, mask[0]),
        shift=shift,
        cu_seqlens=real[cu_seqlens.long()],
        return_final_states=True,
        backend=backend,
    )
    torch.testing.assert_close(y[mask][None], expected)
    torch.testing.assert_close(states, expected_states)
    # The padding between two stretches of the same number does not part them.
    seq_idx = torch.arange(70, device=device)[None] // 40
    y = polyscan.bidi_ssd(**tensors, shift=shift, mask=mask, seq_idx=seq_idx, backend=backend)
    expected = polyscan.bidi_ssd(
        **keep_rows(tensors, 0, mask[0]), shift=shift, seq_idx=seq_idx[mask][None], backend=backend
    )
    torch.testing.assert_close(y[mask][None], expected)


def test_one_direction(backend, device):
    mask = torch.tensor([MASKS["holes"], MASKS["left"]], dtype=torch.bool, device=device)
    tensors = {name: t for name, t in draw(device, 2).items() if not name.endswith("_rev")}
    for reverse in (False, True):
        y = polyscan.ssd(**tensors, mask=mask, reverse=reverse, backend=backend)
        for row, kept in enumerate(mask):
            alone = keep_rows(tensors, row, kept)
            expected = polyscan.ssd(**alone, reverse=reverse, backend=backend)
            torch.testing.assert_close(y[row, kept][None], expected)


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        ([[True] * 70], TypeError, "mask must be a tensor, got list"),
        (torch.ones(1, 70), TypeError, "mask must have dtype bool, got float32"),
        (torch.ones(1, 71, dtype=torch.bool), ValueError, r"seqlen 70\), got \(1, 71\)"),
        (torch.ones(1, 70, dtype=torch.bool, device="meta"), ValueError, "mask is on meta, but x"),
    ],
)
def test_wrong_masks(mask, error, message):
    with pytest.raises(error, match=message):
        polyscan.bidi_ssd(**draw("cpu", 1), mask=mask)


def test_wrong_borders_are_found_under_a_mask():
    mask = torch.ones(1, 70, dtype=torch.bool)
    with pytest.raises(ValueError, match="cu_seqlens"):
        polyscan.bidi_ssd(**draw("cpu", 1), mask=mask, cu_seqlens=torch.tensor([0, 71]))
