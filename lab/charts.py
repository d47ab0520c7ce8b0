"""Line charts as inline SVG that takes its colours from the page, so that it is right in light and dark."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """One line of a chart."""

    label: str
    points: list[Point]
    style: str = "c0"  # a class of the page's style sheet: c0 … c3, or "faint"


@dataclass(frozen=True)
class Chart:
    """A chart's frame."""

    title: str
    x_label: str
    y_label: str
    x_range: Point
    y_range: Point
    log_x: bool = False
    width: int = 460
    height: int = 260

    def x(self, value: float) -> float:
        """A value's place from the left."""
        low, high = self.x_range
        if self.log_x:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return 46 + (self.width - 62) * (value - low) / (high - low)

    def y(self, value: float) -> float:
        """A value's place from the top; values outside of the frame are drawn on its edge."""
        low, high = self.y_range
        value = min(max(value, low), high)
        return self.height - 38 - (self.height - 68) * (value - low) / (high - low)

    def svg(self, lines: list[Line], x_ticks: list[float], y_ticks: list[float]) -> str:
        """The chart with its lines, and a legend when there are several."""
        left, right, bottom, top = 46, self.width - 16, self.height - 38, 30
        parts = [f'<text class="title" x="{left}" y="18">{escape(self.title)}</text>']
        for tick in y_ticks:
            at = self.y(tick)
            parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
            parts.append(f'<text x="{left - 6}" y="{at + 4:.1f}" text-anchor="end">{tick:g}</text>')
        for tick in x_ticks:
            at = self.x(tick)
            parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{bottom}"/>')
            parts.append(f'<text x="{at:.1f}" y="{bottom + 15}" text-anchor="middle">{tick:g}</text>')
        parts += [self._path(line) for line in lines]
        parts.append(f'<text x="{(left + right) / 2}" y="{self.height - 5}" text-anchor="middle">{self.x_label}</text>')
        legend = "".join(f'<span class="key {line.style}">{escape(line.label)}</span>' for line in lines)
        label = f"{self.title}: {self.y_label} over {self.x_label}"
        drawing = f'<svg viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{escape(label)}">'
        return f"<figure>{drawing}{''.join(parts)}</svg><figcaption>{legend}</figcaption></figure>"

    def _path(self, line: Line) -> str:
        places = [(self.x(x), self.y(y)) for x, y in line.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in places) if len(places) < 12 else ""
        return f'<g class="{line.style}"><polyline points="{path}"/>{dots}</g>'


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers between two values, about `count` of them."""
    raw = (high - low) / count
    size = 10 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw)
    first = math.ceil(low / step)
    return [round(step * i, 10) for i in range(first, math.floor(high / step) + 1)]
