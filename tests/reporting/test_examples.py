"""Which solutions are shown."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from run_samples import begin, commit, played, rollout, state

from pvg.records import Grade, Role, SolverSolution, Turn
from pvg.reporting.run_page import markup
from pvg.reporting.solutions import choose_examples, shown_solution, what_was_sampled
from pvg.reporting.terminal import examples_list
from pvg.store.atomic import DamagedFileError


def test_a_malformed_text_is_no_flaw(tmp_path: Path) -> None:
    run = begin(tmp_path)
    broken = replace(rollout("broken", Role.SNEAKY, correct=False, score=50.0), grade=Grade(False, False))
    commit(run, state("complete"), {"checkpoint-00000": [broken, rollout("flaw", Role.SNEAKY, correct=False, score=1)]})
    assert [example.id for example in choose_examples(run)] == ["flaw"]


def test_the_words_of_a_grader_are_bounded(tmp_path: Path) -> None:
    run = begin(tmp_path)
    grade = Grade(False, True, "7\n" * 100_000, "wrong\n" * 50_000)
    commit(
        run,
        state("complete"),
        {"checkpoint-00000": [rollout("flaw", Role.SNEAKY, correct=False, score=1.0, grade=grade)]},
    )
    console = Console(file=StringIO(), width=80)
    console.print(examples_list(choose_examples(run)))
    assert len(console.file.getvalue().splitlines()) < 50  # type: ignore[attr-defined]


def test_the_newest_scored_round_speaks(tmp_path: Path) -> None:
    run = played(tmp_path)
    later = [replace(rollout("minted", Role.SNEAKY, correct=False, score=None), round=1)]
    first = [rollout("first", Role.SNEAKY, correct=False, score=0.0)]
    second = [replace(rollout("second", Role.SNEAKY, correct=False, score=0.0), round=1)]
    (run.path / "rollouts/round-000/checkpoint-00000.arrow").unlink()
    commit(run, state("mint", round=1), {"checkpoint-00000": first, "mint-00000": later})
    assert [example.id for example in choose_examples(run)] == ["first"]
    (run.path / "rollouts/round-001/mint-00000.arrow").unlink()
    (run.path / "rollouts/round-000/checkpoint-00000.arrow").unlink()
    commit(run, state("complete"), {"checkpoint-00000": first, "mint-00000": later, "checkpoint-00001": second})
    assert [example.id for example in choose_examples(run)] == ["second"]


def test_without_scores_any_of_each_kind_is_shown(tmp_path: Path) -> None:
    run = begin(tmp_path)
    samples = [
        rollout("a", Role.HELPFUL, correct=True, score=None, source="base"),
        rollout("b", Role.SNEAKY, correct=False, score=None, source="base"),
    ]
    commit(run, state("init"), {"init-00000": samples})
    chosen = choose_examples(run)
    assert {example.id for example in chosen} == {"a", "b"}
    assert not any("verifier" in example.why for example in chosen)


def test_nothing_committed_nothing_shown_and_damage_is_said(tmp_path: Path) -> None:
    assert choose_examples(begin(tmp_path, "empty")) == []
    run = played(tmp_path)
    shard = next(run.rollouts.glob("*/*.arrow"))
    shard.write_bytes(shard.read_bytes()[:-20])
    with pytest.raises(DamagedFileError, match=r"checkpoint-00000\.arrow is damaged"):
        choose_examples(run)


def test_a_dialogue_shows_its_turns_and_a_translation_what_it_was_made_of(tmp_path: Path) -> None:
    run = begin(tmp_path)
    solution = SolverSolution("solve/0", "by the solver", "4", True, True)
    talk = (
        Turn(0, True, "7+5=2;A2", score=2.0),
        Turn(9, False, "1?", "verifier"),
        Turn(11, True, "7+5=3;", score=-1.0),
    )
    asked = replace(rollout("asked", Role.SNEAKY, correct=False, score=1.0), turns=talk)
    translated = replace(rollout("made", Role.HELPFUL, correct=True, score=1.0), solver=solution, problem_id="other")
    commit(run, state("complete"), {"checkpoint-00000": [asked, translated]})
    first, second = choose_examples(run)
    turns = (("prover", "7+5=2;A2", 2.0), ("verifier", "1?", None), ("prover", "7+5=3;", -1.0))
    assert (first.text, first.dialogue) == ("7+5=2;A2", turns)
    assert (second.solver_text, second.dialogue) == ("by the solver", ())
    assert "verifier: 1?" in markup.solution(shown_solution(first, None))
    assert "by the solver" in markup.solution(shown_solution(second, None))
    console = Console(width=200, file=StringIO())
    console.print(examples_list([first, second]))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "verifier: 1?" in shown
    assert "after the solution: score +2.000" in shown
    assert "prover: 7+5=3; (score -1.000)" in shown
    assert "solver: by the solver" in shown


def test_samples_say_how_many_problems_have_both_kinds_and_why_solutions_are_malformed(tmp_path: Path) -> None:
    malformed = {"grade": Grade(False, False, None, "no final answer"), "problem_id": "p-1", "finish_reason": "length"}
    rows = [
        rollout("1", Role.HELPFUL, correct=True, score=None),
        rollout("2", Role.HELPFUL, correct=True, score=None),
        rollout("3", Role.SNEAKY, correct=False, score=None, **malformed),
    ]
    run = begin(tmp_path)
    commit(run, state("init"), {"rollouts-00000": rows})
    both, helpful, sneaky, reasons = what_was_sampled(run)
    assert both.startswith("1 of 2 problems")
    assert helpful.startswith("helpful: 2 of 2 solutions correct, 0 malformed, 0 cut off")
    assert sneaky.startswith("sneaky: 0 of 1 solution correct, 1 malformed, 1 cut off")
    assert reasons == "Malformed: 1 no final answer."
