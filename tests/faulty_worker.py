"""A real worker whose communicators can be told to leave out a collective: `python -m tests.faulty_worker --fault FILE ...`.

The file: {"rank": which worker, "skip": the collective's name, "after": how many of that name run before}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lockstep_worker.__main__ import main
from lockstep_worker.collectives import communicator


def plant(rank: int, name: str, after: int) -> None:
    """From now on worker `rank` skips the collective number `after` of this name, once."""
    real: Any = communicator.OverHost.all_to_all
    seen = 0

    def all_to_all(
        self: Any, called: str, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> torch.Tensor:
        nonlocal seen
        seen += called == name
        if called == name and seen == after + 1:
            return x.new_zeros(sum(received), *x.shape[1:])
        result: torch.Tensor = real(self, called, x, sent, received)
        return result

    communicator.OverHost.all_to_all = all_to_all  # type: ignore[method-assign]


def start() -> None:
    at = sys.argv.index("--fault")
    fault = json.loads(Path(sys.argv[at + 1]).read_text())
    del sys.argv[at : at + 2]
    if int(sys.argv[sys.argv.index("--rank") + 1]) == fault["rank"]:
        plant(fault["rank"], fault["skip"], fault["after"])
    main()


if __name__ == "__main__":
    start()
