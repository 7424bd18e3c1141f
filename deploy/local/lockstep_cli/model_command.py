"""`lockstep model`: what is there, what could be, and getting it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lockstep_cli import models
from lockstep_cli.progress import ProgressDisplay, Report
from lockstep_common.errors import ConfigError


def run(argv: Sequence[str]) -> int:
    args = _parse(argv)
    if args.action == "list":
        print(listing())
        return 0
    with ProgressDisplay(sys.stderr) as display:
        if args.action == "get":
            path, said = models.get(args.model, display, args.dtype), ""
        else:
            path, said = _moefied(args, display)
    if said:
        print(said, file=sys.stderr)
    print(path)
    return 0


def listing() -> str:
    """A line for each model in the cache and for each that could be fetched."""
    cached = models.cached()
    lines = [f"{path.name:<36}{_size(path):>9}  {path}" for path in cached]
    names = {path.name for path in cached}
    for name, source in models.CATALOG.items():
        if name not in names:
            lines.append(f"{name:<36}{'-':>9}  not fetched: {source.about}")
    for name, derived in models.DERIVED.items():
        if name not in names:
            lines.append(f"{name:<36}{'-':>9}  not made yet: {derived.about}")
    return "\n".join(lines)


def _moefied(args: argparse.Namespace, report: Report) -> tuple[Path, str]:
    """The directory that was made of the dense model, and what is to be said about it."""
    from lockstep_cli import moefy  # torch

    source = models.resolve(args.model, report)
    plan = moefy.plan(source, models.Recipe(args.experts, args.top_k, args.form, args.shared))
    target = (
        args.out or models.models_root() / f"{source.name}-{plan.form.name}-{plan.shape.top_k}of{plan.shape.experts}"
    )
    try:
        text = args.text.read_text() if args.text else None
    except (OSError, ValueError) as error:
        raise ConfigError(f"--text: {error}") from error
    with models.exclusively():
        if target.exists():
            raise ConfigError(f"{target} is there already: remove it, or choose another directory with --out")
        with models.written_whole(target) as partial:
            summary = moefy.moefy(source, partial, plan, text, report)
    return target, summary.text()


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="lockstep model", description=f"Models in the cache ({models.models_root()}; LOCKSTEP_CACHE moves it)."
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="get | list | moefy")
    actions.add_parser("list", help="the models that are in the cache or can be fetched")
    known = ", ".join([*models.CATALOG, *models.DERIVED])
    get = actions.add_parser("get", help="fetch a model, or convert a GGUF file; prints the directory")
    get.add_argument("model", metavar="NAME|PATH.gguf", help=f"one of {known}, or a file")
    get.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the weights written")
    _add_moefy(actions.add_parser("moefy", help="make a mixture of experts of a dense model; prints the directory"))
    return parser.parse_args(argv)


def _add_moefy(parser: argparse.ArgumentParser) -> None:
    add, usual = parser.add_argument, models.Recipe()
    parser.description = (
        "Cuts the blocks of a dense model into experts. With all of them chosen it stays the same model; "
        "with --top-k a gate is fitted that chooses some."
    )
    add("model", nargs="?", default=models.DEFAULT_MODEL, metavar="MODEL", help="a directory, .gguf file or name")
    add("--out", type=Path, metavar="DIR", help="where to write it (default: the cache, under a name that says how)")
    add("--experts", type=int, default=usual.experts, metavar="E", help="routed experts of a layer (%(default)s)")
    add("--top-k", type=int, metavar="K", help="experts for a token (default: all)")
    add("--form", help="mixtral, qwen3-moe or glm4-moe (default: what suits the model)")
    add("--shared", type=int, metavar="S", help="experts for all tokens, where the form has such (about half of E)")
    add("--text", type=Path, metavar="FILE", help="plain text to fit a gate to (default: the manual of Python)")


def _size(path: Path) -> str:
    return f"{sum(file.stat().st_size for file in path.iterdir()) / 1e6:.0f} MB"
