"""Rich renderables of a run: tables and example solutions. They show the data of a `RunSummary`.

The live display uses the same rounds table, so a run looks the same while it plays and afterwards.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from pvg.errors import counted
from pvg.reporting.formats import (
    SHOWN,
    duration,
    in_order,
    metric_text,
    peak_memory_texts,
    percent,
    phase_label,
    short_seconds,
    value_text,
)
from pvg.reporting.run_summary import (
    RunState,
    RunSummary,
    base_metrics,
    lag_summary,
    reading_ranges,
    state_word,
    workers_text,
)
from pvg.reporting.table import Column, LegendKey, Table, TableCell
from pvg.telemetry.catalogue import REMEDIES
from pvg.verifier.intervals import change_point

if TYPE_CHECKING:
    from pvg.reporting.solutions import Example

HELPFUL, SNEAKY, VERIFIER, QUIET, HEADING = "green", "magenta", "cyan", "bright_black", "bold"

TERMINAL = SHOWN["terminal"]
# Of the rounds table, by metric.
ROUND_COLUMNS = {
    name: Column(title, "right", style, short, on) for name, title, style, short, on in TERMINAL["round_columns"]
}
FEW = 30  # solutions; numbers of fewer are greyed


def rounds_table(rounds: Mapping[int, Mapping[str, float]]) -> Table:
    """One line per finished round, and one for the base prover where a round measured it. A page leaves out what no
    round measured; the live display keeps its columns."""
    measured = {name for metrics in rounds.values() for name in metrics}
    self_play = any(name.startswith("points_") for name in measured)  # no verifier, so only what was measured
    columns = {}
    for name, column in ROUND_COLUMNS.items():
        if name in measured:
            columns[name] = replace(column, on="everywhere") if self_play else column
        elif column.on == "everywhere" and not self_play:
            columns[name] = replace(column, on="terminal")
    table = Table([Column("round", "right", short="\nround"), *columns.values()], narrow=True)
    if base := base_metrics(rounds):
        table.add("base", *(metric_text(name, base.get(name)) for name in columns))
    for number in sorted(rounds):
        table.add(str(number), *(_measured(name, rounds[number]) for name in columns))
    return table


def _measured(name: str, metrics: Mapping[str, float]) -> TableCell:
    """The value of a round. One of few solutions is greyed."""
    count = metrics.get(TERMINAL["counted"].get(name, ""), math.inf)
    return TableCell(metric_text(name, metrics.get(name)), "quiet" if count < FEW else "")


def ends_of(name: str, metrics: Mapping[str, float]) -> str:
    """The 95 % interval of a share, `2.2 to 5.6 %`; "" where the round has none."""
    low, high = (metrics.get(f"{name}_{end}") for end in ("low", "high"))
    return "" if low is None or high is None else f"{100 * low:.1f} to {100 * high:.1f} %"


def counted_share(name: str, metrics: Mapping[str, float]) -> str:
    """A share with its interval: `3.5 % (95 % interval 2.2 to 5.6 %)`."""
    reach = ends_of(name, metrics)
    return f"{metric_text(name, metrics[name])}{reach and f' (95 % interval {reach})'}"


def rounds_with_outcome(rounds: Mapping[int, Mapping[str, float]]) -> Group:
    """The table, and below it what it says, one line per sentence."""
    says = outcome(rounds)
    return Group(rounds_table(rounds), *([Text()] if says else []), *map(Text, says))


def outcome(rounds: Mapping[int, Mapping[str, float]]) -> list[str]:
    """Sentences on the roles and the verifier, from the metrics by round. A sentence whose metrics were not measured is
    left out; self-play has none."""
    if not rounds:
        return []
    found = [
        _before_and_after(rounds, "helpful_accuracy", "of the helpful role's solutions were correct"),
        _before_and_after(rounds, "sneaky_error_rate", "of the sneaky role's solutions were wrong (flaws)"),
        _own_flaws(rounds),
    ]
    if shares := [found["fooled_rate_previous"] for found in rounds.values() if "fooled_rate_previous" in found]:
        most = metric_text("fooled_rate_previous", max(shares))
        found.append(f"Each new verifier accepted at most {most} of the previous round's flaws.")
    return [sentence for sentence in found if sentence]


def _before_and_after(rounds: Mapping[int, Mapping[str, float]], metric: str, says: str) -> str:
    number, base = max(rounds), base_metrics(rounds)
    if metric not in rounds[number]:
        return ""
    after = counted_share(metric, rounds[number])
    if metric not in base:
        return f"{after} {says} after round {number}."
    return f"{metric_text(metric, base[metric])} {says} before the game, and {after} after round {number}."


def _own_flaws(rounds: Mapping[int, Mapping[str, float]]) -> str:
    metric, last = "fooled_rate", max(rounds)
    shares = {number: rounds[number][metric] for number in sorted(rounds) if metric in rounds[number]}
    if last not in shares:
        return ""
    count, share = rounds[last].get("flaws"), counted_share(metric, rounds[last])
    of = "flaws" if count is None else counted(round(count), "flaw")
    says = f"The verifier of round {last} accepted {share} of its round's {of}{_beside_correct(rounds[last])}"
    worst = max(shares, key=lambda number: shares[number])
    most = metric_text(metric, shares[worst])
    if most == metric_text(metric, shares[last]):
        return says
    return f"{says} The highest share of flaws was {most}, in round {worst}."


def _beside_correct(metrics: Mapping[str, float]) -> str:
    """The end of the sentence on flaws. A low share of flaws says nothing about a verifier that accepts few correct
    solutions too."""
    if math.isnan(metrics.get("accepted_helpful", math.nan)):
        return "." if "solved" not in metrics else ". No helpful solution was correct, so that says little."
    says = f", and {counted_share('accepted_helpful', metrics)} of the correct helpful solutions."
    # Solutions of one problem have no interval, and show nothing.
    if "solutions" in metrics and metrics.get("accepted_helpful_low", 0.0) <= metrics.get("fooled_rate_high", 1.0):
        return f"{says} So these numbers do not show that it accepts correct solutions more often than flaws."
    return says


CHANGED, SURE = 0.1, 0.01  # the report names changes of an MCC from CHANGED on, with a p value of at most SURE


def judgements(summary: RunSummary) -> list[str]:
    """A sentence on the critic before the first round, and one per prover phase in which the verifier's judgement of
    the prover's solutions changed at some step."""
    found = []
    for own in (phase.metrics for phase in summary.phases if "critic_lead_low" in phase.metrics):
        lead, low, high = (own[f"critic_lead{end}"] for end in ("", "_low", "_high"))
        says = f"the critic's balanced accuracy was {own['critic_balanced']:.2f} and that of a judge without critiques"
        interval = f"{lead:+.2f}, 95 % interval {low:+.2f} to {high:+.2f}"
        found.append(f"Before the first round, {says} {own['judge_balanced']:.2f} (difference {interval}).")
    for round_ in sorted({step.round for step in summary.steps}):
        steps = [
            s for s in summary.steps if s.round == round_ and s.phase == "train_prover" and "verifier_mcc" in s.metrics
        ]
        values_T = np.array([step.metrics["verifier_mcc"] for step in steps], dtype=np.float64)
        if (change := change_point(values_T)) is None or change[1] > SURE:
            continue
        before, after = values_T[: change[0]].mean(), values_T[change[0] :].mean()
        if abs(after - before) >= CHANGED:
            when = f"In round {round_}, up to step {steps[change[0] - 1].step} of the prover"
            says = f"the verifier's MCC on its solutions was {before:.2f} on average, then {after:.2f}"
            found.append(f"{when}, {says} (change point, p = {change[1]:.3f}).")
    return found


def percent_short(share: float) -> str:
    return "<1%" if 0 < share < 0.005 else f"{100 * share:.0f}%"


# --- the report of a run ---------------------------------------------------------------------------------------------


def report(summary: RunSummary, examples: Sequence[Example], *, state: RunState | None = None) -> Group:
    """Everything that `pvg view` prints, in order, without empty parts; the page has more. `state`: of the run
    (`state_word`)."""
    parts: list[RenderableType] = [headline(summary, state)]
    if summary.alerts:
        parts += section(f"Alerts ({len(summary.alerts)})", alerts_list(summary))
    if summary.rounds:
        parts += section("Rounds", Group(rounds_with_outcome(summary.rounds), *map(Text, judgements(summary))))
    if examples:
        from pvg.reporting.solutions import threshold_of

        shown = examples_list(examples, threshold_of(summary, examples[0].round))
        parts += section("Example solutions", shown)
    if summary.warnings:
        parts += section("Warnings about the settings", Text("\n".join(summary.warnings), style="yellow"))
    if summary.notes:
        parts += section("Notes", Text("\n".join(summary.notes), style="yellow"))
    return Group(*parts)


def section(title: str, body: RenderableType) -> list[RenderableType]:
    return [Text(), Text(title, style=HEADING), Padding(body, (0, 0, 0, 2))]


def pairs(rows: Iterable[tuple[str, str]]) -> RichTable:
    """Names, and what is said of each. No text is read as markup."""
    table = RichTable.grid(padding=(0, 2, 0, 0))
    table.add_column(style=QUIET, no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(Text(name), Text(text))
    return table


def headline(summary: RunSummary, state: RunState | None = None) -> Text:
    word, kind = state_word(state, summary.status, summary.damaged)
    planned = counted(summary.rounds_planned, "round")
    return Text.assemble(
        (summary.name, "bold"),
        (f"  experiment {summary.experiment}", QUIET),
        ("" if summary.status == "samples" else f"  {len(summary.rounds)} of {planned}", QUIET),
        (f"  {duration(summary.seconds)}", QUIET),
        "  ",
        (word, {"good": "green", "warn": "yellow", "bad": "red"}[kind]),
    )


NOTEWORTHY = 2e-3  # share of the time; less overlap than this gets no columns


def parts_table(budget: dict[str, float], busy: dict[str, float], steps: dict[str, float]) -> Table:
    """Exposed seconds by part. If work overlapped, also the busy and the hidden seconds.

    `busy` covers the steps only, whose exposed time is `steps`. Time outside of the steps has no overlap.
    """
    total = sum(budget.values())
    over = {part: max(0.0, seconds - steps.get(part, 0.0)) for part, seconds in busy.items()}
    hidden = sum(over.values())
    largest = max(budget.values(), default=0.0)
    titles = ["", "exposed", "share", "busy", "hidden"] if hidden > NOTEWORTHY * total else ["", "exposed", "share"]
    table = Table([Column("part"), *(Column(title, "right") for title in titles)], look="parts")

    def add(first: TableCell, bar: TableCell, exposed: float, covered: float) -> None:
        numbers = [value_text("seconds", exposed), percent(exposed / total), value_text("seconds", exposed + covered)]
        last = value_text("seconds", covered) if covered > 1e-4 * total else ""
        table.add(first, bar, *[*numbers, last][: len(titles) - 1])

    for part in in_order({**budget, **busy}):
        exposed = budget.get(part.name, 0.0)
        bar = TableCell(style=part.style, bar=exposed / largest if largest > 0 else 0.0)
        first = TableCell(part.label, key=LegendKey(part.label, part.style, shape="box"))
        add(first, bar, exposed, over.get(part.name, 0.0))
    add(TableCell("all"), TableCell(), total, hidden)
    table.caption = "Exposed: the time that the run waited for a part."
    if len(titles) > 3:
        table.caption += " Hidden: the part overlapped with other work. Busy: the sum of both."
    return table


GPU_USE = re.compile(r"gpu(\d+)_utilisation")
LAGS = (("typically", "median_p50_s"), ("worst p90", "worst_p90_s"), ("p99", "worst_p99_s"), ("longest", "worst_max_s"))


def machine_facts(summary: RunSummary) -> list[tuple[str, str]]:
    """(what, how much) of device, peak memory, workers and event loop, as far as the run recorded them."""
    device, lags = reading_ranges(summary.device), lag_summary(summary.loop)
    gpus = sorted(int(match[1]) for name in device if (match := GPU_USE.fullmatch(name)))
    rows = [*TERMINAL["device_facts"]]
    rows += [(a.format(n), b.format(n), of, style) for n in gpus for a, b, of, style in TERMINAL["gpu_facts"]]
    found = [(label, value_text(style, device[name][of])) for label, name, of, style in rows if name in device]
    found += peak_memory_texts(summary.peak_memory)
    if summary.workers:
        found.append(("workers", workers_text(summary)))
    if summary.scaling:
        newest = summary.scaling[-1]
        changes = f"{counted(len(summary.scaling), 'change')} of their number; the last one: {newest.why}"
        found.append(("scaling", changes))
    if said := [f"{word} {short_seconds(lags[name])}" for word, name in LAGS if name in lags]:
        found.append(("event-loop lag", ", ".join(said)))
    return found


def alerts_told(summary: RunSummary) -> list[tuple[str, str, str, str]]:
    """(name, message, when, what to do) of each alert. What to do is said once per kind, with its first alert."""
    found, explained = [], set[str]()
    for alert in summary.alerts:
        step = "" if alert.step is None else f", step {alert.step}"
        when = f"round {alert.round}, {phase_label(alert.phase)}{step}"
        remedy = REMEDIES.get(alert.name, "")  # of a kind that this pvg does not know: nothing
        found.append((alert.name, alert.message, when, "" if remedy in explained else remedy))
        explained.add(remedy)
    return found


def alerts_list(summary: RunSummary) -> Text:
    lines = Text()
    for name, message, when, remedy in alerts_told(summary):
        lines.append_text(Text.assemble((f"{when}  ", QUIET), (name, "yellow"), f"  {message}\n"))
        lines.append(f"  {remedy}\n" if remedy else "", style=QUIET)
    lines.rstrip()
    return lines


def examples_list(examples: Sequence[Example], threshold: float | None = None) -> Group:
    from pvg.reporting.solutions import shown_solution  # `pvg train` shows none

    parts: list[RenderableType] = []
    for example in examples:
        shown = shown_solution(example, threshold)
        role = HELPFUL if example.role == "helpful" else SNEAKY
        score = f"  {shown.score}" if shown.score else ""
        answer = f" (answer {example.reference})" if example.reference else ""
        rows = [
            Text.assemble((example.role, role), f", {example.why}", (score, VERIFIER), (f"  {example.id}", QUIET)),
            Text(f"question  {example.question}{answer}", style=QUIET),
            *(Text(text, style=QUIET) for text in shown.before),
            Text.assemble(("solution  ", QUIET), "".join(shown.pieces)),
            *(Text(text, style=QUIET) for text in shown.after),
            Text.assemble(("grade     ", QUIET), (shown.grade, "green" if example.correct else "red")),
        ]
        parts += [*([Text()] if parts else []), *rows]
    return Group(*parts)


def closing(summary: RunSummary, commands: Mapping[str, str]) -> Group:
    """The end of `pvg train`: rounds, alerts, and what to type next (command -> purpose). Its times are those of
    `report`."""
    parts: list[RenderableType] = [Text(), headline(summary)]
    if summary.rounds:
        parts += [Text(), Padding(rounds_with_outcome(summary.rounds), (0, 0, 0, 2))]
    if summary.alerts:
        parts += section(f"Alerts ({len(summary.alerts)})", alerts_list(summary))
    if summary.status == "complete":
        done = f"Played for {duration(summary.seconds)}."
    elif summary.steps:
        done = f"Stopped; everything up to here is committed. Played for {duration(summary.seconds)}."
    else:
        done = "Stopped. Nothing was played yet."
    parts += [Text(), Text(f"{done} Next:", style=QUIET)]
    width = max(len(command) for command in commands)
    parts += [
        Text.assemble("  ", (f"{command:<{width}}", "bold cyan"), (f"   {what}", QUIET), overflow="fold")
        for command, what in commands.items()
    ]
    return Group(*parts)
