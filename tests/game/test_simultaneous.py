"""The simultaneous schedule: the verifier learns beside the prover, and no score of an older one is used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from kill_drill import drill
from small_games import changed, played, prover_rows, recorded, rows, state_of, trained_on

from pvg.config.game import SimultaneousSchedule
from pvg.errors import ConfigurationError
from pvg.game import simultaneous
from pvg.game.simultaneous import PairLearning, VerifierUpdates
from pvg.records import Float32, Role, Rollout
from pvg.store.checkpoints import read_checkpoint
from pvg.store.pairs import is_held_out
from pvg.store.run_directory import RunDirectory
from pvg.tasks import open_task
from pvg.tasks.task import problems_of_half
from pvg.verifier.scorer import VerifierScorer

pytestmark = pytest.mark.slow

TURNS = {"game.schedule": "simultaneous", "game.schedule.every": 2, "verifier.steps": 3, "game.test.problems": 4}


def fresh(run: RunDirectory) -> list[Rollout]:
    return [rollout for rollout in recorded(run) if rollout.id.startswith("000/fresh/")]


@pytest.fixture(scope="module", autouse=True)
def two_updates_in_the_window() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(simultaneous, "WINDOW", 2)
        patched.setattr(SimultaneousSchedule, "problems", 6)
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A round of it, in which every score is seen to be of the present weights."""
    asked = VerifierScorer.score

    async def checked(self: VerifierScorer, rollouts: Sequence[Rollout]) -> Float32:
        scores_N = await asked(self, rollouts)
        assert self.version == self._model.version()
        return scores_N

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VerifierScorer, "score", checked)
        return played(changed(TURNS), tmp_path_factory.mktemp("turns"))[1]


def test_the_verifier_changes_every_second_batch_and_every_score_is_of_the_newest(run: RunDirectory):
    versions: dict[int, set[str | None]] = {}
    for rollout in trained_on(run):
        versions.setdefault(rollout.step, set()).add(rollout.verifier_version)
    assert [len(versions[step]) for step in range(7)] == [1] * 7
    newest = [next(iter(versions[step])) for step in range(7)]
    # Batches 0 and 1 were scored by the verifier of the mint, 2 and 3 by that of the first update, and so on.
    assert newest[0::2][:3] == newest[1::2]
    assert len({newest[0], newest[2], newest[4], newest[6]}) == 4

    steps = prover_rows(run)
    assert ["verifier_loss" in row["metrics"] for row in steps] == [False, True] * 3 + [False]
    thresholds = [row["metrics"]["threshold"] for row in steps if "threshold" in row["metrics"]]
    assert len(set(thresholds)) == 3


def test_the_final_verifier_evaluates_the_round(run: RunDirectory):
    state = state_of(run)
    assert [name for name in state["weights"] if "verifier" in name] == [
        "round-000-verifier",
        "round-000-verifier-final",
    ]
    _, meta = read_checkpoint(run.weights, "round-000-verifier-final")
    evaluated = [rollout for rollout in recorded(run) if "/evaluation/" in rollout.id]
    assert {rollout.verifier_version for rollout in evaluated} == {meta["version"]}
    assert rows(run, "round")[0]["metrics"]["threshold"] == meta["threshold"]
    assert {r.verifier_version for r in trained_on(run) if r.step == 6} == {meta["version"]}


def test_fresh_solutions_are_of_the_verifiers_half_of_both_roles_and_of_the_newest_prover(run: RunDirectory):
    half = {problem.id for problem in problems_of_half(open_task(changed(TURNS).task), "verifier")}
    kept = fresh(run)
    assert {rollout.step for rollout in kept} == {0, 1, 2}
    assert {rollout.problem_id for rollout in kept} <= half
    assert {rollout.role for rollout in kept} == set(Role)
    # The batch that an update follows was sampled one version before.
    after = {rollout.step: rollout.version for rollout in trained_on(run)}
    assert [{r.version for r in kept if r.step == n} for n in range(3)] == [{after[2 * n + 1] + 1} for n in range(3)]


def test_pairs_are_drawn_from_the_window_and_the_mint_and_never_from_held_out_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    drawn: list[tuple[list[str], set[str]]] = []
    opened = VerifierUpdates._open_stream

    def watched(self: VerifierUpdates) -> Any:
        stream = opened(self)
        ids = {row.problem_id for step in range(40) for row in stream.rows(stream.draw(step, 8).correct_rows_M)}
        window = {r.problem_id for number in self._fresh for r in self._fresh[number]}
        drawn.append((stream._view.sources, ids & window))
        assert not any(is_held_out(problem_id, 0.1) for problem_id in ids)
        assert set(self._fresh) <= {self._done, self._done - 1}
        return stream

    monkeypatch.setattr(VerifierUpdates, "_open_stream", watched)
    played(changed(TURNS), tmp_path)
    assert len(drawn) == 3
    assert all(set(sources) == {"base", "round-000"} for sources, _ in drawn)
    assert any(from_window for _, from_window in drawn)


@pytest.mark.drill
@pytest.mark.timeout(600)
def test_killed_and_resumed_it_ends_like_the_uninterrupted_run_in_dialogues_too():
    """Of the challenge protocol, so that both schedules and several turns stand the test in one."""
    dialogues = {"game.protocol": "challenge", "models.prover": {"source": "embedded:modchain-dialogue"}}
    dialogues |= {"task.min_terms": 5, "task.max_terms": 5, "rollout.max_tokens": 40}
    settings = TURNS | dialogues | {"store.commit_every": 1, "training.steps": 4}
    result = drill(changed(settings), 1, 3, lambda line: None, phases=("train_prover",))
    assert result["problems"] == []
    assert result["kills"] == {"train_prover": 1}


def test_a_source_that_is_left_out_is_told_once_whether_or_not_the_run_was_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(PairLearning, "excluded", lambda *_: {"round-000": "0 correct"})
    settings = changed(TURNS | {"verifier.steps": 1, "training.steps": 4, "store.commit_every": 1})
    run = played(settings, tmp_path, stop_at=("train_prover", 4))[1]
    assert played(settings, tmp_path, resume=True)[0].status == "complete"
    assert [row["step"] for row in rows(run, "alert") if row["name"] == "source_excluded"] == [0]


def test_sampling_ahead_is_refused():
    with pytest.raises(ConfigurationError, match=r"rollout\.prefetch"):
        changed({"game.schedule": "simultaneous", "rollout.prefetch": {"kind": "fresh", "batches": 1}})


def test_updates_that_never_come_are_told():
    assert any("never updated" in line for line in changed(TURNS | {"game.schedule.every": 50}).warnings())
