"""What ran when: the spans of a few steps as blocks in lanes, one lane per track."""

from __future__ import annotations

from pvg.reporting.figures import phase_label, styled
from pvg.reporting.page.frame import Key, figure, svg
from pvg.reporting.page.markup import Html, div, number, span, tag
from pvg.reporting.page.scales import SPAN, nice_axis
from pvg.reporting.parts import Part, in_order
from pvg.reporting.timeline import Lane, Window

ROW = 20  # pixels of one row of a lane
LETTERS = 0.0075  # of the chart's width, roughly, that one letter takes


def gantt(window: Window) -> Html:
    """The lanes of a window over one time axis; the beginnings of its steps are marked."""
    parts = {part.name: part for part in in_order({block.name for lane in window.lanes for block in lane.blocks})}
    marks = tuple(at / window.seconds for _, at in window.starts)
    lanes = [_lane(lane, window.seconds, parts, marks) for lane in window.lanes]
    names = [
        span("step-name", f"step {step}", style=f"left:{number(100 * at / window.seconds)}%")
        for step, at in window.starts
    ]
    axis = nice_axis([0.0, window.seconds], "seconds", most_ticks=6)
    ticks = [
        tag("span", label, style=f"left:{number(100 * at / window.seconds)}%")
        for at, (_, label) in zip(axis.ticks, axis.labels(), strict=True)
        if at <= window.seconds * 1.001
    ]
    chosen = window.choice
    missing = sum(lane.left_out for lane in window.lanes)
    return figure(
        f"{phase_label(chosen.phase).capitalize()}, round {chosen.round}",
        div("lane head", span("lane-name"), div("area", *names)),
        *lanes,
        div("lane foot", span("lane-name"), div("area", div("xs", *ticks))),
        unit=f"{_steps(chosen.steps)}, {styled('seconds', window.seconds)}",
        keys=[Key(part.label, part.style, shape="box") for part in parts.values()],
        note=f"{missing} spans that ran beside many others are not drawn." if missing else "",
        class_="wide gantt",
    )


def _steps(steps: tuple[int, ...]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def _lane(lane: Lane, seconds: float, parts: dict[str, Part], marks: tuple[float, ...]) -> Html:
    height = SPAN / max(1, lane.rows)
    drawn = [tag("path", d=f"M{number(SPAN * mark)} 0V{number(SPAN)}", class_="step-mark") for mark in marks]
    labels = []
    for block in lane.blocks:
        part = parts[block.name]
        left, width = block.start_s / seconds, (block.end_s - block.start_s) / seconds
        drawn.append(
            tag(
                "rect",
                tag("title", _words(block.name, block.count, block.worked_s)),
                x=SPAN * left,
                y=height * (block.row + 0.06),
                width=max(SPAN * width, 0.6),  # a span of any length can be seen
                height=height * 0.88,
                class_=f"fill {part.style}",
            )
        )
        if width > LETTERS * (len(part.label) + 1):
            place = f"left:{number(100 * left)}%;width:{number(100 * width)}%;top:{number(ROW * block.row)}px"
            labels.append(tag("span", part.label, class_=f"block-name on-{part.style}", style=place))
    label = f"{lane.track}: {len(lane.blocks)} spans"
    area = div("area", svg(*drawn, label=label), *labels, style=f"height:{ROW * max(1, lane.rows)}px")
    return div("lane", span("lane-name", lane.track), area)


def _words(name: str, count: int, worked_s: float) -> str:
    many = f"{count} × " if count > 1 else ""
    together = " in all" if count > 1 else ""
    return f"{many}{name.replace('_', ' ')}: {worked_s * 1e3:.4g} ms{together}"
