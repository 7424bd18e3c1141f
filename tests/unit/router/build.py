"""Small real parts for the router's tests: tokenizers, a scripted link, and a router around them without sockets."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import httpx
from fastapi import FastAPI
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as HfTokenizer

from lockstep_common.clock import ManualClock
from lockstep_common.errors import LockstepError
from lockstep_common.steps import PromptScores
from lockstep_router.fleet import Fleet, GroupFacts, Load, Sink, Submission
from lockstep_router.http.app import build_app
from lockstep_router.http.routes import Context
from lockstep_router.metrics import Metrics
from lockstep_router.output import End
from lockstep_router.policy import GroupView
from lockstep_router.session import Sessions
from lockstep_router.template import ChatTemplate
from lockstep_router.text import Tokenizer, wrap
from lockstep_router.validate import Door, SamplingDefaults

LINES = [
    "The quick brown fox jumps over the lazy dog. Hello, hello there! 3.14 and 42.",
    "Lockstep serves models; every worker takes every step together.",
    "naïve café, Grüße, 日本語 テキスト, emoji 🎉🎉 and so on.",
    "user system assistant one two three four five",
]
CONTROLS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
BOS, EOS, TURN, TURN_END = range(4)
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LIMIT, VOCAB, MAX_CHOICES = 200, 600, 8


@cache
def byte_level() -> Tokenizer:
    """Byte-level BPE, as GPT-2 and Llama 3 have it: every byte is a token. Ids 0 to 3 are control tokens."""
    hf = HfTokenizer(models.BPE())
    hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    hf.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=CONTROLS,
        show_progress=False,
    )
    hf.train_from_iterator(LINES, trainer)
    hf.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return wrap(hf, {"bos_token": "<s>", "eos_token": {"content": "<|im_end|>"}}, eos_ids=(EOS, TURN_END))


@cache
def sentencepiece(prepend_scheme: str = "first") -> Tokenizer:
    """Metaspace pieces with byte fallback, as Llama 2 and Mistral have it."""
    hf = HfTokenizer(models.BPE())
    hf.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme, split=False)
    hf.train_from_iterator(LINES[:2], trainers.BpeTrainer(vocab_size=150, show_progress=False))
    trained = json.loads(hf.to_str())["model"]
    pieces = ["<unk>", *CONTROLS, *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    for piece in sorted(trained["vocab"], key=trained["vocab"].__getitem__):
        vocab.setdefault(piece, len(vocab))
    merges = [tuple(merge) for merge in trained["merges"]]
    hf = HfTokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    hf.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme, split=False)
    hf.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    hf.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROLS])
    return wrap(hf, {"bos_token": "<s>", "eos_token": "</s>"}, eos_ids=(2,))


@dataclass(frozen=True)
class Say:
    """One scripted event of a choice."""

    tokens: Sequence[int]
    end: End = End.NONE
    choice: int = 0
    logprobs: Sequence[float] = ()
    tops: Sequence[Sequence[tuple[int, float]]] = ()
    error: LockstepError | None = None
    cached: int = -1
    scores: PromptScores | None = None  # of the prompt, before the tokens
    seconds: float = 0.0


Script = Callable[[Submission], Sequence[Say] | LockstepError]


@dataclass
class ScriptedLink:
    """A scheduler in memory. With a script it answers by itself; without, a test plays the scheduler."""

    script: Script | None = None
    address: str = "scheduler:1"
    facts: GroupFacts | None = field(
        default_factory=lambda: GroupFacts("tiny", 1, LIMIT, VOCAB, 16, MAX_CHOICES, 1, 1, "cpu", "float32")
    )
    load: Load = field(default_factory=lambda: Load(ready=True, max_running=8))
    connected: bool = True
    sinks: dict[int, Sink] = field(default_factory=dict)
    submissions: dict[int, Submission] = field(default_factory=dict)
    cancelled: list[int] = field(default_factory=list)
    finishes: list[tuple[int, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def in_flight(self) -> int:
        return len(self.sinks)

    def view(self) -> GroupView:
        load = self.load
        return GroupView(
            ready=self.connected and load.ready and not load.draining,
            running=load.running,
            waiting=load.waiting,
            max_running=load.max_running,
            waiting_uncached_tokens=load.waiting_uncached_tokens,
            kv_usage=load.kv_usage,
            sent_choices=sum(self.submissions[h].n for h in self.sinks),
            sent_tokens=sum(len(self.submissions[h].prompt) for h in self.sinks),
        )

    def submit(self, submission: Submission, sink: Sink) -> int:
        handle = next(self._numbers)
        self.sinks[handle], self.submissions[handle] = sink, submission
        if self.script is not None:
            task = asyncio.create_task(self._play(handle, self.script(submission)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return handle

    def cancel(self, handle: int) -> None:
        if self.sinks.pop(handle, None) is not None:
            self.cancelled.append(handle)

    def finish(self, handle: int, choice: int, offset: int) -> None:
        self.finishes.append((handle, choice, offset))

    def say(self, handle: int, event: Say, offset: int) -> None:
        if (sink := self.sinks.get(handle)) is not None:
            if event.scores is not None:
                sink.scored(event.scores)
            sink.event(
                event.choice,
                offset,
                list(event.tokens),
                event.end,
                event.logprobs,
                event.tops,
                event.cached,
                event.error,
            )

    async def _play(self, handle: int, script: Sequence[Say] | LockstepError) -> None:
        await asyncio.sleep(0)
        if isinstance(script, LockstepError):
            self.sinks.pop(handle).refused(script)
            return
        if handle in self.sinks:
            self.sinks[handle].accepted()
        offsets: dict[int, int] = {}
        ended: set[int] = set()
        for event in script:
            await asyncio.sleep(event.seconds)
            self.say(handle, event, offsets.get(event.choice, 0))
            offsets[event.choice] = offsets.get(event.choice, 0) + len(event.tokens)
            if event.end:
                ended.add(event.choice)
        if len(ended) == self.submissions[handle].n:
            self.sinks.pop(handle, None)


@dataclass
class Router:
    """A whole router in one process, without its sockets."""

    links: list[ScriptedLink]
    tokenizer: Tokenizer
    fleet: Fleet
    door: Door
    sessions: Sessions
    metrics: Metrics
    clock: ManualClock
    app: FastAPI

    def client(self, **headers: str) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://router", headers=headers)

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


def make_door(
    tokenizer: Tokenizer | None = None,
    *,
    fleet: Fleet | None = None,
    template: str | None = TEMPLATE,
    defaults: SamplingDefaults | None = None,
    seed: int | None = 1,
) -> Door:
    tokenizer = tokenizer or byte_level()
    return Door(
        names=("tiny",),
        tokenizer=tokenizer,
        template=ChatTemplate(template, tokenizer) if template is not None else None,
        defaults=defaults or SamplingDefaults(),
        limits=(fleet or Fleet([ScriptedLink()])).limits,
        seed=seed,
    )


def make_router(*links: ScriptedLink, tokenizer: Tokenizer | None = None, api_key: str = "") -> Router:
    tokenizer = tokenizer or byte_level()
    fleet, clock = Fleet(links), ManualClock()
    door, metrics = make_door(tokenizer, fleet=fleet), Metrics(fleet)
    sessions = Sessions(fleet, tokenizer.vocabulary, metrics, clock)
    context = Context(door=door, fleet=fleet, sessions=sessions, metrics=metrics, started=1, version="0")
    app = build_app(context, api_key=api_key)
    return Router(list(links), tokenizer, fleet, door, sessions, metrics, clock, app)


def saying(*events: Say) -> Script:
    """A script that is the same for every request."""
    return lambda submission: events


def words(text: str) -> list[int]:
    """The ids of a text of the byte-level tokenizer."""
    return byte_level().encode(text, add_special_tokens=False)


def stream_events(body: str) -> list[Any]:
    """The JSON of a stream's events; the last one must be [DONE]."""
    lines = [line.removeprefix("data: ") for line in body.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]
