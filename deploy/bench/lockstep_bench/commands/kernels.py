"""`kernels [OP...]`: each kernel on this GPU, at the shapes of real models, beside the bytes and operations it must do."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from lockstep_bench import report
from lockstep_bench.commands import add_output_flags, console, log
from lockstep_common.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_output_flags(parser)
    parser.add_argument("ops", nargs="*", metavar="OP", help="modules of lockstep_bench.kernels (default: all)")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains it")
    parser.add_argument("--traceback", action="store_true", help="show where a failing case failed")


def run(args: argparse.Namespace) -> int:
    """Every case is tried; 1 if one of them failed, or none was found."""
    import torch

    from lockstep_bench import kernels

    ops = chosen([module.name for module in pkgutil.iter_modules(kernels.__path__)], args.ops)
    if not torch.cuda.is_available():
        raise ConfigError("kernels are timed on a CUDA device, and torch finds none")
    rows, failed = [], 0
    settings = {"card": report.card("cuda"), "ops": ops}
    for op in ops:
        for name, figures in measured(op, args.only):
            if isinstance(figures, Exception):
                failed += 1
                log(f"{op}: {name} failed: {type(figures).__name__}: {figures}")
                if args.traceback:
                    log("".join(traceback.format_exception(figures)))
                figures = {"failed": str(figures).partition("\n")[0][:200]}
            else:
                log(f"{op}: {name}: {figures['us']:.1f} us, {figures['share']:.0%} of the limit")
            rows.append({"op": op, "name": name, **figures})
            if args.json is not None:
                report.write(args.json, report.document("kernels", settings, rows, []))
        torch.cuda.empty_cache()
    report.show(f"Kernels on {settings['card']}", [_shown(row) for row in rows], [], console)
    if failed:
        log(f"{failed} of {len(rows)} cases failed")
    return int(failed > 0 or not rows)


def chosen(known: list[str], wanted: list[str]) -> list[str]:
    """The ops to time, in the order asked for; ConfigError names those there are."""
    if unknown := [op for op in wanted if op not in known]:
        raise ConfigError(f"no cases for {', '.join(unknown)}; there are {', '.join(known)}")
    return wanted or known


def measured(op: str, only: str) -> Iterator[tuple[str, dict[str, Any] | Exception]]:
    """(case, its figures or why it failed); a module that breaks while it makes its cases ends with one failure."""
    from lockstep_bench import kernels

    try:
        for case in importlib.import_module(f"lockstep_bench.kernels.{op}").cases():
            if only not in case.name:
                continue
            try:
                figures = asdict(kernels.measure(case))
                figures.pop("name")
                yield case.name, figures
            except Exception as error:
                yield case.name, error
    except Exception as error:
        yield "cases", error


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    columns = {
        "op": "op", "name": "name", "us": "us", "gb_per_s": "GB/s", "tflop_per_s": "TFLOP/s",
        "share": "share of limit", "error": "max error", "failed": "failed",
    }  # fmt: skip
    return {title: row[key] for key, title in columns.items() if key in row}
