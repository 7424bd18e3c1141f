"""The truth table of the vote."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep_common.steps import Kind
from lockstep_scheduler.vote import Point, Position, Rules, Vote, agree, bucket, least_interval, point, rules_for


def ballot(rank: int, want: bool, running: int = 1, max_k: int = 100, chunk: int = 7) -> Vote:
    return Vote(rank, want, running, running + want, chunk if want else 0, max_k if running else 0)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(("a", "b"), [(1, 2), (2, 4), (2, 6), (3, 9)])
def test_truth_table(ranks: int, a: int, b: int) -> None:
    """All wants, all steps up to the common multiple: ANY first, then ALL, elsewhere decode without asking."""
    for step in range(2 * b + 1):
        for wants in itertools.product([False, True], repeat=ranks):
            header = agree(Position(1, 5, step), Rules(a, b, 16), [ballot(i, w) for i, w in enumerate(wants)])
            if step > 0 and step % b == 0:
                expected = any(wants)
            elif step % a == 0:
                expected = all(wants)
            else:
                expected = False
            assert header.kind is (Kind.PREFILL if expected else Kind.DECODE), (step, wants)
            if header.kind is Kind.DECODE:
                assert header.k == a - step % a
                assert header.micro_chunks == ()
            else:
                assert header.micro_chunks == (7,) and header.k == 1


def test_step_zero_is_an_all_point() -> None:
    assert point(0, Rules(2, 4, 8)) is Point.ALL
    assert point(4, Rules(2, 4, 8)) is Point.ANY
    assert point(3, Rules(2, 4, 8)) is Point.NONE


@given(st.integers(0, 50), st.lists(st.booleans(), min_size=1, max_size=5))
def test_without_a_running_row_one_rank_is_enough_and_none_parks(step: int, wants: list[bool]) -> None:
    header = agree(Position(1, 1, step), Rules(4, 8, 8), [ballot(i, w, running=0) for i, w in enumerate(wants)])
    assert header.kind is (Kind.PREFILL if any(wants) else Kind.PARK)


@given(st.integers(0, 50), st.integers(1, 4))
def test_an_owed_window_comes_before_every_want(step: int, ranks: int) -> None:
    header = agree(Position(1, 1, step, owed=True), Rules(4, 8, 8), [ballot(i, True) for i in range(ranks)])
    assert header.kind is Kind.DECODE


@given(
    st.integers(0, 100),
    st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=5),
    st.randoms(),
)
def test_the_header_does_not_depend_on_the_order_of_votes_and_no_rank_lacks_blocks(step, ranks, random) -> None:  # type: ignore[no-untyped-def]
    votes = [Vote(i, w, r, r + w, 3 if w else 0, k if r else 0) for i, (w, r, k) in enumerate(ranks)]
    header = agree(Position(1, 1, step), Rules(4, 8, 6), votes)
    random.shuffle(votes)
    assert agree(Position(1, 1, step), Rules(4, 8, 6), votes) == header
    if header.kind is Kind.DECODE:
        assert 1 <= header.k <= 6
        assert all(header.k <= v.max_k for v in votes if v.running)
        assert header.row_bucket >= max(v.running for v in votes)


def test_intervals_by_time_nest() -> None:
    assert rules_for(0.025, 0.040, 16) == Rules(1, 4, 16)
    assert rules_for(0.005, 0.040, 16) == Rules(8, 32, 16)
    assert rules_for(0.0, 0.040, 16) == Rules(1, 4, 16)
    assert rules_for(0.3, 0.040, 16, dp=8) == rules_for(0.0, 0.040, 16, dp=8) == Rules(2, 8, 16)
    intervals = [rules_for(ms / 1000, 0.040, 16).a for ms in range(1, 60)]
    assert intervals == sorted(intervals, reverse=True)
    assert all(x % y == 0 for x, y in itertools.pairwise(intervals))


@given(st.floats(1e-6, 10), st.floats(1e-6, 10), st.floats(1e-3, 1), st.integers(1, 64))
def test_intervals_by_time_keep_their_bounds(step: float, longer: float, interval: float, dp: int) -> None:
    rules = rules_for(step, interval, 16, dp)
    least = least_interval(dp)
    assert rules.b == 4 * rules.a and rules.a & (rules.a - 1) == 0 and least <= rules.a <= 1024
    assert rules.a == least or rules.a * step <= interval, "running rows let others wait for longer than they must"
    assert rules.a == 1024 or 2 * rules.a * step * 1.000001 > interval, "prompts come in more often than they should"
    assert rules_for(step + longer, interval, 16, dp).a <= rules.a


@pytest.mark.parametrize(("a", "b"), [(2, 2), (2, 3), (0, 4), (4, 2)])
def test_wrong_intervals_are_refused(a: int, b: int) -> None:
    with pytest.raises(ValueError, match="multiple"):
        Rules(a, b, 4)


def test_buckets_cover_and_grow() -> None:
    sizes = [bucket(n) for n in range(1025)]
    assert all(b >= n for n, b in enumerate(sizes)) and sizes == sorted(sizes)
    assert len(set(sizes)) < 45
