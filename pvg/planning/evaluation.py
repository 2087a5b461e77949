"""The time of `pvg evaluate`, from the plan of its game."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pvg.config.experiment import Experiment
from pvg.errors import ConfigurationError
from pvg.evaluation.report import attack_kinds
from pvg.evaluation.runner import READ
from pvg.evaluation.training import baseline_experiment
from pvg.hub import Say
from pvg.planning.plan import ExperimentPlan, plan_here
from pvg.reporting.formats import short_seconds
from pvg.traces.measures import SHARES


def evaluation_s(experiment: Experiment, parts: Collection[str], numbers: Sequence[int], plan: ExperimentPlan) -> float:
    """Seconds of the samples, the attacks and the correctness baseline of rounds `numbers`, if no attack ends early.
    Scores and measures take little beside them. `plan` is of the experiment."""
    section, training = experiment.evaluate, experiment.training
    samples, step_s = section.problems * section.samples, plan.step_s
    sampled = 2 * samples * (1 + (max(numbers) + 1 if "detection" in parts else len(numbers)))
    found = 0.0
    if "exploit" in parts:
        attacks = len(numbers) * len(attack_kinds(experiment))
        found += attacks * section.attack_steps * step_s * (section.attack_groups or training.groups) / training.groups
        sampled += samples * (attacks + len(numbers))
    if "tax" in parts:
        found += baseline_experiment(experiment).training.steps * step_s
        sampled += samples * (section.baseline_probes + 1)
    if "legibility" in parts:  # a reader writes an answer for SR, without reasoning, and after each share of it
        sampled += 2 * len(numbers) * READ * (2 + len(SHARES))
    return found + sampled * plan.bounds.sampling_s / plan.work.rollouts


def evaluation_says(experiment: Experiment, parts: Collection[str], numbers: Sequence[int], say: Say) -> str:
    """One line: the time of an evaluation on this machine, and the peak of memory of the plan of its game."""
    try:
        plan = plan_here(experiment, say)
    except ConfigurationError as error:  # what is wrong with a model is said where it is opened
        return f"The plan of the evaluation is missing: {error.message}"
    seconds = evaluation_s(experiment, parts, numbers, plan)
    peak_gb = max(stage.total for stage in plan.memory) / 1e9
    return (
        f"By the plan, the evaluation takes about {short_seconds(seconds)}, or less if attacks succeed early, and "
        f"{peak_gb:.2g} GB of memory."
    )
