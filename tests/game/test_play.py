"""A whole small game through `play`, and what happens to it when files are damaged or the disk is full."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import orjson
import pytest
import torch
from full_disk import files_up_to
from kill_drill import play_experiment, read_manifests, small_experiment
from safetensors.torch import load
from small_games import recorded, state_of, told

from pvg.config.experiment import Experiment
from pvg.config.load import build_experiment
from pvg.errors import MissingRequirementError, StateError
from pvg.game.run import play
from pvg.records import Role
from pvg.store.run_directory import RunDirectory
from pvg.store.state import FileStateStore, JsonLinesReader
from pvg.tasks import open_task
from pvg.tasks.task import half_of
from pvg.telemetry.events import SilentObserver

pytestmark = pytest.mark.slow


def run_game(experiment: Experiment, root: Path, *, resume: bool = False, until: str = ""):
    """`until`: the phase that is stopped at its first progress, as by Ctrl-C."""
    outcome, run, notices = told(experiment, root, stop_at=(until, 2), resume=resume)
    return run, outcome, notices


def weights_of(run: RunDirectory) -> dict[str, bytes]:
    return {name: (run.weights / name / "tensors.safetensors").read_bytes() for name in state_of(run)["weights"]}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run, outcome, _ = run_game(small_experiment(), tmp_path_factory.mktemp("finished"))
    assert outcome.status == "complete"
    return run


def one_round_experiment() -> Experiment:
    data = small_experiment().plain()
    data["game"]["rounds"] = 1
    return build_experiment(data)


@pytest.fixture(scope="module")
def one_round(tmp_path_factory):
    run, outcome, _ = run_game(one_round_experiment(), tmp_path_factory.mktemp("one-round"))
    assert (outcome.status, len(outcome.rounds)) == ("complete", 1)
    return run


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The game of one round, stopped while the prover learnt."""
    run, outcome, _ = run_game(one_round_experiment(), tmp_path_factory.mktemp("stopped"), until="train_prover")
    assert outcome.status == "interrupted"
    return run


def copied(run: RunDirectory, root: Path) -> RunDirectory:
    shutil.copytree(run.path, root / "drill")
    return RunDirectory.open("drill", root)


def test_a_finished_game_leaves_what_the_design_promises(finished):
    state = state_of(finished)
    assert state["phase"] == "complete"
    assert [sorted(row) != [] for row in state["rounds"]] == [True, True]
    assert sorted(state["weights"]) == [f"round-00{r}-{who}" for r in (0, 1) for who in ("prover", "verifier")]
    manifests = sorted(path.name for path in finished.manifest.iterdir())
    assert len(manifests) == 8
    rows = [orjson.loads(line) for line in finished.metrics.read_bytes().splitlines()]
    assert {row["kind"] for row in rows} >= {"step", "phase", "round"}
    for row in rows:
        if row["kind"] == "step":
            assert all(seconds >= -1e-9 for seconds in row["budget"].values())
    assert {manifest.machine for manifest in read_manifests(finished)} == {state["machine"]}
    assert state["machine"].endswith(", 1 thread")
    assert finished.experiment() == small_experiment()


def test_prover_and_verifier_never_see_the_same_problem(finished):
    """Invariant 4, on what was really sampled: mint problems are the verifier's, training problems the prover's."""
    seen = {"mint": set(), "train_prover": set(), "evaluation": set()}
    for rollout in recorded(finished):
        seen[rollout.id.split("/")[1]].add(rollout.problem_id)
    assert all(seen.values())
    assert {half_of(problem) for problem in seen["mint"]} == {"verifier"}
    assert {half_of(problem) for problem in seen["train_prover"]} == {"prover"}
    test_problems = {p.id for p in open_task(small_experiment().task).problems("test")}
    assert seen["evaluation"] <= test_problems
    assert not test_problems & (seen["mint"] | seen["train_prover"])


def test_rollouts_carry_everything_for_life(finished):
    for rollout in recorded(finished):
        assert len(rollout.logprobs) == len(rollout.completion_ids) > 0
        assert (rollout.logprobs <= 0).all()
        assert rollout.spans[0].start == 0
        if "/train_prover/" in rollout.id:
            assert rollout.score is not None
            assert rollout.reward is not None
            assert rollout.verifier_version
    roles = [r.role for r in recorded(finished) if "/mint/" in r.id]
    assert roles.count(Role.SNEAKY) == roles.count(Role.HELPFUL)


@pytest.mark.parametrize("phase", ["mint", "train_verifier"])
def test_ctrl_c_in_a_phase_stops_committed_and_resumes_to_the_same_weights(phase, one_round, tmp_path):
    run, outcome, _ = run_game(one_round_experiment(), tmp_path, until=phase)
    assert outcome.status == "interrupted"
    run, outcome, _ = run_game(one_round_experiment(), tmp_path, resume=True)
    assert outcome.status == "complete"
    assert weights_of(run) == weights_of(one_round)


def test_ctrl_c_at_the_end_of_a_round_resumes_to_the_same_weights_in_the_next_one(finished, tmp_path):
    run, outcome, _ = run_game(small_experiment(), tmp_path, until="checkpoint")
    assert outcome.status == "interrupted"
    run, outcome, _ = run_game(small_experiment(), tmp_path, resume=True)
    assert outcome.status == "complete"
    assert weights_of(run) == weights_of(finished)


def test_a_played_run_is_neither_played_again_nor_resumed_under_another_configuration(finished, tmp_path):
    run = copied(finished, tmp_path)
    stop = asyncio.Event()
    with run.lock(), pytest.raises(StateError, match="already begun"):
        asyncio.run(play(small_experiment(), run, observer=SilentObserver(), stop=stop, resume=False))
    data = small_experiment().plain()
    data["training"]["kl"]["coefficient"] = 0.5
    changed = build_experiment(data)
    with run.lock(), pytest.raises(StateError, match=r"training\.kl\.coefficient: .* -> 0\.5"):
        asyncio.run(play(changed, run, observer=SilentObserver(), stop=stop, resume=True))
    data = small_experiment().plain()
    data["rollout"]["engine"]["max_rows"] //= 2
    with run.lock(), pytest.raises(StateError, match=r"max_rows"):
        asyncio.run(play(build_experiment(data), run, observer=SilentObserver(), stop=stop, resume=True))


def test_a_run_goes_on_with_smaller_micro_batches_and_learns_the_same(stopped, one_round, tmp_path):
    copied(stopped, tmp_path)
    data = one_round_experiment().plain()
    data["training"] |= {"micro_batch_tokens": 128, "gradient_checkpointing": True}
    data["verifier"] |= {"micro_batch_tokens": 128}
    run, outcome, notices = run_game(build_experiment(data), tmp_path, resume=True)
    assert outcome.status == "complete"
    (notice,) = (text for text in notices if "The last bits of the weights may change" in text)
    for key in ("training.micro_batch_tokens", "training.gradient_checkpointing", "verifier.micro_batch_tokens"):
        assert key in notice
    (line,) = (line for line in run.events.read_text().splitlines() if "event=settings" in line)
    assert "verifier.micro_batch_tokens" in line
    steps = [row for row in JsonLinesReader(run.metrics) if row["kind"] == "step" and row["phase"] == "train_prover"]
    assert steps[-1]["metrics"]["micro_batches"] > steps[0]["metrics"]["micro_batches"]
    assert state_of(run)["config"] == state_of(one_round)["config"]
    undisturbed = weights_of(one_round)
    for name, tensors in weights_of(run).items():
        expected = load(undisturbed[name])
        for key, tensor in load(tensors).items():
            assert torch.allclose(tensor, expected[key], rtol=0, atol=1e-4), (name, key)


def test_a_run_that_gets_another_round_ends_like_one_that_was_planned_with_it(one_round, finished, tmp_path):
    copied(one_round, tmp_path)
    smaller = small_experiment().plain()
    smaller["verifier"] |= {"micro_batch_tokens": 128}
    for until, experiment in (("mint", build_experiment(smaller)), ("train_prover", small_experiment())):
        run, outcome, _ = run_game(experiment, tmp_path, resume=True, until=until)
        assert outcome.status == "interrupted"
        state, planned = state_of(run), state_of(finished)
        assert (state["config"], state["config_hash"]) == (planned["config"], planned["config_hash"])
    run, outcome, _ = run_game(small_experiment(), tmp_path, resume=True)
    assert (outcome.status, len(outcome.rounds)) == ("complete", 2)
    assert weights_of(run) == weights_of(finished)


def test_self_play_gets_another_round_too(tmp_path):
    data = play_experiment().plain()
    planned, _, _ = run_game(build_experiment(data), tmp_path / "planned")
    data["game"]["rounds"] = 1
    _, outcome, _ = run_game(build_experiment(data), tmp_path / "longer")
    assert outcome.status == "complete"
    longer, outcome, _ = run_game(play_experiment(), tmp_path / "longer", resume=True)
    assert (outcome.status, len(outcome.rounds)) == ("complete", 2)
    assert weights_of(longer) == weights_of(planned)


def test_a_damaged_last_shard_is_noticed_and_sampled_again(stopped, one_round, tmp_path):
    run = copied(stopped, tmp_path)
    last = run.path / state_of(run)["shards"][-1]["path"]
    data = bytearray(last.read_bytes())
    data[len(data) // 2] ^= 0xFF
    last.write_bytes(data)
    run, outcome, notices = run_game(one_round_experiment(), tmp_path, resume=True)
    assert outcome.status == "complete"
    assert any(last.name in notice for notice in notices)
    assert weights_of(run) == weights_of(one_round)
    ids = [r.id for r in recorded(run)]
    assert ids == [r.id for r in recorded(one_round)]


def test_a_half_written_state_falls_back_to_the_commit_before(stopped, one_round, tmp_path):
    run = copied(stopped, tmp_path)
    run.state.write_bytes(run.state.read_bytes()[:200])
    run, outcome, notices = run_game(one_round_experiment(), tmp_path, resume=True)
    assert outcome.status == "complete"
    assert any("previous commit" in notice for notice in notices)
    assert weights_of(run) == weights_of(one_round)


def test_a_full_disk_stops_the_run_with_nothing_committed_lost(one_round, tmp_path):
    """Files may grow to 100 kB and no further, which no checkpoint fits: the first commit of a trainer fails."""
    with files_up_to(100_000), pytest.raises(MissingRequirementError, match="disk is full"):
        run_game(one_round_experiment(), tmp_path)
    run = RunDirectory.open("drill", tmp_path)
    assert state_of(run)["phase"] == "train_verifier"
    assert len(recorded(run)) == 96
    run, outcome, _ = run_game(one_round_experiment(), tmp_path, resume=True)
    assert outcome.status == "complete"
    assert weights_of(run) == weights_of(one_round)


def test_a_run_that_goes_on_with_other_threads_or_another_torch_says_so(stopped, one_round, tmp_path):
    """And Ctrl-C while the prover learns changes no weight: the threads are the same here."""
    run = copied(stopped, tmp_path)
    store = FileStateStore(run.state)
    state = state_of(run)
    assert state["machine"].endswith(", 1 thread")
    store.save({**state, "machine": "torch 1.0 on cpu, 64 threads"})
    run, outcome, notices = run_game(one_round_experiment(), tmp_path, resume=True)
    assert outcome.status == "complete"
    assert any("64 threads" in notice and "last bits" in notice for notice in notices)
    assert state_of(run)["machine"] == state["machine"]
    assert weights_of(run) == weights_of(one_round)
