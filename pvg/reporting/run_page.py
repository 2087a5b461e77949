"""The page of one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from markupsafe import Markup

from pvg.config.experiment import Experiment
from pvg.config.task import TASKS
from pvg.errors import StateError
from pvg.evaluation.report import EvaluationReport, report_of
from pvg.reporting.charts import PROVER, spark
from pvg.reporting.evaluation import evaluation_section
from pvg.reporting.follow import RunState, state_word
from pvg.reporting.formats import HOME_PHASES, duration, metric_display, metric_text, percent, phase_label, value_text
from pvg.reporting.run_sections import (
    learning_section,
    machine_section,
    rounds_section,
    scores_section,
    throughput_section,
)
from pvg.reporting.run_summary import RunSummary, base_metrics
from pvg.reporting.solutions import RoundScores, SolutionPair, round_scores, shown_solution, solution_pairs
from pvg.reporting.table import Column, PageKind, PageSection, Table, TableCell, TemplateMacros, elements, page
from pvg.reporting.time_sections import StepWindow, choose_windows, read_windows, time_section, timeline_section
from pvg.store.atomic import DamagedFileError
from pvg.store.run_directory import RunDirectory
from pvg.telemetry.spans import UNACCOUNTED

markup = TemplateMacros("run.html.j2")

# Kinds of tasks whose problems or games pvg.reporting.boards shows. Other runs do not load it.
DRAWN_TASKS = frozenset({"diplomacy_mini", "diplomacy_plan", "play"})

# Key figures: metric and colour.
TILES = (
    ("helpful_accuracy", "helpful"),
    ("sneaky_error_rate", "sneaky"),
    ("fooled_rate", "sneaky"),
    ("verifier_auc", "verifier"),
    ("score_gap", "ink"),
    ("kl", "ink"),
    ("tokens_per_s", "ink"),
    ("pairs_per_s", "verifier"),
)


@dataclass(frozen=True, slots=True)
class RunData:
    """All data of the page of one run. `problems` are sentences about files that could not be read. `drawing`: the
    section of a task whose problems are drawn. `rollouts`: the address of the page with all solutions; empty: there is
    none. `state`: of the run (`state_word`). `playing`: as for `collect`."""

    summary: RunSummary
    experiment: Experiment
    scores: list[RoundScores]
    pairings: list[SolutionPair]
    windows: list[StepWindow]
    damaged_spans: int
    problems: list[str]
    evaluation: EvaluationReport | None = None
    drawing: PageSection | None = None
    playing: bool = False
    rollouts: str = ""
    state: RunState | None = None


def collect(
    run: RunDirectory,
    summary: RunSummary,
    examples: int,
    *,
    playing: bool = False,
) -> RunData:
    """Read scores, solutions and spans. A damaged shard is noted under `problems`.

    `playing`: another process plays the run. Then only the newest round's solutions are read, and no whole journals.
    """
    problems: list[str] = []
    experiment = run.experiment()
    drawing: PageSection | None = None
    scores: list[RoundScores] = []
    pairings: list[SolutionPair] = []
    try:
        scores = round_scores(run, summary)
        pairings = solution_pairs(run, examples, 1 if playing else None) if examples else []
        if examples and experiment.task.kind in DRAWN_TASKS:
            from pvg.reporting.boards import SECTIONS

            drawing = SECTIONS[experiment.task.kind](run, experiment.task.kind, thresholds_of(scores), examples)
    except DamagedFileError as error:
        problems.append(str(error))
    windows: list[StepWindow] = []
    damaged = 0
    if not playing:
        try:
            run.verify_journal(run.load_state().state or {}, run.spans)
        except StateError as error:
            if str(error) not in summary.notes:
                problems.append(str(error))
        windows, damaged = read_windows(run.spans, choose_windows(summary.steps))
    evaluation = None
    try:
        evaluation = report_of(run)
    except StateError as error:
        problems.append(str(error))
    return RunData(summary, experiment, scores, pairings, windows, damaged, problems, evaluation, drawing, playing)


def thresholds_of(scores: Sequence[RoundScores]) -> dict[int, float]:
    return {found.round: found.threshold for found in scores if found.threshold is not None}


def run_page(data: RunData, now: Sequence[object] = (), kind: PageKind | None = None) -> str:
    """The whole page. `pvg watch` adds `now`, where the run is, below the title, and has its own `kind`."""
    kind = kind or PageKind(links=((data.rollouts, "All rollouts"),) if data.rollouts else ())
    title, *rest = _header(data)
    return page(f"{data.summary.name}: pvg report", [title, *now, *rest], _sections(data), kind)


def _header(data: RunData) -> list[object]:
    """Title, state, facts, notes and key figures."""
    summary = data.summary
    word, kind = state_word(data.state, summary.status, summary.damaged)
    return [
        elements.title(
            summary.name,
            f"experiment {summary.experiment}" if summary.experiment != summary.name else "pvg run",
            word,
            kind,
        ),
        _facts(summary),
        elements.notes([*(("settings", warning) for warning in summary.warnings), *summary.notes, *data.problems]),
        markup.tiles(_tiles(summary)),
    ]


def _sections(data: RunData) -> list[PageSection]:
    summary = data.summary
    no_scores = "There are no scored solutions yet." if summary.status in ("unfinished", "samples") else ""
    return [
        _alerts(summary),
        rounds_section(summary),
        evaluation_section(data.evaluation),
        learning_section(summary),
        scores_section(data.scores, no_scores),
        *([data.drawing] if data.drawing else []),
        solutions_section(data.pairings, thresholds_of(data.scores), data.rollouts),
        time_section(summary),
        _timeline(data),
        throughput_section(summary),
        machine_section(summary),
        settings_section(data.experiment),
        _onwards(summary, running=data.state in ("running", "silent")),
    ]


def _timeline(data: RunData) -> PageSection:
    if data.playing:
        why = "pvg draws the timeline when the run ends, because it needs the whole file of spans."
        return PageSection("gantt", "Timeline of some steps", [elements.empty(why)] if data.summary.steps else [])
    return timeline_section(data.windows, data.damaged_spans)


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
    for name, style in TILES:
        series = summary.series(name, HOME_PHASES.get(name)) or summary.series(name)
        by_round = [summary.rounds[n][name] for n in sorted(summary.rounds) if name in summary.rounds[n]]
        value = last.get(name, series[-1] if series else None)
        if value is None:
            continue
        since = f"base {metric_text(name, base[name])}" if name in base else ""
        if name not in last:
            since = "last step"
        tiles.append(
            (metric_display(name).label, metric_text(name, value), since, spark(series or by_round, style), style)
        )
    walls = [sum(step.budget.values()) for step in summary.steps if step.phase == PROVER and step.budget]
    if walls:
        typical = value_text("seconds", statistics.median(walls))
        tiles.append(("prover step", typical, "median", spark(walls, "ink"), "ink"))
    budget = summary.budget
    if sum(budget.values()) > 0:
        share = budget.get(UNACCOUNTED, 0.0) / sum(budget.values())
        hidden = sum(summary.hidden.values())
        detail = f"{value_text('seconds', hidden)} hidden by overlap" if hidden else "of the steps' time"
        tiles.append(("unaccounted", percent(share), detail, Markup(), "ink"))
    return tiles


def _alerts(summary: RunSummary) -> PageSection:
    """What to do is said once per kind, below its first alert."""
    found, explained = [], set[str]()
    for alert in summary.alerts:
        step = "" if alert.step is None else f", step {alert.step}"
        when_ = f"round {alert.round}, {phase_label(alert.phase)}{step}"
        remedy = "" if alert.remedy in explained else alert.remedy
        explained.add(remedy)
        found.append((alert.name.replace("_", " "), alert.message, when_, remedy))
    lead = "docs/runbook.md in pvg's repository explains each kind of alert."
    return PageSection("alerts", "Alerts", [markup.alerts(found)], lead)


def _onwards(summary: RunSummary, *, running: bool) -> PageSection:
    """Commands to type next, and the files of the run."""
    name = RunDirectory(summary.path).argument
    resumable = summary.status in ("unfinished", "empty") and not running
    commands = [
        *([(f"pvg train --resume {name}", "continue the run")] if resumable else []),
        *([(f"pvg evaluate {name}", "measure attackers, detection, best-of-n, and more")] if summary.rounds else []),
        *([(f"pvg export {name} --player prover --out DIR", "write a Hugging Face folder")] if summary.rounds else []),
        (f"pvg watch {name}", "follow the run and browse its solutions, live"),
        (f"pvg report {name}", "make this report again"),
        (f"pvg report {name} OTHER", "compare with another run"),
        (f"pvg diagnose {name}", "find what slowed the run down"),
    ]
    files = [
        ("metrics.jsonl", "every step, phase and round"),
        ("spans.jsonl", "what ran when"),
        ("rollouts/", "every solution, with its score and grade"),
        ("weights/", "the players of each round"),
    ]
    body = [elements.commands(commands), elements.commands(files)]
    return PageSection("onwards", "Next steps", body, f"The folder of the run is {summary.path}.")


# Solutions of both roles side by side, with scores and grades.


def solutions_section(
    pairings: Sequence[SolutionPair], thresholds: dict[int, float], rollouts: str = ""
) -> PageSection:
    """The newest round, then earlier rounds folded. `rollouts`: the address of the page with all solutions."""
    if not pairings:
        return PageSection("solutions", "Solutions", [markup.all_solutions(rollouts)])
    newest = max(pairing.round for pairing in pairings)
    body = [_pair(pairing, thresholds) for pairing in pairings if pairing.round == newest]
    for round_ in sorted({pairing.round for pairing in pairings} - {newest}, reverse=True):
        older = [_pair(pairing, thresholds) for pairing in pairings if pairing.round == round_]
        body.append(elements.details(f"Round {round_}", older))
    body.append(markup.all_solutions(rollouts))
    lead = f"Round {newest}: the flaws with the highest scores, each next to a helpful solution of the same problem."
    return PageSection("solutions", "Solutions", body, lead)


def _pair(pairing: SolutionPair, thresholds: dict[int, float]) -> Markup:
    threshold = thresholds.get(pairing.round)
    sides = [shown_solution(example, threshold) for example in (pairing.helpful, pairing.sneaky) if example is not None]
    return markup.pairing(pairing.question, pairing.reference, sides)


# The configuration: changed settings first, then all settings folded.

UNSET = "unset"


def settings_section(experiment: Experiment) -> PageSection:
    changed = changed_settings(experiment)
    table = Table([Column("setting"), Column("value"), Column("default")], look="settings")
    for key, values in changed.items():
        table.add(TableCell(key, "code"), *(setting_cell(value) for value in values))
    body = [
        table if changed else elements.empty("All settings have their defaults."),
        elements.details("The whole configuration", [elements.toml(experiment.to_toml())]),
    ]
    return PageSection(
        "settings",
        "Settings",
        body,
        f"Settings with other values than the defaults. Digest of the settings: {experiment.hash()}.",
    )


def setting_cell(value: str) -> TableCell:
    return TableCell(value, "quiet" if value == UNSET else "code")


def changed_settings(experiment: Experiment) -> dict[str, tuple[str, str]]:
    """Key -> (value, default) of each setting with another value than its default (for a task: that of its kind)."""
    task = TASKS[experiment.task.kind]()
    own, default = (
        flat_settings(experiment.plain()),
        flat_settings(Experiment.model_construct(**{**dict(Experiment()), "task": task}).plain()),
    )
    default["task.kind"] = toml_text(Experiment().task.kind)
    keys = [key for key in sorted({*own, *default}) if own.get(key, UNSET) != default.get(key, UNSET)]
    return {key: (own.get(key, UNSET), default.get(key, UNSET)) for key in keys}


def flat_settings(plain: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted keys and values as text, as in TOML."""
    found: dict[str, str] = {}
    for key, value in plain.items():
        if isinstance(value, Mapping) and value:
            found |= flat_settings(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = toml_text(value)
    return found


def toml_text(value: Any) -> str:
    return orjson.dumps(value, default=str).decode()
