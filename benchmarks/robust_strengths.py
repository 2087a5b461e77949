"""Compares strengths of the robust losses on the mints of a finished game: python benchmarks/robust_strengths.py RUN

For each round after the first and for each setting, the program trains two new verifiers on the round's mint, with two
draws of pairs. They score the held-out solutions of each writer, and new solutions of the round's prover, from which
they did not learn. The program prints one JSON line for each round and setting: AUCs, means of the two draws. The
strengths of docs/results/robust.md were chosen with it:

    pvg train modchain --name strengths -s models.threads=1 -s verifier.steps=60 -s verifier.learning_rate=3e-4 \\
        -s game.mint_problems=512 -s game.reward.floor=-15 -s game.growing=false -s game.rounds=3 -s game.start=base \\
        -s training.steps=90
    python benchmarks/robust_strengths.py runs/strengths
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pvg.config.experiment import Experiment
from pvg.config.load import load_experiment
from pvg.evaluation.opened_run import OpenedRun
from pvg.game.ledger import shards_of
from pvg.game.mixtures import source_weights, sources_for_round
from pvg.game.players import Players
from pvg.game.states import Phase
from pvg.game.verifier_phase import pair_stream, verifier_trainer
from pvg.records import Float32, Rollout
from pvg.seeds import seed_for
from pvg.store.pairs import PairView, is_held_out
from pvg.store.run_directory import RunDirectory
from pvg.store.shards import RolloutShards
from pvg.tasks import open_task
from pvg.verifier.calibration import auc

DRAWS = (0, 1)
STRENGTHS: dict[str, Sequence[float]] = {
    "none": (1.0,),
    "balanced": (1.0,),
    "vrex": (1.0, 10.0, 100.0),
    "irm": (0.1, 1.0, 10.0, 100.0),
    "group_dro": (0.1, 1.0),
}
WARMED = (("vrex", 10.0, 30), ("irm", 1.0, 30))


def settings() -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = [("verifier.steps=180",)]
    plain = [(loss, strength, 0) for loss, strengths in STRENGTHS.items() for strength in strengths]
    for loss, strength, warmup in [*plain, *WARMED]:
        warmed = (f"verifier.robust.warmup={warmup}",) if warmup else ()
        found.append((f"verifier.robust={loss}", f"verifier.robust.strength={strength}", *warmed))
    return found


def auc_of(rollouts: Sequence[Rollout], scores_N: Float32) -> float:
    correct_N = np.array([rollout.grade.correct for rollout in rollouts], dtype=bool)
    return float(auc(scores_N[correct_N], scores_N[~correct_N]))


async def trained(experiment: Experiment, reading: OpenedRun, round_: int, draw: int) -> dict[str, float]:
    """AUCs of one verifier: of all held-out solutions of the mint, of each writer's, and of the next prover's."""
    section, sources = experiment.verifier, sources_for_round(round_)
    players = Players(experiment, open_task(experiment.task))
    try:
        view = PairView(
            RolloutShards(reading.directory.path),
            shards_of(reading.state, round_, Phase.MINT.value),
            keep=lambda problem: not is_held_out(problem, section.held_out),
        )
        stream = pair_stream(section, view, source_weights(experiment.game, sources), seed_for(draw, round_, "pairs"))
        verifier = players.open_verifier(round_)
        steps = experiment.verifier_steps(round_)
        trainer = verifier_trainer(players, verifier, stream, sources=len(sources), steps=steps)
        while trainer.steps_done < steps:
            await trainer.step()
        scorer = players.scorer(verifier)
        minted = [
            rollout
            for rollout in reading.read_rollouts(round_, Phase.MINT.value)
            if is_held_out(rollout.problem_id, section.held_out)
        ]
        scores_N = await scorer.score(minted)
        writers_N = np.array([rollout.source for rollout in minted])
        found = {"all": auc_of(minted, scores_N)}
        for name in sources:
            rows = np.flatnonzero(writers_N == name)
            found[name] = auc_of([minted[row] for row in rows], scores_N[rows])
        fresh = list(reading.read_rollouts(round_, Phase.CHECKPOINT.value))
        found["next prover"] = auc_of(fresh, await scorer.score(fresh))
        verifier.close()
        return found
    finally:
        await players.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder of a finished game")
    run: Path = parser.parse_args().run
    reading = OpenedRun.open(RunDirectory(run))
    for round_ in range(1, reading.rounds):
        for setting in settings():
            experiment = load_experiment(run / "experiment.toml", setting)
            rows = [asyncio.run(trained(experiment, reading, round_, draw)) for draw in DRAWS]
            means = {key: round(float(np.mean([row[key] for row in rows])), 3) for key in rows[0]}
            print(json.dumps({"round": round_, "setting": " ".join(setting), "auc": means}), flush=True)


if __name__ == "__main__":
    main()
