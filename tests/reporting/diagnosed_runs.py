"""Runs of prover steps with the times that a test of the diagnosis wants, recorded as the game records them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from run_samples import begin, commit, state, tell

from pvg.config.experiment import Experiment
from pvg.config.load import build_experiment
from pvg.store.run_directory import RunDirectory

Time = float | Callable[[int], float]


def recorded(
    root: Path,
    name: str = "first",
    *,
    steps: int = 40,
    phase: str = "train_prover",
    engine: str = "torch",
    queue_s: Time = 0.001,
    load_s: Time = 0.02,
    loads: tuple[int, ...] = (4, 90, 180),
    commit_s: float = 0.01,
    train_s: float = 1.0,
    idle_s: float = 0.6,
    group_max_s: float = 0.12,
    truncated: float = 0.0,
    lag_s: float = 0.002,
    lags: Mapping[str, float] | None = None,
    waited_s: float | None = 0.03,
    threads: int = 2,
    machine: int = 2,
    busy_cores: float | None = None,
    own_cores: float = 0.0,
    workers: tuple[float, float, float] | None = None,
) -> RunDirectory:
    """A run in which nothing stands out unless it is asked for. `queue_s`, `load_s`: of a weight update, or a function
    of the requests in flight. `workers`: shares of the mean and of the busiest worker, seconds of waiting."""
    run = begin(root, name, **({} if engine == "torch" else {"rollout": _rollout(engine)}))
    tell(run, {"kind": "start", "time": 1000.0, "cores": {"threads": threads, "usable": 2, "machine": machine}})
    for step in range(steps):
        load, now = loads[step % len(loads)], 1000.0 + step
        queue, loading = (time(load) if callable(time) else time for time in (queue_s, load_s))
        update = {"weights_wall_s": queue + loading, "weights_queue_s": queue, "weights_in_flight": float(load)}
        groups = {"group_wait_p50_s": 0.1, "group_wait_max_s": group_max_s}
        metrics = {"truncated": truncated, "trainer_idle": idle_s / (train_s + idle_s), **update, **groups}
        budget = {"forward_backward": train_s, "checkpoint": commit_s, "rollout": idle_s - commit_s}
        place = {"round": 0, "phase": phase, "step": step, "of": steps}
        tell(run, {"kind": "step", "time": now, **place, "metrics": metrics, "budget": budget})
        found = dict(lags if lags is not None else _lags(lag_s))
        if waited_s is not None:
            found |= {"ran_s": 1.5, "waited_s": waited_s, "longest_wait_s": waited_s}
        if found:
            tell(run, {"kind": "loop", "time": now, "metrics": found})
        if busy_cores is not None:
            used = {"cpu": busy_cores / machine, "process_cpu": own_cores}
            tell(run, {"kind": "device", "time": now, "metrics": used})
        if workers is not None and step < 20:
            busy, most, waited = workers
            shares: dict[str, Any] = {"up": 2.0, "busy": busy, "busy_most": most, "core_wait": 0.1}
            cores = {"ran_s": 4.0, "waited_s": waited, "longest_wait_s": 2.5} if waited else {}
            tell(run, {"kind": "workers", "time": now, "metrics": shares | cores})
    commit(run, state(phase))
    return run


def _lags(lag_s: float) -> dict[str, float]:
    return {"lag_p50_s": 0.0001, "lag_p90_s": 0.001, "lag_p99_s": lag_s, "lag_max_s": lag_s, "samples": 50.0}


def _rollout(engine: str) -> Any:
    plain = Experiment().plain()
    plain["rollout"]["engine"] = {"kind": engine}
    return build_experiment(plain).rollout
