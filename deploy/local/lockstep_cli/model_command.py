"""`lockstep model`: what is there, what could be, and getting it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lockstep_cli import models
from lockstep_cli.progress import ProgressDisplay


def run(argv: Sequence[str]) -> int:
    args = _parse(argv)
    if args.action == "list":
        print(listing())
        return 0
    with ProgressDisplay(sys.stderr) as display:
        print(models.get(args.model, display, args.dtype))
    return 0


def listing() -> str:
    """A line for each model in the cache and for each that could be fetched."""
    cached = models.cached()
    lines = [f"{path.name:<36}{_size(path):>9}  {path}" for path in cached]
    names = {path.name for path in cached}
    for name, source in models.CATALOG.items():
        if name not in names:
            lines.append(f"{name:<36}{'-':>9}  not fetched: {source.about}")
    return "\n".join(lines)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="lockstep model", description=f"Models in the cache ({models.models_root()}; LOCKSTEP_CACHE moves it)."
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="get | list")
    actions.add_parser("list", help="the models that are in the cache or can be fetched")
    get = actions.add_parser("get", help="fetch a model, or convert a GGUF file; prints the directory")
    get.add_argument("model", metavar="NAME|PATH.gguf", help=f"one of {', '.join(models.CATALOG)}, or a file")
    get.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the weights written")
    return parser.parse_args(argv)


def _size(path: Path) -> str:
    return f"{sum(file.stat().st_size for file in path.iterdir()) / 1e6:.0f} MB"
