"""The mixture-of-experts kernels, at the shapes of real models and of every size of batch that they are cut for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from lockstep_kernels.fp8 import BLOCK, E4M3
from lockstep_kernels.moe import grouped, kernel, skinny
from lockstep_kernels.moe.weights import ExpertWeights, Routing, Stack
from lockstep_kernels.rms_norm import Norm
from tests.kernels import launches

MODELS = {  # routing, shared experts, hidden, width
    "qwen3-30b-a3b": (Routing(128, 8, "softmax", True), 0, 2048, 768),
    "deepseek-v2-lite": (Routing(64, 6, "softmax", False), 2, 2048, 1408),
    "deepseek-v3": (Routing(256, 8, "sigmoid", True, 2.5, 8, 4, "top2"), 1, 7168, 2048),
    "glm-4.5-air": (Routing(128, 8, "sigmoid", True), 1, 4096, 1408),
    "mixtral-8x7b": (Routing(8, 2, "softmax", True), 0, 4096, 14336),
}
TOKENS = (1, 2, 3, 8, 64, 128, 256, 512, 1024, 8192)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def of_8_bits(experts: int, parts: int, rows: int, columns: int, kind: str) -> Stack:
    scales = (-(-rows // BLOCK), -(-columns // BLOCK)) if kind == "blocks" else (rows,)
    scale = empty(experts, parts * scales[0], *scales[1:], dtype=torch.float32)
    return Stack(empty(experts, parts * rows, columns, dtype=E4M3), scale)


def variants() -> Iterator[tuple[str, Callable[[], Any]]]:
    for model, (routing, shared, hidden, width) in MODELS.items():
        chosen, count = routing.top_k + shared, routing.experts + shared
        gate_up, down = empty(count, 2 * width, hidden), empty(count, hidden, width)
        packed = ExpertWeights(count, hidden, width, torch.bfloat16, Stack(gate_up), Stack(down))
        correction = empty(routing.experts, dtype=torch.float32) if routing.scoring == "sigmoid" else None
        for tokens in TOKENS:
            name, kernels = f"{model} T={tokens}", 5 if tokens * chosen > kernel.MANY_PAIRS else 3
            x, logits = empty(tokens, hidden), empty(tokens, routing.experts, dtype=torch.float32)
            ids, weights = empty(tokens, chosen, dtype=torch.int32), empty(tokens, chosen, dtype=torch.float32)
            if tokens <= skinny.MOST_TOKENS:
                norm = Norm(empty(hidden, dtype=torch.float32), 1e-6)
                mix = partial(skinny.mix, x, ids, weights, packed, x, norm, pdl=True)
                yield from launches.variants(f"{name} mix", mix, 2)
            else:
                products = partial(grouped.experts, x, ids, weights, packed, pdl=True)
                yield from launches.variants(f"{name} experts", products, kernels)
        for kind in ("rows", "blocks"):
            for tokens in (1, 64, 256, 512, 8192):
                x = empty(tokens, hidden)
                ids, weights = empty(tokens, chosen, dtype=torch.int32), empty(tokens, chosen, dtype=torch.float32)
                packed = ExpertWeights(
                    count,
                    hidden,
                    width,
                    torch.bfloat16,
                    of_8_bits(count, 2, width, hidden, kind),
                    of_8_bits(count, 1, hidden, width, kind),
                )
                name = f"{model} e4m3 {kind} T={tokens}"
                kernels = 5 if tokens * chosen > kernel.MANY_PAIRS else 3
                if tokens <= skinny.MOST_TOKENS:
                    mix = partial(skinny.mix, x, ids, weights, packed, x, None, pdl=True)
                    yield from launches.variants(f"{name} mix", mix, 2)
                else:
                    products = partial(grouped.experts, x, ids, weights, packed, pdl=True)
                    yield from launches.variants(f"{name} experts", products, kernels)
        live = empty(tokens, dtype=torch.bool)
        arrived, gate = empty(1, dtype=torch.int32), empty(routing.experts, hidden)
        for tokens in range(1, skinny.MOST_TOKENS + 1):
            few = empty(tokens, hidden), Norm(empty(hidden, dtype=torch.float32), 1e-6), gate, arrived
            choose = partial(skinny.kernel.choose, *few, routing, correction, live[:tokens], shared, pdl=True)
            yield from launches.variants(f"{model} T={tokens} choose", choose, 1)
        for count in (64, len(live)):
            route = partial(kernel.route, logits[:count], routing, correction, live[:count], shared, pdl=True)
            yield from launches.variants(f"{model} route T={count}", route, 1)
        combine = partial(kernel.combine, empty(tokens, chosen, hidden), ids, x, pdl=True)
        yield from launches.variants(f"{model} combine", combine, 1)
