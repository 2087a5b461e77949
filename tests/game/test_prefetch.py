"""Whole games whose rollouts are sampled ahead: within the staleness budget, recorded once, resumed, ended cleanly."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import current_thread
from threading import enumerate as enumerate_threads
from typing import Any

import numpy as np
import pytest
from kill_drill import TINY_PROVER
from made_groups import made_group
from small_games import changed, played, prover_rows, state_of, trained_on

from pvg.config.experiment import Experiment
from pvg.config.load import build_experiment
from pvg.config.rollout import SamplingAhead
from pvg.config.training import ModelSection
from pvg.errors import ConfigurationError, StateError
from pvg.game.players import Players
from pvg.game.prefetch import AdmissionGate, Prefetcher, RoleQueue, WhenScored
from pvg.game.roles import TAGS
from pvg.models import open_model, pick_device
from pvg.records import Float32, Group, Problem, Role, Rollout
from pvg.rollout.dispatcher import GroupOrder
from pvg.rollout.engine import Completion, GenerationRequest
from pvg.rollout.torch_engine import TorchEngine
from pvg.store.run_directory import RunDirectory
from pvg.tasks import open_task
from pvg.workers.frames import Frame
from pvg.workers.pool import WorkerPool

pytestmark = pytest.mark.slow

# Little of everything but the prover's training.
AHEAD = {
    "rollout.prefetch": {"kind": "fresh", "batches": 1},
    "verifier.steps": 2,
    "game.mint_problems": 12,
    "game.test.problems": 4,
}
STEPS, GROUPS, SIZE = 7, 4, 4  # of the drill's experiment
ON_BASE = {"verifier.adapters": {"rank": 2}, "models.verifier": {"source": TINY_PROVER}}


def assert_recorded_once(run: RunDirectory, steps: int = STEPS) -> None:
    """Every batch is whole and numbered as such, has the roles of the synchronous game, and no rollout comes twice."""
    kept = trained_on(run)
    assert Counter((r.step, r.role) for r in kept) == {(s, r): GROUPS * SIZE // 2 for s in range(steps) for r in Role}
    assert Counter(r.step for r in kept) == dict.fromkeys(range(steps), GROUPS * SIZE)
    assert Counter((r.step, r.group) for r in kept) == {(s, g): SIZE for s in range(steps) for g in range(GROUPS)}
    assert len({r.id for r in kept}) == len(kept)
    for r in kept:
        assert len({o.problem_id for o in kept if (o.step, o.group) == (r.step, r.group)}) == 1
    assert all(r.score is not None and r.reward is not None and r.verifier_version for r in kept)


@pytest.mark.parametrize(
    ("settings", "budget"),
    [
        ({}, 2),
        ({"rollout.prefetch": {"kind": "old"}, "rollout.max_staleness": 1, "training.importance": "decoupled"}, 1),
        (
            {
                "rollout.prefetch": {"kind": "fresh", "batches": 2},
                "training.minibatches": 2,
                "training.steps": 14,
                "training.importance": "decoupled",
                "rollout.deadline": {"kind": "cut", "seconds": 60.0},  # no rollout misses it
            },
            3,
        ),
        ({"training.loss": "spo", "game.reward": "cgc", "training.importance": "decoupled"}, 2),
    ],
    ids=["plain", "decoupled", "minibatches", "spo"],
)
def test_a_game_plays_to_the_end_within_the_budget(settings: dict[str, Any], budget: int, tmp_path: Path) -> None:
    experiment = changed({**AHEAD, **settings})
    assert experiment.rollout.staleness_budget == budget
    outcome, run = played(experiment, tmp_path)
    assert outcome.status == "complete"
    assert_recorded_once(run)
    # In the one step of a batch, its own forward pass computes the log-probs at batch start.
    again = any("recompute" in step["budget"] for step in prover_rows(run))
    assert again == (experiment.training.importance == "decoupled" and experiment.training.minibatches > 1)
    metrics = [step["metrics"] for step in prover_rows(run) if "rollouts" in step["metrics"]]  # a batch's first steps
    assert all(0.0 <= found["staleness"] <= found["staleness_max"] <= budget for found in metrics)
    assert max(found["staleness_max"] for found in metrics) >= 1.0  # rollouts were sampled ahead
    for found in metrics:
        aged = found["staleness_in_flight"] + found["staleness_in_queue"]
        assert aged == pytest.approx(found["staleness"])
        lost = found["stale_cancelled"] + found["stale_on_arrival"] + found["stale_waiting"]
        assert found["dropped_stale"] == lost
        decoupled = experiment.training.importance == "decoupled"
        assert ("start_ratio_mean" in found) == (decoupled and found["staleness_max"] > 0.0)
        assert found["rollouts"] == GROUPS * SIZE
        assert 0.0 <= found["cache_hit_rate"] <= 1.0
    assert_budgets_close(prover_rows(run))


def assert_budgets_close(steps: list[dict[str, Any]]) -> None:
    """What the trainer waited for is exposed; what was done meanwhile is busy."""
    busy = Counter[str]()
    for step in steps:
        exposed = step["budget"]
        assert "wait_for_rollouts" in exposed
        assert not exposed.keys() & {"decode", "prefill"}  # "grade" runs on the event loop, also between two waits
        assert min(exposed.values()) > -1e-6
        busy.update(step["busy"])
    assert min(busy["decode"], busy["rollout"], busy["grade"]) > 0.0


@pytest.mark.drill
def test_a_game_with_workers_that_only_train_survives_kills_of_both_kinds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The duties are divided only while the prover trains."""
    cluster = {"kind": "local", "workers": 2, "trainers": 1}
    experiment = changed({**AHEAD, "cluster": cluster, "models.device": "cpu"})
    submit, kinds, seen = WorkerPool.submit, set[tuple[int, str]](), Counter[str]()

    def killing(pool: WorkerPool, place: int, frame: Frame, parts: Any = None) -> Any:
        future = submit(pool, place, frame, parts)
        if divided := pool.training != pool.sampling:
            seen[frame.kind] += 1
        kinds.add((place, f"{frame.kind}{' divided' if divided else ''}"))
        member = pool._shards[place].worker.member
        if divided and frame.kind in ("generate", "gradient") and seen[frame.kind] in (2, 5) and member is not None:
            os.kill(member.pid, signal.SIGKILL)
        return future

    monkeypatch.setattr(WorkerPool, "submit", killing)
    outcome, run = played(experiment, tmp_path)
    assert outcome.status == "complete"
    assert_recorded_once(run)
    assert len([line for line in run.events.read_text().splitlines() if "event=lost" in line]) == 4
    state = state_of(run)
    assert state["machine"].endswith(", 2 workers, 1 trainer")  # results depend on both numbers
    for kind, places in (("generate", {0}), ("score", {0}), ("gradient", {1})):
        assert {place for place, asked in kinds if asked == f"{kind} divided"} == places
        assert {place for place, asked in kinds if asked == kind} == {0, 1}  # mint, verifier, evaluation


@pytest.mark.parametrize(
    ("settings", "cores", "thread"),
    [
        ({"rollout.prefetch": {"kind": "fresh", "batches": 1}, "models.threads": 1}, 2, True),
        ({"rollout.prefetch": {"kind": "fresh", "batches": 1}, "models.threads": 2}, 2, False),
        ({"rollout.prefetch": "none", "models.threads": 1}, 2, False),
        ({**ON_BASE, "rollout.prefetch": {"kind": "fresh", "batches": 1}, "models.threads": 1}, 2, False),
    ],
    ids=["ahead", "no core free", "synchronous", "on the base's weights"],
)
def test_scores_have_a_thread_where_a_core_is_free(
    settings: dict[str, Any], cores: int, thread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pvg.game.players.usable_cores", lambda: cores)
    experiment = changed(settings)

    async def threads_of_scores() -> set[str]:
        players = Players(experiment, open_task(experiment.task))
        verifier = await players.compute(players.open_verifier)
        seen = set[str]()

        async def scored(beside_trainer: bool) -> None:
            scorer = players.scorer(verifier, beside_trainer=beside_trainer)
            forward = scorer._backend.forward  # type: ignore[attr-defined]
            scorer._backend.forward = lambda inputs: seen.add(current_thread().name) or forward(inputs)  # type: ignore[attr-defined]
            await scorer.score(two_rollouts("a").rollouts)

        try:
            await scored(beside_trainer=False)
            assert all("score" not in name for name in seen)
            await scored(beside_trainer=True)
            return seen
        finally:
            await players.compute(verifier.close)
            await players.close()
            assert not any(thread.name.startswith("pvg-score") for thread in enumerate_threads())

    assert any("pvg-score" in name for name in asyncio.run(threads_of_scores())) == thread


def two_rollouts(name: str) -> Group:
    return made_group(name, [[0], [0]], tokens=2)


def ordered(batch: int, place: int, role: Role) -> GroupOrder:
    return GroupOrder(Problem(f"{batch}-{place}", "1+1?", "2"), role, np.zeros(2, dtype=np.int32), place, SIZE)


def test_each_role_has_its_groups_of_the_synchronous_batches_in_order_and_goes_on_where_it_was() -> None:
    batches = [[Role.SNEAKY, Role.HELPFUL, Role.SNEAKY], [Role.HELPFUL] * 3, [Role.HELPFUL, Role.SNEAKY, Role.SNEAKY]]

    class Orders:
        def batch(self, number: int, of: Role) -> list[GroupOrder]:
            return [ordered(number, place, of) for place, role in enumerate(batches[number % 3]) if role is of]

    def popped(role: Role, count: int, started: int = 0) -> list[str]:
        queue = RoleQueue(Orders(), role, 3, started)  # type: ignore[arg-type]
        found = [queue.pop()[1].problem.id for _ in range(count)]
        begun_after.append(queue.started)
        return found

    begun_after: list[int] = []
    assert popped(Role.SNEAKY, 5) == ["0-0", "0-2", "2-1", "2-2", "3-0"]
    assert popped(Role.SNEAKY, 3) == ["0-0", "0-2", "2-1"]
    assert popped(Role.SNEAKY, 2, started=begun_after[-1]) == ["2-2", "3-0"]
    assert popped(Role.HELPFUL, 4) == ["0-1", "1-0", "1-1", "1-2"]
    assert begun_after == [10, 8, 10, 6]


class Scorer:
    version = "frozen"

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    @property
    def asked(self) -> list[str]:
        return [name for call in self.calls for name in call]

    async def score(self, rollouts: Sequence[Rollout]) -> Float32:
        self.calls.append([rollout.id for rollout in rollouts])
        return np.arange(len(rollouts), dtype=np.float32)

    async def drop(self) -> None: ...


class Orders:
    """The groups of every batch are helpful and come at once."""

    groups, size = GROUPS, SIZE

    def roles(self, number: int) -> list[Role]:
        return [Role.HELPFUL] * GROUPS

    def batch(self, number: int, of: Role) -> list[GroupOrder]:
        return [ordered(number, place, of) for place in range(GROUPS)]

    async def sample(self, orders: list[GroupOrder], number: int, gate: AdmissionGate) -> list[Group]:
        async with gate:
            return [two_rollouts(order.problem.id) for order in orders]


async def first_batch(scorer: Scorer, scored: WhenScored, *, starved: bool) -> tuple[list[Group], dict[str, float]]:
    rollout = changed(AHEAD).rollout
    assert isinstance(rollout.prefetch, SamplingAhead)
    limits = {"budget": rollout.staleness_budget, "concurrency": rollout.concurrency}
    prefetcher = Prefetcher(Orders(), scorer, rollout.prefetch, scored=scored, **limits)  # type: ignore[arg-type]
    prefetcher.start(version=0, batch=0, batches=9)
    for _ in range(0 if starved else 50):  # time for the groups to come before anybody asks for them
        await asyncio.sleep(0)
    try:
        return await prefetcher.batch(5)
    finally:
        await prefetcher.close()


@pytest.mark.parametrize(("scored", "starved"), [("batch", False), ("batch", True), ("arrival", False)])
def test_what_comes_is_scored_at_once_where_that_holds_up_nobody(scored: WhenScored, starved: bool) -> None:
    scorer, at_once = Scorer(), starved or scored == "arrival"
    groups, metrics = asyncio.run(first_batch(scorer, scored, starved=starved))
    assert [group.problem.id for group in groups] == [f"0-{place}" for place in range(GROUPS)]
    assert [(r.step, r.group) for group in groups for r in group.rollouts[:1]] == [(5, p) for p in range(GROUPS)]
    scores = {(r.score, r.verifier_version) for group in groups for r in group.rollouts}
    assert scores == ({(0.0, "frozen"), (1.0, "frozen")} if at_once else {(None, None)})
    assert metrics["dropped_stale"] == 0.0
    assert (len(scorer.asked) >= 2 * GROUPS) == at_once


def test_ages_and_losses_of_three_batches_by_hand() -> None:
    """Versions of the groups in the order of their start; None comes never. Each has two rollouts of four tokens."""
    versions = iter([1, None, 2, 2, 2, 3, 3, 3, 2, 4, 3, 4, 3, 4, None, 4, 4, *[5] * 6, 6, 4, 6])

    class Aged(Orders):
        def roles(self, number: int) -> list[Role]:
            assert number > 0, "batch 1 is the first one"
            return super().roles(number)

        async def sample(self, orders: list[GroupOrder], number: int, gate: AdmissionGate) -> list[Group]:
            async with gate:
                if (version := next(versions)) is None:
                    await asyncio.Event().wait()
                return [made_group(order.problem.id, [[version]] * 2) for order in orders]

    async def turns() -> None:
        for _ in range(200):  # whatever can come has come
            await asyncio.sleep(0)

    async def play() -> list[dict[str, float]]:
        ahead = SamplingAhead(kind="old", batches=1)
        how: dict[str, Any] = {"budget": 1, "concurrency": 99, "scored": "batch"}
        prefetcher, again = (Prefetcher(Aged(), Scorer(), ahead, **how) for _ in range(2))  # type: ignore[arg-type]
        prefetcher.start(version=3, batch=1, batches=3)
        found = []
        for version in (4, 5, 6):
            await turns()
            for _ in range(2):  # the second time changes nothing
                prefetcher.published(version)
            await turns()
            found.append((await asyncio.wait_for(prefetcher.batch(version), 60.0))[1])
        await prefetcher.close()
        assert len(asyncio.all_tasks()) == 1  # nothing is left running
        with pytest.raises(ValueError, match="version 5 after 6"):
            prefetcher.published(5)
        # 8 were ordered at first, then 1, 4, 4, 2, 4 and 3 for those that were dropped or taken.
        assert prefetcher.state() == {"helpful": 26, "sneaky": 0}
        assert again.load_state(prefetcher.state()) == 0
        assert again.state() == prefetcher.state()
        return found

    first, second, third = asyncio.run(play())
    # Version 3: the first group is too old and replaced by a 2. Version 4: four of version 2 are, by 4, 3, 4, 3. Taken
    # are the oldest, three that waited since version 3 and one 3 that came now. 4, 4, 3 wait, and the one without end.
    assert first == {
        "staleness_in_flight": 0.25,
        "staleness_in_queue": 0.75,
        "groups_in_flight": 1.0,
        "groups_waiting": 3.0,
        "dropped_stale": 10.0,
        "stale_cancelled": 0.0,
        "stale_on_arrival": 2.0,
        "stale_waiting": 8.0,
        "stale_tokens": 40.0,
    }
    # Version 5: the one without end is cancelled (four ordered rollouts), the waiting 3 dropped. Taken are four 4s. 4,
    # 5, 5 wait, and the second one without end.
    assert second == {
        "staleness_in_flight": 0.0,
        "staleness_in_queue": 1.0,
        "groups_in_flight": 1.0,
        "groups_waiting": 3.0,
        "dropped_stale": 6.0,
        "stale_cancelled": 4.0,
        "stale_on_arrival": 0.0,
        "stale_waiting": 2.0,
        "stale_tokens": 8.0,
    }
    # Version 6: the second one without end, the waiting 4, and a 4 that comes now. Taken are four of six 5s.
    assert third == {
        "staleness_in_flight": 0.0,
        "staleness_in_queue": 1.0,
        "groups_in_flight": 0.0,
        "groups_waiting": 4.0,
        "dropped_stale": 8.0,
        "stale_cancelled": 4.0,
        "stale_on_arrival": 2.0,
        "stale_waiting": 2.0,
        "stale_tokens": 16.0,
    }


def test_the_thread_beside_the_trainers_scores_several_groups_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pvg.game.prefetch.SCORED_TOGETHER", 6)  # three of these groups of two
    scorer = Scorer()
    asyncio.run(first_batch(scorer, "background", starved=False))
    assert [len(asked) for asked in scorer.calls[:2]] == [6, 6]  # of eight groups; the last two wait for a third
    scorer = Scorer()
    asyncio.run(first_batch(scorer, "background", starved=True))
    assert [len(asked) for asked in scorer.calls[:2]] == [2, 2]  # the trainer waits


def test_a_score_ahead_that_fails_ends_the_next_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pvg.game.prefetch.SCORED_TOGETHER", 2)

    class Failing(Scorer):
        async def score(self, rollouts: Sequence[Rollout]) -> Float32:
            raise StateError("the verifier has diverged")

    with pytest.raises(StateError, match="the verifier has diverged"):
        asyncio.run(first_batch(Failing(), "background", starved=False))


def test_scores_ahead_that_have_not_begun_are_given_up_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """`VerifierScorer.drop` does not know of a call whose input is still being made."""
    monkeypatch.setattr("pvg.game.prefetch.SCORED_TOGETHER", 2)

    asked, given_up, ended = [], [], []

    class Reading(Scorer):
        async def score(self, rollouts: Sequence[Rollout]) -> Float32:
            asked.append(len(rollouts))
            try:
                await asyncio.Event().wait()
            finally:
                given_up.append(len(rollouts))
            raise AssertionError("never")

        async def drop(self) -> None:
            ended.extend(given_up)

    asyncio.run(asyncio.wait_for(first_batch(Reading(), "background", starved=False), 60.0))
    assert asked == ended != []


@pytest.mark.parametrize(
    "settings", [{}, {"training.minibatches": 2, "training.steps": 2 * STEPS - 1}], ids=["one step", "minibatches"]
)
def test_nothing_is_begun_after_the_last_batch(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[dict[str, int]] = []
    close = Prefetcher.close

    async def noting(self: Prefetcher) -> None:
        closed.append(self.state())
        await close(self)

    monkeypatch.setattr(Prefetcher, "close", noting)
    # No rollout grows too old: what is begun beyond the last batch is what made sure that it waits for no straggler.
    played(changed({**AHEAD, **settings, "rollout.max_staleness": 99}), tmp_path)
    assert sorted(closed[0].values()) == [(STEPS + 1) * GROUPS - 1, (STEPS + 1) * GROUPS]


@pytest.mark.drill
def test_stopped_and_resumed_it_loses_no_committed_rollout_and_repeats_none(tmp_path: Path) -> None:
    experiment = changed(AHEAD)
    outcome, run = played(experiment, tmp_path, stop_at=("train_prover", 5))
    assert outcome.status == "interrupted"
    before = trained_on(run)
    assert Counter(r.step for r in before) == dict.fromkeys(range(4), GROUPS * SIZE)
    state = state_of(run)
    begun = state["progress"]["batches"]["groups"]
    assert min(begun.values()) > 4 * GROUPS  # some were on their way, and are lost
    outcome, run = played(experiment, tmp_path, resume=True)
    assert outcome.status == "complete"
    assert_recorded_once(run)
    after = trained_on(run)
    assert [r.id for r in after[: len(before)]] == [r.id for r in before]
    assert all(order_of(r) >= begun[r.role] for r in after[len(before) :])


def order_of(rollout: Rollout) -> int:
    _, _, batch, group, _ = rollout.id.split("/")
    return int(batch) * GROUPS + int(group)


def role_counts(run: RunDirectory) -> dict[int, Counter[Role]]:
    """The rollouts of each role, by step."""
    kept = trained_on(run)
    return {step: Counter(r.role for r in kept if r.step == step) for step in range(STEPS)}


def test_a_role_that_writes_shorter_solutions_does_not_fill_the_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The helpful role's completions are cut after 2 tokens, the other's have up to 40: the engine finishes the short
    ones first. A synchronous batch has one or two sneaky groups of four, as its number says."""
    settings = {**AHEAD, "game.sneaky_share": 0.4}
    _, synchronous = played(changed({**settings, "rollout.prefetch": "none"}), tmp_path / "synchronous")
    with open_model(ModelSection(source="embedded:modchain-prover"), pick_device("cpu")) as model:
        (tag,) = model.tokenizer.encode(TAGS[Role.HELPFUL])
    generate = TorchEngine.generate

    async def cut(self: TorchEngine, request: GenerationRequest) -> Completion:
        if request.prompt_ids[0] == tag and "train_prover" in request.id:
            request = replace(request, sampling=replace(request.sampling, max_tokens=2))
        return await generate(self, request)

    monkeypatch.setattr(TorchEngine, "generate", cut)
    _, ahead = played(changed({**settings, "rollout.prefetch": {"kind": "fresh", "batches": 2}}), tmp_path / "ahead")
    assert role_counts(ahead) == role_counts(synchronous)
    assert {r.role for r in trained_on(ahead) if len(r.completion_ids) > 2} == {Role.SNEAKY}


def test_an_engine_that_fails_ends_the_run_with_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = TorchEngine.generate
    asked = Counter[str]()

    async def failing(self: TorchEngine, request: GenerationRequest) -> Completion:
        asked["prover"] += "train_prover" in request.id
        if asked["prover"] == 3 * GROUPS * SIZE:
            raise StateError("the engine has had enough")
        return await generate(self, request)

    monkeypatch.setattr(TorchEngine, "generate", failing)
    with pytest.raises(StateError, match="the engine has had enough"):
        played(changed(AHEAD), tmp_path)


def test_nothing_is_left_running_when_the_phase_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    close = TorchEngine.close

    async def noting(self: TorchEngine) -> None:
        left.append(self.requests_in_flight)
        left.append(sum("take" in str(task) or "_sample" in str(task) for task in asyncio.all_tasks()))
        await close(self)

    monkeypatch.setattr(TorchEngine, "close", noting)
    outcome, _ = played(changed({**AHEAD, "game.stop": "judge_decay"}), tmp_path)
    assert outcome.status == "complete"
    assert left == [0, 0]


def test_of_a_synchronous_game_nothing_is_stale_and_nothing_new_is_told(tmp_path: Path) -> None:
    _, run = played(changed({**AHEAD, "rollout.prefetch": "none", "training.importance": "decoupled"}), tmp_path)
    told = prover_rows(run)
    assert len(told) == STEPS
    for step in told:
        assert step["metrics"]["staleness_max"] == 0.0
        assert not {name for name in step["metrics"] if name.startswith(("stale_", "start_", "dropped_"))}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {
                "rollout.prefetch": {"kind": "fresh", "batches": 1},
                "training.loss": "spo",
                "game.reward": "cgc",
                "rollout.deadline": "cut",
            },
            "so a batch has no deadline",
        ),
        ({"training.importance": "decoupled", "rollout.logprobs": "recomputed"}, "needs the sampler's log-probs"),
        (
            {"rollout.prefetch": {"kind": "fresh", "batches": 2}, "rollout.logprobs": "recomputed"},
            "rollout.prefetch = 'fresh' trains on rollouts of older",
        ),
        ({"rollout.prefetch": {"kind": "fresh", "batches": 0}}, "rollout.prefetch.batches"),
        ({"rollout.max_staleness": 0}, "rollout.max_staleness"),
    ],
)
def test_what_cannot_work_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        changed(settings)


def warned(**sections: dict[str, Any]) -> list[str]:
    experiment: Experiment = build_experiment(sections)
    return [w for w in experiment.warnings() if "src" not in w]


def test_what_is_probably_not_meant_is_said() -> None:
    assert warned(rollout={"prefetch": "fresh", "engine": "vllm"}) == []
    (found,) = warned(rollout={"prefetch": "fresh"})
    assert "the thread that trains" in found
    (found,) = warned(training={"loss": "rloo", "importance": "none"}, rollout={"prefetch": "fresh", "engine": "vllm"})
    assert "has no ratio" in found


@pytest.mark.parametrize("stale", [{"prefetch": "fresh", "engine": "vllm"}, {"deadline": "continue"}])
def test_what_is_recommended_to_rloo_is_never_refused(stale: dict[str, Any]) -> None:
    # Where it would be, because no log-probs of the sampler are left to compare with, there is no such experiment.
    with pytest.raises(ConfigurationError, match="uses only the newest weights; set it to 'sampled'"):
        build_experiment({"training": {"loss": "rloo"}, "rollout": {**stale, "logprobs": "recomputed"}})
    (found,) = warned(training={"loss": "rloo", "importance": "none"}, rollout=stale)
    assert "set training.importance to 'decoupled'" in found
    assert warned(training={"loss": "rloo", "importance": "decoupled"}, rollout=stale) == []
