"""Games off the beaten track: settings at their limits play to the end, and what cannot work is refused at once."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from kill_drill import TINY_PROVER, differences, fingerprint, read_manifests
from rich.console import Console
from small_games import changed, first_kl, played, prover_steps, rows, state_of

from pvg.config.training import ModelSection
from pvg.errors import ConfigurationError, PvgError
from pvg.models import open_model
from pvg.reporting.run_summary import read_run
from pvg.reporting.terminal import closing
from pvg.store.shards import RolloutShards
from pvg.telemetry.catalogue import REMEDIES

pytestmark = pytest.mark.slow

PHASES = ["mint", "train_verifier", "train_prover", "checkpoint"]


# Nothing but the same answer, right or wrong, to each problem: no group with a signal, no problem with both kinds.
ONE_ANSWER = {
    "rollout.temperature": 0.001,
    "rollout.max_tokens": 26,
    "task.max_terms": 4,  # the prover has seen chains of three only
    "game.reward": "correctness",
    "game.sneaky_share": 0.0,
    "game.mint_samples": 2,
    "game.mint_problems": 48,
}

BY_PROBLEM = {"verifier.pairing": "problem", "verifier.pairs": 16}

# Played by a test of what it tells.
NO_SIGNAL_AND_NO_PAIRS = {"training.loss": "dapo", "verifier.loss": "cross_entropy", **ONE_ANSWER}
LIMITS: dict[str, dict[str, Any]] = {
    "no prover step": {"training.steps": 0, "game.rounds": 2},
    "the last step ends within a batch": {"training.minibatches": 2, "training.steps": 5, "game.rounds": 2},
    "one role": {"game.reward": "goodhart", "game.sneaky_share": 0.0},
    "recomputed log-probs": {"rollout.logprobs": "recomputed"},
    "by problem, and no pairs": {"verifier.loss": "cross_entropy", **BY_PROBLEM, **ONE_ANSWER},
}


@pytest.mark.parametrize("settings", LIMITS.values(), ids=LIMITS.keys())
def test_settings_at_their_limits_play_to_the_end(settings: dict[str, Any], tmp_path: Path) -> None:
    experiment = changed(settings)
    outcome, run = played(experiment, tmp_path)
    assert outcome.status == "complete"
    assert len(outcome.rounds) == experiment.game.rounds
    assert [m.phase for m in read_manifests(run)] == PHASES * experiment.game.rounds


def test_batches_without_a_signal_and_problems_without_pairs_are_told_of(tmp_path: Path) -> None:
    outcome, run = played(changed({**NO_SIGNAL_AND_NO_PAIRS, "verifier.held_out": 0.0}), tmp_path)
    assert (outcome.status, [m.phase for m in read_manifests(run)]) == ("complete", PHASES)
    prover = prover_steps(run)
    assert any(metrics.get("skipped") == 1.0 and "loss" not in metrics for metrics in prover)
    verifier = [row["metrics"] for row in rows(run, "step") if row["phase"] == "train_verifier"]
    assert len(verifier) == 7
    names = {row["name"] for row in rows(run, "alert")}
    assert {"calibration", "unpaired", "zero_signal"} <= names
    assert "source_excluded" not in names
    shown = io.StringIO()
    Console(file=shown, width=1000).print(closing(read_run(run), {"pvg report drill": "the same again"}))
    assert [name for name in names if shown.getvalue().count(REMEDIES[name]) != 1] == []  # what to do is said once


def test_a_round_starts_from_the_base_prover_or_from_the_previous_one(tmp_path: Path) -> None:
    settings = {"game.rounds": 2, "training.steps": 3, "training.learning_rate": 1e-3}
    _, from_base = played(changed(settings), tmp_path / "base")
    _, from_previous = played(changed({**settings, "game.start": "previous"}), tmp_path / "previous")
    assert first_kl(from_base) == pytest.approx([0.0, 0.0], abs=1e-6)
    assert first_kl(from_previous)[0] == pytest.approx(0.0, abs=1e-6)
    assert first_kl(from_previous)[1] > 1e-4
    before, after = (read_manifests(run)[:4] for run in (from_base, from_previous))
    assert [manifest.phase for manifest in before] == [manifest.phase for manifest in after] == PHASES
    weights = [
        (run.weights / "round-000-prover" / "tensors.safetensors").read_bytes() for run in (from_base, from_previous)
    ]
    assert weights[0] == weights[1]


@pytest.mark.drill
def test_resumed_among_pairs_by_problem_a_run_ends_like_the_uninterrupted_one(tmp_path: Path) -> None:
    experiment = changed({**BY_PROBLEM, "verifier.micro_batch_tokens": 512, "training.steps": 2, "game.rounds": 1})
    _, whole = played(experiment, tmp_path / "whole")
    outcome, _ = played(experiment, tmp_path / "stopped", stop_at=("train_verifier", 4))
    assert outcome.status == "interrupted"
    played(experiment, tmp_path / "stopped", resume=True)
    assert differences(fingerprint(tmp_path / "stopped"), fingerprint(tmp_path / "whole")) == []
    pairs = [row["metrics"]["pairs"] for row in rows(whole, "step") if row["phase"] == "train_verifier"]
    assert all(count >= 1 for count in pairs)


def test_commits_keep_their_distance_where_batches_end_elsewhere(tmp_path: Path) -> None:
    # Batches end at steps 4, 8 and 12: no multiple of 3 before the last.
    experiment = changed({"training.minibatches": 4, "training.steps": 12, "training.groups": 4})
    _, run = played(experiment, tmp_path)
    state = state_of(run)
    assert sum("train_prover" in shard["path"] for shard in state["shards"]) == 3


@pytest.mark.drill
def test_phases_stopped_on_the_way_leave_the_manifests_of_whole_ones(tmp_path: Path) -> None:
    experiment = changed({})
    _, whole = played(experiment, tmp_path / "whole")
    for number, (phase, count) in enumerate((("mint", 3), ("train_verifier", 8), ("train_prover", 8))):
        outcome, _ = played(experiment, tmp_path / "stopped", stop_at=(phase, count), resume=number > 0)
        assert outcome.status == "interrupted", phase
    _, stopped = played(experiment, tmp_path / "stopped", resume=True)
    # Shards are cut where commits are, which an interruption may move: what has to agree is which there are.
    for before, after in zip(read_manifests(whole), read_manifests(stopped), strict=True):
        assert (before.phase, before.outputs["weights"]) == (after.phase, after.outputs["weights"])
        assert after.outputs["shards"] == sorted(
            str(path.relative_to(stopped.path)) for path in stopped.rollouts.glob(f"*/{after.phase}-*.arrow")
        )


def test_a_resumed_mint_states_no_rate_for_the_time_it_did_not_see(tmp_path: Path) -> None:
    experiment = changed({"training.steps": 1, "verifier.steps": 1})
    played(experiment, tmp_path, stop_at=("mint", 4))  # after the last chunk
    _, run = played(experiment, tmp_path, resume=True)
    (mint,) = [row for row in rows(run, "phase") if row["phase"] == "mint"]
    assert "tokens_per_s" not in mint["metrics"]
    assert mint["metrics"]["rollouts"] == 24 * 4


def test_a_stop_in_the_last_commit_of_a_phase_keeps_its_manifest(tmp_path: Path) -> None:
    outcome, run = played(changed({}), tmp_path, stop_at=("checkpoint", 1))
    assert outcome.status == "complete"
    assert [m.phase for m in read_manifests(run)] == PHASES


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"verifier.head": "yes_token"}, "no single tokens"), ({"rollout.max_tokens": 125}, "takes at most 128 tokens")],
)
def test_what_the_models_cannot_do_is_refused_before_anything_is_committed(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    experiment = changed(settings)
    with pytest.raises(ConfigurationError, match=message):
        played(experiment, tmp_path)
    assert not (tmp_path / "drill" / "state.json").exists()


@pytest.mark.parametrize(
    ("key", "code", "others", "message"),
    [
        ("game.reward", "import not_installed as own", {}, "game.reward: running .* No module named 'not_installed'"),
        ("verifier.loss", "import not_installed as own", {}, "verifier.loss: running"),
        ("training.loss", "own = int()", {}, "is a int, but must be a PolicyLoss"),
        (
            "training.loss",
            "from pvg.training.losses import LOSSES\nown = dict(LOSSES).pop('dapo')",
            {"training.kl.target": 0.05},
            "has no KL term",
        ),
    ],
)
def test_what_is_wrong_with_the_users_own_code_is_told_before_anything_is_committed(
    key: str, code: str, others: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(code)
    with pytest.raises(PvgError, match=message):
        played(changed({key: f"{tmp_path / 'own.py'}:own", **others}), tmp_path)
    assert not (tmp_path / "drill" / "state.json").exists()


HALVES = {"models.dtype": "bfloat16", "training.adapters.rank": 2, "verifier.adapters.rank": 2}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"models.dtype": "bfloat16"}, r"training\.adapters\.rank"),
        ({"models.dtype": "bfloat16", "training.adapters.rank": 2}, r"verifier\.adapters\.rank"),
        ({**HALVES, "rollout.engine": "vllm"}, r"set weights\.transport to 'lora', or models\.dtype"),
        ({**HALVES, "game.protocol": {"kind": "decoupled", "solver": "other"}}, r"set models\.dtype to 'float32'"),
    ],
)
def test_what_cannot_work_is_no_experiment(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        changed(settings)


def test_a_completion_ends_with_any_end_token_of_the_provers_own_settings(tmp_path: Path) -> None:
    """The prover writes another special token where the embedded one writes its end, as Gemma does in a chat."""
    with open_model(ModelSection(source=TINY_PROVER), torch.device("cpu")) as model:
        end, other = model.tokenizer.eos_id, model.tokenizer.pad_id
        for weight in {model.module.get_input_embeddings().weight, model.module.get_output_embeddings().weight}:
            weight.data[[end, other]] = weight.data[[other, end]]
        model.module.generation_config.eos_token_id = [end, other]
        model.save(tmp_path / "swapped")
    experiment = changed({"models.prover.source": str(tmp_path / "swapped"), "training.steps": 1})
    outcome, run = played(experiment, tmp_path)
    assert outcome.status == "complete"
    shards = RolloutShards(run.path)
    rollouts = [rollout for path in sorted(run.path.glob("rollouts/**/*.arrow")) for rollout in shards.read(path)]
    ended = [rollout for rollout in rollouts if rollout.finish_reason == "stop"]
    assert len(ended) > 0.9 * len(rollouts)
    assert sum(rollout.completion_ids[-1] == other for rollout in ended) > 0.9 * len(ended)
    assert sum(rollout.grade.correct for rollout in rollouts) > 0.3 * len(rollouts)
