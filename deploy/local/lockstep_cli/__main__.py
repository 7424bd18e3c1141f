"""`lockstep COMMAND ...`: finds the command and lets it read its own arguments. Commands are imported when they are used."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NoReturn

from lockstep_cli import __version__
from lockstep_common.errors import ConfigError, LockstepError


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0 fine, 1 failed, 2 wrongly asked, 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    args = parser.parse_args(arguments[:1])
    signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        return _COMMANDS[args.command][1](arguments[1:])
    except LockstepError as error:
        print(f"lockstep {args.command}: {error.message}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    lines = "\n".join(f"  {name:<9}{about}" for name, (about, _) in _COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="lockstep",
        usage="lockstep COMMAND ...",
        description="Serves large language models from many GPUs that take every step together.",
        epilog=f"commands (each has --help):\n{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"lockstep {__version__}")
    parser.add_argument("command", metavar="COMMAND", choices=tuple(_COMMANDS), help=argparse.SUPPRESS)
    return parser


def _on_sigterm(number: int, frame: FrameType | None) -> NoReturn:
    """Leaves through every `finally`, so that nothing half done stays behind."""
    sys.exit(128 + number)


def _up(argv: Sequence[str]) -> int:
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # else it tells on our terminal of every process that ends
    from lockstep_cli.up import run

    return run(argv)


def _model(argv: Sequence[str]) -> int:
    from lockstep_cli.model_command import run

    return run(argv)


def _chat(argv: Sequence[str]) -> int:
    from lockstep_cli.chat import run

    return run(argv)


def _profile(argv: Sequence[str]) -> int:
    from lockstep_cli.profile import run

    return run(argv)


def _bench(argv: Sequence[str]) -> int:
    return _measuring("lockstep_bench", argv)


def _sim(argv: Sequence[str]) -> int:
    return _measuring("lockstep_bench.sim", argv)


def _measuring(package: str, argv: Sequence[str]) -> int:
    """lockstep-bench stands above this package: it is looked up, never imported."""
    if importlib.util.find_spec("lockstep_bench") is None:
        raise ConfigError(
            "the package lockstep-bench is not installed: pip install ./deploy/bench (from a working copy)"
        )
    status = importlib.import_module(f"{package}.__main__").main(list(argv))
    return int(status or 0)


_COMMANDS: dict[str, tuple[str, Callable[[Sequence[str]], int]]] = {
    "up": ("serve a model on this machine", _up),
    "model": ("fetch and list models", _model),
    "chat": ("talk to a model", _chat),
    "bench": ("measure", _bench),
    "sim": ("run the scheduler against simulated workers", _sim),
    "profile": ("record a running worker's steps in a trace", _profile),
}

if __name__ == "__main__":
    sys.exit(main())
