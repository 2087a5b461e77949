"""Synthetic run directories for the tests of reporting and of the command line: real files, made by the store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pvg.config.experiment import Experiment
from pvg.records import Grade, Role, Rollout, VersionSpan
from pvg.store.run_directory import RunDirectory
from pvg.store.shards import RolloutShards
from pvg.store.state import FileStateStore, JsonLines

STEP_BUDGET = {"rollout": 0.5, "forward_backward": 0.3, "unaccounted": 0.2}


def rollout(name: str, role: Role, *, correct: bool, score: float | None, **changes: Any) -> Rollout:
    fields: dict[str, Any] = {
        "id": name,
        "problem_id": f"p-{name}",
        "question": f"{name}?",
        "reference": "7",
        "role": role,
        "round": 0,
        "source": "round-000",
        "step": 0,
        "group": 0,
        "prompt_ids": np.array([1, 2], np.int32),
        "completion_ids": np.array([3, 4], np.int32),
        "logprobs": np.array([-0.1, -0.2], np.float32),
        "spans": (VersionSpan(0, 0),),
        "finish_reason": "stop",
        "text": f"text of {name}",
        "grade": Grade(correct, True, "7" if correct else "8", "" if correct else "wrong sum in step 1"),
        "score": score,
    }
    return Rollout(**{**fields, **changes})


def state(phase: str, **changes: Any) -> dict[str, Any]:
    """A committed state as the game writes it."""
    plain = {"phase": phase, "round": 0, "step": 0, "shards": [], "rounds": [], "weights": [], "checkpoint": None}
    return {**plain, **changes}


def begin(root: Path, name: str = "first", /, **settings: Any) -> RunDirectory:
    return RunDirectory.create(root, name, Experiment(**settings))


def commit(run: RunDirectory, plain: dict[str, Any], shards: dict[str, list[Rollout]] | None = None) -> None:
    """Commit a state, with shards (label -> rollouts of one round)."""
    store = RolloutShards(run.path)
    infos = [store.write(rollouts[0].round, label, rollouts).plain() for label, rollouts in (shards or {}).items()]
    FileStateStore(run.state).save({**plain, "shards": [*plain["shards"], *infos]})


def tell(run: RunDirectory, *records: dict[str, Any]) -> None:
    with JsonLines(run.metrics) as lines:
        for record in records:
            lines.append(record)


def step(phase: str, number: int, *, round_: int = 0, **metrics: float | None) -> dict[str, Any]:
    place = {"kind": "step", "round": round_, "phase": phase, "step": number, "of": 60, "time": 1000.0 + number}
    return {**place, "metrics": metrics, "budget": STEP_BUDGET, "busy": STEP_BUDGET}


def played(root: Path, name: str = "first") -> RunDirectory:
    """A complete run of one round, with evaluation samples of both roles."""
    run = begin(root, name)
    tell(
        run,
        step("mint", 8, helpful_accuracy=0.6),
        {"kind": "phase", "round": 0, "phase": "mint", "seconds": 3.0, "metrics": {"helpful_accuracy": 0.6, "n": 8.0}},
        step("train_prover", 1, helpful_accuracy=0.5, kl=0.0, fooled_rate=None),
        step("train_prover", 2, helpful_accuracy=0.75, kl=0.01, fooled_rate=0.25),
        {"kind": "alert", "round": 0, "phase": "train_prover", "step": 2, "name": "collapse", "message": "It fell."},
        {"kind": "phase", "round": 0, "phase": "train_prover", "seconds": 1.5, "metrics": {"fooled_rate": 0.25}},
        {"kind": "round", "round": 0, "metrics": {"helpful_accuracy": 0.875, "verifier_auc": 0.9, "fooled_rate": None}},
    )
    samples = [
        rollout("weak", Role.SNEAKY, correct=False, score=-1.0),
        rollout("strong", Role.SNEAKY, correct=False, score=2.5),
        rollout("honest", Role.SNEAKY, correct=True, score=9.0),
        rollout("low", Role.HELPFUL, correct=True, score=-3.0),
        rollout("middle", Role.HELPFUL, correct=True, score=0.5),
        rollout("high", Role.HELPFUL, correct=True, score=4.0),
        rollout("failed", Role.HELPFUL, correct=False, score=8.0),
        rollout("old", Role.SNEAKY, correct=False, score=99.0, source="base"),
    ]
    rounds = [{"helpful_accuracy": 0.875, "verifier_auc": 0.9, "fooled_rate": None}]
    commit(run, state("complete", rounds=rounds), {"checkpoint-00000": samples})
    return run


def telemetered(root: Path, name: str = "watched") -> RunDirectory:
    """A run of two prover steps with overlapped work, spans of three tracks, and samples of device and event loop."""
    run = begin(root, name)
    overlapped = {"budget": STEP_BUDGET, "busy": {**STEP_BUDGET, "grade": 0.25}}
    gpu = {"gpu0_utilisation": 0.75, "gpu0_memory_bytes": 2.0**32, "gpu0_power_w": 300.0}
    memory = {"memory_used_bytes": 2.0**31, "memory_total_bytes": 2.0**34}
    shares = {"busy": 0.75, "busy_most": 0.9, "busy_least": 0.6, "core_wait": 0.1, "w0_busy": 0.9, "w1_busy": 0.6}
    for number in (1, 2):
        tell(run, {**step("train_prover", number, helpful_accuracy=0.5, tokens_per_s=100.0), **overlapped})
    for number in range(3):
        measured = {
            "device": {"cpu": 0.5 + 0.1 * number, "process_cpu": 1.5, "rss_bytes": 2.0**30 + number, **memory, **gpu},
            "loop": {
                "lag_p50_s": 0.001 * (1 + number),
                **{"lag_p90_s": 0.01, "lag_p99_s": 0.02, "lag_max_s": 0.1 * (1 + number), "samples": 50.0},
            },
            "workers": {"up": 2.0, "restarts": float(number > 0), **shares},
        }
        at = 1000.0 + 5 * number
        tell(run, *({"kind": kind, "time": at, "metrics": metrics} for kind, metrics in measured.items()))
    budget = {"open_models": 0.75, "unaccounted": 0.25}
    phase = {"round": 0, "phase": "train_prover", "seconds": 3.0, "metrics": {}, "budget": budget}
    whole = {"status": "complete", "seconds": 4.0, "budget": {"rollout": 3.5, "unaccounted": 0.5}}
    tell(run, {"kind": "phase", **phase}, {"kind": "run", "time": 1010.0, **whole})
    with JsonLines(run.spans) as lines:
        for number in (1, 2):
            at = 1000.0 + number
            for track, span, start, end, depth in (
                ("driver", "rollout", 0.0, 0.5, 0),
                ("driver", "decode", 0.1, 0.4, 1),
                ("driver", "forward_backward", 0.5, 0.8, 0),
                ("loop", "grade", 0.2, 0.3, 0),
                ("loop", "grade", 0.25, 0.45, 0),
                ("writer", "checkpoint", 0.3, 0.7, 0),
            ):
                place = {"round": 0, "phase": "train_prover", "step": number}
                lines.append(
                    {"name": span, "start_s": at + start, "end_s": at + end, "depth": depth, "track": track, **place}
                )
    return run
