"""Makes Triton's autotuner affordable: the peers try 40 to 200 configurations per size and dtype.

All configurations of a kernel are compiled at once, on all cores, and then timed one by one, for a
shorter time than usual. Which ones are tried stays the library's choice.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

# Milliseconds that a configuration is warmed up and timed for; Triton's own are 25 and 100.
WARMUP_MS, TIMED_MS = 3, 12
# The autotuners that have run.
_tuned: set[Any] = set()


@contextmanager
def brief() -> Iterator[None]:
    """Within the ``with`` block, autotuning is quick. Nothing happens where there is no Triton."""
    if find_spec("triton") is None:
        yield
        return
    from triton.runtime.autotuner import Autotuner

    usual = Autotuner.prune_configs, Autotuner.do_bench
    Autotuner.prune_configs = _compile_all(Autotuner.prune_configs)
    Autotuner.do_bench = property(lambda tuner: _time)
    try:
        yield
    finally:
        Autotuner.prune_configs, Autotuner.do_bench = usual


def forget() -> None:
    """Have every kernel choose its configuration anew; what was compiled is kept."""
    for tuner in _tuned:
        tuner.cache.clear()


def _time(kernel_call: Any, quantiles: Any) -> Any:
    from triton.testing import do_bench

    return do_bench(kernel_call, warmup=WARMUP_MS, rep=TIMED_MS, quantiles=quantiles)


def _compile_all(prune_configs: Any) -> Any:
    """An ``Autotuner.prune_configs`` that has compiled what it returns."""
    from triton.runtime._async_compile import AsyncCompileMode

    def pruned(tuner: Any, kwargs: Any) -> Any:
        _tuned.add(tuner)
        tuner.cache_results = False  # what an earlier run chose and left on disk is not a choice
        configs = prune_configs(tuner, kwargs)
        with (
            ThreadPoolExecutor(os.cpu_count()) as pool,
            # One that does not compile fails again, alone, when it is timed.
            AsyncCompileMode(pool, ignore_errors=True),
        ):
            for config in configs:
                options = {**kwargs, **config.all_kwargs(), "warmup": True}
                tuner.fn.run(*tuner.nargs.values(), **options)
        return configs

    return pruned
