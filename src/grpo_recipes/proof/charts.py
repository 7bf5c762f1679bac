"""Charts as SVG text. Pure functions: numbers in, markup out; no script, no font, nothing fetched.

Colours come from CSS classes (see style.py), so that one chart serves a light page, a dark one, and paper. The width
of 400 units is about a phone's, so that type stays readable there and merely grows on a larger screen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

WIDTH, HEIGHT = 400, 240
SMALL = (340, 190)
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 12, 40  # room for the labels around the plot
MAX_POINTS = 400  # a line of more points is drawn by the means of equal bins

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Line:
    label: str
    points: Points
    style: str = "s1"  # CSS class


@dataclass(frozen=True)
class Area:
    """A band between two curves over the same x."""

    label: str
    x: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


@dataclass(frozen=True)
class Frame:
    """The map from data to the plot."""

    x: tuple[float, float]
    y: tuple[float, float]
    log: bool = False
    size: tuple[int, int] = (WIDTH, HEIGHT)

    def px(self, x: float) -> float:
        low, high = self.x
        return LEFT + (x - low) / (high - low) * (self.size[0] - LEFT - RIGHT)

    def py(self, y: float) -> float:
        low, high = (math.log10(v) for v in self.y) if self.log else self.y
        y = math.log10(y) if self.log else y
        return self.size[1] - BOTTOM - (y - low) / (high - low) * (self.size[1] - TOP - BOTTOM)


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    area: Area | None = None,
    y_range: tuple[float, float] | None = None,
    percent: bool = False,
    log: bool = False,
    size: tuple[int, int] = (WIDTH, HEIGHT),
) -> str:
    """Values that are not finite leave a gap. A log axis leaves out what is not positive.

    y_range: the least range shown; it grows to hold all data.
    """
    lines = [Line(line.label, thin([p for p in line.points if _shown(p[1], log)]), line.style) for line in lines]
    ys = [y for line in lines for _, y in line.points] + list(y_range or ())
    xs = [x for line in lines for x, _ in line.points]
    if area:
        ys += [y for y in (*area.low, *area.high) if _shown(y, log)]
        xs += list(area.x)
    if not xs:
        return _svg(title, size, f'<text x="{size[0] / 2}" y="{size[1] / 2}">no data</text>')
    y_ticks = log_ticks(min(ys), max(ys)) if log else ticks(min(ys), max(ys))
    frame = Frame(_widened(min(xs), max(xs)), (y_ticks[0], y_ticks[-1]), log, size)
    body = _axes(frame, y_ticks, percent)
    if area and area.x:
        outline = [*zip(area.x, area.high, strict=True), *reversed([*zip(area.x, area.low, strict=True)])]
        body += f'<path class="band" d="{_path(frame, [p for p in outline if _shown(p[1], log)])}Z"/>'
    for line in lines:
        body += f'<path class="line {line.style}" d="{_path(frame, line.points)}"/>'
        if len(line.points) <= 40 and line.style != "ref":
            body += "".join(
                f'<circle class="dot {line.style}" cx="{frame.px(x):.1f}" cy="{frame.py(y):.1f}" r="2.6">'
                f"<title>{escape(line.label)}, step {x:g}: {number(y, percent)}</title></circle>"
                for x, y in line.points
            )
    keys = [("band", area.label)] if area else []
    keys += [(line.style, line.label) for line in lines]
    return _svg(title, size, body) + (legend(keys) if len(keys) > 1 else "")


def stacked_chart(title: str, x: Sequence[float], parts: Mapping[str, Sequence[float]], unit: str) -> str:
    """One area per part, the first at the bottom."""
    if not x or not parts:
        return line_chart(title, [])
    thinned = {name: [y for _, y in thin(list(zip(x, values, strict=True)))] for name, values in parts.items()}
    xs = [at for at, _ in thin([(at, 0.0) for at in x])]
    totals = [sum(column) for column in zip(*thinned.values(), strict=True)]
    y_ticks = ticks(0.0, max(totals))
    frame = Frame(_widened(min(xs), max(xs)), (0.0, y_ticks[-1]))
    body = _axes(frame, y_ticks, False, unit)
    floor = [0.0] * len(xs)
    for index, values in enumerate(thinned.values(), start=1):
        roof = [a + b for a, b in zip(floor, values, strict=True)]
        outline = [*zip(xs, roof, strict=True), *reversed([*zip(xs, floor, strict=True)])]
        body += f'<path class="fill s{index}" d="{_path(frame, outline)}Z"/>'
        floor = roof
    return _svg(title, frame.size, body) + legend([(f"s{i}", name) for i, name in enumerate(parts, start=1)])


def bar_chart(title: str, bars: Mapping[str, float], unit: str) -> str:
    """Horizontal bars, each labelled with its value."""
    top = max(bars.values(), default=0.0) or 1.0
    height = 26 * len(bars) + 8
    body, room = "", WIDTH - 140 - 90
    for row, (name, value) in enumerate(bars.items()):
        y = 4 + 26 * row
        width = value / top * room
        body += (
            f'<text class="end" x="132" y="{y + 16}">{escape(name)}</text>'
            f'<rect class="fill s1" x="140" y="{y + 3}" width="{width:.1f}" height="18" rx="2"/>'
            f'<text class="start" x="{146 + width:.1f}" y="{y + 16}">{number(value)} {escape(unit)}</text>'
        )
    return _svg(title, (WIDTH, height), body)


def legend(keys: Sequence[tuple[str, str]]) -> str:
    items = "".join(f'<span><i class="key {style}"></i>{escape(label)}</span>' for style, label in keys)
    return f'<p class="legend">{items}</p>'


def svg_legend(keys: Sequence[tuple[str, str]], y: float) -> str:
    """For a chart that stands alone, where there is no HTML around it."""
    body, x = "", float(LEFT)
    for style, label in keys:
        body += f'<rect class="fill {style}" x="{x}" y="{y - 8}" width="14" height="8" rx="2"/>'
        body += f'<text class="start" x="{x + 19}" y="{y}">{escape(label)}</text>'
        x += 32 + 6.2 * len(label)
    return body


def thin(points: Points, most: int = MAX_POINTS) -> Points:
    """At most `most` points: means of neighbouring ones."""
    if len(points) <= most:
        return points
    size = math.ceil(len(points) / most)
    bins = (points[i : i + size] for i in range(0, len(points), size))
    return [(sum(x for x, _ in b) / len(b), sum(y for _, y in b) / len(b)) for b in bins]


def ticks(low: float, high: float) -> list[float]:
    """About five round numbers whose first and last enclose the range."""
    low, high = _widened(low, high)
    rough = (high - low) / 4
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(m * unit for m in (1, 2, 2.5, 5, 10) if m * unit >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12 - math.floor(math.log10(step))) for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten that enclose the range, at most about six."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    last = max(last, first + 1)
    step = math.ceil((last - first) / 5)
    return [10.0**e for e in range(first, last + step, step)]


def tick_labels(values: Sequence[float], percent: bool = False, log: bool = False) -> list[str]:
    """With as many decimals as tell neighbours apart."""
    if len(values) < 2 or log:
        return [number(value, percent) for value in values]
    values = [100 * value for value in values] if percent else values
    step = min(b - a for a, b in pairwise(values))
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    if round(step, decimals) != round(step, decimals + 2):  # 2.5, 0.25 …
        decimals += 1
    if decimals > 4 and max(map(abs, values)) < 0.1:
        return [number(value) for value in values]
    return [f"{value + 0.0:,.{decimals}f}{' %' if percent else ''}" for value in values]


def number(value: float, percent: bool = False) -> str:
    """Short, for people."""
    if not math.isfinite(value):
        return str(value)
    if percent:
        return f"{100 * value:.1f} %"
    if value and not 1e-3 <= abs(value) < 1e6:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _shown(value: float, log: bool) -> bool:
    return math.isfinite(value) and (value > 0 or not log)


def _widened(low: float, high: float) -> tuple[float, float]:
    if high > low:
        return low, high
    if low == 0:
        return 0.0, 1.0
    return low - abs(low) * 0.1, high + abs(high) * 0.1


def _path(frame: Frame, points: Points) -> str:
    return "M" + "L".join(f"{frame.px(x):.1f} {frame.py(y):.1f}" for x, y in points) if points else ""


def _axes(frame: Frame, y_ticks: Sequence[float], percent: bool, unit: str = "") -> str:
    width, height = frame.size
    bottom, right = height - BOTTOM, width - RIGHT
    body = ""
    for tick, text in zip(y_ticks, tick_labels(y_ticks, percent, frame.log), strict=True):
        y = frame.py(tick)
        body += f'<path class="grid" d="M{LEFT} {y:.1f}H{right}"/>'
        body += f'<text class="end" x="{LEFT - 6}" y="{y + 4:.1f}">{text}{f" {escape(unit)}" if unit else ""}</text>'
    x_ticks = [tick for tick in ticks(*frame.x) if frame.x[0] <= tick <= frame.x[1] and tick == int(tick)]  # steps
    for tick, text in zip(x_ticks, tick_labels(x_ticks), strict=True):
        body += f'<text x="{frame.px(tick):.1f}" y="{bottom + 16}">{text}</text>'
    body += f'<path class="axis" d="M{LEFT} {bottom}H{right}"/>'
    return body + f'<text x="{(LEFT + right) / 2}" y="{height - 6}">step</text>'


def _svg(title: str, size: tuple[int, int], body: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" role="img" '
        f'aria-label="{escape(title)}">{body}</svg>'
    )
