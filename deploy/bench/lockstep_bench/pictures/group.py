"""Who sends what to whom in a group of dp x cp workers."""

from __future__ import annotations

from typing import Final

from lockstep_bench.pictures.svg import WIDTH, Drawing
from lockstep_worker.collectives import Place

DP: Final = 2
CP: Final = 2

_BOX, _TALL, _GAP = 176, 118, 44
_PAD = 22
_RANK = CP * _BOX + (CP - 1) * _GAP + 2 * _PAD
_APART = 40
_LEFT = (WIDTH - DP * _RANK - (DP - 1) * _APART) / 2
_SCHEDULER, _WORKERS = 76, 206
_EXPERTS = _WORKERS + _TALL + 66


def draw() -> str:
    picture = Drawing(
        _EXPERTS + 76,
        f"A group of {DP} x {CP} workers in one step",
        "A scheduler sends plans to the drivers of two DP ranks, which forward them to their followers; keys and values travel "
        "within a DP rank, tokens between all workers.",
    )
    words = "DP: a rank has its own requests. CP: its workers share each sequence. EP: all workers share the routed experts."
    picture.text(24, 54, words, "dim")
    places = [Place(DP, CP, rank) for rank in range(DP * CP)]
    _draw_scheduler(picture)
    for dp_rank in range(DP):
        left = _LEFT + dp_rank * (_RANK + _APART)
        picture.rect(left, _WORKERS - 40, _RANK, _TALL + 62, "panel")
        picture.text(left + _RANK - 14, _WORKERS - 20, f"DP rank {dp_rank}: its own requests, one KV cache", "dim end")
    for place in places:
        _draw_worker(picture, place)
    for place in places:
        _draw_ways(picture, place)
    _draw_experts(picture)
    return picture.render()


def _x(place: Place) -> float:
    return _LEFT + place.dp_rank * (_RANK + _APART) + _PAD + place.cp_rank * (_BOX + _GAP)


def _draw_scheduler(picture: Drawing) -> None:
    width = 300
    left = (WIDTH - width) / 2
    picture.rect(left, _SCHEDULER, width, 46, "panel")
    picture.text(WIDTH / 2, _SCHEDULER + 20, "scheduler (one shard, or several that vote)", "middle bold")
    picture.text(WIDTH / 2, _SCHEDULER + 36, "one plan for a window of k steps", "middle dim small")


def _draw_worker(picture: Drawing, place: Place) -> None:
    x, driver = _x(place), place.cp_rank == 0
    picture.rect(x, _WORKERS, _BOX, _TALL, "worker")
    picture.rect(x, _WORKERS, _BOX, 26, f"rank{place.rank}")
    picture.text(x + 10, _WORKERS + 17, f"worker {place.rank}: {'driver' if driver else 'follower'}", "on bold")
    lines = (
        f"DP rank {place.dp_rank}, CP rank {place.cp_rank}",
        f"mirrored chunks {place.cp_rank} and {2 * CP - 1 - place.cp_rank}",
        f"1/{CP} of the keys and values",
        f"1/{DP * CP} of the routed experts",
        "samples for its DP rank" if driver else "takes the driver's tokens",
    )
    for number, words in enumerate(lines):
        picture.text(x + 10, _WORKERS + 43 + 16 * number, words, "small")


def _draw_ways(picture: Drawing, place: Place) -> None:
    """Arrows that end or begin at this worker."""
    x, middle = _x(place), _x(place) + _BOX / 2
    if place.cp_rank == 0:
        above, start = _SCHEDULER + 46, WIDTH / 2 + (place.dp_rank - (DP - 1) / 2) * 120
        turn = (above + _WORKERS - 40) / 2
        picture.line([(start, above), (start, turn), (middle, turn), (middle, _WORKERS - 3)], "line heavy", arrow=True)
        words, side = ("plan down, outcomes up (gRPC)", "start") if place.dp_rank == 0 else ("the same header", "start")
        picture.text(middle + 8, turn - 7, words, f"dim small {side}")
    else:
        before = x - _GAP
        for y, words, both in ((44, "plan", False), (76, "K, V", True), (108, "tokens", False)):
            picture.line([(before + 3, _WORKERS + y), (x - 3, _WORKERS + y)], "line heavy", arrow=True)
            if both:
                picture.line([(x - 3, _WORKERS + y), (before + 3, _WORKERS + y)], "line heavy", arrow=True)
            picture.text(x - _GAP / 2, _WORKERS + y - 8, words, "middle dim small")
    down = _WORKERS + _TALL + 3
    picture.line([(middle - 7, down), (middle - 7, _EXPERTS - 3)], "line heavy", arrow=True)
    picture.line([(middle + 7, _EXPERTS), (middle + 7, down + 3)], "line heavy", arrow=True)


def _draw_experts(picture: Drawing) -> None:
    left, width = _LEFT, WIDTH - 2 * _LEFT
    picture.rect(left, _EXPERTS, width, 52, "panel")
    words = "in every layer with experts: each token goes to the workers that have its experts, one row comes back from each"
    picture.text(WIDTH / 2, _EXPERTS + 22, words, "middle bold")
    more = "all workers wait here for each other, and that is why all of them take the same step; who has no row takes it, too"
    picture.text(WIDTH / 2, _EXPERTS + 40, more, "middle dim small")
