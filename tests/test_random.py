"""Random small problems: any sizes with any options, against the bound."""

from hypothesis import given
from hypothesis import strategies as st

from bounds import assert_within_bound
from cases import DTYPES, REV_ARGUMENTS, Case, Dtypes, make
from running import run, skip_unsupported

SIZES = st.integers(1, 9)
ROW_DTYPES = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("x", "dt", "B", "C", "z", "D", "A"), st.sampled_from(DTYPES))
)


@st.composite
def problems(draw) -> Case:
    ngroups = draw(st.integers(1, 3))
    direction = draw(st.sampled_from(("both", "both", "forward", "reverse")))
    both = direction == "both"
    seqlen = draw(st.integers(0, 40))
    packing = draw(st.sampled_from((None, "cu_seqlens", "seq_idx")))
    batch = 1 if packing == "cu_seqlens" else draw(st.integers(0, 3))
    states = packing != "seq_idx"
    low = draw(st.sampled_from((0.0, 0.25)))
    return Case(
        "random",
        batch,
        seqlen,
        ngroups * draw(st.integers(1, 3)),
        draw(SIZES),
        ngroups,
        draw(SIZES),
        direction=direction,
        shift=draw(st.booleans()),
        D=draw(st.sampled_from((None, "head", "channel", "token"))),
        z=draw(st.booleans()),
        dt_bias=draw(st.booleans()),
        dt_softplus=draw(st.booleans()),
        dt_limit=(low, draw(st.sampled_from((0.8, float("inf"))))),
        rev=tuple(draw(st.sets(st.sampled_from(REV_ARGUMENTS)))) if both else (),
        initial_states=states and draw(st.booleans()),
        initial_states_rev=states and both and draw(st.booleans()),
        return_final_states=states and draw(st.booleans()),
        cu_seqlens=draw(borders(seqlen)) if packing == "cu_seqlens" else None,
        seq_idx=draw(rows_of_ids(batch, seqlen)) if packing == "seq_idx" else None,
        chunk_size=draw(st.none() | st.integers(1, 50)),
    )


@st.composite
def borders(draw, seqlen: int) -> tuple[int, ...]:
    """Any cu_seqlens: empty sequences, and rows that none covers at either end."""
    return tuple(sorted(draw(st.lists(st.integers(0, seqlen), min_size=1, max_size=8))))


@st.composite
def rows_of_ids(draw, batch: int, seqlen: int) -> tuple[tuple[int, ...], ...]:
    row = st.lists(st.integers(-1, 1), min_size=seqlen, max_size=seqlen).map(tuple)
    return tuple(draw(row) for _ in range(batch))


@given(case=problems(), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99))
def test_random_problem(backend, device, case, dtype, seed):
    call = make(case, device, dtype, seed)
    skip_unsupported(call, backend)
    assert_within_bound(call, run(call, backend))


@given(case=problems(), default=st.sampled_from(DTYPES), overrides=ROW_DTYPES)
def test_random_mix_of_dtypes(backend, device, case, default, overrides):
    call = make(case, device, Dtypes("random", default, overrides))
    skip_unsupported(call, backend)
    assert_within_bound(call, run(call, backend))
