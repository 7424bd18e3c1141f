"""What a request may ask of sampling is what workers have room for in each row."""

from __future__ import annotations

import numpy as np
import pytest

from lockstep_common.errors import InvalidRequest
from lockstep_common.steps import MAX_BIASES, MAX_STOP_IDS, Sampling
from lockstep_scheduler.admission import check_possible
from lockstep_scheduler.blocks import BlockPool
from lockstep_scheduler.ranks import Limits

VOCAB = 2000


def check(sampling: Sampling) -> None:
    limits = Limits(max_rows=4, max_batched_tokens=64, max_model_len=64, max_window=8)
    check_possible(np.ones(3, np.uint32), sampling, 1, "", vocab_size=VOCAB, limits=limits, pool=BlockPool(20, 4))


def test_as_many_stop_ids_and_biases_as_rows_have_room_for() -> None:
    check(Sampling(stop_ids=tuple(range(MAX_STOP_IDS)), bias=tuple((token, 1.0) for token in range(MAX_BIASES))))


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        (Sampling(stop_ids=tuple(range(MAX_STOP_IDS + 1))), "stop_ids"),
        (Sampling(bias=tuple((token, 1.0) for token in range(MAX_BIASES + 1))), "bias"),
        (Sampling(bias=((VOCAB, 1.0),)), "bias"),
    ],
)
def test_what_is_too_much_is_named(sampling: Sampling, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check(sampling)
    assert refused.value.param == param
