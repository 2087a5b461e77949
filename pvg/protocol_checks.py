"""Of the settings that cannot work together, or are probably not meant, those of protocols and schedules.

pvg.experiment_checks asks both functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pvg.extensions import is_reference

if TYPE_CHECKING:
    from pvg.experiment import Experiment

TRANSLATORS_REWARDS = ("decoupled", "cgc", "goodhart")
SIMULTANEOUS = ("verifier_every", "verifier_updates", "fresh_problems", "fresh_window", "fresh_share")


def protocol_impossibilities(experiment: Experiment) -> list[str]:
    """Each sentence names the keys and a remedy."""
    return [
        *_impossible_schedule(experiment),
        *_impossible_solver(experiment),
        *_impossible_challenge(experiment),
        *_impossible_programs(experiment),
    ]


def _impossible_programs(experiment: Experiment) -> list[str]:
    protocol = experiment.game.protocol
    if experiment.task.kind != "code" or protocol == "direct":
        return []
    return [
        f"game.protocol = {protocol!r} is for solutions in steps that end with an answer, and task.kind = 'code' has "
        "programs; set game.protocol to 'direct'"
    ]


def _impossible_challenge(experiment: Experiment) -> list[str]:
    rollout, found = experiment.rollout, list[str]()
    if experiment.game.protocol != "challenge":
        return found
    if rollout.partial:
        found.append(
            "rollout.partial = true continues completions of one turn, and game.protocol = 'challenge' has several; "
            "set rollout.partial to false"
        )
    if rollout.routed_experts:
        found.append(
            "rollout.routed_experts are told of completions of one turn, and game.protocol = 'challenge' has several; "
            "set rollout.routed_experts to false"
        )
    if experiment.training.overlong_buffer:
        found.append(
            "training.overlong_buffer counts towards rollout.max_tokens, which game.protocol = 'challenge' gives the "
            "solution alone; set it to 0"
        )
    return found


def _impossible_solver(experiment: Experiment) -> list[str]:
    game, found = experiment.game, list[str]()
    if game.protocol != "decoupled":
        return found
    if game.reward not in TRANSLATORS_REWARDS and not is_reference(game.reward):  # a user's may know translations
        found.append(
            f"game.reward = {game.reward!r} pays for correct and incorrect solutions, and game.protocol = 'decoupled' "
            "asks for the solver's answer or another; set game.reward to 'decoupled', 'cgc' or 'goodhart'"
        )
    if experiment.rollout.prompts == "plain":
        found.append(
            "rollout.prompts = 'plain' has no prompt that shows a translator the solver's solution; set it to 'tag' or "
            "'chat', or game.protocol to 'direct'"
        )
    if game.solver != "base" and experiment.weights.transport == "lora":
        found.append(
            f"game.solver = {game.solver!r} is a whole model, and weights.transport = 'lora' brings adapters alone; "
            "set that to 'filesystem', or game.solver to 'base'"
        )
    return found


def _impossible_schedule(experiment: Experiment) -> list[str]:
    if experiment.game.schedule != "simultaneous":
        return []
    if experiment.verifier.ensemble > 1:
        return [
            f"verifier.ensemble = {experiment.verifier.ensemble} has members that are trained one after the other, and "
            "game.schedule = 'simultaneous' trains one verifier beside the prover; set verifier.ensemble to 1, or "
            "game.schedule to 'stackelberg'"
        ]
    if experiment.rollout.prefetch:
        return [
            f"rollout.prefetch = {experiment.rollout.prefetch} scores rollouts ahead, and game.schedule = "
            "'simultaneous' changes the verifier meanwhile; set rollout.prefetch to 0, or game.schedule to "
            "'stackelberg'"
        ]
    return []


def protocol_oddities(experiment: Experiment) -> list[str]:
    """Settings without an effect."""
    game = experiment.game
    found = []
    if game.protocol != "decoupled" and game.solver != "base":
        found.append(f"game.solver has no effect on game.protocol = {game.protocol!r}")
    if game.protocol == "decoupled" and experiment.models.prover.source == "embedded:modchain-prover":
        found.append(
            "models.prover.source = 'embedded:modchain-prover' was never shown a solution in its prompt and writes "
            "none behind it; take 'embedded:modchain-dialogue' for game.protocol = 'decoupled'"
        )
    if game.protocol != "challenge":
        for name in ("challenge", "challenge_tokens"):
            if name in game.model_fields_set:
                found.append(f"game.{name} has no effect on game.protocol = {game.protocol!r}")
    if game.schedule == "stackelberg":
        for name in SIMULTANEOUS:
            if name in game.model_fields_set:
                found.append(f"game.{name} has no effect on game.schedule = 'stackelberg'")
    batches = experiment.training.steps // experiment.training.minibatches
    if game.schedule == "simultaneous" and batches < game.verifier_every:
        found.append(
            f"game.verifier_every = {game.verifier_every} is more than the {batches} batches of a round: the verifier "
            "is never updated"
        )
    return found
