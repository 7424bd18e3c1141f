"""A real worker whose communicators can be told to misbehave: `python -m tests.faulty_worker --fault FILE ...`.

The file: {"rank": which worker, "at": a collective's name, "after": how many of that name run before, "does": "skip" it, or "hang"}.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from lockstep_worker.__main__ import main
from lockstep_worker.collectives import communicator


def plant(name: str, after: int, does: str) -> None:
    """The collective number `after` of this name is skipped, or never begins, once."""
    real: Any = communicator.OverHost.all_to_all_later
    seen = 0

    def all_to_all_later(
        self: Any, called: str, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> Callable[[], torch.Tensor]:
        nonlocal seen
        seen += called == name
        if called == name and seen == after + 1:
            while does == "hang":
                time.sleep(1)
            return lambda: x.new_zeros(sum(received), *x.shape[1:])
        result: Callable[[], torch.Tensor] = real(self, called, x, sent, received)
        return result

    communicator.OverHost.all_to_all_later = all_to_all_later  # type: ignore[method-assign]


def start() -> None:
    at = sys.argv.index("--fault")
    fault = json.loads(Path(sys.argv[at + 1]).read_text())
    del sys.argv[at : at + 2]
    if int(sys.argv[sys.argv.index("--rank") + 1]) == fault["rank"]:
        plant(fault["at"], fault["after"], fault["does"])
    main()


if __name__ == "__main__":
    start()
