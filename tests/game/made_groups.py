"""Groups of rollouts of given versions, without an engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pvg.records import Grade, Group, Problem, Role, Rollout, VersionSpan

EMPTY = np.zeros(0, dtype=np.int32)


def made_group(name: str, versions: Sequence[Sequence[int]], tokens: int = 4, role: Role = Role.HELPFUL) -> Group:
    """One rollout for each of `versions`, which are those of its tokens: the first ones of the first, and so on."""
    problem = Problem(name, "1+1?", "2")
    rollouts = []
    for index, of_tokens in enumerate(versions):
        spans = tuple(VersionSpan(start, version) for start, version in enumerate(of_tokens))
        rollouts.append(
            Rollout(
                id=f"{name}/{index}",
                problem_id=name,
                question=problem.question,
                reference=problem.answer,
                role=role,
                round=0,
                source="base",
                step=0,
                group=0,
                prompt_ids=EMPTY,
                completion_ids=np.zeros(tokens, dtype=np.int32),
                logprobs=np.zeros(tokens, dtype=np.float32),
                spans=spans,
                finish_reason="stop",
                text="",
                grade=Grade(correct=True, well_formed=True),
            )
        )
    return Group(problem, role, tuple(rollouts))
