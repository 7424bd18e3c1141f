"""The worker's model alone, without rows, sampling or wire: what the machine gives before anything is served.

python -m lockstep_bench.worker_alone --model DIR [--dtype bfloat16] [--context 128] [--batch 1 8] [--prompt 512]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from lockstep_common.steps import Kind
from lockstep_worker.inputs import StepInputs
from lockstep_worker.kv import KvCache
from lockstep_worker.models import Model, load_model

BLOCK_SIZE = 16
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CPU = torch.device("cpu")


def step_inputs(
    kind: Kind, chunks: Sequence[tuple[Sequence[int], int]], tables: Sequence[Sequence[int]], block_size: int
) -> StepInputs:
    """One pass over `chunks` of (tokens, position of the first) with their block tables; the last of each gets logits.

    Without chunks it is that of a rank without tokens.
    """
    sizes = [len(tokens) for tokens, _ in chunks]
    lens = tuple(start + size for (_, start), size in zip(chunks, sizes, strict=True))
    longest = max(lens, default=0)
    width = -(-longest // block_size)
    table = torch.zeros(len(chunks), width, dtype=torch.int64)
    for row, blocks in zip(table, tables, strict=True):
        row[: len(blocks[:width])] = torch.tensor(blocks[:width])
    starts = torch.tensor([0, *sizes]).cumsum(0)
    spans = [torch.arange(start, end) for (_, start), end in zip(chunks, lens, strict=True)]
    positions = torch.cat(spans) if spans else torch.zeros(0, dtype=torch.int64)
    owner = torch.repeat_interleave(torch.arange(len(chunks)), torch.tensor(sizes, dtype=torch.int64))
    return StepInputs(
        kind=kind,
        token_ids=torch.tensor([token for tokens, _ in chunks for token in tokens], dtype=torch.int64),
        positions=positions,
        rows=torch.arange(len(chunks)),
        query_starts=starts,
        seq_lens=torch.tensor(lens, dtype=torch.int64),
        block_tables=(table,),
        slots=(table[owner, positions // block_size] * block_size + positions % block_size,),
        logits_index=starts[1:] - 1,
        query_lens=tuple(sizes),
        host_seq_lens=lens,
        max_seq_len=longest,
    )


def measure_decode(model: Model, *, batch: int, context: int, seconds: float = 2.0) -> dict[str, float]:
    """Tokens a second of steps that feed one token at position `context` of each of `batch` sequences, with logits."""
    blocks = context // BLOCK_SIZE + 1
    inputs = step_inputs(Kind.DECODE, [([1], context)] * batch, _tables(batch, blocks), BLOCK_SIZE)
    return _measure(model, inputs, batch, batch * blocks, seconds)


def measure_prefill(model: Model, *, prompt: int, seconds: float = 2.0) -> dict[str, float]:
    """Tokens a second of passes over one prompt, from an empty cache to the logits of its last token."""
    blocks = -(-prompt // BLOCK_SIZE)
    tokens = [random.Random(0).randrange(model.vocab_size) for _ in range(prompt)]
    inputs = step_inputs(Kind.PREFILL, [(tokens, 0)], _tables(1, blocks), BLOCK_SIZE)
    return _measure(model, inputs, prompt, blocks, seconds)


def measure(
    model_dir: Path,
    *,
    dtype: str = "bfloat16",
    batches: Sequence[int] = (1, 8),
    context: int = 128,
    prompt: int = 512,
    threads: int = 0,
    seconds: float = 2.0,
) -> dict[str, object]:
    """Prefill and decode speed of the model in `model_dir`: {prefill_512, decode_b1, ...}_{tok_per_s (the best),
    median_tok_per_s, ms}, and what was measured.
    """
    if threads:
        torch.set_num_threads(threads)
    model = load_model(model_dir, dtype=DTYPES[dtype], device=CPU, deterministic=True)
    figures = {f"prefill_{prompt}": measure_prefill(model, prompt=prompt, seconds=seconds)}
    figures |= {f"decode_b{n}": measure_decode(model, batch=n, context=context, seconds=seconds) for n in batches}
    facts = {"model": model_dir.name, "dtype": dtype, "threads": torch.get_num_threads(), "context": context}
    return facts | {f"{what}_{name}": value for what, values in figures.items() for name, value in values.items()}


def _measure(model: Model, inputs: StepInputs, tokens: int, blocks: int, seconds: float) -> dict[str, float]:
    kv = KvCache(model.kv_specs(), num_blocks=blocks + 1, block_size=BLOCK_SIZE, device=CPU)
    times = _times(lambda: model.logits(model.forward(inputs, kv)), seconds)
    return {
        "tok_per_s": round(tokens / min(times), 1),
        "median_tok_per_s": round(tokens / statistics.median(times), 1),
        "ms": round(min(times) * 1e3, 2),
    }


def _times(step: Callable[[], object], seconds: float) -> list[float]:
    """Durations of repeated calls, after one that compiles what is compiled once."""
    step()
    times: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(times) < 3:
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return times


def _tables(count: int, blocks: int) -> list[list[int]]:
    """Block tables in random order: as after hours of service, not as after start-up."""
    order = list(range(1, count * blocks + 1))
    random.Random(0).shuffle(order)
    return [order[i * blocks : (i + 1) * blocks] for i in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="lockstep_bench.worker_alone", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, dest="model_dir")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], dest="batches")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--threads", type=int, default=0, help="0: as many as there are cores")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each figure")
    print(json.dumps(measure(**vars(parser.parse_args())), indent=1))


if __name__ == "__main__":
    main()
