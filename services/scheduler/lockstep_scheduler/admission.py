"""What makes a request impossible, and what is one too many."""

from __future__ import annotations

from lockstep_common.errors import ContextLengthExceeded, InvalidRequest, Overloaded, Unsupported
from lockstep_common.steps import MAX_BIASES, MAX_LOGPROBS, MAX_PROMPT_SCORES, MAX_STOP_IDS, U32, Sampling
from lockstep_scheduler.blocks import BlockPool
from lockstep_scheduler.ranks import Limits


def check_possible(
    prompt: U32, sampling: Sampling, n: int, adapter: str, *, vocab_size: int, limits: Limits, pool: BlockPool
) -> None:
    """Raises why a request could never run on this group, however empty that was; `pool` is any rank's."""
    if adapter:
        raise Unsupported("adapters are not supported", param="adapter")
    _check_prompt(prompt, vocab_size, limits.max_model_len)
    if not 1 <= n <= limits.max_rows:
        raise InvalidRequest(f"n must be between 1 and {limits.max_rows}", param="n")
    if sampling.max_tokens < 1:
        raise InvalidRequest("max_tokens must be at least 1", param="max_tokens")
    _check_tables(sampling, vocab_size)
    if sampling.prompt_logprobs > MAX_LOGPROBS:
        raise InvalidRequest(f"prompt_logprobs must be at most {MAX_LOGPROBS}", param="prompt_logprobs")
    if len(prompt) * (sampling.prompt_logprobs + 1) > MAX_PROMPT_SCORES:
        raise InvalidRequest(
            f"prompt_logprobs: the prompt's tokens times n + 1 must be at most {MAX_PROMPT_SCORES}",
            param="prompt_logprobs",
        )
    most = min(len(prompt) + limits.max_window, total_tokens(prompt, sampling, limits))
    if -(-most // pool.block_size) + n - 1 > pool.total:
        raise InvalidRequest(
            f"the prompt and its {n} choices need more KV cache than the {pool.total * pool.block_size} tokens there are",
            param="prompt",
        )


def check_room(waiting: int, n: int, max_waiting: int) -> None:
    """Raises `Overloaded` if the queue of `waiting` choices has no room for `n` more."""
    if waiting + n > max_waiting:
        raise Overloaded(
            f"{waiting} choices wait already (max_waiting {max_waiting}); try again later", retry_after_ms=1000
        )


def total_tokens(prompt: U32, sampling: Sampling, limits: Limits) -> int:
    """Prompt and generated tokens at which a choice ends."""
    return min(len(prompt) + sampling.max_tokens, limits.max_model_len)


def _check_tables(sampling: Sampling, vocab_size: int) -> None:
    """Workers have room for so many in each row, and look biases up in the logits."""
    for name, count, most in (
        ("stop_ids", len(sampling.stop_ids), MAX_STOP_IDS),
        ("bias", len(sampling.bias), MAX_BIASES),
    ):
        if count > most:
            raise InvalidRequest(f"{name} has {count} tokens, at most {most} are possible", param=name)
    if (largest := max((token for token, _ in sampling.bias), default=0)) >= vocab_size:
        raise InvalidRequest(f"bias: token id {largest} is out of vocabulary", param="bias")


def _check_prompt(prompt: U32, vocab_size: int, max_model_len: int) -> None:
    if len(prompt) == 0:
        raise InvalidRequest("the prompt has no tokens", param="prompt")
    if len(prompt) >= max_model_len:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains "
            f"{len(prompt)} input tokens, which leaves no room for an answer.",
            param="prompt",
        )
    if int(prompt.max()) >= vocab_size:
        raise InvalidRequest(f"token id {int(prompt.max())} is out of vocabulary", param="prompt")
