"""What every chart has around it: a title with its unit, a legend, axes with labels, grid lines, bands for the rounds.

The drawing is an SVG that is stretched to the room there is, and all text is HTML beside it: so a chart fills a wide
screen and a phone alike, with lettering of one size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pvg.reporting.figures import Style
from pvg.reporting.page.markup import Html, div, join, number, span, tag
from pvg.reporting.page.scales import SPAN, Axis

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
