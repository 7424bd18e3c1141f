"""Settings: which source wins, what is refused, and that secrets stay secret."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from lockstep_common.config import load, setting, shown
from lockstep_common.errors import ConfigError


@dataclass(frozen=True)
class Settings:
    port: int = setting(8000, "a port")
    ratio: float = setting(0.5, "a ratio, 50 % by default")
    fast: bool = setting(True, "a switch")
    name: str = setting("", "a name")
    mode: str = setting("auto", "one of few", choices=("auto", "always"))
    root: Path = setting(Path(), "a directory")
    peers: tuple[str, ...] = setting((), "addresses")
    token: str = setting("", "a secret", secret=True)

    def __post_init__(self) -> None:
        if self.port < 0:
            raise ConfigError(f"port {self.port}: must not be negative")


def read(argv: Sequence[str] = (), env: Mapping[str, str] | None = None) -> Settings:
    return load(Settings, prog="thing", env_prefix="THING_", argv=list(argv), env=env or {})


def file(tmp_path: Path, text: str, name: str = "settings.toml") -> str:
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def test_defaults() -> None:
    assert read() == Settings()


def test_flags_beat_environment_beats_file_beats_defaults(tmp_path: Path) -> None:
    config = file(tmp_path, 'port = 1\nname = "file"\nratio = 0.1\n')
    settings = read(["--config", config, "--port", "3"], {"THING_PORT": "2", "THING_NAME": "environment"})
    assert (settings.port, settings.name, settings.ratio, settings.mode) == (3, "environment", 0.1, "auto")


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.toml", 'port = 5\npeers = ["a:1", "b:2"]'), ("a.json", '{"port": 5, "peers": ["a:1", "b:2"]}')],
)
def test_toml_and_json_files(tmp_path: Path, name: str, text: str) -> None:
    settings = read(["--config", file(tmp_path, text, name)])
    assert (settings.port, settings.peers) == (5, ("a:1", "b:2"))


def test_keys_of_a_file_may_have_dashes(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Other:
        max_num_seqs: int = setting(1, "many")

    path = file(tmp_path, "max-num-seqs = 9")
    assert load(Other, prog="thing", env_prefix="T_", argv=["--config", path], env={}).max_num_seqs == 9


def test_every_type_from_flags() -> None:
    argv = ["--port", "1", "--ratio", "2.5", "--no-fast", "--name", "n", "--mode", "always", "--root", "/tmp"]
    argv += ["--peers", "a:1,b:2", "--token", "t"]
    assert read(argv) == Settings(1, 2.5, False, "n", "always", Path("/tmp"), ("a:1", "b:2"), "t")


@pytest.mark.parametrize(("word", "value"), [("1", True), ("true", True), ("ON", True), ("0", False), ("no", False)])
def test_switches_from_the_environment(word: str, value: bool) -> None:
    assert read(env={"THING_FAST": word}).fast is value


def test_an_empty_list_is_empty() -> None:
    assert read(env={"THING_PEERS": ""}).peers == ()


@pytest.mark.parametrize(
    ("argv", "env", "complaint"),
    [
        (["--port", "many"], {}, "--port"),
        ([], {"THING_PORT": "many"}, "THING_PORT"),
        ([], {"THING_FAST": "perhaps"}, "THING_FAST"),
        (["--ratio", "half"], {}, "--ratio"),
        (["--mode", "never"], {}, "auto, always"),
        (["--port", "-1"], {}, "negative"),
        (["--prot", "1"], {}, "--prot"),
        (["--po", "1"], {}, "--po"),
        (["--config", "/nowhere/at-all.toml"], {}, "/nowhere/at-all.toml"),
    ],
)
def test_refusals_name_the_source_and_exit_with_2(
    argv: list[str], env: dict[str, str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        read(argv, env)
    assert exit.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("prot = 1", "unknown setting 'prot'"),
        ("port = ", "settings.toml"),
        ("port = 1.5", "expected int"),
        ("port = true", "expected int"),
        ("name = 3", "expected str"),
    ],
)
def test_files_are_refused_by_name(
    tmp_path: Path, text: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        read(["--config", file(tmp_path, text)])
    err = capsys.readouterr().err
    assert complaint in err and "settings.toml" in err


def test_secrets_are_masked_wherever_settings_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(Settings(token="hunter2"))["token"] == "***"
    assert shown(Settings())["token"] == "", "an unset secret shows that it is unset"
    with pytest.raises(SystemExit) as exit:
        read(["--print-config", "--token", "hunter2"])
    assert exit.value.code == 0
    out = capsys.readouterr().out
    assert "hunter2" not in out and json.loads(out)["token"] == "***"


def test_help_does_not_show_secrets_and_survives_percent_signs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        read(["--help"])
    assert exit.value.code == 0
    out = capsys.readouterr().out
    assert "50 % by default" in out and "[THING_PORT]" in out
