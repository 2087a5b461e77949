"""The game against real vLLM servers, from the command line: whole rounds, with proof that the weights arrived."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from served_games import Served, events, serving, steps, train, trained, wait_for_step

from pvg.reporting.diagnosis import diagnose
from pvg.store.run_directory import RunDirectory
from pvg.store.shards import RolloutShards

VLLM = "rollout.engine=vllm"
SERVER = ("serving.max_num_seqs=64",)
ROLLOUTS = 32 * 4 + 4 * 8 * 4 + 2 * 2 * 8 * 2  # mint, four prover steps, and the evaluation of base and prover


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("games")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    with serving(folder, *SERVER) as running:
        yield running


def ids_of(folder: Path, run: str) -> list[str]:
    """The ids of all rollouts of a finished run."""
    place = RunDirectory(folder / "runs" / run).rollouts
    shards = RolloutShards(place)
    return [rollout.id for path in sorted(place.rglob("*.arrow")) for rollout in shards.read(path)]


def test_a_round_with_weights_updated_at_every_step(folder: Path, server: Served) -> None:
    trained(folder, "whole", VLLM, f"serving.servers={server.url}")
    told = steps(folder, "whole")
    assert len(told) == 4
    for metrics in told:
        assert 0 <= metrics["canary_gap"] < 1e-3
        assert metrics["staleness"] == 0
        assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-4)  # the trainer's log-probs are the sampler's
    done = [line for line in events(folder, "whole", "weights") if line["event"] == "client.done"]
    versions = [int(line["version"]) for line in done]
    assert versions == sorted(set(versions))
    assert len(versions) >= 4 + 3  # every step's, and those of mint, prover phase and evaluation
    moved = [float(line["moved"]) for line in events(folder, "whole", "weights") if line["event"] == "canary"]
    assert max(moved) > 1e-3  # the weights did change, so the canary had something to see
    ids = ids_of(folder, "whole")
    assert len(ids) == len(set(ids)) == ROLLOUTS
    diagnosis = diagnose(RunDirectory(folder / "runs" / "whole"))
    assert diagnosis.timings_s["weights_wall_s"].n == len(steps(folder, "whole"))
    # There are too few of most things in so short a game.
    assert "loop-lag" not in diagnosis.not_seen


def test_two_servers_of_which_one_is_killed_in_mid_round(folder: Path, server: Served) -> None:
    with serving(folder, *SERVER) as other:
        game = train(folder, "halved", VLLM, f"serving.servers={server.url},{other.url}")
        wait_for_step(folder, "halved", game, 1)
        other.kill()
        out, err = game.communicate(timeout=900)
    assert game.returncode == 0, err[-3000:]
    assert json.loads(out)["status"] == "complete"
    assert f"{other.url} is unavailable" in err
    away = [line for line in events(folder, "halved", "gen") if line["event"] == "server.away"]
    assert {line["server"] for line in away} == {other.url}
    ids = ids_of(folder, "halved")
    assert len(ids) == len(set(ids)) == ROLLOUTS
    delivered = [line for line in events(folder, "halved", "weights") if line["event"] == "server.delivered"]
    assert {line["server"] for line in delivered} == {server.url, other.url}
    assert all(0 <= metrics["canary_gap"] < 1e-3 for metrics in steps(folder, "halved"))


def test_a_game_through_adapters(folder: Path) -> None:
    lora = ("training.adapters.rank=8", "training.learning_rate=0.003", "weights.transport=lora")
    with serving(folder, *SERVER, *lora) as server:
        trained(folder, "adapted", VLLM, *lora, f"serving.servers={server.url}")
    told = steps(folder, "adapted")
    assert all(0 <= metrics["canary_gap"] < 1e-3 for metrics in told)
    assert all(metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-4) for metrics in told)
    moved = [float(line["moved"]) for line in events(folder, "adapted", "weights") if line["event"] == "canary"]
    assert max(moved) > 1e-3
    # The server computed the log-probs of the reference, and they are the trainer's.
    assert told[0]["kl"] == pytest.approx(0.0, abs=1e-5)
    assert told[-1]["kl"] > 1e-5
    lines = map(json.loads, (folder / "runs" / "adapted" / "metrics.jsonl").read_text().splitlines())
    budgets = [line["budget"] for line in lines if line.get("phase") == "train_prover" and "budget" in line]
    assert budgets
    assert not any("reference" in budget for budget in budgets)


def test_a_game_whose_verifier_scores_on_a_server(folder: Path, server: Served) -> None:
    # The CPU build of vLLM computes no attention heads as small as those of the embedded verifiers.
    larger = "models.verifier.source=embedded:modchain-prover"
    with serving(folder, *SERVER, larger, purpose="verifier") as verifier:
        trained(
            folder,
            "scored",
            VLLM,
            f"serving.servers={server.url}",
            larger,
            "verifier.engine=vllm",
            f"serving.verifier_servers={verifier.url}",
        )
    assert len(steps(folder, "scored")) == 4
