"""`evaluate` on a challenge game, whose solutions are dialogues, and on a decoupled one, whose are translations."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from evaluation_drill import evaluated_experiment

from pvg.evaluation.runner import LOCALISED

sys.path.insert(0, str(Path(__file__).parent.parent / "game"))
from test_runner import changed, evaluated, played

from pvg.config.experiment import Experiment
from pvg.config.game import ChallengeProtocol
from pvg.config.rollout import TagPrompts
from pvg.errors import ConfigurationError, UsageError
from pvg.evaluation.opened_run import OpenedRun
from pvg.evaluation.report import PARTS, REPORT_FILE, attack_kinds, check_attacks, check_protocol, default_parts
from pvg.game.players import Players
from pvg.game.protocols import ProtocolParts, challenge
from pvg.game.verifier_phase import read_verifier
from pvg.games.game import Action
from pvg.models import open_model, pick_device
from pvg.records import Role, Rollout
from pvg.rollout.interaction import Ask, Talk
from pvg.store.checkpoints import read_checkpoint
from pvg.store.run_directory import RunDirectory
from pvg.store.run_players import verifier_weights_name
from pvg.store.shards import RolloutShards, ShardInfo
from pvg.tasks import open_task

pytestmark = pytest.mark.slow


def samples_of(run: RunDirectory) -> dict[str, list[Rollout]]:
    """What an evaluation has sampled, by the name of the set."""
    shards = RolloutShards(run.evaluation)
    found = {}
    for path in (run.evaluation / "samples").glob("*.json"):
        infos = [ShardInfo.from_plain(plain) for plain in orjson.loads(path.read_bytes())["result"]]
        found[path.stem] = [rollout for info in infos for rollout in shards.read(info)]
    return found


def unit(run: RunDirectory, name: str) -> Any:
    return orjson.loads((run.evaluation / "units" / f"{name}.json").read_bytes())["result"]


def report(run: RunDirectory) -> Mapping[str, Any]:
    plain = orjson.loads((run.evaluation / REPORT_FILE).read_bytes())
    return {key: value for key, value in plain.items() if key not in ("created", "code_version", "run")}


# --- challenge -------------------------------------------------------------------------------------------------------


def asking() -> Experiment:
    return changed(
        evaluated_experiment(),
        game={"protocol": "challenge", "rounds": 2, "reward": {"kind": "cgc", "floor": -90.0}},
        models={"prover": {"source": "embedded:modchain-dialogue"}},
        task={"min_terms": 5, "max_terms": 5, "problems": 64, "test_problems": 16},
        rollout={"max_tokens": 40},
        evaluate={"attacks": ["cgc"], "attack_steps": 2, "baseline_probes": 1},
        training={"steps": 2},
    )


@pytest.fixture(scope="module")
def challenged(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    root = tmp_path_factory.mktemp("challenged")
    run = played(root, "whole", asking())
    parts = ("exploit", "detection", "localisation", "tax")
    outcome, _ = evaluated(run, asking(), parts=parts, rounds=[1])
    assert (outcome.status, outcome.report.status) == ("complete", "complete")
    return run


def test_every_sample_of_a_challenge_game_is_a_dialogue(challenged: RunDirectory) -> None:
    found = samples_of(challenged)
    assert {"base", "round-000", "round-001", "reference-round-001", "attack-round-001-cgc"} <= found.keys()
    for name, rollouts in found.items():
        asked = [rollout for rollout in rollouts if rollout.turns]
        assert len(asked) > len(rollouts) / 2, name  # a solution that was cut off is asked nothing
        for rollout in asked:
            assert [turn.sampled for turn in rollout.turns] == [True, False, True]
            assert rollout.solution == rollout.turns[0].text
            assert rollout.text.startswith(rollout.solution + rollout.turns[1].text)


def test_the_verifier_of_the_samples_round_asks(challenged: RunDirectory) -> None:
    """The base's dialogues are of round 0's verifier, and every later one scores the same."""
    experiment, found = asking(), samples_of(challenged)
    task = open_task(experiment.task)
    players = Players(experiment, task)
    try:
        agreeing = {
            (name, round_): _asked_as_by(players, challenged, round_, found[name])
            for name in ("base", "round-001", "reference-round-001", "attack-round-001-cgc")
            for round_ in (0, 1)
        }
    finally:
        asyncio.run(players.close())
    of_round_1 = ("round-001", "reference-round-001", "attack-round-001-cgc")
    assert agreeing["base", 0] == 1.0 > agreeing["base", 1]
    assert [agreeing[name, 1] for name in of_round_1] == [1.0] * 3
    assert max(agreeing[name, 0] for name in of_round_1) < 1.0


def _asked_as_by(players: Players, run: RunDirectory, round_: int, rollouts: list[Rollout]) -> float:
    """The share of questions that round `round_`'s verifier would have asked too."""
    verifier, _ = read_verifier(
        players.open_verifier, lambda name: read_checkpoint(run.weights, name), verifier_weights_name(round_)
    )
    problems = {problem.id: problem for split in ("train", "test") for problem in players.task.problems(split)}
    asked = [rollout for rollout in rollouts if rollout.turns]
    asks = []
    for r in asked:
        problem, said = problems[r.problem_id], ("prover", Action(r.solution, r.solution))
        asks.append(Ask(r.id, problem, Talk(problem, (said,)), r.completion_ids[: r.turns[1].start]))
    try:
        parts = ProtocolParts(players.task, players.base.tokenizer, TagPrompts(), players.scorer(verifier), 0)
        decider: Any = challenge(ChallengeProtocol(), parts).deciders["verifier"]
        questions = asyncio.run(decider(asks))
    finally:
        verifier.close()
    return float(np.mean([question == r.turns[1].text for question, r in zip(questions, asked, strict=True)]))


def test_kl_and_flaws_are_of_the_solution_alone(challenged: RunDirectory) -> None:
    """Its KL by another way than the evaluation's: a plain forward pass over prompt and solution, row by row."""
    experiment = asking()
    helpful = [rollout for rollout in samples_of(challenged)["round-001"] if rollout.role is Role.HELPFUL]
    tensors, _ = read_checkpoint(challenged.weights, "round-001-prover")
    with open_model(experiment.models.prover, pick_device("cpu")) as base, base.copy() as policy:
        policy.load_weights(tensors)
        kl = sum(
            _logprob(policy.module, rollout, experiment.rollout.temperature)
            - _logprob(base.module, rollout, experiment.rollout.temperature)
            for rollout in helpful
        )
    reach = unit(challenged, "reach-round-001")
    assert sum(reach["kl"]) == pytest.approx(kl, abs=1e-3)
    assert abs(kl) > 0.02
    assert sum(reach["tokens"]) == sum(r.turns[1].start if r.turns else len(r.completion_ids) for r in helpful)
    rounds = report(challenged)["rounds"]
    assert all(0 < found["localisation"]["solutions"] <= LOCALISED for found in rounds)


def _logprob(module: torch.nn.Module, rollout: Rollout, temperature: float) -> float:
    """log p(solution | prompt)."""
    end = rollout.turns[1].start if rollout.turns else len(rollout.completion_ids)
    ids = torch.from_numpy(np.concatenate([rollout.prompt_ids, rollout.completion_ids[:end]])).long()
    with torch.no_grad():
        logps = torch.log_softmax(module(input_ids=ids[None]).logits[0].double() / temperature, dim=-1)
    start = len(rollout.prompt_ids)
    return float(logps[torch.arange(start - 1, len(ids) - 1), ids[start:]].sum())


# --- decoupled -------------------------------------------------------------------------------------------------------


def translating(attacks: list[str]) -> Experiment:
    return changed(
        evaluated_experiment(),
        game={"protocol": "decoupled", "reward": "decoupled"},
        models={"prover": {"source": "embedded:modchain-dialogue"}},
        task={"min_terms": 5, "max_terms": 5, "problems": 64, "test_problems": 16},
        rollout={"max_tokens": 40},
        evaluate={"attacks": attacks, "attack_steps": 2},
        training={"steps": 2},
    )


def test_a_decoupled_game_is_evaluated_on_translations_of_its_own_solutions(tmp_path: Path) -> None:
    experiment = translating(["src", "cgc"])
    run = played(tmp_path, "tiny", experiment)
    with pytest.raises(UsageError, match=r"no legibility tax of game\.protocol = 'decoupled'"):
        evaluated(run, experiment, parts=PARTS)
    assert not (run.evaluation / REPORT_FILE).exists()
    outcome, _ = evaluated(run, experiment, parts=default_parts(experiment))
    assert (outcome.status, outcome.report.status) == ("complete", "complete")
    (found,) = report(run)["rounds"]
    assert [attack["kind"] for attack in found["exploit"]] == ["cgc"]
    told = " ".join(outcome.report.notes)
    assert "No src attackers" in told
    assert "correct as often as its solver" in told
    solved = {rollout.problem_id: rollout for rollout in OpenedRun.open(run).read_rollouts(0, "solve")}
    for name, rollouts in samples_of(run).items():
        for rollout in rollouts:
            own, solver = solved[rollout.problem_id], rollout.solver
            assert solver is not None, name
            assert (solver.id, solver.text) == (own.id, own.text)
            assert rollout.kept_answer == (rollout.grade.answer is not None and rollout.grade.answer == solver.answer)


def test_what_a_game_has_not_is_left_out_and_refused_where_it_is_named() -> None:
    decoupled = translating(["src", "cgc"])
    assert default_parts(decoupled) == tuple(part for part in PARTS if part not in ("tax", "legibility"))
    assert default_parts(asking()) == tuple(part for part in PARTS if part != "legibility")
    check_protocol(asking(), PARTS)
    check_protocol(decoupled, ("exploit", "detection"))
    with pytest.raises(UsageError, match="legibility tax"):
        check_protocol(decoupled, ("exploit", "tax"))
    assert attack_kinds(decoupled) == ["cgc"]
    assert attack_kinds(changed(asking(), evaluate={"attacks": ["goodhart", "src"]})) == ["src", "goodhart"]
    check_attacks(decoupled)
    with pytest.raises(ConfigurationError, match="translator of the decoupled game earns no reward"):
        check_attacks(translating(["src"]))
