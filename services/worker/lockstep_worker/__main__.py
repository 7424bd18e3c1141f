"""`python -m lockstep_worker`: loads a model and serves worker.proto until SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from lockstep_common import collector, config, logs, rpc
from lockstep_common.errors import ConfigError
from lockstep_kernels.bits import differing_ops
from lockstep_worker import memory
from lockstep_worker.collectives import Place
from lockstep_worker.config import WorkerConfig
from lockstep_worker.driver import Driver
from lockstep_worker.exchange.backends import choose_backend
from lockstep_worker.exchange.placement import WHOLE, Sharding
from lockstep_worker.loaded import Loaded, Mark, cuda_mark
from lockstep_worker.metrics import expose
from lockstep_worker.models import Model, load_model
from lockstep_worker.null import NullModel, NullSampler
from lockstep_worker.protocol import PlanLog
from lockstep_worker.runner import Runner
from lockstep_worker.sampling import LogprobsMode, Sampler, SamplingRows, TokenSampler
from lockstep_worker.server import serve
from lockstep_worker.weights import ConfigFile

log = logging.getLogger("lockstep_worker")

_LOG_EVERY_S = 5.0
_KERNELS_SINCE = (9, 0)  # compute capability
_SWITCH_S = 0.0005  # how long a thread may keep the others from the interpreter; plans must not wait for 5 ms


def main() -> None:
    settings = config.load(WorkerConfig, prog="lockstep-worker", env_prefix="LOCKSTEP_WORKER_")
    run(settings, partial(load, settings))


def run(settings: WorkerConfig, load: Callable[[Callable[[float, str], None]], Loaded]) -> None:
    """Serves what `load` loads; ends the process."""
    logs.setup("worker", settings.log_level)
    sys.setswitchinterval(_SWITCH_S)
    collector.settle()
    security = rpc.Security(settings.tls_cert, settings.tls_key, settings.tls_ca, settings.internal_token)
    runner = Runner(
        load,
        collective_deadline_s=settings.collective_deadline_s,
        reform_timeout_s=settings.reform_timeout_s,
        debug_collectives=settings.debug_collectives,
    )
    driver = Driver(runner, PlanLog(), timeline=runner.timeline)
    runner.report = driver.report
    if settings.metrics_port:
        expose(driver, settings.host, settings.metrics_port)
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as asynchronous:
            code = asynchronous.run(serve(driver, f"{settings.host}:{settings.port}", security))
    except ConfigError as error:
        sys.exit(f"lockstep-worker: {error.message}")
    sys.exit(code)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's where it is installed (the extra `uvloop`): outcomes leave 0.1 ms sooner. Else Python's own."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def load(settings: WorkerConfig, progress: Callable[[float, str], None]) -> Loaded:
    """The model that the settings name, and the sizes that fit beside it. ConfigError says what cannot be."""
    device = choose_device(settings.device)
    settings = with_limits(settings, device)
    deterministic = settings.deterministic == "on" or (settings.deterministic == "auto" and device.type == "cpu")
    torch.manual_seed(settings.seed)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    model: Model
    make_sampler: Callable[[SamplingRows], Sampler]
    mark: Callable[[], Mark] | None
    if settings.null_step_ms >= 0:
        torch.set_num_threads(settings.threads or 1)
        dtype = torch.float32
        model = null = NullModel(
            settings.null_step_ms,
            vocab_size=settings.null_vocab_size,
            max_model_len=settings.null_max_model_len,
            device=device,
        )
        make_sampler, mark = (lambda rows: NullSampler()), (null.mark if settings.null_step_ms else None)
    else:
        path = Path(settings.model).expanduser()
        dtype = choose_dtype(settings.dtype, declared_dtype(path), device)
        log.info("loading %s as %s on %s", path, dtype, device)
        model = load_model(
            path,
            dtype=dtype,
            device=device,
            deterministic=deterministic,
            progress=_loading(settings.name, progress),
            dummy_weights=settings.load_format == "dummy",
            kv_dtype=choose_kv_dtype(settings.kv_cache_dtype, device),
            sharding=choose_sharding(settings, dtype, device, deterministic),
        )
        deterministic = deterministic and keeps_bits(model, dtype, device)
        make_sampler = partial(TokenSampler, logprobs_mode=LogprobsMode(settings.logprobs_mode))
        mark = cuda_mark if device.type == "cuda" else None
    block_size = settings.block_size or (64 if device.type == "cuda" else 16)
    max_model_len = settings.max_model_len or model.max_model_len
    if max_model_len > model.max_model_len:
        raise ConfigError(f"max_model_len {max_model_len} is above the model's {model.max_model_len}")
    graphs = device.type == "cuda" and settings.null_step_ms < 0 and not settings.enforce_eager
    sizes = memory.Sizes(block_size, settings.max_num_seqs, max_model_len, settings.max_num_batched_tokens, settings.cp)
    return Loaded(
        model=model,
        make_sampler=make_sampler,
        name=settings.name,
        dtype=str(dtype).removeprefix("torch."),
        device=device,
        deterministic=deterministic,
        max_rows=settings.max_num_seqs,
        max_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=_kv_blocks(settings, model, sizes, device, graphs),
        mark=mark,
        graphs=graphs,
        place=Place(settings.dp, settings.cp, settings.rank),
        nccl=settings.collectives == "auto",
    )


def _loading(name: str, progress: Callable[[float, str], None]) -> Callable[[float, int], None]:
    """Says how far loading is and how fast, to whoever watches and now and then in the log."""
    started = logged = time.monotonic()

    def report(share: float, read: int) -> None:
        nonlocal logged
        now = time.monotonic()
        speed = read / max(now - started, 1e-3) / 1e9
        message = f"loading {name}: {share:.0%}, {read / 1e9:.1f} GB, {speed:.1f} GB/s"
        progress(share, message)
        if share >= 1 or now - logged > _LOG_EVERY_S:
            logged = now
            log.info("%s", message)

    return report


def _kv_blocks(settings: WorkerConfig, model: Model, sizes: memory.Sizes, device: torch.device, graphs: bool) -> int:
    if device.type == "cpu" or settings.null_step_ms >= 0:
        return memory.kv_blocks_on_cpu(model.kv_specs(), sizes, model.vocab_size, settings.kv_cache_memory_gb)
    return memory.kv_blocks_on_cuda(
        model,
        sizes,
        device,
        graphs=graphs,
        memory_gb=settings.kv_cache_memory_gb,
        utilization=settings.gpu_memory_utilization,
    )


def keeps_bits(model: Model, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a row's bits depend on nothing but the row, with this model on this device; if not, the log says why."""
    if not model.deterministic:
        log.warning(
            "deterministic: not kept by %s on %s; results are valid, but may differ from run to run",
            model.name,
            device.type,
        )
        return False
    if device.type != "cpu" or not (differing := differing_ops(dtype)):
        return True
    log.warning(
        "deterministic: not kept on this CPU, whose bits of %s depend on the batch; results are valid, but may differ from run to run",
        " and ".join(differing),
    )
    return False


def choose_sharding(settings: WorkerConfig, dtype: torch.dtype, device: torch.device, deterministic: bool) -> Sharding:
    """Which share of routed experts this worker's place has, and how tokens get there."""
    place = Place(settings.dp, settings.cp, settings.rank)
    if place.size == 1:
        return WHOLE
    nccl = settings.collectives == "auto"
    captures = device.type == "cuda" and not settings.enforce_eager
    backend = choose_backend(
        settings.all2all_backend, device, dtype, nccl=nccl, deterministic=deterministic, captures=captures
    )
    tokens, rows = settings.max_num_batched_tokens, settings.max_num_seqs if captures else 0
    return Sharding(place.size, place.rank, settings.num_redundant_experts, backend, tokens, rows)


def choose_device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda: torch finds no CUDA device")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", 0)
    if (capability := torch.cuda.get_device_capability(device)) < _KERNELS_SINCE:
        raise ConfigError(
            f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}; the kernels are made "
            f"for {_KERNELS_SINCE[0]}.{_KERNELS_SINCE[1]} and above (H100, H200, B200). --device cpu runs on the CPU"
        )
    return device


def with_limits(settings: WorkerConfig, device: torch.device) -> WorkerConfig:
    """The settings with rows and tokens of a pass that suit the device, where they leave them open (0)."""
    on_gpu = device.type == "cuda" and settings.null_step_ms < 0
    total = torch.cuda.get_device_properties(device).total_memory if on_gpu else 0
    rows, tokens = memory.default_limits(total)
    return replace(
        settings,
        max_num_seqs=settings.max_num_seqs or rows,
        max_num_batched_tokens=settings.max_num_batched_tokens or tokens,
    )


def choose_kv_dtype(name: str, device: torch.device) -> torch.dtype | None:
    """The dtype of the KV cache; None: as the weights."""
    if name == "auto":
        return None
    if device.type != "cuda":
        raise ConfigError(f"kv_cache_dtype {name} on a {device.type}: a cache of 8 bits needs CUDA; use auto")
    return torch.float8_e4m3fn


def declared_dtype(path: Path) -> str:
    """What the model's config.json says its weights are; empty if it does not."""
    file = ConfigFile(path)
    return str(file.get("dtype") or file.get("torch_dtype") or "")


def choose_dtype(name: str, declared: str, device: torch.device) -> torch.dtype:
    """The dtype of weights and activations; auto: as declared, on a CPU float16 becomes bfloat16."""
    if name == "auto":
        name = declared or "bfloat16"
        if device.type == "cpu" and name == "float16":
            name = "bfloat16"
    if device.type == "cpu" and name == "float16":
        raise ConfigError("float16 on a CPU: CPUs have no float16 arithmetic; use bfloat16 or float32")
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in dtypes:
        raise ConfigError(f"dtype {name} of config.json is not one of {', '.join(dtypes)}: give --dtype")
    return dtypes[name]


if __name__ == "__main__":
    main()
