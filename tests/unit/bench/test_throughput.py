"""Workloads, rows, comparison with peers, and the file that keeps rows: everything of `bench throughput` without an engine."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lockstep_bench import peer, reference, report, results, shapes, skew
from lockstep_bench.engine import Settings
from lockstep_bench.results import Results
from lockstep_bench.throughput import row
from lockstep_bench.workloads import WORKLOADS, Workload, parse, prompts
from lockstep_common.errors import ConfigError

H200 = "NVIDIA H200"
NOT_ON_THE_GPU_IMAGE = ("fastapi", "redis", "pydantic", "httptools", "openai", "tokenizers", "lockstep_router", "torch")


def test_workloads_by_name_and_of_ones_own() -> None:
    assert parse(["decode_b1", "tiny=4x32x8"]) == [WORKLOADS["decode_b1"], Workload("tiny", 4, 32, 8)]
    assert [WORKLOADS[name].metric for name in ("decode_b1", "decode_b64", "prefill_4k")] == ["ms_per_tok", "out_tok_s", "in_tok_s"]  # fmt: skip
    for word in ("decode", "a=1x2", "a=0x1x1", "=1x1x1", ""):
        with pytest.raises(ConfigError, match="work"):
            parse([word])


def test_prompts_differ_and_leave_the_ends_of_the_vocabulary_alone() -> None:
    rng = np.random.default_rng(0)
    found = prompts(rng, 5, 7, 100)
    assert len(found) == 5 and all(
        len(p) == 7 and p.dtype == np.uint32 and p.min() >= 10 and p.max() < 90 for p in found
    )
    assert not np.array_equal(found[0], prompts(rng, 1, 7, 100)[0])
    with pytest.raises(ConfigError, match="too small"):
        prompts(rng, 1, 1, 20)


def test_a_row_has_the_median_and_a_lone_request_its_time_per_token() -> None:
    found = row(WORKLOADS["decode_b64"], [3.0, 1.0, 2.0], 0.0)
    assert found["s"] == 2.0 and found["out_tok_s"] == 64 * 128 / 2 and found["in_tok_s"] == 64 * 1024 / 2
    assert found["runs_s"] == [3.0, 1.0, 2.0] and "ms_per_tok" not in found
    lone = row(WORKLOADS["decode_b1"], [1.275 + 0.01] * 3, 0.01)
    assert lone["ms_per_tok"] == pytest.approx(1.275 / 255 * 1e3, abs=1e-4)


def test_recorded_peers_have_a_figure_for_each_cell_with_a_goal() -> None:
    known = reference.load(H200)
    ours = [cell for cell in known.cells if cell["work"] != reference.STARTUP]
    rows = [{**r, reference.metric_of(r): 1.0} for r in ours]
    lines = reference.compare(rows, known)
    assert len(lines) == 24 and all(line["peer"] and line["ratio"] and line["goal"] for line in lines)
    assert all(line["against"].startswith("vLLM 0.25.1") for line in lines)
    assert reference.load("some other card") is reference.NOTHING


def test_ratios_are_above_one_where_lockstep_is_better() -> None:
    known = reference.load(H200)
    fast = {"model": "llama-3.1-8b", "work": "decode_b1", "ms_per_tok": 4.0}
    wide = {"model": "llama-3.1-8b", "work": "decode_b64", "out_tok_s": 3272.0}
    started = {"model": "llama-3.1-8b", "startup_s": 25.0}
    lines = reference.compare([fast, wide, started], known)
    assert lines[0]["ratio"] == pytest.approx(4.9102 / 4.0) and lines[0]["share of limit"] == pytest.approx(3.6 / 4.0)
    assert lines[1]["ratio"] == pytest.approx(3272 / 3271.6)
    assert lines[2]["ratio"] == pytest.approx(59.1 / 25) and lines[2]["goal"] == 20
    verdicts = {goal.name: goal.met for goal in reference.goals([fast, wide, started], known)}
    assert verdicts == {"llama-3.1-8b decode_b1": True, "llama-3.1-8b decode_b64": False, "llama-3.1-8b startup": False}


def test_a_peer_measured_beside_us_counts_more_than_a_recorded_one() -> None:
    ours = {"model": "llama-3.1-8b", "work": "decode_b64", "out_tok_s": 100.0}
    theirs = {"engine": "vLLM 9", "model": "llama-3.1-8b", "work": "decode_b64", "out_tok_s": 50.0}
    [line] = reference.compare([ours], reference.load(H200), [theirs])
    assert (line["ratio"], line["against"]) == (2.0, "vLLM 9")


def test_two_ranks_are_another_cell_than_one() -> None:
    rows = [{"model": "qwen3-30b-a3b", "work": "mixed_512", "dp": dp, "out_tok_s": 17073.4} for dp in (1, 2)]
    one, two = reference.compare(rows, reference.load(H200))
    assert one["peer"] is None and two["ratio"] == 1.0 and two["model"] == "qwen3-30b-a3b x2"


def test_rows_with_options_lie_beside_those_without() -> None:
    plain = {"model": "m", "work": "a", "dp": 2, "out_tok_s": 1.0}
    moving = plain | {"options": "--enable-eplb --zipf 0.3"}
    assert results.merged([plain], [moving]) == [plain, moving] and results.merged([moving], [moving]) == [moving]
    [line] = reference.compare([moving], reference.NOTHING)
    assert line["model"] == "m x2 --enable-eplb --zipf 0.3"


def test_skewed_gates_make_some_experts_busy_and_are_the_same_on_all_workers() -> None:
    experts, chosen, tokens = 64, 4, 2000
    assert (skew.scales(experts, 0.0, 1, 2) == 1).all()
    factors = skew.scales(experts, 0.3, 1, 2)
    assert np.array_equal(factors, skew.scales(experts, 0.3, 1, 2))
    assert not np.array_equal(factors, skew.scales(experts, 0.3, 1, 3))
    logits = np.random.default_rng(0).standard_normal((tokens, experts)) * factors
    counts = np.bincount(np.argpartition(logits, -chosen, 1)[:, -chosen:].ravel(), minlength=experts)
    busiest = np.sort(counts)[::-1] / counts.mean()
    assert busiest[0] > 4 and busiest[: experts // 4].sum() > 0.5 * experts and counts.argmax() == factors.argmax()


def test_a_ratio_against_an_untuned_peer_says_so() -> None:
    [note] = reference.notes([{"model": "qwen3-30b-a3b", "work": "decode_b64"}], reference.load(H200))
    assert "not tuned" in note


def kept(path: Path, expected: list[tuple[str, str]]) -> Results:
    return Results(path, {"dtype": "auto"}, expected, lambda line: None)


def test_every_row_is_in_the_file_at_once_and_later_runs_add_to_it(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    first = kept(path, [("m", "decode_b64"), ("m", "mixed_256")])
    cell = {"model": "m", "work": "decode_b64", "dtype": "bfloat16", "dp": 1, "device": "cpu", "out_tok_s": 1.0}
    first.add(cell)
    doc = json.loads(path.read_text())
    assert [r["out_tok_s"] for r in doc["rows"]] == [1.0] and {"card", "date", "commit"} <= set(doc["rows"][0])
    assert first.missing == ["m mixed_256"] and first.exit_code(check=False) == 1
    second = kept(path, [("m", "decode_b64")])
    second.add(cell | {"out_tok_s": 2.0})
    second.add({"model": "n", "startup_s": 3.0, "dtype": "bfloat16", "dp": 1, "device": "cpu"})
    second.add_peer({"engine": "vLLM 9", "model": "m", "work": "decode_b64", "out_tok_s": 4.0})
    rows = json.loads(path.read_text())["rows"]
    assert [r.get("out_tok_s") for r in rows] == [2.0, None, 4.0]
    assert second.missing == [] and second.exit_code(check=False) == 0


@pytest.mark.parametrize(
    "text", ["no json", "[]", '{"benchmark": "overhead", "rows": []}', '{"benchmark": "throughput"}']
)
def test_a_file_that_is_something_else_is_not_overwritten(tmp_path: Path, text: str) -> None:
    path = tmp_path / "out.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="another one"):
        results.earlier(path)
    assert path.read_text() == text


def test_a_cut_write_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.json"
    report.write(path, {"rows": [1]})

    def cut(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", cut)
    with pytest.raises(KeyboardInterrupt):
        report.write(path, {"rows": [1, 2]})
    assert json.loads(path.read_text()) == {"rows": [1]}


def test_shapes_are_found_by_name_and_by_path(tmp_path: Path) -> None:
    assert set(shapes.names()) == {"deepseek-v2-lite", "llama-3.1-8b", "qwen3-30b-a3b", "smollm2-135m"}
    assert shapes.config("llama-3.1-8b")["hidden_size"] == 4096
    (tmp_path / "config.json").write_text("{}")
    assert shapes.resolve(str(tmp_path)) == tmp_path.resolve()
    with pytest.raises(ConfigError, match="smollm2-135m"):
        shapes.resolve(str(tmp_path / "missing"))


def test_lengths_are_bounded_by_the_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 512}')
    assert Settings(tmp_path).length == 512
    assert Settings(shapes.resolve("llama-3.1-8b")).length == 8192


def test_the_offline_commands_need_only_what_the_gpu_image_has() -> None:
    script = (
        "import sys, importlib; main = importlib.import_module('lockstep_bench.__main__')\n"
        "for name in ('throughput', 'kernels'): importlib.import_module(f'lockstep_bench.commands.{name}')\n"
        "importlib.import_module('lockstep_bench.inference'); importlib.import_module('lockstep_cli.client')\n"
        f"print([name for name in {NOT_ON_THE_GPU_IMAGE!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_scheduler_needs_no_redis_client() -> None:
    script = (
        "import sys, lockstep_scheduler.__main__; print(sorted({'redis', 'fastapi', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


async def test_a_peer_that_is_not_installed_is_said_to_be_missing(tmp_path: Path) -> None:
    for python in (tmp_path / "bin" / "python", Path(sys.executable)):
        with pytest.raises(peer.NotInstalled, match="--peer-venv"):
            async for _ in peer.vllm(python, Settings(shapes.resolve("smollm2-135m")), [], {}):
                pass
