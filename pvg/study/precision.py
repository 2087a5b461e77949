"""The precision of a study's games: float32 on a CPU without instructions for bfloat16.

    plan, notes = with_precision(load_study("mine"))

Only what the file of an arm's experiment sets to bfloat16 changes. What the study's file or `--set` sets is kept. So
two arms may compute in different precisions.

Invariant: a study decides once about each setting. An arm with a game keeps the precision of this game, also on another
machine. An arm without a game follows the games of the other arms: what their files have as bfloat16 and their games as
float32 becomes float32 here too, and what their games have as bfloat16 stays so. This machine decides about a setting
only if no game has decided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pvg.config.experiment import Experiment
from pvg.errors import ConfigurationError, PvgError
from pvg.study.plan import Arm, StudyPlan
from pvg.telemetry.cpu import (
    as_the_run_computes,
    bfloat16_settings,
    float32_settings,
    in_float32,
    without_slow_bfloat16,
)


@dataclass(frozen=True, slots=True)
class _Choice:
    """An arm with its precision. `notes`: one line for each change. `here`: whether this machine's CPU is a reason."""

    arm: Arm
    notes: tuple[str, ...] = ()
    here: bool = False


def with_precision(plan: StudyPlan, *, playing: bool = True) -> tuple[StudyPlan, list[str]]:
    """The plan with the precision that its games have or get on this machine, and one line for each change.

    `playing`: whether games may follow. If not, arms without a game stay as they are, and no arm is refused. Raises
    ConfigurationError for two arms that differ only by bfloat16, which one of them has lost.
    """
    begun = {arm.name: game for arm in plan.arms if (game := _first_game(plan, arm)) is not None}
    choices = [_choice(arm, plan.arms, begun, playing) for arm in plan.arms]
    if playing:
        _refuse_equal(choices, plan)
    notes = dict.fromkeys(note for choice in choices for note in choice.notes if note)
    return replace(plan, arms=tuple(choice.arm for choice in choices)), list(notes)


def _choice(arm: Arm, arms: Sequence[Arm], begun: Mapping[str, Experiment], playing: bool) -> _Choice:
    if (own := begun.get(arm.name)) is not None:
        experiment, note = as_the_run_computes(arm.experiment, own, arm.chosen)
        evaluated = arm.evaluated and as_the_run_computes(arm.evaluated, own, arm.chosen)[0]
        return _Choice(replace(arm, experiment=experiment, evaluated=evaluated), (note,))
    return _as_the_others(arm, arms, begun) if playing else _Choice(arm)


def _as_the_others(arm: Arm, arms: Sequence[Arm], begun: Mapping[str, Experiment]) -> _Choice:
    """The precision of an arm without a game: as the games of other arms on such a device, otherwise as fits the
    CPU."""
    precise, decided = set[str](), set[str](arm.chosen)
    for other in arms:
        if other.name in begun and other.experiment.models.device == arm.experiment.models.device:
            precise.update(float32_settings(other.experiment, begun[other.name], other.chosen))
            decided.update(set(bfloat16_settings(other.experiment)) - other.chosen)
    follows = [key for key in bfloat16_settings(arm.experiment) if key in precise and key not in arm.chosen]

    def changed(experiment: Experiment) -> tuple[Experiment, str]:
        return without_slow_bfloat16(in_float32(experiment, follows) if follows else experiment, decided)

    experiment, by_the_cpu = changed(arm.experiment)
    evaluated = arm.evaluated and changed(arm.evaluated)[0]
    by_the_games = (
        f"The study began with float32 for {', '.join(follows)}, so arms without a game get float32 too, where their "
        "experiment says bfloat16."
    )
    notes = (by_the_games if follows else "", by_the_cpu)
    return _Choice(replace(arm, experiment=experiment, evaluated=evaluated), notes, here=bool(by_the_cpu))


def _refuse_equal(choices: Sequence[_Choice], plan: StudyPlan) -> None:
    """Raises ConfigurationError for two arms that differ only by bfloat16, which one of them has lost."""
    seen: dict[tuple[str, str], _Choice] = {}
    for choice in choices:
        other = seen.setdefault(choice.arm.game, choice)
        if other is choice:
            continue
        here = choice.here or other.here
        why = "This CPU has no instructions for bfloat16" if here else "The study began with float32 for bfloat16"
        raise ConfigurationError(
            f"{why}, so the arms {other.arm.name!r} and {choice.arm.name!r} of {plan.file} are the same game in "
            "float32.",
            "Leave one out, or set the precision and dtype of one without a game in the study's file: then pvg keeps "
            "bfloat16.",
        )


def _first_game(plan: StudyPlan, arm: Arm) -> Experiment | None:
    """The settings of the arm's first game that exists and can be read."""
    for seed in plan.seeds:
        run = plan.cell(arm, seed).run
        try:
            if run.experiment_file.is_file():
                return run.experiment()
        except PvgError:  # damaged: playing or reading the cell reports it
            continue
    return None
