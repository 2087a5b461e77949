"""What a prover is asked: the prompt of a group, in the direct game and in the decoupled one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pvg.errors import StateError
from pvg.experiment import Experiment
from pvg.game.roles import Render, Translate, prompt_renderer, translation_renderer
from pvg.models.tokenizer import Tokenizer
from pvg.records import Problem, Role, SolverSolution
from pvg.rollout.dispatcher import GroupOrder


@dataclass
class Asked:
    """`render` makes a prompt of a problem, `translate` (the decoupled game) of a problem and the solver's solution.
    `solutions` are these by problem id; None as long as there are none."""

    render: Render
    translate: Translate | None = None
    solutions: Mapping[str, SolverSolution] | None = None

    def order(self, problem: Problem, role: Role, group: int, size: int) -> GroupOrder:
        """Of solutions; once a solver has solved the problems (the decoupled game), of translations of its solution.
        Raises StateError for a problem that it has not solved."""
        if self.solutions is None or self.translate is None:
            return GroupOrder(problem, role, self.render(problem, role), group, size)
        if (solution := self.solutions.get(problem.id)) is None:
            raise StateError(
                f"The solver of this run has not solved {problem.id}.", "Start a new run: its task has changed."
            )
        return GroupOrder(problem, role, self.translate(problem, role, solution.text), group, size, solver=solution)


def asked_in(experiment: Experiment, tokenizer: Tokenizer) -> Asked:
    """What the experiment's prover is asked, before any solver has solved anything."""
    style = experiment.rollout.prompts
    translate = translation_renderer(style, tokenizer) if experiment.game.protocol == "decoupled" else None
    return Asked(prompt_renderer(style, tokenizer), translate)
