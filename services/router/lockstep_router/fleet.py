"""The engine groups that this router knows: links to their schedulers, what they admit, and placement over them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from lockstep_common.errors import LockstepError, Unavailable
from lockstep_common.steps import PromptScores, Sampling
from lockstep_router.output import End
from lockstep_router.policy import GroupView, choose
from lockstep_router.request import Limits


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """What a group is (`GroupFacts` of scheduler.proto)."""

    model: str
    epoch: int
    max_model_len: int
    vocab_size: int
    block_size: int
    max_choices: int
    dp: int
    cp: int
    device: str
    dtype: str


@dataclass(frozen=True, slots=True)
class Load:
    """A group's last snapshot (`Load` of common.proto)."""

    running: int = 0
    waiting: int = 0
    waiting_uncached_tokens: int = 0
    kv_usage: float = 0.0
    step: int = 0
    silence_ms: int = 0
    ready: bool = False
    draining: bool = False
    max_running: int = 0
    generation_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    overrun_row_steps: int = 0
    durable: bool = False
    reforming: bool = False


@dataclass(frozen=True, slots=True)
class Submission:
    """One prompt on its way to a scheduler."""

    request_id: str
    prompt: list[int]
    sampling: Sampling
    n: int
    priority: int = 0
    cache_salt: str = ""
    deadline_ms: int = 0


class Sink(Protocol):
    """Who hears about a submission. Calls come on the event loop; none of them blocks."""

    def accepted(self) -> None: ...

    def refused(self, error: LockstepError) -> None:
        """The only event, or, after a broken stream, the last one: the scheduler does not hold the request."""

    def lost(self, error: LockstepError) -> None:
        """The last event: the scheduler is away and did not come back in time."""

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
        """A choice got tokens, or ended, or both. `cached` is -1 where the message does not say it."""

    def scored(self, scores: PromptScores) -> None:
        """The prompt's scores, if they were asked for: before the first token of any choice; after a resume maybe again."""

    def received(self) -> list[int]:
        """Tokens of each choice that have come: from there on a resumed stream must go on."""

    def stopped(self) -> dict[int, int]:
        """Choices that a stop string ended here, and at how many tokens."""


class Link(Protocol):
    """One scheduler. `submit` and the rest are valid only while `view().ready`, or for a handle that it returned."""

    @property
    def address(self) -> str: ...
    @property
    def facts(self) -> GroupFacts | None: ...
    @property
    def load(self) -> Load: ...
    @property
    def in_flight(self) -> int: ...
    @property
    def connected(self) -> bool: ...
    def view(self) -> GroupView: ...
    def submit(self, submission: Submission, sink: Sink) -> int: ...
    def cancel(self, handle: int) -> None: ...
    def finish(self, handle: int, choice: int, offset: int) -> None: ...


class Fleet:
    """All links. Owns the rotation that breaks ties, and remembers what groups admit while they are away."""

    def __init__(self, links: Iterable[Link] = ()) -> None:
        self.links: list[Link] = list(links)
        self._rotation = 0
        self._limits: Limits | None = None

    @property
    def ready(self) -> bool:
        return any(link.view().ready for link in self.links)

    def limits(self) -> Limits:
        """What every known group admits: groups of unequal size are used as if all were the smallest."""
        known = [link.facts for link in self.links if link.facts is not None]
        if known:
            self._limits = Limits(
                max_model_len=min(facts.max_model_len for facts in known),
                vocab_size=min(facts.vocab_size for facts in known),
                max_choices=min(facts.max_choices for facts in known),
            )
        if self._limits is None:
            raise no_group()
        return self._limits

    def place(self, *, without: Iterable[Link] = ()) -> Link:
        """The link for the next request; Unavailable if no group is ready. `without`: those that refused it already."""
        tried = set(map(id, without))
        links = [link for link in self.links if id(link) not in tried]
        index = choose([link.view() for link in links], rotation=self._rotation)
        if index is None:
            raise no_group()
        self._rotation += 1
        return links[index]


def no_group() -> Unavailable:
    return Unavailable("no engine group is ready; try again shortly", retry_after_ms=1000)
