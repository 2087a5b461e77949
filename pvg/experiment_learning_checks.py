"""The part of pvg.experiment_checks that is about what the prover's trainer learns from, and how: baselines, which
problems and groups a batch holds, importance weights, and coefficients that are adapted."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pvg.experiment import Experiment


def impossible_learning(experiment: Experiment) -> list[str]:
    """Combinations that cannot work; each sentence names the keys and a remedy."""
    return [*_impossible_dynamic(experiment), *_impossible_importance(experiment), *_impossible_control(experiment)]


def _impossible_dynamic(experiment: Experiment) -> list[str]:
    training, rollout = experiment.training, experiment.rollout
    found: list[str] = []
    if not training.dynamic_sampling:
        return found
    if training.groupless:
        found.append(
            f"training.dynamic_sampling replaces groups without a signal, and training.loss = {training.loss!r} has no "
            "groups; set it to false, or take a loss that has, such as 'dapo'"
        )
    if rollout.group_size == 1:
        found.append(
            "training.dynamic_sampling replaces groups whose rewards are all the same, and of rollout.group_size = 1 "
            "every group is one; raise rollout.group_size"
        )
    if rollout.prefetch:
        found.append(
            f"training.dynamic_sampling asks for further groups when a batch has been scored, and rollout.prefetch = "
            f"{rollout.prefetch} samples before anybody knows; set rollout.prefetch to 0"
        )
    if rollout.partial:
        found.append(
            "training.dynamic_sampling fills a batch up before it is trained on, and rollout.partial = true leaves "
            "groups to later batches; set one of them to false"
        )
    return found


def _impossible_importance(experiment: Experiment) -> list[str]:
    training, found = experiment.training, []
    weighted = training.importance in ("truncated", "masked")
    if weighted and experiment.rollout.logprobs == "recomputed":
        found.append(
            f"training.importance = {training.importance!r} compares the policy with the sampler, whose log-probs "
            "rollout.logprobs = 'recomputed' replaces; set that to 'sampled', or training.importance to 'none'"
        )
    if training.importance == "masked" and training.importance_low >= training.importance_high:
        found.append(
            f"training.importance_low = {training.importance_low} is not below training.importance_high = "
            f"{training.importance_high}: every token would be masked; lower the one or raise the other"
        )
    if training.importance == "masked" and not training.importance_low <= 1.0 <= training.importance_high:
        found.append(
            f"training.importance = 'masked' between {training.importance_low} and {training.importance_high} masks "
            "tokens on which sampler and trainer agree, whose ratio is 1; set training.importance_low to at most 1 and "
            "training.importance_high to at least 1"
        )
    return found


def _impossible_control(experiment: Experiment) -> list[str]:
    training, found = experiment.training, []
    if training.kl_target is not None and training.kl == 0.0:
        found.append(
            f"training.kl_target = {training.kl_target} is reached by multiplying training.kl, which is 0; set "
            "training.kl to 0.02, say, or leave training.kl_target out"
        )
    if training.kl_target is not None and training.loss == "dapo":
        found.append("training.kl_target has nothing to adapt: training.loss = 'dapo' has no KL term; leave it out")
    if training.entropy_target is not None and training.entropy_bonus > training.entropy_bonus_max:
        found.append(
            f"training.entropy_bonus = {training.entropy_bonus} begins above training.entropy_bonus_max = "
            f"{training.entropy_bonus_max}; lower the one or raise the other"
        )
    return found


def odd_learning(experiment: Experiment) -> list[str]:
    """Settings of this part that have no effect as they are."""
    training = experiment.training
    given = training.model_fields_set
    idle = {
        "training.dynamic_sampling = false": ["dynamic_sampling_rounds"] * (not training.dynamic_sampling),
        "training.curriculum = 'none'": [
            name
            for name in ("curriculum_half_life", "curriculum_edges", "curriculum_shares")
            if training.curriculum == "none"
        ],
        "training.curriculum = 'prioritised'": ["curriculum_shares"] * (training.curriculum == "prioritised"),
        "training.kl_target, which is not set": ["kl_horizon"] * (training.kl_target is None),
        "training.entropy_target, which is not set": ["entropy_step", "entropy_bonus_max"]
        * (training.entropy_target is None),
        "training.kl = 0": ["kl_estimator"] * (training.kl == 0.0),
    }
    weights = training.importance or ("truncated" if training.off_policy == "decoupled" else "none")
    if weights == "none":
        where = "training.off_policy = 'sampled'" if training.importance is None else "training.importance = 'none'"
        idle[where] = ["importance_high", "importance_low", "importance_level"]
    if weights == "truncated":
        idle["truncated weights"] = ["importance_low"]
    return [
        f"training.{name} has no effect on {where}" for where, names in idle.items() for name in names if name in given
    ]
