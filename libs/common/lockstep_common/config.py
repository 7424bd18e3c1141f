"""One frozen dataclass of settings per service, from defaults, a file, the environment and flags (the later wins).

    @dataclass(frozen=True)
    class RouterConfig:
        port: int = setting(8000, "port of the REST interface")
        api_key: str = setting("", "key that clients must send", secret=True)

    config = load(RouterConfig, prog="lockstep-router", env_prefix="LOCKSTEP_ROUTER_", argv=sys.argv[1:])

A field `max_num_seqs` is the flag `--max-num-seqs`, the variable `LOCKSTEP_ROUTER_MAX_NUM_SEQS` and the key `max_num_seqs`
(or `max-num-seqs`) of a TOML or JSON file given with `--config`. Types: str, int, float, bool (`--x` / `--no-x`), Path,
tuple[str, ...] (comma-separated). A dataclass checks what its types cannot say in `__post_init__` and raises ConfigError.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tomllib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from lockstep_common.errors import ConfigError

T = TypeVar("T")


def setting(default: T, help: str, *, secret: bool = False, choices: Sequence[str] = (), metavar: str = "") -> T:
    """A field of a settings dataclass. `secret` values are masked wherever settings are shown."""
    meta = {"help": help, "secret": secret, "choices": tuple(choices), "metavar": metavar}
    return field(default=default, metadata=meta)


def load(
    cls: type[T],
    *,
    prog: str,
    env_prefix: str,
    argv: Sequence[str] | None = None,
    env: Mapping[str, str] | None = None,
    description: str = "",
) -> T:
    """Reads and validates the settings once. `--print-config` prints them (secrets masked) and exits; faults exit with 2."""
    parser = build_parser(cls, prog=prog, env_prefix=env_prefix, description=description)
    args = parser.parse_args(argv)
    try:
        config = resolve(cls, vars(args), env_prefix=env_prefix, env=os.environ if env is None else env)
    except ConfigError as error:
        parser.exit(2, f"{prog}: {error.message}\n")
    if args.print_config:
        print(json.dumps(shown(config), indent=2))
        sys.exit(0)
    return config


def build_parser(cls: type[Any], *, prog: str, env_prefix: str, description: str = "") -> argparse.ArgumentParser:
    """A parser with one flag a field; flags that were not given are absent from the namespace's values (None)."""
    parser = _Parser(prog=prog, description=description or (cls.__doc__ or "").strip(), allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help="TOML or JSON file with settings")
    parser.add_argument("--print-config", action="store_true", help="print the settings in force and exit")
    add_flags(parser, cls, env_prefix=env_prefix)
    return parser


def add_flags(parser: argparse.ArgumentParser, cls: type[Any], *, env_prefix: str) -> None:
    for f, kind in _fields(cls):
        flag = "--" + f.name.replace("_", "-")
        default = _default(f)
        shown_default = "" if default in ("", (), None) or f.metadata.get("secret") else f" (default: {default})"
        help = f"{f.metadata.get('help', '')}{shown_default} [{env_prefix}{f.name.upper()}]".replace("%", "%%")
        if kind is bool:
            parser.add_argument(flag, dest=f.name, action=argparse.BooleanOptionalAction, default=None, help=help)
        else:
            metavar = f.metadata.get("metavar") or f.name.upper().rsplit("_", 1)[-1]
            parser.add_argument(flag, dest=f.name, default=None, metavar=metavar, help=help)


def resolve(cls: type[T], given: Mapping[str, Any], *, env_prefix: str, env: Mapping[str, str]) -> T:
    """The settings from `given` (flags; None = not given; may name a `config` file), the environment and the defaults."""
    values: dict[str, Any] = {}
    names = {f.name for f, _ in _fields(cls)}
    if given.get("config"):
        for key, value in read_file(Path(given["config"])).items():
            name = key.replace("-", "_")
            if name not in names:
                raise ConfigError(f"{given['config']}: unknown setting {key!r}; known: {', '.join(sorted(names))}")
            values[name] = (value, f"{given['config']}: {key}")
    for f, _ in _fields(cls):
        variable = env_prefix + f.name.upper()
        if variable in env:
            values[f.name] = (env[variable], variable)
        if given.get(f.name) is not None:
            values[f.name] = (given[f.name], "--" + f.name.replace("_", "-"))
    kinds = {f.name: (f, kind) for f, kind in _fields(cls)}
    return cls(**{name: _convert(*kinds[name], value, source) for name, (value, source) in values.items()})


def read_file(path: Path) -> dict[str, Any]:
    """A TOML or JSON table of settings."""
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"cannot read settings from {path}: {error.strerror}") from error
    try:
        table = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: expected a table of settings")
    return table


def shown(config: Any) -> dict[str, Any]:
    """The settings as plain values for people and `/version`; secrets masked."""
    values = {}
    for f, _ in _fields(type(config)):
        value = getattr(config, f.name)
        if f.metadata.get("secret") and value:
            value = "***"
        values[f.name] = str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
    return values


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def _fields(cls: type[Any]) -> list[tuple[Field[Any], Any]]:
    hints = typing.get_type_hints(cls)
    return [(f, hints[f.name]) for f in dataclasses.fields(cls) if f.init]


def _default(f: Field[Any]) -> Any:
    return f.default if f.default is not MISSING else None


def _convert(f: Field[Any], kind: Any, value: Any, source: str) -> Any:
    try:
        result = _typed(kind, value)
    except (TypeError, ValueError):
        raise ConfigError(f"{source}: expected {getattr(kind, '__name__', kind)}, got {value!r}") from None
    choices = f.metadata.get("choices")
    if choices and result not in choices:
        raise ConfigError(f"{source}: {value!r} is not one of {', '.join(map(str, choices))}")
    return result


def _typed(kind: Any, value: Any) -> Any:
    if kind is bool:
        if isinstance(value, bool):
            return value
        word = str(value).lower()
        if word in ("1", "true", "yes", "on"):
            return True
        if word in ("0", "false", "no", "off"):
            return False
        raise ValueError(value)
    if kind is int:
        if isinstance(value, bool | float):
            raise ValueError(value)
        return int(value)
    if kind is float:
        return float(value)
    if kind is Path:
        return Path(value).expanduser()
    if kind is str:
        if not isinstance(value, str):
            raise ValueError(value)
        return value
    if typing.get_origin(kind) is tuple:
        parts = value if isinstance(value, list | tuple) else [p.strip() for p in str(value).split(",") if p.strip()]
        return tuple(str(p) for p in parts)
    raise TypeError(f"settings cannot have type {kind}")
