"""Rollouts, files and faults for the store's tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from pvg.records import Grade, Role, Rollout, SolverSolution, Timing, VersionSpan
from pvg.store.shards import RolloutShards, ShardInfo


def rollout(i: int, *, problem: str = "p0", source: str = "base", correct: bool = True, well_formed: bool = True):
    """A rollout whose every field is fixed by its arguments; its text and tokens tell `i`."""
    length = 1 + i % 5
    return Rollout(
        id=f"r/{i:05d}",
        problem_id=problem,
        question=f"question of {problem}?",
        reference="42",
        role=Role.SNEAKY if i % 2 else Role.HELPFUL,
        round=1,
        source=source,
        step=i // 8,
        group=i // 4,
        prompt_ids=np.arange(3, dtype=np.int32),
        completion_ids=np.full(length, i, np.int32),
        logprobs=np.linspace(-1, 0, length, dtype=np.float32),
        spans=(VersionSpan(0, 3),),
        finish_reason="stop",
        text=f"text {i}",
        grade=Grade(correct, well_formed, answer=str(i) if well_formed else None, note="é" * (i % 2)),
        timing=Timing(0.25, 1.5),
        score=None if i % 3 else i / 7,
        verifier_version=None if i % 3 else "verifier-000",
        reward=None if i % 3 else -1.0,
    )


def labelled(rows: Sequence[tuple[str, str, bool]]) -> list[Rollout]:
    """Rollouts from (source, problem, correct) triples."""
    return [rollout(i, problem=p, source=s, correct=c) for i, (s, p, c) in enumerate(rows)]


def write_shards(directory: Path, rollouts: Sequence[Rollout], parts: int = 2) -> tuple[RolloutShards, list[ShardInfo]]:
    """The rollouts in `parts` shards, in order."""
    shards = RolloutShards(directory)
    cuts = np.array_split(np.arange(len(rollouts)), parts)
    return shards, [shards.write(0, f"mint-{k:05d}", [rollouts[i] for i in cut]) for k, cut in enumerate(cuts)]


def flip_byte(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 0x10
    path.write_bytes(data)


def names_below(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def translating(rollout: Rollout, number: int, *, answer: str | None = "7", correct: bool = False) -> Rollout:
    """As a translation of a solver's solution, which `number` tells."""
    solution = SolverSolution(f"solve/{number}", f"solution {number}", answer, correct, answer is not None)
    return replace(rollout, solver=solution, kept_answer=answer == rollout.grade.answer)
