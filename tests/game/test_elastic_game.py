"""A whole game whose workers join, leave and die at random moments has the weights of an undisturbed one."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import signal
from pathlib import Path

import pytest
from small_games import changed, played, rows

from pvg.store.run_directory import RunDirectory
from pvg.workers.pool import WorkerPool

SHARDS = 3


def weights(run: RunDirectory) -> dict[str, str]:
    return {
        str(path.relative_to(run.path)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in run.path.rglob("*.safetensors")
    }


def game(root: Path, **limits: int) -> RunDirectory:
    cluster = {"kind": "local", "workers": SHARDS, **limits}
    few = {"verifier.steps": 4, "training.steps": 4}  # every kind of change comes within the first second
    outcome, run = played(changed({"models.device": "cpu", "cluster": cluster, **few}), root)
    assert outcome.status == "complete"
    return run


@pytest.mark.drill
def test_workers_that_join_leave_and_die_at_random_change_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance, done = random.Random(1), {"added": 0, "removed": 0, "killed": 0}

    async def restless(pool: WorkerPool) -> None:
        """In place of the decisions."""
        while True:
            await asyncio.sleep(chance.uniform(0.0, 0.4))
            if chance.random() < 0.5:  # otherwise nothing would ever be finished on a slow machine
                while pool._opening():  # noqa: ASYNC110 - nothing tells it
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.2)
            used = [worker.number for worker in pool._workers if worker.used]
            member = pool._workers[chance.choice(used)].member
            first = bool(done["added"] and not done["killed"])  # each happens once, in a short game too
            if (first or chance.random() < 0.2) and member is not None:
                os.kill(member.pid, signal.SIGKILL)
                done["killed"] += 1
                await asyncio.sleep(chance.uniform(0.0, 0.1))
            elif len(used) == 1 or (len(used) < SHARDS and done["removed"] and chance.random() < 0.5):
                await pool.add("chance", {})
                done["added"] += 1
            else:
                await pool.remove(chance.choice(used), "chance")
                done["removed"] += 1

    calm = game(tmp_path / "calm")
    monkeypatch.setattr(WorkerPool, "_scale", restless)
    restless_run = game(tmp_path / "restless", min_workers=1)
    assert weights(restless_run) == weights(calm) != {}
    assert min(done.values()) > 0, done
    changes = rows(restless_run, "scaling")
    assert changes
    assert {change["workers"] for change in changes} <= {1, 2, 3}
