"""Sampling in plain torch: the definition of correct, on any device.

Every op takes the logits of n rows, [n, V] float32, and treats each row by itself: a row's bits do not depend on the others.
None changes its arguments.
"""

from __future__ import annotations

import torch

from lockstep_kernels.sampling.state import Feature, Float, Int, RowTables

LOWEST_LOGPROB = -9999.0  # what a logprob of minus infinity is reported as: JSON has no infinity

_INT32_MULTIPLIERS = (0x7FEB352D, 0x846CA68B - (1 << 32))  # of the lowbias32 hash
_INT64_MULTIPLIERS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))  # of splitmix64
_GOLDEN_64 = 0x9E3779B97F4A7C15 - (1 << 64)
_GOLDEN_32 = 0x9E3779B9 - (1 << 32)


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens [n] int64, values [n]): the first largest logit of each row. A NaN counts as the largest."""
    tokens = logits.argmax(-1)
    return tokens, logits.gather(1, tokens[:, None])[:, 0]


def add_bias(logits: torch.Tensor, ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Adds values [n, b] to the logits of ids [n, b] int64; pad with any id and value 0."""
    return logits.scatter_add(1, ids, values)


def suppress(logits: torch.Tensor, ids: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
    """Makes ids [n, s] int64 impossible in rows where `active` [n] bool; pad by repeating an id."""
    kept = logits.gather(1, ids)
    return logits.scatter(1, ids, kept.masked_fill(active[:, None], -torch.inf))


def penalise(
    logits: torch.Tensor,
    counts: torch.Tensor,
    in_prompt: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> torch.Tensor:
    """Penalties of tokens seen: counts [n, V] int32 in the output, in_prompt [n, V] bool; factors [n] float32.

    Repetition concerns prompt and output: positive logits are divided, others multiplied. Presence and frequency concern the
    output only: one is subtracted once, the other for each time.
    """
    in_output = counts > 0
    factor = repetition[:, None]
    repeated = torch.where(logits > 0, logits / factor, logits * factor)
    logits = torch.where(in_output | in_prompt, repeated, logits)
    return logits - frequency[:, None] * counts - presence[:, None] * in_output


def temper(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """(logits - max) / temperature [n] > 0. The maximum is taken away first: a tiny temperature cannot overflow upwards."""
    return (logits - logits.amax(-1, keepdim=True)) / temperature[:, None]


def keep_min_p(scores: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Drops tokens less likely than min_p [n] times the likeliest; `scores` have their maximum at 0, as `temper` leaves them."""
    return scores.masked_fill(scores < min_p.log()[:, None], -torch.inf)


def keep_top_k(scores: torch.Tensor, k: torch.Tensor, max_k: int) -> torch.Tensor:
    """Keeps the k [n] int64 >= 1 best tokens, and those equal to the last of them; max_k is the largest k (host)."""
    best = scores.topk(max_k).values
    return scores.masked_fill(scores < best.gather(1, k[:, None] - 1), -torch.inf)


def keep_top_p(scores: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keeps the fewest best tokens whose probability reaches top_p [n], and those equal to the last of them."""
    probs = scores.softmax(-1)
    return scores.masked_fill(probs < nucleus_threshold(probs, top_p)[:, None], -torch.inf)


def nucleus_threshold(probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """[n]: the probability of the last token that top_p keeps; at least the best one is kept."""
    return last_kept(probs.sort(-1, descending=True).values, top_p)[0]


def last_kept(ranked: torch.Tensor, top_p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(threshold [n], complete [n] bool) from the m best probabilities [n, m] of each row, best first.

    `complete`: the nucleus ends within the m best, so that more of them would not change the threshold.
    """
    before = ranked.cumsum(-1) - ranked
    kept = (before < top_p[:, None]).sum(-1).clamp(min=1)
    return ranked.gather(1, kept[:, None] - 1)[:, 0], kept < ranked.shape[1]


def gumbel(seeds: torch.Tensor, choices: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Gumbel noise [n, vocab_size] float32, a pure function of (seed, choice, position, token); arguments [n] int64.

    `position` is the index in its sequence of the token to draw. Each row's key is hashed from its three numbers, each token's
    31 random bits from the key and the token, so the noise knows nothing of batches, steps or devices.
    """
    key = _mix64(seeds + _GOLDEN_64 * (choices + 1))
    key = _mix64(key + _GOLDEN_64 * (positions + 1))
    low, high = key.to(torch.int32), (key >> 32).to(torch.int32)
    x = torch.arange(vocab_size, dtype=torch.int32, device=seeds.device) * _GOLDEN_32 + low[:, None]
    x ^= (x >> 16) & 0xFFFF
    x *= _INT32_MULTIPLIERS[0]
    x += high[:, None]
    x ^= (x >> 15) & 0x1FFFF
    x *= _INT32_MULTIPLIERS[1]
    x ^= (x >> 16) & 0xFFFF
    # The smallest exponential wins, so the uniforms are finest near 0; the clamp keeps them under 1.
    uniform = (x & 0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def draw(scores: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """[n] int64: a token of softmax(scores), by the Gumbel-max trick."""
    return (scores + noise).argmax(-1)


def logprobs(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities [n] of tokens [n] int64, and of the `count` best tokens: ids [n, count] int64 and values, best first.

    All are at least LOWEST_LOGPROB. Of equally good tokens any may come first.
    """
    values = logits.float().log_softmax(-1)
    best, ids = values.topk(count)
    chosen = values.gather(1, tokens[:, None])[:, 0]
    return chosen.clamp(min=LOWEST_LOGPROB), ids, best.clamp(min=LOWEST_LOGPROB)


def apply_bitmask(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Makes the tokens impossible whose bit in mask [n, ceil(V / 32)] int32 is 0: token t is bit t % 32 of word t // 32."""
    bits = (mask[:, :, None] >> torch.arange(32, dtype=torch.int32, device=mask.device)) & 1
    return logits.masked_fill(bits.flatten(1)[:, : logits.shape[1]] == 0, -torch.inf)


def sample_rows(
    logits: torch.Tensor,
    index: torch.Tensor,
    tables: RowTables,
    positions: torch.Tensor,
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens [n] int64, bad [n] bool) of rows `index`: every op above, each for the rows whose features ask for it."""
    x = shape_rows(logits, index, tables, positions, mask)
    random = _having(tables.ints[index], Feature.RANDOM)
    scores = filter_rows(x, index, tables)
    keys = tables.ints[index]
    drawn = draw(scores, gumbel(keys[:, Int.SEED], keys[:, Int.CHOICE], positions, x.shape[1]))
    return torch.where(random, drawn, greedy(x)[0]), ~torch.isfinite(greedy(logits)[1])


def shape_rows(
    logits: torch.Tensor,
    index: torch.Tensor,
    tables: RowTables,
    positions: torch.Tensor,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """The logits [n, V] float32 of rows `index` with grammar mask, bias, suppressed stop ids and penalties."""
    x = logits.float() if mask is None else apply_bitmask(logits.float(), mask)
    ints, floats = tables.ints[index], tables.floats[index]
    biased = add_bias(x, tables.bias_ids[index], tables.bias_values[index])
    x = torch.where(_having(ints, Feature.BIAS)[:, None], biased, x)
    early = _having(ints, Feature.MIN_TOKENS) & (positions < ints[:, Int.MIN_LENGTH])
    x = suppress(x, tables.stop_ids[index].clamp(min=0), early)
    if tables.counts is None or tables.in_prompt is None:
        return x
    penalties = (floats[:, column] for column in (Float.PRESENCE, Float.FREQUENCY, Float.REPETITION))
    penalised = penalise(x, tables.counts[index], tables.in_prompt[index], *penalties)
    return torch.where(_having(ints, Feature.PENALTIES)[:, None], penalised, x)


def filter_rows(x: torch.Tensor, index: torch.Tensor, tables: RowTables) -> torch.Tensor:
    """Scores [n, V] of shaped logits x: tempered, and -inf where min-p, top-k and top-p drop a token. Of random rows."""
    ints, floats = tables.ints[index], tables.floats[index]
    random = _having(ints, Feature.RANDOM)
    scores = temper(x, torch.where(random, floats[:, Float.TEMPERATURE], 1))
    wanted = _having(ints, Feature.MIN_P)
    scores = torch.where(wanted[:, None], keep_min_p(scores, floats[:, Float.MIN_P]), scores)
    wanted = _having(ints, Feature.TOP_K)
    k = torch.where(wanted, ints[:, Int.TOP_K], 1)
    scores = torch.where(wanted[:, None], keep_top_k(scores, k, x.shape[1]), scores)
    wanted = _having(ints, Feature.TOP_P)
    return torch.where(wanted[:, None], keep_top_p(scores, floats[:, Float.TOP_P]), scores)


def _having(ints: torch.Tensor, feature: Feature) -> torch.Tensor:
    """[n] bool of the integer parameters [n, len(Int)] of n rows."""
    return (ints[:, Int.FEATURES] & int(feature)) != 0


def _mix64(x: torch.Tensor) -> torch.Tensor:
    """splitmix64's finaliser on int64 (shifts are made logical by masks)."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _INT64_MULTIPLIERS[0]
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _INT64_MULTIPLIERS[1]
    return x ^ ((x >> 31) & ((1 << 33) - 1))
