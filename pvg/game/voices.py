"""The rules of protocols in which a policy has several voices (a critic, a debate), and of consultancy, which pays for
votes alone (pvg.config.game). The verifier reads the prover's rollout, which ends with what the prover hears.

    critic        prover 0+0=0;0+9=8;A8      critic ?0+0+9?0+0=0;0+9=8;A8? -> 2      the verifier reads ...A8 ?2
    debate AB     prover (helpful) ...A9     opponent (sneaky) ...A8                 the verifier reads both

Every voice is the same policy with another prompt. It learns from its own rewards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pvg.config.game import CriticProtocol, DebateProtocol
from pvg.config.rollout import WordedPrompts, framed
from pvg.game.roles import TAGS, Assignment, PromptSection, worded
from pvg.games.game import Action, Outcome, Script
from pvg.records import Grade, Role
from pvg.rollout.interaction import Direct, Talk
from pvg.tasks.answers import by_fallback, same_answer
from pvg.tasks.task import LocatesFlaws, Task, correct_solution
from pvg.verifier.data import SAYS, VERDICT_INSTRUCTIONS, VERDICT_TAG, read_verdict

OPPONENT = "Another solver wrote the solution below. It disagrees with you. Write your own solution."
REPLY = (
    "Your opponent wrote:\n{}\nShow in one or two sentences why your solution is right and this one is wrong. "
    "Then write your final answer."
)
OTHER_ROLE = {Role.HELPFUL: Role.SNEAKY, Role.SNEAKY: Role.HELPFUL}


def graded(action: Action) -> Grade:
    assert action.grade is not None, "the interaction grades the turns of solvers"
    return action.grade


class CriticRules(Direct):
    """A solution, and a critique of it."""

    voices = ("prover", "critic")

    def __init__(self, task: Task, prompts: PromptSection, section: CriticProtocol | None = None) -> None:
        self._task, self._style, self._section = task, prompts.kind, section or CriticProtocol()
        self._in_words = isinstance(prompts, WordedPrompts)

    def seats(self, state: Talk) -> Sequence[str]:
        return self.voices[len(state.said) : len(state.said) + 1]

    def prompt(self, state: Talk, seat: str, role: Role) -> str:
        question, said = state.problem.question, [action.text for _, action in state.said]
        if seat != "critic":
            return SAYS[self._in_words] + said[1]
        if len(said) > 1:
            return ""
        if self._in_words:
            return f"{VERDICT_INSTRUCTIONS}\n\n{framed(question, said[0])}"
        return f"{VERDICT_TAG}{question}{said[0]}{VERDICT_TAG}"

    def limit(self, state: Talk, seat: str) -> int | None:
        return self._section.tokens if state.said else None

    def scripted(self, script: Script, state: Talk, seat: str, seed: int) -> str:
        return "Verdict: correct" if self._in_words else "0"

    def pay(self, state: Talk, outcome: Outcome) -> Mapping[str, float]:
        """truth: 1 for a critique that is right, else 0. votes: the share of the verifier's votes against the solution
        (Kenton et al. 2026)."""
        if self._section.pay == "votes":
            return {"critic": 1.0 - outcome.votes}
        return {"critic": float(self._right(state, outcome))}

    def _named(self, state: Talk) -> int | None:
        return read_verdict(state.said[1][1].text, self._style)

    def _right(self, state: Talk, outcome: Outcome) -> bool:
        """Whether the critique names the first wrong step; where the task does not know it, whether it rightly names
        any or none. Mistakes that cancel out do not make a solution wrong."""
        named, correct = self._named(state), outcome.grade.correct
        if named is None or (named == 0) != correct:
            return False
        task, solution = self._task, state.said[0][1].text
        flaw = task.flaw(state.problem, solution) if isinstance(task, LocatesFlaws) and not correct else None
        return flaw is None or named == flaw + 1

    def measures(self, state: Talk, outcome: Outcome) -> Mapping[str, float]:
        named, correct = self._named(state), outcome.grade.correct
        objected = float(bool(named))
        return {
            "critic_accuracy": float(named is not None and (named == 0) == correct),
            "critic_found": math.nan if correct else objected,
            "critic_true": math.nan if correct else float(self._right(state, outcome)),
            "critic_alarm": objected if correct else math.nan,
            "critic_unread": float(named is None),
        }


class DebateRules(Direct):
    """Two solutions, by the two roles, for one verifier. With ABA the prover replies to the opponent."""

    voices = solvers = ("prover", "opponent")

    def __init__(self, task: Task, prompts: PromptSection, section: DebateProtocol | None = None) -> None:
        self._task, self._prompts, self._section = task, prompts, section or DebateProtocol()

    @property
    def forks(self) -> int | None:
        """The number of phases at which the debates of a group can part; None: they share nothing."""
        phases = len(self._section.turns) - (self._section.order == "simultaneous")
        return phases if self._section.fork else None

    def seats(self, state: Talk) -> Sequence[str]:
        said, at_once = len(state.said), self._section.order == "simultaneous"
        if not said:
            return self.voices if at_once else ("prover",)
        if said == 1:
            return ("opponent",)
        return ("prover",) if said == 2 and self._section.turns == "ABA" else ()

    def prompt(self, state: Talk, seat: str, role: Role) -> str:
        said, prompts = [action.text for _, action in state.said], self._prompts
        in_words = isinstance(prompts, WordedPrompts)
        if len(said) > (2 if seat == "prover" else 1):
            return ""
        if seat == "prover" and self.seats(state):
            return REPLY.format(said[1]) if in_words else f"{said[1]}?"
        if seat == "prover":
            return f"The opponent says: {said[1]}" if in_words else said[1]
        if not isinstance(prompts, WordedPrompts):
            return "".join([TAGS[OTHER_ROLE[role]], state.problem.question, *(f"{solution}?" for solution in said)])
        told = worded(prompts, state.problem, OTHER_ROLE[role])
        examples = [framed(question, answer) for question, answer in told.examples]
        others = [f"{OPPONENT}\n{solution}" for solution in said]
        return "\n\n".join(filter(None, [told.instructions, *examples, f"Problem:\n{told.question}", *others]))

    def limit(self, state: Talk, seat: str) -> int | None:
        return self._section.tokens if state.said or seat == "opponent" else None

    def scripted(self, script: Script, state: Talk, seat: str, seed: int) -> str:
        found = correct_solution(self._task, state.problem)
        return state.problem.answer if found is None else found.text

    def pay(self, state: Talk, outcome: Outcome) -> Mapping[str, float]:
        """The shares of the verifier's votes; 0 for a text that is no solution."""
        other = graded(state.said[1][1])
        prover, opponent = outcome.votes, 1.0 - outcome.votes
        return {
            "prover": prover if outcome.grade.well_formed else 0.0,
            "opponent": opponent if other.well_formed else 0.0,
        }

    def measures(self, state: Talk, outcome: Outcome) -> Mapping[str, float]:
        other = graded(state.said[1][1])
        first, second = outcome.grade.correct, other.correct
        contested, favours_first = first != second, outcome.votes >= 0.5
        return {
            "debate_contested": float(contested),
            "debate_both_right": float(first and second),
            "debate_both_wrong": float(not (first or second)),
            "debate_same_answer": float(same_answer(outcome.grade.answer, other.answer)),
            "debate_first_wins": float(favours_first) if contested else math.nan,
            "debate_truth_wins": float(favours_first == first) if contested else math.nan,
            "debate_concessions": self._conceded(state, outcome.grade, other),
        }

    def _conceded(self, state: Talk, first: Grade, other: Grade) -> float:
        """1 if a side that has read the other one's solution gives its answer: the opponent, or the prover in its reply
        after another answer. NaN if no side has read the other one."""
        agreed = same_answer(first.answer, other.answer)
        replies = [grade for grade in (graded(action) for _, action in state.said[2:]) if not by_fallback(grade.note)]
        conceded = [not agreed and same_answer(reply.answer, other.answer) for reply in replies]
        conceded += [agreed] * (self._section.order == "sequential")
        return float(any(conceded)) if conceded else math.nan


class ConsultancyRules(Direct):
    """A solution that earns the verifier's votes if it gives the assigned answer, right or wrong."""

    def __init__(self, assignment: Assignment) -> None:
        self._assignment = assignment

    def _argued(self, state: Talk, outcome: Outcome) -> bool:
        wanted = self._assignment.answer(state.problem, outcome.role)
        return outcome.grade.correct if outcome.role is Role.HELPFUL else same_answer(outcome.grade.answer, wanted)

    def pay(self, state: Talk, outcome: Outcome) -> Mapping[str, float]:
        return {"prover": outcome.votes if self._argued(state, outcome) else 0.0}

    def measures(self, state: Talk, outcome: Outcome) -> Mapping[str, float]:
        return {"consultancy_assigned": float(self._argued(state, outcome))}
