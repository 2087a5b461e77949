"""Numbers as short text: percentages, scores, durations, sparklines, and how each metric of a run is shown
(formats.toml).

Pure functions of numbers; the terminal tables, the live display and the HTML page share them.
"""

from __future__ import annotations

import itertools
import math
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pvg.telemetry.catalogue import LABELS, METRICS

SHOWN: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
HOME_PHASES: dict[str, str] = SHOWN["home_phases"]  # metric -> the phase whose values form its curve
FAMILIES: dict[str, list[str]] = SHOWN["families"]  # family of work -> parts of a time budget
OTHER = "other"  # the family of unknown parts
SHADES = 4  # per family; the fifth part has the first shade again

_FAMILY_OF = {part: family for family, parts in FAMILIES.items() for part in parts}


@dataclass(frozen=True, slots=True)
class BudgetPart:
    """A part of a budget, its family and its shade within the family (0 is the strongest)."""

    name: str
    family: str
    shade: int

    @property
    def label(self) -> str:
        return self.name.replace("_", " ")

    @property
    def style(self) -> str:
        """The class of its colour in the page's style sheet."""
        return f"part-{self.family}-{self.shade}"


def in_order(names: Iterable[str]) -> list[BudgetPart]:
    """The parts in the order of FAMILIES, each name once. Unknown parts are sorted by name."""
    given = set(names)
    found = []
    for family, known in FAMILIES.items():
        names_in_order = sorted(given - _FAMILY_OF.keys()) if family == OTHER else known
        # By the place in the whole list, so that a part has the same shade in every chart.
        found += [
            BudgetPart(name, family, place % SHADES) for place, name in enumerate(names_in_order) if name in given
        ]
    return found


NumberStyle = Literal["share", "auc", "score", "rate", "number", "seconds", "bytes"]

BARS = "▁▂▃▄▅▆▇"  # without the full block, which would merge with the line below
ABSENT = "–"
# A sparkline's full height spans at least this much, so that noise does not look like an event. Others: 0.
LEAST_SPAN: dict[NumberStyle, float] = {"share": 0.1, "auc": 0.02, "score": 0.5}


@dataclass(frozen=True, slots=True)
class MetricDisplay:
    """How a metric is shown: its label, its style, and whether a higher value is the better one (None: neither)."""

    label: str
    style: NumberStyle
    higher_is_better: bool | None = None


# The phases that take longer in later rounds of a growing game.
GROWING_PHASES = ("mint", "train_verifier")


@cache
def metric_display(name: str) -> MetricDisplay:
    """How metric `name` is shown, by the catalogue of metrics. An unknown metric keeps its own name."""
    label = LABELS.get(name) or name.replace("_", " ")
    entry = next((metric for metric in METRICS.values() if metric.short == name), None)
    if entry is None:
        return MetricDisplay(*SHOWN["computed"].get(name, (label, "number")))
    style: NumberStyle = "auc" if "_auc" in name else SHOWN["unit_styles"].get(entry.unit, "number")
    return MetricDisplay(label, style, {"higher": True, "lower": False}.get(entry.better))


def phase_label(phase: str) -> str:
    return str(SHOWN["phase_labels"].get(phase) or phase.replace("_", " "))


def seconds_to_come(
    timed: Mapping[tuple[int, str], float],
    place: tuple[int, str],
    phases: Sequence[str],
    rounds: int,
    effort: Callable[[int], int],
) -> float | None:
    """Seconds of all phases after `place` = (round, phase); None if a kind of phase was not `timed` yet.

    The estimate assumes that a phase takes as long as the last timed phase of its kind. `phases` are those of a round,
    in order. `effort` is that of `[game]`: in a growing game, some phases grow with the round.
    """

    def growth(round_: int, phase: str) -> int:
        return effort(round_) if phase in GROWING_PHASES else 1

    lasted = {phase: seconds / growth(round_, phase) for (round_, phase), seconds in timed.items()}
    to_come = [(place[0], phase) for phase in phases[phases.index(place[1]) + 1 :]]
    to_come += [(round_, phase) for round_ in range(place[0] + 1, rounds) for phase in phases]
    if not all(phase in lasted for _, phase in to_come):
        return None
    return sum(lasted[phase] * growth(round_, phase) for round_, phase in to_come)


def metric_text(name: str, value: float | None) -> str:
    """The value of metric `name` as text; a dash for a missing value."""
    return value_text(metric_display(name).style, value)


def value_text(style: NumberStyle, value: float | None) -> str:
    if value is None or math.isnan(value):
        return ABSENT
    return _WRITTEN[style](value)


def change_text(style: NumberStyle, value: float | None) -> str:
    """A difference with its sign; differences of shares are in percentage points."""
    if value is None:
        return ABSENT
    if style == "share":
        return f"{100 * value + 0.0:+.1f} pp"
    if style in ("auc", "score", "number"):
        return f"{value + 0.0:+.{3 if style == 'auc' else 2}f}"
    return f"{'+' if value >= 0 else '-'}{value_text(style, abs(value))}"


def percent(value: float) -> str:
    """0.843 -> `84.3 %`; 1.0 -> `100 %`."""
    text = f"{100 * value:.1f}"
    return "100 %" if text == "100.0" else f"{text} %"


def compact(value: float) -> str:
    """12_432 -> `12.4k`; three significant digits and a unit of thousand."""
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    size = abs(value)
    for limit, factor, unit in ((1e3, 1.0, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M"), (math.inf, 1e9, "G")):
        if size < limit * (1 - 5e-4):
            scaled = size / factor
            digits = 0 if scaled >= 100 or (not unit and scaled == int(scaled)) else 1
            return f"{math.copysign(scaled, value):.{digits}f}{unit}"
    return f"{value:.3g}"


def short_seconds(seconds: float) -> str:
    """A measured time: three digits below a second, 0.0123 -> `12.3 ms`. From a second on like `duration`."""
    size = abs(seconds)
    if size == 0:
        return "0 s"
    if size < 0.9995e-3:
        return f"{seconds * 1e6:.3g} µs"
    return f"{seconds * 1e3:.3g} ms" if size < 0.9995 else duration(seconds)


def sample_seconds(seconds: float) -> str:
    """A time that readers compare with others like it, as the samples of a benchmark: three digits up to a minute,
    4.2 -> `4.20 s`, because 4.20 s and 4.31 s differ. Otherwise like `short_seconds`."""
    size = abs(seconds)
    if not 0.9995 <= size < 59.95:
        return short_seconds(seconds)
    return f"{seconds:.2f} s" if size < 9.995 else f"{seconds:.1f} s"


def peak_memory_texts(peaks: Mapping[str, float]) -> list[tuple[str, str]]:
    """A run's or a benchmark's peak memory as (what, how much)."""
    return [(what, byte_size(peaks[name])) for name, what in SHOWN["peaks"].items() if name in peaks]


def byte_size(count: float) -> str:
    """1_288_490_189 -> `1.20 GiB`."""
    size = abs(count)
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            scaled = count / factor
            return f"{scaled:.0f} {unit}" if abs(scaled) >= 999.5 else f"{scaled:.3g} {unit}"
    return f"{count:.0f} B"


def duration(seconds: float | None) -> str:
    """5.5 -> `5.5 s`, 12 -> `12 s`, 947 -> `15 min 47 s`, 7500 -> `2 h 05 min`. Measured times use `short_seconds`.
    Samples of benchmarks use `sample_seconds`."""
    if seconds is None or math.isnan(seconds) or math.isinf(seconds):
        return ABSENT
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest} s"
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min"


def sparkline(values: Sequence[float], width: int, least_span: float = 0.0) -> str:
    """At most `width` bars. Longer series are averaged in equal buckets; NaN is blank.

    The full height is the range of the values, but at least `least_span`. A constant series is flat.
    """
    points = _buckets(values, width)
    finite = [point for point in points if math.isfinite(point)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    if high - low < least_span:
        high = low + least_span
    if high <= low:
        return "".join(BARS[0] if math.isfinite(point) else " " for point in points)
    top = len(BARS) - 1
    return "".join(
        # Halved, because the difference of two very large numbers overflows.
        BARS[min(top, int((point / 2 - low / 2) / (high / 2 - low / 2) * len(BARS)))] if math.isfinite(point) else " "
        for point in points
    )


def trend(name: str, values: Sequence[float], width: int) -> str:
    return sparkline(values, width, LEAST_SPAN.get(metric_display(name).style, 0.0))


def _buckets(values: Sequence[float], width: int) -> list[float]:
    count = len(values)
    if count <= width:
        return list(values)
    edges = [count * position // width for position in range(width + 1)]
    means = []
    for start, end in itertools.pairwise(edges):
        bucket = [value for value in values[start:end] if math.isfinite(value)]
        means.append(sum(bucket) / len(bucket) if bucket else math.nan)
    return means


_WRITTEN: dict[NumberStyle, Callable[[float], str]] = {
    "share": percent,
    "auc": "{:.3f}".format,
    "score": "{:.2f}".format,
    "rate": compact,
    "number": lambda value: compact(value) if abs(value) >= 1000 else f"{value:.3g}",
    "seconds": short_seconds,
    "bytes": byte_size,
}
