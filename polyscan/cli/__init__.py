"""The command line: ``python -m polyscan`` and its subcommands.

A subcommand is a parser here and a module beside this file, imported when it is asked for: what it
needs beyond torch is not needed for the others.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from polyscan.dispatch import AUTO, resolve_request
from polyscan.errors import BackendError

# module -> the name it is installed by
DEMO_PACKAGES = {"matplotlib": "matplotlib", "rich": "rich", "sklearn": "scikit-learn"}
BENCH_PACKAGES = {"matplotlib": "matplotlib", "numpy": "numpy", "rich": "rich"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (by default that of the process) and return its exit code."""
    options = _parser().parse_args(arguments)
    code: int = options.run(options)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m polyscan",
        description="Bidirectional state-space scans. Without a command: what is installed, what "
        "the hardware is, and which backends can run.",
    )
    parser.set_defaults(run=_status)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    check = commands.add_parser(
        "check",
        help="test whether the backends compute the right thing here",
        description="Run every backend on calls whose results are known, forward and backward. "
        "The exit code is 1 if anything failed.",
    )
    check.add_argument(
        "--backend",
        metavar="NAME",
        action="append",
        help="check this backend only, and fail if it cannot run (repeatable)",
    )
    check.add_argument(
        "--device",
        metavar="DEVICE",
        help="run there (default: the CPU and, if there is one, the current CUDA device)",
    )
    check.set_defaults(run=_check)

    demo = commands.add_parser(
        "demo",
        help="train a small Hydra on handwritten digits",
        description="Train a small Hydra on handwritten digits, report how many unseen ones it "
        "reads right, and save a picture.",
    )
    demo.add_argument(
        "--epochs",
        metavar="N",
        type=_positive,
        default=10,
        help="passes over the training data (default: %(default)s)",
    )
    demo.add_argument(
        "--seed",
        metavar="S",
        type=_seed,
        default=0,
        help="of the split and of the weights (default: %(default)s)",
    )
    demo.add_argument(
        "--output",
        metavar="DIR",
        type=Path,
        default=Path("demo-output"),
        help="folder for the picture (default: %(default)s)",
    )
    demo.add_argument(
        "--backend", metavar="NAME", help="run on this backend (default: as for any call)"
    )
    demo.set_defaults(run=_demo)
    _add_bench(commands)
    return parser


def _add_bench(commands: Any) -> None:
    from polyscan.bench.precision import PRECISIONS
    from polyscan.bench.presets import PASSES, VARIANTS

    bench = commands.add_parser(
        "bench",
        help="measure backends and peers side by side",
        description="Measure every backend that can run here, and the peers that are installed, on "
        "the same inputs. Each result is checked before it is timed. The exit code is 1 if one of "
        "polyscan's own was wrong or broke.",
    )
    choice = bench.add_argument_group("what to measure")
    choice.add_argument(
        "--presets", metavar="NAME", nargs="+", help="or patterns (default: all for the device)"
    )
    choice.add_argument(
        "--backends",
        metavar="NAME",
        nargs="+",
        help="backends and peers, or patterns (default: all that do not compile for minutes)",
    )
    choice.add_argument("--variants", nargs="+", choices=VARIANTS, help="(default: both)")
    choice.add_argument("--passes", nargs="+", choices=PASSES, help="(default: all)")
    choice.add_argument(
        "--dtypes", nargs="+", choices=PRECISIONS, help="(default: the usual ones of each preset)"
    )
    choice.add_argument("--device", metavar="DEVICE", help="(default: CUDA where there is one)")
    choice.add_argument(
        "--thorough",
        action="store_true",
        help="give peers three chunk sizes, and three runs of their autotuners for each",
    )
    results = bench.add_argument_group("what to do with it")
    results.add_argument("--json", metavar="FILE", type=Path, help="save what was measured")
    results.add_argument(
        "--commit", metavar="TEXT", help="record this, where polyscan does not run from a checkout"
    )
    results.add_argument("--plot", metavar="DIR", type=Path, help="draw it, as PNG and SVG")
    instead = bench.add_argument_group("instead of measuring").add_mutually_exclusive_group()
    instead.add_argument("--list", action="store_true", help="show presets, sizes and floors")
    instead.add_argument("--load", metavar="FILE", type=Path, help="show a saved file, --plot it")
    instead.add_argument(
        "--compare", metavar=("OLD", "NEW"), nargs=2, type=Path, help="compare two saved files"
    )
    bench.set_defaults(run=_bench)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text}")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"must be a whole number below 2**32, got {text}")
    return int(text)


def _status(options: argparse.Namespace) -> int:
    from .status import status

    print(status())
    return 0


def _check(options: argparse.Namespace) -> int:
    from .check import check

    try:
        passed = check(options.backend, options.device)
    except ValueError as error:  # there is no such backend or device
        return _fail(str(error))
    return 0 if passed else 1


def _demo(options: argparse.Namespace) -> int:
    missing = _missing(DEMO_PACKAGES)
    if missing:
        return _fail(f"the demo needs {missing}: pip install polyscan[demo]")
    try:
        resolve_request(AUTO if options.backend is None else options.backend)
    except ValueError as error:  # there is no such backend
        return _fail(str(error))
    from .demo import REQUIRED_ACCURACY, demo

    try:
        options.output.mkdir(parents=True, exist_ok=True)  # before the work, not after it
        accuracy = demo(options.epochs, options.seed, options.output, options.backend)
    except (BackendError, OSError) as error:  # it cannot run this; no such folder
        return _fail(str(error))
    if accuracy < REQUIRED_ACCURACY:
        return _fail(
            f"a held-out accuracy of {accuracy:.1%} is too low: it should reach "
            f"{REQUIRED_ACCURACY:.0%}"
        )
    return 0


def _bench(options: argparse.Namespace) -> int:
    missing = _missing(BENCH_PACKAGES)
    if missing:
        return _fail(f"the benchmarks need {missing}: pip install polyscan[bench]")
    from .bench import bench

    try:
        return bench(options)
    except (ValueError, OSError) as error:  # there is no such preset, backend, device or file
        return _fail(str(error))


def _missing(packages: Mapping[str, str]) -> str:
    """Those of the packages that are not installed, as text."""
    return ", ".join(name for module, name in packages.items() if find_spec(module) is None)


def _fail(message: str) -> int:
    print(f"polyscan: {message}", file=sys.stderr)
    return 1
