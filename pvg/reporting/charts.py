"""The charts: lines, stacked bars over steps and in rows, mirrored histograms, strips of dots, sparklines.

Every function returns a `<figure>` (or a part of one) that is complete without JavaScript; `data-*` attributes carry
the values that the script shows under the pointer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pvg.bench.statistics import median
from pvg.reporting.axes import (
    FULL_NAMES,
    MOST_POINTS,
    SPAN,
    Across,
    Axis,
    Band,
    Bin,
    Key,
    Point,
    figure,
    moving_mean,
    nice_axis,
    plot,
    share_axis,
    svg,
    thinned,
)
from pvg.reporting.budget_parts import in_order
from pvg.reporting.formats import Style, compact, percent, styled
from pvg.reporting.html import Html, div, join, number, span, tag
from pvg.reporting.run_summary import StepRecord

HEIGHT = 168  # pixels of a small chart's drawing
FULL_BANDS = 3  # bands around lines: more of them are fainter, or there is nothing else to be seen
SMOOTHED_FROM = 12  # points: a shorter line needs no mean through it
WINDOW = 5  # steps of the moving mean
MOST_BARS = 120
LEAST_POINTS = 12  # of one piece of a line, however many pieces there are


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a chart; between two of its `pieces` it is broken. `smooth`: its moving mean is drawn strongly and the
    values faintly, or with `bare` not at all. `dots`: its points are marked, with nothing known between them. `spread`:
    (place, low, high) of a band around the line. `whiskers`: likewise, the intervals of its points."""

    name: str
    pieces: Sequence[Sequence[Point]]
    style: str
    dash: str = ""
    smooth: bool = False
    dots: bool = False
    bare: bool = False
    spread: Sequence[tuple[float, float, float]] = ()
    whiskers: Sequence[tuple[float, float, float]] = ()

    @property
    def values(self) -> list[float]:
        return [y for piece in self.pieces for _, y in piece]


@dataclass(frozen=True, slots=True)
class Reference:
    """A horizontal line at a value that means something, such as a chance level."""

    value: float
    label: str


def line_chart(
    title: str,
    lines: Sequence[Line],
    x: Across,
    style: Style,
    *,
    unit: str = "",
    zero: bool = False,
    log: bool = False,
    references: Sequence[Reference] = (),
    height: int = HEIGHT,
    keyed: bool = True,
    note: str = "",
) -> Html | None:
    """Lines over a common x axis; None when there is nothing to draw. Shares lie between 0 and 100 %. `keyed`: with a
    legend of its own."""
    lines = [line for line in lines if line.values]
    if not lines:
        return None
    values = [value for line in lines for value in line.values]
    around = [end for line in lines for ends in (line.spread, line.whiskers) for _, *pair in ends for end in pair]
    within = [value for value in values if 0 <= value <= 1]
    full = style == "share" and len(within) == len(values)
    y = (
        share_axis()
        if full
        else nice_axis([*values, *around, *(r.value for r in references)], style, zero=zero, log=log)
    )
    drawing = [
        *(tag("path", d=f"M0 {number(y.y(r.value))}H{number(SPAN)}", class_="reference") for r in references),
        *_bands_around(lines, x, y),
        *(_drawn(line, x, y) for line in lines),
    ]
    overlay = [
        tag("span", r.label, class_="reference-name", style=f"bottom:{number(100 * y.share(r.value))}%")
        for r in references
    ]
    keys = [Key(line.name, line.style, line.dash) for line in lines] if keyed and len(lines) > 1 else []
    label = f"{title}: " + ", ".join(f"{line.name} ends at {styled(style, line.values[-1])}" for line in lines)
    bands = ";".join(f"{number(band.start)},{number(band.end)},{band.label}" for band in x.bands)
    most = max(point.count for line in lines for bins in _binned(line) for point in bins)
    if most > 1 and not note:
        note = f"Each point is the mean of up to {most} values; the band is their range."
    return figure(
        title,
        plot(drawing, y, x, height=height, overlay=overlay, label=label),
        unit=unit,
        keys=keys,
        note=note,
        data_cross="line",
        data_x=f"{number(x.low)} {number(x.high)}",
        data_format=style,
        data_xformat=x.style,
        data_xname=x.counts or x.label,
        data_bands=bands or None,
    )


def _drawn(line: Line, x: Across, y: Axis) -> Html:
    """Faint values and a strong mean through them, or the values alone; binned ones with the range they cover."""
    drawn: list[Html] = []
    if line.whiskers:
        ends = "".join(f"M{number(x.x(at))} {number(y.y(a))}V{number(y.y(b))}" for at, a, b in line.whiskers)
        drawn.append(tag("path", d=ends, class_=f"whisker {line.style}"))
    told: list[Bin] = []
    for bins in _binned(line):
        told += bins
        places = [x.x(point.x) for point in bins]
        if any(point.count > 1 for point in bins):
            upper = [f"{number(place)} {number(y.y(point.high))}" for place, point in zip(places, bins, strict=True)]
            lower = [f"{number(place)} {number(y.y(point.low))}" for place, point in zip(places, bins, strict=True)]
            drawn.append(tag("path", d=f"M{'L'.join([*upper, *reversed(lower)])}Z", class_=f"range {line.style}"))
        heights = [y.y(point.mean) for point in bins]
        smooth = line.smooth and len(bins) >= SMOOTHED_FROM
        kind = "line faint" if smooth else "line"
        if not (smooth and line.bare):
            drawn.append(tag("path", d=_path(places, heights), class_=f"{kind} {line.style} {line.dash}".rstrip()))
        if smooth:
            means = [y.y(mean) for mean in moving_mean([point.mean for point in bins], WINDOW)]
            drawn.append(tag("path", d=_path(places, means), class_=f"line {line.style} {line.dash}".rstrip()))
        if line.dots or len(bins) == 1:
            dots = "".join(f"M{number(a)} {number(b)}h0" for a, b in zip(places, heights, strict=True))
            drawn.append(tag("path", d=dots, class_=f"dot {line.style}"))
    return tag("g", *drawn, **_told(line.name, line.style, [(b.x, b.mean) for b in told]))


def _bands_around(lines: Sequence[Line], x: Across, y: Axis) -> list[Html]:
    """What the lines spread over, beneath all of them; the more there are, the fainter."""
    drawn = []
    for line in lines:
        upper = [f"{number(x.x(place))} {number(y.y(high))}" for place, _, high in line.spread]
        lower = [f"{number(x.x(place))} {number(y.y(low))}" for place, low, _ in reversed(line.spread)]
        if upper:
            drawn.append(tag("path", d=f"M{'L'.join([*upper, *lower])}Z", class_=f"range {line.style}"))
    return [tag("g", *drawn, style=f"opacity:{number(min(1.0, FULL_BANDS / len(drawn)))}")] if drawn else []


def _binned(line: Line) -> list[list[Bin]]:
    """Every piece thinned in proportion to its length, to MOST_POINTS in all."""
    count = len(line.values)
    return [thinned(piece, max(LEAST_POINTS, MOST_POINTS * len(piece) // count)) for piece in line.pieces if piece]


def _told(name: str, style: str, points: Sequence[Point]) -> dict[str, str]:
    """What the script shows at the pointer: name, colour, places and values."""
    return {
        "data_name": name,
        "data_style": style,
        "data_xs": ",".join(f"{x:.6g}" for x, _ in points),
        "data_ys": ",".join(f"{y:.4g}" for _, y in points),
    }


def _path(xs: Sequence[float], ys: Sequence[float]) -> str:
    return "M" + "L".join(f"{number(x)} {number(y)}" for x, y in zip(xs, ys, strict=True))


# --- stacked bars ------------------------------------------------------------------------------------------------


def stacked_chart(
    title: str, columns: Sequence[tuple[float, Mapping[str, float]]], x: Across, *, unit: str, height: int = 220
) -> Html | None:
    """One bar per step (place, seconds by part); long runs as the means of neighbouring steps."""
    if not columns:
        return None
    bars, most = averaged(columns, [band.end for band in x.bands])
    parts = in_order({part for bar in bars for part in bar.seconds})
    tops = [sum(max(0.0, value) for value in bar.seconds.values()) for bar in bars]
    y = nice_axis(tops, "seconds", zero=True)
    step = SPAN / (x.high - x.low)
    below = [0.0] * len(bars)
    drawn = []
    for part in parts:
        path = []
        for place, bar in enumerate(bars):
            value = max(0.0, bar.seconds.get(part.name, 0.0))
            if value:
                top, bottom = y.y(below[place] + value), y.y(below[place])
                width = step * bar.count
                left = x.x(bar.at) - width / 2
                path.append(f"M{number(left)} {number(bottom)}V{number(top)}h{number(width)}V{number(bottom)}z")
                below[place] += value
        points = [(bar.at, bar.seconds.get(part.name, 0.0)) for bar in bars]
        drawn.append(tag("path", d="".join(path), class_=f"fill {part.style}", **_told(part.label, part.style, points)))
    drawn.append(tag("g", **_told("whole step", "total", [(bar.at, top) for bar, top in zip(bars, tops, strict=True)])))
    keys = [Key(part.label, part.style, shape="box") for part in parts]
    note = f"Each bar is the mean of up to {most} steps." if most > 1 else ""
    bands = ";".join(f"{number(band.start)},{number(band.end)},{band.label}" for band in x.bands)
    return figure(
        title,
        plot(drawn, y, x, height=height, label=f"{title}: {styled('seconds', sum(tops) / len(tops))} on average"),
        unit=unit,
        keys=keys,
        note=note,
        class_="wide",
        data_cross="bar",
        data_x=f"{number(x.low)} {number(x.high)}",
        data_format="seconds",
        data_xname=x.counts or x.label,
        data_bands=bands or None,
    )


@dataclass(frozen=True, slots=True)
class Bar:
    """The mean seconds by part of `count` neighbouring steps around `at`."""

    at: float
    count: int
    seconds: dict[str, float]


def averaged(columns: Sequence[tuple[float, Mapping[str, float]]], ends: Sequence[float] = ()) -> tuple[list[Bar], int]:
    """The columns, or of more than MOST_BARS the means of equally many neighbours; and how many those are.

    No mean is taken across one of `ends`, where a round ends, so the last bar before it may be of fewer.
    """
    most = -(-len(columns) // MOST_BARS)
    groups: list[list[tuple[float, Mapping[str, float]]]] = []
    for place, column in enumerate(columns):
        before = columns[place - 1][0] if place else 0.0
        crossed = any(before < end <= column[0] for end in ends)
        if not place or len(groups[-1]) == most or crossed:
            groups.append([])
        groups[-1].append(column)
    bars = []
    for group in groups:
        sums: dict[str, float] = {}
        for _, seconds in group:
            for part, value in seconds.items():
                sums[part] = sums.get(part, 0.0) + value
        count = len(group)
        bars.append(Bar(sum(at for at, _ in group) / count, count, {part: s / count for part, s in sums.items()}))
    return bars, most


def stacked_row(budget: Mapping[str, float], whole: float, label: str = "") -> Html:
    """Seconds by part as one horizontal bar; `whole` are the seconds of the full width."""
    drawn, left = [], 0.0
    for part in in_order(budget):
        seconds = max(0.0, budget[part.name])
        width = SPAN * seconds / whole if whole > 0 else 0.0
        if width > 0:
            words = tag(
                "title", f"{part.label}: {styled('seconds', seconds)}, {percent(seconds / sum(budget.values()))}"
            )
            drawn.append(tag("rect", words, x=left, y=0, width=width, height=SPAN, class_=f"fill {part.style}"))
        left += width
    return div("bar", svg(*drawn, label=label))


# --- distributions -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of solutions in a histogram: its counts by bin. Kinds `above` the axis grow up, the others down."""

    name: str
    style: str
    counts: Sequence[int]
    above: bool


def mirrored_histogram(
    title: str, edges: Sequence[float], kinds: Sequence[Kind], *, threshold: float | None, most: int, note: Html | str
) -> Html:
    """Counts by score: helpful solutions above the axis, sneaky ones below, all charts with the same scale (`most`).

    Heights are square roots of counts (Tukey's rootogram): a verifier that is sure of most solutions puts them all
    into one bar, and the others would vanish beside it.
    """
    x = Across(edges[0], edges[-1], "score", _score_ticks(edges[0], edges[-1]), style="score")
    drawn = [_half([kind for kind in kinds if kind.above is above], edges, x, most, above) for above in (True, False)]
    drawn.append(tag("path", d=f"M0 {number(SPAN / 2)}H{number(SPAN)}", class_="zero"))
    overlay = [span("side up", "helpful"), span("side down", "sneaky")]
    above = []
    if threshold is not None and edges[0] <= threshold <= edges[-1]:
        share = x.x(threshold) / SPAN
        drawn.append(tag("path", d=f"M{number(SPAN * share)} 0V{number(SPAN)}", class_="line verifier threshold"))
        left = share > 0.75  # no room on the right
        words = "← refused" if left else "accepted →"
        place = f"right:{number(100 * (1 - share))}%" if left else f"left:{number(100 * share)}%"
        above.append(span("threshold-name", words, style=place))
    ticks = tuple(sign * root * math.sqrt(most) for sign, root in ((-1, 1.0), (-1, 0.5), (1, 0.0), (1, 0.5), (1, 1.0)))
    y = _Counts(-math.sqrt(most), math.sqrt(most), ticks)
    said = ", ".join(f"{sum(kind.counts)} {kind.name}" for kind in kinds)
    body = plot(drawn, y, x, height=190, overlay=overlay, above=above, label=f"{title}: {said}")
    return figure(title, body, unit="solutions per bar, square-root scale", note=note, class_="histogram")


def _half(kinds: Sequence[Kind], edges: Sequence[float], x: Across, most: int, above: bool) -> Html:
    """The kinds of one role stacked away from the axis; a bar is as high as the root of its sum."""
    bars: dict[str, list[Html]] = {kind.name: [] for kind in kinds}
    for place in range(len(edges) - 1):
        total = sum(kind.counts[place] for kind in kinds)
        left, right = x.x(edges[place]), x.x(edges[place + 1])
        gap, base = (right - left) * 0.06, 0.0
        for kind in kinds:
            count = kind.counts[place]
            if not count:
                continue
            height = SPAN / 2 * math.sqrt(total / most) * count / total
            top = SPAN / 2 - base - height if above else SPAN / 2 + base
            words = f"{count} × {kind.name}, score {edges[place]:.3g} to {edges[place + 1]:.3g}"
            bars[kind.name].append(
                tag("rect", tag("title", words), x=left + gap, y=top, width=right - left - 2 * gap, height=height)
            )
            base += height
    return join(tag("g", *bars[kind.name], class_=f"fill {kind.style}") for kind in kinds)


class _Counts(Axis):
    """Roots of counts, away from the middle in both directions, written as the counts."""

    def labels(self) -> list[tuple[float, str]]:
        return [(self.share(tick), f"{tick * tick:.0f}") for tick in self.ticks]


def _score_ticks(low: float, high: float) -> tuple[tuple[float, str], ...]:
    axis = nice_axis([low, high], "number", most_ticks=6)
    return tuple((at, label) for at, (_, label) in zip(axis.ticks, axis.labels(), strict=True) if low <= at <= high)


def dot_strips(
    title: str, rows: Sequence[tuple[str, Sequence[float], str]], style: Style, *, unit: str, note: str = ""
) -> Html:
    """Raw samples, one strip per row (label, values, colour's class), with the median as a mark."""
    x = nice_axis([value for _, values, _ in rows for value in values], style, most_ticks=6)
    strips = []
    for label, values, colour in rows:
        # Neighbours are set apart in a fixed pattern: equal samples would hide each other.
        heights = [SPAN * (0.5 + 0.22 * ((place * 2) % 5 - 2) / 2) for place in range(len(values))]
        dots = join(
            tag(
                "path",
                tag("title", styled(style, value)),
                d=f"M{number(x.x(value))} {number(height)}h0",
                class_=f"dot {colour}",
            )
            for value, height in zip(values, heights, strict=True)
        )
        middle = median(values)
        mark = tag("path", d=f"M{number(x.x(middle))} 80V920", class_=f"median {colour}")
        grid = join(tag("path", d=f"M{number(x.x(tick))} 0V{number(SPAN)}", class_="grid") for tick in x.ticks)
        strips.append(
            div(
                "strip",
                span("strip-name", label),
                div("area", svg(grid, dots, mark, label=f"{label}: median {styled(style, middle)}")),
                span("strip-value", styled(style, middle)),
            )
        )
    xs = div("xs", *(tag("span", label, style=f"left:{number(100 * share)}%") for share, label in x.labels()))
    axis = div("strip", span("strip-name"), xs, span("strip-value quiet", "median"))
    return figure(title, div("strips", *strips, axis), unit=unit, note=note, class_="wide")


def spark(values: Sequence[float], style: str) -> Html | None:
    """A line without axes for a key figure; its last value is marked."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return None
    bins = thinned(list(enumerate(finite)), 60)
    low, high = min(point.mean for point in bins), max(point.mean for point in bins)
    places = [SPAN * place / (len(bins) - 1) for place in range(len(bins))]
    heights = [SPAN * (0.9 - 0.8 * (point.mean - low) / ((high - low) or 1.0)) for point in bins]
    area = f"{_path(places, heights)}V{number(SPAN)}H0Z"
    return div(
        "spark",
        svg(
            tag("path", d=area, class_=f"range {style}"),
            tag("path", d=_path(places, heights), class_=f"line {style}"),
            tag("path", d=f"M{number(places[-1])} {number(heights[-1])}h0", class_=f"dot {style}"),
        ),
    )


# Steps along an axis: the steps of one phase over all rounds, one round behind the other.

PROVER, VERIFIER = "train_prover", "train_verifier"
COUNTED = {PROVER: "prover step", VERIFIER: "verifier step", "mint": "rollout", "init": "rollout"}


class Steps:
    """The steps of `phase`, with their place on the axis: the steps of earlier rounds come before.

    `longest`: the rounds' lengths to lay them out by, where several runs share the axis; default: their own.
    """

    def __init__(self, steps: Sequence[StepRecord], phase: str, longest: dict[int, int] | None = None) -> None:
        self.phase = phase
        self.rounds: dict[int, list[StepRecord]] = {}
        for step in steps:
            if step.phase == phase:
                self.rounds.setdefault(step.round, []).append(step)
        self.lengths = longest or {round_: max(s.step for s in found) for round_, found in self.rounds.items()}
        self.offsets: dict[int, int] = {}
        total = 0
        for round_ in sorted(self.lengths):
            self.offsets[round_] = total
            total += self.lengths[round_]
        self.total = total

    def __bool__(self) -> bool:
        return bool(self.rounds)

    @property
    def smoothed(self) -> bool:
        """Whether a mean is drawn through the lines of any round."""
        return any(len(found) >= SMOOTHED_FROM for found in self.rounds.values())

    def across(self) -> Across:
        """The axis, with a band per round."""
        bands = tuple(Band(at, at + self.lengths[round_], f"round {round_}") for round_, at in self.offsets.items())
        last = max(self.offsets, default=0)
        ticks = [(float(at), _count(at)) for round_, at in self.offsets.items() if self._roomy(round_, last)]
        ticks.append((float(self.total), _count(self.total)))
        counted = COUNTED.get(self.phase, "step")
        label = f"{counted}s" + (", rounds above" if len(bands) > FULL_NAMES else "")
        return Across(0.0, float(self.total), label, tuple(ticks), bands if len(bands) > 1 else (), counted)

    def _roomy(self, round_: int, last: int) -> bool:
        """Whether a round's beginning gets a label: of very many rounds only some do."""
        every = -(-len(self.offsets) // 5)
        place = sorted(self.offsets).index(round_)
        return place % every == 0 and (round_ != last or self.lengths[round_] * 8 > self.total)

    def place(self, step: StepRecord) -> float:
        return float(self.offsets[step.round] + step.step)

    def pieces(self, value: Callable[[StepRecord], float | None]) -> list[list[Point]]:
        """One piece per round; steps without the value are skipped."""
        found = []
        for round_ in sorted(self.rounds):
            points = [(self.place(s), y) for s in self.rounds[round_] if (y := value(s)) is not None]
            if points:
                found.append(points)
        return found

    def line(self, metric: str, name: str, style: str, dash: str = "", *, smooth: bool = True) -> Line:
        return Line(name, self.pieces(lambda step: step.metrics.get(metric)), style, dash, smooth=smooth)

    def level(self, values: dict[int, float], name: str, style: str, dash: str = "dotted") -> Line:
        """A value per round, drawn flat over it."""
        pieces = [
            [(float(at), values[round_]), (float(at + self.lengths[round_]), values[round_])]
            for round_, at in self.offsets.items()
            if round_ in values
        ]
        return Line(name, pieces, style, dash)

    def columns(self) -> list[tuple[float, dict[str, float]]]:
        """Every step's budget at the middle of the step."""
        return [
            (self.place(step) - 0.5, step.budget)
            for round_ in sorted(self.rounds)
            for step in self.rounds[round_]
            if step.budget
        ]


def _count(steps: int) -> str:
    return str(steps) if steps < 10_000 else compact(steps)
