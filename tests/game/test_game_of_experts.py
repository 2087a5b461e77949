"""A whole game whose prover is a mixture of experts: its routing is stored, handed to the trainer, and replayed."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from kill_drill import small_experiment

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from small_games import completed, prover_steps, state_of
from tiny_experts import CHOSEN, EXPERTS, LAYERS, tiny_experts

from pvg.config.experiment import Experiment
from pvg.config.load import build_experiment
from pvg.models.embedded_training import modchain_tokenizer
from pvg.records import Grade
from pvg.store.shards import RolloutShards, ShardInfo, routed_experts
from pvg.tasks.modchain import Modchain

pytestmark = pytest.mark.slow


def experiment_of_experts(folder: Path) -> Experiment:
    tokenizer = modchain_tokenizer()
    tiny_experts(vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    plain = small_experiment().plain()
    plain["models"]["prover"]["source"] = str(folder)
    plain["rollout"] |= {"max_tokens": 16}
    plain["game"] |= {"rounds": 1}
    plain["training"] |= {"router_replay": True, "minibatches": 2, "steps": 4, "learning_rate": 1e-3}
    plain["verifier"] |= {"steps": 2}
    return build_experiment(plain)


def test_the_experts_of_every_rollout_are_stored_and_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A random prover solves nothing: let some of what it writes pass, so that there are pairs and rewards.
    monkeypatch.setattr(Modchain, "grade", lambda _, problem, text: Grade(len(text) % 2 == 0, well_formed=True))
    experiment = experiment_of_experts(tmp_path / "prover")
    run = completed(experiment, tmp_path / "runs")
    state = state_of(run)
    shards = RolloutShards(run.path)
    for info in map(ShardInfo.from_plain, state["shards"]):
        mapped = routed_experts(shards.map(info))
        for rollout, experts in zip(shards.read(info), mapped, strict=True):
            assert experts is not None
            tokens = len(rollout.prompt_ids) + len(rollout.completion_ids) - 1
            assert experts.shape == (tokens, LAYERS, CHOSEN)
            assert experts.max() < EXPERTS
            assert np.array_equal(experts, rollout.routed_experts)
    steps = prover_steps(run)
    assert len(steps) == experiment.training.steps
    # The first minibatch's policy is the sampler's: every ratio is 1.
    assert steps[0]["ratio_max"] == pytest.approx(1.0, abs=1e-3)
