"""From numbers to places and labels on an axis: round ticks, ranges, series thinned without hiding what they did.

Pure functions. Places run from 0 to `SPAN` in both directions of a chart; y grows downwards, as in SVG.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pvg.reporting.formats import Style, compact, short_seconds
from pvg.reporting.html import Html, div, join, number, span, tag

SPAN = 1000.0  # a chart's own units: its SVG is stretched to whatever room there is
MOST_POINTS = 240  # of one line; more than a line's pixels only cost bytes

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Axis:
    """A range of values, its ticks, and how values are written. Values of a logarithmic axis are above 0."""

    low: float
    high: float
    ticks: tuple[float, ...]
    style: Style = "number"
    log: bool = False

    def share(self, value: float) -> float:
        """0 at `low`, 1 at `high`; values outside lie at the edge."""
        low, high = (math.log10(self.low), math.log10(self.high)) if self.log else (self.low, self.high)
        at = math.log10(max(value, self.low)) if self.log else value
        return min(1.0, max(0.0, (at - low) / (high - low)))

    def x(self, value: float) -> float:
        return SPAN * self.share(value)

    def y(self, value: float) -> float:
        return SPAN * (1.0 - self.share(value))

    def labels(self) -> list[tuple[float, str]]:
        """(share, label) of every tick."""
        return [(self.share(tick), label) for tick, label in zip(self.ticks, tick_labels(self), strict=True)]


def nice_axis(
    values: Sequence[float], style: Style = "number", *, zero: bool = False, most_ticks: int = 5, log: bool = False
) -> Axis:
    """An axis that holds all (finite) `values`, ends on round numbers, and starts at 0 where `zero` says so."""
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    if log:
        return _log_axis([value for value in finite if value > 0], style)
    low, high = min(finite), max(finite)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        pad = abs(high) * 0.5 or 1.0
        low, high = (low if zero and low == 0 else low - pad), high + pad
    step = round_step((high - low) / most_ticks, binary=style == "bytes")
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(step * place for place in range(first, last + 1))
    return Axis(ticks[0], ticks[-1], ticks, style)


def share_axis() -> Axis:
    return Axis(0.0, 1.0, (0.0, 0.25, 0.5, 0.75, 1.0), "share")


def _log_axis(values: Sequence[float], style: Style) -> Axis:
    low = math.floor(math.log10(min(values, default=1.0)) + 1e-9)
    high = max(low + 1, math.ceil(math.log10(max(values, default=1.0)) - 1e-9))
    return Axis(10.0**low, 10.0**high, tuple(10.0**power for power in range(low, high + 1)), style, log=True)


def round_step(least: float, *, binary: bool = False) -> float:
    """The next of 1, 2, 2.5, 5 times a power of ten (of two for bytes) that is at least `least`."""
    if binary:
        return float(2.0 ** math.ceil(math.log2(max(least, 1.0))))
    power = 10.0 ** math.floor(math.log10(least))
    return next(step * power for step in (1.0, 2.0, 2.5, 5.0, 10.0) if step * power >= least * (1 - 1e-9))


def tick_labels(axis: Axis) -> list[str]:
    """Short, and all with the same number of decimals."""
    step = axis.ticks[1] - axis.ticks[0] if len(axis.ticks) > 1 else axis.high or 1.0
    largest = max(abs(axis.low), abs(axis.high))
    if axis.style == "share":
        digits = _decimals(100 * step)
        return [f"{100 * tick:.{digits}f} %" for tick in axis.ticks]
    if axis.style == "bytes":
        unit, factor = next(
            (pair for pair in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)) if largest >= pair[1]), ("B", 1)
        )
        digits = 0 if step >= factor else min(2, _decimals(step / factor))
        return [f"{tick / factor:.{digits}f} {unit}" if tick else "0" for tick in axis.ticks]
    if axis.style == "seconds":
        return [_seconds_label(tick, step, largest, log=axis.log) for tick in axis.ticks]
    if largest >= 1000:
        return [compact(tick) if tick else "0" for tick in axis.ticks]
    if axis.log:
        return [f"{tick:g}" for tick in axis.ticks]
    digits = _decimals(step)
    return [f"{tick:.{digits}f}" if digits < 5 else f"{tick:.2g}" for tick in (tick + 0.0 for tick in axis.ticks)]


def _seconds_label(tick: float, step: float, largest: float, *, log: bool) -> str:
    if log or tick == 0:
        return short_seconds(tick).replace(".00", "")
    for unit, factor, limit in (("µs", 1e6, 1e-3), ("ms", 1e3, 1.0), ("s", 1.0, 120.0)):
        if largest < limit:
            return f"{tick * factor:.{_decimals(step * factor)}f} {unit}"
    return short_seconds(tick)


def _decimals(step: float) -> int:
    """Decimals that tell two neighbours apart: 0.25 -> 2, 5 -> 0."""
    for digits in range(7):
        if abs(step * 10**digits - round(step * 10**digits)) < 1e-6 * max(1.0, step * 10**digits):
            return digits
    return 7


@dataclass(frozen=True, slots=True)
class Bin:
    """Neighbouring points as one: the mean place, the mean, lowest and highest value, and how many they are."""

    x: float
    mean: float
    low: float
    high: float
    count: int


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> list[Bin]:
    """The points themselves, or where there are more than `most`, bins of (about) equally many of them."""
    count = len(points)
    if count <= most:
        return [Bin(x, y, y, y, 1) for x, y in points]
    edges = [count * place // most for place in range(most + 1)]
    bins = []
    for start, end in itertools.pairwise(edges):
        xs, ys = zip(*points[start:end], strict=True)
        bins.append(Bin(sum(xs) / len(xs), sum(ys) / len(ys), min(ys), max(ys), len(ys)))
    return bins


def moving_mean(values: Sequence[float], window: int) -> list[float]:
    """The mean over `window` values around each; fewer at the ends."""
    half = window // 2
    means = []
    for place in range(len(values)):
        around = values[max(0, place - half) : place + half + 1]
        means.append(sum(around) / len(around))
    return means


def without_gaps(times: Sequence[float], longest: float) -> tuple[list[float], list[int]]:
    """Seconds since the first of `times` (sorted), with pauses above `longest` left out; the indices that follow one.

    A run that was stopped at night and resumed in the morning should not be drawn as a night.
    """
    places: list[float] = []
    breaks: list[int] = []
    skipped = 0.0
    for index, time in enumerate(times):
        if index and time - times[index - 1] > longest:
            skipped += time - times[index - 1] - longest
            breaks.append(index)
        places.append(time - times[0] - skipped)
    return places, breaks


# What every chart has around it: a title with its unit, a legend, axes with labels, grid lines, bands for the rounds.
#
# The drawing is an SVG that is stretched to the room there is, and all text is HTML beside it: so a chart fills a
# wide screen and a phone alike, with lettering of one size.

FULL_NAMES, MOST_NAMES = 4, 12  # bands that are named in full, and at all
NARROW = 0.02 * SPAN
CROWDED = 7  # more labels than these on the x axis: every other one is left out where it is narrow


@dataclass(frozen=True, slots=True)
class Band:
    """A stretch of the x axis with a name of its own, such as a round."""

    start: float
    end: float
    label: str


@dataclass(frozen=True, slots=True)
class Across:
    """The x axis: its ends, its unit, ticks (place, label), and bands. `counts` names what is counted within a band."""

    low: float
    high: float
    label: str = ""
    ticks: tuple[tuple[float, str], ...] = ()
    bands: tuple[Band, ...] = ()
    counts: str = ""
    style: Style = "number"

    def x(self, value: float) -> float:
        return SPAN * (value - self.low) / ((self.high - self.low) or 1.0)


@dataclass(frozen=True, slots=True)
class Key:
    """An entry of a legend: `style` is its colour's class, `dash` "", "dashed" or "dotted", `shape` "line" or "box"."""

    label: str
    style: str
    dash: str = ""
    shape: str = "line"
    detail: str = field(default="")


def svg(*drawing: Html | None, class_: str = "", label: str = "") -> Html:
    """A drawing in the charts' own units. `label` is read out; without one the drawing is decoration."""
    return tag(
        "svg",
        *drawing,
        class_=class_ or None,
        viewBox=f"0 0 {number(SPAN)} {number(SPAN)}",
        preserveAspectRatio="none",
        role="img" if label else None,
        aria_label=label or None,
        aria_hidden=None if label else "true",
    )


def legend(keys: Iterable[Key]) -> Html | None:
    entries = [
        tag("li", swatch(key), key.label, span("quiet", f" {key.detail}") if key.detail else None) for key in keys
    ]
    return tag("ul", *entries, class_="legend") if entries else None


def swatch(key: Key) -> Html:
    if key.shape == "box":
        drawing = tag("rect", width=SPAN, height=SPAN, class_=f"fill {key.style}")
    else:
        drawing = tag("path", d=f"M0 {number(SPAN / 2)}H{number(SPAN)}", class_=_classes("line", key.style, key.dash))
    return tag("span", svg(drawing), class_=f"swatch {key.shape}", aria_hidden="true")


def figure(
    title: str,
    *body: Html | None,
    unit: str = "",
    keys: Sequence[Key] = (),
    note: Html | str = "",
    class_: str = "",
    **data: str | None,
) -> Html:
    """A chart with its words."""
    head = tag("figcaption", span("title", title), span("unit", unit) if unit else None, legend(keys))
    return tag(
        "figure", head, *body, tag("p", note, class_="note") if note else None, class_=_classes("chart", class_), **data
    )


def plot(
    drawing: Iterable[Html | None],
    y: Axis,
    x: Across,
    *,
    height: int,
    overlay: Iterable[Html] = (),
    above: Iterable[Html] = (),
    label: str,
) -> Html:
    """The axes around a drawing. `overlay` is HTML that lies over it, `above` stands over it (as the bands' names do),
    `label` says what the drawing is."""
    names = [*_band_names(x), *above]
    labels = y.labels()
    grid = join(tag("path", d=f"M0 {number(SPAN * (1 - share))}H{number(SPAN)}", class_="grid") for share, _ in labels)
    ys = div("ys", *(tag("span", written, style=f"bottom:{number(100 * share)}%") for share, written in labels))
    area = div("area", svg(_bands(x), grid, *drawing, label=label), *names, *overlay)
    widest = max((len(written) for _, written in labels), default=1)
    crowded = len(x.ticks) > CROWDED
    xs = div(
        "xs",
        *(
            tag(
                "span",
                written,
                style=f"left:{number(x.x(at) / 10)}%",
                class_="sparse" if crowded and place % 2 else None,
            )
            for place, (at, written) in enumerate(x.ticks)
        ),
        span("xlabel", x.label) if x.label else None,
    )
    return div("plot banded" if names else "plot", ys, area, xs, style=f"--height:{height}px;--ys:{widest}")


def _bands(x: Across) -> Html:
    """Every other band is tinted, so that the eye can count them."""
    return join(
        tag("rect", x=x.x(band.start), y=0, width=x.x(band.end) - x.x(band.start), height=SPAN, class_="band")
        for place, band in enumerate(x.bands)
        if place % 2
    )


def _band_names(x: Across) -> list[Html]:
    """Of many bands only the numbers, of very many only some; what is too narrow for its name goes without."""
    many = len(x.bands) > FULL_NAMES
    every = -(-len(x.bands) // MOST_NAMES)
    return [
        tag(
            "span",
            band.label.split()[-1] if many else band.label,
            class_="band-name",
            style=f"left:{number(x.x((band.start + band.end) / 2) / 10)}%",
        )
        for place, band in enumerate(x.bands)
        if place % every == 0 and x.x(band.end) - x.x(band.start) > NARROW
    ]


def _classes(*names: str) -> str:
    return " ".join(name for name in names if name)
