"""Chat templates: messages to prompt ids, in a sandbox, under bounds, with what users typed kept apart from control tokens.

A template belongs to the model (chat_template.jinja or tokenizer_config.json), never to a request. It renders with the
conventions of Hugging Face's templates. The text of a control token that stands in a message must not become that
control token (a user could forge a turn): such a text is broken up with a mark that no user can know before the template
renders; afterwards the mark is taken out and the piece of text around it is encoded with control tokens disabled.
Messages without such texts, nearly all, take the ordinary way: one encode of the rendered text.
"""

from __future__ import annotations

import functools
import json
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from tokenizers import Tokenizer as HfTokenizer

from lockstep_common.errors import ConfigError, InvalidRequest
from lockstep_router.text import Tokenizer, read_json

MAX_STEPS = 200_000  # loop iterations of one rendering
MAX_SECONDS = 2.0
MAX_OUTPUT_CHARS = 16 << 20

_PRIVATE_USE = [chr(0xE100 + i) for i in range(16)]  # survives trimming, case changes and JSON


@dataclass
class _Budget:
    """What one rendering may still spend."""

    steps: int = MAX_STEPS
    deadline: float = field(default_factory=lambda: time.monotonic() + MAX_SECONDS)

    def step(self) -> None:
        self.steps -= 1
        if self.steps < 0 or (self.steps % 256 == 0 and time.monotonic() > self.deadline):
            raise InvalidRequest("the chat template takes too many steps for these messages", param="messages")


_budget: ContextVar[_Budget] = ContextVar("template_budget")


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, with every loop counted and without operators that make much of little."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" or isinstance(left, str | list | tuple) or isinstance(right, str | list | tuple):
            raise jinja2.exceptions.SecurityError(f"operator {operator} is not available here")
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(jinja2.nodes.For)):
            loop.iter = jinja2.nodes.Filter(loop.iter, "counted", [], [], None, None, lineno=loop.lineno)
        return tree


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks an assistant's tokens for training; here its body is just rendered."""

    tags = {"generation"}  # noqa: RUF012 (the attribute that jinja2 reads)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _counted(items: Iterable[Any]) -> Iterable[Any]:
    if isinstance(items, Sequence) and not isinstance(items, str):
        return _CountedSequence(items)  # keeps len(), which loop.length and loop.revindex ask for
    return _steps(items)


def _steps(items: Iterable[Any]) -> Iterator[Any]:
    budget = _budget.get()
    for item in items:
        budget.step()
        yield item


class _CountedSequence:
    def __init__(self, items: Sequence[Any]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        return _steps(self._items)

    def __len__(self) -> int:
        return len(self._items)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols], cache_size=0
    )
    environment.filters["counted"] = _counted
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class ChatTemplate:
    """A model's chat template together with the tokenizer whose control tokens it writes."""

    def __init__(self, source: str, tokenizer: Tokenizer, *, name: str = "chat template") -> None:
        self._tokenizer = tokenizer
        try:
            self._template = _environment().from_string(source)
        except jinja2.exceptions.TemplateError as error:
            raise ConfigError(f"{name}: {error}") from error
        self._blind, self._begins_with_space = _without_controls(tokenizer.hf)
        controls = [t for t in tokenizer.hf.get_added_tokens_decoder().values() if t.special and t.content]
        self._controls = _control_pattern(controls)
        self._typed = re.compile("|".join(re.escape(t) for t in _longest_first(t.content for t in controls)) or "(?!)")

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The prompt's text; InvalidRequest if the template refuses the messages or exceeds its bounds."""
        token = _budget.set(_Budget())
        pieces: list[str] = []
        size = 0
        try:
            values = {**self._tokenizer.special_texts, **variables, "messages": messages}
            for piece in self._template.generate(values):
                size += len(piece)
                if size > MAX_OUTPUT_CHARS:
                    raise InvalidRequest("the chat template makes too much of these messages", param="messages")
                pieces.append(piece)
        except jinja2.exceptions.TemplateError as error:
            raise InvalidRequest(f"chat template: {str(error)[:300]}", param="messages") from error
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, RecursionError, OverflowError) as error:
            raise InvalidRequest(
                f"the chat template cannot use these messages: {str(error)[:300]}", param="messages"
            ) from error
        finally:
            _budget.reset(token)
        return "".join(pieces)

    def encode(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """The prompt's ids. Nothing is added to what the template writes (it writes its own BOS)."""
        if not _any_text(lambda text: self._typed.search(text) is not None, (messages, variables)):
            return self._tokenizer.encode(self.render(messages, **variables), add_special_tokens=False)
        mark = "".join(secrets.choice(_PRIVATE_USE) for _ in range(24))
        broken = functools.partial(self._typed.sub, lambda match: match[0][:1] + mark + match[0][1:])
        text = self.render(_map_text(broken, messages), **_map_text(broken, variables))
        return self._encode_marked(text, mark)

    def _encode_marked(self, text: str, mark: str) -> list[int]:
        """Encodes a rendering whose typed control texts are broken by `mark`: those come out as ordinary text.

        Between two real control tokens an encoding depends on nothing outside, so only the stretches that hold a mark
        are encoded apart.
        """
        ids: list[int] = []
        plain_from = 0
        for start, end in _stretches(text, self._controls):
            if mark not in text[start:end]:
                continue
            if start > plain_from:
                ids += self._tokenizer.encode(text[plain_from:start], add_special_tokens=False)
            stretch = text[start:end].replace(mark, "")
            if start == 0 and self._begins_with_space and not stretch.startswith(" "):
                stretch = " " + stretch
            ids += self._blind.encode_batch_fast([stretch], add_special_tokens=False)[0].ids
            plain_from = end
        if plain_from < len(text):
            ids += self._tokenizer.encode(text[plain_from:], add_special_tokens=False)
        return ids


def load_template(path: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The chat template of a model directory; None if it has none."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return ChatTemplate(file.read_text(encoding="utf-8"), tokenizer, name=str(file))
    config = path / "tokenizer_config.json"
    source = read_json(config).get("chat_template")
    if isinstance(source, list):  # several, by name
        named = {entry["name"]: entry["template"] for entry in source if isinstance(entry, dict) and "name" in entry}
        source = named.get("default")
    if source is None:
        return None
    if not isinstance(source, str):
        raise ConfigError(f"{config}: chat_template must be a text or a list with an entry named 'default'")
    return ChatTemplate(source, tokenizer, name=f"{config}: chat_template")


# --- control tokens -------------------------------------------------------------------------------------------------


def _longest_first(texts: Iterable[str]) -> list[str]:
    return sorted(texts, key=len, reverse=True)


def _control_pattern(controls: Iterable[Any]) -> re.Pattern[str]:
    """Matches what the tokenizer takes for control tokens, with the white space that they swallow."""
    alternatives = [
        (r"\s*" if token.lstrip else "") + re.escape(token.content) + (r"\s*" if token.rstrip else "")
        for token in sorted(controls, key=lambda token: len(token.content), reverse=True)
    ]
    return re.compile("|".join(alternatives) or "(?!)")


def _stretches(text: str, controls: re.Pattern[str]) -> Iterator[tuple[int, int]]:
    """(start, end) of the text between control tokens."""
    start = 0
    for match in controls.finditer(text):
        yield start, match.start()
        start = match.end()
    yield start, len(text)


@functools.lru_cache(maxsize=4)
def _without_controls(hf: HfTokenizer) -> tuple[HfTokenizer, bool]:
    """The same tokenizer, blind to control tokens and taking every text as the middle of a sequence; and whether it
    writes a space before a text that begins one. Costs time and memory, so it is made at the start, not by a request."""
    description = json.loads(hf.to_str())
    begins_with_space = False
    pre_tokenizer = description.get("pre_tokenizer") or {}
    for part in (pre_tokenizer, *(pre_tokenizer.get("pretokenizers") or ())):
        if part.get("type") == "Metaspace" and part.get("prepend_scheme") == "first":
            part["prepend_scheme"] = "never"
            begins_with_space = True
    twin = HfTokenizer.from_str(json.dumps(description))
    twin.encode_special_tokens = True
    return twin, begins_with_space


def _any_text(predicate: Any, value: Any) -> bool:
    if isinstance(value, str):
        return bool(predicate(value))
    if isinstance(value, Mapping):
        return any(_any_text(predicate, v) for v in value.values())
    if isinstance(value, list | tuple):
        return any(_any_text(predicate, v) for v in value)
    return False


def _map_text(change: Any, value: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {k: _map_text(change, v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_map_text(change, v) for v in value]
    return value
