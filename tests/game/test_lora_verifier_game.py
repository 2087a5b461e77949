"""Rounds whose verifier is adapters, on the prover's own base where both name one model: what is saved, shared, resumed
and refused; and that adapters of one model never reach the forward pass of another, pipelined or not."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_games
import torch
from kill_drill import TINY_PROVER, differences, fingerprint, small_experiment
from small_games import completed, played, recorded, rows

from pvg.config.experiment import Experiment
from pvg.errors import ConfigurationError
from pvg.game.players import Players
from pvg.models import open_model
from pvg.models.adapters import attach_adapters
from pvg.models.heads import build_verifier
from pvg.store.checkpoints import read_checkpoint
from pvg.store.run_directory import RunDirectory
from pvg.tasks import open_task
from pvg.verifier.data import VerifierTemplate
from pvg.verifier.scorer import VerifierScorer

pytestmark = pytest.mark.slow

RANK = 4
ON_BASE = {"models.verifier": {"source": TINY_PROVER}}
BOTH = {"training.adapters": {"rank": RANK}, "verifier.adapters": {"rank": RANK}, **ON_BASE}
CPU = torch.device("cpu")


def changed(settings: dict[str, Any]) -> Experiment:
    small = {"verifier.steps": 5, "training.steps": 4, "game.test.problems": 4}
    quick = {"training.learning_rate": 1e-2, "verifier.learning_rate": 1e-2, "store.commit_every": 2}
    return small_games.changed({**small, **quick, **settings})


def isolated_scores(experiment: Experiment, run: RunDirectory) -> tuple[np.ndarray, np.ndarray, float]:
    """The scores of the prover's training as they were played, as the saved verifier gives them on weights that
    nobody else has, and how much they tell apart."""
    section = experiment.verifier
    with open_model(experiment.models.verifier, CPU, experiment.models.dtype) as base:
        model = attach_adapters(base, section.adapters.rank, section.adapters.alpha, seed=0)
        verifier = build_verifier(section, model)
        tensors, _ = read_checkpoint(run.weights, "round-000-verifier")
        verifier.load_trainable_state(tensors)
        template = VerifierTemplate(verifier.tokenizer, experiment.prompts.kind, section.head.kind)
        rollouts = [r for r in recorded(run) if "train_prover" in r.id]
        with ThreadPoolExecutor(1) as executor:
            scorer = VerifierScorer(
                verifier,
                template,
                verifier.version(),
                cache_entries=10_000,
                token_budget=section.micro_batch_tokens,
                executor=executor,
                prover_fingerprint=base.tokenizer.fingerprint,
            )
            found_N = asyncio.run(scorer.score(rollouts))
        verifier.close()
    told_N = np.array([r.score for r in rollouts], dtype=np.float32)
    return told_N, found_N, float(found_N.std())


@pytest.fixture
def bases(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The fingerprint of the base prover at the end of each game."""
    found: list[str] = []
    close = Players.close

    async def noting(players: Players) -> None:
        found.append(players.base.fingerprint())
        await close(players)

    monkeypatch.setattr(Players, "close", noting)
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished game of adapters on one base, prover and verifier taking turns."""
    root = tmp_path_factory.mktemp("whole")
    played(changed(BOTH), root)
    return root


def assert_isolated(experiment: Experiment, run: RunDirectory) -> None:
    """While the prover's adapters learnt, the verifier scored as alone."""
    told_N, found_N, spread = isolated_scores(experiment, run)
    assert spread > 1e-2
    assert told_N.tobytes() == found_N.tobytes()
    # The reference is the base without adapters: at first the policy itself, and then something else.
    kl = [row["metrics"]["kl"] for row in rows(run, "step") if row["phase"] == "train_prover"]
    assert abs(kl[0]) < 1e-6
    assert kl[-1] > 1e-4
    weights, _ = read_checkpoint(run.weights, "round-000-verifier")
    assert {name for name in weights if ".lora_" not in name} <= {"bias", "weight_D"}


def test_players_on_one_base_do_not_reach_into_each_other(whole: Path) -> None:
    assert_isolated(changed(BOTH), RunDirectory.open("drill", whole))


@pytest.mark.parametrize(
    "settings",
    [
        {"rollout.prefetch": {"kind": "fresh", "batches": 1}},
        {"verifier.head": "scalar", "verifier.loss": "cross_entropy"},
    ],
    ids=["pipelined", "scalar"],
)
def test_nor_do_they_pipelined_or_with_another_head(settings: dict[str, Any], tmp_path: Path, bases: list[str]) -> None:
    experiment = changed({**BOTH, **settings})
    assert_isolated(experiment, completed(experiment, tmp_path))
    with open_model(experiment.models.prover, CPU, experiment.models.dtype) as base:
        assert bases == [base.fingerprint()]


def test_the_base_is_in_memory_once_and_the_engine_has_its_own(tmp_path: Path) -> None:
    experiment = changed(BOTH)

    async def look() -> None:
        players = Players(experiment, open_task(experiment.task))
        try:
            await players.ready()
            from pvg.models.sources import open_learner

            verifier = await players.compute(players.open_verifier)
            learner = await players.compute(lambda: open_learner(players, 0))
            own = {id(p) for p in players.base.module.parameters()}
            assert {id(p) for p in verifier.start.parameters()} == own  # type: ignore[attr-defined]
            for module in (verifier.backbone, learner.module):
                assert module is not None
                assert {id(p) for n, p in module.named_parameters() if ".lora_" not in n} == own
            sampler = players.engine._model.module  # type: ignore[attr-defined]
            shared = {p.untyped_storage().data_ptr() for p in players.base.module.parameters()}
            assert not shared & {p.untyped_storage().data_ptr() for p in sampler.parameters()}
            learner.close()
            verifier.close()
            starts = [players.open_verifier(*place) for place in ((0, 0), (0, 0), (1, 0), (0, 1))]
            assert len({one.version() for one in starts}) == 3  # each round and each member begins elsewhere
            for one in starts:
                one.close()
        finally:
            await players.close()

    asyncio.run(look())


def test_verifiers_of_another_model_carry_adapters_too(tmp_path: Path) -> None:
    """An ensemble of adapters on the verifier's own model, below which the prover's weights are all trained."""
    settings = {
        "verifier.adapters": {"rank": RANK},
        "verifier.ensemble": {"kind": "min", "size": 2},
        "verifier.steps": 2,
    }
    run = completed(changed({**settings, "training.steps": 1}), tmp_path)
    members = [read_checkpoint(run.weights, f"round-000-verifier-member-{k}")[0] for k in (0, 1)]
    for name, tensor in members[0].items():
        assert name == "bias" or (".lora_" in name and not torch.equal(tensor, members[1][name]))
    prover, _ = read_checkpoint(run.weights, "round-000-prover")
    with open_model(small_experiment().models.prover, CPU) as base:
        assert not any(torch.equal(tensor, prover[name]) for name, tensor in base.weights().items())


def test_stopped_in_both_trainings_it_ends_like_the_uninterrupted_run(whole: Path, tmp_path: Path) -> None:
    experiment = changed(BOTH)
    played(experiment, tmp_path, stop_at=("train_verifier", 4))
    played(experiment, tmp_path, stop_at=("train_prover", 3), resume=True)
    played(experiment, tmp_path, resume=True)
    assert differences(fingerprint(tmp_path), fingerprint(whole)) == []


def test_frozen_weights_may_be_bfloat16(tmp_path: Path) -> None:
    few = {"training.steps": 1, "verifier.steps": 2}
    experiment = changed({**BOTH, "models.dtype": "bfloat16", **few})
    run = completed(experiment, tmp_path)
    verifier, _ = read_checkpoint(run.weights, "round-000-verifier")
    adapter, _ = read_checkpoint(run.weights, "round-000-prover-adapter")
    assert {t.dtype for t in [*verifier.values(), *adapter.values()]} == {torch.float32}
    told_N, found_N, _ = isolated_scores(experiment, run)
    assert told_N.tobytes() == found_N.tobytes()


def test_what_adapters_cannot_do_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"verifier\.adapters\.rank = 1000 is larger than"):
        played(changed({**BOTH, "verifier.adapters": {"rank": 1000}}), tmp_path)
    assert not (tmp_path / "drill" / "state.json").exists()
    serving = {"serving.verifier_servers": ["http://127.0.0.1:1"]}
    with pytest.raises(ConfigurationError, match=r"verifier\.adapters\.rank cannot be served"):
        changed({**BOTH, **serving, "verifier.engine": "vllm"})
