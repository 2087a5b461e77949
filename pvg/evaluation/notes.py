"""What a reader must know of an evaluation's numbers, in sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pvg.evaluation.courses import attack_kinds
from pvg.experiment import Experiment


def notes(experiment: Experiment) -> list[str]:
    """What a reader must know of this run's numbers."""
    found = []
    rollout = experiment.rollout
    if rollout.top_p < 1.0 or rollout.top_k > 0:
        found.append(
            f"Solutions are sampled from a part of the distribution (rollout.top_p = {rollout.top_p}, rollout.top_k = "
            f"{rollout.top_k}): the KL's estimate is biased."
        )
    if experiment.verifier.loss != "cross_entropy":
        found.append(
            f"verifier.loss = {experiment.verifier.loss!r} fixes no offset of a score: sigmoid(score) is no "
            "probability. The fitted calibration is one as far as a straight line in the score goes."
        )
    if experiment.verifier.ensemble > 1:
        found.append(
            f"verifier.ensemble = {experiment.verifier.ensemble} members' scores are put together "
            f"({experiment.verifier.aggregation}), and no loss has made a probability of sigmoid(that)."
        )
    return found + _notes_of_roles(experiment) + _notes_of_attacks(experiment) + _notes_of_translators(experiment)


def _notes_of_roles(experiment: Experiment) -> list[str]:
    share, found = experiment.game.sneaky_share, []
    if share in (0.0, 1.0):
        role = "sneaky" if share == 0.0 else "helpful"
        found.append(
            f"game.sneaky_share = {share} never trained the {role} role: what stands here of it is of a prover that "
            "was trained for the other one alone."
        )
    if experiment.rollout.prompts == "plain":
        found.append(
            "rollout.prompts = 'plain' gives both roles one prompt, so they are one policy: helpful and sneaky "
            "solutions differ by chance alone, and a separability of 0.5 says nothing."
        )
    return found


def _notes_of_attacks(experiment: Experiment) -> list[str]:
    training, found = experiment.training, []
    if training.schedule != "constant":
        found.append(
            f"training.schedule = {training.schedule!r} runs out over evaluate.attack_steps = "
            f"{experiment.evaluate.attack_steps}: steps to exploit compare among attacks of that limit alone."
        )
    if experiment.rollout.group_deadline_s is not None:
        found.append(
            "Attacks' batches may differ in size (rollout.group_deadline_s), and the window "
            "of an attack's criterion weighs them alike."
        )
    return found


def _notes_of_translators(experiment: Experiment) -> list[str]:
    if experiment.game.protocol != "decoupled":
        return []
    found = [
        "The solutions are translations, and correct is one with the right answer: a faithful translator is right as "
        "often as its solver. A wrong translation counts as a flaw whether or not it keeps the solver's answer; a cgc "
        "attacker is paid for those alone that do not."
    ]
    if unpaid := [kind for kind in experiment.evaluate.attacks if kind not in attack_kinds(experiment)]:
        found.append(f"No {', '.join(unpaid)} attackers: what they are paid, no translator can earn.")
    return found


def notes_of_results(rounds: Sequence[Mapping[str, Any]], error_rate: float) -> list[str]:
    """Attackers of the report's `rounds` that never were what an attack is judged as: wrong often enough."""
    found: dict[str, list[str]] = {}
    for round_ in rounds:
        for attack in round_.get("exploit") or ():
            if attack["status"] == "censored" and attack["closest_gap"] is None:
                found.setdefault(attack["kind"], []).append(str(round_["round"]))
    return [
        f"The {kind} attacker of round {', '.join(numbers)} was never wrong in {100 * error_rate:g} % of a window's "
        "solutions (evaluate.attack_error_rate): no success of it could be found, which says nothing of the verifier."
        for kind, numbers in found.items()
    ]
