"""A study's results: the JSON document (schema version 1), and how it is made from the runs.

    results = collect(plan, command="pvg study quick")
    write_results(folder.results, results)

It keeps the values of every seed, so that readers can compute other statistics. `pvg schemas study.json` prints
the JSON Schema of these classes.

Invariant: only complete games count, and only evaluations that match the study. Missing values appear in `n` and in
`cells`, never as a number.
"""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict

from pvg.errors import MissingRequirementError, PvgError
from pvg.store.atomic import write_output
from pvg.study.cells import CellProgress, StudyFolder, progress_of
from pvg.study.measures import MeasuredValue, RunFacts, StudyMeasure, read_facts
from pvg.study.plan import Cell, StudyPlan
from pvg.study.statistics import PairedComparison, SeedSummary, Trend, compare, holm, summarise, trend
from pvg.telemetry.device import processor
from pvg.telemetry.waits import usable_cores
from pvg.version import code_version


class StudyRecord(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ArmRecord(StudyRecord):
    """`settings`: what the arm itself sets. `steps`: the maximum optimizer steps of one of its games."""

    name: str
    experiment: str
    settings: dict[str, Any]
    steps: int


class CellRecord(StudyRecord):
    """`seconds`: of the game's phases. A cell that failed has the reason."""

    arm: str
    seed: int
    run: str
    status: Literal["new", "unfinished", "played", "complete", "damaged"]
    reason: str
    config_hash: str
    code_version: str
    machine: str
    seconds: float | None


class MeasureRecord(StudyRecord):
    name: str
    label: str
    style: str
    higher_is_better: bool | None
    by_round: bool
    meaning: str


class MeasureResult(StudyRecord):
    """One measure of one arm. `series[seed]`: its values by round. `values[seed]`: the last one. `summary` summarises
    `values`, and `rounds[r]` the values of round r. `trend` is None for a measure of the whole run."""

    arm: str
    measure: str
    series: dict[int, list[MeasuredValue | None]]
    values: dict[int, MeasuredValue]
    summary: SeedSummary
    rounds: list[SeedSummary]
    trend: Trend | None


class ComparisonRecord(StudyRecord):
    arm: str
    measure: str
    comparison: PairedComparison


class StudyResults(StudyRecord):
    """A study's results. `family`: the number of comparisons of the study, which `p_adjusted` covers.
    `p_adjusted_arms` covers the arms of one measure."""

    schema_version: Literal[1] = 1
    name: str
    about: str
    created: str  # ISO 8601, UTC
    command: str
    file: str
    toml: str
    overrides: list[str]
    pvg: str
    cpu: str
    cores: int
    threads: int
    seeds: list[int]
    reference: str | None
    arms: list[ArmRecord]
    cells: list[CellRecord]
    measures: list[MeasureRecord]
    results: list[MeasureResult]
    comparisons: list[ComparisonRecord]
    family: int

    def result(self, arm: str, measure: str) -> MeasureResult:
        return next(found for found in self.results if (found.arm, found.measure) == (arm, measure))

    @property
    def complete(self) -> int:
        return sum(cell.status == "complete" for cell in self.cells)

    @property
    def failed(self) -> list[CellRecord]:
        return [cell for cell in self.cells if cell.reason]

    def plain(self) -> dict[str, Any]:
        """As JSON data."""
        return self.model_dump(mode="json")


# --- making ------------------------------------------------------------------------------------------------------


def collect(plan: StudyPlan, command: str) -> StudyResults:
    """Read every complete game and compute the joint results."""
    folder = StudyFolder(plan.folder)
    facts: dict[tuple[str, int], RunFacts] = {}
    cells = []
    for cell in plan.cells:
        now = progress_of(cell, folder, plan.evaluate)
        if now.status in ("played", "complete"):
            try:
                facts[cell.arm, cell.seed] = read_facts(cell.run, evaluated=now.status == "complete")
            except PvgError as error:
                now = replace(now, status="damaged", reason=str(error))
        found = facts.get((cell.arm, cell.seed))
        cells.append(_cell_record(cell, now, found.summary.seconds if found else None))
    results = [
        result
        for measure in plan.measures
        for result in _with_adjusted_trends([_result(arm.name, measure, facts, plan.seeds) for arm in plan.arms])
    ]
    comparisons = _comparisons(plan, results)
    return StudyResults(
        name=plan.name,
        about=plan.about,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        command=command,
        file=str(plan.file),
        toml=plan.text,
        overrides=list(plan.overrides),
        pvg=code_version(),
        cpu=processor(),
        cores=usable_cores(),
        threads=plan.threads,
        seeds=list(plan.seeds),
        reference=plan.reference,
        arms=[
            ArmRecord(
                name=arm.name,
                experiment=arm.source,
                settings=arm.settings,
                steps=arm.experiment.arithmetic().optimizer_steps,
            )
            for arm in plan.arms
        ],
        cells=cells,
        measures=[
            MeasureRecord(
                name=measure.name,
                label=measure.label,
                style=measure.style,
                higher_is_better=measure.higher_is_better,
                by_round=measure.by_round,
                meaning=measure.meaning,
            )
            for measure in plan.measures
        ],
        results=results,
        comparisons=comparisons,
        family=sum(found.comparison.p is not None for found in comparisons),
    )


def _cell_record(cell: Cell, now: CellProgress, seconds: float | None) -> CellRecord:
    return CellRecord(
        arm=cell.arm,
        seed=cell.seed,
        run=str(cell.run.path),
        status=now.status,
        reason=now.reason,
        config_hash=cell.experiment.hash(),
        code_version=now.code_version,
        machine=now.machine,
        seconds=seconds,
    )


def _result(
    arm: str, measure: StudyMeasure, facts: Mapping[tuple[str, int], RunFacts], seeds: Sequence[int]
) -> MeasureResult:
    series = {seed: measure.read(facts[arm, seed]) for seed in seeds if (arm, seed) in facts}
    values = {seed: found[-1] for seed, found in series.items() if found and found[-1] is not None}
    longest = max((len(found) for found in series.values()), default=0)
    rounds = [_known([found[place] for found in series.values() if place < len(found)]) for place in range(longest)]
    return MeasureResult(
        arm=arm,
        measure=measure.name,
        series=series,
        values=values,
        summary=summarise(list(values.values())),
        rounds=[summarise(column) for column in rounds],
        trend=trend([_known(found) for found in series.values() if _has_ends(found)]) if measure.by_round else None,
    )


def _has_ends(values: Sequence[MeasuredValue | None]) -> bool:
    """Whether the first and the last round have a value. Otherwise last minus first would compare other rounds."""
    return bool(values) and values[0] is not None and values[-1] is not None


def _known(values: Sequence[MeasuredValue | None]) -> list[MeasuredValue]:
    return [value for value in values if value is not None]


def _with_adjusted_trends(results: Sequence[MeasureResult]) -> list[MeasureResult]:
    """The results of all arms for one measure, with their trends adjusted over the arms."""
    adjusted = _holm([result.trend.p if result.trend else None for result in results])
    return [
        result.model_copy(update={"trend": result.trend and replace(result.trend, p_adjusted_arms=p)})
        for result, p in zip(results, adjusted, strict=True)
    ]


def _comparisons(plan: StudyPlan, results: Sequence[MeasureResult]) -> list[ComparisonRecord]:
    """Every other arm compared with the reference, adjusted over the arms of each measure and over all comparisons."""
    if plan.reference is None:
        return []
    values = {(result.arm, result.measure): result.values for result in results}
    others = [arm.name for arm in plan.arms if arm.name != plan.reference]
    found: list[tuple[str, str, PairedComparison]] = []
    for measure in plan.measures:
        if measure.compared:
            reference = values[plan.reference, measure.name]
            compared = _of_one_measure([compare(reference, values[arm, measure.name]) for arm in others])
            found += [(arm, measure.name, comparison) for arm, comparison in zip(others, compared, strict=True)]
    adjusted = _holm([comparison.p for _, _, comparison in found])
    return [
        ComparisonRecord(arm=arm, measure=measure, comparison=replace(comparison, p_adjusted=p))
        for (arm, measure, comparison), p in zip(found, adjusted, strict=True)
    ]


def _of_one_measure(comparisons: Sequence[PairedComparison]) -> list[PairedComparison]:
    """The comparisons of all arms for one measure, adjusted over these arms."""
    adjusted = _holm([comparison.p for comparison in comparisons])
    return [replace(found, p_adjusted_arms=p) for found, p in zip(comparisons, adjusted, strict=True)]


def _holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's adjustment of the p values that exist."""
    adjusted = iter(holm([p for p in p_values if p is not None]))
    return [None if p is None else next(adjusted) for p in p_values]


# --- files -------------------------------------------------------------------------------------------------------


def write_results(path: Path, results: StudyResults) -> None:
    """Write the document atomically. Raises MissingRequirementError if it cannot be written."""
    data = orjson.dumps(
        results.plain(), option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS | orjson.OPT_APPEND_NEWLINE
    )
    try:
        write_output(path, data)
    except OSError as error:
        raise MissingRequirementError(f"Cannot write the results {path}: {error.strerror}.", "") from error


def csv_text(results: StudyResults) -> str:
    """Every value of every seed as CSV. `round` is empty for a measure of the whole run. `censored` is 1 if the value
    was not found within its limit."""
    versions = {(cell.arm, cell.seed): cell.code_version for cell in results.cells}
    by_round = {measure.name: measure.by_round for measure in results.measures}
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(("study", "arm", "seed", "measure", "round", "value", "censored", "pvg"))
    for result in results.results:
        for seed, series in result.series.items():
            for round_, value in enumerate(series):
                if value is not None:
                    table.writerow(
                        (
                            results.name,
                            result.arm,
                            seed,
                            result.measure,
                            round_ if by_round[result.measure] else "",
                            value.number,
                            int(value.censored),
                            versions[result.arm, seed],
                        )
                    )
    return text.getvalue()
