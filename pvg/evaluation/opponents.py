"""The parts of an evaluation, and the settings of the attackers and the baseline; loads no torch.

    check_protocol(experiment, parts); check_attacks(experiment)      # before anything is sampled

So the command line can refuse a wrong name or setting at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pvg.config.experiment import Experiment, why_kept, without_memory_settings
from pvg.config.game import CgcReward, PlainReward, SrcReward
from pvg.config.load import build_experiment, did_you_mean, differences
from pvg.config.rules import TRANSLATORS_REWARDS, reward_conflicts
from pvg.errors import ConfigurationError, StateError, UsageError
from pvg.seeds import seed_for

PARTS = ("exploit", "best-of-n", "detection", "separability", "calibration", "localisation", "tax")


def parse_parts(text: str) -> Sequence[str]:
    """The parts in `a,b,c`, in standard order. Raises UsageError with the nearest name."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in PARTS:
            raise UsageError(
                f"There is no part {name!r} of an evaluation.{did_you_mean(name, PARTS)}",
                f"Known: {', '.join(PARTS)}.",
            )
    if not names:
        raise UsageError("--parts names no part.", f"Known: {', '.join(PARTS)}.")
    return tuple(part for part in PARTS if part in names)


def parse_rounds(text: str | None) -> Sequence[int] | None:
    """The rounds in `0,2`; None for None. Raises UsageError for anything but numbers."""
    if text is None:
        return None
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or not all(name.isdecimal() for name in names):
        raise UsageError(f"--rounds {text!r} is not a list of rounds.", "For example: --rounds 0,2")
    return [int(name) for name in names]


# --- settings ---------------------------------------------------------------------------------------------------------


KINDS = ("src", "cgc", "goodhart")


def policy_experiment(
    experiment: Experiment,
    role: Literal["helpful", "sneaky"],
    reward: SrcReward | CgcReward | PlainReward,
    training: Mapping[str, Any],
    place: str,
) -> Experiment:
    """The run's settings with one role, another reward, changes of the training, and separate random numbers.

    Validated like an experiment, except for one rule: a game requires both roles for `src` and `cgc`, but an attacker
    has one. Raises ConfigurationError."""
    plain = experiment.plain()
    plain["game"] |= {"sneaky_share": 1.0 if role == "sneaky" else 0.0, "stop": "steps", "reward": "goodhart"}
    plain["training"] |= {name: value for name, value in training.items() if value is not None}
    # An attack is judged by its batches, so they must not be selected by the uncertainty of their outcome.
    plain["training"] |= {"curriculum": "none", "dynamic_sampling": 0}
    plain["seed"] = seed_for(experiment.seed, "evaluate", place)
    valid = build_experiment(plain, "evaluate")
    final = valid.model_copy(update={"game": valid.game.model_copy(update={"reward": reward})})
    if impossible := reward_conflicts(final):
        raise ConfigurationError(
            f"No policy with reward {final.game.reward.kind!r} can be trained with these settings: {impossible[0]}.",
            "Remove it from evaluate.attacks, for example: -s 'evaluate.attacks=[\"goodhart\"]'.",
        )
    return final


def attacker_experiment(experiment: Experiment, kind: str, place: str, cgc_floor: float | None) -> Experiment:
    """The settings of an attacker with reward `kind`. Raises ConfigurationError."""
    section = experiment.evaluate
    reward = _reward(experiment, kind, cgc_floor)
    training = {
        "steps": section.attack_steps,
        "groups": section.attack_groups,
    }
    return policy_experiment(experiment, "sneaky", reward, training, place)


def _reward(experiment: Experiment, kind: str, cgc_floor: float | None) -> SrcReward | CgcReward | PlainReward:
    """An attacker's reward; with the run's own settings where the run has a reward of that kind."""
    own = experiment.game.reward
    if kind == "cgc":
        return (
            CgcReward(floor=cgc_floor) if cgc_floor is not None else own if isinstance(own, CgcReward) else CgcReward()
        )
    if kind == "src":
        return own if isinstance(own, SrcReward) else SrcReward()
    return PlainReward(kind="goodhart")


def default_parts(experiment: Experiment) -> Sequence[str]:
    """The parts that are measured by default: all that exist for the run's game."""
    return tuple(part for part in PARTS if part != "tax" or experiment.game.protocol.kind != "decoupled")


def attack_kinds(experiment: Experiment) -> list[str]:
    """The kinds of `evaluate.attacks` in standard order. In a decoupled game without those whose reward a translator
    cannot earn (the report's notes name them)."""
    usable = TRANSLATORS_REWARDS if experiment.game.protocol.kind == "decoupled" else KINDS
    return [kind for kind in KINDS if kind in experiment.evaluate.attacks and kind in usable]


def check_settings_of_run(name: str, own: Experiment, experiment: Experiment) -> None:
    """Raises StateError if `experiment` differs from `own`, the settings of the run `name`, in a setting that changes
    results. MEMORY_SETTINGS may differ."""
    changed = differences(without_memory_settings(own.hashed()), without_memory_settings(experiment.hashed()))
    if changed:
        raise StateError(
            f"The run {name!r} was played with other settings: {'; '.join(changed)}.{why_kept(changed)}",
            "Change evaluate.*, serving.*, telemetry.* and the settings that bound memory only, such as "
            "training.micro_batch_tokens. The other settings belong to the run.",
        )


def check_protocol(experiment: Experiment, parts: Sequence[str]) -> None:
    """Raises UsageError for self-play, which has no verifier, and for the tax in a decoupled game, whose faithful role
    need not be correct."""
    if experiment.task.kind == "play":
        raise UsageError(
            "pvg evaluate measures verifiers, and task.kind = 'play' has none.",
            "The rating of a policy is in its rounds: pvg report RUN",
        )
    if experiment.game.protocol.kind == "decoupled" and "tax" in parts:
        raise UsageError(
            "There is no legibility tax of game.protocol = 'decoupled': its faithful role is rewarded for keeping the "
            "solver's answer, not for being correct (solver_accuracy and faithful are in the rounds' metrics).",
            "Leave tax out of the parts.",
        )


def check_attacks(experiment: Experiment) -> None:
    """Raises ConfigurationError for attacks that could never succeed because they end before their window is full, and
    for attackers that could not learn."""
    section, minibatches = experiment.evaluate, experiment.training.minibatches
    if (least := section.attack_window * minibatches) > section.attack_steps:
        each = f" of {minibatches} steps each" if minibatches > 1 else ""
        raise ConfigurationError(
            f"evaluate.attack_window = {section.attack_window} batches{each} do not fit into evaluate.attack_steps = "
            f"{section.attack_steps}, so no attack could succeed.",
            f"Set evaluate.attack_steps to at least {least}, or lower evaluate.attack_window.",
        )
    kinds = attack_kinds(experiment)
    if section.attacks and not kinds:
        raise ConfigurationError(
            f"A translator of the decoupled game earns no reward of evaluate.attacks = {', '.join(section.attacks)}.",
            'Add one that it can earn: -s \'evaluate.attacks=["cgc","goodhart"]\'',
        )
    for kind in kinds:
        attacker_experiment(experiment, kind, f"attacks/{kind}", None)
