"""Typed reading of a JSON object from outside: each fault is an InvalidRequest that names the field and what was due.

No value is coerced: a bool is no number, a text is no number, a fraction is no integer, and nothing is NaN or infinite.
`null` is the same as absence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lockstep_common.errors import InvalidRequest


class Fields:
    """One object; `path` is where it stands in the body, e.g. "messages[2]."."""

    __slots__ = ("path", "values")

    def __init__(self, values: Any, path: str = "") -> None:
        if not isinstance(values, Mapping):
            where = path.rstrip(".") or "the body"
            raise InvalidRequest(f"{where} must be a JSON object", param=path.rstrip("."))
        self.values = values
        self.path = path

    def fail(self, name: str, due: str) -> InvalidRequest:
        """The error for a field, for the caller to raise."""
        return InvalidRequest(
            f"{self.path}{name} must be {due}, not {_shown(self.values.get(name))}", param=self.path + name
        )

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(name, "true or false")
        return value

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        value = self.values.get(name)
        if value is None:
            return default
        number = as_integer(value)
        if number is None or not low <= number <= high:
            raise self.fail(name, f"an integer from {low} to {high}")
        return number

    def number(self, name: str, default: float, low: float, high: float, *, above_low: bool = False) -> float:
        """A number in [low, high], or in (low, high] with `above_low`."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise self.fail(name, "a number")
        if not low <= value <= high or (above_low and value == low):
            raise self.fail(
                name, f"a number {'above' if above_low else 'from'} {low:g}{' and' if above_low else ''} up to {high:g}"
            )
        return float(value)

    def text(self, name: str, default: str = "", *, max_chars: int = 1 << 30) -> str:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.fail(name, "a string")
        if len(value) > max_chars:
            raise InvalidRequest(f"{self.path}{name} must have at most {max_chars} characters", param=self.path + name)
        return encodable(value, self.path + name)

    def items(self, name: str, *, max_items: int) -> list[Any]:
        """A list; empty if absent."""
        value = self.values.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.fail(name, "a list")
        if len(value) > max_items:
            raise InvalidRequest(
                f"{self.path}{name} must have at most {max_items} items, not {len(value)}", param=self.path + name
            )
        return value

    def table(self, name: str, *, max_items: int) -> Mapping[str, Any]:
        """An object; empty if absent."""
        value = self.values.get(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self.fail(name, "an object")
        if len(value) > max_items:
            raise InvalidRequest(
                f"{self.path}{name} must have at most {max_items} entries, not {len(value)}", param=self.path + name
            )
        return value


def as_integer(value: Any) -> int | None:
    """The integer that a JSON number stands for (5 and 5.0 are the same number), or None."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return None


def encodable(text: str, param: str) -> str:
    """The text itself; InvalidRequest if it holds half of a surrogate pair, which is no text in any encoding."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidRequest(f"{param} holds a lone surrogate (half of a UTF-16 pair)", param=param) from None
    return text


def _shown(value: Any) -> str:
    """A value for a message: short, whatever was sent."""
    if isinstance(value, str):
        return repr(value if len(value) <= 40 else value[:40] + "...")
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return repr(value)[:40]
