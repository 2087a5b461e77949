"""From numbers to places and labels on an axis: round ticks, ranges, steps and rounds along the x axis.

Pure functions. Places run from 0 to `SPAN` in both directions of a chart; y grows downwards, as in SVG.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pvg.reporting.formats import NumberStyle, compact, short_seconds
from pvg.reporting.run_summary import StepRecord

SPAN = 1000.0  # a chart's own units: its SVG is stretched to whatever room there is
MOST_POINTS = 300  # per line: all 270 prover steps of the embedded game, and about as many as a chart has pixels

FULL_NAMES, MOST_NAMES = 4, 12  # how many bands get their full name, and how many get a name at all
NARROW = 0.02 * SPAN
SMOOTHED_FROM = 12  # points; a shorter line gets no moving mean

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class ValueAxis:
    """A range of values with its ticks and the format of its labels. On a logarithmic axis all values are above 0."""

    low: float
    high: float
    ticks: tuple[float, ...]
    style: NumberStyle = "number"
    log: bool = False

    def share(self, value: float) -> float:
        """0 at `low`, 1 at `high`. Values outside are clipped to the edge."""
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
    values: Sequence[float],
    style: NumberStyle = "number",
    *,
    zero: bool = False,
    most_ticks: int = 5,
    log: bool = False,
) -> ValueAxis:
    """An axis that contains all finite `values` and ends on round numbers. With `zero` it contains 0."""
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
    return ValueAxis(ticks[0], ticks[-1], ticks, style)


def share_axis() -> ValueAxis:
    return ValueAxis(0.0, 1.0, (0.0, 0.25, 0.5, 0.75, 1.0), "share")


def _log_axis(values: Sequence[float], style: NumberStyle) -> ValueAxis:
    low = math.floor(math.log10(min(values, default=1.0)) + 1e-9)
    high = max(low + 1, math.ceil(math.log10(max(values, default=1.0)) - 1e-9))
    return ValueAxis(10.0**low, 10.0**high, tuple(10.0**power for power in range(low, high + 1)), style, log=True)


def round_step(least: float, *, binary: bool = False) -> float:
    """The next of 1, 2, 2.5, 5 times a power of ten (of two for bytes) that is at least `least`."""
    if binary:
        return float(2.0 ** math.ceil(math.log2(max(least, 1.0))))
    power = 10.0 ** math.floor(math.log10(least))
    return next(step * power for step in (1.0, 2.0, 2.5, 5.0, 10.0) if step * power >= least * (1 - 1e-9))


def tick_labels(axis: ValueAxis) -> list[str]:
    """Short labels that all have the same number of decimals."""
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
    if axis.style in ("seconds", "sample_s"):
        return [_seconds_label(tick, step, largest, log=axis.log) for tick in axis.ticks]
    if largest >= 1000:
        return [compact(tick) if tick else "0" for tick in axis.ticks]
    if axis.log:
        return [f"{tick:g}" for tick in axis.ticks]
    digits = _decimals(step)
    return [f"{tick:.{digits}f}" if digits < 5 else f"{tick:.2g}" for tick in (tick + 0.0 for tick in axis.ticks)]


def _seconds_label(tick: float, step: float, largest: float, *, log: bool) -> str:
    if log or tick == 0:
        return short_seconds(tick).replace(".0 s", " s")
    for unit, factor, limit in (("µs", 1e6, 1e-3), ("ms", 1e3, 1.0), ("s", 1.0, 120.0)):
        if largest < limit:
            return f"{tick * factor:.{_decimals(step * factor)}f} {unit}"
    return short_seconds(tick).removesuffix(" 00 s").removesuffix(" 00 min")


def _decimals(step: float) -> int:
    """Decimals that distinguish ticks at this distance: 0.25 -> 2, 5 -> 0."""
    for digits in range(7):
        if abs(step * 10**digits - round(step * 10**digits)) < 1e-6 * max(1.0, step * 10**digits):
            return digits
    return 7


@dataclass(frozen=True, slots=True)
class MergedPoints:
    """Neighbouring points merged into one: mean place; mean, lowest and highest value; number of points."""

    x: float
    mean: float
    low: float
    high: float
    count: int


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> list[MergedPoints]:
    """The points themselves. More than `most` points are merged into `most` bins of about equal size."""
    count = len(points)
    if count <= most:
        return [MergedPoints(x, y, y, y, 1) for x, y in points]
    edges = [count * place // most for place in range(most + 1)]
    bins = []
    for start, end in itertools.pairwise(edges):
        xs, ys = zip(*points[start:end], strict=True)
        bins.append(MergedPoints(sum(xs) / len(xs), sum(ys) / len(ys), min(ys), max(ys), len(ys)))
    return bins


def moving_mean(values: Sequence[float], window: int) -> list[float]:
    """The mean over `window` values around each value, over fewer at both ends."""
    half = window // 2
    means = []
    for place in range(len(values)):
        around = values[max(0, place - half) : place + half + 1]
        means.append(sum(around) / len(around))
    return means


def without_gaps(times: Sequence[float], longest: float) -> tuple[list[float], list[int]]:
    """Seconds since the first of the sorted `times` without pauses above `longest`, and the index after each pause.

    A run that stopped in the evening and resumed in the morning should not show the night.
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


@dataclass(frozen=True, slots=True)
class AxisBand:
    """A named range of the x axis, such as a round."""

    start: float
    end: float
    label: str


@dataclass(frozen=True, slots=True)
class XAxis:
    """The x axis: its ends, its unit, ticks (place, label), and bands. `counts` names what is counted within a band."""

    low: float
    high: float
    label: str = ""
    ticks: tuple[tuple[float, str], ...] = ()
    bands: tuple[AxisBand, ...] = ()
    counts: str = ""
    style: NumberStyle = "number"

    def x(self, value: float) -> float:
        return SPAN * (value - self.low) / ((self.high - self.low) or 1.0)


def round_axis(numbers: Sequence[int], *, base: bool = False, margin: float = 0.25) -> XAxis:
    """The x axis of charts by round, with at most twelve ticks. `base`: the base prover comes before the first
    round."""
    numbers = sorted(numbers) or [0]
    every = -(-len(numbers) // MOST_NAMES)
    ticks = [(float(n), str(n)) for place, n in enumerate(numbers) if place % every == 0]
    first = numbers[0] - 1 if base else numbers[0]
    return XAxis(
        first - margin, numbers[-1] + margin, "round", ((float(first), "base"), *ticks) if base else tuple(ticks)
    )


@dataclass(frozen=True, slots=True)
class ChartLine:
    """A line of a chart, with a gap between its `pieces`.

    `smooth` draws the moving mean strongly and the values faintly; with `bare` the values are not drawn. `dots` marks
    the points. `spread` is a band around the line as (place, low, high); `whiskers` are intervals of single points in
    the same form.
    """

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


PROVER, VERIFIER = "train_prover", "train_verifier"
COUNTED = {PROVER: "prover step", VERIFIER: "verifier step", "mint": "rollout", "init": "rollout"}


class StepAxis:
    """The steps of `phase` along an x axis, one round after the other.

    `longest` gives the length of each round when several runs share the axis. Default: the lengths of these steps.
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

    def across(self) -> XAxis:
        """The axis, with a band per round."""
        bands = tuple(AxisBand(at, at + self.lengths[round_], f"round {round_}") for round_, at in self.offsets.items())
        last = max(self.offsets, default=0)
        ticks = [(float(at), _count(at)) for round_, at in self.offsets.items() if self._roomy(round_, last)]
        ticks.append((float(self.total), _count(self.total)))
        counted = COUNTED.get(self.phase, "step")
        label = f"{counted}s" + (", rounds above" if len(bands) > FULL_NAMES else "")
        return XAxis(0.0, float(self.total), label, tuple(ticks), bands if len(bands) > 1 else (), counted)

    def _roomy(self, round_: int, last: int) -> bool:
        """Whether the start of a round gets a label. With many rounds only some do."""
        every = -(-len(self.offsets) // 5)
        place = sorted(self.offsets).index(round_)
        return place % every == 0 and (round_ != last or self.lengths[round_] * 8 > self.total)

    def place(self, step: StepRecord) -> float:
        return float(self.offsets[step.round] + step.step)

    def pieces(self, value: Callable[[StepRecord], float | None]) -> list[list[Point]]:
        """One piece per round, without the steps that have no value."""
        found = []
        for round_ in sorted(self.rounds):
            points = [(self.place(s), y) for s in self.rounds[round_] if (y := value(s)) is not None]
            if points:
                found.append(points)
        return found

    def line(self, metric: str, name: str, style: str, dash: str = "", *, smooth: bool = True) -> ChartLine:
        return ChartLine(name, self.pieces(lambda step: step.metrics.get(metric)), style, dash, smooth=smooth)

    def level(self, values: dict[int, float], name: str, style: str) -> ChartLine:
        """One constant value per round, dotted."""
        pieces = [
            [(float(at), values[round_]), (float(at + self.lengths[round_]), values[round_])]
            for round_, at in self.offsets.items()
            if round_ in values
        ]
        return ChartLine(name, pieces, style, "dotted")

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
