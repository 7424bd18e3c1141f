"""A request's life: placed on a group, submitted, its events consumed, cancelled or ended; the same for every front.

    with contextlib.closing(sessions.open(request)) as generation:
        await generation.start()                 # placed and accepted, or an error
        while not generation.over:
            await generation.changed()
            for index, delta in generation.take(): ...

Everything runs on the event loop; events are folded into the choices' outputs as they arrive, so a slow reader delays
nobody and stop strings are found at once. `take` merges what came since the last call.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from lockstep_common.clock import Clock
from lockstep_common.errors import Cancelled, LockstepError, Overloaded, RequestLost, Unavailable
from lockstep_common.steps import NO_F32, NO_U32, PromptScores
from lockstep_router.fleet import Fleet, Link, Submission
from lockstep_router.metrics import Metrics
from lockstep_router.output import ChoiceOutput, Delta, End
from lockstep_router.request import Prompt, Request, Usage
from lockstep_router.text import Detokenizer, Vocabulary

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 3  # places that one prompt is submitted to, all causes together
MAX_UNREAD = 1 << 17  # tokens and log probabilities that a choice may keep for a reader that does not read
NO_SCORES = PromptScores(NO_F32, NO_U32, NO_U32.reshape(0, 0), NO_F32.reshape(0, 0))


class Sessions:
    """All requests in flight of this router."""

    def __init__(
        self, fleet: Fleet, vocabulary: Vocabulary, metrics: Metrics, clock: Clock, *, accept_seconds: float = 10.0
    ) -> None:
        self.fleet = fleet
        self.vocabulary = vocabulary
        self.metrics = metrics
        self.clock = clock
        self.accept_seconds = accept_seconds
        self.draining = False
        self._active: dict[str, Generation] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def open(self, request: Request, *, arrival: float | None = None) -> Generation:
        """Registers the request; the caller closes the generation. Unavailable while the router drains.

        `arrival` is when it came in, by the clock's `now` (default: now).
        """
        if self.draining:
            raise Unavailable("this router is shutting down; try another one", retry_after_ms=1000)
        generation = Generation(self, request, self.clock.now() if arrival is None else arrival)
        self._active[request.id] = generation
        self._idle.clear()
        return generation

    def cancel(self, request_id: str) -> bool:
        """Ends a request by its id; False if there is none."""
        generation = self._active.get(request_id)
        if generation is None:
            return False
        generation.fail(Cancelled("the request was cancelled"))
        return True

    @property
    def active(self) -> int:
        return len(self._active)

    async def drained(self, timeout: float) -> bool:
        """Takes nothing new and waits until all is done; then ends what is left. True if nothing was."""
        self.draining = True
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            log.warning("%d requests outlived the drain timeout of %g s", len(self._active), timeout)
            for generation in list(self._active.values()):
                generation.fail(Unavailable("the router shut down before the answer was complete"))
            return False
        return True

    def _closed(self, request_id: str) -> None:
        self._active.pop(request_id, None)
        if not self._active:
            self._idle.set()


class Generation:
    """One request in flight. Ends exactly once: `over` with all choices finished, or with `error`."""

    def __init__(self, sessions: Sessions, request: Request, arrival: float) -> None:
        self.request = request
        self.error: LockstepError | None = None
        self._sessions = sessions
        self._clock = sessions.clock
        self._metrics = sessions.metrics
        self._arrival = arrival
        self._first = self._last = 0.0  # when tokens came
        self._closed = False
        self._loop = asyncio.get_running_loop()  # looked up once: every look costs a system call
        self._waiter: asyncio.Future[None] | None = None
        self._news: set[int] = set()
        self._unfinished = request.choices
        self._runs = [_Run(self, prompt, i) for i, prompt in enumerate(request.prompts)]
        self._outputs = [output for run in self._runs for output in run.outputs]
        self._metrics.opened(
            request.prompt_tokens, request.choices, max(prompt.sampling.max_tokens for prompt in request.prompts)
        )

    # --- for the fronts

    @property
    def over(self) -> bool:
        """True if nothing will come any more (what came may still have to be taken)."""
        return self._unfinished == 0 or self.error is not None

    async def start(self) -> None:
        """Places and submits all prompts and waits until the schedulers have accepted them. Raises what they refuse with."""
        try:
            for run in self._runs:
                run.submit()
            async with asyncio.timeout(self._sessions.accept_seconds):
                while self.error is None and not all(run.is_accepted for run in self._runs):
                    await self._wait()
        except TimeoutError:
            self.fail(Unavailable("the scheduler did not answer in time", retry_after_ms=1000))
        except LockstepError as error:  # no group is ready
            self.fail(error)
        if self.error is not None:
            raise self.error

    async def changed(self, timeout: float | None = None) -> bool:
        """Waits until there is something to take or all is over. False if nothing happened for `timeout` seconds."""
        if self._news or self.over:
            return True
        timer = self._loop.call_later(timeout, self._wake) if timeout is not None else None
        try:
            await self._wait()
        finally:
            if timer is not None:
                timer.cancel()
        return bool(self._news) or self.over

    def take(self) -> list[tuple[int, Delta]]:
        """(index, delta) of each choice that has something new, by index."""
        if not self._news:
            return []
        news = sorted(self._news)
        self._news.clear()
        return [(index, self._outputs[index].take()) for index in news]

    async def finished(self) -> list[Delta]:
        """The whole answers of all choices, in order. Raises the error that ended the request, if one did."""
        while not self.over:
            await self._wait()
        if self.error is not None:
            raise self.error
        self._news.clear()
        return [output.take() for output in self._outputs]

    def usage(self) -> Usage:
        """Tokens so far. A prompt counts once however many choices it has."""
        return Usage(
            prompt_tokens=self.request.prompt_tokens,
            completion_tokens=sum(len(output.ids) for output in self._outputs),
            cached_tokens=sum(run.cached for run in self._runs),
        )

    def scores(self, prompt: int) -> PromptScores | None:
        """The scores of a prompt, if they were asked for: there once any of its choices has something to take."""
        return self._runs[prompt].scores

    def fail(self, error: LockstepError) -> None:
        """Ends the request with an error, unless it is over; its rows are given back."""
        if self.over:
            return
        self.error = error
        for run in self._runs:
            run.cancel()
        self._wake()

    def close(self) -> None:
        """Gives back whatever the request still holds. Every opened generation is closed, however it went."""
        if self._closed:
            return
        self._closed = True
        self.fail(Cancelled("the client went away"))
        self._sessions._closed(self.request.id)
        usage, now = self.usage(), self._clock.now()
        self._metrics.closed(
            self._outcome(),
            seconds=now - self._arrival,
            decode_seconds=self._last - self._first,
            prompt_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
        )

    def _outcome(self) -> str:
        if self.error is None:
            return "completed"
        if isinstance(self.error, Cancelled):
            return "cancelled"
        return "failed" if self._first else "refused"

    # --- for the runs

    def _tokens_came(self, index: int, tokens: int) -> None:
        output = self._outputs[index]
        if tokens:
            now = self._clock.now()
            if not self._first:
                self._first = now
                self._metrics.first_token(now - self._arrival)
            else:
                self._metrics.gap(now - self._last, tokens)
            self._last = now
        if output.finish is not None:
            self._unfinished -= 1
            self._metrics.finished(output.finish.reason)
        elif output.unread > MAX_UNREAD:
            self.fail(Cancelled("the client reads its answer too slowly"))
        self._news.add(index)
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


class _Run:
    """One prompt of a request, at one scheduler. The link calls it back (`fleet.Sink`)."""

    def __init__(self, generation: Generation, prompt: Prompt, number: int) -> None:
        request, vocabulary = generation.request, generation._sessions.vocabulary
        self.is_accepted = False
        self.cached = 0
        asked = prompt.sampling.prompt_logprobs >= 0
        self.scores = NO_SCORES if asked and len(prompt.ids) == 1 else None  # there is nothing before its one token
        self._unscored = asked and len(prompt.ids) > 1
        self.outputs = [
            ChoiceOutput(request.rules, _detokenizer(request, vocabulary, prompt.ids)) for _ in range(request.n)
        ]
        self._generation = generation
        self._prompt = prompt
        self._number = number
        self._received = [0] * request.n
        self._stopped: dict[int, int] = {}
        self._attempts = 0
        self._tried: list[Link] = []
        self._link: Link | None = None
        self._handle = 0

    def submit(self) -> None:
        """Places the prompt and sends it. Unavailable if no group is ready."""
        generation, request = self._generation, self._generation.request
        link = generation._sessions.fleet.place(without=self._tried)
        self._attempts += 1
        self._link = link
        self._handle = link.submit(
            Submission(
                request_id=f"{request.id}.{self._number}.{self._attempts}",
                prompt=self._prompt.ids,
                sampling=self._prompt.sampling,
                n=request.n,
                priority=request.priority,
                cache_salt=request.cache_salt,
                deadline_ms=request.deadline_ms,
            ),
            self,
        )

    def cancel(self) -> None:
        """Gives the rows back, unless every choice has ended: then its end is on the way."""
        if self._link is not None and any(output.finish is None for output in self.outputs):
            self._link.cancel(self._handle)
        self._link = None

    # --- the sink

    def accepted(self) -> None:
        self.is_accepted = True
        self._generation._wake()

    def refused(self, error: LockstepError) -> None:
        if isinstance(error, RequestLost):  # its scheduler started anew
            self._elsewhere(Unavailable("the scheduler lost the request", retry_after_ms=1000), again=True)
        elif isinstance(error, Overloaded | Unavailable):
            self._elsewhere(error)
        else:
            self._generation.fail(error)

    def lost(self, error: LockstepError) -> None:
        self._elsewhere(error)

    def scored(self, scores: PromptScores) -> None:
        if len(scores) != len(self._prompt.ids) - 1:
            self._generation.fail(LockstepError(f"{len(scores)} scores of a prompt of {len(self._prompt.ids)} tokens"))
            return
        self.scores, self._unscored = scores, False

    def event(
        self,
        choice: int,
        offset: int,
        tokens: list[int],
        end: End,
        logprobs: Sequence[float],
        tops: Sequence[Sequence[tuple[int, float]]],
        cached: int,
        error: LockstepError | None,
    ) -> None:
        if self._link is None:
            return  # ended here meanwhile
        generation, output = self._generation, self.outputs[choice]
        if not self.is_accepted:
            self.accepted()
        if cached >= 0 and choice == 0:
            self.cached = min(cached, len(self._prompt.ids))
        known = self._received[choice] - offset
        if known < 0:
            generation.fail(LockstepError(f"tokens {self._received[choice]} to {offset} of a choice are missing"))
            return
        if known:  # a resumed stream repeats what came before
            self._compare(output, offset, tokens[:known])
            tokens, logprobs, tops = tokens[known:], logprobs[known:], tops[known:]
        self._received[choice] += len(tokens)
        if output.finish is not None:
            return
        if end in (End.ERROR, End.CANCELLED):
            generation.fail(error or Cancelled("the scheduler cancelled the request"))
            return
        if self._unscored:
            generation.fail(LockstepError("the engine sent no log probabilities of the prompt"))
            return
        stopped = output.feed(tokens, end, logprobs, tops)
        if stopped is not None:
            self._stopped[choice] = stopped
            if not end:
                self._link.finish(self._handle, choice, stopped)
        if tokens or end:
            generation._tokens_came(self._number * generation.request.n + choice, len(tokens))

    def received(self) -> list[int]:
        return list(self._received)

    def stopped(self) -> dict[int, int]:
        return dict(self._stopped)

    def _compare(self, output: ChoiceOutput, offset: int, tokens: list[int]) -> None:
        before = output.ids[offset : offset + len(tokens)]
        differing = sum(a != b for a, b in zip(before, tokens, strict=False))
        if differing:
            self._generation._metrics.mismatches.inc(differing)
            log.warning("request %s: a resumed stream differs in %d tokens", self._generation.request.id, differing)

    def _elsewhere(self, error: LockstepError, *, again: bool = False) -> None:
        """Submits the prompt anew if nothing of its answer has come and the attempts allow; else the request ends."""
        generation, link = self._generation, self._link
        if link is None or generation.over:
            return
        if not again:
            self._tried.append(link)
        if any(self._received) or self._attempts >= MAX_ATTEMPTS:
            generation.fail(error)
            return
        try:
            self.submit()
        except Unavailable:
            generation.fail(error)
        else:
            generation._metrics.resubmitted.inc()


def _detokenizer(request: Request, vocabulary: Vocabulary, prompt: Sequence[int]) -> Detokenizer | None:
    if not request.detokenize:
        return None
    return Detokenizer(vocabulary, skip_special_tokens=request.skip_special_tokens, prompt=prompt)
