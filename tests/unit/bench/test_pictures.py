"""The pictures: XML that says what the code does, the same bytes each time, and the bytes that are kept in docs/."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from lockstep_bench import pictures
from lockstep_bench.__main__ import main
from lockstep_bench.pictures import group, mirror, svg, vote
from lockstep_common.steps import Kind
from lockstep_scheduler.vote import Point

DOCS = Path(__file__).parents[3] / "docs"


def elements(drawn: str, tag: str, style: str = "") -> Iterator[ElementTree.Element]:
    """Those of a tag whose classes include all of `style`; the definitions of patterns aside."""
    for element in ElementTree.fromstring(drawn).iter(f"{{http://www.w3.org/2000/svg}}{tag}"):
        if set(style.split()) <= set(element.get("class", "").split()):
            yield element


def words(drawn: str, style: str = "") -> list[str]:
    return [element.text or "" for element in elements(drawn, "text", style)]


def area(polygon: ElementTree.Element) -> float:
    x, y = np.array([[float(v) for v in point.split(",")] for point in polygon.attrib["points"].split()]).T
    return float(abs(np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1))) / 2)


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_the_kept_picture_is_what_the_command_draws(name: str) -> None:
    drawn = pictures.PICTURES[name]()
    kept = (DOCS / f"{name}.svg").read_text(encoding="utf-8")
    assert drawn == kept, f"docs/{name}.svg shows what was: run `lockstep bench pictures`"
    assert len(drawn.encode()) < 60_000


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_stays_on_its_card_and_uses_styles_that_exist(name: str) -> None:
    drawn = pictures.PICTURES[name]()
    root = ElementTree.fromstring(drawn)
    width, height = (float(size) for size in root.attrib["viewBox"].split()[2:])
    assert width == svg.WIDTH
    style = next(elements(drawn, "style")).text or ""
    assert "prefers-color-scheme: dark" in style and "@font-face" not in style
    for element in root.iter():
        for part in element.get("class", "").split():
            assert f".{part} " in style or f".{part}," in style, f"no style is called {part}"
    for rect in elements(drawn, "rect"):
        x, y, w, h = (float(rect.attrib[side]) for side in ("x", "y", "width", "height"))
        assert x >= 0 and y >= 0 and w > 0 and h > 0 and x + w <= width and y + h <= height
    for text in elements(drawn, "text"):
        assert 0 < float(text.attrib["x"]) < width and 0 < float(text.attrib["y"]) < height


def test_the_command_writes_all_of_them(tmp_path: Path) -> None:
    assert main(["pictures", "--out", str(tmp_path)]) == 0
    assert {file.name for file in tmp_path.iterdir()} == {f"{name}.svg" for name in pictures.PICTURES}


def test_the_timeline_has_a_box_for_each_rank_and_plan_and_a_mark_for_each_vote() -> None:
    run, drawn = vote.record(), vote.draw()
    boxes = {style: len(list(elements(drawn, "rect", style))) for style in ("prefill", "decode", "placeholder")}
    assert sum(boxes.values()) == vote.RANKS * len(run.plans) + 3  # and those of the legend
    filled = [body for plan in run.plans if plan.header.kind is Kind.PREFILL for body in plan.bodies if body.passes]
    assert boxes["prefill"] == len(filled) + 1
    chips = words(drawn, "on middle bold small")
    assert chips == [decided.point.name for decided in run.poll.decided]
    outcomes = [word for word in words(drawn, "middle bold") if word in ("prefill", "decode", "park")]
    drawn_inside = boxes["prefill"] - 1  # the word stands in each box of a prefill, too
    assert len(outcomes) - drawn_inside == len(run.poll.decided)
    assert outcomes.count("park") == sum(decided.parks for decided in run.poll.decided) == 2
    assert len(list(elements(drawn, "polygon", "arrival"))) == len(vote.ASKED)


def test_the_run_that_is_drawn_shows_what_the_law_says() -> None:
    """Both outcomes of both kinds of points, a sleep, and what wakes the group."""
    run = vote.record()
    seen = {(vote.point, vote.header.kind) for vote in run.poll.decided}
    kinds = (Kind.PREFILL, Kind.DECODE)
    assert seen == {(point, kind) for point in (Point.ANY, Point.ALL) for kind in kinds} | {(Point.ANY, Kind.PARK)}
    for decided in run.poll.decided:
        if decided.point is Point.ALL:
            assert (decided.header.kind is Kind.PREFILL) == (decided.wanting == vote.RANKS)
    park = next(decided for decided in run.poll.decided if decided.parks)
    behind = [plan for plan in run.plans if plan.start > park.at]
    assert behind and behind[0].start >= vote.ASKED[-1].arrival > park.at
    assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(run.plans))
    assert (run.seen.got == [asked.output for asked in vote.ASKED]).all()


def test_every_worker_has_the_same_area_of_the_triangle_and_keeps_the_same_number_of_tokens() -> None:
    drawn = mirror.draw()
    chunks = list(elements(drawn, "polygon", "chunk"))
    assert len(chunks) == sum(2 * ranks for ranks in mirror.RANKS)
    start = 0
    for ranks in mirror.RANKS:
        mine, start = chunks[start : start + 2 * ranks], start + 2 * ranks
        areas = [sum(area(chunk) for chunk in mine if f"rank{rank}" in chunk.attrib["class"]) for rank in range(ranks)]
        assert areas == pytest.approx([sum(areas) / ranks] * ranks, rel=1e-9)
        for parts in (mirror.chunks(ranks), mirror.kept(ranks)):
            assert all(left[2] == right[1] for left, right in itertools.pairwise(parts))
            counts = np.bincount([rank for rank, *_ in parts], [end - start for _, start, end in parts])
            assert (counts == mirror.TOKENS / ranks).all()


def test_the_group_has_a_driver_and_followers_in_each_dp_rank() -> None:
    drawn = group.draw()
    assert sum("driver" in head for head in words(drawn, "on bold")) == group.DP
    assert sum("follower" in head for head in words(drawn, "on bold")) == group.DP * (group.CP - 1)
    assert len(list(elements(drawn, "rect", "worker"))) == group.DP * group.CP


def test_words_are_escaped_and_numbers_short() -> None:
    drawing = svg.Drawing(100, "a < b & c", "")
    drawing.text(1 / 3, 2, "<tag>", "dim")
    drawn = drawing.render()
    assert ElementTree.fromstring(drawn) is not None and words(drawn)[-1] == "<tag>"
    assert 'x="0.33" y="2"' in drawn
