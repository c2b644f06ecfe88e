"""Closed forms: what is wrong by one token, lane or exponent comes out as another constant."""

import random
from dataclasses import replace

import pytest
import torch

from cases import DTYPES, Case, Dtypes, packed
from probes import assert_constants, big_dt, local, ones
from running import run, skip_unsupported

RAGGED = (1, 2, 63, 64, 65, 1)
both_shifts = pytest.mark.parametrize("shift", [False, True], ids=["plain", "shift"])
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def sized(*sizes: int, **options) -> Case:
    """A case from batch, seqlen, nheads, headdim and d_state; the probes have a group per head."""
    batch, seqlen, nheads, headdim, d_state = sizes
    return Case("probe", batch, seqlen, nheads, headdim, nheads, d_state, **options)


def row(*lengths: int, **options) -> Case:
    borders = packed(*lengths)
    return sized(1, borders[-1], 2, 1, 1, cu_seqlens=borders, **options)


def check(build, case, dtype, backend, device):
    # Gradients of A and dt that are counts of pairs do not fit into 16 bits.
    wide = torch.promote_types(dtype, torch.float32)
    call, wanted = build(case, device, Dtypes("probe", dtype, {"A": wide, "dt": wide}))
    skip_unsupported(call, backend)
    results = run(call, backend)
    for name, value in results.items():
        assert torch.all(torch.isfinite(value)), name
    assert_constants(results, wanted, dtype)


@both_shifts
@every_dtype
@pytest.mark.parametrize(
    "sizes",
    [(1, 130, 2, 16, 16), (2, 193, 3, 32, 16), (3, 65, 1, 4, 1), (1, 255, 2, 1, 1)],
    ids=str,
)
def test_ones(sizes, dtype, shift, backend, device):
    check(ones, sized(*sizes, shift=shift), dtype, backend, device)


@both_shifts
def test_ones_has_the_published_gradient_of_A(shift, backend, device):
    """A check of the closed form itself, by numbers written out."""
    case = sized(2, 193, 3, 32, 16, shift=shift)
    call, wanted = ones(case, device, torch.float64)
    assert wanted["grad_A"] == 2 * 32 * 16 * 193 * 192 * (191 if shift else 194) // 3
    assert shift or wanted["grad_A"] == 2_453_798_912
    assert torch.all(wanted["y"] == 16 * (192 if shift else 194))


@both_shifts
@pytest.mark.parametrize("batch", [0, 1, 3])
def test_ones_of_tiny_lengths(batch, shift, backend, device):
    for seqlen in (0, 1, 2, 3, 7, 8, 15, 16, 17):
        check(ones, sized(batch, seqlen, 1, 4, 2, shift=shift), torch.float32, backend, device)


HEADDIMS = (1, 2, 3, 5, 8, 16, 24, 48, 64, 80, 96, 100, 128, 192, 256)
D_STATES = (1, 2, 3, 8, 16, 24, 64, 100, 128, 256)
# Every headdim with two d_states, and every d_state with three headdims.
DIMS = sorted(
    {(P, D_STATES[(i + k) % len(D_STATES)]) for i, P in enumerate(HEADDIMS) for k in (0, 3)}
)


@both_shifts
@pytest.mark.parametrize("headdim, d_state", DIMS)
def test_ones_of_odd_dims(headdim, d_state, shift, backend, device):
    check(ones, sized(1, 5, 1, headdim, d_state, shift=shift), torch.float32, backend, device)


@both_shifts
@pytest.mark.parametrize("chunk_size", [None, 1, 16, 32, 64, 100, 1000])
def test_ones_of_a_seqlen_that_is_no_multiple_of_the_chunk(chunk_size, shift, backend, device):
    case = sized(1, 100, 1, 4, 4, shift=shift, chunk_size=chunk_size)
    check(ones, case, torch.float32, backend, device)


@both_shifts
@pytest.mark.parametrize(
    "sizes",
    [(70_000, 2, 1, 1, 1), (10_923, 3, 6, 1, 1), (1, 2, 70_000, 1, 1), (65_600, 3, 1, 1, 1)],
    ids=str,
)
def test_ones_beyond_the_65535_of_a_grid_axis(sizes, shift, backend, device):
    case = sized(*sizes, shift=shift, chunk_size=1 if sizes[0] == 65_600 else None)
    check(ones, case, torch.float32, backend, device)


@both_shifts
@every_dtype
def test_local(dtype, shift, backend, device):
    check(local, sized(2, 300, 2, 1, 1, shift=shift), dtype, backend, device)
    check(local, row(*RAGGED, shift=shift), dtype, backend, device)


@both_shifts
@every_dtype
@pytest.mark.parametrize("seqlen", [256, 300])
def test_exponents_of_any_size(seqlen, dtype, shift, backend, device):
    """exp of what a row does not see may be inf: masked afterwards, it leaves NaN behind."""
    check(big_dt, sized(1, seqlen, 1, 1, 1, shift=shift), dtype, backend, device)
    check(big_dt, row(*RAGGED, shift=shift), dtype, backend, device)


@both_shifts
@pytest.mark.parametrize("chunk_size", [None, 16])
@pytest.mark.parametrize("build", [ones, local], ids=lambda build: build.__name__)
def test_packed(build, chunk_size, shift, backend, device):
    """Chunks counted along the row and chunks counted along a sequence are not the same."""
    options = {"shift": shift, "chunk_size": chunk_size}
    check(build, row(0, 5, 0, 4, **options), torch.float32, backend, device)
    around_borders = [size + step for size in (16, 64, 128) for step in (-1, 0, 1)]
    lengths = [*around_borders, 0, *random.Random(0).choices(range(40), k=16), 0, 1]
    random.Random(1).shuffle(lengths)
    check(build, row(*lengths, **options), torch.float32, backend, device)


@both_shifts
def test_packed_ones_have_their_own_lengths(shift, backend, device):
    case = replace(row(3, 0, 5, shift=shift), cu_seqlens=(1, 4, 4, 9), seqlen=11)
    _, wanted = ones(case, device, torch.float32)
    step = -1 if shift else 1
    assert wanted["y"].tolist() == [0, *[3 + step] * 3, *[5 + step] * 5, 0, 0]
    check(ones, case, torch.float32, backend, device)
