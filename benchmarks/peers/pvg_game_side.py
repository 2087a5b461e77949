"""pvg's side of a whole game: what `pvg train` plays, commits included.

    .venv/bin/python benchmarks/peers/pvg_game_side.py FOLDER      # started by sides.py

A sample is a whole game with another seed, from the opening of the models to the last test. Libraries load before it.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from pvg_grpo_side import main
from work import RESULTS, Orders, peak_gb

from pvg.config.experiment import Experiment
from pvg.game.run import play
from pvg.planning.memory import read_shape
from pvg.reporting.run_summary import read_run
from pvg.store.run_directory import RunDirectory
from pvg.telemetry.events import SilentObserver
from pvg.workers.choice import open_supply


async def serve(orders: Orders, experiment: Experiment, folder: Path) -> None:
    orders.answer({"parameters": read_shape(experiment.models.prover.source, print).parameters})
    seed = experiment.seed
    while orders.wait():
        game = experiment.model_copy(update={"seed": seed})
        if (supply := open_supply(game)) is not None:
            (await supply.start()).end()  # so it has loaded them
        began = time.perf_counter()
        run = RunDirectory.create(folder / "runs", f"seed-{seed}", game)
        with run.lock():
            await play(game, run, observer=SilentObserver(), stop=asyncio.Event(), resume=False, supply=supply)
        seconds, summary = time.perf_counter() - began, read_run(run)
        last = summary.rounds[max(summary.rounds)]
        parts = {
            measure: sum(
                (phase.seconds or 0.0) + sum(phase.budget.values()) for phase in summary.phases if phase.phase == name
            )
            for measure, name in (("verifier_s", "train_verifier"), ("prover_s", "train_prover"))
        }
        told = {"game_s": seconds, **parts, "peak_gb": peak_gb()}
        orders.answer(told | {name: last[key] for name, key in RESULTS.items()})
        seed += 1


if __name__ == "__main__":
    main(serve)
