"""`lockstep bench [COMMAND]`: finds the command and lets it read its own arguments; see `commands`.

Each prints a table with its goals and can write JSON. Without a command: overhead (the cases with goals), stack-ttft and cpu.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence

from lockstep_bench.commands import errors
from lockstep_common.errors import LockstepError

_COMMANDS = {
    "throughput": "offline throughput of an engine that it starts, beside its peers, goals and limits",
    "serve": "load on a server over REST or gRPC; definitions as `vllm bench serve`",
    "kernels": "each kernel on this GPU beside the bytes and operations that it must do",
    "exchange": "tokens to experts on other ranks and back: bytes and time",
    "cp": "a prompt that several ranks compute together: work counted, attention timed",
    "dbo": "dual-batch overlap: what two halves of a pass hide of a slow link",
    "overhead": "steps/s, CPU a step and TTFT with a worker that only waits",
    "vote": "a vote between scheduler shards, plans and CPU a window with one shard and two",
    "stack-ttft": "TTFT through router and scheduler with a worker that computes nothing",
    "cpu": "SmolLM2 on this CPU: worker alone, whole stack, peers",
    "pictures": "how a group works, drawn from a run of the step loop and the worker's own functions, as SVG",
    "all": "overhead (the cases with goals), stack-ttft and cpu; --json names a directory",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a measurement; 0, or 1 for an error and, with --check, for a missed goal. Bad flags exit with 2."""
    words = (sys.argv[1:] if argv is None else list(argv)) or ["all"]
    name: str = _parser().parse_args(words[:1]).command
    command = importlib.import_module(f"lockstep_bench.commands.{name.replace('-', '_')}")
    parser = argparse.ArgumentParser(prog=f"lockstep bench {name}", description=_COMMANDS[name], allow_abbrev=False)
    command.add_arguments(parser)
    args = parser.parse_args(words[1:])
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what was started is stopped
    try:
        code: int = command.run(args)
    except LockstepError as error:
        errors.print(f"lockstep bench {name}: {error.message}", markup=False, highlight=False)
        return 1
    except KeyboardInterrupt:
        return 130
    return code


def _parser() -> argparse.ArgumentParser:
    lines = "\n".join(f"  {name:<12}{about}" for name, about in _COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="lockstep bench",
        usage="lockstep bench [COMMAND] ...",
        description="Measures Lockstep.",
        epilog=f"commands (each has --help):\n{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("command", metavar="COMMAND", choices=tuple(_COMMANDS), help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
