"""Charts as inline SVG that takes its colours from the page, so that it is right in light and dark."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from html import escape

Point = tuple[float, float]
LEFT, RIGHT, TOP, BOTTOM = 46, 28, 30, 38


@dataclass(frozen=True)
class Line:
    """One line of a chart, with a band about it, half-widths of intervals, and a letter at one of its points."""

    label: str
    points: list[Point]
    style: str = "c0"  # classes of the page's style sheet: c0 … c4, "faint", and "dash1" … "dash4"
    band: list[tuple[float, float, float]] = field(default_factory=list)  # (x, low, high)
    halves: list[float] = field(default_factory=list)
    letter: tuple[str, float] | None = None  # and the x it stands at
    joined: bool = True


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
    names: dict[float, str] = field(default_factory=dict)  # of places on the x axis, instead of numbers

    def x(self, value: float) -> float:
        """A value's place from the left."""
        low, high = self.x_range
        if self.log_x:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return LEFT + (self.width - LEFT - RIGHT) * (value - low) / (high - low)

    def y(self, value: float) -> float:
        """A value's place from the top; values outside of the frame are drawn on its edge."""
        low, high = self.y_range
        value = min(max(value, low), high)
        return self.height - BOTTOM - (self.height - BOTTOM - TOP) * (value - low) / (high - low)

    def svg(self, lines: list[Line], x_ticks: list[float], y_ticks: list[float]) -> str:
        """The chart with its lines and a legend."""
        right, bottom = self.width - RIGHT, self.height - BOTTOM
        parts = [f'<text class="title" x="{LEFT - 40}" y="18">{escape(self.title)}</text>']
        for tick in y_ticks:
            at = self.y(tick)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{tick:g}</text>')
        for tick in x_ticks:
            at = self.x(tick)
            parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{bottom}"/>')
            text = self.names.get(tick, f"{tick:,.6g}")
            parts.append(f'<text x="{at:.1f}" y="{bottom + 15}" text-anchor="middle">{escape(text)}</text>')
        parts += [self._band(line) for line in lines if line.band]
        parts += [self._path(line) for line in lines]
        parts += self._letters([line for line in lines if line.letter])
        parts.append(
            f'<text x="{(LEFT + right) / 2}" y="{self.height - 5}" text-anchor="middle">{escape(self.x_label)}</text>'
        )
        legend = "".join(f'<span class="key {line.style}">{escape(line.label)}</span>' for line in lines)
        label = f"{self.title}: {self.y_label} over {self.x_label}"
        drawing = f'<svg viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{escape(label)}">'
        return f"<figure>{drawing}{''.join(parts)}</svg><figcaption>{legend}</figcaption></figure>"

    def _band(self, line: Line) -> str:
        edge = [(x, high) for x, _, high in line.band] + [(x, low) for x, low, _ in reversed(line.band)]
        path = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in edge)
        return f'<g class="{line.style}"><polygon points="{path}"/></g>'

    def _path(self, line: Line) -> str:
        places = [(self.x(x), self.y(y)) for x, y in line.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts = [f'<polyline points="{path}"/>'] if line.joined else []
        if len(places) < 12:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in places]
        for (x, y), half in zip(line.points, line.halves, strict=False):
            if math.isfinite(half):
                at, low, high = self.x(x), self.y(y - half), self.y(y + half)
                parts.append(f'<line class="interval" x1="{at:.1f}" x2="{at:.1f}" y1="{low:.1f}" y2="{high:.1f}"/>')
        return f'<g class="{line.style}">{"".join(parts)}</g>'

    def _letters(self, lines: list[Line]) -> list[str]:
        """Letters beside their points, moved apart where they would cover each other."""
        places = []
        for line in lines:
            assert line.letter is not None
            text, x = line.letter
            places.append((self.y(dict(line.points)[x]), self.x(x), text, line.style))
        found, below = [], -math.inf
        for y, x, text, style in sorted(places):
            below = max(y, below + 11)
            found.append(f'<text class="letter {style}" x="{x + 7:.1f}" y="{below + 4:.1f}">{escape(text)}</text>')
        return found


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
