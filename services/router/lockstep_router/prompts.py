"""What a request gives the model to read: messages, prompts, template variables; checked, not yet encoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from lockstep_common.errors import ContextLengthExceeded, InvalidRequest
from lockstep_router.fields import Fields, encodable

MAX_MESSAGES: Final = 4096
MAX_PARTS: Final = 256
MAX_PROMPTS: Final = 128
MAX_INT32: Final = 2**31 - 1

ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


def read_messages(fields: Fields) -> list[dict[str, Any]]:
    """The messages as templates want them: role, content as one text, and name or tool_call_id where given."""
    given = fields.items("messages", max_items=MAX_MESSAGES)
    if not given:
        raise InvalidRequest("messages must be a list of at least one message", param="messages")
    messages = []
    for i, value in enumerate(given):
        message = Fields(value, f"messages[{i}].")
        role = message.text("role", max_chars=32)
        if role not in ROLES:
            raise message.fail("role", "one of " + ", ".join(sorted(ROLES)))
        for name in ("tool_calls", "function_call", "audio"):
            if message.get(name):
                raise InvalidRequest(f"messages[{i}].{name} is not supported", param=f"messages[{i}].{name}")
        content = _content(message, required=role != "assistant")
        entry: dict[str, Any] = {"role": role, "content": content}
        for name in ("name", "tool_call_id"):
            if message.get(name) is not None:
                entry[name] = message.text(name, max_chars=256)
        messages.append(entry)
    return messages


def _content(message: Fields, *, required: bool) -> str:
    value = message.get("content")
    if value is None and not required:
        return ""
    if isinstance(value, str):
        return encodable(value, message.path + "content")
    if not isinstance(value, list):
        raise message.fail("content", "a string or a list of text parts")
    texts = []
    for j, item in enumerate(message.items("content", max_items=MAX_PARTS)):
        part = Fields(item, f"{message.path}content[{j}].")
        kind = part.text("type", max_chars=64)
        if kind not in ("text", "refusal"):
            raise InvalidRequest(
                f"{part.path}type: only text parts are supported, not {kind!r}", param=f"{part.path}type"
            )
        if not isinstance(part.get(kind), str):
            raise part.fail(kind, "a string")
        texts.append(part.text(kind))
    return "\n".join(texts)


def read_prompts(prompt: Any) -> list[str | list[int]]:
    if isinstance(prompt, str):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise InvalidRequest(
            "prompt must be a string, a list of strings, a list of token ids or a list of such lists", param="prompt"
        )
    if type(prompt[0]) is int:
        prompt = [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(
            f"prompt must be a list of at most {MAX_PROMPTS} prompts, not {len(prompt)}", param="prompt"
        )
    kind = type(prompt[0])
    if kind not in (str, list) or any(type(item) is not kind for item in prompt):
        raise InvalidRequest(
            "prompt must be a string, a list of strings, a list of token ids or a list of such lists", param="prompt"
        )
    if any(not item for item in prompt):
        raise InvalidRequest("prompt must not be empty", param="prompt")
    return [encodable(item, "prompt") if isinstance(item, str) else item for item in prompt]


def read_template_variables(fields: Fields) -> dict[str, Any]:
    """chat_template_kwargs: what a model's template reads beside the messages, for example enable_thinking."""
    variables = fields.table("chat_template_kwargs", max_items=32)
    for name, value in variables.items():
        if name in ("messages", "tools", "documents", "add_generation_prompt") or name.endswith("_token"):
            raise InvalidRequest(f"chat_template_kwargs must not set {name[:40]}", param="chat_template_kwargs")
        if not isinstance(value, bool | int | float | str | None):
            raise InvalidRequest(
                f"chat_template_kwargs.{name[:40]} must be a plain value", param="chat_template_kwargs"
            )
        if isinstance(value, str):
            encodable(value, "chat_template_kwargs")
    return dict(variables)


def read_truncation(fields: Fields, limit: int) -> int:
    """How many of the prompt's last tokens to keep; 0: all."""
    keep = fields.integer("truncate_prompt_tokens", 0, -1, MAX_INT32)
    if fields.get("truncate_prompt_tokens") is not None and keep == 0:
        raise fields.fail("truncate_prompt_tokens", "-1 or at least 1")
    return limit - 1 if keep == -1 else keep


def check_ids(ids: Sequence[Any], vocab_size: int, param: str = "prompt") -> None:
    if any(type(i) is not int for i in ids):
        raise InvalidRequest(f"{param} must hold token ids, which are integers", param=param)
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        bad = next(i for i in ids if not 0 <= i < vocab_size)
        raise InvalidRequest(f"token id {bad} in {param} is out of the vocabulary (0 to {vocab_size - 1})", param=param)


def check_room(ids: Sequence[int], limit: int, param: str) -> None:
    if not ids:
        raise InvalidRequest(f"{param} must not be empty", param=param)
    if len(ids) >= limit:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {limit} tokens. However, your prompt contains {len(ids)} input tokens, "
            "which leaves no room for output. Please shorten the prompt.",
            param=param,
        )
