"""Whether prompts, verifier inputs and solutions fit the models: checks before a game, which need no weights.

`pvg train` makes them after it has opened the models, `pvg train --dry-run` without weights (pvg.game.task_check).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from pvg.config.experiment import TokenLimits
from pvg.errors import ConfigurationError, counted, shortened
from pvg.game.roles import PromptBuilder
from pvg.records import Half, Int32, Problem, Role
from pvg.tasks.task import HasNote, Task, correct_solution
from pvg.verifier.data import VerifierTemplate

if TYPE_CHECKING:
    from pvg.game.protocols import SpokenLine
    from pvg.models.tokenizer import Tokenizer


TRIED = 20  # problems whose correct solutions are tried
# Between the steps of a solution and its answer. A model of few characters has some of them.
BEFORE_AN_ANSWER = ("\n", " ", "=", ";")


def check_prompts_fit(
    limits: TokenLimits,
    prompts: PromptBuilder,
    halves: Mapping[Half, Sequence[Problem]],
    test: Sequence[Problem],
    max_length: int,
) -> int:
    """The most tokens of a prompt and its completion. Raises ConfigurationError if a half or the test split has no
    problems, if both roles get one prompt for opposite rewards, or if the longest prompt does not fit into a token
    budget or the prover's context of `max_length` tokens.

    Finds the longest question by characters and tokenizes only this one.
    """
    longest = 0
    for half, problems in halves.items():
        if not problems:
            raise ConfigurationError(
                f"The task has no training problems for the {half}.", "Raise task.problems or task.limit."
            )
        problem = max(problems, key=lambda p: len(p.question))
        rendered = [prompts.prompt(problem, role) for role in Role]
        if limits.opposite_roles and prompts.translate is None:
            _check_roles_differ(rendered)
        longest = max(longest, *map(len, rendered))
        if (translate := prompts.translate) is not None:  # assumes a solution of maximal length
            empty = max(len(translate(problem, role, "")) for role in Role)
            longest = max(longest, empty + limits.solution)
    if not test:
        raise ConfigurationError("The task has no test problems.", "Raise task.test_problems or task.limit.")
    need = longest + limits.room
    _check_context(limits, max_length, need + limits.beyond, "models.prover")
    for key, budget in limits.budgets.items():
        if budget < need:
            raise ConfigurationError(
                f"{key} = {budget} is too small: the longest prompt has {longest} tokens, and a completion may have up "
                f"to {limits.room}.",
                f"Set it to at least {need}, or lower {_raising(limits)}.",
            )
    return need


def check_verifier_input_fits(
    limits: TokenLimits, template: VerifierTemplate, problems: Sequence[Problem], max_length: int, verdict: int = 0
) -> int:
    """The most tokens of the verifier's input and of what it writes (`verdict`). Raises ConfigurationError if they do
    not fit into its context of `max_length` tokens, or a verdict not into verifier.micro_batch_tokens."""
    problem = max(problems, key=lambda p: len(p.question))
    ids, _ = template.tokens(problem.question, "", np.zeros(0, dtype=np.int32), None)
    _check_context(limits, max_length, need := len(ids) + limits.room + verdict, "models.verifier")
    key = "verifier.micro_batch_tokens"
    if verdict and (budget := limits.budgets[key]) < need:
        raise ConfigurationError(
            f"{key} = {budget} is too small: a solution with its verdict may have {need} tokens.",
            f"Set it to at least {need}, or lower rollout.max_tokens or verifier.head.tokens.",
        )
    return need


def check_voices_fit(limits: TokenLimits, lines: Mapping[str, SpokenLine], max_length: int) -> None:
    """Raises ConfigurationError if the rollout of a voice besides the prover may not fit into the prover's context of
    `max_length` tokens, or into training.micro_batch_tokens. `lines`: of an example with the longest question, in whose
    prompts solutions may be short."""
    first, *others = lines.values()
    shown = len(first.turns[0].token_ids) - 1  # without the end token
    longer, key = max(0, limits.solution - shown), "training.micro_batch_tokens"
    for line in others:
        if line.prompt_ids is not None:
            need = len(line.prompt_ids) + longer + limits.room - limits.solution
            _check_context(limits, max_length, need + limits.beyond, "models.prover")
            if (budget := limits.budgets[key]) < need:
                raise ConfigurationError(
                    f"{key} = {budget} is too small: the prompt of another voice and its text may have {need} tokens.",
                    f"Set it to at least {need}, or lower {_raising(limits)}.",
                )


def writable_solution(
    sources: Mapping[str, str],
    task: Task,
    problems: Sequence[Problem],
    prover: Tokenizer,
    verifier: Tokenizer,
    *,
    own_data: bool = False,
) -> str:
    """A correct solution that the prover can write and the verifier can read. "" if the form of answers is not known.
    `sources`: see `Experiment.sources`. `own_data`: of the task data, whose grader can be chosen.

    Raises ConfigurationError if there is none for the first problems. Every solution of a game would then be wrong.
    (Not for a game with a warm start, whose demonstrations can teach another form.)
    """
    models = {"prover": prover, "verifier": verifier}
    first = None
    for problem in islice(problems, TRIED):
        right = correct_solution(task, problem)
        if right is None:
            return ""
        if not _lacking(models, right.text):
            return right.text
        # The answer in another form, which some graders accept. The question takes the place of the steps.
        for between in BEFORE_AN_ANSWER:
            text = f"{problem.question}{between}{problem.answer}"
            if not _lacking(models, text) and task.grade(problem, text).correct:
                return text
        first = first or right.text
    if first is None:
        return ""
    player, lacking = _lacking(models, first)[0]
    source = sources[f"models.{player}.source"]
    other = "a grader" if own_data else "a form of answers"
    example = " (-s task.grader=number, or regex with task.pattern and task.form)" if other == "a grader" else ""
    verb = "write" if player == "prover" else "read"
    raise ConfigurationError(
        f"models.{player}.source = {source!r} cannot {verb} {', '.join(map(repr, lacking))}, but a correct solution of "
        f"this task needs them, such as {shortened(repr(first))}.",
        "Use a model whose vocabulary covers the text: -s models.prover.source=hf:OWNER/NAME "
        f"-s models.verifier.source=hf:OWNER/NAME -s prompts=chat. Or choose {other} with the characters that this "
        f"model knows{example}.",
    )


def _lacking(models: Mapping[str, Tokenizer], text: str) -> list[tuple[str, list[str]]]:
    """(player, parts of the text that its model cannot express) of each player that lacks any."""
    return [(player, lacking) for player, model in models.items() if (lacking := model.lacking(text))]


def _check_roles_differ(rendered: Sequence[Int32]) -> None:
    """pvg.config.rules sees the texts of the experiment, and not those of the task."""
    helpful_P, sneaky_P = rendered
    if np.array_equal(helpful_P, sneaky_P):
        raise ConfigurationError(
            "Both roles get the same prompt, but the reward pays them for opposite things.",
            "Change prompts.helpful or prompts.sneaky, or add prompts.examples.",
        )


def _raising(limits: TokenLimits) -> str:
    """The settings that make completions long."""
    return "rollout.max_tokens or game.protocol.tokens" if limits.room > limits.solution else "rollout.max_tokens"


def _check_context(limits: TokenLimits, max_length: int, need: int, key: str) -> None:
    if max_length < need:
        raise ConfigurationError(
            f"{key} takes at most {max_length} tokens; the longest problem and completion may need {need}.",
            f"Lower {_raising(limits)}, or choose a model with a longer context.",
        )


# With fewer problems, the 95 % interval of an accuracy covers half of all possible values.
FEWEST = 10


def about_test_problems(wanted: int, section: object, task: Task, problems: Sequence[Problem]) -> list[str]:
    """One line, or none if the task has the `wanted` test problems and a file with them. `section`: the settings of the
    task. `problems`: all test problems."""
    there = len(problems)
    parts = [task.note] if isinstance(task, HasNote) and task.note else []
    if there < wanted:
        parts.append(f"A round tests with {counted(there, 'problem')}, not with game.test.problems = {wanted:,}.")
    if there < FEWEST:
        remedy = "raise task.test_problems" if hasattr(section, "test_problems") else "add test problems"
        parts.append(f"Fewer than {FEWEST} are too few for reliable figures: {remedy}.")
    return [" ".join(parts)] if parts else []
