"""The page of one run."""

from __future__ import annotations

import re
import shlex
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

import pvg
from pvg.config.experiment import Experiment
from pvg.config.sections import TASKS, Store
from pvg.errors import StateError
from pvg.evaluation.report import EvaluationReport, report_of
from pvg.reporting.charts import PROVER, spark
from pvg.reporting.evaluation import evaluation_section
from pvg.reporting.formats import HOME, duration, figure, percent, phase_label, shown, styled
from pvg.reporting.html import (
    Html,
    Piece,
    Section,
    badge,
    command,
    details,
    div,
    document,
    facts,
    join,
    span,
    table,
    tag,
)
from pvg.reporting.learning import base_metrics, learning_section, rounds_section, scores_section
from pvg.reporting.machine import machine_section, throughput_section
from pvg.reporting.run_summary import RunSummary
from pvg.reporting.solutions import Example, Pairing, RoundScores, round_scores, side_by_side
from pvg.reporting.time_sections import Window, choose_windows, overlap_section, read_windows, time_section
from pvg.store.atomic import DamagedFileError
from pvg.store.run_directory import RunDirectory
from pvg.telemetry.spans import UNACCOUNTED

STATUS = {"complete": "good", "samples": "good", "unfinished": "warn", "empty": "warn"}

# Key figures: metric, colour, and whether a change from the base prover (or the first round) is worth a word.
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
    """Everything that a page of one run shows. `problems` are sentences on what could not be read."""

    summary: RunSummary
    experiment: Experiment
    scores: list[RoundScores]
    pairings: list[Pairing]
    windows: list[Window]
    damaged_spans: int
    problems: list[str]
    evaluation: EvaluationReport | None = None


def collect(run: RunDirectory, summary: RunSummary, examples: int) -> RunData:
    """Read what the summary does not hold: scores, solutions and spans. Damaged shards are told, not fatal."""
    problems: list[str] = []
    scores: list[RoundScores] = []
    pairings: list[Pairing] = []
    try:
        scores = round_scores(run, summary)
        pairings = side_by_side(run, examples) if examples else []
    except DamagedFileError as error:
        problems.append(str(error))
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
    return RunData(summary, run.experiment(), scores, pairings, windows, damaged, problems, evaluation)


def run_page(data: RunData) -> str:
    summary = data.summary
    thresholds = {found.round: found.threshold for found in data.scores if found.threshold is not None}
    no_scores = "There are no scored solutions yet." if summary.status in ("unfinished", "samples") else ""
    sections = [
        _alerts(summary),
        rounds_section(summary),
        evaluation_section(data.evaluation),
        learning_section(summary),
        scores_section(data.scores, no_scores),
        solutions_section(data.pairings, thresholds),
        time_section(summary),
        overlap_section(data.windows, data.damaged_spans, has_steps=bool(summary.steps)),
        throughput_section(summary),
        machine_section(summary),
        settings_section(data.experiment),
        _onwards(summary),
    ]
    header = [_title(summary), _facts(summary), _notes([*summary.notes, *data.problems]), _tiles(summary)]
    return document(f"{summary.name}: pvg report", header, sections, footer())


def footer() -> Html:
    written = time.strftime("%Y-%m-%d %H:%M", time.localtime())
    return tag("p", f"Written by pvg {pvg.__version__} on {written}. This file loads nothing from anywhere.")


def _title(summary: RunSummary) -> Html:
    return tag(
        "h1",
        summary.name,
        badge(summary.status, STATUS[summary.status]),
        span("sub", f"experiment {summary.experiment}" if summary.experiment != summary.name else "pvg run"),
    )


def _facts(summary: RunSummary) -> Html:
    samples = summary.status == "samples"
    return facts(
        [
            ("rounds", None if samples else f"{len(summary.rounds)} of {summary.rounds_planned}"),
            ("phase", phase_label(summary.phase) if summary.status == "unfinished" else None),
            ("time in phases", duration(summary.seconds)),
            ("begun", when(summary.began)),
            ("pvg", summary.code_version or None),
            ("machine", summary.machine or None),
            ("settings", summary.config_hash),
        ]
    )


def when(moment: float | None) -> str | None:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(moment)) if moment is not None else None


def _notes(notes: list[str]) -> Html | None:
    return tag("ul", *(tag("li", note) for note in notes), class_="notes") if notes else None


def _tiles(summary: RunSummary) -> Html | None:
    """The key figures: of the last finished round where rounds tell them, otherwise of the last step."""
    base = base_metrics(summary)
    last = summary.rounds[max(summary.rounds)] if summary.rounds else {}
    tiles = []
    for name, style in TILES:
        series = summary.series(name, HOME.get(name)) or summary.series(name)
        by_round = [summary.rounds[n][name] for n in sorted(summary.rounds) if name in summary.rounds[n]]
        value = last.get(name, series[-1] if series else None)
        if value is None:
            continue
        since = f"base {figure(name, base[name])}" if name in base else ""
        if name not in last:
            since = "last step"
        tiles.append(_tile(shown(name).label, figure(name, value), since, spark(series or by_round, style), style))
    walls = [sum(step.budget.values()) for step in summary.steps if step.phase == PROVER and step.budget]
    if walls:
        typical = styled("seconds", statistics.median(walls))
        tiles.append(_tile("prover step", typical, "median", spark(walls, "ink"), "ink"))
    budget = summary.budget
    if sum(budget.values()) > 0:
        share = budget.get(UNACCOUNTED, 0.0) / sum(budget.values())
        hidden = sum(summary.hidden.values())
        detail = f"{styled('seconds', hidden)} hidden by overlap" if hidden else "of the steps' time"
        tiles.append(_tile("unaccounted", percent(share), detail, None, "ink"))
    return div("tiles", *tiles) if tiles else None


def _tile(label: str, value: str, detail: str, line: Html | None, style: str) -> Html:
    return div("tile", span("label", label), span(f"value text-{style}", value), span("detail", detail), line)


def _alerts(summary: RunSummary) -> Section:
    if not summary.alerts:
        return Section("alerts", "Alerts", [])
    rows = [
        tag(
            "li",
            span("badge warn", alert.name.replace("_", " ")),
            tag("span", alert.message),
            span(
                "quiet",
                f"round {alert.round}, {phase_label(alert.phase)}"
                + (f", step {alert.step}" if alert.step is not None else ""),
            ),
        )
        for alert in summary.alerts
    ]
    return Section("alerts", "Alerts", [tag("ul", *rows, class_="alerts")])


def _onwards(summary: RunSummary) -> Section:
    """What to type next, and where things lie."""
    # By name in the default folder, by path elsewhere.
    name = shlex.quote(summary.name if summary.path == Store().root / summary.name else str(summary.path))
    commands = [
        *(
            [(f"pvg train --resume {name}", "go on where it stopped")]
            if summary.status in ("unfinished", "empty")
            else []
        ),
        *([(f"pvg evaluate {name}", "attackers, detection, best-of-n, and more")] if summary.rounds else []),
        (f"pvg report {name}", "this report, from the files as they are then"),
        (f"pvg report {name} OTHER", "beside another run"),
        (f"pvg diagnose {name}", "what slowed it down"),
    ]
    files = [
        ("metrics.jsonl", "every step, phase and round"),
        ("spans.jsonl", "what ran when"),
        ("rollouts/", "every solution, with its score and grade"),
        ("weights/", "the players of each round"),
    ]
    rows = [command(line, what) for line, what in commands]
    lying = [command(line, what) for line, what in files]
    body = [tag("ul", *rows, class_="commands"), tag("ul", *lying, class_="commands")]
    return Section("onwards", "Going on", body, f"The run lies in {summary.path}.")


# What the players wrote, both roles side by side, and what verifier and grader said.

LONGEST = 4000  # characters of a solution; the rest can be read in the shard
STEP = re.compile(r"\bstep (\d+)\b")


def solutions_section(pairings: Sequence[Pairing], thresholds: dict[int, float]) -> Section:
    """The newest round open, the earlier ones folded."""
    if not pairings:
        return Section("solutions", "Solutions", [])
    newest = max(pairing.round for pairing in pairings)
    body: list[Html | None] = [_pair(pairing, thresholds) for pairing in pairings if pairing.round == newest]
    for round_ in sorted({pairing.round for pairing in pairings} - {newest}, reverse=True):
        body.append(details(f"Round {round_}", *(_pair(p, thresholds) for p in pairings if p.round == round_)))
    lead = f"Round {newest}: the flaws its verifier believed most, each beside a helpful solution of the same problem."
    return Section("solutions", "Solutions", body, lead)


def _pair(pairing: Pairing, thresholds: dict[int, float]) -> Html:
    head = div(
        "question",
        span("quiet", "problem "),
        tag("span", pairing.question, class_="given"),
        span("quiet", " answer "),
        tag("span", pairing.reference, class_="given"),
    )
    threshold = thresholds.get(pairing.round)
    sides = [_solution(side, threshold) for side in (pairing.helpful, pairing.sneaky) if side is not None]
    return tag("article", head, div("sides", *sides), class_="pairing")


def _solution(example: Example, threshold: float | None) -> Html:
    score = None
    if example.score is not None:
        verdict = "" if threshold is None else (", accepted" if example.score >= threshold else ", refused")
        score = span("score", f"score {example.score:+.3f}{verdict}")
    right = span("grade right" if example.correct else "grade wrong", _grade(example))
    return div(
        f"solution {example.role}",
        div("who", span("role", example.role), score),
        *(
            []
            if example.solver_text is None
            else [tag("pre", f"solver: {example.solver_text[:LONGEST]}", class_="quiet")]
        ),
        tag("pre", marked(example.text, example.note)),
        *(tag("pre", f"{who}: {said[:LONGEST]}", class_="quiet") for who, said in example.dialogue),
        div("said", right, span("quiet id", example.id)),
    )


def _grade(example: Example) -> str:
    found = f"answer {example.answer}" if example.answer is not None else "no answer"
    verdict = "correct" if example.correct else ("wrong" if example.well_formed else "malformed")
    note = example.note.removeprefix("malformed: ")
    return f"{verdict}: {found}" + (f", {note}" if note else "")


def marked(text: str, note: str) -> Html:
    """The text with the step marked that the grader's note names, or the end where it names the final answer."""
    cut = text[:LONGEST]
    rest = f" … and {len(text) - LONGEST} more characters" if len(text) > LONGEST else ""
    pieces = _pieces(cut)
    match = STEP.search(note)
    place = (
        int(match[1]) - 1 if match else (len(pieces) - 1 if "final answer" in note and "no final" not in note else -1)
    )
    if not 0 <= place < len(pieces):
        return join([cut, rest])
    return join([*pieces[:place], tag("mark", pieces[place], title=note), *pieces[place + 1 :], rest])


def _pieces(text: str) -> list[str]:
    """The steps of a solution with what separates them: its lines, or where it has one line, what semicolons divide."""
    if "\n" in text.strip():
        found = re.findall(r"[^\n]*\n*", text)
        return [piece for piece in found if piece]
    return [piece for piece in re.findall(r"[^;]*;?", text) if piece]


# The configuration: what differs from the defaults first, the whole of it for those who ask.

UNSET = "unset"


def settings_section(experiment: Experiment) -> Section:
    changed = changed_settings(experiment)
    shown = (
        table(
            ["setting", "value", "default"],
            [[tag("th", tag("code", key)), *_codes(row)] for key, row in changed.items()],
            "settings",
        )
        if changed
        else tag("p", "Nothing differs from the defaults.", class_="empty")
    )
    whole = details("The whole configuration", tag("pre", experiment.to_toml(), class_="toml"))
    return Section(
        "settings", "Settings", [shown, whole], f"What differs from the defaults. Digest {experiment.hash()}."
    )


def changed_settings(experiment: Experiment) -> dict[str, tuple[str, str]]:
    """Key -> (value, default) of all that is not as pvg has it by itself; of the task, as its kind has it."""
    task = TASKS[experiment.task.kind]()
    own, default = (
        flat(experiment.plain()),
        flat(Experiment.model_construct(**{**dict(Experiment()), "task": task}).plain()),
    )
    default["task.kind"] = value_text(Experiment().task.kind)
    keys = [key for key in sorted({*own, *default}) if own.get(key, UNSET) != default.get(key, UNSET)]
    return {key: (own.get(key, UNSET), default.get(key, UNSET)) for key in keys}


def flat(plain: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted keys and values as text, as they would stand in TOML."""
    found: dict[str, str] = {}
    for key, value in plain.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value_text(value)
    return found


def value_text(value: Any) -> str:
    return orjson.dumps(value, default=str).decode()


def _codes(values: tuple[str, ...]) -> list[Piece]:
    return [_code(value) for value in values]


def _code(value: str) -> Html:
    return tag("code", value) if value != UNSET else tag("span", UNSET, class_="quiet")
