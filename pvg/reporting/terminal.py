"""Rich renderables of a run: tables, the time budget, example solutions. They show the data of a `RunSummary`.

The live display uses the same rounds table and budget bar, so a run looks the same while it plays and afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from pvg.errors import counted
from pvg.reporting.formats import (
    HOME_PHASES,
    byte_size,
    duration,
    in_order,
    metric_display,
    metric_text,
    peak_memory_texts,
    phase_label,
    short_seconds,
    sparkline,
    trend,
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
from pvg.reporting.table import Column, Table, TableCell, side_by_side
from pvg.telemetry.spans import UNACCOUNTED

if TYPE_CHECKING:
    from pvg.reporting.solutions import Example

HELPFUL, SNEAKY, VERIFIER, QUIET, HEADING = "green", "magenta", "cyan", "bright_black", "bold"

# Of the rounds table: metric, title, short title, style, and where the column is shown. Short titles have two lines, so
# that all columns fit in the live display at 80 columns.
ROUND_COLUMNS: tuple[tuple[str, Column], ...] = (
    ("helpful_accuracy", Column("helpful accuracy", "right", "helpful", "helpful\naccuracy")),
    ("sneaky_error_rate", Column("sneaky error rate", "right", "sneaky", "sneaky\nerrors")),
    ("fooled_rate", Column("fooled rate", "right", "sneaky", "fooled\nrate")),
    ("fooled_rate_previous", Column("fooled by previous", "right", "", "fooled by\nprevious")),
    ("fooled_rate_base", Column("fooled by base", "right", "", "fooled by\nbase")),
    ("accepted_helpful", Column("helpful accepted", "right", "helpful", on="pages")),
    ("verifier_auc", Column("verifier AUC", "right", "verifier", "verifier\nAUC")),
    ("verifier_auc_previous", Column("AUC on previous", "right", "verifier", "AUC on\nprevious")),
    ("score_gap", Column("score gap", "right", on="pages")),
    ("malformed", Column("malformed", "right", on="pages")),
    ("points_random", Column("points against random", "right", "", "points\nrandom", on="pages")),
    ("points_greedy", Column("points against greedy", "right", "", "points\ngreedy", on="pages")),
    ("points_base", Column("points against base", "right", "", "points\nbase", on="pages")),
    ("gain_random", Column("gain against random", "right", "", "gain\nrandom", on="pages")),
    ("gain_greedy", Column("gain against greedy", "right", "", "gain\ngreedy", on="pages")),
    ("gain_base", Column("gain against base", "right", "", "gain\nbase", on="pages")),
)

KEY_METRICS = (
    "helpful_accuracy",
    "sneaky_error_rate",
    "accepted_helpful",
    "fooled_rate",
    "score_gap",
    "pair_accuracy",
    "reward_mean",
    "legal",
    "kl",
    "malformed",
    "zero_signal",
    "truncated",
    "tokens_per_s",
    "cache_hit_rate",
)

# By family of work (pvg.reporting.formats), as on the page.
FAMILY_COLOURS: dict[str, tuple[str, ...]] = {
    "sampling": ("yellow", "bright_yellow"),
    "scoring": ("cyan", "bright_cyan"),
    "training": ("red", "bright_red"),
    "bookkeeping": ("blue", "bright_blue"),
    "waiting": ("white",),
    "other": ("bright_white",),
    "unaccounted": (QUIET,),
}
SMALL_PART = 0.005  # of the whole
# The characters of the parts in a bar without colours.
SHADES = "█▒▓░"


def rounds_table(rounds: Mapping[int, Mapping[str, float]]) -> Table:
    """One line per finished round, and one for the base prover where a round measured it. A page leaves out what no
    round measured; the live display keeps its columns."""
    measured = {name for metrics in rounds.values() for name in metrics}
    self_play = any(name.startswith("points_") for name in measured)  # no verifier, so only what was measured
    columns = {}
    for name, column in ROUND_COLUMNS:
        if name in measured:
            columns[name] = replace(column, on="everywhere") if self_play else column
        elif column.on == "everywhere" and not self_play:
            columns[name] = replace(column, on="terminal")
    table = Table([Column("round", "right", short="\nround"), *columns.values()], narrow=True)
    base = base_metrics(rounds)
    if base:
        table.add("base", *(metric_text(name, base.get(name)) for name in columns))
    for number in sorted(rounds):
        table.add(str(number), *(metric_text(name, rounds[number].get(name)) for name in columns))
    return table


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
        _previous_flaws(rounds),
    ]
    return [sentence for sentence in found if sentence]


def _before_and_after(rounds: Mapping[int, Mapping[str, float]], metric: str, says: str) -> str:
    number, base = max(rounds), base_metrics(rounds)
    if metric not in rounds[number]:
        return ""
    after = metric_text(metric, rounds[number][metric])
    if metric not in base:
        return f"{after} {says} after round {number}."
    return f"{metric_text(metric, base[metric])} {says} before the game, and {after} after round {number}."


def _own_flaws(rounds: Mapping[int, Mapping[str, float]]) -> str:
    metric, last = "fooled_rate", max(rounds)
    shares = {number: rounds[number][metric] for number in sorted(rounds) if metric in rounds[number]}
    if last not in shares:
        return ""
    says = f"The verifier of round {last} accepted {metric_text(metric, shares[last])} of its round's flaws."
    worst = max(shares, key=lambda number: shares[number])
    most = metric_text(metric, shares[worst])
    if most == metric_text(metric, shares[last]):
        return says
    return f"{says} The highest share was {most}, in round {worst}."


def _previous_flaws(rounds: Mapping[int, Mapping[str, float]]) -> str:
    metric = "fooled_rate_previous"
    shares = [metrics[metric] for metrics in rounds.values() if metric in metrics]
    if not shares:
        return ""
    return f"Each new verifier accepted at most {metric_text(metric, max(shares))} of the previous round's flaws."


class BudgetBar:
    """Seconds by part as one stacked bar with its legend below. A part has the colour of its family of work."""

    def __init__(self, budget: Mapping[str, float], caption: str = "") -> None:
        self.budget = merge_small({part: seconds for part, seconds in budget.items() if seconds > 0})
        self.caption = caption

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.caption:
            yield Text(self.caption, style=QUIET, no_wrap=True, overflow="ellipsis")
        total = sum(self.budget.values())
        if total <= 0:
            return
        plain = console.no_color or console.color_system is None
        colours = part_colours(self.budget)
        edges = [round(options.max_width * so_far / total) for so_far in accumulate(self.budget.values(), initial=0.0)]
        bar, legend = Text(), []
        for place, (part, seconds) in enumerate(self.budget.items()):
            glyph = SHADES[place % len(SHADES)] if plain else "━"
            bar.append(glyph * (edges[place + 1] - edges[place]), colours[part])
            name, share = part.replace("_", " "), percent_short(seconds / total)
            legend.append(Text.assemble((glyph, colours[part]), (f" {name} ", QUIET), share))
        yield bar
        yield Columns(legend, padding=(0, 2))


def merge_small(budget: Mapping[str, float]) -> dict[str, float]:
    """Parts below half a percent as one part, because no bar can show them. Unaccounted time stays separate, last."""
    least = SMALL_PART * sum(budget.values())
    small = [part for part, seconds in budget.items() if seconds < least and part != UNACCOUNTED]
    if len(small) < 2:
        return dict(budget)
    merged = {part: seconds for part, seconds in budget.items() if part not in (*small, UNACCOUNTED)}
    merged["other"] = sum(budget[part] for part in small)
    return merged | {part: seconds for part, seconds in budget.items() if part == UNACCOUNTED}


def part_colours(parts: Iterable[str]) -> dict[str, str]:
    """A colour for each part of a budget, by its family; unaccounted time is grey."""
    colours = {}
    for part in in_order([*parts, UNACCOUNTED]):
        shades = FAMILY_COLOURS[part.family]
        colours[part.name] = shades[part.shade % len(shades)]
    return colours


def percent_short(share: float) -> str:
    return "<1%" if 0 < share < 0.005 else f"{100 * share:.0f}%"


# --- the report of a run ---------------------------------------------------------------------------------------------


def report(summary: RunSummary, examples: Sequence[Example], *, state: RunState | None = None) -> Group:
    """Everything that `pvg report` prints, in order, without empty parts. `state`: of the run (`state_word`)."""
    parts: list[RenderableType] = [headline(summary, state)]
    if summary.rounds:
        parts += section("Rounds", rounds_with_outcome(summary.rounds))
    if summary.phases:
        parts += section("Phases", phases_table(summary))
    if summary.steps:
        parts += section("Metrics, step by step", metrics_table(summary))
    if summary.budget:
        caption = f"{duration(sum(summary.budget.values()))} over all steps"
        parts += section("Time budget", BudgetBar(summary.budget, caption))
        if summary.hidden:
            parts += [Text(), Padding(overlap_table(summary), (0, 0, 0, 2))]
    if machine := machine_table(summary):
        parts += section("Machine", machine)
    if summary.alerts:
        parts += section(f"Alerts ({len(summary.alerts)})", alerts_list(summary))
    if summary.warnings:
        parts += section("Warnings about the settings", Text("\n".join(summary.warnings), style="yellow"))
    if examples:
        parts += section("Example solutions", examples_list(examples))
    if summary.notes:
        parts += section("Notes", Text("\n".join(summary.notes), style="yellow"))
    return Group(*parts)


def section(title: str, body: RenderableType) -> list[RenderableType]:
    return [Text(), Text(title, style=HEADING), Padding(body, (0, 0, 0, 2))]


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


def phases_table(summary: RunSummary) -> Table:
    columns = [Column("round", "right"), Column("phase"), Column("steps", "right"), Column("time", "right")]
    table = Table(
        [*(replace(column, wrap=False) for column in columns), Column("", style="verifier"), Column("", style="quiet")]
    )
    longest = max((phase.seconds for phase in summary.phases if phase.seconds is not None), default=0.0)
    for phase in summary.phases:
        table.add(
            str(phase.round),
            phase_label(phase.phase),
            str(phase.steps) if phase.steps else "",
            TableCell(duration(phase.seconds)) if phase.finished else TableCell("unfinished", "badge warn"),
            TableCell(bar=phase.seconds / longest if phase.seconds and longest > 0 else 0.0),
            "  ".join(f"{metric_display(name).label} {metric_text(name, value)}" for name, value in phase.highlights()),
        )
    return table


def metrics_table(summary: RunSummary) -> Table:
    titles = ("first", "last", "lowest", "highest")
    columns = [Column(), *(Column(title, "right", wrap=False) for title in titles)]
    table = Table([*columns, Column("over the steps", style="verifier", wrap=False)])
    for name in KEY_METRICS:
        values = summary.series(name, HOME_PHASES.get(name)) or summary.series(name)
        if values:
            ends = (values[0], values[-1], min(values), max(values))
            table.add(
                metric_display(name).label, *(metric_text(name, value) for value in ends), trend(name, values, 24)
            )
    return table


def overlap_table(summary: RunSummary) -> Table:
    """The parts that overlapped with other work."""
    titles = ("busy", "exposed", "hidden")
    table = Table([Column("overlapped"), *(Column(title, "right", wrap=False) for title in titles)])
    for part, hidden in sorted(summary.hidden.items(), key=lambda pair: -pair[1]):
        busy = summary.busy[part]
        table.add(part.replace("_", " "), short_seconds(busy), short_seconds(busy - hidden), short_seconds(hidden))
    return table


def machine_table(summary: RunSummary) -> RichTable | None:
    """One line each for device, peak memory, workers and event loop; None for runs that recorded none of them."""
    table = RichTable.grid(padding=(0, 2, 0, 0))
    table.add_column(style=QUIET, no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(style=VERIFIER, no_wrap=True)
    device = reading_ranges(summary.device)
    if device:
        facts = [
            ("processors", "cpu", "mean", percent_short),
            ("resident memory at most", "rss_bytes", "max", byte_size),
        ]
        found = [f"{label} {written(device[name][of])}" for label, name, of, written in facts if name in device]
        gpus = sorted(name for name in device if name.startswith("gpu") and name.endswith("_utilisation"))
        found += [f"GPU {name[3:].split('_')[0]} {percent_short(device[name]['mean'])}" for name in gpus]
        curve = [reading.metrics["cpu"] for reading in summary.device if "cpu" in reading.metrics]
        table.add_row("device", ", ".join(found), sparkline(curve, MACHINE_BARS, 0.1))
    if summary.peak_memory:
        table.add_row(
            "memory", ", ".join(f"{what} {size}" for what, size in peak_memory_texts(summary.peak_memory)), ""
        )
    if summary.workers:
        curve = [reading.metrics["busy"] for reading in summary.workers if "busy" in reading.metrics]
        table.add_row("workers", workers_text(summary), sparkline(curve, MACHINE_BARS, 0.1))
    if summary.scaling:
        curve = [float(change.workers) for change in summary.scaling]
        newest = summary.scaling[-1]
        words = f"{counted(len(summary.scaling), 'change')} of their number; the last one: {newest.why}"
        table.add_row("", words, sparkline(curve, MACHINE_BARS))
    lags = lag_summary(summary.loop)
    if "worst_max_s" in lags:
        found = [f"{word} {short_seconds(lags[name])}" for word, name in LAGS if name in lags]
        curve = [reading.metrics["lag_max_s"] for reading in summary.loop if "lag_max_s" in reading.metrics]
        table.add_row("loop lag", ", ".join(found), sparkline(curve, MACHINE_BARS))
    return table if table.row_count else None


MACHINE_BARS = 16
LAGS = (("typically", "median_p50_s"), ("worst p90", "worst_p90_s"), ("p99", "worst_p99_s"), ("longest", "worst_max_s"))


def alerts_list(summary: RunSummary) -> Text:
    """A line per alert. What to do is said once per kind, below its first alert."""
    lines, explained = Text(), {""}
    for alert in summary.alerts:
        lines.append(f"round {alert.round} {phase_label(alert.phase)}", style=QUIET)
        lines.append(f" step {alert.step}  " if alert.step is not None else "  ", style=QUIET)
        lines.append(alert.name, style="yellow")
        lines.append(f"  {alert.message}\n")
        if alert.remedy not in explained:
            lines.append(f"  {alert.remedy}\n", style=QUIET)
            explained.add(alert.remedy)
    lines.rstrip()
    return lines


def examples_list(examples: Sequence[Example]) -> Group:
    parts: list[RenderableType] = []
    for example in examples:
        if parts:
            parts.append(Text())
        parts += [_example_head(example), Text(f"question  {example.question}", style=QUIET)]
        if example.solver_text is not None:
            parts.append(Text.assemble(("solver    ", QUIET), example.solver_text))
        parts.append(Text.assemble(("solution  ", QUIET), example.text))
        parts += [Text.assemble((f"{role:<10}", QUIET), text) for role, text in example.dialogue]
        note = f", {example.note}" if example.note else ""
        wrong = f"wrong: the answer is {example.reference}" if example.reference else "wrong"
        verdict = "correct" if example.correct else wrong
        found = f"answer {example.answer}" if example.answer is not None else "no answer"
        parts.append(
            Text.assemble(("grade     ", QUIET), (f"{found}, {verdict}{note}", "green" if example.correct else "red"))
        )
    return Group(*parts)


def _example_head(example: Example) -> Text:
    head = Text.assemble((example.role, HELPFUL if example.role == "helpful" else SNEAKY), (f", {example.why}", ""))
    if example.score is not None:
        head.append(f"  score {example.score:+.2f}", style=VERIFIER)
    head.append(f"  {example.id}", style=QUIET)
    return head


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


# --- several runs ----------------------------------------------------------------------------------------------------


def several(
    names: Sequence[str],
    summaries: Sequence[RunSummary],
    metrics: Sequence[str],
    finals: Sequence[Mapping[str, float]],
    settings: Mapping[str, Sequence[str]],
    states: Sequence[RunState],
) -> Group:
    """Runs side by side: their states, final `metrics`, and the settings in which they differ."""
    parts: list[RenderableType] = [headline(summary, state) for summary, state in zip(summaries, states, strict=True)]
    if metrics:
        table = Table(side_by_side("metric", names))
        for name in metrics:
            table.add(metric_display(name).label, *(metric_text(name, final.get(name)) for final in finals))
        parts += section("After the last finished round", table)
        if len({max(summary.rounds, default=-1) for summary in summaries}) > 1:
            parts += [Text("  The runs have finished different numbers of rounds.", style=QUIET)]
    table = Table(side_by_side("setting", names))
    for key, values in settings.items():
        table.add(key, *values)
    parts += section("Settings that differ", table if settings else Text("None.", style=QUIET))
    return Group(*parts)
