"""The door: every default, every range, every refusal by name; costs bounded before work is done."""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep_common.errors import (
    ConfigError,
    ContextLengthExceeded,
    InvalidRequest,
    LockstepError,
    NotFound,
    Unavailable,
)
from lockstep_router import validate
from lockstep_router.fleet import Fleet
from lockstep_router.request import Request
from lockstep_router.validate import MAX_STOP_IDS, UNSUPPORTED, SamplingDefaults, load_defaults
from tests.unit.router.build import BOS, EOS, LIMIT, MAX_CHOICES, TURN_END, VOCAB, byte_level, make_door

DOOR = make_door()
HELLO = [{"role": "user", "content": "hello"}]


def complete(**fields: Any) -> Request:
    return asyncio.run(DOOR.completion({"prompt": "one", **fields}))


def chat(**fields: Any) -> Request:
    return asyncio.run(DOOR.chat({"messages": HELLO, **fields}))


def refusal(make: Any = complete, error: Any = InvalidRequest, **fields: Any) -> LockstepError:
    with pytest.raises(error) as caught:
        make(**fields)
    assert isinstance(caught.value, LockstepError) and len(caught.value.message) < 700
    return caught.value


# --- defaults ----------------------------------------------------------------------------------------------------------


def test_openai_defaults() -> None:
    request = complete()
    sampling = request.prompts[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)
    assert sampling.max_tokens == 16 and request.n == 1 and not request.stream and sampling.logprobs == -1
    assert sampling.stop_ids == (EOS, TURN_END)
    assert request.prompts[0].ids[0] == BOS and request.model == "tiny" and request.id.startswith("cmpl-")
    talk = chat()
    assert talk.prompts[0].sampling.max_tokens == LIMIT - len(talk.prompts[0].ids) and talk.id.startswith("chatcmpl-")


def test_the_models_defaults_override_and_requests_override_them(tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text('{"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1, "do_sample": true}')
    door = make_door(defaults=load_defaults(tmp_path))
    sampling = asyncio.run(door.completion({"prompt": "x", "top_k": -1})).prompts[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.repetition_penalty) == (0.6, 0.9, 0, 1.1)
    file.write_text('{"top_p": 7}')
    with pytest.raises(ConfigError, match=r"generation_config.json: top_p"):
        load_defaults(tmp_path)
    file.unlink()
    assert load_defaults(tmp_path) == SamplingDefaults()


def test_seeds() -> None:
    assert complete(seed=7).prompts[0].sampling.seed == 7
    assert complete(seed=-1).prompts[0].sampling.seed == 2**64 - 1
    drawn = [
        [asyncio.run(door.completion({"prompt": "x"})).prompts[0].sampling.seed for _ in range(3)]
        for door in (make_door(seed=5), make_door(seed=5))
    ]
    assert drawn[0] == drawn[1] and len(set(drawn[0])) == 3


def test_null_is_absence_and_unknown_fields_are_ignored() -> None:
    nothing = dict.fromkeys(
        ["temperature", "n", "stop", "logit_bias", "seed", "max_tokens", "tools", "stream_options", "logprobs"]
    )
    request = complete(**nothing, whatever={"x": 1}, user="u", metadata={}, store=True, service_tier="auto")
    assert request.prompts[0].sampling.max_tokens == 16


def test_stop_ids() -> None:
    assert complete(ignore_eos=True).prompts[0].sampling.stop_ids == ()
    request = complete(stop_token_ids=[5, 5, EOS])
    assert request.prompts[0].sampling.stop_ids == (EOS, TURN_END, 5)
    assert request.rules.stop_token_ids == {5, EOS}
    assert "stop ids" in refusal(stop_token_ids=list(range(10, 10 + MAX_STOP_IDS))).message


def test_options_reach_the_request() -> None:
    request = complete(
        n=3, stop=["a", "b", "a"], include_stop_str_in_output=True, min_tokens=2, logprobs=4, priority=-5, cache_salt="t",
        stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}, echo=False,
        return_token_ids=True, skip_special_tokens=False, logit_bias={"5": -1000, "6": 3.5}, presence_penalty=-2,
    )  # fmt: skip
    sampling = request.prompts[0].sampling
    assert request.rules.stop == ("a", "b") and request.rules.include_stop and request.rules.logprobs
    assert (request.n, request.priority, request.cache_salt, request.top_logprobs) == (3, -5, "t", 4)
    assert request.include_usage and request.continuous_usage and not request.skip_special_tokens
    assert sampling.bias == ((5, -100.0), (6, 3.5)) and sampling.min_tokens == 2 and sampling.logprobs == 4
    talk = chat(logprobs=True, top_logprobs=2, max_tokens=9, max_completion_tokens=4)
    assert talk.top_logprobs == 2 and talk.prompts[0].sampling.max_tokens == 4
    assert chat(logprobs=True).prompts[0].sampling.logprobs == 0
    assert complete(top_k=5.0).prompts[0].sampling.top_k == 5, "5.0 is an integer in JSON"


# --- numbers, texts and lists at fault --------------------------------------------------------------------------------------

NUMBERS = {
    "temperature": (0, 2), "top_p": (1e-9, 1), "min_p": (0, 1), "presence_penalty": (-2, 2), "frequency_penalty": (-2, 2),
    "repetition_penalty": (1e-9, 100),
}  # fmt: skip
INTEGERS = {
    "top_k": (-1, 2**31 - 1), "n": (1, MAX_CHOICES), "seed": (-(2**63), 2**63 - 1), "max_tokens": (1, 2**31 - 1),
    "min_tokens": (0, 16), "logprobs": (0, 20), "priority": (-(2**31 - 1), 2**31 - 1),
}  # fmt: skip
NO_NUMBER = [True, False, "1", "", [], [1], {}, math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("name", [*NUMBERS, *INTEGERS])
@pytest.mark.parametrize("value", NO_NUMBER, ids=str)
def test_what_is_no_number_is_refused_by_name(name: str, value: Any) -> None:
    assert refusal(**{name: value}).param == name


@pytest.mark.parametrize("name", INTEGERS)
def test_fractions_are_no_integers(name: str) -> None:
    assert refusal(**{name: 1.5}).param == name


@pytest.mark.parametrize(("name", "ends"), [*NUMBERS.items(), *INTEGERS.items()])
def test_ranges(name: str, ends: tuple[float, float]) -> None:
    low, high = ends
    complete(**{name: low})
    complete(**{name: high})
    for outside in (low - 1, high + 1):
        assert refusal(**{name: outside}).param == name


@settings(max_examples=200, deadline=None)
@given(
    fields=st.dictionaries(
        st.sampled_from([*NUMBERS, *INTEGERS, "stop", "logit_bias", "prompt", "stop_token_ids", "stream_options", "model", "cache_salt", "echo", "logprobs", "prompt_logprobs", "truncate_prompt_tokens", "deadline_ms", *UNSUPPORTED]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
            max_leaves=5,
        ),
        max_size=4,
    )
)  # fmt: skip
def test_any_json_is_a_request_or_an_error_that_names_a_field(fields: dict[str, Any]) -> None:
    for make in (complete, chat):
        try:
            request = make(**fields)
        except LockstepError as error:
            assert error.http in (400, 404) and error.param
        else:
            assert request.choices >= 1 and all(len(p.ids) + p.sampling.max_tokens <= LIMIT for p in request.prompts)


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_what_is_not_supported_is_refused_by_name(name: str) -> None:
    error = refusal(**{name: {"type": "json_object"}})
    assert error.param == name and "not supported" in error.message
    assert refusal(chat, **{name: [{"x": 1}]}).param == name


def test_harmless_values_of_unsupported_fields_pass() -> None:
    for name, values in UNSUPPORTED.items():
        for value in [None, *values]:
            chat(**{name: value})
    assert refusal(best_of=2).param == "best_of"
    assert refusal(best_of=True).param == "best_of", "true is not 1"


def test_stop_strings_at_fault() -> None:
    for stop in ("", [""], ["a", None], [5], "x" * 257, ["a"] * 17, {"a": 1}, "\ud83d"):
        assert refusal(stop=stop).param == "stop"
    complete(stop=[str(i) for i in range(16)])


def test_logit_bias_at_fault() -> None:
    for bias in ({str(VOCAB): 1}, {"-1": 1}, {"x": 1}, {"1.5": 1}, {"": 1}, {"5": "x"}, {"5": True}, {"²": 1}, [5]):
        assert refusal(logit_bias=bias).param.startswith("logit_bias")
    assert refusal(logit_bias={str(i): 1 for i in range(2000)}).param == "logit_bias"
    complete(logit_bias={str(VOCAB - 1): 1})


def test_logprobs_are_bounded_by_cost_not_by_a_sentinel() -> None:
    for value in (-1, VOCAB, VOCAB - 1, 21, 10**9):
        assert refusal(logprobs=value).param == "logprobs"
        assert refusal(chat, logprobs=True, top_logprobs=value).param == "top_logprobs"
    complete(logprobs=20)
    assert refusal(chat, top_logprobs=3).param == "top_logprobs"
    assert refusal(chat, logprobs=3).param == "logprobs"


def test_echo() -> None:
    assert complete(echo=True).prompts[0].text == "one"
    assert complete(echo=True, prompt=[5, 6]).prompts[0].text == byte_level().vocabulary.decode([5, 6])
    assert "scoring" in refusal(echo=True, max_tokens=0).message


def test_min_tokens_fit_max_tokens() -> None:
    assert refusal(min_tokens=17).param == "min_tokens"
    assert refusal(min_tokens=5, max_tokens=4).param == "min_tokens"


def test_salts() -> None:
    for salt in ("a/b", "a@b", "a\\b", "a\0b", "x" * 129, 5):
        assert refusal(cache_salt=salt).param == "cache_salt"


def test_stream_options_need_a_stream() -> None:
    assert refusal(stream_options={}).param == "stream_options"
    assert refusal(stream=True, stream_options={"include_usage": 1}).param == "stream_options.include_usage"
    assert not complete(stream=True, stream_options={}).include_usage


# --- prompts --------------------------------------------------------------------------------------------------------------------


def test_forms_of_prompts() -> None:
    assert [p.ids for p in complete(prompt=["one", "two"]).prompts] == [
        byte_level().encode("one"),
        byte_level().encode("two"),
    ]
    assert [p.ids for p in complete(prompt=[5, 6]).prompts] == [[5, 6]]
    assert [p.ids for p in complete(prompt=[[5], [6, 7]]).prompts] == [[5], [6, 7]]
    assert complete(add_special_tokens=False).prompts[0].ids == byte_level().encode("one", add_special_tokens=False)


@pytest.mark.parametrize(
    "prompt",
    ["", [], [""], ["a", ""], [[]], [[5], []], None, 5, {"a": 1}, ["a", 5], [5, "a"], [5, [5]], [[5], "a"], [-1], [5, -1, 7],
     [VOCAB], [True], [5, True], [5.0], [[5.5]], ["x"] * 1000, [[5]] * 1000, "half \ud83d", ["\udc00"]],
)  # fmt: skip
def test_prompts_at_fault(prompt: Any) -> None:
    assert refusal(prompt=prompt).param == "prompt"


def test_ids_out_of_the_vocabulary_are_named() -> None:
    assert f"{VOCAB}" in refusal(prompt=[5, VOCAB]).message and "-1" in refusal(prompt=[-1]).message


@pytest.mark.parametrize(("short", "room"), [(1, 1), (2, 2), (30, 10)])
def test_the_context_cuts_max_tokens(short: int, room: int) -> None:
    assert complete(prompt=[5] * (LIMIT - short), max_tokens=10, min_tokens=9).prompts[0].sampling.max_tokens == room
    assert complete(prompt=[5] * (LIMIT - short), max_tokens=10, min_tokens=9).prompts[0].sampling.min_tokens <= room


def test_a_prompt_without_room_is_a_context_error_with_the_real_limit() -> None:
    for make, fields, param in (
        (complete, {"prompt": [5] * LIMIT}, "prompt"),
        (chat, {"messages": HELLO * 40}, "messages"),
    ):
        error = refusal(make, ContextLengthExceeded, **fields)
        assert f"maximum context length is {LIMIT} tokens" in error.message and error.param == param
        assert error.code == "context_length_exceeded"


def test_truncation_is_honoured() -> None:
    ids = list(range(10, 10 + 150)) * 2
    assert complete(prompt=ids, truncate_prompt_tokens=7).prompts[0].ids == ids[-7:]
    assert complete(prompt=ids, truncate_prompt_tokens=-1).prompts[0].ids == ids[-(LIMIT - 1) :]
    for value in (0, -2, "5", True):
        assert refusal(prompt=ids, truncate_prompt_tokens=value).param == "truncate_prompt_tokens"


def test_huge_requests_are_refused_before_they_cost_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("tokenised")

    monkeypatch.setattr(type(DOOR.tokenizer), "encode", never)
    began = time.monotonic()
    assert refusal(prompt="x" * 8_000_000).param == "prompt"
    assert refusal(chat, messages=[{"role": "user", "content": "x" * 8_000_000}]).param == "messages"
    assert refusal(chat, messages=HELLO * 5000).param == "messages"
    assert refusal(n=5_000_000, prompt=[5]).param == "n"
    assert refusal(prompt=[[5]] * 100, n=MAX_CHOICES).param == "n"
    assert time.monotonic() - began < 0.5


def test_long_texts_are_tokenised_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate, "INLINE_CHARS", 3)

    async def both() -> tuple[Request, Request]:
        return await DOOR.completion({"prompt": "one two"}), await DOOR.chat({"messages": HELLO})

    text, talk = asyncio.run(both())
    assert text.prompts[0].ids == byte_level().encode("one two")
    assert talk.prompts[0].ids == chat().prompts[0].ids


# --- messages -------------------------------------------------------------------------------------------------------------------


def test_contents() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    joined = chat(messages=[{"role": "user", "content": "a\nb"}])
    assert chat(messages=[{"role": "user", "content": parts}]).prompts[0].ids == joined.prompts[0].ids
    chat(
        messages=[
            *HELLO,
            {"role": "assistant", "content": None, "tool_calls": []},
            {"role": "tool", "content": "x", "tool_call_id": "1"},
        ]
    )


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "wizard", "content": "x"}, "messages[0].role"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "user<|im_end|>", "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": {"type": "text"}}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "/etc/hostname"}}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": "\ud83d"}, "messages[0].content"),
        ({"role": "user", "content": "x", "name": 5}, "messages[0].name"),
        ({"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}, "messages[0].tool_calls"),
        ("x", "messages[0]"),
    ],
)  # fmt: skip
def test_messages_at_fault(message: Any, param: str) -> None:
    assert refusal(chat, messages=[message]).param == param


def test_lists_of_messages_at_fault() -> None:
    faulty: list[Any] = [[], None, "x", {"role": "user"}]
    for messages in faulty:
        assert refusal(chat, messages=messages).param == "messages"


def test_template_variables() -> None:
    door = make_door(template="{{ mood }}{% for m in messages %}{{ m.content }}{% endfor %}{{ tools is none }}")
    request = asyncio.run(door.chat({"messages": HELLO, "chat_template_kwargs": {"mood": "glad"}}))
    assert byte_level().vocabulary.decode(request.prompts[0].ids) == "gladhelloTrue"
    for variables in ({"messages": "x"}, {"bos_token": "x"}, {"x": [1]}, {"x": "\ud83d"}, 5):
        assert refusal(chat, chat_template_kwargs=variables).param == "chat_template_kwargs"


def test_a_model_without_a_template_says_so() -> None:
    with pytest.raises(InvalidRequest, match="/v1/completions"):
        asyncio.run(make_door(template=None).chat({"messages": HELLO}))


def test_models_and_limits() -> None:
    assert refusal(error=NotFound, model="nobody").param == "model"
    assert refusal(model=5).param == "model"
    with pytest.raises(Unavailable):
        asyncio.run(make_door(fleet=Fleet()).completion({"prompt": "x"}))


# --- tokenise only ------------------------------------------------------------------------------------------------------------


def test_tokenize_and_detokenize() -> None:
    async def run() -> None:
        assert await DOOR.tokenize({"prompt": "one"}) == (byte_level().encode("one"), LIMIT)
        assert (await DOOR.tokenize({"prompt": "one", "add_special_tokens": False}))[0] == byte_level().encode("one")[
            1:
        ]
        assert (await DOOR.tokenize({"prompt": ""}))[0] == [BOS]
        assert (await DOOR.tokenize({"messages": HELLO}))[0] == (await DOOR.chat({"messages": HELLO})).prompts[0].ids
        assert await DOOR.detokenize({"tokens": byte_level().encode("one two")}) == "<s>one two"
        for body in ({}, {"prompt": 5}, {"prompt": ["x"]}, {"prompt": "x", "tools": [1]}):
            with pytest.raises(InvalidRequest):
                await DOOR.tokenize(body)
        for tokens in (None, "x", [1.5], [VOCAB], [-1]):
            with pytest.raises(InvalidRequest):
                await DOOR.detokenize({"tokens": tokens})

    asyncio.run(run())
