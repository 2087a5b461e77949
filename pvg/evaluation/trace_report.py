"""The report on traces, of `pvg measure` and of the part legibility: measures of sources, with intervals over problems.

Judges: Matthews correlation, TPR x TNR (g-mean2, arXiv 2512.18311) and balanced accuracy of accepted against correct.
"""

from __future__ import annotations

import re
import tomllib
import zlib
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pvg.config.base import StrictRecord
from pvg.errors import UsageError
from pvg.evaluation.measures import FOLDS, NGRAMS, features, folds_of, matthews_of, probe
from pvg.evaluation.report import JudgeAtStep, SourceRecord
from pvg.hub import Say
from pvg.traces.kept_results import KeptResults
from pvg.traces.loaders import LoadedTraces, Trace
from pvg.traces.measures import SHARES, MeasuredTrace, OtherModel, UnreadableTraces, measured
from pvg.traces.readers import open_reader
from pvg.verifier.calibration import matthews
from pvg.verifier.intervals import (
    RESAMPLES,
    Estimate,
    Float64,
    change_point,
    draws,
    holm,
    mean_of,
    percentile,
    share_of,
    sign_flip_p,
)
from pvg.version import code_version

LABELLED = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
# Measure -> (label, what it means, its form), in the order of tables.
LABELS: dict[str, tuple[str, str, str]] = {
    key.replace("{share}", share): (label.replace("{share}", share), about, form)
    for key, (label, about, form) in LABELLED.items()
    for share in (map(str, SHARES) if "{" in key else ("",))
}
SHARES_OF_TRACES = ("accuracy", "sr", "alone", "accepted")
# One test per measure. Others are the same scores again (prefixes, decorative steps), or do not depend on the traces.
TESTED = ("accuracy", "characters", "cir", "sr", "tts", "transfer", "accepted")
PAIRED = tuple(name for name in LABELS if name not in ("mcc", "gmean2", "balanced", "wrong_reason", "separability"))


class TraceRecord(StrictRecord):
    source: str
    place: str
    problem: str  # the hash by which traces of one problem are found
    values: dict[str, float]
    read: dict[str, str | None]


class TraceComparison(StrictRecord):
    """The second source minus the first, on the problems that both have. `p`: of exchanging the sources of problems;
    `p_adjusted`: Holm's over the measures of TESTED; None for the others."""

    name: str
    difference: Estimate
    p: float | None
    p_adjusted: float | None


class MeasureReport(StrictRecord):
    """`reader`: its name; None without one."""

    schema_version: Literal[1] = 1
    created: str
    code_version: str
    reader: str | None
    sources: list[SourceRecord]
    comparison: list[TraceComparison]
    traces: list[TraceRecord]


def report_of_traces(
    loaded: Sequence[LoadedTraces], sides: Sequence[Sequence[MeasuredTrace]], reader: str | None
) -> MeasureReport:
    """The report of one source, or of two that are compared."""
    return MeasureReport(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        code_version=code_version(),
        reader=reader,
        sources=[summarised(each, side) for each, side in zip(loaded, sides, strict=True)],
        comparison=compared(*sides) if len(sides) == 2 else [],
        traces=[
            TraceRecord(
                source=each.name,
                place=row.trace.place,
                problem=row.trace.problem_id,
                values=row.values(),
                read=dict(row.read),
            )
            for each, side in zip(loaded, sides, strict=True)
            for row in side
        ],
    )


def summarised(loaded: LoadedTraces, measured: Sequence[MeasuredTrace]) -> SourceRecord:
    """The report of one source."""
    problem_ids = sorted({each.trace.problem_id for each in measured})
    numbers = {name: number for number, name in enumerate(problem_ids)}
    problems_N = np.array([numbers[each.trace.problem_id] for each in measured])
    weights_BP = draws(len(problem_ids), RESAMPLES, 0)
    values = [each.values() for each in measured]
    found: dict[str, Estimate] = {}
    for name in PAIRED:
        known = [place for place, row in enumerate(values) if name in row]
        if known:
            column_N = np.array([values[place][name] for place in known])
            if name in SHARES_OF_TRACES:
                found[name] = share_of(column_N.astype(bool), problems_N[known])
            else:
                found[name] = mean_of(column_N, problems_N[known], weights_BP)
    judged = [place for place, each in enumerate(measured) if None not in (each.trace.accepted, each.trace.correct)]
    steps: list[JudgeAtStep] = []
    if judged:
        accepted_N, correct_N = (
            np.array([getattr(measured[place].trace, name) for place in judged]) for name in ("accepted", "correct")
        )
        found |= judge_measures(accepted_N, correct_N, problems_N[judged], weights_BP)
        steps = _judge_by_step([measured[place].trace for place in judged])
    reasons = [
        trace
        for trace in (*(each.trace for each in measured), *loaded.verdicts)
        if None not in (trace.named, trace.flaw) and trace.accepted is False and trace.correct is False
    ]
    if reasons:
        _, reasons_N = np.unique([trace.problem_id for trace in reasons], return_inverse=True)
        found["wrong_reason"] = share_of(np.array([trace.named != trace.flaw for trace in reasons]), reasons_N)
    roles = sorted({each.trace.role for each in measured if each.trace.role is not None})
    if len(roles) == 2:
        found["separability"] = _separability(measured, roles[0], problems_N, problem_ids, weights_BP)
    series = [(step.step, step.mcc) for step in steps if step.mcc is not None]
    change = change_point(np.array([mcc for _, mcc in series]))
    return SourceRecord(
        name=loaded.name,
        kind=loaded.kind,
        traces=len(measured),
        problems=len(problem_ids),
        said=list(loaded.said),
        refused=list(loaded.refused),
        measures={name: found[name] for name in LABELS if name in found},
        judge=steps,
        change=None if change is None else (series[change[0]][0], change[1]),
    )


LEGIBILITY = ("cir", "sr", "transfer")  # what `pvg evaluate` asks a reader


async def legibility(
    loaded: LoadedTraces, reader: str, kept: Path, max_tokens: int, told: Callable[[str, int, int], None], say: Say
) -> SourceRecord:
    """The report of traces that `reader` reads (see `open_reader`). What it has read is kept in the file `kept`. Traces
    that it cannot read have the other measures."""
    try:
        async with open_reader(reader, say=say) as opened:
            with KeptResults(kept) as results:
                return summarised(loaded, await measured(loaded, opened, results, LEGIBILITY, max_tokens, told))
    except OtherModel as error:
        units = kept.parent / "units" / "legibility-*.json"
        raise UsageError(error.message, f"Start that model again, or remove {kept} and {units}.") from None
    except UnreadableTraces as error:
        loaded.said.append(error.message)
        return summarised(loaded, [MeasuredTrace(trace, [], [], [], {}) for trace in loaded.traces])


def judge_measures(
    accepted_N: NDArray[np.bool_], correct_N: NDArray[np.bool_], problems_N: NDArray[np.int64], weights_BP: Float64
) -> dict[str, Estimate]:
    """Matthews correlation, g-mean2 and balanced accuracy, each with a bootstrap over problems."""
    size, count = weights_BP.shape[1], len(np.unique(problems_N))

    def rates(weights_BP: Float64) -> tuple[Float64, Float64]:
        counts = [
            weights_BP @ np.bincount(problems_N, weights=of_N.astype(np.float64), minlength=size)
            for of_N in (accepted_N & correct_N, correct_N, ~accepted_N & ~correct_N, ~correct_N)
        ]
        with np.errstate(divide="ignore", invalid="ignore"):
            return counts[0] / counts[1], counts[2] / counts[3]

    found = {"mcc": matthews_of(accepted_N, correct_N, problems_N, weights_BP)}
    (right, wrong), (right_B, wrong_B) = rates(np.ones((1, size))), rates(weights_BP)
    for name, join in (("gmean2", np.multiply), ("balanced", lambda one, other: (one + other) / 2)):
        value = float(join(right, wrong)[0])
        found[name] = percentile(value, np.asarray(join(right_B, wrong_B)), len(accepted_N), count)
    return found


def _judge_by_step(traces: Sequence[Trace]) -> list[JudgeAtStep]:
    found = []
    for step in sorted({trace.step for trace in traces if trace.step is not None}):
        own = [trace for trace in traces if trace.step == step]
        mcc = matthews(*(np.array([getattr(trace, name) for trace in own]) for name in ("accepted", "correct")))
        found.append(JudgeAtStep(step=step, traces=len(own), mcc=float(mcc) if np.isfinite(mcc) else None))
    return found


def _separability(
    measured: Sequence[MeasuredTrace], role: str, problems_N: Any, problem_ids: Sequence[str], weights_BP: Float64
) -> Estimate:
    """The probe of pvg.evaluation.measures on words, of the traces with a role."""
    kept = [place for place, each in enumerate(measured) if each.trace.role is not None]
    words = [re.findall(r"\w+|[^\w\s]", measured[place].trace.text) for place in kept]
    ids = [np.array([zlib.crc32(word.encode()) & 0x7FFFFFFF for word in row], dtype=np.int32) for row in words]
    own_N = np.array([measured[place].trace.role == role for place in kept])
    return probe(features(ids, NGRAMS), own_N, problems_N[kept], folds_of(problem_ids, FOLDS), weights_BP)


def compared(first: Sequence[MeasuredTrace], second: Sequence[MeasuredTrace]) -> list[TraceComparison]:
    """The measures of two sources, paired by problem."""
    sides = [_by_problem(side) for side in (first, second)]
    found = []
    for name in PAIRED:
        common = sorted(p for p in set(sides[0]) & set(sides[1]) if name in sides[0][p] and name in sides[1][p])
        if not common:
            continue
        differences_P = np.array([sides[1][problem][name] - sides[0][problem][name] for problem in common])
        weights_BP = draws(len(common), RESAMPLES, 0)
        estimate = mean_of(differences_P, np.arange(len(common)), weights_BP)
        found.append((name, estimate, sign_flip_p(differences_P.tolist())))
    adjusted = holm([p if name in TESTED else None for name, _, p in found])
    return [
        TraceComparison(name=name, difference=estimate, p=p, p_adjusted=more)
        for (name, estimate, p), more in zip(found, adjusted, strict=True)
    ]


def _by_problem(measured: Sequence[MeasuredTrace]) -> dict[str, dict[str, float]]:
    rows: dict[str, dict[str, list[float]]] = {}
    for each in measured:
        for name, value in each.values().items():
            rows.setdefault(each.trace.problem_id, {}).setdefault(name, []).append(value)
    return {problem: {name: float(np.mean(of)) for name, of in row.items()} for problem, row in rows.items()}
