"""Charts as inline SVG that takes its colours from the page, so that it is right in light and dark."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]
LEFT, RIGHT, TOP, BOTTOM = 46, 28, 30, 38
WIDTH, HEIGHT = 460, 260


@dataclass(frozen=True)
class Line:
    """One line of a chart."""

    label: str
    points: list[Point]
    style: str  # a class of the page's style sheet: c0 or c1


@dataclass(frozen=True)
class Chart:
    """A chart's frame."""

    title: str
    x_label: str
    y_label: str
    x_range: Point
    y_range: Point

    def x(self, value: float) -> float:
        """A value's place from the left."""
        low, high = self.x_range
        return LEFT + (WIDTH - LEFT - RIGHT) * (value - low) / (high - low)

    def y(self, value: float) -> float:
        """A value's place from the top; values outside of the frame are drawn on its edge."""
        low, high = self.y_range
        value = min(max(value, low), high)
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * (value - low) / (high - low)

    def svg(self, lines: list[Line]) -> str:
        """The chart with its lines and a legend."""
        right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
        parts = [f'<text class="title" x="{LEFT - 40}" y="18">{escape(self.title)}</text>']
        for tick in ticks(*self.y_range):
            at = self.y(tick)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{tick:g}</text>')
        for tick in ticks(*self.x_range):
            at = self.x(tick)
            parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{bottom}"/>')
            parts.append(f'<text x="{at:.1f}" y="{bottom + 15}" text-anchor="middle">{tick:,.6g}</text>')
        parts += [self._path(line) for line in lines]
        middle = (LEFT + right) / 2
        parts.append(f'<text x="{middle}" y="{HEIGHT - 5}" text-anchor="middle">{escape(self.x_label)}</text>')
        legend = "".join(f'<span class="key {line.style}">{escape(line.label)}</span>' for line in lines)
        label = f"{self.title}: {self.y_label} over {self.x_label}"
        drawing = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">'
        return f"<figure>{drawing}{''.join(parts)}</svg><figcaption>{legend}</figcaption></figure>"

    def _path(self, line: Line) -> str:
        path = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in line.points)
        return f'<g class="{line.style}"><polyline points="{path}"/></g>'


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers between two values, about `count` of them."""
    raw = (high - low) / count
    size = 10 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw)
    first = math.ceil(low / step)
    return [round(step * i, 10) for i in range(first, math.floor(high / step) + 1)]


def frame(values: list[float], room: float = 0.08) -> Point:
    """A range about values, a little wider than they are."""
    low, high = min(values), max(values)
    more = (high - low) * room or 0.5
    return low - more, high + more
