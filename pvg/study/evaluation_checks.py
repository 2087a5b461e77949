"""What a study asks of `pvg evaluate`, checked before anything is played; loads no torch.

arm_experiment = as_evaluated(experiment, evaluate.changes, path)
refuse_unmeasured(measures, parts, {"arm": arm_experiment}, path)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pvg.errors import ConfigurationError, PvgError
from pvg.evaluation.courses import attack_kinds, check_attacks, check_protocol, default_parts
from pvg.evaluation.parts import PARTS
from pvg.experiment import Experiment, assign, build_experiment, leaves, nearest
from pvg.study.measures import Measure

OF_AN_EVALUATION = ("evaluate", "serving", "telemetry")  # what `pvg evaluate` may set of a run that was played


def as_evaluated(experiment: Experiment, changes: Mapping[str, Any], path: str) -> Experiment:
    """The settings that an arm's games are evaluated with. Raises ConfigurationError."""
    where, data = f"[evaluate] set of {path}", experiment.plain()
    said = dict(leaves(dict(changes)))
    for key, value in said.items():
        if key.split(".")[0] not in OF_AN_EVALUATION or "." not in key:
            allowed = ", ".join(f"{section}.*" for section in OF_AN_EVALUATION)
            raise ConfigurationError(
                f"{key} cannot be set here ({where}): only {allowed} can, for the rest is how the games are played.",
                "Set it in [common] or in an arm.",
            )
        assign(data, key, value)
    return build_experiment(data, where, dict.fromkeys(said, where))


def refuse_unmeasured(
    measures: Sequence[Measure], parts: Sequence[str] | None, arms: Mapping[str, Experiment], path: str
) -> None:
    """Raises ConfigurationError for parts that there are not, for evaluations that `pvg evaluate` would refuse, and for
    measures that would stay empty. `parts` is None without an evaluation; `arms` are settings `as_evaluated`."""
    if parts is None:
        if measure := next((measure for measure in measures if measure.parts), None):
            raise ConfigurationError(
                f"The measure {measure.name!r} is read from an evaluation, and {path} asks for none.",
                "Set evaluate = true, or leave the measure out.",
            )
        return
    if strange := next((part for part in parts if part not in PARTS), None):
        hint = nearest(strange, PARTS)
        raise ConfigurationError(
            f"There is no part {strange!r} of an evaluation ({path})." + (f" Did you mean {hint!r}?" if hint else ""),
            f"Known: {', '.join(PARTS)}.",
        )
    for name, experiment in arms.items():
        asked = parts or default_parts(experiment)
        try:
            check_protocol(experiment, asked)
            if "exploit" in asked:
                check_attacks(experiment)
        except PvgError as error:
            raise ConfigurationError(f"Arm {name!r} of {path}: {error.message}", error.remedy) from None
        for measure in measures:
            _refuse_empty(measure, asked, name, experiment, path)


def _refuse_empty(measure: Measure, asked: Sequence[str], name: str, experiment: Experiment, path: str) -> None:
    if lacking := next((part for part in measure.parts if part not in asked), None):
        there = lacking in default_parts(experiment)
        raise ConfigurationError(
            f"The measure {measure.name!r} is read from the part {lacking!r} of an evaluation, which "
            + (f"{path} does not ask for." if there else f"arm {name!r} of {path} has not: its game has none."),
            f"Add {lacking!r} to the parts, or leave the measure out." if there else "Leave the measure out.",
        )
    section, kinds = experiment.evaluate, attack_kinds(experiment)
    if measure.attack and measure.attack not in kinds:
        raise ConfigurationError(
            f"The measure {measure.name!r} needs an attack of the kind {measure.attack!r}, and evaluate.attacks of "
            f"arm {name!r} of {path} has {', '.join(kinds) or 'none'} (of those that its game can pay).",
            "Add it there, or leave the measure out.",
        )
    if section.samples < measure.samples:
        raise ConfigurationError(
            f"The measure {measure.name!r} needs evaluate.samples = {measure.samples} or more, and arm {name!r} of "
            f"{path} has {section.samples}.",
            "Raise it, or leave the measure out.",
        )
