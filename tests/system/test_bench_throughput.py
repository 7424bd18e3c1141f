"""`lockstep bench throughput` and `serve` over gRPC against real processes, and the profile of a running worker."""

import gzip
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep_bench import serve, shapes
from lockstep_bench.client import SchedulerSession
from lockstep_bench.processes import HOST, free_port, http_get
from lockstep_bench.throughput import Bench, timed
from lockstep_bench.workloads import Workload, prompts
from lockstep_cli.client import record_profile
from lockstep_common.errors import Conflict, DeadlineExceeded, InvalidRequest, LockstepError
from tests.system.harness import SCRIPTED, stack
from tests.tiny_model import make_tiny_model

SMALL = {"max_num_seqs": 8, "max_model_len": 256}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


BLOCKED = ("fastapi", "starlette", "uvicorn", "redis", "hiredis", "pydantic", "httptools", "orjson", "openai", "xgrammar", "gguf", "tokenizers")  # fmt: skip
BLOCKER = f"""
import importlib.abc, sys
class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {BLOCKED!r}:
            raise ModuleNotFoundError(f"{{name}} is not on this machine", name=name)
sys.meta_path.insert(0, Blocker())
"""


def throughput(*flags: str | Path) -> subprocess.CompletedProcess[str]:
    """The command, and what it starts, on a machine that has no package but those of the GPU image."""
    with tempfile.TemporaryDirectory() as blocker:
        Path(blocker, "sitecustomize.py").write_text(BLOCKER)
        command = [sys.executable, "-m", "lockstep_bench", "throughput", *map(str, flags)]
        env = os.environ | {"PYTHONPATH": blocker}
        return subprocess.run(command, capture_output=True, text=True, timeout=200, env=env)


def dummy(model: Path) -> list[str | Path]:
    return ["--model", model, "--dtype", "float32", "--max-num-seqs", "8", "--worker-flags", "--threads 1"]


def test_engines_are_started_timed_and_kept(model: Path, tmp_path: Path) -> None:
    config_only = tmp_path / "shape"
    config_only.mkdir()
    (config_only / "config.json").write_bytes((model / "config.json").read_bytes())
    out, traces = tmp_path / "out.json", tmp_path / "traces"
    done = throughput(
        *dummy(config_only), "--work", "lone=1x8x24", "--work", "many=12x16x24", "--work", "read=4x64x1", "--json", out,
        "--profile", traces, "--profile-steps", "4",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [(r["model"], r.get("work")) for r in rows] == [("shape", w) for w in (None, "lone", "many", "read")]
    startup, lone, many, read = rows
    assert 0 < startup["startup_s"] < 60 and lone["ms_per_tok"] > 0
    assert many["out_tok_s"] == pytest.approx(12 * 24 / many["s"], rel=0.01)
    assert read["in_tok_s"] == pytest.approx(4 * 64 / read["s"], rel=0.01)
    assert all(r["counters"]["plans"] > 0 and r["device"] == "cpu" and r["dtype"] == "float32" for r in rows[1:])
    assert all(word in done.stdout for word in ("lone", "ms/token", "many", "startup"))
    for work in ("lone", "many", "read"):
        events = json.loads(gzip.decompress((traces / f"shape-{work}.json.gz").read_bytes()))["traceEvents"]
        names = {str(e.get("name", "")).split(" ")[0] for e in events if e.get("cat") == "lockstep"}
        assert names >= {"plan", "apply", "launch", "outcome"}
        assert any(str(e.get("name")).startswith("aten::") for e in events)


def moe_shape(folder: Path) -> Path:
    """A directory with the config.json of a small mixture of experts."""
    model = folder / "moe"
    model.mkdir()
    small = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 128, "moe_intermediate_size": 32, "num_experts": 16, "num_experts_per_tok": 4,
        "vocab_size": 512, "max_position_embeddings": 512,
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(shapes.config("qwen3-30b-a3b") | small))
    return model


def test_experts_of_a_decode_step_are_counted(tmp_path: Path) -> None:
    model, out = moe_shape(tmp_path), tmp_path / "out.json"
    done = throughput(*dummy(model), "--work", "lone=1x8x8", "--work", "many=8x8x12", "--work", "read=2x8x1", "--experts", "--json", out)  # fmt: skip
    assert done.returncode == 0, done.stderr
    lone, many, read = json.loads(out.read_text())["rows"][1:]
    assert (lone["distinct_experts"], lone["routed_experts"]) == (4.0, 16)
    assert 4 < many["distinct_experts"] <= 16 and "distinct_experts" not in read


@pytest.mark.slow
def test_a_group_that_shares_experts_out_is_started_with_its_options(tmp_path: Path) -> None:
    model = moe_shape(tmp_path)
    out = tmp_path / "out.json"
    done = throughput(
        *dummy(model), "--dp", "2", "--work", "many=8x8x24", "--enable-eplb", "--num-redundant-experts", "2", "--enable-dbo",
        "--zipf", "0.3", "--max-window", "4", "--host-time", "--json", out,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    startup, many = json.loads(out.read_text())["rows"]
    assert startup["dp"] == many["dp"] == 2 and many["out_tok_s"] > 0
    assert many["options"] == "--enable-eplb --enable-dbo --num-redundant-experts 2 --zipf 0.3"
    assert many["host_per_step"]["plans"] > 0
    alone = throughput(*dummy(model), "--work", "many=8x8x12", "--enable-eplb")
    assert alone.returncode == 1 and "need --dp: one worker has all experts" in alone.stderr


@pytest.mark.slow
def test_what_fails_does_not_stop_the_others_and_the_limit_loses_nothing(model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"architectures": ["Nobody"], "max_position_embeddings": 64}')
    out = tmp_path / "out.json"
    done = throughput("--model", broken, *dummy(model), "--work", "a=2x8x4", "--json", out)
    assert done.returncode == 1 and "Nobody" in done.stderr and "not measured: broken a" in done.stderr
    assert [r["model"] for r in json.loads(out.read_text())["rows"]] == ["tiny", "tiny"]
    done = throughput(
        *dummy(model), "--work", "a=2x8x4", "--work", "endless=256x8x240", "--time-limit", "9", "--json", out
    )
    assert done.returncode == 1 and "time limit" in done.stderr and "tiny endless" in done.stderr
    assert {r.get("work") for r in json.loads(out.read_text())["rows"]} == {None, "a"}


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ([], "--scheduler"),
        (["--model", "smollm2-135m", "--scheduler", "h:1"], "not both"),
        (["--model", "nobody"], "smollm2-135m"),
        (["--model", "smollm2-135m", "--work", "long=1x9000x1"], "8192"),
        (["--scheduler", "127.0.0.1:1", "--profile", "x"], "--model"),
    ],
)
def test_wrong_questions_are_answered_before_anything_starts(flags: list[str], complaint: str) -> None:
    done = throughput(*flags)
    assert done.returncode == 1 and complaint in done.stderr and "Traceback" not in done.stderr


async def test_requests_submitted_together_are_admitted_in_one_plan(model: Path) -> None:
    port = free_port()
    async with stack(model, worker_module=SCRIPTED, worker=SMALL, scheduler={"metrics_port": port}, with_router=False) as s, s.session() as session:  # fmt: skip
        await Bench(session).seconds(Workload("w", 8, 16, 1))
        status, page = await http_get(HOST, port, "/metrics")
        assert status == 200 and 'lockstep_plans_total{kind="prefill"} 1.0' in page


async def test_a_running_scheduler_is_measured_and_wrong_lengths_are_errors(model: Path) -> None:
    ends = json.dumps([{"match": "*", "tokens": [5, 6], "end": "stop"}])
    script = model.parent / "script.json"
    script.write_text(ends)
    async with stack(model, worker_module=SCRIPTED, worker={**SMALL, "script": script}, with_router=False) as s, s.session() as session:  # fmt: skip
        with pytest.raises(LockstepError, match=r"after 2 of 4 tokens \(stop\)"):
            await Bench(session).seconds(Workload("w", 3, 8, 4))
        with pytest.raises(InvalidRequest, match="vocabulary"):
            await timed(session, [prompts_beyond(session)], 2)
        with pytest.raises(LockstepError, match="300 tokens a sequence"):
            await Bench(session).measure(Workload("w", 1, 299, 1))


def prompts_beyond(session: SchedulerSession) -> Any:
    import numpy as np

    [prompt] = prompts(np.random.default_rng(0), 1, 4, session.vocab_size)
    prompt[0] = session.vocab_size
    return prompt


@pytest.mark.parametrize("door", ["rest", "grpc", "scheduler"])
@pytest.mark.parametrize("rate", [0.0, 200.0])
async def test_every_door_serves_the_same_load(model: Path, door: str, rate: float) -> None:
    async with stack(model, worker_module=SCRIPTED, worker={"step_ms": 2.0, "vocab_size": 320, **SMALL}) as s:
        addresses: dict[str, Callable[[], str]] = {
            "rest": lambda: s.rest.url,
            "grpc": lambda: s.inference,
            "scheduler": lambda: s.schedulers[0].address,
        }
        work = serve.Workload(
            url=addresses[door](), backend=door, num_prompts=10, concurrency=0 if rate else 3, request_rate=rate,
            input_len=9, output_len=7, vocab=(10, 300), warmups=1,
        )  # fmt: skip
        outcome = await serve.run(work)
        assert outcome.errors == ()
        row = serve.summary(work, outcome, {"ttft": 10.0})
        assert row["completed"] == 10 and row["input_tokens"] == 90 and row["output_tokens"] == 70
        assert 2 <= row["ttft_p50_ms"] <= row["e2el_p50_ms"] and row["goodput_per_s"] > 0
        long = serve.Workload(url=work.url, backend=door, num_prompts=2, input_len=500, vocab=(10, 300), warmups=0)
        refused = await serve.run(long)
        assert len(refused.errors) == 2 and "context length" in refused.errors[0]


async def test_a_profile_needs_steps_and_is_taken_one_at_a_time(model: Path) -> None:
    import asyncio

    async with stack(model, worker_module=SCRIPTED, worker={"step_ms": 5.0, **SMALL}, with_router=False) as s:
        address = s.workers[0].address
        with pytest.raises(DeadlineExceeded, match="while requests run"):
            await record_profile(address, 4, timeout_s=0.3)
        stopped: list[bool] = []
        async with s.session() as session:
            load = asyncio.create_task(Bench(session).seconds(Workload("w", 2, 8, 120)))
            first = asyncio.create_task(record_profile(address, 20, recorded=lambda: stopped.append(True)))
            await asyncio.sleep(0.05)
            with pytest.raises(Conflict, match="already"):
                await record_profile(address, 1)
            trace = await first
            await load
        assert trace.steps >= 20
        events = json.loads(gzip.decompress(trace.data))["traceEvents"]
        assert stopped == [True]
        steps = [e for e in events if e.get("cat") == "lockstep" and e["tid"] == 2 and e["ph"] == "X"]
        assert len(steps) >= 18 and all(4000 < e["dur"] < 60_000 for e in steps[1:])
