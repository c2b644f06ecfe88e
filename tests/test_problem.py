"""What a backend is asked and when it runs: the problem, the backward, no autograd around it."""

import math
import threading

import pytest
import torch

import polyscan
from fakes import VARIABLE, arguments

pytestmark = pytest.mark.usefixtures("nothing_requested")


# Changes to the call, and fields of the problem that a backend must then see.
PROBLEMS = {
    "plain": (
        {},
        {
            "batch": 3,
            "seqlen": 5,
            "nheads": 4,
            "headdim": 7,
            "ngroups": 2,
            "d_state": 6,
            "nsequences": 3,
            "device": torch.device("cpu"),
            "x_dtype": torch.float32,
            "product_dtype": torch.float32,
            "accumulation_dtype": torch.float32,
            "shift": False,
            "dt_softplus": False,
            "dt_limit": (0.0, math.inf),
            "D": None,
            "has_z": False,
            "has_initial_states": False,
            "return_final_states": False,
            "packing": None,
            "chunk_size": None,
            "tf32": False,
            "needs_grad": False,
            "saves_pre_gate": False,
            "is_empty": False,
        },
    ),
    "options": (
        {"shift": True, "dt_softplus": True, "dt_limit": [1, 2], "chunk_size": 32},
        {"shift": True, "dt_softplus": True, "dt_limit": (1.0, 2.0), "chunk_size": 32},
    ),
    "half with bfloat16": (
        {"x": torch.ones(3, 5, 4, 7).half(), "C": torch.ones(3, 5, 2, 6).bfloat16()},
        {"x_dtype": torch.float16, "product_dtype": torch.float32},
    ),
    "bfloat16": (
        {name: torch.ones(3, 5, 2, 6).bfloat16() for name in "BC"}
        | {"x": torch.ones(3, 5, 4, 7).bfloat16()},
        {"product_dtype": torch.bfloat16, "accumulation_dtype": torch.float32},
    ),
    "float64 x": (
        {"x": torch.ones(3, 5, 4, 7).double()},
        {"product_dtype": torch.float64, "accumulation_dtype": torch.float64},
    ),
    "float64 B_rev": (
        {"B_rev": torch.ones(3, 5, 2, 6).double()},
        {"product_dtype": torch.float64, "accumulation_dtype": torch.float32},
    ),
    "D per head": ({"D": torch.ones(4)}, {"D": "head"}),
    "D per channel": ({"D": torch.ones(4, 7)}, {"D": "channel"}),
    "D per token": ({"D": torch.ones(3, 5, 4)}, {"D": "token"}),
    "gate": ({"z": torch.ones(3, 5, 4, 7)}, {"has_z": True, "saves_pre_gate": False}),
    "gate with gradient": (
        {"z": torch.ones(3, 5, 4, 7, requires_grad=True)},
        {"has_z": True, "needs_grad": True, "saves_pre_gate": True},
    ),
    "states": (
        {"initial_states_rev": torch.ones(3, 4, 7, 6), "return_final_states": True},
        {"has_initial_states": True, "return_final_states": True, "nsequences": 3},
    ),
    "seq_idx": (
        {"seq_idx": torch.zeros(3, 5, dtype=torch.uint8)},
        {"packing": "seq_idx", "nsequences": None},
    ),
    "cu_seqlens": (
        {
            **{name: torch.ones(1, 5, 2, 6) for name in "BC"},
            "x": torch.ones(1, 5, 4, 7),
            "dt": torch.ones(1, 5, 4),
            "cu_seqlens": torch.tensor([0, 2, 2, 5]),
        },
        {"packing": "cu_seqlens", "batch": 1, "nsequences": 3},
    ),
}


class TestProblem:
    @pytest.mark.parametrize("changes, fields", PROBLEMS.values(), ids=PROBLEMS.keys())
    def test_a_backend_is_asked_with_the_right_one(self, fake, changes, fields):
        polyscan.bidi_ssd(**arguments(**changes), backend="fake")
        (problem,) = fake.asked
        assert {name: getattr(problem, name) for name in fields} == fields
        assert fake.ran[0][1] == problem

    def test_directions_read_what_was_given(self, fake):
        changes = {"dt_rev": torch.ones(3, 5, 4), "dt_bias": torch.ones(4)}
        polyscan.bidi_ssd(**arguments(**changes), backend="fake")
        forward, reverse = fake.asked[0].directions
        assert (forward.reverse, reverse.reverse) == (False, True)
        assert (forward.dt, reverse.dt) == ("dt", "dt_rev")
        assert (forward.C, reverse.C) == ("C", "C")
        assert (forward.dt_bias, reverse.dt_bias) == ("dt_bias", "dt_bias")

    @pytest.mark.parametrize("axis", [0, 1])
    def test_no_token_never_reaches_a_backend(self, fake, axis):
        def cut(tensor):
            return tensor.narrow(axis, 0, 0).clone().requires_grad_()

        given = arguments()
        given |= {name: cut(given[name]) for name in ("x", "dt", "B", "C")}
        polyscan.bidi_ssd(**given, backend="fake").sum().backward()
        assert fake.steps() == []
        assert given["B"].grad.shape == given["B"].shape

    def test_backends_run_without_autograd_and_autocast(self, fake):
        x = torch.ones(3, 5, 4, 7, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            y = polyscan.bidi_ssd(**arguments(x=x), backend="fake")
            y.sum().backward()
            polyscan.bidi_ssd(**arguments(), backend="fake")  # nothing to record, but grad mode on
        assert fake.steps() == ["forward", "backward", "forward"]
        assert not any(mode for *_, mode in fake.ran)


class TestBackward:
    """The backward is the forward's backend's, whatever was asked for in between."""

    def leaf(self):
        return torch.ones(3, 5, 4, 7, requires_grad=True)

    def test_after_the_context_has_ended(self, fake, other):
        x = self.leaf()
        with polyscan.use_backend("fake"):
            y = polyscan.bidi_ssd(**arguments(x=x))
        with polyscan.use_backend("other"):
            y.sum().backward()
        assert fake.steps() == ["forward", "backward"]
        assert other.ran == []
        assert x.grad.eq(fake.mark).all()

    def test_after_the_environment_has_changed(self, fake, other, monkeypatch):
        monkeypatch.setenv(VARIABLE, "fake")
        y = polyscan.bidi_ssd(**arguments(x=self.leaf()))
        monkeypatch.setenv(VARIABLE, "other")
        y.sum().backward()
        assert fake.steps() == ["forward", "backward"]
        assert other.ran == []

    def test_of_an_automatic_choice(self, fake, built_ins_refuse):
        y = polyscan.bidi_ssd(**arguments(x=self.leaf()))
        with polyscan.use_backend("other"):
            y.sum().backward()
        assert fake.steps() == ["forward", "backward"]

    def test_in_a_thread_that_has_no_context(self, fake):
        with polyscan.use_backend("fake"):
            y = polyscan.bidi_ssd(**arguments(x=self.leaf()))
            thread = threading.Thread(target=y.sum().backward)
            thread.start()
            thread.join(10)
        assert fake.steps() == ["forward", "backward"]

    def test_forward_and_backward_are_given_one_problem(self, fake):
        polyscan.bidi_ssd(**arguments(x=self.leaf()), backend="fake").sum().backward()
        (_, forward, _), (_, backward, _) = fake.ran
        assert forward == backward
