"""`python vllm_offline.py MODEL_DIR DTYPE`: vLLM without a server, 128 tokens in, 128 more out, batch 1 and 8; prefill of 512."""

from __future__ import annotations

import importlib
import json
import random
import sys
import time
from typing import Any

INPUT, OUTPUT, PREFILL, REPEATS = 128, 128, 512, 3


def main(model: str, dtype: str) -> None:
    vllm = importlib.import_module("vllm")
    engine = vllm.LLM(model=model, dtype=dtype, max_model_len=2048, max_num_seqs=8, enable_prefix_caching=False)
    rng = random.Random(0)

    def seconds(batch: int, length: int, output: int) -> float:
        """Best of some runs, each with prompts of its own."""
        times = []
        for _ in range(REPEATS):
            prompts = [{"prompt_token_ids": [rng.randrange(100, 32000) for _ in range(length)]} for _ in range(batch)]
            options = vllm.SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
            start = time.perf_counter()
            engine.generate(prompts, options, use_tqdm=False)
            times.append(time.perf_counter() - start)
        return min(times)

    seconds(1, INPUT, 4)
    result: dict[str, Any] = {"prefill_512_tok_per_s": PREFILL / seconds(1, PREFILL, 1)}
    for batch in (1, 8):
        decode = seconds(batch, INPUT, OUTPUT + 1) - seconds(batch, INPUT, 1)
        result[f"decode_b{batch}_tok_per_s"] = batch * OUTPUT / decode
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
