"""NaN, infinity and overflow: how far they may reach, and that nothing unseen brings them in."""

import math

import pytest
import torch

import polyscan

LENGTHS = (3, 3, 4, 40, 70, 1)
BORDERS = (0, *torch.tensor(LENGTHS).cumsum(0).tolist())


def ones(*shape, device):
    return torch.ones(*shape, device=device)


def packed_call(device, headdim=3, d_state=2, nheads=2):
    seqlen = BORDERS[-1]
    return {
        "x": ones(1, seqlen, nheads, headdim, device=device),
        "dt": 0.1 * ones(1, seqlen, nheads, device=device),
        "A": -ones(nheads, device=device),
        "B": ones(1, seqlen, 1, d_state, device=device),
        "C": ones(1, seqlen, 1, d_state, device=device),
        "cu_seqlens": torch.tensor(BORDERS, device=device),
    }


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("name", ["x", "dt", "B", "C"])
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("sick", range(len(LENGTHS)))
def test_stays_in_its_sequence(backend, device, sick, value, name, states, shift):
    call = packed_call(device)
    inside = torch.zeros(BORDERS[-1], dtype=torch.bool, device=device)
    inside[BORDERS[sick] : BORDERS[sick + 1]] = True

    def run(**changed):
        tensors = {key: call[key].clone().requires_grad_() for key in ("x", "dt", "B", "C")}
        for key, tensor in changed.items():
            tensors[key] = tensor.requires_grad_()
        out = polyscan.bidi_ssd(
            **{**call, **tensors}, shift=shift, return_final_states=states, backend=backend
        )
        y = out[0] if states else out
        y[:, ~inside].sum().backward()
        return y, {key: tensor.grad for key, tensor in tensors.items()}

    spoilt = call[name].clone()
    spoilt[0, BORDERS[sick]] = value
    y, grads = run(**{name: spoilt})
    expected_y, expected_grads = run()
    torch.testing.assert_close(y[:, ~inside], expected_y[:, ~inside])
    for key, grad in grads.items():
        torch.testing.assert_close(grad[:, ~inside], expected_grads[key][:, ~inside])


def test_products_that_no_one_sees_may_overflow(backend, device):
    """C_0 · B_2 is infinite in float32, but token 0 comes before token 2."""
    x, A = ones(1, 3, 1, 1, device=device), -ones(1, device=device)
    dt, B, C = ones(1, 3, 1, device=device), x.clone(), x.clone()
    B[0, 2], C[0, 0] = 1e30, 1e10
    x.requires_grad_()
    y = polyscan.ssd(x, dt, A, B, C, backend=backend)
    expected = torch.tensor([1e10, 1 + math.exp(-1), 1e30], device=device)
    torch.testing.assert_close(y.flatten(), expected)
    y[:, 1:].sum().backward()
    decayed = math.exp(-1) + math.exp(-2)
    expected = torch.tensor([decayed, 1 + math.exp(-1), 1e30], device=device)
    torch.testing.assert_close(x.grad.flatten(), expected)
