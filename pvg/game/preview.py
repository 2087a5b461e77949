"""What players would read, and how the task grades: for `pvg train --dry-run` and `pvg task check`.

    found = preview(experiment, task, models)
    print(found.prompts[Role.HELPFUL].text, found.verifier.text, found.graded)

It needs the models' tokenizers, not their weights. It raises what `pvg train` would raise before its first step for
wrong data, a tokenizer without chat template, or a context that is too short.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from pvg.config.experiment import Experiment
from pvg.config.game import ChallengeProtocol
from pvg.config.prompts import WordedPrompts
from pvg.config.verifier import AnswerHead
from pvg.errors import UsageError
from pvg.extensions import is_reference, load
from pvg.game.prompt_checks import check_prompts_fit, check_verifier_input_fits
from pvg.game.roles import TAGS, prompt_builder, worded
from pvg.records import Grade, Half, Int32, Problem, Role
from pvg.tasks.known import KnownSolution, correct_solution, wrong_solutions
from pvg.tasks.task import Task, half_of

if TYPE_CHECKING:
    from pvg.models.sources import WeightlessModel
    from pvg.models.tokenizer import Tokenizer
    from pvg.verifier.template import Head, VerifierTemplate

NO_SOLUTION = "(a solution)"  # shown to the players if the task writes none


@dataclass(frozen=True, slots=True)
class ShownInput:
    """The input of a player as text, special tokens included. `tokens`: their number; None without a tokenizer."""

    text: str
    tokens: int | None


@dataclass(frozen=True, slots=True)
class GradedSolution:
    known: KnownSolution
    grade: Grade

    def plain(self) -> dict[str, Any]:
        grade = self.grade
        return {
            "solution": self.known.name,
            "text": self.known.text,
            "expected_correct": self.known.correct,
            "correct": grade.correct,
            "well_formed": grade.well_formed,
            "answer": grade.answer,
            "note": grade.note,
        }


@dataclass(frozen=True, slots=True)
class ShownQuestion:
    """A question of the verifier about the shown solution (game.protocol = "challenge"), special tokens included, and
    an answer. `by`: who answers in a game. The prover may write something else, in at most `limit` tokens; None if the
    task answers."""

    question: str
    answer: str
    by: Literal["prover", "task"]
    limit: int | None

    def plain(self) -> dict[str, Any]:
        return {"question": self.question, "answer": self.answer, "answered_by": self.by, "max_tokens": self.limit}


@dataclass(frozen=True, slots=True)
class PromptPreview:
    """One training problem as the players read it. `verifier`: None without a tokenizer; it includes `challenge`.
    `challenge`: None in other protocols, and for a solution without a step. `graded`: a correct solution if the task
    can write one, and a wrong one of each sort. Self-play has only the problem: its prompts come from the game."""

    problem: Problem
    prompts: Mapping[Role, ShownInput]
    verifier: ShownInput | None
    graded: tuple[GradedSolution, ...]
    challenge: ShownQuestion | None = None

    def plain(self) -> dict[str, Any]:
        shown = {role.value: {"text": each.text, "tokens": each.tokens} for role, each in self.prompts.items()}
        verifier = self.verifier
        return {
            "problem": self.problem.id,
            "question": self.problem.question,
            "prompts": shown,
            "challenge": None if self.challenge is None else self.challenge.plain(),
            "verifier_input": None if verifier is None else {"text": verifier.text, "tokens": verifier.tokens},
            "graded": [graded.plain() for graded in self.graded],
        }


@dataclass(frozen=True, slots=True)
class PlayerModels:
    """The models of an experiment without their weights."""

    prover: WeightlessModel
    verifier: WeightlessModel


def open_models(experiment: Experiment) -> PlayerModels:
    """Raises the errors of `pvg.models.open_model` for missing or wrong files."""
    from pvg.models.sources import open_without_weights

    prover = open_without_weights(experiment.models.prover)
    same = experiment.models.verifier.source == experiment.models.prover.source
    return PlayerModels(prover, prover if same else open_without_weights(experiment.models.verifier))


def preview(experiment: Experiment, task: Task, models: PlayerModels | None, *, grades: bool = True) -> PromptPreview:
    """The first training problem of the prover's half. Without `models`, prompts are shown without a chat template.
    Without `grades`, nothing is graded.

    Raises ConfigurationError for problems and prompts with which `pvg train` would fail.
    """
    train, test = list(task.problems("train")), list(task.problems("test"))
    halves: dict[Half, list[Problem]] = {"prover": [], "verifier": []}
    for problem in train:
        halves[half_of(problem.id)].append(problem)
    template = None
    if models is not None:
        prompts = prompt_builder(experiment, models.prover.tokenizer)
        check_prompts_fit(experiment, prompts, halves, test, models.prover.max_length)
        if experiment.task.kind != "play":
            template = verifier_template_of(experiment, task, models.verifier)
            check_verifier_input_fits(experiment, template, train, models.verifier.max_length)
    problem = (halves["prover"] or train)[0]
    if experiment.task.kind == "play":
        return PromptPreview(problem, {}, None, ())
    right = correct_solution(task, problem)
    solution = NO_SOLUTION if right is None else right.text
    solution = _expressible(models, solution) or _expressible(models, problem.answer)
    shown = {role: shown_prompt(experiment, models, problem, role, solution) for role in Role}
    found = graded_solutions(task, problem, train) if grades else []
    graded = tuple(reversed({each.known.name: each for each in reversed(found)}.values()))
    if template is None or models is None:
        return PromptPreview(problem, shown, None, graded)
    asked = example_dialogue(experiment, task, models.prover.tokenizer, problem, solution)
    if asked is None:
        return PromptPreview(problem, shown, shown_verifier_input(template, models, problem, solution), graded)
    challenge, text, ids = asked
    return PromptPreview(problem, shown, shown_verifier_input(template, models, problem, text, ids), graded, challenge)


def graded_solutions(task: Task, problem: Problem, others: Iterable[Problem]) -> list[GradedSolution]:
    """The correct solution if the task can write one, otherwise the reference answer alone; then wrong solutions."""
    right = correct_solution(task, problem)
    if right is None and problem.answer:
        right = KnownSolution("the reference answer alone", problem.answer, True, certain=False)
    known = [*([] if right is None else [right]), *wrong_solutions(task, problem, others)]
    return [GradedSolution(each, task.grade(problem, each.text)) for each in known]


def _expressible(models: PlayerModels | None, solution: str) -> str:
    """The solution, or "" if a model of few characters can neither write nor read it."""
    try:
        for model in () if models is None else (models.prover, models.verifier):
            model.tokenizer.encode(solution)
    except UsageError:
        return ""
    return solution


def shown_prompt(
    experiment: Experiment, models: PlayerModels | None, problem: Problem, role: Role, solution: str
) -> ShownInput:
    """The role's prompt; in the decoupled game, its prompt for the translation of `solution`."""
    prompts = experiment.prompts
    if models is not None:
        builder, tokenizer = prompt_builder(experiment, models.prover.tokenizer), models.prover.tokenizer
        translate = builder.translate
        ids = builder.render(problem, role) if translate is None else translate(problem, role, solution)
        return ShownInput(tokenizer.shown(ids), len(ids))
    if not isinstance(prompts, WordedPrompts):
        return ShownInput(f"{TAGS[role] if prompts.kind == 'tag' else ''}{problem.question}", None)
    messages = worded(prompts, problem, role).messages("system")
    return ShownInput("\n".join(f"[{message['role']}]\n{message['content']}" for message in messages), None)


def example_dialogue(
    experiment: Experiment, task: Task, tokenizer: Tokenizer, problem: Problem, solution: str
) -> tuple[ShownQuestion, str, Int32] | None:
    """A question about the solution, and the completion that the verifier reads as text and as the prover's token ids
    int32 [C]: solution, question and answer. None in other protocols, and for a solution without a step."""
    from pvg.game.protocols import ChallengeEnvironment

    protocol = experiment.game.protocol
    if not isinstance(protocol, ChallengeProtocol):
        return None
    environment = ChallengeEnvironment(task, tokenizer, experiment.prompts.kind, None, experiment.seed, protocol.tokens)
    if (found := environment.example(problem, solution)) is None:
        return None
    observation, answer = found
    end = np.array([tokenizer.eos_id], dtype=np.int32)
    turns = [tokenizer.encode(solution), end, observation.token_ids]
    text = solution + observation.text
    if not observation.max_tokens:
        question = observation.text.removesuffix(answer)
        return ShownQuestion(question, answer, "task", None), text, np.concatenate(turns)
    shown = ShownQuestion(tokenizer.shown(observation.token_ids), answer, "prover", observation.max_tokens)
    return shown, text + answer, np.concatenate([*turns, tokenizer.encode(answer), end])


def shown_verifier_input(
    template: VerifierTemplate, models: PlayerModels, problem: Problem, text: str, ids: Int32 | None = None
) -> ShownInput:
    """`ids` int32 [C]: the completion as the prover's token ids; None encodes `text`."""
    shown, _ = template.tokens(problem.question, text, ids, models.prover.tokenizer.fingerprint)
    return ShownInput(models.verifier.tokenizer.shown(shown), len(shown))


def verifier_template_of(experiment: Experiment, task: Task, model: WeightlessModel) -> VerifierTemplate:
    """The template of the experiment's verifier. Raises ConfigurationError if the tokenizer does not fit its head."""
    from pvg.game.players import verifier_template
    from pvg.models.heads import answer_tokens

    head = experiment.verifier.head
    if isinstance(head, AnswerHead):
        answer_tokens(model.tokenizer, model.name)
    return verifier_template(experiment, task, model.tokenizer, _reads(head.kind))


def _reads(head: str) -> Head:
    """The built-in head whose input the head takes. A user's head says it."""
    found: Any = getattr(load("verifier.head", head), "reads", "scalar") if is_reference(head) else head
    return cast("Head", found)
