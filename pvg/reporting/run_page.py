"""The page of one run, and the page of several runs side by side."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import orjson
from markupsafe import Markup
from rich.console import Group, RenderableType
from rich.text import Text

from pvg.config.experiment import Experiment
from pvg.config.load import leaves
from pvg.config.task import TASKS
from pvg.errors import StateError, counted
from pvg.evaluation.report import EvaluationReport, report_of
from pvg.reporting.charts import (
    PROVER,
    VERIFIER,
    WINDOW,
    RoundAxis,
    StepAxis,
    budget_marks,
    line_chart,
    round_axis,
    spark,
)
from pvg.reporting.evaluation import evaluation_section, folded_tables
from pvg.reporting.follow import state_of
from pvg.reporting.formats import (
    ABSENT,
    HOME_PHASES,
    SHOWN,
    change_text,
    duration,
    metric_display,
    metric_text,
    percent,
    phase_label,
)
from pvg.reporting.run_sections import learning_section, machine_parts, rounds_section, scores_section
from pvg.reporting.run_summary import RunState, RunSummary, base_metrics, read_run, state_word
from pvg.reporting.solutions import Example, RoundScores, round_scores, shown_solution, solution_pairs, threshold_of
from pvg.reporting.table import (
    Column,
    LegendKey,
    PageKind,
    PageSection,
    Table,
    TableCell,
    TemplateMacros,
    chart,
    elements,
    page,
)
from pvg.reporting.terminal import QUIET, alerts_told, ends_of, headline, outcome, parts_table, rounds_table, section
from pvg.store.run_directory import RunDirectory
from pvg.telemetry.catalogue import METRICS
from pvg.telemetry.spans import UNACCOUNTED, total_seconds

markup = TemplateMacros("run.html.j2")

# Kinds of tasks whose problems or games pvg.reporting.boards shows. Other runs do not load it.
DRAWN_TASKS = frozenset({"diplomacy_mini", "diplomacy_plan", "play"})

SHOWN_METRICS = SHOWN["page"]


@dataclass(slots=True)
class RunData:
    """All data of the page of one run. `problems` are sentences about files that could not be read. `drawing`: the
    section of a task whose problems are drawn. `rollouts`: the address of the page with all solutions; empty: there is
    none. `state`: of the run (`state_word`)."""

    summary: RunSummary
    experiment: Experiment
    scores: list[RoundScores] = field(default_factory=list)
    pairs: list[list[Example]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    evaluation: EvaluationReport | None = None
    drawing: PageSection | None = None
    rollouts: str = ""
    state: RunState | None = None


def collect(run: RunDirectory, summary: RunSummary, examples: int) -> RunData:
    """Read scores, solutions and the evaluation. A file that cannot be read is noted under `problems`."""
    data = RunData(summary, run.experiment())
    kind = data.experiment.task.kind
    try:
        data.scores = round_scores(run, summary)
        data.pairs = solution_pairs(run, examples) if examples else []
        if examples and kind in DRAWN_TASKS:
            from pvg.reporting.boards import games_section, plans_section

            thresholds = {found.round: found.threshold for found in data.scores if found.threshold is not None}
            play = kind == "play"
            data.drawing = games_section(run, examples) if play else plans_section(run, kind, thresholds, examples)
    except StateError as error:
        data.problems.append(str(error))
    try:
        data.evaluation = report_of(run)
    except StateError as error:
        data.problems.append(str(error))
    return data


def run_page(data: RunData, now: Sequence[object] = (), kind: PageKind | None = None) -> str:
    """The whole page. `pvg view --live` adds `now`, where the run is, below the title, and has its own `kind`."""
    kind = kind or PageKind(links=((data.rollouts, "All rollouts"),) if data.rollouts else ())
    title, *rest = _header(data)
    return page(f"{data.summary.name}: pvg report", [title, *now, *rest], _sections(data), kind)


def run_html(run: RunDirectory) -> str:
    """What a notebook shows of a run: state, rounds, solutions and evaluation. Charts need the page."""
    summary = read_run(run)
    data = replace(collect(run, summary, 1), state=state_of(run))
    parts = [*_header(data)[:1], rounds_table(summary.rounds), elements.notes(outcome(summary.rounds))]
    parts += [*solutions_section(data).body, *(folded_tables(data.evaluation) if data.evaluation else [])]
    return str(markup.notebook(parts))


def _header(data: RunData) -> list[object]:
    """Title, state, facts, notes and key figures."""
    summary = data.summary
    word, kind = state_word(data.state, summary.status, summary.damaged)
    return [
        elements.title(summary.name, f"experiment {summary.experiment}", word, kind),
        _facts(summary),
        elements.notes([*(("settings", warning) for warning in summary.warnings), *summary.notes, *data.problems]),
        markup.tiles(_tiles(summary)),
    ]


def _sections(data: RunData) -> list[PageSection]:
    summary = data.summary
    return [
        _alerts(summary),
        rounds_section(summary),
        solutions_section(data),
        *([data.drawing] if data.drawing else []),
        evaluation_section(data.evaluation),
        scores_section(data.scores),
        learning_section(summary),
        performance_section(summary),
        settings_section(data.experiment),
        _onwards(data),
    ]


def _facts(summary: RunSummary) -> Markup:
    samples = summary.status == "samples"
    return elements.facts(
        [
            ("rounds", None if samples else f"{len(summary.rounds)} of {summary.rounds_planned}"),
            ("phase", phase_label(summary.phase) if summary.status == "unfinished" else None),
            ("time in phases", duration(summary.seconds)),
            ("started", when(summary.began)),
            ("pvg", summary.code_version),
            ("machine", summary.machine),
            ("settings", summary.config_hash),
        ]
    )


def when(moment: float | None) -> str | None:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(moment)) if moment is not None else None


Tile = tuple[str, str, str, Markup, str]  # label, value, detail, a small line, colour


def _tiles(summary: RunSummary) -> list[Tile]:
    """Key figures of the last finished round, or of the last step if rounds do not have them."""
    base = base_metrics(summary.rounds)
    last = summary.rounds[max(summary.rounds)] if summary.rounds else {}
    tiles: list[Tile] = []
    for name, style in SHOWN_METRICS["tiles"]:
        series = summary.series(name, HOME_PHASES.get(name)) or summary.series(name)
        by_round = [summary.rounds[n][name] for n in sorted(summary.rounds) if name in summary.rounds[n]]
        value = last.get(name, series[-1] if series else None)
        if value is not None:
            since = "last step" if name not in last else f"base {metric_text(name, base[name])}" if name in base else ""
            if (count := last.get(SHOWN["terminal"]["counted"].get(name, ""))) is not None:
                since = ", ".join(filter(None, (since, f"n = {count:,.0f}")))
            line = spark(series or by_round, style)
            tiles.append((metric_display(name).label, metric_text(name, value), since, line, style))
    return tiles


def _alerts(summary: RunSummary) -> PageSection:
    found = [(name.replace("_", " "), *rest) for name, *rest in alerts_told(summary)]
    lead = "docs/runbook.md in pvg's repository explains each kind of alert."
    return PageSection("alerts", "Alerts", [markup.alerts(found)], lead)


def _onwards(data: RunData) -> PageSection:
    resumable = data.summary.status in ("unfinished", "empty") and data.state not in ("running", "silent")
    commands = markup.onwards(RunDirectory(data.summary.path).argument, resumable)
    return PageSection("onwards", "Next steps", [commands], f"The folder of the run is {data.summary.path}.")


def solutions_section(data: RunData) -> PageSection:
    """What both roles wrote to some problems of the newest round, with scores and grades."""
    body = []
    for pair in data.pairs:
        threshold = threshold_of(data.summary, pair[0].round)
        sides = [shown_solution(side, threshold) for side in pair]
        body.append(markup.pairing(pair[0].question, pair[0].reference, sides))
    lead = (
        "Of the newest round: the flaws with the highest scores, each next to a helpful solution of the same problem."
    )
    return PageSection("solutions", "Solutions", [*body, markup.all_solutions(data.rollouts)], lead)


# The configuration: changed settings first, then all settings folded.

UNSET = "unset"


def settings_section(experiment: Experiment) -> PageSection:
    """The defaults of a task are those of its kind."""
    default = Experiment.model_construct(**{**dict(Experiment()), "task": TASKS[experiment.task.kind]()}).plain()
    default["task"]["kind"] = Experiment().task.kind
    table = Table([Column("setting"), Column("value"), Column("default")], look="settings")
    for key, values in setting_differences([experiment.plain(), default]).items():
        table.add(TableCell(key, "code"), *map(setting_cell, values))
    body = [table, elements.details("The whole configuration", [elements.toml(experiment.to_toml())])]
    lead = f"Settings with other values than the defaults. Digest of the settings: {experiment.hash()}."
    return PageSection("settings", "Settings", body, lead)


def setting_cell(value: str) -> TableCell:
    return TableCell(value, "quiet" if value == UNSET else "code")


def setting_differences(plains: Sequence[Mapping[str, object]]) -> dict[str, list[str]]:
    """Dotted key -> the value of every configuration as text, for the keys in which two of them differ."""
    flats = [{key: orjson.dumps(value, default=str).decode() for key, value in leaves(plain)} for plain in plains]
    keys = sorted({key for found in flats for key in found})
    values = {key: [found.get(key, UNSET) for found in flats] for key in keys}
    return {key: found for key, found in values.items() if len(set(found)) > 1}


# Where the time went: by phase, by part and by step. Only the sum is open: most readers come for what was learned.

MOST_PHASES = 24  # rows of the chart by phase; longer games show each phase summed over rounds


def performance_section(summary: RunSummary) -> PageSection:
    body: list[object] = []
    # All steps, and the time of the phases outside of their steps.
    if budget := total_seconds([summary.budget, *(phase.budget for phase in summary.phases)]):
        parts = parts_table(budget, summary.busy, summary.budget)
        by_phase = [elements.subheading("By phase"), _phases(summary)]
        body = [
            chart.marks(budget_marks(budget, sum(budget.values()))),
            elements.details("Time by part and phase", [parts, *by_phase]),
        ]
    body.append(elements.details("Machine", machine_parts(summary)))
    return PageSection("performance", "Performance", body, _lead(summary, budget) if budget else "")


def _lead(summary: RunSummary, budget: dict[str, float]) -> str:
    words = f"In steps and phases: {_unaccounted(budget)}."
    whole = total_seconds(process.budget for process in summary.processes)
    if whole:
        words += f" From start to end of the processes that ended normally: {_unaccounted(whole)}."
    return words


def _unaccounted(budget: dict[str, float]) -> str:
    total = sum(budget.values())
    return f"{duration(total)}, {percent(budget.get(UNACCOUNTED, 0.0) / total)} unaccounted"


def _phases(summary: RunSummary) -> Markup:
    """Every phase as a bar of its parts, all on one scale; in long games the sum over the rounds."""
    many = len(summary.phases) > MOST_PHASES
    bars: dict[str, tuple[dict[str, float], str]] = {}  # name -> (seconds by part, remark)
    for phase in summary.phases:
        name = phase_label(phase.phase) if many else f"round {phase.round}, {phase_label(phase.phase)}"
        steps = (step.budget for step in summary.steps if (step.round, step.phase) == (phase.round, phase.phase))
        before, remark = bars.get(name, ({}, "" if phase.finished or many else "unfinished"))
        bars[name] = total_seconds([before, *steps, phase.budget]), remark
    longest = max((sum(budget.values()) for budget, _ in bars.values()), default=0.0)
    rows = [
        (name, budget_marks(found, longest), duration(sum(found.values())), say) for name, (found, say) in bars.items()
    ]
    return chart.strips(rows)


# The page of several runs: curves over each other, one colour per run, and what differs between them.

COLOURS = 6
DASHES = ("", "dashed", "dotted")


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """A run beside others. `plain`: its settings."""

    summary: RunSummary
    key: LegendKey
    state: RunState
    plain: Mapping[str, object]

    @property
    def name(self) -> str:
        return self.key.label


def legend_key(name: str, place: int) -> LegendKey:
    """The colour and the dash of the run or the arm with this number among several."""
    return LegendKey(name, f"run-{place % COLOURS}", DASHES[place // COLOURS % len(DASHES)])


def compared_runs(directories: Sequence[RunDirectory]) -> list[ComparedRun]:
    """Raises what `read_run` raises."""
    found = zip(distinct_names(directories), directories, strict=True)
    return [
        ComparedRun(read_run(run), legend_key(name, place), state_of(run), run.experiment().plain())
        for place, (name, run) in enumerate(found)
    ]


def several_text(runs: Sequence[ComparedRun]) -> Group:
    """Runs side by side on the terminal: their states, final metrics, and the settings in which they differ."""
    parts: list[RenderableType] = [headline(run.summary, run.state) for run in runs]
    if final := _final_table(runs):
        parts += section("After the last finished round", final)
        if len({max(run.summary.rounds, default=-1) for run in runs}) > 1:
            parts += [Text("  The runs have finished different numbers of rounds.", style=QUIET)]
    parts += section("Settings that differ", _settings_table(runs) or Text("None.", style=QUIET))
    return Group(*parts)


def several_page(runs: Sequence[ComparedRun]) -> str:
    header = [elements.title(f"{len(runs)} runs", "side by side"), _runs_table(runs)]
    lead = f"Step by step. Each line is the mean over {WINDOW} points."
    last = ", ".join(f"{run.name}: {max(run.summary.rounds)}" for run in runs if run.summary.rounds)
    of = f"After each run's last finished round ({last}); differences to {runs[0].name}."
    same = elements.empty("All settings are the same.")
    sections = [
        _rounds(runs),
        PageSection("learning", "Learning", [elements.grid(_step_charts(runs))], lead),
        PageSection("final", "Final metrics", [_final_table(runs)], of),
        PageSection("settings", "Settings that differ", [_settings_table(runs) or same]),
        _notes(runs),
    ]
    return page(f"{', '.join(run.name for run in runs)}: pvg report", header, sections)


def distinct_names(directories: Sequence[RunDirectory]) -> list[str]:
    """Each run's name, or its path where two have the same name."""
    names = [directory.name for directory in directories]
    return [
        name if names.count(name) == 1 else str(directory.path)
        for name, directory in zip(names, directories, strict=True)
    ]


def _runs_table(runs: Sequence[ComparedRun]) -> Table:
    titles = ("run", "", "rounds", "time in phases", "started", "pvg", "machine")
    table = Table([Column(title) for title in titles], look="runs")
    for run in runs:
        found = run.summary
        word, kind = state_word(run.state, found.status, found.damaged)
        head = (TableCell(run.name, "strong", key=run.key), TableCell(word, f"badge {kind}"))
        made = (when(found.began) or ABSENT, found.code_version or ABSENT, found.machine or ABSENT)
        table.add(*head, f"{len(found.rounds)} of {found.rounds_planned}", duration(found.seconds), *made)
    return table


# --- curves ------------------------------------------------------------------------------------------------------


def _step_charts(runs: Sequence[ComparedRun]) -> list[Markup]:
    charts = []
    for phase, metrics in SHOWN_METRICS["by_step"].items():
        lengths: dict[int, int] = {}
        for run in runs:
            for round_, length in StepAxis(run.summary.steps, phase).lengths.items():
                lengths[round_] = max(length, lengths.get(round_, 0))
        axes = [(StepAxis(run.summary.steps, phase, lengths), run) for run in runs]
        for metric in metrics:
            lines = [axis.line(metric, run.name, run.key.style, run.key.dash, bare=True) for axis, run in axes]
            shown = metric_display(metric)
            charts.append(line_chart(shown.label, lines, axes[0][0].across(), shown.style))
    return charts


def _rounds(runs: Sequence[ComparedRun]) -> PageSection:
    numbers = sorted({number for run in runs for number in run.summary.rounds})
    axes = [RoundAxis(run.summary.rounds) for run in runs]
    x = round_axis(numbers, base=any(axis.base for axis in axes))
    charts = []
    for metric in SHOWN_METRICS["by_round"] if len(numbers) > 1 else ():
        lines = [axis.line(metric, run.name, run.key.style, run.key.dash) for axis, run in zip(axes, runs, strict=True)]
        charts.append(line_chart(metric_display(metric).label, lines, x, metric_display(metric).style))
    lead = "At the end of each round, on problems that no model trained on."
    return PageSection("rounds", "Rounds", [elements.grid(charts)], lead)


# --- differences -------------------------------------------------------------------------------------------------


def final_metrics(summary: RunSummary) -> dict[str, float]:
    """The metrics of the last round, the time in phases, and the medians of rates and step times."""
    metrics = dict(summary.rounds[max(summary.rounds)]) if summary.rounds else {}
    rates = ((PROVER, "tokens_per_s", "prover_step_s"), (VERIFIER, "pairs_per_s", "verifier_step_s"))
    for phase, rate, step_s in rates:
        walls = [sum(step.budget.values()) for step in summary.steps if step.phase == phase and step.budget]
        for name, values in ((rate, summary.series(rate, phase)), (step_s, walls)):
            if values:
                metrics[name] = statistics.median(values)
    if summary.seconds:
        metrics["time_in_phases_s"] = summary.seconds
    return metrics


def final_names(finals: Sequence[Mapping[str, float]]) -> list[str]:
    """The metrics of all runs in the order of the catalogue, then the others; without those of the base prover and the
    ends of intervals."""
    order = {metric.short: place for place, metric in enumerate(METRICS.values())}
    names = dict.fromkeys(name for metrics in finals for name in metrics)
    shown = [name for name in names if not name.startswith("base_") and not name.endswith(("_low", "_high"))]
    return sorted(shown, key=lambda name: order.get(name, len(order)))


def _final_table(runs: Sequence[ComparedRun]) -> Table:
    """Final metrics side by side, each with the difference to the first run, and with its interval below."""
    finals = [final_metrics(run.summary) for run in runs]
    columns = [Column(), *(Column(run.name, "right", key=run.key) for run in runs)]
    table = Table(columns, caption="Below a share: its 95 % interval, by problem.")
    for name in final_names(finals):
        first = finals[0].get(name)
        cells = [TableCell(metric_text(name, first)), *(_difference(name, of.get(name), first) for of in finals[1:])]
        pairs = zip(cells, finals, strict=True)
        table.add(metric_display(name).label, *(replace(cell, below=ends_of(name, of)) for cell, of in pairs))
    return table


def _difference(name: str, value: float | None, first: float | None) -> TableCell:
    """The value and its difference to the first run; a percentage for rates and times. Coloured if one direction is
    better."""
    text = metric_text(name, value)
    if value is None or first is None:
        return TableCell(text)
    change, shown = value - first, metric_display(name)
    if shown.style in ("seconds", "rate") and first:
        note, noteworthy = f"{100 * change / first:+.1f} %", abs(change / first) > 0.02
    else:
        note, noteworthy = change_text(shown.style, change), abs(change) > 0.01
    verdict = "better" if (change > 0) == shown.higher_is_better else "worse"
    return TableCell(text, verdict if noteworthy and shown.higher_is_better is not None else "", note=note)


def _settings_table(runs: Sequence[ComparedRun]) -> Table:
    columns = [Column("setting"), *(Column(run.name, key=run.key) for run in runs)]
    table = Table(columns, look="settings")
    for key, values in setting_differences([run.plain for run in runs]).items():
        table.add(TableCell(key, "code"), *(setting_cell(value) for value in values))
    return table


def _notes(runs: Sequence[ComparedRun]) -> PageSection:
    alerts = [(run.name, counted(len(run.summary.alerts), "alert")) for run in runs if run.summary.alerts]
    notes = [(run.name, note) for run in runs for note in run.summary.notes]
    return PageSection("remarks", "Remarks", [elements.facts(alerts), elements.notes(notes)])
