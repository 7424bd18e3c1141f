"""One engine group driven by several scheduler processes: answers from every shard, and what the loss of one costs."""

from __future__ import annotations

import asyncio
import random
import re
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from lockstep_bench.client import Answer, Request, SchedulerSession
from lockstep_bench.processes import HOST, free_port, http_get, parse_metrics
from lockstep_common.errors import LockstepError, Unavailable
from lockstep_common.steps import Sampling
from tests.moe_model import make_tiny_moe
from tests.scripted_worker import toy_output
from tests.system.harness import Stack, gather_in_order, scripted, stack
from tests.tiny_model import Shape, make_tiny_model

VOCAB = Shape().vocab


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("shards") / "tiny")


def expected(prompt: Sequence[int], tokens: int) -> tuple[int, ...]:
    sampling = Sampling(max_tokens=tokens)
    return tuple(toy_output(prompt, sampling=sampling, vocab_size=VOCAB, limit=len(prompt) + tokens))


async def started(request: Request) -> None:
    """Returns with the request's first piece."""
    async for _ in request:
        return


async def answered(session: SchedulerSession, prompt: Sequence[int] = (5, 6, 7), tokens: int = 12) -> None:
    answer = await asyncio.wait_for(session.submit(prompt, Sampling(max_tokens=tokens)).answer(), 30)
    assert answer.tokens == (expected(prompt, tokens),)


async def answers_again(*sessions: SchedulerSession) -> None:
    """Each session's scheduler answers, as soon as its group has formed again."""
    for session in sessions:
        async with asyncio.timeout(30):
            while True:
                try:
                    await answered(session)
                    break
                except Unavailable:
                    await asyncio.sleep(0.1)


async def ended_as_expected(request: Request, prompt: Sequence[int], tokens: int) -> None:
    """What of the answer has not been read yet is its end, and is right."""
    rest: list[int] = []
    async with asyncio.timeout(60):
        async for piece in request:
            rest += piece.tokens.tolist()
    assert rest == list(expected(prompt, tokens))[-len(rest) :] and len(rest) > tokens / 2


async def failure(request: Request) -> LockstepError:
    """The error that ends a request."""
    with pytest.raises(LockstepError) as raised:
        async with asyncio.timeout(30):
            async for _ in request:
                pass
    return raised.value


def log_of(s: Stack, shard: int) -> str:
    return s.schedulers[shard].running.log.read_text()


async def test_sessions_on_both_shards_get_right_answers(model: Path) -> None:
    """4 workers, 2 schedulers: requests on both at once, on one alone, and after the group has slept."""
    choose = random.Random(1)
    async with scripted(model, coupled=4, shards=2, with_router=False, worker={"step_ms": 1.0}) as s:
        async with s.session(0) as first, s.session(1) as second:
            jobs, wanted = [], []
            for i in range(40):
                prompt = [choose.randrange(VOCAB) for _ in range(choose.randint(1, 90))]
                tokens = choose.randint(1, 60)
                jobs.append((first, second)[i % 2].submit(prompt, Sampling(max_tokens=tokens)).answer())
                wanted.append(expected(prompt, tokens))
            answers: list[Answer] = await gather_in_order(*jobs)
            assert [a.tokens for a in answers] == [(w,) for w in wanted]
            for _ in range(3):
                await asyncio.sleep(0.3)  # asleep
                await answered(second)
                await answered(first)
        for shard in range(2):
            await s.idle(shard)
        s.fleet.check()


@pytest.mark.slow
async def test_experts_of_a_real_group_move_by_the_loads_of_both_shards(tmp_path: Path) -> None:
    """2 x 1 real workers that share the experts, a scheduler for each: answers are those of one worker while layers move, which
    they do only if the coordinator hears of the other shard's loads."""
    moe = make_tiny_moe(tmp_path / "moe", layers=2)
    prompts = [[i, 2 * i, 3] for i in range(8)]

    async def together(sessions: Sequence[SchedulerSession], salt: str) -> list[tuple[tuple[int, ...], ...]]:
        jobs = [
            sessions[i % len(sessions)].submit(prompt, Sampling(max_tokens=40), salt=f"{salt}{i}").answer()
            for i, prompt in enumerate(prompts)
        ]
        return [answer.tokens for answer in await gather_in_order(*jobs)]

    async with stack(moe, with_router=False) as s, s.session() as session:
        wanted = await together([session], "")
    port = free_port()
    eager = {
        "enable_eplb": True, "eplb_interval_s": 0.1, "eplb_threshold": 1.0, "eplb_window": 50, "expert_load_interval_s": 0.05,
        "max_window": 4, "metrics_port": port,
    }  # fmt: skip
    async with (
        stack(moe, coupled=2, shards=2, with_router=False, scheduler=eager, worker={"num_redundant_experts": 4}) as s,
        s.session(0) as first,
        s.session(1) as second,
    ):
        for number in range(4):
            assert await together([first, second], f"both{number}") == wanted
            assert await together([second], f"second{number}") == wanted
        _, page = await http_get(HOST, port, "/metrics")
        assert parse_metrics(page)["lockstep_expert_layers_moved_total"] >= 1, (
            "nothing moved: the test compared nothing"
        )


async def test_routers_see_each_shard_as_a_scheduler_of_the_model(model: Path) -> None:
    async with scripted(model, coupled=2, shards=2) as s:
        body = {"model": s.model, "prompt": "hello", "max_tokens": 30, "temperature": 0, "ignore_eos": True}
        replies = await gather_in_order(*(s.rest.post("/v1/completions", body) for _ in range(8)))
        assert {reply.status for reply in replies} == {200}
        assert len({reply.body["choices"][0]["text"] for reply in replies}) == 1
        for shard in range(2):
            async with s.session(shard) as session:
                assert (await session.next_load()).generation_tokens >= 60, "a shard got nothing to do"


@pytest.mark.parametrize("killed", [1, 0])
async def test_killed_shard(model: Path, killed: int) -> None:
    """kill -9 of one scheduler: the other says who is away; they form again when it is back, and what ran on the other goes on."""
    rows = {"max_num_seqs": 1}
    async with scripted(model, coupled=2, shards=2, with_router=False, scheduler=rows) as s:
        living = 1 - killed
        async with s.session(living) as session:
            running = session.submit([1, 2, 3], Sampling(max_tokens=900))
            waiting = session.submit([4, 5], Sampling(max_tokens=9))
            async with s.session(killed) as other:
                await answered(other)
            await started(running)
            s.schedulers[killed].running.kill()
            load = await session.until(lambda load: load.reforming)
            assert load.ready and load.waiting == 2 and load.running == 0
            name = "scheduler shard 1" if killed else "the coordinator"
            log = log_of(s, living)
            assert re.search(f"group lost: .*{name}.*{re.escape(s.schedulers[killed].address)}", log), log[-2000:]
            s.schedulers[killed].start()
            await ended_as_expected(running, [1, 2, 3], 900)
            await ended_as_expected(waiting, [4, 5], 9)
            async with s.session(killed) as other:
                await asyncio.gather(answered(session), answered(other))


@pytest.mark.parametrize("shard", [0, 1])
async def test_killed_worker_of_either_shard(model: Path, shard: int) -> None:
    """The group forms again with a new one, and both shards' requests go on."""
    async with (
        scripted(model, coupled=2, shards=2, with_router=False) as s,
        s.session(0) as first,
        s.session(1) as second,
    ):
        running = [session.submit([1, 2, 3], Sampling(max_tokens=900)) for session in (first, second)]
        await asyncio.gather(*map(started, running))
        s.workers[shard].running.kill()
        await asyncio.gather(*(session.until(lambda load: load.reforming) for session in (first, second)))
        for number in (0, 1):
            assert re.search(f"group lost: .*{re.escape(s.workers[shard].address)}", log_of(s, number))
        s.workers[shard].start()
        for request in running:
            await ended_as_expected(request, [1, 2, 3], 900)
        await answers_again(first, second)


async def test_a_vote_that_waits_for_too_long_names_the_shard(model: Path) -> None:
    async with (
        scripted(
            model, coupled=2, shards=2, with_router=False, scheduler={"vote_timeout": 1.0, "reform_timeout": 1.0}
        ) as s,
        s.session(0) as first,
        s.session(1) as second,
    ):
        running = first.submit([1, 2, 3], Sampling(max_tokens=1000))
        await started(running)
        s.schedulers[1].running.signal(signal.SIGSTOP)
        error = await failure(running)
        assert "no vote on plan" in error.message and "dp rank 1" in error.message
        assert s.schedulers[1].address in error.message
        s.schedulers[1].running.signal(signal.SIGCONT)
        await answers_again(first, second)


async def test_a_shard_with_other_settings_is_told_so(model: Path) -> None:
    async with scripted(model, coupled=2, shards=2, with_router=False) as s:
        s.schedulers[1].running.kill()
        s.schedulers[1].flags = {**s.schedulers[1].flags, "max_window": 3}
        s.schedulers[1].start()
        for _ in range(200):
            if s.schedulers[1].running.returncode is not None:
                break
            await asyncio.sleep(0.05)
        assert "same max_window" in log_of(s, 1) and "'3'" in log_of(s, 1)
