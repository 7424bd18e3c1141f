"""What `lockstep up` accepts, and what it says when it does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep_cli.config import UpConfig, model_name, parse_up


def refusal(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as exit:
        parse_up(argv)
    assert exit.value.code == 2
    return capsys.readouterr().err


def test_defaults() -> None:
    assert parse_up([]) == UpConfig()


@pytest.mark.parametrize("argv", [["some/dir"], ["--model", "some/dir"], ["--model=some/dir", "some/dir"]])
def test_the_model_by_flag_or_position(argv: list[str]) -> None:
    assert parse_up(argv).model == "some/dir"


def test_two_different_models_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "two models" in refusal(["one", "--model", "two"], capsys)


@pytest.mark.parametrize("flag", ["--dp", "--data-parallel-size", "-dp"])
def test_names_that_other_servers_use(flag: str) -> None:
    assert parse_up([flag, "2"]).dp == 2


@pytest.mark.parametrize("flag", ["--tensor-parallel-size", "-tp"])
def test_tensor_parallel_says_what_to_use_instead(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_up([flag, "1"]).tensor_parallel_size == 1
    message = refusal([flag, "4"], capsys)
    assert "--dp 4" in message and "data parallel" in message


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        (["--dp", "0"], "--dp"),
        (["--max-num-seqs", "-1"], "--max-num-seqs"),
        (["--max-model-len", "-1"], "--max-model-len"),
        (["--vote-interval-ms", "-1"], "--vote-interval-ms"),
        (["--eplb-threshold", "0.9"], "--eplb-threshold"),
        (["--eplb-interval-s", "-1"], "--eplb-interval-s"),
        (["--redis-url", "localhost"], "--redis-url"),
        (["--port", "9", "--grpc-port", "9"], "--grpc-port"),
        (["--lockstep", "never"], "auto, always"),
        (["--dtype", "int8"], "bfloat16"),
    ],
)
def test_refusals_name_the_setting(argv: list[str], names: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert names in refusal(argv, capsys)


def test_a_file_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "up.toml"
    path.write_text('dp = 3\nport = 9000\nmodel = "x"\n')
    monkeypatch.setenv("LOCKSTEP_UP_PORT", "9001")
    config = parse_up(["--config", str(path)])
    assert (config.dp, config.port, config.model) == (3, 9001, "x")


def test_print_config_masks_the_key(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        parse_up(["--print-config", "--api-key", "hunter2"])
    assert exit.value.code == 0
    out = capsys.readouterr().out
    assert "hunter2" not in out and json.loads(out)["dp"] == 1


def test_the_name_that_clients_use() -> None:
    assert model_name(UpConfig(), Path("/models/llama")) == "llama"
    assert model_name(UpConfig(served_model_name="mine"), Path("/models/llama")) == "mine"
