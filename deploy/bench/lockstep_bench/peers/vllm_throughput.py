"""`python vllm_throughput.py ORDER`: the offline workloads on vLLM's LLM class. ORDER is JSON (see `lockstep_bench.peer`).

Times what `lockstep_bench.throughput` times. With load format dummy the weights are drawn as ours are: uniform(-0.035, 0.035),
norms 1, a seed for each tensor. vLLM's own dummy weights send most tokens to the same experts, and decode looks faster than it is.
"""

from __future__ import annotations

import importlib
import json
import random
import sys
import time
import zlib
from typing import Any

RUNS, FIRST_TOKEN_RUNS = 3, 2
_MARGIN = 10
_BOUND = 0.035


def spread_dummy_weights() -> None:
    """Replaces vLLM's filling of dummy weights. Called when this module is imported, since the engine may be a spawned child."""
    torch = importlib.import_module("torch")
    single = importlib.import_module("vllm.model_executor.model_loader.weight_utils").initialize_single_dummy_weight
    loader = importlib.import_module("vllm.model_executor.model_loader.dummy_loader").DummyModelLoader

    def load_weights(self: Any, model: Any, model_config: Any) -> None:
        print(f"dummy weights: uniform(-{_BOUND}, {_BOUND}), norms 1, a seed a tensor", file=sys.stderr, flush=True)
        for name, tensor in model.state_dict().items():
            if "norm" in name and tensor.dim() == 1 and torch.is_floating_point(tensor):
                tensor.fill_(1.0)
            else:
                single(tensor, -_BOUND, _BOUND, zlib.crc32(name.encode()) % 100_000)

    loader.load_weights = load_weights


class Peer:
    def __init__(self, order: dict[str, Any]) -> None:
        vllm = importlib.import_module("vllm")
        start = time.perf_counter()
        self._llm = vllm.LLM(
            model=order["model"],
            load_format=order["load_format"],
            dtype=order["dtype"],
            max_model_len=order["max_model_len"],
            max_num_seqs=order["max_num_seqs"],
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            seed=0,
            **order["options"],
        )
        self.startup_s = round(time.perf_counter() - start, 1)
        self.name = f"vLLM {vllm.__version__}"
        self._params = vllm.SamplingParams
        with open(f"{order['model']}/config.json") as file:  # noqa: PTH123
            self._vocab = json.load(file)["vocab_size"]
        self._rng = random.Random(0)

    def seconds(self, requests: int, prompt: int, output: int) -> float:
        batch = [
            {"prompt_token_ids": [self._rng.randrange(_MARGIN, self._vocab - _MARGIN) for _ in range(prompt)]}
            for _ in range(requests)
        ]
        params = self._params(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        answers = self._llm.generate(batch, params, use_tqdm=False)
        took = time.perf_counter() - start
        if any(len(answer.outputs[0].token_ids) != output for answer in answers):
            raise SystemExit("an answer does not have the length that was asked for")
        return took

    def row(self, work: dict[str, Any]) -> dict[str, Any]:
        requests, prompt, output = work["requests"], work["prompt"], work["output"]
        self.seconds(min(requests, 4), prompt, min(output, 2))
        median = sorted(self.seconds(requests, prompt, output) for _ in range(RUNS))[RUNS // 2]
        found = {
            "engine": self.name,
            "work": work["name"],
            "s": round(median, 4),
            "out_tok_s": round(requests * output / median, 1),
            "in_tok_s": round(requests * prompt / median, 1),
        }
        if work["lone"]:
            first = min(self.seconds(requests, prompt, 1) for _ in range(FIRST_TOKEN_RUNS))
            found["ms_per_tok"] = round((median - first) / (output - 1) * 1e3, 4)
        return found


def main(order: dict[str, Any]) -> None:
    peer = Peer(order)
    print(json.dumps({"engine": peer.name, "startup_s": peer.startup_s}), flush=True)
    peer.seconds(8, min(64, order["max_model_len"] - 8), 8)
    for work in order["works"]:
        print(json.dumps(peer.row(work)), flush=True)


_ORDER: dict[str, Any] = json.loads(sys.argv[1])
if _ORDER["load_format"] == "dummy":
    spread_dummy_weights()
if __name__ == "__main__":
    main(_ORDER)
