"""From what the user typed to an experiment."""

from __future__ import annotations

from collections.abc import Sequence

from pvg.config.experiment import Experiment, find_experiment, load_experiment
from pvg.extensions import check_references

DEFAULT_EXPERIMENT = "modchain"


def resolve(name: str | None, overrides: Sequence[str]) -> Experiment:
    """The experiment `name` (a name or a file; None: the default) with the overrides applied, validated, and
    the files of the user's own that it names found."""
    experiment = load_experiment(find_experiment(DEFAULT_EXPERIMENT if name is None else name), overrides)
    check_references(experiment)
    return experiment
