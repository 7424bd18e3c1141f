"""What follows the model in a decode step: sampling, post-update, preparation of the next step; and whole KV blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import torch

from lockstep_bench.kernels import Case
from lockstep_kernels import blocks, post_update, prepare
from lockstep_kernels import sampling as ops
from lockstep_kernels.sampling import Feature, Float, Int, RowTables, reference

BATCHES: Final = (1, 64, 256)
VOCABS: Final = (49152, 128256)  # smollm2, llama 3
L2_BYTES: Final = 50e6
MAX_MODEL_LEN: Final = 131072
BLOCK_SIZE: Final = 64

NUCLEUS: Final = Feature.RANDOM | Feature.TOP_P
RECIPES: Final = {
    "temperature": Feature.RANDOM,
    "top-p": NUCLEUS,
    "top-k, top-p": NUCLEUS | Feature.TOP_K,
    "all": NUCLEUS | Feature.TOP_K | Feature.MIN_P | Feature.PENALTIES | Feature.BIAS,
}


def cases() -> Iterator[Case]:
    for vocab in VOCABS:
        for n in BATCHES:
            yield from _greedy(n, vocab)
            yield from _rows(n, vocab)
            yield from _logprobs(n, vocab)
    for n in BATCHES:
        yield _inputs(n)
        yield _finish(n)
    yield from _blocks()


def _greedy(n: int, vocab: int) -> Iterator[Case]:
    logits = _logits(n, vocab, 1.0)

    def check() -> float:
        if not torch.equal(ops.sample_greedy(logits[0])[0], reference.greedy(logits[0])[0]):
            raise AssertionError("greedy tokens differ")
        return 0.0

    size = 4.0 * n * vocab
    yield Case(f"greedy {n} x {vocab}", [partial(ops.sample_greedy, x) for x in logits], size, check=check)
    yield Case(f"greedy {n} x {vocab}, torch.argmax", [partial(torch.argmax, x, -1) for x in logits], size)


def _rows(n: int, vocab: int) -> Iterator[Case]:
    index = torch.arange(n, device="cuda")
    for shape, scale in (("flat", 1.0), ("peaked", 4.0))[: 2 if n == 64 else 1]:
        logits = _logits(n, vocab, scale)
        for name, features in RECIPES.items():
            tables = _tables(n, vocab, features)
            runs = [partial(ops.sample_rows, x, index, tables) for x in logits]
            check = partial(_share_of_other_tokens, logits[0], index, tables)
            yield Case(f"rows {n} x {vocab}, {name}, {shape}", runs, 4.0 * n * vocab, check=check)
            if n == 64 and name == "top-k, top-p":
                torch_runs = [partial(reference.sample_rows, x, index, tables, tables.lengths, None) for x in logits]
                yield Case(f"rows {n} x {vocab}, {name}, {shape}, torch", torch_runs, 4.0 * n * vocab)


def _share_of_other_tokens(logits: torch.Tensor, index: torch.Tensor, tables: RowTables) -> float:
    """Rows whose token is another than the reference's: rounding may decide a draw, rarely."""
    want = reference.sample_rows(logits, index, tables, tables.lengths[index], None)[0]
    share = (ops.sample_rows(logits.clone(), index, tables)[0] != want).float().mean().item()
    if share * len(index) > 1 + len(index) / 100:
        raise AssertionError(f"{share:.1%} of the rows got another token than the reference's")
    return share


def _logprobs(n: int, vocab: int) -> Iterator[Case]:
    logits, tokens = _logits(n, vocab, 1.0), torch.zeros(n, dtype=torch.int64, device="cuda")

    def check() -> float:
        want, got = reference.logprobs(logits[0], tokens, 20), ops.logprobs(logits[0], tokens, 20)
        return max((want[0] - got[0]).abs().max().item(), (want[2] - got[2]).abs().max().item())

    for count in (0, 20):
        runs = [partial(ops.logprobs, x, tokens, count) for x in logits]
        yield Case(f"logprobs {n} x {vocab}, {count} best", runs, 4.0 * n * vocab, check=check)
    torch_runs = [partial(reference.logprobs, x, tokens, 20) for x in logits]
    yield Case(f"logprobs {n} x {vocab}, 20 best, torch", torch_runs, 4.0 * n * vocab)


def _inputs(n: int) -> Case:
    """Rows of a quarter of the longest sequence."""
    rows = torch.full((n + 1,), MAX_MODEL_LEN // 4, device="cuda")
    tables = (torch.zeros(n + 1, MAX_MODEL_LEN // BLOCK_SIZE, dtype=torch.int64, device="cuda"),)
    out = prepare.DecodeInputs.empty(n, tables, rows.device)
    index = torch.arange(n, device="cuda")
    run = partial(prepare.decode_inputs, index, rows, rows, rows > 0, tables, (BLOCK_SIZE,), out)
    return Case(f"decode inputs {n}", [run], 16.0 * n * (MAX_MODEL_LEN // 4 // BLOCK_SIZE))


def _finish(n: int) -> Case:
    rows = torch.ones(n + 1, dtype=torch.int64, device="cuda")
    state = post_update.RowState(
        last=rows.clone(),
        lengths=rows.clone(),
        alive=rows > 0,
        limits=rows * 2**40,
        history=torch.zeros(n + 1, 4096, dtype=torch.int64, device="cuda"),
        stop_ids=torch.full((n + 1, 8), -1, device="cuda"),
    )
    ring, cursor = torch.zeros(256, n, dtype=torch.int64, pin_memory=True), torch.zeros(1, device="cuda").long()
    index, tokens = torch.arange(n, device="cuda"), rows[:n]
    bits = {"row_shift": 32, "stop_bit": 2 << 52, "length_bit": 4 << 52, "fault_bit": 8 << 52}
    run = partial(post_update.finish, index, tokens, rows[:n] > 1, state, ring, cursor, **bits)
    return Case(f"post-update {n}", [run], 200.0 * n)


def _blocks() -> Iterator[Case]:
    """Blocks of llama-3.1-8b: 32 layers of 8 heads of 128."""
    cache = torch.zeros(32, 512, 2, 8, BLOCK_SIZE, 128, dtype=torch.bfloat16, device="cuda")
    size = float(cache[:, 0].numel() * cache.element_size())
    for n in (1, 64):
        sources, destinations = torch.arange(n, device="cuda"), torch.arange(n, 2 * n, device="cuda")
        yield Case(f"zero {n} blocks", [partial(blocks.zero, cache, sources)], n * size)
        yield Case(f"copy {n} blocks", [partial(blocks.copy, cache, sources, destinations)], 2 * n * size)
        yield Case(f"zero {n} blocks, torch", [_by_layer(cache, sources)], n * size)


def _by_layer(cache: torch.Tensor, chosen: torch.Tensor) -> Callable[[], Any]:
    return lambda: [layer.index_fill_(0, chosen, 0) for layer in cache]


def _logits(n: int, vocab: int, scale: float) -> list[torch.Tensor]:
    """Enough batches to be larger than the L2 cache together."""
    count = max(2, int(2 * L2_BYTES / (4 * n * vocab)))
    generator = torch.Generator("cuda").manual_seed(0)
    return [torch.randn(n, vocab, device="cuda", generator=generator) * scale for _ in range(min(count, 64))]


def _tables(n: int, vocab: int, features: Feature) -> RowTables:
    floats = torch.zeros(n, len(Float), device="cuda")
    floats[:, Float.TEMPERATURE], floats[:, Float.TOP_P], floats[:, Float.MIN_P] = 0.8, 0.95, 0.01
    floats[:, Float.PRESENCE], floats[:, Float.FREQUENCY], floats[:, Float.REPETITION] = 0.1, 0.1, 1.1
    ints = torch.zeros(n, len(Int), dtype=torch.int64, device="cuda")
    ints[:, Int.SEED] = torch.arange(n, device="cuda")
    ints[:, Int.TOP_K], ints[:, Int.FEATURES] = 50, int(features)
    return RowTables(
        floats=floats,
        ints=ints,
        stop_ids=torch.full((n, 8), -1, device="cuda"),
        bias_ids=torch.zeros(n, 64, dtype=torch.int64, device="cuda"),
        bias_values=torch.eye(64, device="cuda")[0].repeat(n, 1),
        lengths=torch.full((n,), 1000, device="cuda"),
        counts=torch.zeros(n, vocab, dtype=torch.int32, device="cuda"),
        in_prompt=torch.zeros(n, vocab, dtype=torch.bool, device="cuda"),
    )
