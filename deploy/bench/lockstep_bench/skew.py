"""Routing that prefers some experts, as trained models' routing of one subject does: for measurements of what that costs.

`python -m lockstep_bench.skew ...` is a worker that takes the worker's flags, and scales the rows of its gates when it loads a
model as LOCKSTEP_BENCH_SKEW says: "S,SEED", see `scales`. The workers that measure something else (`routing`, `host_time`) do so too.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt

VARIABLE = "LOCKSTEP_BENCH_SKEW"


def scales(experts: int, exponent: float, seed: int, layer: int) -> npt.NDArray[np.float32]:
    """float32 [experts], by which a layer's gate is scaled: i^-exponent for i from 1 on, dealt out to experts by chance.

    Logits of random weights are centred on 0, so an expert's share of the choices grows with the width of its logits: the first
    few are in the top k of up to half of the tokens, the last ones of hardly any. 0: all alike.
    """
    order = np.random.default_rng((seed, layer)).permutation(experts)
    return np.asarray((1.0 + order) ** -exponent, np.float32)


def apply() -> None:
    """Before a model is loaded: does nothing unless the variable is set. The same on all workers of a group."""
    if not (asked := os.environ.get(VARIABLE)):
        return
    import torch

    from lockstep_kernels import moe

    exponent, seed = asked.split(",")
    pack_gate, layers = moe.pack_gate, iter(range(1 << 30))

    def skewed(weight: torch.Tensor, *args: Any, **options: Any) -> Any:
        factors = torch.from_numpy(scales(len(weight), float(exponent), int(seed), next(layers)))
        return pack_gate(weight * factors.to(weight.device, weight.dtype)[:, None], *args, **options)

    moe.pack_gate = skewed


def main() -> None:
    from lockstep_worker.__main__ import main as worker

    apply()
    worker()


if __name__ == "__main__":
    main()
