"""The scripted worker: its outputs do not depend on how it is driven, and it notices what a real worker would corrupt."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pytest

from lockstep_common.errors import LockstepError
from lockstep_common.steps import (
    AddRow,
    Body,
    Flag,
    GroupConfig,
    Header,
    Kind,
    Plan,
    PrefillPass,
    Sampling,
    TableWrite,
    unpack_words,
)
from tests.scripted_worker import Script, ScriptedEngine, toy_output
from tests.unit.worker.toy import u32

VOCAB = 32000
PROMPT = (5, 6, 7, 8, 9)


def engine(*scripts: Script, block_size: int = 4) -> ScriptedEngine:
    made = ScriptedEngine(scripts, max_model_len=64, num_blocks=40, block_size=block_size, max_rows=4)
    made.configure(GroupConfig(1, 1, 0, 0, 0, 1, 1, "", 0, 4, 64, 64, 8, 0))
    return made


def added(
    row: int = 0, tokens: Iterable[int] = PROMPT, blocks: Iterable[int] = range(1, 11), **changes: object
) -> AddRow:
    tokens = u32(tokens)
    made = AddRow(row, f"r{row}", 0, len(tokens), tokens, 0, (u32(blocks),), Sampling(), 20)
    return replace(made, **changes)  # type: ignore[arg-type]


def prefill(*adds: AddRow, **body: object) -> Plan:
    columns = [[a.row for a in adds], [a.computed for a in adds], [len(a.tokens) - a.computed for a in adds]]
    chunk = PrefillPass(*(u32(column) for column in columns))
    return Plan(Header(1, 1, Kind.PREFILL, 0, 1, micro_chunks=(9,)), Body(1, 0, adds=adds, passes=(chunk,), **body))  # type: ignore[arg-type]


def decode(*rows: int, k: int = 4, **body: object) -> Plan:
    return Plan(Header(1, 2, Kind.DECODE, 0, k), Body(1, 0, rows=u32(rows), **body))  # type: ignore[arg-type]


def run(made: ScriptedEngine, *plans: Plan) -> dict[int, list[tuple[int, int]]]:
    """(token, flags) of each row."""
    found: dict[int, list[tuple[int, int]]] = {}
    for plan in plans:
        for result in made.run(plan):
            for token, row, flags in zip(*(a.tolist() for a in unpack_words(result.words)), strict=True):
                found.setdefault(row, []).append((token, flags))
    return found


def test_output_is_that_of_the_oracle_in_any_window() -> None:
    for sampling in (Sampling(), Sampling(temperature=1.0, seed=4)):
        expected = toy_output(PROMPT, sampling=sampling, vocab_size=VOCAB, limit=20)
        for k in (1, 4, 20):
            found = run(engine(), prefill(added(sampling=sampling)), *[decode(0, k=k)] * (20 // k))
            assert [token for token, _ in found[0]] == expected
            assert found[0][0][1] == Flag.FIRST and found[0][-1][1] == Flag.LENGTH


def test_resume_and_prefix_hit_continue_the_same_output() -> None:
    expected = toy_output(PROMPT, sampling=Sampling(), vocab_size=VOCAB, limit=20)
    made = engine()
    first = run(made, prefill(added()), decode(0))[0]
    tokens = (*PROMPT, *(token for token, _ in first))
    resumed = added(2, tokens, [1, 2, 20, 21, 22], prompt_len=len(PROMPT), computed=8)
    rest = run(made, prefill(resumed, removes=u32([0])), decode(2, k=10))[2]
    assert [token for token, _ in first + rest] == expected


def test_scripts_end_as_they_say() -> None:
    scripts = (
        Script((1,), (7, 8), (-0.5, -0.25), end="stop"),
        Script((2,), (7,), end="fault"),
        Script((3,), (7, 9), end="length"),
        Script(None, (4,)),
    )
    made = engine(*scripts)
    found = run(
        made,
        prefill(*(added(row, [row + 1], [1 + row * 5 + i for i in range(5)], limit=10) for row in range(4))),
        decode(0, 1, 2, 3, k=9),
    )
    assert found[0] == [(7, Flag.FIRST), (8, Flag.STOP)]
    assert found[1] == [(7, Flag.FIRST), (0, Flag.FAULT)]
    assert found[2] == [(7, Flag.FIRST), (9, Flag.LENGTH)]
    assert found[3][0] == (4, Flag.FIRST) and len(found[3]) == 9


def test_logprobs_are_scripted_or_made_up_the_same_each_time() -> None:
    def logprobs() -> list[float]:
        made = engine(Script(None, (7, 8), (-0.5, -0.25)))
        plans = prefill(added(sampling=Sampling(logprobs=2))), decode(0)
        results = [result for plan in plans for result in made.run(plan)]
        assert all(
            r.top is not None and r.top.counts.tolist() == [2] and r.top.ids[0] == r.words[0] % 2**32 for r in results
        )
        return [float(r.logprobs[0]) for r in results if r.logprobs is not None]

    assert logprobs()[:2] == [-0.5, -0.25] and logprobs() == logprobs() and len(logprobs()) == 5


def test_stop_ids_and_min_tokens() -> None:
    free = toy_output(PROMPT, sampling=Sampling(), vocab_size=VOCAB, limit=20)
    stopping = Sampling(stop_ids=(free[3],))
    assert [t for t, _ in run(engine(), prefill(added(sampling=stopping)), decode(0, k=9))[0]] == free[:4]
    later = replace(stopping, min_tokens=6)
    found = run(engine(), prefill(added(sampling=later)), decode(0, k=20))[0]
    assert free[3] not in [t for t, _ in found[:6]]
    assert [t for t, _ in found] == toy_output(PROMPT, sampling=later, vocab_size=VOCAB, limit=20)


FAULTS: dict[str, tuple[str, Callable[[], list[Plan]]]] = {
    "twice": ("is in use", lambda: [prefill(added()), prefill(added())]),
    "unknown": ("nobody has it", lambda: [decode(1)]),
    "removed": ("nobody has it", lambda: [prefill(added()), decode(0, removes=u32([0]))]),
    "short table": ("too short for position 8", lambda: [prefill(added(blocks=[1, 2])), decode(0)]),
    "foreign block": (
        "block 2 is written by row 1, but row 0 has it",
        lambda: [prefill(added()), prefill(added(1, [9, 9, 9, 9, 9], [20, 2]))],
    ),
    "wrong prefix": (
        "KV of position 0",
        lambda: [prefill(added()), prefill(added(1, [1, 6, 7, 8, 9], [1, 20], computed=4))],
    ),
    "freed block": (
        "KV of position 4",
        lambda: [prefill(added()), decode(0, k=1, zeroes=(u32([2]),))],
    ),
    "listed twice": ("listed twice", lambda: [prefill(added()), decode(0, 0)]),
    "null block": ("not one of", lambda: [prefill(added(blocks=[0, 1]))]),
    "gap in table": (
        "leaves a gap",
        lambda: [
            prefill(added(blocks=[1, 2])),
            decode(0, table_writes=(TableWrite(0, u32([0]), u32([3]), u32([1]), u32([9])),)),
        ],
    ),
    "decode before prefill": (
        "0 of 5 tokens are computed",
        lambda: [decode(0, adds=(added(),))],
    ),
    "limit": ("is above 64", lambda: [prefill(added(limit=65))]),
    "vocabulary": ("not in the vocabulary", lambda: [prefill(added(tokens=[VOCAB]))]),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_would_corrupt_a_worker_is_an_error(name: str) -> None:
    message, plans = FAULTS[name]
    with pytest.raises(LockstepError, match=message):
        run(engine(), *plans())


def test_copied_blocks_carry_their_history() -> None:
    made = engine()
    run(made, prefill(added()))
    copy = ((u32([1]), u32([30])),)
    joined = added(1, PROMPT, [30, 31, 32, 33], computed=4, choice=1)
    assert len(run(made, prefill(joined, copies=copy), decode(1))[1]) == 5


def test_a_block_shared_as_prefix_may_be_recomputed() -> None:
    made = engine()
    run(made, prefill(added(tokens=[1, 2, 3, 4])))
    again = added(1, [1, 2, 3, 4], [1, 20, 21], computed=3)
    assert np.array_equal(
        run(made, prefill(again))[1][0][0], toy_output([1, 2, 3, 4], sampling=Sampling(), vocab_size=VOCAB, limit=5)[0]
    )
