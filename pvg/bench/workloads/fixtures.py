"""Inputs of workloads: groups of fixed prompts, and batches of rollouts. All follow from the experiment and a seed, so
every sample and every variant does the same work."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from pvg.config.experiment import Experiment
from pvg.errors import ConfigurationError
from pvg.game.roles import Render, assign_roles
from pvg.models.language_model import LanguageModel
from pvg.records import Float32, Int32, Rollout
from pvg.rollout.dispatcher import GroupOrder
from pvg.seeds import draw_cyclic, generator_for, seed_for
from pvg.tasks.task import Task, problems_of_half
from pvg.training.batch import PolicyBatch
from pvg.training.credit import advantages, baseline_advantages, tracked_advantages
from pvg.training.losses import policy_loss


def check_work(experiment: Experiment, rollouts: int) -> None:
    """Raises ConfigurationError if `rollouts` is not a multiple of the group size."""
    size = experiment.rollout.group_size
    if rollouts % size:
        raise ConfigurationError(
            f"workload.rollouts = {rollouts} is not a multiple of rollout.group_size = {size}.",
            f"Set it to {max(1, rollouts // size) * size}.",
        )


def fixed_orders(experiment: Experiment, task: Task, render: Render, rollouts: int, seed: int) -> list[GroupOrder]:
    """Groups of the experiment's size with `rollouts` rollouts in all, on the prover's problems, with the game's role
    shares.

    Raises ConfigurationError for a task without such problems.
    """
    size = experiment.rollout.group_size
    groups = rollouts // size
    pool = problems_of_half(task, "prover")
    if not pool:
        raise ConfigurationError(
            "The task has no training problems for the prover.", "Raise task.problems or task.limit."
        )
    chosen = draw_cyclic(len(pool), 0, groups, seed_for(seed, "bench", "problems"))
    roles = assign_roles(groups, experiment.game.sneaky_share, generator_for(seed, "bench", "roles"))
    return [
        GroupOrder(pool[i], role, render(pool[i], role), group, size)
        for group, (i, role) in enumerate(zip(chosen, roles, strict=True))
    ]


def drawn_rewards(rollouts: Sequence[Rollout], seed: int) -> Float32:
    """float32 [N], standard normal. The work of a step does not depend on the values, if each group has a signal."""
    return generator_for(seed, "bench", "rewards").standard_normal(len(rollouts)).astype(np.float32)


def policy_batch(rollouts: Sequence[Rollout], rewards_N: Float32, loss: str) -> PolicyBatch:
    """The batch as the game builds it (pvg.game.round), with the sampler's log-probs and without a reference."""
    group_ids_N = np.array([r.group for r in rollouts], dtype=np.int32)
    role_ids_N = np.array([r.role.number for r in rollouts], dtype=np.int8)
    if loss == "spo":  # without tracked values
        tokens_N = np.array([len(r.completion_ids) for r in rollouts])
        advantages_N = tracked_advantages(rewards_N, np.zeros(len(rollouts)), tokens_N, role_ids_N)
    elif loss == "rae":
        advantages_N = baseline_advantages(rewards_N, np.zeros(len(rollouts)), role_ids_N)
    else:
        advantages_N = advantages(loss, rewards_N, group_ids_N, role_ids_N, credit=policy_loss(loss).credit)
    return PolicyBatch(
        sequences=[np.concatenate([r.prompt_ids, r.completion_ids]) for r in rollouts],
        prompt_lengths=np.array([len(r.prompt_ids) for r in rollouts], dtype=np.int32),
        sampled_logprobs=[r.logprobs for r in rollouts],
        reference_logprobs=None,
        advantages_N=advantages_N,
        role_ids_N=role_ids_N,
        group_ids_N=group_ids_N,
        versions_N=np.array([r.version for r in rollouts], dtype=np.int32),
    )


def digest_of(rows: Iterable[Int32]) -> str:
    """A short checksum of rows of token ids. Equal counts alone do not mean that two reports did the same work."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(len(row).to_bytes(8) + row.tobytes())
    return digest.hexdigest()[:12]


def model_facts(model: LanguageModel) -> dict[str, Any]:
    return {"model": model.name, "parameters": model.num_parameters}
