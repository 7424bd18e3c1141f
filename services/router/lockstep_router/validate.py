"""The one door: what comes in by REST or gRPC becomes a `Request` here, or an error that names the field at fault.

Both fronts hand over the same JSON-shaped object (the gRPC front builds one from its message), so both have the same
defaults, ranges and errors. Whatever costs work is bounded before the work is done. Fields that are not known are
ignored, as OpenAI's clients expect, but a field that would change the output and is not supported is refused by name:
silence would be a wrong answer.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from lockstep_common.errors import ConfigError, InvalidRequest, NotFound
from lockstep_common.steps import MAX_BIASES, MAX_LOGPROBS, MAX_PROMPT_SCORES, MAX_STOP_IDS, Sampling
from lockstep_router.fields import Fields, as_integer, encodable
from lockstep_router.output import OutputRules
from lockstep_router.prompts import (
    MAX_INT32,
    check_ids,
    check_room,
    read_messages,
    read_prompts,
    read_template_variables,
    read_truncation,
)
from lockstep_router.request import Limits, Prompt, Request
from lockstep_router.template import ChatTemplate
from lockstep_router.text import Tokenizer, read_json

T = TypeVar("T")

MAX_CHOICES: Final = 512  # of all prompts of a request together
MAX_STOPS: Final = 16
MAX_STOP_CHARS: Final = 256
COMPLETION_MAX_TOKENS: Final = 16  # OpenAI's default; a chat's is the rest of the context
INLINE_CHARS: Final = 4096  # longer texts are tokenised beside the event loop

# Fields that would change the output, with the values that do not.
UNSUPPORTED: Final[dict[str, tuple[Any, ...]]] = {
    "adapter": ("",),
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": ("none",),
    "functions": (),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "images": ([],),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "lora": (),
    "lora_request": (),
    "modalities": (["text"],),
    "prompt_embeds": (),
    "reasoning_effort": (),
    "repetition_detection": (),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "thinking_token_budget": (),
    "tool_choice": ("none", "auto"),
    "tools": (),
    "top_a": (0,),
    "use_beam_search": (False,),
    "web_search_options": (),
}


@dataclass(frozen=True)
class SamplingDefaults:
    """What a request gets that says nothing: OpenAI's values, overridden by the model's generation_config.json."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def load_defaults(path: Path) -> SamplingDefaults:
    """The sampling defaults of a model directory; ConfigError names the file and the field."""
    file = path / "generation_config.json"
    fields = Fields(read_json(file))
    base = SamplingDefaults()
    try:
        return SamplingDefaults(
            temperature=fields.number("temperature", base.temperature, 0, 2),
            top_p=fields.number("top_p", base.top_p, 0, 1, above_low=True),
            top_k=max(fields.integer("top_k", base.top_k, -1, MAX_INT32), 0),
            min_p=fields.number("min_p", base.min_p, 0, 1),
            repetition_penalty=fields.number("repetition_penalty", base.repetition_penalty, 0, 100, above_low=True),
        )
    except InvalidRequest as error:
        raise ConfigError(f"{file}: {error.message}") from error


class Door:
    """Builds requests for one served model. `limits` says what the engine groups admit now (Unavailable if none is known)."""

    def __init__(
        self,
        *,
        names: Sequence[str],
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        defaults: SamplingDefaults,
        limits: Callable[[], Limits],
        seed: int | None = None,
    ) -> None:
        self.names = tuple(names)
        self.tokenizer = tokenizer
        self.template = template
        self._defaults = defaults
        self._limits = limits
        self._random = random.Random(seed)
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    # --- generation

    async def chat(self, values: Mapping[str, Any], *, omit_text: bool = False) -> Request:
        """A request from the body of /v1/chat/completions."""
        fields = Fields(values)
        self._admit(fields)
        logprobs = self._chat_logprobs(fields)
        messages = read_messages(fields)
        limits = self._limits()
        ids = await self._chat_ids(fields, messages, limits)
        asked = fields.integer("max_tokens", 0, 1, MAX_INT32)
        asked = fields.integer("max_completion_tokens", asked, 1, MAX_INT32)
        return self._request(fields, [(ids, "")], "messages", asked or MAX_INT32, logprobs, limits, True, omit_text)

    async def completion(self, values: Mapping[str, Any], *, omit_text: bool = False) -> Request:
        """A request from the body of /v1/completions."""
        fields = Fields(values)
        self._admit(fields)
        echo, logprobs = fields.flag("echo"), fields.integer("logprobs", -1, 0, MAX_LOGPROBS)
        if as_integer(fields.get("max_tokens")) == 0:
            raise InvalidRequest(
                "max_tokens must be at least 1: scoring a prompt (max_tokens 0) is not supported", param="max_tokens"
            )
        asked = fields.integer("max_tokens", COMPLETION_MAX_TOKENS, 1, MAX_INT32)
        limits = self._limits()
        prompts = [
            (ids, text if text or not echo else self.tokenizer.vocabulary.decode(ids))
            for ids, text in await self._prompts(fields, limits)
        ]
        return self._request(fields, prompts, "prompt", asked, logprobs, limits, False, omit_text)

    def _request(
        self,
        fields: Fields,
        prompts: Sequence[tuple[list[int], str]],
        param: str,
        asked: int,
        logprobs: int,
        limits: Limits,
        chat: bool,
        omit_text: bool,
    ) -> Request:
        n = fields.integer("n", 1, 1, limits.max_choices)
        if n * len(prompts) > MAX_CHOICES:
            raise InvalidRequest(f"n times the number of prompts must be at most {MAX_CHOICES}", param="n")
        for ids, _ in prompts:
            check_room(ids, limits.max_model_len, param)
        stream, echo = fields.flag("stream"), fields.flag("echo")
        prompt_logprobs = _prompt_logprobs(fields, stream)
        scored = max(prompt_logprobs, logprobs if echo and not chat else -1)
        _check_scores(
            n * sum(len(ids) for ids, _ in prompts), scored, "prompt_logprobs" if prompt_logprobs >= 0 else "echo"
        )
        sampling = replace(
            self._sampling(fields, asked, logprobs, limits.vocab_size), prompt_logprobs=min(scored, limits.vocab_size)
        )
        options = Fields(fields.table("stream_options", max_items=16), "stream_options.")
        if fields.get("stream_options") is not None and not stream:
            raise InvalidRequest("stream_options is only allowed together with stream: true", param="stream_options")
        return Request(
            id=("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(16),
            model=fields.text("model") or self.names[0],
            created=int(time.time()),
            chat=chat,
            prompts=tuple(
                Prompt(ids, _fitted(sampling, limits.max_model_len - len(ids)), text if echo else "")
                for ids, text in prompts
            ),
            n=n,
            rules=self._rules(fields, sampling.min_tokens, logprobs, omit_text, limits.vocab_size),
            top_logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            skip_special_tokens=fields.flag("skip_special_tokens", True),
            detokenize=not omit_text,
            priority=fields.integer("priority", 0, -MAX_INT32, MAX_INT32),
            cache_salt=_cache_salt(fields),
            deadline_ms=fields.integer("deadline_ms", 0, 0, MAX_INT32),
            stream=stream,
            include_usage=options.flag("include_usage"),
            continuous_usage=options.flag("continuous_usage_stats"),
            echo=echo,
            return_token_ids=fields.flag("return_token_ids"),
        )

    def _admit(self, fields: Fields) -> None:
        """The model is ours, and nothing is asked for that we cannot do."""
        self.check_model(fields)
        for name, value in fields.values.items():
            harmless = UNSUPPORTED.get(name)
            if harmless is not None and value is not None and not any(_same(value, h) for h in harmless):
                raise InvalidRequest(f"{name} is not supported", param=name)

    def check_model(self, fields: Fields) -> None:
        model = fields.text("model", max_chars=256)
        if model and model not in self.names:
            raise NotFound(f"the model '{model}' does not exist; served here: {', '.join(self.names)}", param="model")

    def _sampling(self, fields: Fields, max_tokens: int, logprobs: int, vocab_size: int) -> Sampling:
        base = self._defaults
        min_tokens = fields.integer("min_tokens", 0, 0, MAX_INT32)
        if min_tokens > max_tokens:
            raise InvalidRequest(f"min_tokens must be at most max_tokens ({max_tokens})", param="min_tokens")
        seed = (
            fields.integer("seed", -1, -(2**63), 2**63 - 1)
            if fields.get("seed") is not None
            else self._random.getrandbits(64)
        )
        ignore_eos = fields.flag("ignore_eos")
        stop_ids = dict.fromkeys(
            [*(() if ignore_eos else self.tokenizer.eos_ids), *_stop_token_ids(fields, vocab_size)]
        )
        if len(stop_ids) > MAX_STOP_IDS:
            raise InvalidRequest(
                f"at most {MAX_STOP_IDS} stop ids are possible, the model's own included", param="stop_token_ids"
            )
        return Sampling(
            temperature=fields.number("temperature", base.temperature, 0, 2),
            top_p=fields.number("top_p", base.top_p, 0, 1, above_low=True),
            top_k=max(fields.integer("top_k", base.top_k, -1, MAX_INT32), 0),
            min_p=fields.number("min_p", base.min_p, 0, 1),
            presence_penalty=fields.number("presence_penalty", 0, -2, 2),
            frequency_penalty=fields.number("frequency_penalty", 0, -2, 2),
            repetition_penalty=fields.number("repetition_penalty", base.repetition_penalty, 0, 100, above_low=True),
            seed=seed & (2**64 - 1),
            min_tokens=min_tokens,
            max_tokens=max_tokens,
            stop_ids=tuple(stop_ids),
            bias=_logit_bias(fields, vocab_size),
            logprobs=logprobs,
        )

    def _rules(self, fields: Fields, min_tokens: int, logprobs: int, omit_text: bool, vocab_size: int) -> OutputRules:
        stop = _stop_strings(fields)
        if stop and omit_text:
            raise InvalidRequest("stop strings need text: do not omit it", param="stop")
        return OutputRules(
            stop=stop,
            stop_token_ids=frozenset(_stop_token_ids(fields, vocab_size)),
            include_stop=fields.flag("include_stop_str_in_output"),
            min_tokens=min_tokens,
            logprobs=logprobs >= 0,
        )

    @staticmethod
    def _chat_logprobs(fields: Fields) -> int:
        top = fields.integer("top_logprobs", -1, 0, MAX_LOGPROBS)
        if fields.flag("logprobs"):
            return max(top, 0)
        if top > 0:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        return -1

    # --- prompts

    async def _prompts(self, fields: Fields, limits: Limits) -> list[tuple[list[int], str]]:
        """(ids, text) of every prompt; the text is empty where ids were given."""
        add_special = fields.flag("add_special_tokens", True)
        keep = read_truncation(fields, limits.max_model_len)
        prompts: list[tuple[list[int], str]] = []
        for given in read_prompts(fields.get("prompt")):
            if isinstance(given, str):
                self.tokenizer.refuse_hopeless(len(given), limits.max_model_len, "prompt")
                prompts.append((await self._encode(given, add_special), given))
            else:
                check_ids(given, limits.vocab_size)
                prompts.append((given, ""))
        return [(ids[-keep:] if keep else ids, text) for ids, text in prompts]

    async def _chat_ids(self, fields: Fields, messages: list[dict[str, Any]], limits: Limits) -> list[int]:
        template = self.template
        if template is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions", param="messages")
        size = sum(len(message["content"]) for message in messages)
        self.tokenizer.refuse_hopeless(size, limits.max_model_len, "messages")
        variables = {
            "tools": None,
            "documents": None,
            **read_template_variables(fields),
            "add_generation_prompt": fields.flag("add_generation_prompt", True),
        }
        keep = read_truncation(fields, limits.max_model_len)
        if size <= INLINE_CHARS and len(messages) <= 64:
            ids = template.encode(messages, **variables)
        else:
            ids = await self._beside(lambda: template.encode(messages, **variables))
        return ids[-keep:] if keep else ids

    async def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) <= INLINE_CHARS:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await self._beside(lambda: self.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    async def _beside(self, work: Callable[[], T]) -> T:
        """Runs CPU work on a thread, so that streams and probes go on meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    # --- tokenise only

    async def tokenize(self, values: Mapping[str, Any]) -> tuple[list[int], int]:
        """(ids, max_model_len) for the body of /tokenize: a `prompt`, or `messages` as a chat would send them."""
        fields = Fields(values)
        self._admit(fields)
        limits = self._limits()
        if fields.get("messages") is not None:
            return await self._chat_ids(fields, read_messages(fields), limits), limits.max_model_len
        if not isinstance(fields.get("prompt"), str):
            raise fields.fail("prompt", "a string")
        text = fields.text("prompt")
        return await self._encode(text, fields.flag("add_special_tokens", True)), limits.max_model_len

    async def detokenize(self, values: Mapping[str, Any]) -> str:
        fields = Fields(values)
        self.check_model(fields)
        tokens = fields.get("tokens")
        if not isinstance(tokens, list):
            raise fields.fail("tokens", "a list of token ids")
        check_ids(tokens, self._limits().vocab_size, "tokens")
        return self.tokenizer.vocabulary.decode(tokens, skip_special_tokens=fields.flag("skip_special_tokens", False))


# --- fields that take more than a line --------------------------------------------------------------------------------


def _fitted(sampling: Sampling, room: int) -> Sampling:
    """The sampling with max_tokens cut to what the context has room for."""
    if sampling.max_tokens <= room:
        return sampling
    return replace(sampling, max_tokens=room, min_tokens=min(sampling.min_tokens, room))


def _stop_strings(fields: Fields) -> tuple[str, ...]:
    value = fields.get("stop")
    stops = [value] if isinstance(value, str) else fields.items("stop", max_items=MAX_STOPS)
    for stop in stops:
        if not isinstance(stop, str) or not 0 < len(stop) <= MAX_STOP_CHARS:
            raise InvalidRequest(f"each stop must be a string of 1 to {MAX_STOP_CHARS} characters", param="stop")
        encodable(stop, "stop")
    return tuple(dict.fromkeys(stops))


def _stop_token_ids(fields: Fields, vocab_size: int) -> list[int]:
    ids = fields.items("stop_token_ids", max_items=MAX_STOP_IDS)
    check_ids(ids, vocab_size, "stop_token_ids")
    return ids


def _logit_bias(fields: Fields, vocab_size: int) -> tuple[tuple[int, float], ...]:
    table = fields.table("logit_bias", max_items=MAX_BIASES)
    values = Fields(table, "logit_bias.")
    bias: dict[int, float] = {}
    for key in table:
        if not (key.isascii() and key.isdigit() and len(key) < 11):
            raise InvalidRequest(f"logit_bias keys must be token ids, not {key[:40]!r}", param="logit_bias")
        if int(key) >= vocab_size:
            raise InvalidRequest(
                f"logit_bias: token id {key} is out of the vocabulary (0 to {vocab_size - 1})", param="logit_bias"
            )
        bias[int(key)] = min(max(values.number(key, 0, -1e9, 1e9), -100.0), 100.0)
    return tuple(bias.items())


def _prompt_logprobs(fields: Fields, stream: bool) -> int:
    found = fields.integer("prompt_logprobs", -1, 0, MAX_LOGPROBS)
    if found >= 0 and stream:
        raise InvalidRequest("prompt_logprobs cannot be combined with stream: true", param="prompt_logprobs")
    return found


def _check_scores(tokens: int, width: int, param: str) -> None:
    """Bounds what an answer holds of its prompts' log probabilities; tokens of all choices' prompts."""
    if tokens * (width + 1) > MAX_PROMPT_SCORES:
        raise InvalidRequest(
            f"log probabilities of {tokens} prompt tokens (of all choices) with {width} best ones each are too many: "
            f"tokens times one more than that must be at most {MAX_PROMPT_SCORES}",
            param=param,
        )


def _cache_salt(fields: Fields) -> str:
    salt = fields.text("cache_salt", max_chars=128)
    if any(char in "@/\\\0" for char in salt):
        raise InvalidRequest("cache_salt must not contain '@', '/', '\\' or NUL", param="cache_salt")
    return salt


def _same(value: Any, harmless: Any) -> bool:
    return type(value) is type(harmless) and bool(value == harmless)
