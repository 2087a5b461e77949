"""Of the settings that cannot work together, or are probably not meant, those of protocols and schedules.

pvg.experiment_checks asks both functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pvg.experiment import Experiment

SIMULTANEOUS = ("verifier_every", "verifier_updates", "fresh_problems", "fresh_window", "fresh_share")


def protocol_impossibilities(experiment: Experiment) -> list[str]:
    """Each sentence names the keys and a remedy."""
    return _impossible_schedule(experiment)


def _impossible_schedule(experiment: Experiment) -> list[str]:
    if experiment.game.schedule == "simultaneous" and experiment.rollout.prefetch:
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
