"""A request's life: placed, accepted, resubmitted, stopped, cancelled; exactly one end, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest

from lockstep_common.errors import Cancelled, InvalidRequest, LockstepError, Overloaded, RequestLost, Unavailable
from lockstep_router import session as session_module
from lockstep_router.fleet import Submission
from lockstep_router.output import End, Finish
from lockstep_router.request import Request
from lockstep_router.session import Generation
from tests.unit.router.build import Router, Say, ScriptedLink, make_router, saying, words


async def completion(router: Router, prompt: object = "one two", **more: object) -> Request:
    return await router.door.completion({"prompt": prompt, "temperature": 0, **more})


async def opened(router: Router, **more: object) -> Generation:
    return router.sessions.open(await completion(router, **more))


async def test_a_plain_answer_and_its_usage() -> None:
    router = make_router(ScriptedLink(saying(Say(words("Hello"), cached=2), Say(words(" there"), End.LENGTH))))
    with contextlib.closing(await opened(router)) as generation:
        await generation.start()
        [delta] = await generation.finished()
        assert (delta.text, delta.finish) == ("Hello there", Finish("length"))
        usage = generation.usage()
    assert usage.completion_tokens == len(words("Hello")) + len(words(" there"))
    assert usage.cached_tokens == 2 and usage.prompt_tokens == len(generation.request.prompts[0].ids)
    assert router.sessions.active == 0 and router.metric("lockstep_requests_total", outcome="completed") == 1


async def test_a_cancel_between_registration_and_first_token_leaves_nothing() -> None:
    """Closing at random moments, a thousand times; the group's counters and the router's tables are empty after."""
    link = ScriptedLink(saying(Say(words("Hello")), Say(words("!"), End.LENGTH)))
    router = make_router(link, ScriptedLink(saying(Say(words("x"), End.STOP)), address="scheduler:2"))
    chance = random.Random(3)

    async def one() -> None:
        with contextlib.closing(await opened(router)) as generation:
            task = asyncio.ensure_future(generation.start())
            for _ in range(chance.randrange(5)):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    for _ in range(50):
        await asyncio.gather(*(one() for _ in range(20)))
    await asyncio.sleep(0.01)
    assert router.sessions.active == 0
    assert all(link.in_flight == 0 and link.view().sent_choices == 0 for link in router.links)
    assert router.metric("lockstep_requests_in_flight") == 0


async def test_refusals_that_others_may_not_share_move_on() -> None:
    full = ScriptedLink(lambda _: Overloaded("full", retry_after_ms=500), address="full:1")
    free = ScriptedLink(saying(Say(words("B"), End.LENGTH)), address="free:1")
    router = make_router(full, free)
    for _ in range(4):
        with contextlib.closing(await opened(router)) as generation:
            await generation.start()
            assert (await generation.finished())[0].text == "B"
    assert len(free.submissions) == 4 and 1 <= len(full.submissions) <= 4


async def test_one_budget_of_attempts_and_the_first_cause_is_told() -> None:
    links = [
        ScriptedLink(lambda _: Overloaded("full", retry_after_ms=500), address=f"full:{i}")
        for i in range(session_module.MAX_ATTEMPTS + 2)
    ]
    router = make_router(*links)
    with contextlib.closing(await opened(router)) as generation, pytest.raises(Overloaded, match="full"):
        await generation.start()
    assert sum(len(link.submissions) for link in links) == session_module.MAX_ATTEMPTS
    assert router.metric("lockstep_requests_total", outcome="refused") == 1


async def test_a_request_at_fault_is_not_tried_twice() -> None:
    links = [ScriptedLink(lambda _: InvalidRequest("no"), address=f"a:{i}") for i in range(3)]
    router = make_router(*links)
    with contextlib.closing(await opened(router)) as generation, pytest.raises(InvalidRequest):
        await generation.start()
    assert sum(len(link.submissions) for link in links) == 1


async def test_a_scheduler_that_goes_away_before_any_token_is_replaced() -> None:
    router = make_router(ScriptedLink(address="a:1"), ScriptedLink(address="b:1"))
    with contextlib.closing(await opened(router)) as generation:
        task = asyncio.ensure_future(generation.start())
        await asyncio.sleep(0)
        first, second = sorted(router.links, key=lambda link: -link.in_flight)
        first.sinks.pop(1).lost(Unavailable("away"))
        second.sinks[1].accepted()
        await task
        ids = {link.submissions[1].request_id for link in router.links}
        assert len(ids) == 2, "no two submissions share an id"
        second.say(1, Say(words("ok"), End.LENGTH), 0)
        assert (await generation.finished())[0].text == "ok"


async def test_text_that_was_sent_is_never_started_anew() -> None:
    router = make_router(ScriptedLink(), ScriptedLink(address="b:1"))
    with contextlib.closing(await opened(router)) as generation:
        task = asyncio.ensure_future(generation.start())
        await asyncio.sleep(0)
        [link] = [link for link in router.links if link.in_flight]
        link.say(1, Say(words("some")), 0)
        await task
        link.sinks[1].lost(Unavailable("away"))
        with pytest.raises(Unavailable):
            await generation.finished()
    assert sum(len(link.submissions) for link in router.links) == 1
    assert router.metric("lockstep_requests_total", outcome="failed") == 1


async def test_a_scheduler_that_forgot_gets_the_request_again_if_nothing_was_delivered() -> None:
    link = ScriptedLink()
    router = make_router(link)
    with contextlib.closing(await opened(router)) as generation:
        task = asyncio.ensure_future(generation.start())
        await asyncio.sleep(0)
        link.sinks.pop(1).refused(RequestLost("unknown"))
        assert list(link.sinks) == [2]
        link.sinks[2].accepted()
        await task


async def test_no_answer_to_a_submission_is_an_error_in_time() -> None:
    link = ScriptedLink()
    router = make_router(link)
    router.sessions.accept_seconds = 0.01
    with contextlib.closing(await opened(router)) as generation, pytest.raises(Unavailable, match="in time"):
        await generation.start()
    assert link.cancelled == [1]


async def test_a_stop_string_tells_the_scheduler_where() -> None:
    link = ScriptedLink()
    router = make_router(link)
    with contextlib.closing(await opened(router, stop="END", max_tokens=100)) as generation:
        task = asyncio.ensure_future(generation.start())
        await asyncio.sleep(0)
        link.sinks[1].accepted()
        await task
        tokens = words("so END")
        link.say(1, Say([*tokens, *words(" and more")]), 0)
        assert link.finishes == [(1, 0, len(tokens))]
        [delta] = await generation.finished()
        assert (delta.text, delta.finish) == ("so ", Finish("stop", "END"))
        assert generation.usage().completion_tokens == len(tokens)
        link.say(1, Say(words("late"), End.STOP), len(tokens) + len(words(" and more")))
        assert generation.usage().completion_tokens == len(tokens), "what was on its way does not count"
    assert link.cancelled == [], "its end is on the way"


async def test_a_resumed_stream_repeats_without_harm() -> None:
    link = ScriptedLink()
    router = make_router(link)
    with contextlib.closing(await opened(router)) as generation:
        task = asyncio.ensure_future(generation.start())
        await asyncio.sleep(0)
        link.sinks[1].accepted()
        await task
        link.say(1, Say([10, 11, 12]), 0)
        assert link.sinks[1].received() == [3]
        link.say(1, Say([11, 12, 13]), 1)
        link.say(1, Say([99, 14], End.LENGTH), 3)
        await generation.finished()
        assert generation._outputs[0].ids == [10, 11, 12, 13, 14]
    assert router.metric("lockstep_resume_mismatches_total") == 1


async def test_missing_tokens_end_the_request() -> None:
    link = ScriptedLink(lambda _: [Say([10]), Say([], seconds=0.01)])
    router = make_router(link)
    with contextlib.closing(await opened(router)) as generation:
        await generation.start()
        await generation.changed()
        link.say(1, Say([12]), 2)
        with pytest.raises(LockstepError, match="missing"):
            await generation.finished()
    assert link.in_flight == 0


async def test_several_prompts_and_choices_have_one_index_space() -> None:
    def script(submission: Submission) -> list[Say]:
        number = submission.request_id.split(".")[1]
        return [Say(words(f"{number}{choice}"), End.STOP, choice, cached=1) for choice in reversed(range(2))]

    router = make_router(ScriptedLink(script))
    request = await completion(router, ["one", "two", "three"], n=2)
    with contextlib.closing(router.sessions.open(request)) as generation:
        await generation.start()
        assert [router.tokenizer.vocabulary.decode(delta.tokens) for delta in await generation.finished()] == [
            "00", "01", "10", "11", "20", "21",
        ]  # fmt: skip
        usage = generation.usage()
        assert usage.prompt_tokens == request.prompt_tokens and usage.cached_tokens == 3
    assert router.metric("lockstep_choices_total", finished_reason="stop") == 6
    assert router.metric("lockstep_requests_total", outcome="completed") == 1


async def test_one_prompt_refused_ends_the_others() -> None:
    def script(submission: Submission) -> list[Say] | LockstepError:
        return InvalidRequest("no") if ".1." in submission.request_id else [Say(words("x"), seconds=1)]

    router = make_router(ScriptedLink(script))
    request = await completion(router, ["one", "two", "three"])
    with contextlib.closing(router.sessions.open(request)) as generation, pytest.raises(InvalidRequest):
        await generation.start()
    assert router.links[0].in_flight == 0


async def test_cached_tokens_never_exceed_the_prompt() -> None:
    router = make_router(ScriptedLink(saying(Say([10], End.STOP, cached=10**6))))
    with contextlib.closing(await opened(router)) as generation:
        await generation.start()
        await generation.finished()
        assert generation.usage().cached_tokens == generation.usage().prompt_tokens


async def test_a_reader_that_does_not_read_loses_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "MAX_UNREAD", 50)
    link = ScriptedLink(lambda _: [Say([10] * 10) for _ in range(20)])
    router = make_router(link)
    with contextlib.closing(await opened(router, max_tokens=190)) as generation:
        await generation.start()
        await asyncio.sleep(0.01)
        assert isinstance(generation.error, Cancelled) and link.in_flight == 0
        assert sum(len(output.ids) for output in generation._outputs) <= 70


async def test_deltas_of_a_slow_reader_are_merged() -> None:
    router = make_router(ScriptedLink(lambda _: [*(Say(words("a")) for _ in range(50)), Say(words("b"), End.STOP)]))
    with contextlib.closing(await opened(router, max_tokens=190)) as generation:
        await generation.start()
        await asyncio.sleep(0.01)
        [(index, delta)] = generation.take()
        assert index == 0 and delta.text == "a" * 50 and len(delta.tokens) == 51
        assert generation.take() == []


async def test_cancel_by_id_and_by_the_scheduler() -> None:
    router = make_router(ScriptedLink())
    with contextlib.closing(await opened(router)) as generation:
        task = asyncio.ensure_future(generation.start())
        await asyncio.sleep(0)
        assert router.sessions.cancel(generation.request.id) and not router.sessions.cancel("nobody")
        with pytest.raises(Cancelled):
            await task
    router = make_router(ScriptedLink(saying(Say([], End.CANCELLED))))
    with contextlib.closing(await opened(router)) as generation:
        await generation.start()
        with pytest.raises(Cancelled):
            await generation.finished()


async def test_draining_refuses_new_work_waits_for_old_and_is_bounded() -> None:
    router = make_router(ScriptedLink(saying(Say([10]), Say([11], End.STOP, seconds=0.02))))
    with contextlib.closing(await opened(router)) as generation:
        await generation.start()
        draining = asyncio.ensure_future(router.sessions.drained(5))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="shutting down"):
            await opened(router)
        await generation.finished()
    assert await draining
    router = make_router(ScriptedLink(saying(Say([10]))))
    with contextlib.closing(await opened(router)) as generation:
        await generation.start()
        assert not await router.sessions.drained(0.01)
        assert isinstance(generation.error, Unavailable)


async def test_time_to_first_token_and_gaps_are_observed() -> None:
    link = ScriptedLink()
    router = make_router(link)
    with contextlib.closing(await opened(router)) as generation:
        task = asyncio.ensure_future(generation.start())
        await asyncio.sleep(0)
        link.sinks[1].accepted()
        await task
        router.clock.advance(0.5)
        link.say(1, Say([10]), 0)
        router.clock.advance(0.2)
        link.say(1, Say([11, 12], End.LENGTH), 1)
        await generation.finished()
    assert router.metric("lockstep_time_to_first_token_seconds_sum") == pytest.approx(0.5)
    assert router.metric("lockstep_inter_token_latency_seconds_sum") == pytest.approx(0.1)
    assert router.metric("lockstep_request_time_per_output_token_seconds_sum") == pytest.approx(0.1)
    assert router.metric("lockstep_e2e_request_latency_seconds_sum") == pytest.approx(0.7)
    assert router.metric("lockstep_generation_tokens_total") == 3
