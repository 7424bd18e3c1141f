"""What the router's parts say to each other about a request: frozen values, made once at the door."""

from __future__ import annotations

from dataclasses import dataclass, field

from lockstep_common.steps import Sampling
from lockstep_router.output import OutputRules


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a request. Its sampling differs from its siblings' only in `max_tokens`, cut to the context."""

    ids: list[int]
    sampling: Sampling
    text: str = ""  # kept only if it is to be echoed


@dataclass(frozen=True, slots=True)
class Request:
    """A valid request, complete: every default is filled in. Choice `i` of prompt `p` has index p * n + i."""

    id: str
    model: str
    created: int
    chat: bool
    prompts: tuple[Prompt, ...]
    n: int = 1
    rules: OutputRules = field(default_factory=OutputRules)
    top_logprobs: int = -1  # -1: none; n: the sampled token's and those of the n best
    prompt_logprobs: int = -1  # the same of the prompt's tokens
    skip_special_tokens: bool = True
    detokenize: bool = True
    priority: int = 0
    cache_salt: str = ""
    deadline_ms: int = 0
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    return_token_ids: bool = False

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.n

    @property
    def scored(self) -> bool:
        """Whether prompts' log probabilities are part of the answer."""
        return self.prompts[0].sampling.prompt_logprobs >= 0

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt.ids) for prompt in self.prompts)


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine groups admit."""

    max_model_len: int
    vocab_size: int
    max_choices: int
