"""`lockstep sim [COMMAND]`: the scheduler on a simulated clock. Without a command: run."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from lockstep_bench.commands import errors
from lockstep_common.errors import LockstepError

_COMMANDS = {
    "run": "requests through the step loop with a cost model: throughput, latencies, votes; --sweep chooses settings",
    "fit": "a cost model from what lockstep bench throughput measured",
    "scale": "what the step loop itself costs at 16, 144, 1024 ranks; whether a shard keeps up with its own",
    "published": "DeepSeek-V3 on H800 as published: both units simulated, and which terms decide",
}


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 1 for an error and, with --check, for a missed goal. Bad flags exit with 2."""
    words = sys.argv[1:] if argv is None else list(argv)
    if not words or (words[0].startswith("-") and words[0] not in ("-h", "--help")):
        words = ["run", *words]
    name: str = _parser().parse_args(words[:1]).command
    command = importlib.import_module(f"lockstep_bench.sim.{name}")
    parser = argparse.ArgumentParser(prog=f"lockstep sim {name}", description=_COMMANDS[name], allow_abbrev=False)
    command.add_arguments(parser)
    args = parser.parse_args(words[1:])
    try:
        code: int = command.run(args)
    except LockstepError as error:
        errors.print(f"lockstep sim {name}: {error.message}", markup=False, highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        return 130
    return code


def _parser() -> argparse.ArgumentParser:
    lines = "\n".join(f"  {name:<11}{about}" for name, about in _COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="lockstep sim",
        usage="lockstep sim [COMMAND] ...",
        description="Runs the real scheduler against simulated workers.",
        epilog=f"commands (each has --help):\n{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("command", metavar="COMMAND", choices=tuple(_COMMANDS), help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
