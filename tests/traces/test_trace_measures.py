"""Measures of traces: values known by hand, and equality with the formulas computed slowly."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from traces import slow_reference

from pvg.config.task import ModchainTask
from pvg.errors import ConfigurationError
from pvg.evaluation.trace_report import compared, judge_measures, summarised
from pvg.models.packing import Trie, lengths_of
from pvg.tasks.modchain import Modchain, chain_problem, clean_trace, flawed_trace
from pvg.traces.kept_results import KeptResults
from pvg.traces.loaders import LoadedTraces, Trace
from pvg.traces.measures import (
    READ,
    SHARES,
    MeasuredTrace,
    contributions,
    divergence,
    importance,
    missing,
    perturbed,
    thinking_score,
)
from pvg.traces.measures import measured as measure
from pvg.traces.readers import TextUnit, TraceReader, local_reader
from pvg.verifier.intervals import draws

CHANCE = st.floats(0, 1, allow_subnormal=False)

# --- formulas ---------------------------------------------------------------------------------------------------------


def test_cir_of_known_beliefs():
    assert importance([0.5, 0.5, 0.5]) == 0.0  # the reader knew it all along
    assert importance([0.0, 0.0, 0.0, 1.0]) == pytest.approx(2 / 3)  # only the last unit decides
    assert importance([1.0, 0.0]) == 0.0  # p_0 does not count
    assert math.isnan(importance([0.5]))
    half = 1.5 - 0.75 * math.log2(3)  # JS of 1/2 and 1: by hand
    assert importance([0.0, 0.5, 1.0]) == pytest.approx(half / 2)


@given(st.lists(CHANCE, min_size=2, max_size=8))
def test_cir_and_divergence_follow_their_definitions(chances):
    assert importance(chances) == pytest.approx(slow_reference.cir(chances), abs=1e-9)
    assert 0.0 <= importance(chances) <= 1.0
    assert divergence(np.array(chances), chances[0])[0] == pytest.approx(0.0, abs=1e-9)


def test_a_unit_contributes_what_brings_the_reader_nearer():
    assert contributions([0.0, 0.0, 1.0, 1.0]) == [0.0, 1.0, 0.0]


def test_the_score_of_a_step():
    assert thinking_score((1.0, 0.2), (0.5, 0.5)) == pytest.approx(0.4)


def test_a_perturbed_step_has_other_numbers_in_the_same_places():
    step = "48 / 2 = 24.5 apples"
    changed = perturbed(step)
    assert changed == perturbed(step)
    assert [a.isdigit() for a in step] == [a.isdigit() for a in changed]
    digits = [(a, b) for a, b in zip(step, changed, strict=True) if a != b]
    assert len(digits) == 4
    assert perturbed("so it is red") == ""


# --- a reader whose beliefs are known ---------------------------------------------------------------------------------


class KnownReader(TraceReader):
    """Reads words. It believes in the stated answer as soon as it has seen the word "key", and writes `says`."""

    name, identity = "known", "known"

    def __init__(self, says="7"):
        self.says, self.asked = says, 0

    def units(self, text):
        return [TextUnit(word) for word in text.split(" ")]

    def whole(self, text):
        return TextUnit(text)

    def joined(self, units):
        return list(units)

    def fits(self, problem, units: Sequence[TextUnit]):
        return len(units) < 20

    async def chances(self, problem, prefixes, parts):
        self.asked += len(prefixes)
        return [float(any("key" in unit.text for unit in prefix)) for prefix in prefixes]

    async def written(self, asks, max_tokens):
        self.asked += len(asks)
        return [f"{'' if ask.cue else '#### '}{self.says}" for ask in asks]


def trace(text, truth="7", place="1", question="q", **more):
    return Trace(place, (("user", question),), text, truth=truth, **more)


def measured(traces, folder, reader=None, wanted=READ):
    reader = reader or KnownReader()
    loaded = LoadedTraces("s", "x", traces, [])
    with KeptResults(folder / "results.jsonl") as kept:
        return asyncio.run(measure(loaded, reader, kept, wanted, 16, lambda *_: None)), loaded


def test_every_measure_of_a_golden_trace(tmp_path):
    (found,), _ = measured([trace("a b key d\n#### 7")], tmp_path)
    assert found.chances == [0.0, 0.0, 0.0, 1.0, 1.0]
    values = found.values()
    assert values["cir"] == pytest.approx(2 / 4)
    assert (values["sr"], values["accuracy"], values["alone"], values["transfer"]) == (1.0, 1.0, 1.0, 0.0)
    # The only step has no number, so it is dropped when it is perturbed: S1 = 1, S0 = 0 in both contexts.
    assert found.steps == [("a b key d", 1.0)]


def test_a_reader_who_reads_another_answer_finds_the_reasoning_insufficient(tmp_path):
    (found,), _ = measured([trace("a key\n#### 7", truth="8")], tmp_path, KnownReader("8"))
    values = found.values()
    assert (values["sr"], values["accuracy"], values["alone"]) == (0.0, 0.0, 1.0)


class ContinuingReader(KnownReader):
    """Solves a problem only after the word "key", and keeps what it was shown."""

    shown = ()

    async def written(self, asks, max_tokens):
        self.shown = asks
        return ["#### 7" if any("key" in unit.text for unit in ask.prefix) else "#### 8" for ask in asks]


def test_a_prefix_with_the_key_adds_accuracy(tmp_path):
    (found,), _ = measured([trace("a b c d key f g h i j\n#### 7")], tmp_path, ContinuingReader(), ["transfer"])
    values = found.values()
    assert [values[f"transfer_{share}"] for share in (10, 25, 50, 75, 90)] == [0.0, 0.0, 1.0, 1.0, 1.0]
    assert (values["alone"], values["transfer"]) == (0.0, 0.6)


def test_a_reader_for_sufficiency_sees_neither_the_question_nor_the_answer(tmp_path):
    reader = ContinuingReader()
    text = "<think>a key. The answer is 7.</think>\nSo it is 7.\n#### 7"
    measured([trace(text)], tmp_path, reader, ["sr"])
    (ask,) = reader.shown
    assert ask.problem == ()
    assert "7" not in "".join(unit.text for unit in ask.prefix) + ask.cue


def test_results_are_kept_and_asked_for_once(tmp_path):
    traces = [trace("a key\n#### 7", place=str(n), question=f"q{n}") for n in range(3)]
    first, _ = measured(traces, tmp_path)
    reader = KnownReader()
    again, _ = measured(traces, tmp_path, reader)
    assert reader.asked == 0
    assert [each.values() for each in again] == [each.values() for each in first]
    reader = KnownReader()
    measured([trace("a key b\n#### 7")], tmp_path, reader)
    assert reader.asked > 0


def test_traces_that_cannot_be_read_are_left_out_and_counted(tmp_path):
    traces = [trace("no answer"), trace("#### 7"), trace(" ".join("x" * 30) + "\n#### 7"), trace("a key\n#### 7")]
    found, loaded = measured(traces, tmp_path)
    assert [bool(each.chances) for each in found] == [False, False, False, True]
    assert "3 traces" in loaded.said[0]


def test_what_no_trace_has_is_said_before_a_reader_is_opened():
    with pytest.raises(ConfigurationError, match="no trace states a final answer"):
        missing(LoadedTraces("s", "x", [trace("nothing")], []), READ)
    no_transfer, no_accuracy = missing(LoadedTraces("s", "x", [trace("#### 7", truth=None)], []), READ)
    assert "1 trace without a true" in no_transfer
    assert "accuracy" in no_accuracy
    (said,) = missing(LoadedTraces("s", "x", [trace("nothing")], []), ())  # no reader
    assert "--answer" in said


# --- summaries --------------------------------------------------------------------------------------------------------


def bare(traces):
    return [MeasuredTrace(each, [], [], [], {}) for each in traces]


def estimates(rows):
    record = summarised(LoadedTraces("s", ".jsonl", [], []), rows)
    return record.measures, record


def test_the_judge_of_a_confusion_matrix():
    # Of 4 correct traces 3 are accepted; of 6 wrong ones 2.
    rows = [(True, True)] * 3 + [(True, False)] + [(False, True)] * 2 + [(False, False)] * 4
    traces = [
        trace("#### 7", question=f"q{n}", known=correct, accepted=accepted)
        for n, (correct, accepted) in enumerate(rows)
    ]
    found, _ = estimates(bare(traces))
    assert found["balanced"].value == pytest.approx((3 / 4 + 4 / 6) / 2)
    assert found["gmean2"].value == pytest.approx(3 / 4 * 4 / 6)
    assert found["mcc"].value == pytest.approx((3 * 4 - 1 * 2) / math.sqrt(5 * 4 * 5 * 6))
    assert found["accepted"].value == 0.5
    assert found["accuracy"].low < 0.4 < found["accuracy"].high


def test_copies_of_a_problem_make_no_interval_narrower():
    rows = [trace("x" * 9 * (n + 1), question=f"q{n}", known=n < 2, accepted=n % 3 > 0) for n in range(6)]
    once, often = (estimates(bare(rows * copies))[0] for copies in (1, 20))
    for name in ("accuracy", "characters", "balanced", "mcc"):
        assert (often[name].low, often[name].high) == pytest.approx((once[name].low, once[name].high), abs=0.02)


def test_a_judge_that_decays_has_a_change_point():
    traces = [
        trace(
            "#### 7", question=f"q{n}", step=step, known=n % 2 == 0, accepted=(n % 2 == 0) == (step < 8 or n % 3 == 0)
        )
        for step in range(16)
        for n in range(12)
    ]
    _, record = estimates(bare(traces))
    assert len(record.judge) == 16
    assert record.change is not None
    assert record.change[0] == 8
    assert record.change[1] < 0.01


def test_a_right_refusal_that_names_another_step_is_right_for_the_wrong_reason():
    known = {"known": False, "accepted": False}
    traces = [
        trace("#### 7", question="a", flaw=2, named=2, **known),
        trace("#### 7", question="b", flaw=2, named=3, **known),
        trace("#### 7", question="c", flaw=2, named=3, known=False, accepted=True),  # a wrong verdict
        trace("#### 7", question="d", flaw=None, named=3, **known),
    ]
    assert estimates(bare(traces))[0]["wrong_reason"].value == 0.5


def test_roles_that_write_differently_are_separable():
    traces = [
        trace(f"{'well then' if n % 2 else 'clearly so'} {n}\n#### 7", question=f"q{n // 2}", role="ab"[n % 2])
        for n in range(80)
    ]
    assert estimates(bare(traces))[0]["separability"].value > 0.95


def test_judge_measures_of_one_kind_of_trace_do_not_exist():
    yes_N, problems_N = np.ones(3, dtype=bool), np.arange(3)
    found = judge_measures(yes_N, yes_N, problems_N, draws(3, 50, 0))
    assert {estimate.value for estimate in found.values()} == {None}


def test_a_comparison_is_paired_by_problem_and_adjusted():
    first = bare([trace("x" * 10, question=f"q{n}", known=False) for n in range(10)])
    second = bare([trace("x" * 12, question=f"q{n}", known=n != 3) for n in range(9)])
    rows = {row.name: row for row in compared(first, second)}
    assert rows["accuracy"].difference.value == pytest.approx(8 / 9)
    assert rows["accuracy"].difference.problems == 9
    assert rows["characters"].difference.value == 2.0
    assert rows["accuracy"].p == pytest.approx(2 / 2**8)
    assert rows["characters"].p == pytest.approx(2 / 2**9)
    assert [rows[name].p_adjusted for name in ("characters", "accuracy")] == pytest.approx(
        [2 / 2**8] * 2
    )  # 2 p, then p


def test_the_prefixes_of_transfer_utility_are_one_test():
    rows = bare([trace("x", question=f"q{n}") for n in range(9)])
    sides = [
        [row._replace(read={"0": "8", **dict.fromkeys(map(str, SHARES), read)}) for row in rows] for read in ("8", "7")
    ]
    found = {row.name: row for row in compared(*sides)}
    assert found["transfer"].difference.value == 1.0
    assert found["transfer"].p_adjusted == pytest.approx(3 * 2 / 2**9)  # beside accuracy and characters
    without = {name for name, row in found.items() if row.p_adjusted is None}
    assert without == {"alone", *(f"transfer_{share}" for share in SHARES)}


# --- a real model -----------------------------------------------------------------------------------------------------

PROBLEMS = [chain_problem(terms, 10) for terms in ((7, 5, 8, 3, 6), (1, 2, 3, 4, 5), (9, 9, 9, 9, 9))]
EMBEDDED = "embedded:modchain-prover"


def modchain_traces():
    rng = np.random.default_rng(0)
    rows = [(problem, clean_trace(problem)) for problem in PROBLEMS]
    rows += [(problem, flawed_trace(problem, "wrong_sum", rng)) for problem in PROBLEMS]
    return [trace(text, problem.answer, str(n), problem.question) for n, (problem, text) in enumerate(rows)]


async def with_reader(work):
    async with local_reader(EMBEDDED, "cpu") as reader:
        return await work(reader)


@pytest.mark.slow
def test_a_real_reader_gives_the_values_of_the_formulas(tmp_path):
    traces = modchain_traces()

    async def work(reader):
        with KeptResults(tmp_path / "results.jsonl") as kept:
            found = await measure(LoadedTraces("s", "x", traces, []), reader, kept, READ, 40, lambda *_: None)
        model = reader.model
        for each in found:
            parts, prompt = each.trace.parts, f"H{each.trace.problem[0][1]}"
            slow = [
                slow_reference.probability(model, prompt, parts.reasoning[:k] + parts.cue, parts.answer)
                for k in range(len(parts.reasoning) + 1)
            ]
            assert each.chances == pytest.approx(slow, abs=1e-5)
            assert each.values()["cir"] == pytest.approx(slow_reference.cir(slow), abs=1e-5)
            steps = [text for text, _ in each.steps]
            assert "".join(steps) == parts.reasoning
            broken = [perturbed(step) for step in steps]
            args = (model, prompt, steps, broken, parts.cue, parts.answer)
            scores = [slow_reference.tts(*args, number) for number in range(len(steps))]
            assert [score for _, score in each.steps] == pytest.approx(scores, abs=1e-5)
        return found

    found = asyncio.run(with_reader(work))
    for each in found[: len(PROBLEMS)]:  # the true chains: the model is sure of the answer, and only at their end
        assert each.chances[-1] > 0.85
        assert each.values()["sr"] == 1.0
        assert each.values()["cir"] > 0.3
        assert each.read["sr"] == each.read["90"] == each.trace.truth
    wrong = found[len(PROBLEMS)]
    assert wrong.values()["accuracy"] == 0.0


@pytest.mark.slow
def test_what_is_longer_than_the_context_with_its_answer_is_left_out(tmp_path):
    async def work(reader):
        texts = [f"1+2=3;A{'1' * size}" for size in (400, 1)]
        long, short = (trace(text, question="1+2?", pattern=re.compile(r"A(\d+)")) for text in texts)
        with KeptResults(tmp_path / "results.jsonl") as kept:
            return await measure(LoadedTraces("s", "x", [long, short], []), reader, kept, READ, 8, lambda *_: None)

    assert [bool(each.chances) for each in asyncio.run(with_reader(work))] == [False, True]


@pytest.mark.slow
def test_sharing_prefixes_and_batching_change_no_value():
    async def work(reader):
        one = modchain_traces()[0]
        units, parts = reader.units(one.parts.reasoning), one.parts
        prefixes = [units[:end] for end in range(len(units) + 1)]
        together = await reader.chances(one.problem, prefixes, parts)
        alone = [(await reader.chances(one.problem, [prefix], parts))[0] for prefix in prefixes]
        assert together == pytest.approx(alone, abs=1e-6)
        prompt = reader.prompt(one.problem)
        rows = [np.concatenate([prompt, *(unit.ids for unit in prefix)]) for prefix in prefixes[3:]]
        starts_N = np.full(len(rows), len(prompt))
        shared_N, apart_N = (reader.logprobs(rows, starts_N, shared=shared) for shared in (True, False))
        assert shared_N == pytest.approx(apart_N, abs=1e-5)

    asyncio.run(with_reader(work))


def test_all_prefixes_of_a_long_trace_cost_about_one_pass():
    """Tokens that go through the model, counted: a trace of 400 tokens, a question of 50, a cue and an answer of 4."""
    rng = np.random.default_rng(0)
    text, question, end = (rng.integers(0, 1000, size, dtype=np.int32) for size in (400, 50, 4))
    rows = [np.concatenate([question, text[:k], end]) for k in range(len(text) + 1)]
    trie = Trie.of(rows, lengths_of(rows) - 2)
    computed, alone = int(trie.lengths_S.sum()), int(lengths_of(rows).sum())
    assert computed < alone / 30
    assert computed < 8 * len(rows)


def test_the_embedded_task_writes_what_the_markers_read():
    task = Modchain(ModchainTask(problems=4, test_problems=4))
    for problem in task.problems("test"):
        parts = trace(clean_trace(problem)).parts
        assert (parts.cue, parts.answer) == ("A", problem.answer)
