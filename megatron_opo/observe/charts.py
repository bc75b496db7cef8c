"""Small charts as inline SVG: no script, no network, colours from the page's CSS variables."""

import math
from dataclasses import dataclass, field, replace
from html import escape
from itertools import pairwise

Point = tuple[float, float]
Range = tuple[float, float, float]
# (width, height) in CSS pixels, about as large as the page shows them, so that text keeps its size.
SMALL, WIDE = (340.0, 200.0), (1110.0, 270.0)
LEFT, RIGHT, TOP, BOTTOM = 46.0, 10.0, 12.0, 28.0
MOST_POINTS = 240
MOST_MARKERS = 40


@dataclass(frozen=True)
class Line:
    """One curve. `points` are (step, value), in the order of steps.

    `smooth` draws the values as dots behind a smoothed line; `markers` puts a dot on every value
    of a plain line, as long as there are few. `keep_peaks`: when there are more values than can
    be drawn, neighbours are replaced by their largest, instead of their mean. `band` is the range
    (step, least, largest) around the points, drawn behind them.
    """

    label: str
    color: str
    points: list[Point]
    smooth: bool = False
    markers: bool = False
    keep_peaks: bool = False
    band: list[Range] = field(default_factory=list)
    dashed: bool = False


@dataclass(frozen=True)
class Axes:
    """Where data lands on the drawing."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    log: bool
    width: float
    height: float
    zero: bool = False  # of a logarithmic one: the lowest mark stands for 0

    @property
    def floor(self) -> float:
        return self.height - BOTTOM

    def x(self, value: float) -> float:
        span = self.x_high - self.x_low
        return LEFT + (value - self.x_low) / span * (self.width - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_low, self.y_high
        if self.log:
            value, low, high = math.log10(max(value, low)), math.log10(low), math.log10(high)
        return self.floor - (value - low) / (high - low) * (self.floor - TOP)


def line_chart(
    title: str,
    lines: list[Line],
    *,
    size: tuple[float, float] = SMALL,
    log: bool = False,
    y_range: tuple[float, float] | None = None,
    x_range: tuple[float, float] | None = None,
    limits: tuple[tuple[str, float], ...] = (),
) -> str:
    """An SVG of the lines over steps. `limits` are labelled horizontal rules; `x_range` and
    `y_range` are the least ranges shown. A log axis falls back to a linear one when no value is
    positive; else values of 0 lie on its floor, at a mark of their own.
    """
    lines = [_thin_out(line) for line in lines if line.points]
    values = [y for line in lines for _, y in line.points] + [y for _, y in limits]
    values += [y for line in lines for _, *ends in line.band for y in ends]
    log = log and any(y > 0 for y in values)
    axes = _axes(lines, values, size, log, x_range, y_range)
    parts = [_open(title, size), _grid(axes)]
    right = size[0] - RIGHT
    for label, value in limits:
        y = axes.y(value)
        parts.append(
            f'<line class="limit" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="limit-label" x="{right}" y="{y - 4:.1f}" '
            f'text-anchor="end">{escape(label)}</text>'
        )
    parts += [_band(line, axes) for line in lines if line.band]
    parts += [_curve(line, axes) for line in lines]
    parts.append(_hover_strips(lines, axes))
    return "".join(parts) + "</svg>"


def stacked_chart(title: str, lines: list[Line], *, size: tuple[float, float] = SMALL) -> str:
    """An SVG of bars over steps: the lines' values on top of each other."""
    lines = [_thin_out(line) for line in lines if line.points]
    steps = sorted({x for line in lines for x, _ in line.points})
    values = [dict(line.points) for line in lines]
    totals = [sum(column.get(x, 0.0) for column in values) for x in steps]
    axes = _axes(lines, [0.0, *totals], size, False, None, None)
    gap = min((b - a for a, b in pairwise(steps)), default=1.0)
    axes = replace(axes, x_low=steps[0] - gap / 2, x_high=steps[-1] + gap / 2, y_low=0.0)
    bar = max(0.8, (axes.x(gap) - axes.x(0)) * 0.82)
    parts = [_open(title, size), _grid(axes)]
    for x in steps:
        base, bars, shown = 0.0, "", [f"step {x:g}"]
        for line, column in zip(lines, values, strict=True):
            value = column.get(x, 0.0)
            top, bottom = axes.y(base + value), axes.y(base)
            bars += (
                f'<rect x="{axes.x(x) - bar / 2:.1f}" y="{top:.1f}" width="{bar:.1f}" '
                f'height="{bottom - top:.1f}" fill="{line.color}"/>'
            )
            base += value
            shown.append(f"{line.label}: {tick(value)} s")
        parts.append(f"<g>{bars}<title>{escape(chr(10).join(shown))}</title></g>")
    return "".join(parts) + "</svg>"


def legend(lines: list[Line]) -> str:
    keys = "".join(
        f'<span class="key"><i{" class=dashed" if line.dashed else ""} '
        f'style="background-color:{line.color}"></i>{escape(line.label)}</span>'
        for line in lines
        if line.points
    )
    return f'<div class="legend">{keys}</div>'


def smoothed(points: list[Point]) -> list[Point]:
    """At each point the value of a line fitted to its neighbours, under a Gaussian window a
    twentieth of the points wide (at least 1). A plain mean would flatten both ends, and with them
    the rise that a reward curve is read for.
    """
    values = [y for _, y in points]
    width = max(1.0, len(points) / 20)
    reach = math.ceil(3 * width)
    result = []
    for i, (x, _) in enumerate(points):
        offsets = range(max(0, i - reach) - i, min(len(points), i + reach + 1) - i)
        weights = [math.exp(-0.5 * (offset / width) ** 2) for offset in offsets]
        moments = [
            sum(w * offset**power for w, offset in zip(weights, offsets, strict=True))
            for power in (0, 1, 2)
        ]
        near = values[offsets.start + i : offsets.stop + i]
        level = sum(w * y for w, y in zip(weights, near, strict=True))
        slope = sum(w * o * y for w, o, y in zip(weights, offsets, near, strict=True))
        determinant = moments[0] * moments[2] - moments[1] ** 2
        result.append((x, (moments[2] * level - moments[1] * slope) / determinant))
    return result


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers from `low` to `high`."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def tick(value: float) -> str:
    """A number in as few characters as tell it apart: 0.25, 12.5, 3400, 12k, 2e-05."""
    size = abs(value)
    if size >= 1e9 or 0 < size < 1e-3:
        return f"{value:.3g}"
    for limit, unit in ((1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e6 if unit == 'M' else 1e3):.4g}{unit}"
    return f"{value:.4g}"


def _thin_out(line: Line) -> Line:
    """At most MOST_POINTS points, each standing for a run of neighbours."""
    size = math.ceil(len(line.points) / MOST_POINTS)
    if size <= 1:
        return line
    points, band = [], []
    for start in range(0, len(line.points), size):
        run = line.points[start : start + size]
        values = [y for _, y in run]
        points.append((run[-1][0], max(values) if line.keep_peaks else sum(values) / len(values)))
    for start in range(0, len(line.band), size):
        ranges = line.band[start : start + size]
        band.append((ranges[-1][0], min(r[1] for r in ranges), max(r[2] for r in ranges)))
    return replace(line, points=points, band=band)


def _axes(
    lines: list[Line],
    values: list[float],
    size: tuple[float, float],
    log: bool,
    x_range: tuple[float, float] | None,
    y_range: tuple[float, float] | None,
) -> Axes:
    steps = [x for line in lines for x, _ in line.points] + list(x_range or ()) or [0.0]
    x_low, x_high = min(steps), max(steps)
    if x_low == x_high:
        x_low, x_high = x_low - 0.5, x_high + 0.5
    if log:
        positive = [y for y in values if y > 0]
        low = 10.0 ** math.floor(math.log10(min(positive)))
        high = 10.0 ** math.ceil(math.log10(max(positive)))
        zero = min(values) <= 0
        low = low / 100 if zero else low
        return Axes(x_low, x_high, low, high if high > low else low * 10, True, *size, zero)
    values = values or [0.0, 1.0]
    low, high = min(values), max(values)
    if y_range is not None:
        low, high = min(low, y_range[0]), max(high, y_range[1])
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    # A floor at zero is a fact, not a value that needs room below it.
    low = low if low == 0 else low - margin
    return Axes(x_low, x_high, low, high + margin, False, *size)


def _open(title: str, size: tuple[float, float]) -> str:
    return (
        f'<svg viewBox="0 0 {size[0]:g} {size[1]:g}" role="img" aria-label="{escape(title)}" '
        f'preserveAspectRatio="xMidYMid meet">'
    )


def _grid(axes: Axes) -> str:
    right, floor = axes.width - RIGHT, axes.floor
    if axes.log:
        low, high = round(math.log10(axes.y_low)), round(math.log10(axes.y_high))
        every = math.ceil((high - low) / 6)
        marks = [
            (10.0**e, f"1e{e}" if abs(e) > 2 else f"{10.0**e:g}") for e in range(low, high + 1)
        ]
        if axes.zero:
            marks = [(axes.y_low, "0"), *marks[2:]]
        marks = marks[::every]
    else:
        marks = [(v, tick(v)) for v in ticks(axes.y_low, axes.y_high)]
    parts = []
    for value, text in marks:
        y = axes.y(value)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{right:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
        )
    whole = [v for v in ticks(axes.x_low, axes.x_high, round(axes.width / 70)) if v == int(v)]
    for value in whole:
        parts.append(
            f'<text x="{axes.x(value):.1f}" y="{axes.height - 9:.1f}" text-anchor="middle">'
            f"{tick(value)}</text>"
        )
    parts.append(
        f'<text x="{LEFT - 8}" y="{axes.height - 9:.1f}" text-anchor="end">step</text>'
        f'<line class="axis" x1="{LEFT}" x2="{right:.1f}" y1="{floor:.1f}" y2="{floor:.1f}"/>'
    )
    return "".join(parts)


def _band(line: Line, axes: Axes) -> str:
    upper = [(x, high) for x, _, high in line.band]
    lower = [(x, low) for x, low, _ in reversed(line.band)]
    edge = " ".join(f"{axes.x(x):.1f},{axes.y(y):.1f}" for x, y in upper + lower)
    return f'<polygon points="{edge}" fill="{line.color}"/>'


def _curve(line: Line, axes: Axes) -> str:
    smooth = line.smooth and len(line.points) >= 8
    drawn = smoothed(line.points) if smooth else line.points
    parts = []
    marked = line.markers and len(line.points) <= MOST_MARKERS
    if (smooth and not line.band) or marked or len(line.points) == 1:
        kind = "raw" if smooth else "marker"
        radius = 1.9 if smooth else 3.2
        parts += [
            f'<circle class="{kind}" cx="{axes.x(x):.1f}" cy="{axes.y(y):.1f}" r="{radius}" '
            f'fill="{line.color}"/>'
            for x, y in line.points
        ]
    path = " ".join(f"{axes.x(x):.1f},{axes.y(y):.1f}" for x, y in drawn)
    dashes = ' stroke-dasharray="6 5"' if line.dashed else ""
    parts.append(f'<polyline points="{path}" stroke="{line.color}"{dashes}/>')
    return "".join(parts)


def _hover_strips(lines: list[Line], axes: Axes) -> str:
    """Over each step an invisible strip whose tooltip tells all values there."""
    columns: dict[float, list[tuple[Line, float]]] = {}
    ranges = [{x: f" ({low:.4g} to {high:.4g})" for x, low, high in line.band} for line in lines]
    range_of = dict(zip(map(id, lines), ranges, strict=True))
    for line in lines:
        for x, y in line.points:
            columns.setdefault(x, []).append((line, y))
    steps = sorted(columns)
    parts = []
    for i, x in enumerate(steps):
        before = (steps[i - 1] + x) / 2 if i else axes.x_low
        after = (steps[i + 1] + x) / 2 if i + 1 < len(steps) else axes.x_high
        shown = [f"step {x:g}"]
        for line, y in columns[x]:
            shown.append(f"{line.label}: {y:.4g}{range_of[id(line)].get(x, '')}")
        dots = "".join(
            f'<circle cx="{axes.x(x):.1f}" cy="{axes.y(y):.1f}" r="4" fill="{line.color}"/>'
            for line, y in columns[x]
        )
        parts.append(
            f'<g class="strip"><rect x="{axes.x(before):.1f}" y="{TOP}" '
            f'width="{axes.x(after) - axes.x(before):.1f}" height="{axes.floor - TOP:.1f}"/>'
            f"{dots}<title>{escape(chr(10).join(shown))}</title></g>"
        )
    return "".join(parts)
