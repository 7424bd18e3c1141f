"""Percentiles, latencies and goodput."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep_bench.stats import Served, goodput, parse_objectives, percentile, summarize
from lockstep_common.errors import ConfigError

finite = st.floats(-1e6, 1e6)


@given(st.lists(finite, min_size=1), st.floats(0, 100))
def test_percentile_is_numpys(values: list[float], q: float) -> None:
    assert percentile(values, q) == pytest.approx(float(np.percentile(values, q)), rel=1e-9, abs=1e-6)


def test_percentile_of_nothing_is_nan_and_of_nonsense_an_error() -> None:
    assert math.isnan(percentile([], 50))
    with pytest.raises(ValueError, match="101"):
        percentile([1.0], 101)


def test_summary() -> None:
    s = summarize([4.0, 1.0, 3.0, 2.0])
    assert (s.count, s.mean, s.p50, s.max) == (4, 2.5, 2.5, 4.0)
    assert s.p99 == pytest.approx(3.97)
    assert summarize([]).count == 0 and math.isnan(summarize([]).mean)


def served(sent: float, *chunks: float, tokens: int = 0) -> Served:
    return Served(sent, chunks, chunks[-1] + 0.5, 10, tokens or len(chunks))


def test_latencies_of_a_stream() -> None:
    r = served(10.0, 10.2, 10.5, 11.0, tokens=5)
    assert r.ttft == pytest.approx(0.2)
    assert r.e2el == pytest.approx(1.0)  # to the last token, not to the end of the connection
    assert r.tpot == pytest.approx(0.8 / 4)  # by tokens, though three chunks brought them
    assert r.itl == pytest.approx((0.3, 0.5))


def test_one_token_has_no_tpot() -> None:
    r = served(0.0, 0.1, tokens=1)
    assert math.isnan(r.tpot) and r.itl == ()


def test_goodput_counts_requests_that_meet_every_limit() -> None:
    requests = [served(0, 0.1, 0.2), served(0, 0.3, 0.4), served(0, 0.1, 0.9), served(0, 0.1, tokens=1)]
    limits = parse_objectives(["ttft:200", "tpot:150"])
    assert limits == {"ttft": 0.2, "tpot": 0.15}
    assert goodput(requests, limits, duration=2.0) == 1.0  # the first and the one without a TPOT
    assert goodput(requests, {}, duration=2.0) == 2.0


@pytest.mark.parametrize("word", ["ttft", "ttft:", "ttft:x", "ttft:-1", "ttft:nan", "speed:1", ":5"])
def test_bad_objectives_are_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="goodput"):
        parse_objectives([word])
