"""How many experts a decode step reads: the figure that says whether random weights route as trained ones do.

`python -m lockstep_bench.routing ...` is a worker that counts: it takes the worker's flags, runs every step without a graph
(`--enforce-eager`), and writes what it counted to the file named by LOCKSTEP_BENCH_ROUTING when it is stopped.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep_bench import skew

VARIABLE = "LOCKSTEP_BENCH_ROUTING"
STEPS = 16  # decode steps are enough: they hold hundreds of layers
_FIELDS = ("n_routed_experts", "num_experts", "num_local_experts")


def routed_experts(config: Mapping[str, Any]) -> int:
    """Routed experts of a layer by a model's config.json; 0 for a dense model."""
    return next((int(config[name]) for name in _FIELDS if config.get(name)), 0)


class Counter:
    """Distinct experts of the layers seen, by the number of tokens that were routed together."""

    def __init__(self) -> None:
        self._seen: defaultdict[int, list[int]] = defaultdict(list)

    def add(self, ids: Any, experts: int) -> None:
        """ids [T, k] of one layer and step: below `experts` the routed ones, negative for tokens that are not live."""
        live = int((ids[:, 0] >= 0).sum())
        routed = ids[(ids >= 0) & (ids < experts)]
        self._seen[live].append(len(routed.unique()))

    def means(self) -> dict[str, float]:
        """Tokens a step to mean distinct experts a layer and step."""
        return {str(live): round(sum(seen) / len(seen), 2) for live, seen in sorted(self._seen.items())}


def read(path: Path, tokens: int) -> float | None:
    """What was counted for steps of so many tokens; None if there was none."""
    found: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
    return found.get(str(tokens))


def main() -> None:
    from lockstep_kernels import moe
    from lockstep_worker.__main__ import main as worker

    counter, choose = Counter(), moe.choose

    def counted(x: Any, gate: Any, **options: Any) -> Any:
        ids, weights = choose(x, gate, **options)
        counter.add(ids, gate.routing.experts)
        return ids, weights

    moe.choose = counted
    skew.apply()
    try:
        worker()
    finally:
        Path(os.environ[VARIABLE]).write_text(json.dumps(counter.means()))


if __name__ == "__main__":
    main()
