"""How far a policy is from its start, and how often it is right: what the legibility tax compares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pvg.evaluation.study import Study, digest
from pvg.evaluation.tax import Reach
from pvg.records import Problem, Rollout
from pvg.training.batch import PolicyBatch
from pvg.training.forward import ForwardSettings
from pvg.training.recompute import recompute_logprobs

if TYPE_CHECKING:
    from torch import Tensor


def has_reach(study: Study, name: str, of: str) -> bool:
    """Whether `reach` has nothing to compute."""
    return study.units.read(f"reach-{name}", digest("reach", of)) is not None


async def reach(
    study: Study,
    name: str,
    of: str,
    helpful: Sequence[Rollout],
    pool: Sequence[Problem],
    read: Callable[[], Mapping[str, Tensor]] | None,
) -> Reach:
    """The reach of the policy whose weights `read` gives (None: the start itself, whose KL is 0) by its `helpful`
    samples, whose digest is `of`. Log-probs are computed once."""
    for_ = digest("reach", of)
    found = study.units.read(f"reach-{name}", for_)
    if found is None:
        study.begin(f"reach-{name}")
        kl_N = (
            np.zeros(len(helpful)) if read is None else await study.players.compute(lambda: _kl(study, helpful, read()))
        )
        found = _by_problem(helpful, kl_N, pool)
        study.units.write(f"reach-{name}", for_, found)
    return Reach(*(np.array(found[key], dtype=np.float64) for key in ("kl", "correct", "tokens", "solutions")))


def _kl(study: Study, rollouts: Sequence[Rollout], tensors: Mapping[str, Tensor]) -> Any:
    """float64 [N]: sum over a solution's tokens of log pi - log start, in nats. In the compute thread.

    Of a dialogue those of the solution alone: that is the KL between the distributions of solutions, it does not depend
    on who asks, and being right is of the solution. What drifts in the answers would be added to it.
    """
    experiment, base = study.experiment, study.players.base
    settings = ForwardSettings.of(experiment.training, experiment.rollout.temperature, base.tokenizer.pad_id)
    settings = replace(settings, precision="float32", router_replay=False)
    batch = _batch(rollouts)
    with base.copy() as policy:
        policy.load_weights(tensors)
        own = recompute_logprobs(policy.module, batch, settings)
    start = recompute_logprobs(base.module, batch, settings)
    return np.array([float(np.sum(p.astype(np.float64) - b)) for p, b in zip(own, start, strict=True)])


def _batch(rollouts: Sequence[Rollout]) -> PolicyBatch:
    """Rollouts as a batch that nothing is learnt from."""
    rows = len(rollouts)
    return PolicyBatch(
        sequences=[np.concatenate([r.prompt_ids, r.completion_ids[: r.solution_tokens]]) for r in rollouts],
        prompt_lengths=np.array([len(r.prompt_ids) for r in rollouts], dtype=np.int32),
        sampled_logprobs=[r.logprobs[: r.solution_tokens] for r in rollouts],
        reference_logprobs=None,
        advantages_N=np.zeros(rows, dtype=np.float32),
        role_ids_N=np.array([r.role.number for r in rollouts], dtype=np.int8),
        group_ids_N=np.array([r.group for r in rollouts], dtype=np.int32),
        versions_N=np.array([r.version for r in rollouts], dtype=np.int32),
    )


def _by_problem(rollouts: Sequence[Rollout], kl_N: Any, pool: Sequence[Problem]) -> dict[str, list[float]]:
    places = {problem.id: place for place, problem in enumerate(pool)}
    problems_N = np.array([places[r.problem_id] for r in rollouts])
    columns = {
        "kl": kl_N,
        "correct": np.array([float(r.grade.correct) for r in rollouts]),
        "tokens": np.array([float(r.solution_tokens) for r in rollouts]),
        "solutions": np.ones(len(rollouts)),
    }
    return {
        key: [float(v) for v in np.bincount(problems_N, weights=values, minlength=len(pool))]
        for key, values in columns.items()
    }
