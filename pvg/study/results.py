"""A study's results: the JSON document (schema version 1), and how it is made from the runs.

It keeps the values of every seed, so that readers can compute other statistics. `pvg schemas study.json` prints
the JSON Schema of these classes.

Invariant: only complete games count, and only evaluations that match the study. Missing values appear in `n` and in
`cells`, never as a number.
"""

from __future__ import annotations

import csv
import io
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson
from scipy.special import stdtrit
from scipy.stats import rankdata

from pvg.config.base import StrictRecord
from pvg.errors import PvgError, counted
from pvg.store.atomic import write_atomic
from pvg.study.measures import MeasuredValue, RunFacts, StudyMeasure, cap_of, capped, read_facts
from pvg.study.plan import StudyPlan
from pvg.study.playing import StudyFolder, progress_of
from pvg.telemetry.device import processor
from pvg.telemetry.waits import usable_cores
from pvg.verifier.intervals import ALIKE, holm, sign_flip_p
from pvg.version import code_version

# Statistics for few seeds: intervals of a mean, comparisons paired by seed, trends over rounds. Pure functions.

CONFIDENCE = 0.95
LEVEL = 0.05
LEAST_FOR_INTERVAL = 3  # values: for two, Student's factor is 12.7, and the interval says nothing


@dataclass(frozen=True, slots=True)
class SeedSummary:
    """Values of one measure over seeds. `sd`: of the sample. `low` and `high`: the mean's 95 % interval.

    `censored`: the share of censored values. With any of them there is no mean, and `median`, `maximum` or `minimum` is
    None if it is a censored value.
    """

    n: int
    mean: float | None
    sd: float | None
    low: float | None
    high: float | None
    median: float | None
    minimum: float | None
    maximum: float | None
    censored: float


@dataclass(frozen=True, slots=True)
class PairedComparison:
    """An arm compared with the reference, or of one arm the last round compared with the first, paired by seed.

    `n` pairs, of which `up` are higher in the arm (in the last round), `down` lower, and `equal` equal. `difference`:
    the mean difference with its 95 % interval; None with censored values, where `test` is "signed ranks". `p` is exact
    up to 20 pairs. `tau`, for rounds: the mean of Kendall's tau-b over the rounds of each seed; `p` then tests that the
    taus are 0. `p_adjusted_arms`: Holm's, over the arms of the measure. `p_adjusted`: over all comparisons.
    """

    n: int
    difference: float | None
    low: float | None
    high: float | None
    up: int
    down: int
    equal: int
    test: Literal["differences", "signed ranks"]
    p: float | None
    tau: float | None = None
    p_adjusted: float | None = None
    p_adjusted_arms: float | None = None


# --- one arm -----------------------------------------------------------------------------------------------------


def summarise(values: Sequence[MeasuredValue]) -> SeedSummary:
    """The summary of the values; without values only n = 0 is set."""
    n = len(values)
    if not n:
        return SeedSummary(0, None, None, None, None, None, None, None, 0.0)
    numbers = sorted(math.inf if value.censored else value.number for value in values)
    censored = numbers.count(math.inf) / n
    low, high = (None, None) if censored else interval(numbers)
    return SeedSummary(
        n=n,
        mean=None if censored else statistics.fmean(numbers),
        sd=None if censored or n < 2 else statistics.stdev(numbers),
        low=low,
        high=high,
        median=_known(statistics.median(numbers)),
        minimum=_known(numbers[0]),
        maximum=_known(numbers[-1]),
        censored=censored,
    )


def _known(number: float) -> float | None:
    """None for a censored value."""
    return number if math.isfinite(number) else None


def interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Student's 95 % interval of the mean; (None, None) for fewer than three values."""
    n = len(values)
    if n < LEAST_FOR_INTERVAL:
        return None, None
    mean, half = statistics.fmean(values), reach(n) * statistics.stdev(values)
    return mean - half, mean + half


def reach(n: int) -> float:
    """Half of the width of an interval of n values, in their standard deviations."""
    return float(stdtrit(n - 1, (1 + CONFIDENCE) / 2)) / math.sqrt(n)


# --- pairs -------------------------------------------------------------------------------------------------------


def compare(reference: Mapping[int, MeasuredValue], arm: Mapping[int, MeasuredValue]) -> PairedComparison:
    """Compare values by seed; seeds on only one side are left out."""
    seeds = sorted(reference.keys() & arm.keys())
    before, after = [reference[seed] for seed in seeds], [arm[seed] for seed in seeds]
    cap = cap_of([*before, *after])
    differences = [b - a for a, b in zip(capped(before, cap), capped(after, cap), strict=True)]
    rounding = ALIKE * max((abs(value.number) for value in [*before, *after]), default=0.0)
    differences = [0.0 if abs(d) <= rounding else d for d in differences]
    up, down = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    n = len(seeds)
    low, high = interval(differences) if cap is None else (None, None)
    return PairedComparison(
        n=n,
        difference=statistics.fmean(differences) if n and cap is None else None,
        low=low,
        high=high,
        up=up,
        down=down,
        equal=n - up - down,
        test="differences" if cap is None else "signed ranks",
        p=sign_flip_p(differences if cap is None else signed_ranks(differences)) if n else None,
    )


def trend(series: Sequence[Sequence[MeasuredValue]]) -> PairedComparison:
    """The last round compared with the first. `series[s]`: the values of one seed in the order of its rounds. Seeds
    with fewer than two are left out."""
    long_enough = [values for values in series if len(values) > 1]
    first, last = ({seed: values[place] for seed, values in enumerate(long_enough)} for place in (0, -1))
    taus = [kendall_tau(capped(values, cap_of(values))) for values in long_enough]
    return replace(
        compare(first, last), tau=statistics.fmean(taus) if taus else None, p=sign_flip_p(taus) if taus else None
    )


def kendall_tau(values: Sequence[float]) -> float:
    """Kendall's tau-b of the values against their positions: 1 always rising, -1 always falling, 0 if all are equal
    (where tau is undefined)."""
    signs = [int(b > a) - int(b < a) for a, b in combinations(values, 2)]
    untied = sum(sign != 0 for sign in signs)
    return sum(signs) / math.sqrt(untied * len(signs)) if untied else 0.0


def signed_ranks(differences: Sequence[float]) -> list[float]:
    """The ranks of the absolute differences (ties have their mean rank) with the differences' signs; zeros are left
    out."""
    moved_N = np.array([d for d in differences if d], dtype=np.float64)
    return [float(rank) for rank in rankdata(np.abs(moved_N)) * np.sign(moved_N)]


def least_p(n: int) -> float:
    """The smallest two-sided p value of n pairs: 2 of the 2^n choices are extreme."""
    return math.ldexp(1.0, 1 - n)


def seeds_needed(comparisons: int) -> int:
    """The smallest number of seeds with which one of that many comparisons can reach LEVEL after Holm's adjustment."""
    return math.ceil(math.log2(2 * max(1, comparisons) / LEVEL))


def shortfall(seeds: int, tests: int, effect: str) -> str:
    """Why `seeds` seeds can show no significant `effect` ("difference between arms") in a family of `tests` tests, and
    how many seeds can. Empty if these seeds can."""
    if seeds < 1 or tests < 1 or tests * least_p(seeds) <= LEVEL:
        return ""
    corrected = f", and {min(1.0, tests * least_p(seeds)):.3g} with Holm's correction over {tests} arms"
    return (
        f"{counted(seeds, 'seed')} cannot show a significant {effect}: the smallest possible p value is "
        f"{least_p(seeds):.3g}{corrected if tests > 1 else ''}. "
        f"At least {seeds_needed(tests)} seeds are necessary for p <= {LEVEL}."
    )


# --- the document ------------------------------------------------------------------------------------------------


class ArmRecord(StrictRecord):
    """`settings`: what the arm itself sets. `steps`: the maximum optimizer steps of one of its games."""

    name: str
    experiment: str
    settings: dict[str, Any]
    steps: int


class CellRecord(StrictRecord):
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


class MeasureRecord(StrictRecord):
    name: str
    label: str
    style: str
    higher_is_better: bool | None
    by_round: bool
    meaning: str


class MeasureResult(StrictRecord):
    """One measure of one arm. `series[seed]`: its values by round. `values[seed]`: the last one. `summary` summarises
    `values`, and `rounds[r]` the values of round r. `trend` is None for a measure of the whole run."""

    arm: str
    measure: str
    series: dict[int, list[MeasuredValue | None]]
    values: dict[int, MeasuredValue]
    summary: SeedSummary
    rounds: list[SeedSummary]
    trend: PairedComparison | None


class ComparisonRecord(StrictRecord):
    arm: str
    measure: str
    comparison: PairedComparison


class StudyResults(StrictRecord):
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
        cells.append(
            CellRecord(
                arm=cell.arm,
                seed=cell.seed,
                run=str(cell.run.path),
                status=now.status,
                reason=now.reason,
                config_hash=cell.experiment.hash(),
                code_version=now.code_version,
                machine=now.machine,
                seconds=found.summary.seconds if found else None,
            )
        )
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
        measures=[MeasureRecord.model_validate(measure) for measure in plan.measures],
        results=results,
        comparisons=comparisons,
        family=sum(found.comparison.p is not None for found in comparisons),
    )


def _result(
    arm: str, measure: StudyMeasure, facts: Mapping[tuple[str, int], RunFacts], seeds: Sequence[int]
) -> MeasureResult:
    series = {seed: measure.read(facts[arm, seed]) for seed in seeds if (arm, seed) in facts}
    values = {seed: found[-1] for seed, found in series.items() if found and found[-1] is not None}
    longest = max((len(found) for found in series.values()), default=0)
    rounds = [_there([found[place] for found in series.values() if place < len(found)]) for place in range(longest)]
    return MeasureResult(
        arm=arm,
        measure=measure.name,
        series=series,
        values=values,
        summary=summarise(list(values.values())),
        rounds=[summarise(column) for column in rounds],
        # Without a value in the first or the last round, last minus first would compare other rounds.
        trend=trend([_there(found) for found in series.values() if found and None not in (found[0], found[-1])])
        if measure.by_round
        else None,
    )


def _there(values: Sequence[MeasuredValue | None]) -> list[MeasuredValue]:
    return [value for value in values if value is not None]


def _with_adjusted_trends(results: Sequence[MeasureResult]) -> list[MeasureResult]:
    adjusted = holm([result.trend.p if result.trend else None for result in results])
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
    found: list[ComparisonRecord] = []
    for measure in (measure.name for measure in plan.measures if measure.compared):
        compared = [compare(values[plan.reference, measure], values[arm, measure]) for arm in others]
        for arm, one, p in zip(others, compared, holm([one.p for one in compared]), strict=True):
            found.append(ComparisonRecord(arm=arm, measure=measure, comparison=replace(one, p_adjusted_arms=p)))
    adjusted = holm([record.comparison.p for record in found])
    return [
        record.model_copy(update={"comparison": replace(record.comparison, p_adjusted=p)})
        for record, p in zip(found, adjusted, strict=True)
    ]


# --- files -------------------------------------------------------------------------------------------------------


def write_results(path: Path, results: StudyResults) -> None:
    """Write the document atomically."""
    options = orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS | orjson.OPT_APPEND_NEWLINE
    write_atomic(path, orjson.dumps(results.plain(), option=options))


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
            for number, value in enumerate(series):
                if value is not None:
                    place = (results.name, result.arm, seed, result.measure, number if by_round[result.measure] else "")
                    table.writerow((*place, value.number, int(value.censored), versions[result.arm, seed]))
    return text.getvalue()
