"""The whole operation as one dense matrix per head, written from its sums.

With s = 1 under the shift and else 0, and everything within one sequence::

    out[m] = Σ_{j ≤ m} (C_m · B_j) exp(Σ_{j < k ≤ m} a_k) v_j  +  exp(Σ_{k ≤ m} a_k) h_initial C_m
    y[i]   = out[i - s]
    final  = Σ_j exp(Σ_{k > j} a_k) v_j B_jᵀ  +  exp(Σ_k a_k) h_initial

and for the reverse direction with every order turned round. Packing is nothing but a mask. It takes
no code from polyscan, is differentiated by autograd, and has three uses: the exact values in
float64, how large the terms are that were added up, and how well straightforward PyTorch does in
16 bits.
"""

from collections.abc import Mapping
from functools import lru_cache, reduce
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cases import Call, Results


class Expected(NamedTuple):
    """The exact outputs and gradients, and the same sums over absolute values."""

    exact: Results
    absolute: Results


@lru_cache(maxsize=16)
def expected(call: Call) -> Expected:
    """Both in float64, for the numbers that the call really holds."""
    wide = torch.float64
    tensors = {name: t.to(wide) for name, t in call.floats.items()}
    return Expected(_evaluate(call, tensors, wide, wide, kept=wide), absolute(call))


@lru_cache(maxsize=16)
def straightforward(call: Call) -> Results:
    """The same in PyTorch without any care: products in the dtype that the call asks for."""
    names = ("x", "B", "C", "B_rev", "C_rev")
    dtypes = [call.tensors[name].dtype for name in names if name in call.tensors]
    products = reduce(torch.promote_types, dtypes)
    wide = torch.float64 if dtypes[0] == torch.float64 else torch.float32
    return _evaluate(call, call.floats, products, wide, kept=dtypes[0])


def _evaluate(
    call: Call,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype,
    wide: torch.dtype,
    kept: torch.dtype,
) -> Results:
    """Outputs and gradients: products in ``dtype``, step sizes in ``wide``, y in ``kept``."""
    leaves = {name: t.detach().requires_grad_() for name, t in tensors.items()}
    outputs = combine(call, parts(call, leaves, dtype, wide), kept)
    grads = _gradients(outputs, call.cotangents, leaves)
    return {**_detached(outputs), **{f"grad_{name}": grad for name, grad in grads.items()}}


def absolute(call: Call) -> Results:
    """Every output and gradient with all its terms taken as positive.

    Not simply the operation on absolute inputs: in ddt = dv · x + A da the two terms would cancel,
    as A ≤ 0. So the terms are differentiated one by one, and put together with |A| and |silu'|.
    """
    wide = torch.float64
    given = {
        name: part if name.startswith("log_decay") else part.abs()
        for name, part in parts(call, call.floats, wide, wide).items()
    }
    leaves = {name: part.detach().requires_grad_() for name, part in given.items()}
    outputs = combine(call, leaves, wide)
    cotangents = {name: cotangent.abs() for name, cotangent in call.cotangents.items()}
    terms = _gradients(outputs, cotangents, leaves)

    results = _detached(outputs)
    results |= {f"grad_{name}": torch.zeros_like(t, dtype=wide) for name, t in call.floats.items()}
    results["grad_x"] += terms["x"]
    if "D" in terms:
        results["grad_D"] += terms["D"]
    if "gate" in terms:
        results["grad_z"] += terms["gate"] * _slope(F.silu, call.tensors["z"].to(wide)).abs()
    for suffix, _ in call.sides:
        names = {name: call.argument(name, suffix) for name in ("dt", "A", "B", "C", "dt_bias")}
        slope = _slope(lambda raw: discretise(call, raw), _raw_steps(call, call.floats, suffix))
        A = call.tensors[names["A"]].to(wide)
        da, steps = terms["log_decay" + suffix], leaves["dt" + suffix].detach()
        ddt = (terms["dt" + suffix] + A.abs() * da) * slope
        results[f"grad_{names['dt']}"] += ddt
        results[f"grad_{names['A']}"] += (steps * da).sum((0, 1))
        for name in ("B", "C"):
            results[f"grad_{names[name]}"] += terms[name + suffix]
        if names["dt_bias"]:
            results[f"grad_{names['dt_bias']}"] += ddt.sum((0, 1))
        if "initial_states" + suffix in terms:
            results[f"grad_initial_states{suffix}"] += terms["initial_states" + suffix]
    return results


def discretise(call: Call, raw: Tensor) -> Tensor:
    steps = torch.logaddexp(raw, torch.zeros_like(raw)) if call.options["dt_softplus"] else raw
    return steps.clamp(*call.options["dt_limit"])


def parts(
    call: Call, tensors: Mapping[str, Tensor], dtype: torch.dtype, wide: torch.dtype
) -> dict[str, Tensor]:
    """What the sums are over: x, D and the gate, and per side dt, log_decay, B, C and a state."""
    result = {"x": tensors["x"].to(dtype)}
    if "D" in tensors:
        result["D"] = tensors["D"].to(dtype)
    if "z" in tensors:
        result["gate"] = F.silu(tensors["z"].to(dtype))
    for suffix, _ in call.sides:
        steps = discretise(call, _raw_steps(call, tensors, suffix, wide))
        result["dt" + suffix] = steps
        result["log_decay" + suffix] = steps * tensors[call.argument("A", suffix)].to(wide)
        for name in ("B", "C"):
            result[name + suffix] = tensors[call.argument(name, suffix)].to(dtype)
        if "initial_states" + suffix in tensors:
            result["initial_states" + suffix] = tensors["initial_states" + suffix].to(dtype)
    return result


def combine(call: Call, parts: Mapping[str, Tensor], kept: torch.dtype) -> Results:
    """The outputs from the parts, in the dtypes of the parts; y in ``kept``."""
    x = parts["x"]
    sequence = sequences(call)
    same = (sequence[:, :, None] == sequence[:, None, :]) & (sequence >= 0)[:, :, None]
    y = torch.zeros_like(x)
    finals = {}
    for suffix, reverse in call.sides:
        side = {
            name: parts.get(name + suffix)
            for name in ("dt", "log_decay", "B", "C", "initial_states")
        }
        out, final = _direction(call, x, sequence, same, side, reverse)
        y = y + torch.einsum("bim,bmhp->bihp", _move(call, same, reverse).to(x.dtype), out)
        finals["final_states" + suffix] = final
    if "D" in parts:
        D = parts["D"]
        skip = (D if D.dim() == 2 else D[..., None]) * x
        y = y + skip * (sequence >= 0)[:, :, None, None]
    y = y.to(kept)
    if "gate" in parts:
        y = (y * parts["gate"]).to(kept)
    return {"y": y, **{name: finals[name] for name in call.outputs if name != "y"}}


def sequences(call: Call) -> Tensor:
    """(batch, seqlen): the number of each token's sequence, its row of the states; -1 for none."""
    x = call.tensors["x"]
    batch, seqlen = x.shape[:2]
    rows = torch.arange(batch, device=x.device)[:, None].expand(batch, seqlen)
    if "cu_seqlens" in call.tensors:
        numbers = torch.full_like(rows, -1)
        for i, (start, stop) in enumerate(pairwise(call.tensors["cu_seqlens"].tolist())):
            numbers[:, start:stop] = i
        return numbers
    if "seq_idx" in call.tensors:
        ids = call.tensors["seq_idx"]
        return F.pad((ids[:, 1:] != ids[:, :-1]).cumsum(1), (1, 0))
    return rows


def _direction(
    call: Call,
    x: Tensor,
    sequence: Tensor,
    same: Tensor,
    side: Mapping[str, Tensor | None],
    reverse: bool,
) -> tuple[Tensor, Tensor | None]:
    """out (batch, seqlen, nheads, headdim) before the shift, and the final states."""
    dt, log_decay, initial = side["dt"], side["log_decay"], side["initial_states"]
    repeat = x.shape[2] // side["B"].shape[2]
    B, C = (side[name].repeat_interleave(repeat, dim=2) for name in ("B", "C"))
    dtype, wide = x.dtype, log_decay.dtype
    v = (dt[..., None] * x).to(dtype)

    token = torch.arange(x.shape[1], device=x.device)
    after = token[:, None] < token if reverse else token[:, None] > token  # [m, j]: m after j
    upto = (after | (token[:, None] == token)) & same
    exponent = _between(log_decay, reverse).masked_fill(~upto[:, None], -torch.inf)
    matrix = torch.einsum("bmhn,bjhn->bhmj", C, B) * exponent.exp().to(dtype)
    out = torch.einsum("bhmj,bjhp->bmhp", matrix, v)

    member = sequence == torch.arange(_count(call), device=x.device)[:, None, None]
    if initial is not None:
        entering = torch.einsum("bmk,bkh->bmh", upto.to(wide), log_decay).exp().to(dtype)
        rows = torch.einsum("sbm,shpn->bmhpn", member.to(dtype), initial)
        out = out + torch.einsum("bmhpn,bmhn->bmhp", rows, C) * entering[..., None]
    if not call.options["return_final_states"]:
        return out, None
    beyond = (after.mT & same).to(wide)  # [j, k]: k after j
    leaving = torch.einsum("bjk,bkh->bjh", beyond, log_decay).exp().to(dtype)
    final = torch.einsum("sbj,bjhp,bjhn->shpn", member.to(dtype), v * leaving[..., None], B)
    if initial is not None:
        across = torch.einsum("sbk,bkh->sh", member.to(wide), log_decay).exp().to(dtype)
        final = final + across[..., None, None] * initial
    return out, final


def _between(log_decay: Tensor, reverse: bool) -> Tensor:
    """(batch, nheads, m, j): Σ of log_decay_k over the k after j up to m, in the side's order.

    A running sum from every j on its own: a difference of two sums from the start would cancel.
    """
    if reverse:
        return _between(log_decay.flip(1), reverse=False).flip(-1, -2)
    ones = log_decay.new_ones(log_decay.shape[1], log_decay.shape[1])
    return (log_decay.permute(0, 2, 1)[:, :, None, :] * ones.triu(1)).cumsum(-1).mT


def _move(call: Call, same: Tensor, reverse: bool) -> Tensor:
    """(batch, i, m): whether row i of y is row m of a direction's output."""
    step = 0 if not call.options["shift"] else 1 if reverse else -1
    token = torch.arange(same.shape[1], device=same.device)
    return same & (token == token[:, None] + step)


def _count(call: Call) -> int:
    """How many rows the states have; no matter with seq_idx, which excludes states."""
    cu_seqlens = call.tensors.get("cu_seqlens")
    return len(call.tensors["x"]) if cu_seqlens is None else len(cu_seqlens) - 1


def _raw_steps(
    call: Call, tensors: Mapping[str, Tensor], suffix: str, wide: torch.dtype = torch.float64
) -> Tensor:
    raw = tensors[call.argument("dt", suffix)].to(wide)
    bias = call.argument("dt_bias", suffix)
    return raw if bias is None else raw + tensors[bias].to(wide)


def _slope(function, at: Tensor) -> Tensor:
    at = at.detach().requires_grad_()
    return torch.autograd.grad(function(at).sum(), at)[0]


def _gradients(
    outputs: Results, cotangents: Mapping[str, Tensor], leaves: Mapping[str, Tensor]
) -> Results:
    """Gradients by leaf; zero for a leaf that no output depends on."""
    grads = torch.autograd.grad(
        [outputs[name] for name in cotangents],
        list(leaves.values()),
        [cotangents[name].to(outputs[name].dtype) for name in cotangents],
        allow_unused=True,
        materialize_grads=True,
    )
    return dict(zip(leaves, grads, strict=True))


def _detached(outputs: Results) -> Results:
    return {name: output.detach() for name, output in outputs.items()}
