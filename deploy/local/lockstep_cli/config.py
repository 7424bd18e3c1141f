"""The settings of `lockstep up`, and how its command line is read."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep_cli.models import DEFAULT_MODEL
from lockstep_common.config import build_parser, resolve, setting, shown
from lockstep_common.errors import ConfigError

ENV_PREFIX = "LOCKSTEP_UP_"
_DESCRIPTION = """Serves a model on this machine: starts workers, schedulers, a router and Valkey as separate processes,
and looks after them until SIGINT or SIGTERM. What is not set here can be set for the services through their own variables
(LOCKSTEP_WORKER_..., LOCKSTEP_SCHEDULER_..., LOCKSTEP_ROUTER_...)."""


@dataclass(frozen=True)
class UpConfig:
    """Everything that `lockstep up` can be told."""

    model: str = setting(
        DEFAULT_MODEL, "directory in Hugging Face's format, .gguf file, or a name of `lockstep model list`"
    )
    served_model_name: str = setting("", "name of the model for clients (default: its own)", metavar="NAME")
    dp: int = setting(1, "data-parallel ranks, --cp workers each; also --data-parallel-size", metavar="N")
    cp: int = setting(
        1, "workers that share a rank's requests and KV cache (context parallelism), for long contexts", metavar="N"
    )
    lockstep: str = setting(
        "auto",
        "auto: ranks step together if the model has routed experts; always: even if not",
        choices=("auto", "always"),
    )
    shards: int = setting(
        1,
        "schedulers that drive one group together, each a part of its DP ranks; the first counts the votes",
        metavar="N",
    )
    tensor_parallel_size: int = setting(1, "1; attention is data parallel here, see --dp", metavar="N")
    dtype: str = setting("auto", "of weights and activations", choices=("auto", "float32", "bfloat16", "float16"))
    kv_cache_dtype: str = setting(
        "auto", "of the KV cache; auto: as dtype; fp8: 8 bits, on CUDA", choices=("auto", "fp8", "fp8_e4m3")
    )
    device: str = setting("auto", "auto: cuda if there is one", choices=("auto", "cpu", "cuda"))
    max_model_len: int = setting(0, "longest prompt + answer in tokens; 0: the model's", metavar="TOKENS")
    max_num_seqs: int = setting(0, "requests that a worker runs at once; 0: by device, 64 to 256", metavar="N")
    max_num_batched_tokens: int = setting(
        0, "prompt tokens in one step of a worker; 0: by device, 2048 or 8192", metavar="TOKENS"
    )
    block_size: int = setting(0, "tokens in a block of the KV cache; 0: 64 on CUDA, 16 on the CPU", metavar="TOKENS")
    kv_cache_memory_gb: float = setting(0.0, "KV cache of a worker; 0: a sensible share of the memory", metavar="GB")
    threads: int = setting(0, "CPU threads of a worker; 0: the cores divided by the workers", metavar="N")
    vote_interval_ms: float = setting(
        0.0, "how often running requests make room for waiting ones (0: 40, on a CPU 160)", metavar="MS"
    )
    num_redundant_experts: int = setting(
        0, "slots beyond one for each routed expert, over all workers: a hot expert then stands on several", metavar="N"
    )
    enable_eplb: bool = setting(
        False, "move routed experts between workers while they serve, so that all have the same load"
    )
    eplb_window: int = setting(1000, "steps in which what is known of an expert's load fades to a third", metavar="N")
    eplb_interval_s: float = setting(60.0, "between two plans of where experts lie", metavar="SECONDS")
    eplb_threshold: float = setting(
        1.1, "heaviest worker's load over the mean above which a layer's experts move", metavar="RATIO"
    )
    enable_dbo: bool = setting(
        False, "dual-batch overlap: large steps are computed as two halves, and tokens of one travel under the other"
    )
    dbo_decode_token_threshold: int = setting(
        32, "rows of the busiest rank from which on decode steps are", metavar="N"
    )
    dbo_prefill_token_threshold: int = setting(
        512, "prompt tokens of the busiest rank from which on prefill steps are", metavar="N"
    )
    seed: int = setting(-1, "of the generator that gives requests without a seed theirs; -1: a random one", metavar="N")
    redis_url: str = setting("", "redis://..., or none (default: a private Valkey)", metavar="URL")
    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "of the REST interface; 0: any free one")
    grpc_port: int = setting(8001, "of the gRPC interface; 0: none")
    api_key: str = setting("", "key that clients must send", secret=True, metavar="KEY")
    log_dir: str = setting("", "where the processes' logs go (default: in the cache directory)", metavar="DIR")
    log_level: str = setting("INFO", "of the processes' logs", choices=("DEBUG", "INFO", "WARNING", "ERROR"))
    start_timeout_s: int = setting(600, "give up if it is not ready by then", metavar="SECONDS")

    def __post_init__(self) -> None:
        if self.tensor_parallel_size != 1:
            raise ConfigError(
                f"--tensor-parallel-size {self.tensor_parallel_size}: Lockstep does not split attention by heads. "
                f"Use --dp {max(self.tensor_parallel_size, 2)}: attention is data parallel, and the experts of a mixture of "
                "experts are sharded over all workers. A dense model runs on one GPU per replica: --dp N makes N replicas."
            )
        for name in ("dp", "cp", "shards", "start_timeout_s"):
            self._check(name, at_least=1)
        sizes = ("max_num_seqs", "max_model_len", "max_num_batched_tokens", "kv_cache_memory_gb", "block_size")
        for name in (*sizes, "threads", "port", "grpc_port"):
            self._check(name, at_least=0)
        if self.vote_interval_ms < 0:
            raise ConfigError(f"--vote-interval-ms {self.vote_interval_ms}: must not be negative")
        self._check("num_redundant_experts", at_least=0)
        self._check("eplb_window", at_least=1)
        self._check("eplb_interval_s", at_least=0)
        for name in ("eplb_threshold", "dbo_decode_token_threshold", "dbo_prefill_token_threshold"):
            self._check(name, at_least=1)
        if self.redis_url and self.redis_url != "none" and "://" not in self.redis_url:
            raise ConfigError(f"--redis-url {self.redis_url!r}: expected a URL such as redis://host:6379/0, or none")
        if self.port == self.grpc_port and self.port != 0:
            raise ConfigError(f"--port and --grpc-port are both {self.port}")

    def _check(self, name: str, *, at_least: int) -> None:
        value = getattr(self, name)
        if value < at_least:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: must be at least {at_least}")


def parse_up(argv: Sequence[str]) -> UpConfig:
    """The settings of one command line; also answers --help and --print-config. Faults exit with 2."""
    parser = build_parser(UpConfig, prog="lockstep up", env_prefix=ENV_PREFIX, description=_DESCRIPTION)
    parser.add_argument("positional_model", metavar="MODEL", nargs="?", help="the same as --model")
    parser.add_argument("-dp", "--data-parallel-size", dest="dp", metavar="N", help="the same as --dp")
    parser.add_argument("-cp", "--context-parallel-size", dest="cp", metavar="N", help="the same as --cp")
    parser.add_argument("-tp", dest="tensor_parallel_size", metavar="N", help="the same as --tensor-parallel-size")
    args = parser.parse_args(argv)
    given = vars(args)
    positional = given.pop("positional_model")
    if positional and given["model"] and given["model"] != positional:
        parser.error(f"two models: {positional} and --model {given['model']}")
    given["model"] = given["model"] or positional
    try:
        config = resolve(UpConfig, given, env_prefix=ENV_PREFIX, env=os.environ)
    except ConfigError as error:
        parser.exit(2, f"lockstep up: {error.message}\n")
    if args.print_config:
        print(json.dumps(shown(config), indent=2))
        sys.exit(0)
    return config


def model_name(config: UpConfig, directory: Path) -> str:
    """What clients call the model."""
    return config.served_model_name or directory.name
