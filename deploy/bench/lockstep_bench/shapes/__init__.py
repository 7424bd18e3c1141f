"""Shapes of real models by name: each folder here holds a model's config.json and nothing else, enough for random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lockstep_common.errors import ConfigError

_HERE = Path(__file__).parent


def names() -> list[str]:
    return sorted(path.parent.name for path in _HERE.glob("*/config.json"))


def resolve(model: str) -> Path:
    """The directory of a shape, or of a model directory given by its path; ConfigError names the shapes there are."""
    for path in (_HERE / model, Path(model).expanduser()):
        if (path / "config.json").is_file():
            return path.resolve()
    raise ConfigError(f"{model} is neither a model directory (with config.json) nor one of {', '.join(names())}")


def config(model: str) -> dict[str, Any]:
    """config.json of a shape or of a model directory."""
    found: dict[str, Any] = json.loads((resolve(model) / "config.json").read_text())
    return found
