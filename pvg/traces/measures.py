"""Measures of traces: formulas, what a reader is asked for each trace, and the report of one or two sources.

CIR (causal importance of reasoning, arXiv 2604.22074): (1/T) sum_{k=1..T} JS(Bernoulli(p_k), Bernoulli(p_T)) with p_k
= P(stated answer | first k units of the reasoning), in bits, so between 0 and 1. Near 0: the reader knows the answer
before it has read the reasoning. SR (sufficiency): 1 if the reader, who sees the reasoning without the question, reads
the same answer. Transfer utility (arXiv 2603.20508): accuracy of a reader who continues from the first 10 to 90 % of
the reasoning, minus its accuracy without it. True-thinking score of a step (arXiv 2510.24941): (|S1(1) - S0(1)| +
|S1(0) - S0(0)|) / 2 with Sx(c) = P(stated answer) right after the step; x: the step is intact (1) or perturbed (0); c:
those before it are.

Judges: Matthews correlation, TPR x TNR (g-mean2, arXiv 2512.18311) and balanced accuracy of accepted against correct.
All intervals are over problems.
"""

from __future__ import annotations

import re
import tomllib
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from scipy.special import entr

from pvg.config.base import StrictRecord
from pvg.errors import ConfigurationError, UsageError, counted
from pvg.evaluation.intervals import (
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
from pvg.evaluation.measures import FOLDS, NGRAMS, features, folds_of, matthews_of, probe
from pvg.tasks.answers import same_answer
from pvg.traces.http_client import RefusedByServer
from pvg.traces.kept_results import KeptResults, digest_of_question
from pvg.traces.loaders import LoadedTraces, Trace, TraceParts, parts_of, steps_in
from pvg.traces.readers import TextUnit, ToContinue, TraceReader
from pvg.verifier.calibration import matthews
from pvg.version import code_version

# --- formulas ---------------------------------------------------------------------------------------------------------


def divergence(p_K: NDArray[Any], q: float) -> Float64:
    """float64 [K]: Jensen-Shannon divergence of Bernoulli(p) and Bernoulli(q) in bits, in [0, 1]."""

    def entropy(x_K: NDArray[Any]) -> Float64:
        return np.asarray((entr(x_K) + entr(1.0 - x_K)) / np.log(2))

    p_K = np.asarray(p_K, dtype=np.float64)
    found_K = entropy((p_K + q) / 2) - (entropy(p_K) + entropy(np.full_like(p_K, q))) / 2
    return np.asarray(np.clip(found_K, 0.0, 1.0))


def importance(chances: Sequence[float]) -> float:
    """CIR of p_0, p_1, ..., p_T: the mean over k = 1..T. NaN for no reasoning (T = 0)."""
    return float(divergence(np.array(chances[1:]), chances[-1]).mean()) if len(chances) > 1 else float("nan")


def contributions(chances: Sequence[float]) -> list[float]:
    """How much nearer each unit brings the reader to the final belief: JS_(k-1) - JS_k, at least 0."""
    found_K = np.maximum(0.0, -np.diff(divergence(np.array(chances), chances[-1])))
    return [float(value) for value in found_K]


def thinking_score(intact: tuple[float, float], perturbed: tuple[float, float]) -> float:
    """From (S1(1), S0(1)) and (S1(0), S0(0)): those with the intact and with the perturbed context."""
    return (abs(intact[0] - intact[1]) + abs(perturbed[0] - perturbed[1])) / 2


def perturbed(step: str) -> str:
    """The step with another last digit in each number; a step without numbers is dropped. No random numbers."""

    def changed(found: re.Match[str]) -> str:
        digit = (int(found[0]) + 1 + zlib.crc32(f"{found.start()}/{step}".encode()) % 3) % 10
        return str(digit)

    return re.sub(r"[0-9](?![0-9])", changed, step) if re.search(r"[0-9]", step) else ""


# --- what a reader is asked -------------------------------------------------------------------------------------------

READ: tuple[str, ...] = ("cir", "sr", "tts", "transfer")  # the measures that need a reader
SHARES = (10, 25, 50, 75, 90)  # percent of the reasoning from which a reader continues
MEASURED = 1  # raised when a definition changes: kept results are then not used
TOGETHER = 32  # traces whose completions are asked for together
DECORATIVE = 0.005  # a step with a lower true-thinking score does not matter
LONGEST_ANSWER = 48  # tokens of an answer alone
Told = Callable[[str, int, int], None]  # called with a measure, the traces done, and all of them


class MeasuredTrace(NamedTuple):
    """What a reader found in a trace. `chances`: p_0 to p_T; `units`: their texts. `steps`: (text, score). `read`: the
    answer that it read without the question, by "sr"; and those after 0, 10, ... percent."""

    trace: Trace
    units: list[str]
    chances: list[float]
    steps: list[tuple[str, float]]
    read: Mapping[str, str | None]

    def values(self) -> dict[str, float]:
        """By measure, the value of this trace; without those that are not known."""
        trace, found = self.trace, dict[str, float]()
        parts = trace.parts
        if trace.correct is not None:
            found["accuracy"] = float(trace.correct)
        found["characters"] = float(len(trace.text))
        if len(self.chances) > 1:
            found["cir"] = importance(self.chances)
        if "sr" in self.read and parts is not None:
            found["sr"] = float(same_answer(self.read["sr"], parts.answer.strip()))
        if self.steps:
            scores_K = np.array([score for _, score in self.steps])
            found |= {"tts": float(scores_K.mean()), "decorative": float((scores_K < DECORATIVE).mean())}
        if "0" in self.read:
            alone = float(trace.is_true(self.read["0"]))
            gains = {f"transfer_{share}": float(trace.is_true(self.read[str(share)])) - alone for share in SHARES}
            found |= {"alone": alone, **gains, "transfer": float(np.mean(list(gains.values())))}
        if trace.accepted is not None:
            found["accepted"] = float(trace.accepted)
        return found


def missing(loaded: LoadedTraces, wanted: Sequence[str]) -> list[str]:
    """What the traces lack for the `wanted` measures, in sentences. Raises ConfigurationError if nothing can be read
    from them."""
    traces = loaded.traces
    mute, untrue = (sum(getattr(trace, name) is None for trace in traces) for name in ("parts", "truth"))
    if wanted and mute == len(traces):
        raise ConfigurationError(
            f"{loaded.name}: no trace states a final answer (####, \\boxed{{}}, <answer>, 'the answer is').",
            "Say how they state it: --answer REGEX, whose first group is the answer.",
        )
    said = [f"{loaded.name}: {counted(mute, 'trace')} of {len(traces):,} without a final answer."] if mute else []
    if untrue and "transfer" in wanted:
        said.append(f"{loaded.name}: {counted(untrue, 'trace')} without a true answer: no transfer utility of those.")
    return said


class ReadableTrace(NamedTuple):
    """A trace with a final answer and reasoning before it. `units`: of the reasoning; `steps`: its texts."""

    trace: Trace
    parts: TraceParts
    units: list[TextUnit]
    steps: list[str]

    @classmethod
    def of(cls, trace: Trace, reader: TraceReader) -> ReadableTrace | None:
        """None without an answer or reasoning, or if they do not fit into the reader's context or vocabulary."""
        parts = trace.parts
        if parts is None or not parts.reasoning.strip() or not parts.answer.strip():
            return None
        steps = [parts.reasoning[slice(*place)] for place in steps_in(parts.reasoning)]
        try:
            units, last = reader.units(parts.reasoning), reader.whole(parts.cue + parts.answer + parts.end)
            read = (units, *([reader.whole(change(step)) for step in steps] for change in (str, perturbed)))
            fits = all(reader.fits(trace.problem, [*row, last]) for row in read)
            return cls(trace, parts, units, steps) if fits else None
        except UsageError:  # a vocabulary of single characters lacks one
            return None


async def measured(
    loaded: LoadedTraces,
    reader: TraceReader | None,
    kept: KeptResults,
    wanted: Sequence[str],
    max_tokens: int,
    told: Told,
) -> list[MeasuredTrace]:
    """The traces with what the reader says about them, in order; what it has said before comes from `kept`. Adds to
    `loaded.said` what it could not read. `told` is called after each piece of work."""
    if reader is None:
        return [MeasuredTrace(trace, [], [], [], {}) for trace in loaded.traces]
    rows = [ReadableTrace.of(trace, reader) for trace in loaded.traces]
    if left := rows.count(None):
        why = "no answer, no reasoning, too long, or characters that it does not know"
        said = f"{loaded.name}: {reader.name} cannot read {counted(left, 'trace')} of {len(rows):,} ({why})."
        if left == len(rows):
            raise UsageError(said, "Choose another --reader.")
        loaded.said.append(said)
    found: dict[str, dict[int, Any]] = {name: {} for name in READ}
    for name in wanted:
        some = [n for n, row in enumerate(rows) if row and (name != "transfer" or row.trace.truth is not None)]
        work, size = WORKS[name]
        for first in range(0, len(some), size):
            batch = {n: row for n in some[first : first + size] if (row := rows[n])}
            keys = {n: _key(name, row, reader, max_tokens) for n, row in batch.items()}
            new = {keys[n]: row for n, row in batch.items() if kept.get(keys[n]) is None}
            try:
                values = await work(reader, list(new.values()), max_tokens) if new else []
            except RefusedByServer as error:
                loaded.said.append(f"{name} is left out: {error.message}")
                break
            for key, value in zip(new, values, strict=True):
                kept.put(key, value)
            found[name] |= {n: kept.get(key) for n, key in keys.items()}
            told(name, min(first + size, len(some)), len(some))
    kept.commit()
    results = []
    for n, (trace, row) in enumerate(zip(loaded.traces, rows, strict=True)):
        chances, scores, read = (found[name].get(n) for name in ("cir", "tts", "sr"))
        units = [unit.text for unit in reader.joined(row.units)] if row and chances else []
        steps = list(zip(row.steps, scores, strict=True)) if row and scores else []
        results.append(
            MeasuredTrace(trace, units, chances or [], steps, {**(found["transfer"].get(n) or {}), **(read or {})})
        )
    return results


def _key(name: str, row: ReadableTrace, reader: TraceReader, max_tokens: int) -> str:
    marker = row.trace.pattern and row.trace.pattern.pattern
    return digest_of_question(MEASURED, name, reader.identity, max_tokens, marker, row.trace.problem, *row.parts)


async def _chances(reader: TraceReader, rows: Sequence[ReadableTrace], _: int) -> list[Any]:
    """p_0, ..., p_T of each trace."""
    found = []
    for row in rows:
        units = reader.joined(row.units)
        prefixes = [units[:end] for end in range(len(units) + 1)]
        found.append(await reader.chances(row.trace.problem, prefixes, row.parts))
    return found


async def _thought(reader: TraceReader, rows: Sequence[ReadableTrace], _: int) -> list[Any]:
    """The true-thinking scores of each trace's steps. What is read has two stems, the intact and the perturbed
    reasoning, from which single steps branch off."""
    found = []
    for row in rows:
        intact, broken = ([reader.whole(change(step)) for step in row.steps] for change in (str, perturbed))
        places, both = range(len(row.steps)), (intact, broken)
        prefixes = [[*before[:at], each[at]] for at in places for before in both for each in both]
        chances = iter(await reader.chances(row.trace.problem, prefixes, row.parts))
        quads = zip(chances, chances, chances, chances, strict=True)
        found.append([thinking_score((s11, s01), (s10, s00)) for s11, s01, s10, s00 in quads])
    return found


async def _sufficient(reader: TraceReader, rows: Sequence[ReadableTrace], _: int) -> list[Any]:
    """The answers that are read from the reasoning alone."""
    written = await reader.written([ToContinue((), row.units, row.parts.cue) for row in rows], LONGEST_ANSWER)
    return [{"sr": _after_cue(row, text)} for row, text in zip(rows, written, strict=True)]


async def _continued(reader: TraceReader, rows: Sequence[ReadableTrace], max_tokens: int) -> list[Any]:
    """By percent of the reasoning, the answer of a reader who continues from there. One that states no answer is asked
    for it with the trace's own cue."""
    places = [(row, share) for row in rows for share in (0, *SHARES)]
    begun = [row.units[: round(len(row.units) * share / 100)] for row, share in places]
    asks = [ToContinue(row.trace.problem, units) for (row, _), units in zip(places, begun, strict=True)]
    written, answers, mute = await reader.written(asks, max_tokens), list[str | None](), list[int]()
    for n, ((row, _), units, more) in enumerate(zip(places, begun, written, strict=True)):
        parts = parts_of("".join(unit.text for unit in units) + more, row.trace.pattern)
        answers.append(None if parts is None else parts.answer.strip())
        mute += [n] if parts is None else []
    more_asks = [
        ToContinue(places[n][0].trace.problem, [*begun[n], reader.whole(written[n])], places[n][0].parts.cue)
        for n in mute
    ]
    forced = await reader.written(more_asks, LONGEST_ANSWER) if mute else []
    for n, text in zip(mute, forced, strict=True):
        answers[n] = _after_cue(places[n][0], text)
    read = iter(answers)
    return [{str(share): next(read) for share in (0, *SHARES)} for _ in rows]


def _after_cue(row: ReadableTrace, written: str) -> str | None:
    """The answer at the beginning of what was written after the trace's cue; or where the text states one."""
    if (parts := parts_of(row.parts.cue + written, row.trace.pattern)) is not None:
        return parts.answer.strip()
    line = next(iter(written.strip().splitlines()), "").strip(" *_`$.")
    return (line.removesuffix(row.parts.end) if row.parts.end else line) or None


Work = Callable[[TraceReader, Sequence[ReadableTrace], int], Awaitable[list[Any]]]
# The work of each measure, and the traces that are read together.
WORKS: dict[str, tuple[Work, int]] = {
    "cir": (_chances, 1),
    "sr": (_sufficient, TOGETHER),
    "tts": (_thought, 1),
    "transfer": (_continued, TOGETHER),
}


# --- the report -------------------------------------------------------------------------------------------------------

# Measure -> (label, what it means), in the order of tables.
LABELS: dict[str, tuple[str, str]] = {
    name: (label.replace("{share}", share), about)
    for key, (label, about) in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).items()
    for share in (map(str, SHARES) if "{" in key else ("",))
    for name in (key.replace("{share}", share),)
}
SHARES_OF_TRACES = ("accuracy", "sr", "alone", "accepted")
PAIRED = tuple(name for name in LABELS if name not in ("mcc", "gmean2", "balanced", "wrong_reason", "separability"))


class JudgeAtStep(StrictRecord):
    """The judge at a step of the training, or after a round. None: only one kind of decision or of trace."""

    step: int
    traces: int
    mcc: float | None


class SourceRecord(StrictRecord):
    """`measures`: in the order of LABELS. `change`: the step from which on the judge's MCC differs, and the p value of
    that change."""

    name: str
    kind: str
    traces: int
    problems: int
    said: list[str]
    measures: dict[str, Estimate]
    judge: list[JudgeAtStep] = Field(default_factory=list)
    change: tuple[int, float] | None = None


class TraceRecord(StrictRecord):
    source: str
    place: str
    problem: str  # the hash by which traces of one problem are found
    values: dict[str, float]
    read: dict[str, str | None]


class TraceComparison(StrictRecord):
    """The second source minus the first, on the problems that both have. `p`: of exchanging the sources of problems;
    `p_adjusted`: Holm's, over the measures."""

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
        (each.trace.named != each.trace.flaw, place)
        for place, each in enumerate(measured)
        if None not in (each.trace.named, each.trace.flaw)
        and each.trace.accepted is False
        and each.trace.correct is False
    ]
    if reasons:
        found["wrong_reason"] = share_of(np.array([wrong for wrong, _ in reasons]), problems_N[[p for _, p in reasons]])
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
        measures={name: found[name] for name in LABELS if name in found},
        judge=steps,
        change=None if change is None else (series[change[0]][0], change[1]),
    )


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
    adjusted = holm([p for _, _, p in found])
    return [
        TraceComparison(name=name, difference=estimate, p=p, p_adjusted=more)
        for (name, estimate, p), more in zip(found, adjusted, strict=True)
    ]


def _by_problem(measured: Sequence[MeasuredTrace]) -> dict[str, dict[str, float]]:
    """The mean of each measure by problem."""
    rows: dict[str, dict[str, list[float]]] = {}
    for each in measured:
        for name, value in each.values().items():
            rows.setdefault(each.trace.problem_id, {}).setdefault(name, []).append(value)
    return {problem: {name: float(np.mean(of)) for name, of in row.items()} for problem, row in rows.items()}
