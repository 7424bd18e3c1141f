"""SVG by hand: shapes of named styles, in the order in which they are drawn, on a card of its own colour.

A style is a CSS class. The colours change where the reader prefers dark; the card keeps words readable where a page is dark and
the reader's preference says otherwise. Letters are the reader's own: no font is embedded, and no measure depends on one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from xml.sax.saxutils import escape

Point = tuple[float, float]

WIDTH: Final = 960
_RANKS: Final = ("#3f7fd6", "#dd8422", "#2f9e77", "#a85cb5")  # told apart by most who see colours differently, too

_STYLE: Final = f"""
text {{ font: 12px system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif; fill: #1d2731 }}
.title {{ font-size: 17px; font-weight: 650 }} .head {{ font-weight: 650; font-size: 13px }}
.dim {{ fill: #5d6a77 }} .small {{ font-size: 10.5px }} .bold {{ font-weight: 650 }} .on {{ fill: #fff }}
.start {{ text-anchor: start }} .middle {{ text-anchor: middle }} .end {{ text-anchor: end }}
.card {{ fill: #fff; stroke: #d5dce3 }} .lane {{ fill: #f2f5f8 }} .panel {{ fill: #f6f8fa; stroke: #d5dce3 }} .worker {{ fill: #fff; stroke: #b8c3ce }}
.line {{ stroke: #97a4b1; fill: none }} .faint {{ stroke: #d3dae1; fill: none }}
.chunk {{ stroke: #fff; stroke-width: 1.5 }} .token {{ stroke: #fff; stroke-width: 0.8 }}
.heavy {{ stroke-width: 1.8 }} .tip {{ fill: #7c8a98 }}
.prefill {{ fill: #dd8422 }} .decode {{ fill: #3f7fd6 }} .hatch {{ stroke: #b3bfca; stroke-width: 1.5 }}
.placeholder {{ fill: url(#hatched); stroke: #b3bfca }}
.any {{ fill: #2f9e77 }} .all {{ fill: #a85cb5 }} .owed {{ fill: #7c8a98 }} .arrival {{ fill: #c9422f }}
.waiting {{ stroke: #c9422f; stroke-width: 2; opacity: 0.45; fill: none }}
{" ".join(f".rank{i} {{ fill: {colour} }} .from{i} {{ stroke: {colour}; fill: none }}" for i, colour in enumerate(_RANKS))}
@media (prefers-color-scheme: dark) {{
text {{ fill: #e3e9ef }} .dim {{ fill: #9aa7b4 }} .on {{ fill: #fff }}
.card {{ fill: #11161c; stroke: #2d3640 }} .lane {{ fill: #1a2129 }} .panel {{ fill: #171d24; stroke: #2d3640 }} .worker {{ fill: #11161c; stroke: #47535f }}
.line {{ stroke: #6d7a87 }} .faint {{ stroke: #303a45 }} .hatch, .placeholder {{ stroke: #47535f }} .arrival {{ fill: #ef6a57 }}
.tip {{ fill: #8b98a5 }} .chunk, .token {{ stroke: #11161c }}
}}
"""

_DEFINITIONS: Final = """
<pattern id="hatched" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<line class="hatch" x1="0" y1="0" x2="0" y2="6"/></pattern>
<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto-start-reverse">
<path class="tip" d="M0 0.6 L8 4 L0 7.4 z"/></marker>
"""


class Drawing:
    """A picture of WIDTH x `height` units. `about` is what it shows, for those who cannot see it."""

    def __init__(self, height: float, title: str, about: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {_n(height)}" width="{WIDTH}" '
            f'height="{_n(height)}" role="img" aria-labelledby="title about">',
            f'<title id="title">{escape(title)}</title>',
            f'<desc id="about">{escape(about)}</desc>',
            f"<style>{_STYLE}</style>",
            f"<defs>{_DEFINITIONS}</defs>",
            f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{_n(height - 1)}" rx="10"/>',
        ]
        self.text(24, 34, title, "title")

    def rect(self, x: float, y: float, width: float, height: float, style: str, about: str = "") -> None:
        """`about` is shown where the pointer rests on it."""
        shape = f'class="{style}" x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" rx="3"'
        self._parts.append(f"<rect {shape}><title>{escape(about)}</title></rect>" if about else f"<rect {shape}/>")

    def polygon(self, points: Sequence[Point], style: str) -> None:
        self._parts.append(f'<polygon class="{style}" points="{" ".join(f"{_n(x)},{_n(y)}" for x, y in points)}"/>')

    def line(self, points: Sequence[Point], style: str, *, arrow: bool = False) -> None:
        """Through these points; with an arrow's tip at the end."""
        path = "L".join(f"{_n(x)} {_n(y)}" for x, y in points)
        self._parts.append(f'<path class="{style}" d="M{path}"{_tip(arrow)}/>')

    def text(self, x: float, y: float, words: str, style: str = "") -> None:
        """`y` is the line that letters stand on."""
        self._parts.append(f'<text class="{style}" x="{_n(x)}" y="{_n(y)}">{escape(words)}</text>')

    def legend(self, x: float, y: float, entries: Sequence[tuple[str, str]]) -> None:
        """(style, words) side by side."""
        for style, words in entries:
            self.rect(x, y - 10, 16, 12, style)
            self.text(x + 22, y, words, "dim")
            x += 40 + 6.1 * len(words)

    def render(self) -> str:
        return "\n".join([*self._parts, "</svg>", ""])


def _n(value: float) -> str:
    """A number, to a hundredth."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _tip(arrow: bool) -> str:
    return ' marker-end="url(#tip)"' if arrow else ""
