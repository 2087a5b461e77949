"""A run in small, which commits as fast as it can: for the drivers of test_lease.py."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import safetensors.torch  # noqa: F401 (loaded before the forks, or each of them would load it)
import torch
from store_samples import rollout

from pvg.store.checkpoints import prune, read_checkpoint, write_checkpoint
from pvg.store.run_directory import RunDirectory
from pvg.store.shards import RolloutShards, ShardInfo
from pvg.store.state import FileStateStore, JsonLines, JsonLinesReader


def verify(run: RunDirectory, state: Mapping[str, Any]) -> None:
    """Everything that `state` names is there, whole, and of the right step."""
    shards = RolloutShards(run.path)
    assert len(state["shards"]) == state["step"]
    for step, plain in enumerate(state["shards"], start=1):
        (found,) = shards.read(ShardInfo.from_plain(plain))
        assert found.text == f"text {step}"
    tensors, meta = read_checkpoint(run.checkpoints, state["checkpoint"])
    assert meta == {"step": state["step"]}
    assert torch.equal(tensors["w"], torch.full((3000,), float(state["step"])))


def recover(run: RunDirectory) -> tuple[dict[str, Any], int]:
    """The last commit, and how many uncommitted files and lines were removed."""
    store = FileStateStore(run.state)
    loaded = store.load(lambda state: verify(run, state))
    assert not loaded.notice, loaded.notice
    state = loaded.state or {"step": 0, "shards": [], "offset": 0}
    commits = store.commits()
    for commit in commits:
        verify(run, commit)  # the commit before the last can be gone back to as well
    named = [ShardInfo.from_plain(plain) for commit in commits for plain in commit["shards"]]
    removed = len(RolloutShards(run.path).recover(named))
    removed += len(prune(run.checkpoints, {commit["checkpoint"] for commit in commits}))
    with JsonLines(run.metrics) as journal:
        removed += journal.mark.bytes > state["offset"]
        journal.truncate(state["offset"])
    assert [line["step"] for line in JsonLinesReader(run.metrics)] == list(range(1, state["step"] + 1))
    return state, removed


def commit_for_ever(run: RunDirectory, told: int) -> None:
    """One commit per step; the number of each is told through the pipe `told` once it is through."""
    with run.lock():
        state, removed = recover(run)
        os.write(told, f"removed {removed}\n".encode())
        unchanged = run.unchanged()
        store, shards = FileStateStore(run.state, unchanged), RolloutShards(run.path, unchanged)
        journal = JsonLines(run.metrics)
        while True:
            step = state["step"] + 1
            info = shards.write(step % 3, f"train_prover-{step:05d}", [rollout(step)])
            name = f"step-{step:05d}"
            tensors = {"w": torch.full((3000,), float(step))}
            write_checkpoint(run.checkpoints, name, tensors, {"step": step}, unchanged)
            journal.append({"step": step})
            journal.sync()
            shards_so_far = [*state["shards"], info.plain()]
            state = {"step": step, "shards": shards_so_far, "checkpoint": name, "offset": journal.mark.bytes}
            store.save(state)
            os.write(told, f"step {step}\n".encode())
            unchanged()
            prune(run.checkpoints, {commit["checkpoint"] for commit in store.commits()})
