"""The command line: ``python -m polyscan`` and its subcommands.

A subcommand is a parser here and a module beside this file, imported when it is asked for: what it
needs beyond torch is not needed for the others.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from polyscan.dispatch import AUTO, resolve_request
from polyscan.errors import BackendError

# module -> the name it is installed by
DEMO_PACKAGES = {"matplotlib": "matplotlib", "rich": "rich", "sklearn": "scikit-learn"}


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
    return parser


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
    missing = [name for module, name in DEMO_PACKAGES.items() if find_spec(module) is None]
    if missing:
        return _fail(f"the demo needs {', '.join(missing)}: pip install polyscan[demo]")
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


def _fail(message: str) -> int:
    print(f"polyscan: {message}", file=sys.stderr)
    return 1
