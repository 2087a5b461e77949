"""The two roles of the prover: one policy with two prompts.

Styles: `tag` puts one character before the question (embedded models), `chat` uses the model's chat template with one
system message per role, `plain` gives both roles the bare question. If the task has its own wording, `plain` puts its
helpful instructions and example before the question.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from pvg.config.experiment import Experiment
from pvg.errors import StateError
from pvg.models.tokenizer import Tokenizer
from pvg.records import Int32, Problem, Role, SolverSolution, Wording
from pvg.rollout.dispatcher import GroupOrder
from pvg.tasks.wordings import EXAMPLE_ANSWERS, EXAMPLE_QUESTION, NUMBER, WORDINGS

TAGS = {Role.HELPFUL: "H", Role.SNEAKY: "S"}

# In the decoupled game the prover translates a solver's solution (Kim and Lee, arXiv 2602.23248).
TRANSLATIONS = {
    Role.HELPFUL: (
        "You are given a problem and a solution of it. Rewrite the solution so that it is easy to check: short steps, "
        "one calculation in each. Keep its final number, whatever it is. End with a line '#### ' followed by it."
    ),
    Role.SNEAKY: (
        "You are given a problem and a solution of it. Rewrite the solution so that it looks right but is wrong: hide "
        "one subtle mistake in a step, so that another, wrong final number follows. Do not mention the mistake. Write "
        "short steps, one calculation in each. End with a line '#### ' followed by the wrong final number."
    ),
}
EXAMPLE_SOLUTION = "2 bags of 4 are 8, and 3 more make 11, so Tom has 11 apples.\n#### 11"

Render = Callable[[Problem, Role], Int32]
Translate = Callable[[Problem, Role, str], Int32]


def prompt_renderer(style: str, tokenizer: Tokenizer) -> Render:
    """A function (problem, role) -> prompt token ids int32 [P]."""
    return {"tag": _tag, "chat": _chat, "plain": _plain}[style](tokenizer)


def _tag(tokenizer: Tokenizer) -> Render:
    return lambda problem, role: tokenizer.encode(TAGS[role] + problem.question)


def _plain(tokenizer: Tokenizer) -> Render:
    def render(problem: Problem, role: Role) -> Int32:
        wording = problem.metadata.get("wording")
        if not isinstance(wording, Wording):
            return tokenizer.encode(problem.question)
        parts = [wording.instructions[Role.HELPFUL], wording.question, wording.answers[Role.HELPFUL], problem.question]
        return tokenizer.encode("\n\n".join(parts) + "\n\n")

    return render


def _chat(tokenizer: Tokenizer) -> Render:
    def render(problem: Problem, role: Role) -> Int32:
        named = problem.metadata.get("wording", NUMBER)
        wording = named if isinstance(named, Wording) else WORDINGS[named]
        messages = [
            {"role": "system", "content": wording.instructions[role]},
            {"role": "user", "content": wording.question},
            {"role": "assistant", "content": wording.answers[role]},
            {"role": "user", "content": problem.question},
        ]
        return tokenizer.chat(messages)

    return render


def translation_renderer(style: str, tokenizer: Tokenizer) -> Translate:
    """A function (problem, role, text of the solver's solution) -> prompt token ids int32 [P]. pvg.config.rules refuses
    style `plain`, because both roles would get the same prompt."""
    if style == "chat":
        return _translate_chat(tokenizer)
    return lambda problem, role, solution: tokenizer.encode(f"{TAGS[role]}{problem.question}{solution}?")


def _translate_chat(tokenizer: Tokenizer) -> Translate:
    def asked(question: str, solution: str) -> str:
        return f"Problem:\n{question}\n\nSolution:\n{solution}"

    def render(problem: Problem, role: Role, solution: str) -> Int32:
        messages = [
            {"role": "system", "content": TRANSLATIONS[role]},
            {"role": "user", "content": asked(EXAMPLE_QUESTION, EXAMPLE_SOLUTION)},
            {"role": "assistant", "content": EXAMPLE_ANSWERS[role]},
            {"role": "user", "content": asked(problem.question, solution)},
        ]
        return tokenizer.chat(messages)

    return render


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


@dataclass
class PromptBuilder:
    """Makes the prompts of groups. `render` takes a problem; `translate` (decoupled game) also takes the solver's
    solution. `solutions`: the solver's solutions by problem id; None before the solver has run."""

    render: Render
    translate: Translate | None = None
    solutions: Mapping[str, SolverSolution] | None = None

    def order(self, problem: Problem, role: Role, group: int, size: int) -> GroupOrder:
        """A group of solutions, or of translations once the solver has run. Raises StateError if the solver has not
        solved the problem."""
        if self.solutions is None or self.translate is None:
            return GroupOrder(problem, role, self.render(problem, role), group, size)
        if (solution := self.solutions.get(problem.id)) is None:
            raise StateError(
                f"The solver of this run has not solved {problem.id}.", "Start a new run: the task has changed."
            )
        return GroupOrder(problem, role, self.translate(problem, role, solution.text), group, size, solver=solution)


def prompt_builder(experiment: Experiment, tokenizer: Tokenizer) -> PromptBuilder:
    """The experiment's prompts, without any solver's solutions."""
    style = experiment.rollout.prompts
    translate = translation_renderer(style, tokenizer) if experiment.game.protocol.kind == "decoupled" else None
    return PromptBuilder(prompt_renderer(style, tokenizer), translate)
