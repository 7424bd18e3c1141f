"""`python llama_cpp.py FILE.gguf THREADS`: llama.cpp through its C API, decode at context 128 for batch 1 and 8; prefill of 512."""

from __future__ import annotations

import importlib
import json
import random
import sys
import time
from typing import Any

INPUT, OUTPUT, PREFILL, REPEATS = 128, 64, 512, 3


class Engine:
    def __init__(self, path: str, threads: int) -> None:
        sys.path.pop(0)  # this file bears the library's name
        self.api: Any = importlib.import_module("llama_cpp")
        self.api.llama_backend_init()
        self._model = self.api.llama_model_load_from_file(path.encode(), self.api.llama_model_default_params())
        params = self.api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 8 * (INPUT + OUTPUT + 16), 1024, 512, 8
        params.n_threads = params.n_threads_batch = threads
        self._context = self.api.llama_init_from_model(self._model, params)
        if not self._context:
            raise SystemExit(f"llama.cpp cannot load {path}")
        self._batch = self.api.llama_batch_init(1024, 0, 1)
        self._rng = random.Random(0)

    def clear(self) -> None:
        self.api.llama_memory_clear(self.api.llama_get_memory(self._context), True)

    def decode(self, entries: list[tuple[int, int, bool]]) -> None:
        """Runs (position, sequence, wants logits) entries with random tokens."""
        self._batch.n_tokens = len(entries)
        for i, (position, sequence, logits) in enumerate(entries):
            self._batch.token[i] = self._rng.randrange(100, 32000)
            self._batch.pos[i] = position
            self._batch.n_seq_id[i] = 1
            self._batch.seq_id[i][0] = sequence
            self._batch.logits[i] = logits
        if self.api.llama_decode(self._context, self._batch) != 0:
            raise SystemExit("llama_decode failed")

    def prefill(self, length: int, sequence: int = 0) -> None:
        self.decode([(p, sequence, p == length - 1) for p in range(length)])


def best(run: Any) -> float:
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def main(path: str, threads: int) -> None:
    engine = Engine(path, threads)

    def prefill() -> None:
        engine.clear()
        engine.prefill(PREFILL)

    prefill()
    result = {"prefill_512_tok_per_s": PREFILL / best(prefill)}
    for batch in (1, 8):
        times = []
        for _ in range(REPEATS):
            engine.clear()
            for sequence in range(batch):
                engine.prefill(INPUT, sequence)
            start = time.perf_counter()
            for step in range(OUTPUT):
                engine.decode([(INPUT + step, sequence, True) for sequence in range(batch)])
            times.append(time.perf_counter() - start)
        result[f"decode_b{batch}_tok_per_s"] = batch * OUTPUT / min(times)
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
