"""CIR and SR as a reward: what the reader is given, and games that it pays."""

from __future__ import annotations

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kill_drill import TINY_PROVER
from made_groups import made_group
from small_games import changed, completed, played, prover_steps, recorded, trained_on

from pvg.config.game import CorrectnessReward
from pvg.config.load import build_experiment
from pvg.config.task import ModchainTask
from pvg.errors import ConfigurationError, PvgError
from pvg.game.rewards import SolutionReader, check_reading
from pvg.store.checkpoints import read_checkpoint_meta
from pvg.store.run_directory import RunDirectory
from pvg.tasks.modchain import Modchain, chain_problem
from pvg.traces.kept_results import KeptResults
from pvg.traces.loaders import LoadedTraces, Trace
from pvg.traces.measures import measured
from pvg.traces.readers import local_reader

READER = "embedded:modchain-prover"
PAID: dict[str, Any] = {"kind": "correctness", "sr": 0.5, "cir": 0.25, "reader": READER}
READING = {
    "game.reward": PAID,
    "game.sneaky_share": 0,
    "training.steps": 4,
    "verifier.steps": 2,
    "store.commit_every": 2,
}
TASK = Modchain(ModchainTask(min_terms=3, max_terms=3, problems=8, test_problems=4))
RIGHT = "7+5=2;2+8=0;A0"


def read(*texts: str, graded: str | None = None) -> list[tuple[float | None, float | None]]:
    """SR and CIR that a reward finds in solutions of 7+5+8, in two groups. `graded`: the answer of their grades."""
    problem, group = chain_problem((7, 5, 8), 10), made_group("a", [[0]])
    blank = replace(group.rollouts[0], question=problem.question)
    rollouts = [replace(blank, text=text, grade=TASK.grade(problem, text)) for text in texts]
    if graded is not None:
        rollouts = [replace(r, grade=replace(r.grade, answer=graded)) for r in rollouts]

    async def work() -> list[tuple[float | None, float | None]]:
        with ThreadPoolExecutor(1) as executor:
            reader = SolutionReader(CorrectnessReward(**PAID), "cpu", executor)
            found = await reader.read([replace(group, rollouts=some) for some in (rollouts[:2], rollouts[2:])])
            await reader.close()
        return [(r.sr, r.cir) for group in found for r in group.rollouts]

    return asyncio.run(work())


def test_only_correct_solutions_are_read_and_the_answer_must_follow_from_the_reasoning() -> None:
    (sr, cir), (misled, _), unread, again = read(RIGHT, "7+5=2;2+8=9;A0", "7+5=2;2+8=9;A9", RIGHT)
    assert (sr, misled, unread) == (1.0, 0.0, (None, None))
    assert cir is not None
    assert 0.0 < cir <= 1.0
    assert again == (sr, cir)


def test_an_answer_that_the_grade_has_from_elsewhere_is_worth_nothing() -> None:
    """Otherwise a solution could show the reader one answer and the grader another."""
    assert read(RIGHT, graded="4") == [(0.0, 0.0)]


def test_a_game_is_paid_what_pvg_measures_and_goes_on_after_a_stop_with_the_same_bits(tmp_path: Path) -> None:
    experiment = changed(READING)
    whole = completed(experiment, tmp_path / "whole")
    rows = [r for r in trained_on(whole) if r.grade.correct]
    assert rows
    for r in rows:
        assert r.reward == pytest.approx(1 + 0.5 * r.sr + 0.25 * r.cir)  # type: ignore[operator]
    assert {r.reward for r in trained_on(whole) if not r.grade.correct} <= {0.0}
    assert all(0 <= step["sr"] <= 1 for step in prover_steps(whole))

    traces = [Trace(r.id, (("user", r.question),), r.text) for r in rows[:12]]

    async def slowly() -> list[dict[str, float]]:
        async with local_reader(READER) as reader:
            with KeptResults(tmp_path / "kept" / "results.jsonl") as kept:
                loaded = LoadedTraces("rows", "run", traces, [])
                return [
                    each.values() for each in await measured(loaded, reader, kept, ("sr", "cir"), 0, lambda *_: None)
                ]

    for r, values in zip(rows, asyncio.run(slowly()), strict=False):
        assert (r.sr, r.cir) == (values["sr"], pytest.approx(values["cir"], abs=1e-6))

    played(experiment, tmp_path / "stopped", stop_at=("train_prover", 3))
    _, resumed = played(experiment, tmp_path / "stopped", resume=True)
    assert [(r.id, r.sr, r.cir, r.reward) for r in recorded(resumed)] == [
        (r.id, r.sr, r.cir, r.reward) for r in recorded(whole)
    ]
    assert digest_of(resumed) == digest_of(whole)


def digest_of(run: RunDirectory) -> str:
    return read_checkpoint_meta(run.weights, "round-000-prover")[0]


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        ({"sr": 0.5}, "reader"),
        ({"reader": READER}, "sr or cir"),
        ({"sr": -1.0, "reader": READER}, "sr"),
        ({"sr": float("nan"), "reader": READER}, "sr"),
    ],
)
def test_a_reward_without_its_reader_or_weight_is_refused(reward: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        build_experiment({"game": {"sneaky_share": 0.0, "reward": {"kind": "correctness", **reward}}})


def test_a_reader_that_cannot_read_the_task_is_refused_before_the_mint(tmp_path: Path) -> None:
    with pytest.raises(PvgError, match="nothing"):
        played(changed({**READING, "game.reward": {**PAID, "reader": "embedded:nothing"}}), tmp_path)
    with pytest.raises(ConfigurationError, match=re.escape(TINY_PROVER)):  # asked in another form than it knows
        check_reading(CorrectnessReward(**{**PAID, "reader": TINY_PROVER}), TASK, next(TASK.problems("train")), "cpu")


def test_the_reader_is_one_of_the_models_of_an_experiment() -> None:
    """So it is pinned, downloaded, and digested as they are. A run may move."""
    experiment = build_experiment({"game": {"sneaky_share": 0.0, "reward": {**PAID, "reader": "run:a/round-1"}}})
    assert experiment.sources()["game.reward.reader"] == "run:a/round-1/prover"
    moved = [
        experiment.with_sources({"game.reward.reader": f"run:/{place}/a/round-1/prover@0123456789abcdef"})
        for place in ("x", "y")
    ]
    assert moved[0].sources() != moved[1].sources()
    assert moved[0].hash() == moved[1].hash() != experiment.hash()
