"""The game's phases on the rollouts of a mint, in a separate process to measure their memory.

    python -m benchmarks.data_game < order.json        # {"run": "DIRECTORY"}

`make_run` writes a run that has committed all rollouts of its mint. The child opens it as `pvg train --resume` does and
plays the game's own code (pvg.game.mint, pvg.game.verifier_phase):

- the end of the mint: the statistics of all minted rollouts, and the commit;
- the whole verifier phase: opening the pairs (labels, cells of each source and problem, balancing by source), drawing
  and rendering pairs, references, training steps, the split into training and held-out problems, scoring every
  held-out solution, the threshold, the weights and the commit.

Only two things are smaller than in a large game: the verifier (a random Llama of one layer, so that scoring takes
seconds) and the number of training steps (`workload.steps`). Neither affects how memory grows with the pairs.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from benchmarks.data_child import say
from benchmarks.data_store import PROMPT_TOKENS, StoreShape
from benchmarks.random_llama import random_llama
from pvg.config.experiment import Experiment
from pvg.config.load import build_experiment, load_experiment
from pvg.extensions import digests
from pvg.game.mint import mint
from pvg.game.run import open_session
from pvg.game.states import GameState, Phase
from pvg.game.verifier_phase import train_verifier
from pvg.models.characters import CHARACTERS
from pvg.store.atomic import make_directory
from pvg.store.run_directory import RunDirectory
from pvg.store.shards import ShardInfo
from pvg.store.state import FileStateStore
from pvg.telemetry.observer import SilentObserver
from pvg.version import code_version

# Ids and text of modchain's tokenizer, which the verifier uses; ids 0 and 1 are pad and end.
IDS = range(2, 2 + len(CHARACTERS))
ALPHABET = CHARACTERS.encode()
WIDTH, LAYERS = 32, 1  # of the verifier
QUESTION_TOKENS = (
    4 * PROMPT_TOKENS
)  # a question has four characters per token, and modchain has one token per character


def make_run(
    root: Path,
    experiment: Experiment,
    store: Path,
    infos: Sequence[ShardInfo],
    shape: StoreShape,
    steps: int,
    pairs: int,
) -> RunDirectory:
    """A run in `root` that has committed its mint of round 0: `infos` are the shards of folder `store`, as links.

    The verifier trains for `steps` steps of `pairs` pairs. `experiment` has all other settings.
    """
    rows = sum(info.rows for info in infos)
    experiment = _sized(root, experiment, shape, rows // shape.solutions, steps, pairs)
    run = RunDirectory.create(root, f"mint-{rows}", experiment)
    for info in infos:
        for path in (info.path, info.digests_path) if info.digests else (info.path,):
            make_directory((run.path / path).parent)
            os.link(store / path, run.path / path)
    per_chunk = max(1, experiment.rollout.chunk // shape.solutions)
    state = GameState(
        experiment.hash(),
        experiment.hashed(),
        code_version(),
        phase=Phase.MINT,
        step=-(-experiment.game.mint_problems // per_chunk),
        shards=tuple(info.plain() for info in infos),
        own_code=digests(experiment),
    )
    FileStateStore(run.state).save(state.plain())
    return run


def _sized(root: Path, experiment: Experiment, shape: StoreShape, problems: int, steps: int, pairs: int) -> Experiment:
    context = QUESTION_TOKENS + shape.longest + 16
    source = random_llama(root / "models", width=WIDTH, layers=LAYERS, context=context, seed=shape.seed)
    plain = experiment.plain()
    changes: dict[str, dict[str, Any]] = {
        "models": {"verifier": {"source": source}},
        "verifier": {"steps": steps, "pairs": pairs},
        "game": {"mint_problems": problems, "mint_samples": shape.solutions},
    }
    for section, values in changes.items():
        plain[section] = {**plain.get(section, {}), **values}
    return build_experiment(plain)


async def play_phases(directory: Path) -> None:
    """Play the two phases and report the memory after each. The first line follows the opening of the session."""
    run = RunDirectory(directory)
    async with AsyncExitStack() as stack:
        experiment = load_experiment(run.experiment_file)
        session = await open_session(experiment, run, SilentObserver(), asyncio.Event(), stack)
        say("started")
        started = time.perf_counter()
        await mint(session)
        say("minted", mint_end_s=time.perf_counter() - started)
        started = time.perf_counter()
        await train_verifier(session)
        metrics = session.phase_metrics
        say("done", verifier_phase_s=time.perf_counter() - started, held_out=float(metrics["held_out"] or 0))


if __name__ == "__main__":
    asyncio.run(play_phases(Path(json.load(sys.stdin)["run"])))
