"""Settings of a worker process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lockstep_common.config import setting
from lockstep_common.errors import ConfigError


@dataclass(frozen=True)
class WorkerConfig:
    """Runs the steps of one GPU (or CPU): rows, KV cache, model, sampling."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(7001, "port to listen on; 0: any (it is in the log)")
    metrics_port: int = setting(0, "port of Prometheus metrics; 0: off")
    log_level: str = setting("INFO", "least severe level to log")

    model: str = setting("", "directory of the model in Hugging Face format", metavar="DIR")
    served_model_name: str = setting("", "name of the model; default: its directory's", metavar="NAME")
    dtype: str = setting("auto", "of weights and activations", choices=("auto", "float32", "bfloat16", "float16"))
    load_format: str = setting(
        "auto",
        "auto: safetensors; dummy: random weights, only config.json is read",
        choices=("auto", "safetensors", "dummy"),
    )
    kv_cache_dtype: str = setting(
        "auto",
        "of the KV cache; auto: as weights and activations; fp8: 8 bits (e4m3), on CUDA",
        choices=("auto", "fp8", "fp8_e4m3"),
    )
    device: str = setting("auto", "auto: CUDA if there is one", choices=("auto", "cpu", "cuda"))
    deterministic: str = setting(
        "auto",
        "a row's bits do not depend on its batch, where model and device can keep that; auto: on the CPU",
        choices=("auto", "on", "off"),
    )
    threads: int = setting(0, "CPU threads of an operation; 0: all cores")
    seed: int = setting(0, "of what is not seeded by a request (random weights)")

    max_num_seqs: int = setting(
        0, "rows: choices that run at once; 0: by device (CPU 64; GPU of 70 GiB 256, of 20 GiB 128, else 64)"
    )
    max_model_len: int = setting(0, "tokens of a sequence; 0: the model's", metavar="LEN")
    max_num_batched_tokens: int = setting(0, "tokens of a prefill pass; 0: by device (GPU of 70 GiB 8192, else 2048)")
    block_size: int = setting(0, "tokens of a KV block; 0: 64 on CUDA, 16 on the CPU")
    kv_cache_memory_gb: float = setting(
        0.0,
        "memory of the KV cache; 0: on CUDA what gpu_memory_utilization leaves, on the CPU enough for all rows, at most a quarter",
    )
    gpu_memory_utilization: float = setting(0.9, "share of the GPU's memory for weights, activations and KV cache")
    enforce_eager: bool = setting(False, "no CUDA graphs: every step launches its kernels one by one")
    logprobs_mode: str = setting(
        "raw_logprobs",
        "logprobs are of the model's distribution, or of the one that tokens are drawn from",
        choices=("raw_logprobs", "processed_logprobs"),
    )

    dp: int = setting(1, "data-parallel ranks of the group that this worker is for", metavar="N")
    cp: int = setting(1, "workers of a data-parallel rank: they share its requests and its KV cache", metavar="N")
    rank: int = setting(0, "this worker's place in the group: dp rank * cp + cp rank", metavar="R")
    num_redundant_experts: int = setting(
        0, "expert slots of a layer, over the whole group, beyond one for each routed expert", metavar="N"
    )
    all2all_backend: str = setting(
        "auto",
        "how tokens reach experts on other workers; auto: deepep where it is installed and takes the model, else symmetric "
        "where GPUs can share memory, else all_to_all",
        choices=("auto", "all_to_all", "symmetric", "deepep"),
    )
    collectives: str = setting(
        "auto",
        "auto: NCCL between GPUs, gloo on the CPU; gloo: through the hosts, as workers need that share a GPU",
        choices=("auto", "gloo"),
    )
    debug_collectives: bool = setting(False, "after each plan all workers compare their collectives; slow")
    collective_deadline_s: float = setting(
        10.0, "after so long a collective is reported with the ranks it misses; on the CPU it fails after twice that"
    )
    reform_timeout_s: float = setting(60.0, "after so long a collective, or forming a group, is given up")

    null_step_ms: float = setting(-1.0, "at least 0: no model; forward and sampling are a wait of so long")
    null_vocab_size: int = setting(32000, "vocabulary of the null model")
    null_max_model_len: int = setting(8192, "tokens of a sequence of the null model")

    tls_cert: str = setting("", "PEM certificate of this server", metavar="FILE")
    tls_key: str = setting("", "PEM key of the certificate", metavar="FILE")
    tls_ca: str = setting("", "PEM authority that callers' certificates must come from", metavar="FILE")
    internal_token: str = setting("", "token that callers must send", secret=True)

    def __post_init__(self) -> None:
        if self.null_step_ms < 0:
            if not self.model:
                raise ConfigError("which model? give --model DIR (or --null-step-ms for a worker without one)")
            if not Path(self.model).expanduser().is_dir():
                raise ConfigError(f"--model {self.model}: no such directory")
        elif self.kv_cache_dtype != "auto":
            raise ConfigError("a worker without a model has no KV cache to keep in 8 bits: give --kv-cache-dtype auto")
        for name in ("dp", "cp"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError("gpu_memory_utilization must be above 0 and at most 1")
        sizes = ("max_num_seqs", "max_model_len", "max_num_batched_tokens", "kv_cache_memory_gb", "block_size")
        for name in (*sizes, "threads", "num_redundant_experts"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative")
        if not 0 <= self.rank < self.dp * self.cp:
            raise ConfigError(f"rank {self.rank} is no place in a group of {self.dp} x {self.cp} workers (dp x cp)")
        if not 0 < self.collective_deadline_s < self.reform_timeout_s:
            raise ConfigError("collective_deadline_s must be positive and below reform_timeout_s")

    @property
    def name(self) -> str:
        """What the model is called."""
        if self.served_model_name:
            return self.served_model_name
        return Path(self.model).expanduser().resolve().name if self.model else "null"
