"""Episodes of several turns through the vLLM engine, with new weights between two turns. The servers are the tests'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from vllm_drills import Drill, check, request, run

from pvg.records import Grade, Group, Int32, Problem, Role, Rollout, Turn, VersionSpan
from pvg.rollout.dispatcher import Dispatcher, GroupOrder, request_seed
from pvg.rollout.engine import Completion, Sampling
from pvg.rollout.episodes import Observation, Transcript
from pvg.rollout.vllm_requests import SEED_BITS

QUESTION = np.array([50, 51], dtype=np.int32)
SAMPLING = Sampling(12, (1,))


class Numbers:
    """A tokenizer whose text is the ids, and a task that finds nothing wrong with it."""

    def decode(self, ids: Int32) -> str:
        return " ".join(map(str, ids.tolist()))

    def grade(self, problem: Problem, completion: str) -> Grade:
        return Grade(True, True)


class AskedOnce:
    """Publishes version 1 before it asks."""

    graded_turn = -1

    def __init__(self, drill: Drill) -> None:
        self._drill = drill

    async def observe(self, transcripts: Sequence[Transcript]) -> list[Observation | None]:
        if transcripts[0].turn:
            return [None] * len(transcripts)
        await self._drill.publish(1)
        return [Observation(QUESTION, "?", 7) for _ in transcripts]


def turn_of(rollout: Rollout, first: int, end: int | None, name: str) -> Completion:
    """What the engine must have given for the tokens from `first` to `end`."""
    ids, version = rollout.completion_ids[first:end], rollout.spans[first > 0].version
    reason: Any = "stop" if ids[-1] in SAMPLING.stop_ids else "length"
    return Completion(name, ids, rollout.logprobs[first:end], (VersionSpan(0, version),), reason, rollout.timing)


def test_each_turn_is_sampled_behind_the_tokens_of_all_before_by_the_weights_of_its_time(tmp_path: Path) -> None:
    async def use(d: Drill) -> None:
        await d.publish(0)
        words: Any = Numbers()
        dispatcher = Dispatcher(d.engine, words, words, SAMPLING, 16)
        prompt_ids = request(3).prompt_ids
        order = GroupOrder(Problem("p", "?", "1"), Role.HELPFUL, prompt_ids, 4, 6)
        groups: list[Group] = await dispatcher.sample(
            [order], round_=0, source="base", step=0, seed=9, prefix="e", environment=AskedOnce(d)
        )
        for index, rollout in enumerate(groups[0].rollouts):
            first, asked, second = rollout.turns
            assert rollout.completion_ids[asked.start : second.start].tolist() == QUESTION.tolist()
            assert asked == Turn(asked.start, False, "?")
            assert rollout.spans == (VersionSpan(0, 0), VersionSpan(second.start, 1))
            seeds = [request_seed(9, 4, index, turn) & SEED_BITS for turn in (0, 1)]
            own = replace(request(3), id=rollout.id, sampling=SAMPLING, seed=seeds[0])
            check(turn_of(rollout, first.start, asked.start, own.id), own)
            behind = np.concatenate([prompt_ids, rollout.completion_ids[: second.start]])
            sampling = replace(SAMPLING, max_tokens=7)
            later = replace(own, id=f"{own.id}/1", prompt_ids=behind, sampling=sampling, seed=seeds[1])
            check(turn_of(rollout, second.start, None, later.id), later)

    run(use, tmp_path)
