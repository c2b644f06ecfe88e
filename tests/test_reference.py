"""The recurrence of polyscan.reference and the dense matrix of the oracle are one operation."""

import pytest
import torch

import polyscan.reference
from bounds import assert_within_bound
from cases import CASES, Case, make
from running import evaluate, run


@pytest.mark.parametrize("case", CASES.values(), ids=str)
def test_recurrence_is_the_dense_matrix(case, device):
    call = make(case, device, torch.float64)
    # Where there is no token, plain PyTorch's outputs hang on no input: no graph, no gradients.
    scans = case.batch > 0 and case.seqlen > 0 and case.nsequences > 0
    compute = run if scans else evaluate
    assert_within_bound(call, compute(call, "reference", library=polyscan.reference))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recurrence_rounds_once(dtype, device):
    call = make(CASES["hydra-shift"], device, dtype)
    results = run(call, "reference", library=polyscan.reference)
    assert results["y"].dtype == dtype
    assert results["final_states"].dtype == torch.float32
    assert_within_bound(call, results)


@pytest.mark.parametrize("shift", [False, True])
def test_reference_has_second_derivatives(shift):
    case = Case("second", 1, 4, 1, 2, d_state=2, dt_softplus=True, shift=shift)
    call = make(case, torch.device("cpu"), torch.float64)
    leaves = {name: t.detach().requires_grad_() for name, t in call.floats.items()}

    def y(*tensors):
        given = call.with_tensors(**dict(zip(leaves, tensors, strict=True)))
        return evaluate(given, "reference", library=polyscan.reference)["y"]

    assert torch.autograd.gradgradcheck(y, tuple(leaves.values()))
