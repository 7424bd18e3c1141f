"""Pictures of how a group works, as SVG: drawn from what the code does, not from what somebody remembers of it.

    svg.py     shapes and words on a card that is readable in light and in dark
    vote.py    a timeline of plans and votes, from a run of the real step loop in the simulator
    mirror.py  a prompt that several workers compute together, from the worker's own functions
    group.py   who sends what to whom

The same code gives the same bytes on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from lockstep_bench.pictures import group, mirror, vote

PICTURES: Final[Mapping[str, Callable[[], str]]] = {"vote": vote.draw, "mirror": mirror.draw, "group": group.draw}


def write(folder: Path) -> list[Path]:
    """Draws all of them into a folder; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, draw in PICTURES.items():
        file = folder / f"{name}.svg"
        file.write_text(draw(), encoding="utf-8")
        files.append(file)
    return files
