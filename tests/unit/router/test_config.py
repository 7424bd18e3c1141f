"""Settings of the router: what is missing or wrong is said at the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep_common.config import shown
from lockstep_common.errors import ConfigError
from lockstep_router.config import RouterConfig


def config(**values: Any) -> RouterConfig:
    given: dict[str, Any] = {"model": Path("/models/tiny"), "schedulers": ("h:1",)} | values
    return RouterConfig(**given)


def test_names() -> None:
    assert config().name == "tiny" and config(served_model_name="mine").name == "mine"


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"model": Path()}, "--model"),
        ({"schedulers": ()}, "--schedulers"),
        ({"schedulers": ("nonsense",)}, "nonsense"),
        ({"accept_timeout": 0.0}, "--accept-timeout"),
        ({"drain_timeout": -1.0}, "--drain-timeout"),
        ({"seed": -2}, "--seed"),
    ],
)
def test_what_is_wrong_is_named(values: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        config(**values)


def test_redis_is_enough_to_find_schedulers() -> None:
    assert config(schedulers=(), redis_url="redis://h").redis_url == "redis://h"


def test_secrets_are_masked() -> None:
    values = shown(config(api_key="sesame", internal_token="t"))
    assert values["api_key"] == values["internal_token"] == "***" and "sesame" not in repr(
        config(api_key="sesame").security
    )
