"""Whether prompts and verifier inputs fit: the checks of tokens before a game, which need no weights.

`pvg train` makes them after it has opened the models, `pvg train --dry-run` without weights (pvg.game.preview).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pvg.config.experiment import Experiment
from pvg.config.rules import TWO_ROLE_REWARDS
from pvg.errors import ConfigurationError
from pvg.game.roles import PromptBuilder
from pvg.records import Half, Int32, Problem, Role
from pvg.rollout.episodes import completion_room
from pvg.verifier.template import VerifierTemplate


def check_prompts_fit(
    experiment: Experiment,
    prompts: PromptBuilder,
    halves: Mapping[Half, Sequence[Problem]],
    test: Sequence[Problem],
    max_length: int,
) -> None:
    """Raises ConfigurationError if a half or the test split has no problems, if both roles get one prompt for opposite
    rewards, or if the longest prompt does not fit into a token budget or the prover's context of `max_length` tokens.

    Finds the longest question by characters and tokenizes only this one.
    """
    longest = 0
    for half, problems in halves.items():
        if not problems:
            raise ConfigurationError(
                f"The task has no training problems for the {half}.", "Raise task.problems or task.limit."
            )
        problem = max(problems, key=lambda p: len(p.question))
        rendered = [prompts.render(problem, role) for role in Role]
        if _has_opposite_roles(experiment) and prompts.translate is None:
            _check_roles_differ(rendered)
        longest = max(longest, *map(len, rendered))
        if (translate := prompts.translate) is not None:  # assumes a solution of maximal length
            empty = max(len(translate(problem, role, "")) for role in Role)
            longest = max(longest, empty + experiment.rollout.max_tokens)
    if not test:
        raise ConfigurationError("The task has no test problems.", "Raise task.test_problems or task.limit.")
    room = completion_room(experiment)
    need = longest + room
    _check_context(max_length, need, "models.prover")
    budgets = {
        "training.micro_batch_tokens": (experiment.training.micro_batch_tokens, need),
        "verifier.micro_batch_tokens": (experiment.verifier.micro_batch_tokens, 2 * need),
        "verifier.score_tokens": (experiment.verifier.score_tokens, need),
    }
    for key, (budget, least) in budgets.items():
        if budget < least:
            raise ConfigurationError(
                f"{key} = {budget} is too small: the longest prompt has {longest} tokens, and a completion may have up "
                f"to {room}.",
                f"Set it to at least {least}, or lower rollout.max_tokens.",
            )


def check_verifier_input_fits(
    experiment: Experiment, template: VerifierTemplate, problems: Sequence[Problem], max_length: int
) -> None:
    """Raises ConfigurationError if the longest problem and solution do not fit into the verifier's context."""
    problem = max(problems, key=lambda p: len(p.question))
    ids, _ = template.tokens(problem.question, "", np.zeros(0, dtype=np.int32), None)
    _check_context(max_length, len(ids) + completion_room(experiment), "models.verifier")


def _has_opposite_roles(experiment: Experiment) -> bool:
    """Self-play has one role, and its reward is a change in value."""
    return experiment.task.kind != "play" and experiment.game.reward.kind in TWO_ROLE_REWARDS


def _check_roles_differ(rendered: Sequence[Int32]) -> None:
    """pvg.config.rules sees the texts of the experiment, and not those of the task."""
    helpful_P, sneaky_P = rendered
    if np.array_equal(helpful_P, sneaky_P):
        raise ConfigurationError(
            "Both roles get the same prompt, but the reward pays them for opposite things.",
            "Change prompts.helpful or prompts.sneaky, or add prompts.examples.",
        )


def _check_context(max_length: int, need: int, key: str) -> None:
    if max_length < need:
        raise ConfigurationError(
            f"{key} takes at most {max_length} tokens; the longest problem and completion may need {need}.",
            "Lower rollout.max_tokens, or choose a model with a longer context.",
        )
