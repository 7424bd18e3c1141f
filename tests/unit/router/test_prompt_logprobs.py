"""Log probabilities of prompts at both doors: who may ask, what the scheduler says, and the shapes of answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lockstep_common import rpc
from lockstep_common.steps import MAX_PROMPT_SCORES, PromptScores, f32, u32
from lockstep_proto.v1 import scheduler_pb2
from lockstep_router.fleet import Submission
from lockstep_router.output import End
from lockstep_router.request import Request
from tests.scripted_worker import toy_scores
from tests.unit.router.build import VOCAB, Router, Say, ScriptedLink, byte_level, make_router, words
from tests.unit.router.test_client import Heard, down, open_session, submission
from tests.unit.router.test_http import CHAT, COMPLETIONS, HELLO, ok, post, streamed
from tests.unit.router.test_server import generate
from tests.unit.router.test_validate import chat, complete, refusal

PROMPT = "Hello there"
IDS = byte_level().encode(PROMPT)
NAME = byte_level().vocabulary.token_text


def scoring(submission: Submission) -> list[Say]:
    """A scheduler that scores prompts as scripted workers do, and says "ab" in each choice."""
    width, a = submission.sampling.prompt_logprobs, words("a")
    scores = toy_scores(submission.prompt, width, VOCAB) if width >= 0 and len(submission.prompt) > 1 else None
    return [
        Say(
            tokens,
            end,
            choice,
            [-1.0] * len(tokens),
            [[(i, -1.0)] for i in tokens],
            scores=scores if not choice else None,
        )
        for choice in range(submission.n)
        for tokens, end in ((a, End.NONE), (words("b"), End.LENGTH))
    ]


@pytest.fixture
def router() -> Router:
    return make_router(ScriptedLink(scoring))


# --- the door ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [complete, chat])
def test_what_a_request_asks_of_the_engine(make: Any) -> None:
    def asked(**fields: Any) -> tuple[int, int]:
        request: Request = make(**fields)
        return request.prompt_logprobs, request.prompts[0].sampling.prompt_logprobs

    assert asked() == (-1, -1)
    assert asked(prompt_logprobs=0) == (0, 0) and asked(prompt_logprobs=5) == (5, 5)
    for value in (-1, 21, True, "1", 1.5):
        assert refusal(make, prompt_logprobs=value).param == "prompt_logprobs"
    assert refusal(make, prompt_logprobs=1, stream=True).param == "prompt_logprobs"


def test_echo_asks_for_as_many_as_the_answer_has() -> None:
    def asked(**fields: Any) -> tuple[int, int, int]:
        request = complete(**fields)
        return request.prompt_logprobs, request.top_logprobs, request.prompts[0].sampling.prompt_logprobs

    assert asked(echo=True) == (-1, -1, -1)
    assert asked(echo=True, logprobs=0) == (-1, 0, 0)
    assert asked(echo=True, logprobs=3, prompt_logprobs=1) == (1, 3, 3)
    assert asked(echo=False, logprobs=3, prompt_logprobs=1) == (1, 3, 1)
    assert chat(echo=True, logprobs=True).prompts[0].sampling.prompt_logprobs == -1, "a chat has no echo"


def test_the_cost_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 2 * len(IDS) * 6
    monkeypatch.setattr("lockstep_router.validate.MAX_PROMPT_SCORES", limit)
    assert limit < MAX_PROMPT_SCORES
    complete(prompt=[PROMPT, PROMPT], prompt_logprobs=5)
    complete(prompt=PROMPT, echo=True, logprobs=5, n=2)
    assert refusal(prompt=[PROMPT, PROMPT], prompt_logprobs=6).param == "prompt_logprobs"
    assert refusal(prompt=[PROMPT, PROMPT], n=2, prompt_logprobs=5).param == "prompt_logprobs"
    assert refusal(prompt=PROMPT, echo=True, logprobs=6, n=2).param == "echo"


# --- REST -------------------------------------------------------------------------------------------------------------


def as_vllm(width: int) -> list[Any]:
    scores = toy_scores(IDS, max(width, 1), VOCAB)
    expected: list[Any] = [None]
    for i, token in enumerate(IDS[1:]):
        best = zip(scores.ids[i].tolist(), scores.values[i].tolist(), range(1, width + 1), strict=False)
        entries = [*list(best)[:width], (token, scores.logprobs[i].item(), scores.ranks[i].item())]
        expected.append({str(t): {"logprob": v, "rank": r, "decoded_token": NAME(t)} for t, v, r in entries})
    return expected


@pytest.mark.parametrize("width", [0, 3])
async def test_a_completions_prompt(router: Router, width: int) -> None:
    body = await ok(router, COMPLETIONS, prompt=[PROMPT, "one"], prompt_logprobs=width, n=2)
    assert [choice["text"] for choice in body["choices"]] == ["ab"] * 4
    for choice in body["choices"][:2]:
        assert choice["prompt_logprobs"] == as_vllm(width) and choice["logprobs"] is None
    assert len(body["choices"][2]["prompt_logprobs"]) == len(byte_level().encode("one"))


async def test_a_chats_prompt(router: Router) -> None:
    body = await ok(router, CHAT, messages=HELLO, prompt_logprobs=1)
    [submission] = router.links[0].submissions.values()
    assert len(body["prompt_logprobs"]) == len(submission.prompt) == body["usage"]["prompt_tokens"]
    assert body["prompt_logprobs"][0] is None and "prompt_logprobs" not in body["choices"][0]
    assert "prompt_logprobs" not in await ok(router, CHAT, messages=HELLO)


async def test_a_prompt_of_one_token(router: Router) -> None:
    body = await ok(router, COMPLETIONS, prompt=[5], prompt_logprobs=2, echo=True, logprobs=1)
    [choice] = body["choices"]
    assert choice["prompt_logprobs"] == [None]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -1.0]


def check_echo(logprobs: dict[str, list[Any]], text: str, width: int) -> None:
    scores = toy_scores(IDS, width, VOCAB)
    tokens = [*IDS, *words("a"), *words("b")]
    assert logprobs["tokens"] == [NAME(token) for token in tokens]
    assert logprobs["token_logprobs"] == [None, *scores.logprobs.tolist(), -1.0, -1.0]
    assert logprobs["top_logprobs"][0] is None
    for i, token in enumerate(IDS[1:]):
        best = dict(zip(map(NAME, scores.ids[i].tolist()), scores.values[i].tolist(), strict=True)) if width else None
        found = logprobs["top_logprobs"][1 + i]
        assert found == (best and best | {NAME(token): scores.logprobs[i].item()})
    offsets = logprobs["text_offset"]
    assert offsets[0] == offsets[1] == 0, "the beginning-of-sequence token has no text"
    assert text[offsets[-2] :] == "ab" and text[: offsets[-2]] == PROMPT and sorted(offsets) == offsets


@pytest.mark.parametrize("width", [0, 2])
async def test_echo_with_logprobs(router: Router, width: int) -> None:
    body = await ok(router, COMPLETIONS, prompt=PROMPT, echo=True, logprobs=width, n=2)
    for choice in body["choices"]:
        assert choice["text"] == PROMPT + "ab" and "prompt_logprobs" not in choice
        check_echo(choice["logprobs"], choice["text"], width)


async def test_a_stream_of_it_joins_to_the_plain_answer(router: Router) -> None:
    body = await ok(router, COMPLETIONS, prompt=PROMPT, echo=True, logprobs=2)
    events = await streamed(router, COMPLETIONS, prompt=PROMPT, echo=True, logprobs=2)
    pieces = [e["choices"][0] for e in events]
    assert pieces[0]["text"] == PROMPT and len(pieces[0]["logprobs"]["tokens"]) == len(IDS)
    joined: dict[str, list[Any]] = {}
    for piece in pieces:
        for name, values in (piece["logprobs"] or {}).items():
            joined.setdefault(name, []).extend(values)
    assert joined == body["choices"][0]["logprobs"]
    assert "".join(piece["text"] for piece in pieces) == body["choices"][0]["text"]


async def test_an_engine_that_sends_none_is_an_error() -> None:
    router = make_router(ScriptedLink(lambda submission: [Say([10], End.LENGTH)]))
    response = await post(router, COMPLETIONS, prompt=PROMPT, prompt_logprobs=1)
    assert response.status_code == 500 and "no log probabilities of the prompt" in response.json()["error"]["message"]


async def test_scores_of_another_length_are_an_error() -> None:
    short = toy_scores(IDS[:-1], 1, VOCAB)
    router = make_router(ScriptedLink(lambda submission: [Say([10], End.LENGTH, scores=short)]))
    response = await post(router, COMPLETIONS, prompt=PROMPT, prompt_logprobs=1)
    assert response.status_code == 500 and f"{len(IDS) - 2} scores" in response.json()["error"]["message"]


async def test_what_is_no_number_is_null() -> None:
    odd = PromptScores(
        *(np.full(len(IDS) - 1, value, kind) for value, kind in ((np.nan, "f4"), (1, "u4"))),
        *(np.full((len(IDS) - 1, 1), value, kind) for value, kind in ((3, "u4"), (-np.inf, "f4"))),
    )
    router = make_router(ScriptedLink(lambda submission: [Say([10], End.LENGTH, scores=odd)]))
    body = await ok(router, COMPLETIONS, prompt=PROMPT, prompt_logprobs=1)
    entry = body["choices"][0]["prompt_logprobs"][1]
    assert entry["3"]["logprob"] == -9999.0 and entry[str(IDS[1])]["logprob"] is None


# --- gRPC -------------------------------------------------------------------------------------------------------------


async def test_the_grpc_door(router: Router) -> None:
    found = await generate(router, text=PROMPT, sampling={"prompt_logprobs": 2}, n=2)
    kinds = [message.DESCRIPTOR.name for message in found]
    assert kinds[:3] == ["Started", "PromptLogprobs", "Chunk"] and kinds.count("PromptLogprobs") == 1
    expected = toy_scores(router.links[0].submissions[1].prompt, 2, VOCAB)
    message = found[1]
    assert f32(message.logprobs).tolist() == expected.logprobs.tolist() and message.width == 2
    assert u32(message.ids).tolist() == expected.ids.flatten().tolist()
    assert "PromptLogprobs" not in [m.DESCRIPTOR.name for m in await generate(router, text=PROMPT)]


# --- the session to a scheduler ---------------------------------------------------------------------------------------


def scored(handle: int, scores: PromptScores) -> scheduler_pb2.FromScheduler:
    message = scheduler_pb2.RequestScores(handle=handle, scores=rpc.write_scores(scores))
    return down(events=scheduler_pb2.Events(term=1, prompts=[message]))


def test_scores_reach_their_request_only() -> None:
    session, sinks = open_session(), [Heard(), Heard()]
    first, second = (session.submit(submission(), sink) for sink in sinks)
    session._receive(scored(second, toy_scores([1, 2, 3], 4, VOCAB)))
    session._receive(scored(first + 1000, toy_scores([1, 2, 3], 4, VOCAB)))
    assert sinks[0].log == [] and sinks[1].log == [("scored", 2, (2, 4))]


def test_scores_that_cannot_be_read_end_their_request() -> None:
    session, sink = open_session(), Heard()
    handle = session.submit(submission(), sink)
    message = scored(handle, toy_scores([1, 2, 3], 4, VOCAB))
    message.events.prompts[0].scores.ids += b"1234"
    session._receive(message)
    assert [kind for kind, _ in sink.log] == ["lost"] and session.in_flight == 0
