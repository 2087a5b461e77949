"""The two roles of the prover: one policy with two prompts (pvg.config.rollout).

The kind "tag" puts one character before the question (embedded models). "chat" and "text" say in words what each role
does: the instructions and examples of `[prompts]`, or those of the task (pvg.tasks.task). "chat" uses the model's
chat template, "text" joins the parts with blank lines. "plain" gives both roles the bare question.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

import numpy as np

from pvg.config.game import Protocol
from pvg.config.rollout import ChatPrompts, PlainPrompts, TagPrompts, TextPrompts, WordedPrompts, framed
from pvg.errors import StateError
from pvg.models.tokenizer import Tokenizer
from pvg.records import Int32, Problem, Role, SolverSolution, Wording
from pvg.rollout.dispatcher import GroupOrder
from pvg.tasks.task import NUMBER, WORDINGS, Task, WritesSolutions, read_wording, wording_of, wrong_answer

TAGS = {Role.HELPFUL: "H", Role.SNEAKY: "S"}

# In the decoupled game the prover translates a solver's solution (Kim and Lee, arXiv 2602.23248). The question of the
# second one is the solver's solution in the example of problems with a number as the answer.
TRANSLATION, NUMBER_TRANSLATION = read_wording("translation"), read_wording("number_translation")

PromptSection = TagPrompts | ChatPrompts | TextPrompts | PlainPrompts
Render = Callable[[Problem, Role], Int32]
Translate = Callable[[Problem, Role, str], Int32]


@dataclass(frozen=True, slots=True)
class WordedPrompt:
    """The parts of a prompt in words: instructions ("": none), examples as (question, answer), and the question."""

    instructions: str
    examples: Sequence[tuple[str, str]]
    question: str

    def messages(self) -> list[dict[str, str]]:
        """As a chat, whose system message is the instructions."""
        begun = [{"role": "system", "content": self.instructions}] if self.instructions else []
        turns = [
            {"role": role, "content": text}
            for example in self.examples
            for role, text in zip(("user", "assistant"), example, strict=True)
        ]
        return [*begun, *turns, {"role": "user", "content": self.question}]

    def text(self) -> str:
        """As a text that ends where the answer begins."""
        parts = [self.instructions, *(text for example in self.examples for text in example), self.question]
        return "".join(f"{part}\n\n" for part in parts if part)


def worded(prompts: WordedPrompts, problem: Problem, role: Role) -> WordedPrompt:
    """The role's prompt for a problem. A role without the user's instructions has those of the task."""
    wording, own = wording_of(problem), prompts.helpful if role is Role.HELPFUL else prompts.sneaky
    instructions = wording.instructions[role] if own is None else own
    examples = [(question, answers[role]) for question, answers in _examples(prompts, wording)]
    return WordedPrompt(instructions, examples, problem.question)


def translation(prompts: WordedPrompts, problem: Problem, role: Role, solution: str) -> WordedPrompt:
    """The translator's prompt for a problem and the solver's solution. In an example the solver has the helpful role's
    answer."""
    wording = wording_of(problem)
    numbers = wording is WORDINGS[NUMBER]
    instructions = (NUMBER_TRANSLATION if numbers else TRANSLATION).instructions[role]
    examples = []
    for question, answers in _examples(prompts, wording):
        solved = NUMBER_TRANSLATION.question if numbers and prompts.examples is None else answers[Role.HELPFUL]
        examples.append((framed(question, solved), answers[role]))
    return WordedPrompt(instructions, examples, framed(problem.question, solution))


def _examples(prompts: WordedPrompts, wording: Wording) -> list[tuple[str, Mapping[Role, str]]]:
    """The user's examples, or the one of the task: each question with the answers of the roles."""
    if prompts.examples is None:
        return [(wording.question, wording.answers)] if wording.question else []
    return [(each.question, {Role.HELPFUL: each.helpful, Role.SNEAKY: each.sneaky}) for each in prompts.examples]


# --- as tokens --------------------------------------------------------------------------------------------------------


def prompt_renderer(prompts: PromptSection, tokenizer: Tokenizer) -> Render:
    """A function (problem, role) -> prompt token ids int32 [P]."""
    if isinstance(prompts, WordedPrompts):
        return lambda problem, role: _tokens(prompts, tokenizer, worded(prompts, problem, role))
    if isinstance(prompts, TagPrompts):
        return lambda problem, role: tokenizer.opening(TAGS[role] + problem.question)
    return lambda problem, role: tokenizer.opening(problem.question)


def translation_renderer(prompts: PromptSection, tokenizer: Tokenizer) -> Translate:
    """A function (problem, role, text of the solver's solution) -> prompt token ids int32 [P]. pvg.config.rules refuses
    "plain", because both roles would get the same prompt."""
    if isinstance(prompts, WordedPrompts):
        return lambda problem, role, solution: _tokens(
            prompts, tokenizer, translation(prompts, problem, role, solution)
        )
    return lambda problem, role, solution: tokenizer.opening(f"{TAGS[role]}{problem.question}{solution}?")


def _tokens(prompts: WordedPrompts, tokenizer: Tokenizer, prompt: WordedPrompt) -> Int32:
    if isinstance(prompts, ChatPrompts):
        return tokenizer.chat(prompt.messages())
    return tokenizer.opening(prompt.text())


def assign_roles(count: int, sneaky_share: float, rng: np.random.Generator) -> list[Role]:
    """Roles of `count` groups in random order. The number of sneaky ones is `count * sneaky_share`, stochastically
    rounded to a whole number.

    Shares are exact instead of drawn independently, which removes noise from each batch without changing its mean.
    """
    exact = count * sneaky_share
    sneaky = int(exact) + int(rng.random() < exact - int(exact))
    roles = np.array([Role.SNEAKY] * sneaky + [Role.HELPFUL] * (count - sneaky), dtype=object)
    rng.shuffle(roles)
    return list(roles)


# --- prompts of groups, in the direct and the decoupled game ----------------------------------------------------------

ASSIGNED = "Show that the answer is {}."  # to a consultant
POOL = 64  # problems whose answers can be wrong ones


class Assignment:
    """The answers for which consultants argue: the helpful role for the right one, the sneaky role for a wrong one of
    the task (pvg.tasks.task.wrong_answer)."""

    def __init__(self, task: Task, prompts: PromptSection) -> None:
        self._task, self._in_words = task, isinstance(prompts, WordedPrompts)

    @cached_property
    def _others(self) -> list[Problem]:
        return list(islice(self._task.problems("train"), POOL))

    def answer(self, problem: Problem, role: Role) -> str:
        return problem.answer if role is Role.HELPFUL else wrong_answer(self._task, problem, self._others)

    def posed(self, problem: Problem, role: Role) -> Problem:
        """The problem with the assigned answer in its question. The verifier never reads it."""
        answer = self.answer(problem, role)
        if self._in_words:
            return replace(problem, question=f"{problem.question}\n\n{ASSIGNED.format(answer)}")
        if isinstance(self._task, WritesSolutions):  # as the end of a solution: "A8"
            answer = self._task.written(problem, role is Role.HELPFUL).rpartition(";")[2]
        return replace(problem, question=f"{problem.question}{answer}?")


@dataclass
class PromptBuilder:
    """Makes the prompts of groups, as `section` says. `render` takes a problem; `translate` (decoupled game) also takes
    the solver's solution. `solutions`: the solver's solutions by problem id; None before the solver has run.
    `assignment`: of the answers of consultants."""

    section: PromptSection
    render: Render
    translate: Translate | None = None
    solutions: Mapping[str, SolverSolution] | None = None
    assignment: Assignment | None = None

    def prompt(self, problem: Problem, role: Role) -> Int32:
        """Of a solution: token ids int32 [P]."""
        return self.render(problem if self.assignment is None else self.assignment.posed(problem, role), role)

    def order(self, problem: Problem, role: Role, group: int, size: int) -> GroupOrder:
        """A group of solutions, or of translations once the solver has run. Raises StateError if the solver has not
        solved the problem."""
        if self.solutions is None or self.translate is None:
            return GroupOrder(problem, role, self.prompt(problem, role), group, size)
        if (solution := self.solutions.get(problem.id)) is None:
            raise StateError(
                f"The solver of this run has not solved {problem.id}.", "Start a new run: the task has changed."
            )
        return GroupOrder(problem, role, self.translate(problem, role, solution.text), group, size, solver=solution)


def prompt_builder(prompts: PromptSection, protocol: Protocol, tokenizer: Tokenizer, task: Task) -> PromptBuilder:
    """The prompts of a game, without any solver's solutions."""
    translate = translation_renderer(prompts, tokenizer) if protocol.kind == "decoupled" else None
    assignment = Assignment(task, prompts) if protocol.kind == "consultancy" else None
    return PromptBuilder(prompts, prompt_renderer(prompts, tokenizer), translate, assignment=assignment)
