"""Charts as SVG text, to stand inside a page: lines over steps, bars, and who computed what when. Pure.

Colours are classes (`s0` to `s7` for series, by stage or rank), which the page's style fills, in light and dark. Every mark
has a `<title>`, which a browser shows when it is pointed at.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720, 240
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 24, 34
ROW_HEIGHT, TIMELINE_WIDTH = 26, 1120
"""Of timelines, which stand alone in their row of a page."""
NUM_COLOURS = 8
MOST_POINTS = 400
"""Of a longer curve neighbours are averaged."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Points that are joined; None where there is no value."""

    name: str
    points: Sequence[tuple[float, float | None]]
    dashed: bool = False
    dots: bool = False
    """Points alone, not joined."""


@dataclass(frozen=True, slots=True)
class Mark:
    """An event at a step."""

    at: float
    kind: str
    """Class of its line: failure, move or checkpoint."""
    text: str


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar, of parts upon each other."""

    label: str
    parts: Sequence[tuple[str, float]]
    """(what, value)."""
    colour: int


@dataclass(frozen=True, slots=True)
class Block:
    """One op in time."""

    text: str
    start: float
    end: float
    kind: str
    """Class: forward, backward, input or weight."""


def line_chart(curves: Sequence[Curve], *, unit: str, marks: Sequence[Mark] = (), zero: bool = False,
               label: str = "step") -> str:
    """Curves over steps. unit: written at the axis. zero: the axis begins at 0."""
    curves = [Curve(curve.name, thinned(curve.points), curve.dashed, curve.dots) for curve in curves]
    xs = [x for curve in curves for x, _ in curve.points]
    ys = [y for curve in curves for _, y in curve.points if y is not None and math.isfinite(y)]
    if not ys:
        return _svg(f'<text x="{WIDTH / 2}" y="{HEIGHT / 2}" class="axis middle">no values yet</text>', "empty")
    low, high = (0.0 if zero else min(ys)), max(ys)
    ticks = nice_ticks(low, high)
    across, up = Scale(min(xs), max(xs), LEFT, WIDTH - RIGHT), Scale(ticks[0], ticks[-1], HEIGHT - BOTTOM, TOP)
    parts = [_grid(ticks, up, unit), _steps(across, label)]
    parts += [f'<line class="mark {mark.kind}" x1="{across(mark.at):.1f}" x2="{across(mark.at):.1f}" y1="{TOP}" '
              f'y2="{HEIGHT - BOTTOM}"><title>{escape(mark.text)}</title></line>' for mark in marks]
    parts += [_curve(curve, index % NUM_COLOURS, across, up) for index, curve in enumerate(curves)]
    return _svg("".join(parts), "lines") + legend([(curve.name, f"s{i % NUM_COLOURS}") for i, curve in enumerate(curves)])


def _curve(curve: Curve, colour: int, across: "Scale", up: "Scale") -> str:
    inside = [(across(x), up(y)) for x, y in curve.points if y is not None and math.isfinite(y)]
    title = f"<title>{escape(curve.name)}</title>"
    dots = "".join(f'<circle class="dot s{colour}" cx="{x:.1f}" cy="{y:.1f}" r="3">{title}</circle>' for x, y in inside)
    if curve.dots or len(inside) == 1:
        return dots
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in inside)
    dashed = " dashed" if curve.dashed else ""
    return f'<polyline class="curve s{colour}{dashed}" points="{path}">{title}</polyline>'


def bar_chart(bars: Sequence[Bar], *, unit: str, height: int = HEIGHT) -> str:
    """Bars beside each other, each with its label below; parts of a bar get fainter upwards."""
    tallest = max((sum(value for _, value in bar.parts) for bar in bars), default=0.0)
    ticks = nice_ticks(0.0, tallest or 1.0)
    up = Scale(ticks[0], ticks[-1], height - BOTTOM, TOP)
    slot = (WIDTH - LEFT - RIGHT) / max(len(bars), 1)
    every = math.ceil(len(bars) * 26 / (WIDTH - LEFT - RIGHT))
    parts = [_grid(ticks, up, unit)]
    for index, bar in enumerate(bars):
        x, base = LEFT + index * slot, 0.0
        for depth, (what, value) in enumerate(bar.parts):
            top, bottom = up(base + value), up(base)
            parts.append(f'<rect class="bar s{bar.colour % NUM_COLOURS} d{depth}" x="{x + slot * 0.12:.1f}" y="{top:.1f}" '
                         f'width="{slot * 0.76:.1f}" height="{max(bottom - top, 0):.1f}"><title>{escape(bar.label)}, '
                         f'{escape(what)}: {number(value)} {unit}</title></rect>')
            base += value
        if index % every == 0:
            parts.append(f'<text class="axis middle" x="{x + slot / 2:.1f}" y="{height - BOTTOM + 16}">'
                         f'{escape(bar.label)}</text>')
    return _svg("".join(parts), "bars", height)


def timeline_chart(rows: Sequence[tuple[str, Sequence[Block]]], *, seconds: float) -> str:
    """A row for each rank, time from left to right, what is blank is idle. seconds: length of the axis."""
    height, left, right = TOP + BOTTOM + ROW_HEIGHT * len(rows), LEFT + 24, TIMELINE_WIDTH - RIGHT
    across = Scale(0.0, seconds, left, right)
    unit, scale = ("ms", 1e3) if seconds < 1 else ("s", 1.0)
    parts = []
    for tick in nice_ticks(0.0, seconds * scale):
        x = across(tick / scale)
        if x <= right + 1:
            parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{height - BOTTOM}"/>'
                         f'<text class="axis middle" x="{x:.1f}" y="{height - BOTTOM + 16}">{number(tick)}</text>')
    parts.append(f'<text class="axis end" x="{right}" y="{height - 4}">{unit}</text>')
    for index, (name, blocks) in enumerate(rows):
        y = TOP + index * ROW_HEIGHT
        parts.append(f'<text class="axis end row" x="{left - 6}" y="{y + 17}">{escape(name)}</text>')
        for block in blocks:
            x, width = across(block.start), max(across(block.end) - across(block.start), 0.5)
            title = f"{block.text}: {number((block.end - block.start) * scale)} {unit} from {number(block.start * scale)}"
            parts.append(f'<rect class="op {block.kind}" x="{x:.2f}" y="{y + 3}" width="{width:.2f}" height="20">'
                         f'<title>{escape(title)}</title></rect>')
            if width > 6.5 * len(block.text) + 2:
                parts.append(f'<text class="op middle" x="{x + width / 2:.1f}" y="{y + 17}">{escape(block.text)}</text>')
    shown = {block.kind for _, blocks in rows for block in blocks}
    names = (("forward", "forward"), ("backward", "backward"), ("input", "input gradient"), ("weight", "weight gradient"))
    return _svg("".join(parts), "timeline", height, TIMELINE_WIDTH) + legend(
        [(name, f"op {kind}") for kind, name in names if kind in shown])


def legend(entries: Iterable[tuple[str, str]]) -> str:
    items = "".join(f'<span><i class="{colour}"></i>{escape(name)}</span>' for name, colour in entries)
    return f'<p class="legend">{items}</p>'


@dataclass(frozen=True, slots=True)
class Scale:
    """From values to pixels."""

    low: float
    high: float
    first: float
    last: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low
        return self.first + (self.last - self.first) * ((value - self.low) / span if span else 0.5)


def nice_ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers around [low, high], about `wanted` of them; low and high lie between the first and the last."""
    if high <= low:
        high = low + (abs(low) or 1.0) * 0.1
    raw = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def thinned(points: Sequence[tuple[float, float | None]]) -> list[tuple[float, float | None]]:
    """At most MOST_POINTS, each the mean of its neighbours."""
    group = math.ceil(len(points) / MOST_POINTS)
    if group <= 1:
        return list(points)
    found: list[tuple[float, float | None]] = []
    for start in range(0, len(points), group):
        part = points[start:start + group]
        values = [y for _, y in part if y is not None and math.isfinite(y)]
        found.append((sum(x for x, _ in part) / len(part), sum(values) / len(values) if values else None))
    return found


def number(value: float) -> str:
    """`1,234`, `0.123`, `1.2M`: four digits at most, for axes and tables."""
    if not math.isfinite(value):
        return "not finite"
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= unit:
            return f"{value / unit:.4g}{name}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _grid(ticks: Sequence[float], up: Scale, unit: str) -> str:
    lines = "".join(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up(tick):.1f}" y2="{up(tick):.1f}"/>'
                    f'<text class="axis end" x="{LEFT - 6}" y="{up(tick) + 4:.1f}">{number(tick)}</text>' for tick in ticks)
    return f'{lines}<text class="axis" x="2" y="10">{escape(unit)}</text>'


def _steps(across: Scale, label: str) -> str:
    ticks = [tick for tick in nice_ticks(across.low, across.high, 8) if across.low <= tick <= across.high]
    texts = "".join(f'<text class="axis middle" x="{across(tick):.1f}" y="{HEIGHT - BOTTOM + 16}">{number(tick)}</text>'
                    for tick in ticks)
    return f'{texts}<text class="axis end" x="{WIDTH - RIGHT}" y="{HEIGHT - 3}">{escape(label)}</text>'


def _svg(inside: str, kind: str, height: int = HEIGHT, width: int = WIDTH) -> str:
    return f'<svg class="{kind}" viewBox="0 0 {width} {height}" role="img" aria-label="{kind}">{inside}</svg>'
