"""Launch options that were found by measuring, on an H200 (benchmarks/NOTES.md)."""

from polyscan.problem import SSDProblem

from .plan import Plan


def options(kernel: str, problem: SSDProblem, plan: Plan) -> dict[str, int]:
    """Of a launch: the warps of a program, and the stages of its software pipeline."""
    if kernel == "token_gradients":
        return {"num_warps": 4}
    if kernel != "scan":
        return {"num_warps": 4, "STAGES": 3 if problem.product_dtype.itemsize == 2 else 2}
    warps, stages = 4, 2
    if 16 < problem.d_state <= 64:
        stages = 1 if plan.fused else 3
    elif problem.d_state <= 16 and plan.tile <= 32 and not plan.fused:
        warps = 1
    elif problem.d_state <= 16 and problem.product_dtype.itemsize == 4:
        warps = 2
    return {"num_warps": warps, "STAGES": stages}
