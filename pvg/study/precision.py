"""The precision of a study's games: float32 on a CPU without instructions for bfloat16.

    plan, notes = with_precision(load_study("mine"))

Only what the file of an arm's experiment sets to bfloat16 changes. What the study's file or `--set` sets is kept.

Invariant: all games of a study compute alike. A study that has begun keeps the precision of its first games, also on
another machine.
"""

from __future__ import annotations

from dataclasses import replace

from pvg.config.experiment import Experiment
from pvg.errors import ConfigurationError, PvgError
from pvg.study.plan import Arm, StudyPlan
from pvg.telemetry.cpu import as_the_run_computes, without_slow_bfloat16


def with_precision(plan: StudyPlan) -> tuple[StudyPlan, list[str]]:
    """The plan with the precision that its games have or get on this machine, and one line for each change."""
    begun = {arm.name: _first_game(plan, arm) for arm in plan.arms}
    other = next((game for game in begun.values() if game is not None), None)
    arms, notes = [], dict[str, None]()
    for arm in plan.arms:
        changed, note = _with_precision(arm, begun[arm.name] or other)
        arms.append(changed)
        notes[note] = None
    _refuse_equal(arms, plan)
    return replace(plan, arms=tuple(arms)), [note for note in notes if note]


def _refuse_equal(arms: list[Arm], plan: StudyPlan) -> None:
    """Raises ConfigurationError for two arms that differ only by bfloat16, which one of them has lost."""
    seen: dict[str, str] = {}
    for arm in arms:
        other = seen.setdefault(arm.experiment.hash(), arm.name)
        if other != arm.name:
            raise ConfigurationError(
                f"On this CPU, which has no instructions for bfloat16, the arms {other!r} and {arm.name!r} of "
                f"{plan.file} are the same game in float32.",
                "Leave one out, or set its precision and dtype in the study's file: then pvg keeps bfloat16.",
            )


def _with_precision(arm: Arm, begun: Experiment | None) -> tuple[Arm, str]:
    def chosen(experiment: Experiment) -> tuple[Experiment, str]:
        if begun is None:
            return without_slow_bfloat16(experiment, arm.chosen)
        return as_the_run_computes(experiment, begun, arm.chosen)

    experiment, note = chosen(arm.experiment)
    evaluated = None if arm.evaluated is None else chosen(arm.evaluated)[0]
    return replace(arm, experiment=experiment, evaluated=evaluated), note


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
