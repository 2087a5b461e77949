"""Real small runs to replay, and workloads opened, sampled and closed as the runner does it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pvg.bench.profile import (
    BenchSettings,
    SettingChange,
    find_profile,
    parse_overrides,
    read_profile,
    settings_of,
)
from pvg.bench.report import Variant
from pvg.bench.runner import VariantTrial, run_trials
from pvg.bench.workloads import Workload, make_workload
from pvg.config.experiment import Experiment
from pvg.config.load import build_experiment
from pvg.game.run import play
from pvg.records import Rollout
from pvg.store.run_directory import RunDirectory
from pvg.store.shards import RolloutShards, ShardInfo
from pvg.store.state import FileStateStore
from pvg.telemetry.observer import SilentObserver

SMALL = {
    "name": "small",
    "task": {"kind": "modchain", "problems": 512, "test_problems": 16},
    "models": {"threads": 1},
    "rollout": {"group_size": 4, "engine": {"max_rows": 32}, "concurrency": 64, "max_tokens": 40},
    "verifier": {"steps": 2, "pairs": 4},
    "training": {"groups": 4, "steps": 6, "minibatches": 2, "kl": {"kind": "fixed", "coefficient": 0.05}},
    "game": {"rounds": 1, "mint_problems": 24, "mint_samples": 4, "test": {"problems": 4, "samples": 1}},
    "store": {"commit_every": 4},
}


def load_profile(
    name_or_file: str,
    overrides: Sequence[str] = (),
    *,
    changes: Sequence[SettingChange] = (),
    replay: RunDirectory | None = None,
) -> BenchSettings:
    """The settings of a profile and its experiment, with `key=value` overrides and then `changes`."""
    path = find_profile(name_or_file)
    return settings_of(read_profile(path), str(path), [*parse_overrides(overrides), *changes], replay)


async def run_variant(make: Callable[[], Workload], **settings: Any) -> tuple[Variant, dict[str, Any]]:
    """Open, sample and close one workload. Returns the variant, and what one sample's work was."""
    trial = VariantTrial(make, **settings)
    await run_trials([trial])
    return trial.result()


def small_experiment(**training: Any) -> Experiment:
    return build_experiment({**SMALL, "training": {**SMALL["training"], **training}})  # type: ignore[dict-item]


def played(root: Path, name: str, experiment: Experiment) -> RunDirectory:
    """A complete run of `experiment`."""
    run = RunDirectory.create(root, name, experiment)
    with run.lock():
        asyncio.run(play(experiment, run, observer=SilentObserver(), stop=asyncio.Event(), resume=False))
    return run


def prover_rollouts(run: RunDirectory) -> list[Rollout]:
    """What the run's prover was trained on, read without the code under test."""
    state = FileStateStore(run.state).load().state
    assert state is not None
    infos = [ShardInfo.from_plain(plain) for plain in state["shards"] if "train_prover" in plain["path"]]
    return [rollout for info in infos for rollout in RolloutShards(run.path).read(info)]


def use(
    profile: str,
    overrides: Sequence[str],
    look: Callable[[Any, list[dict[str, float]]], Any],
    *,
    replay: RunDirectory | None = None,
    samples: int = 1,
) -> Any:
    """What `look(workload, measured samples)` finds, after the samples and before the workload is closed."""
    settings = load_profile(profile, ["models.threads=1", *overrides], replay=replay)

    async def run() -> Any:
        workload: Workload = make_workload(settings)
        await workload.open()
        try:
            measured = [dict(await workload.sample(index)) for index in range(samples)]
            for values in measured:
                assert values.keys() == workload.measures.keys()
            return look(workload, measured)
        finally:
            await workload.close()

    return asyncio.run(run())
