"""Checks of a task, its prompts and its grader: `pvg task check`.

    for check in checks_of(experiment, task, models):
        print(check.passed, check.name, check.detail)

A check that cannot be made has `passed` None, and the detail says why. No check needs the weights of a model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pvg.config.experiment import Experiment
from pvg.config.prompts import WordedPrompts
from pvg.errors import ConfigurationError, PvgError, counted, shortened
from pvg.game.preview import PlayerModels, verifier_template_of
from pvg.game.prompt_checks import writable_solution
from pvg.game.roles import worded
from pvg.records import Problem, Role
from pvg.tasks.answers import by_fallback
from pvg.tasks.identity import digest_of, digests_elsewhere
from pvg.tasks.known import KnownSolution, correct_solution, wrong_solutions
from pvg.tasks.task import Task, WritesSolutions, half_of
from pvg.tasks.wordings import NEUTRAL, wording_of

ANY_TEXT = "the grader takes any text"
TRIED = 20  # problems of each split whose reference answer is graded
NEAR = 5  # problems whose near misses are graded
# A model may write any text: an empty one, control characters, unclosed tags, very long lines.
HOSTILE = (
    "",
    "\n",
    "\x00\x1b[2J",
    "<answer>",
    "\\boxed{",
    "####",
    "```python",
    "9" * 5000,
    "((((" * 500,
    "é中😀\udcff",
)


@dataclass(frozen=True, slots=True)
class TaskCheck:
    """`passed`: None if the check could not be made. `warning`: it passed, and the detail says what to improve."""

    name: str
    passed: bool | None
    detail: str
    warning: bool = False

    def plain(self) -> dict[str, Any]:
        return {"check": self.name, "passed": self.passed, "detail": self.detail, "warning": self.warning}


@dataclass(frozen=True, slots=True)
class CheckedProblems:
    """A task with the problems of both splits."""

    task: Task
    train: Sequence[Problem]
    test: Sequence[Problem]

    @classmethod
    def of(cls, task: Task) -> CheckedProblems:
        return cls(task, list(task.problems("train")), list(task.problems("test")))

    @property
    def sample(self) -> list[Problem]:
        return [*self.train[:TRIED], *self.test[:TRIED]]


def checks_of(experiment: Experiment, task: Task, models: PlayerModels | None) -> Iterator[TaskCheck]:
    """Every check of an opened task. `models`: None if their tokenizers are not here."""
    found = CheckedProblems.of(task)
    playing = experiment.task.kind == "play"
    yield from _problem_checks(found, playing)
    if not found.train or not found.test:
        return
    yield _deterministic(experiment, found)
    yield (graded := _any_text(found))
    if playing:  # its starts have no reference answers, and its prompts come from the game
        return
    if graded.passed:
        yield _reference_answers(found)
        yield _near_misses(found)
        yield _grades_repeat(found)
    yield from _prompt_checks(experiment, found, bool(graded.passed))
    if graded.passed and models is not None:
        yield _can_be_written(experiment, found, models)
    yield _verifier_input(experiment, found, models)


# --- problems ---------------------------------------------------------------------------------------------------------


def _problem_checks(found: CheckedProblems, playing: bool) -> Iterator[TaskCheck]:
    halves = Counter(half_of(problem.id) for problem in found.train)
    enough = bool(found.test) and halves["prover"] > 0 and halves["verifier"] > 0
    yield TaskCheck(
        "problems",
        enough,
        f"{len(found.train):,} for training ({halves['prover']:,} for the prover, {halves['verifier']:,} for the "
        f"verifier), {len(found.test):,} for testing",
    )
    ids = Counter(problem.id for problem in (*found.train, *found.test))
    yield _none_of("ids are different", [name for name, count in ids.items() if count > 1], len(ids), "id")
    empty = [problem.id for problem in (*found.train, *found.test) if not problem.question.strip()]
    yield _none_of("questions are not empty", empty, len(found.train) + len(found.test), "question")
    if playing:  # a start may occur in both splits
        return
    trained = {problem.question for problem in found.train}
    shared = [problem.id for problem in found.test if problem.question in trained]
    yield _none_of("no test question is a training question", shared, len(found.test), "test question")


def _none_of(name: str, wrong: Sequence[str], total: int, what: str) -> TaskCheck:
    """A check of `total` things, of which those in `wrong` fail."""
    looked = f"looked at {counted(total, what)}"
    return TaskCheck(
        name, not wrong, f"{looked}; not so: {len(wrong)}, such as {shortened(wrong[0])!r}" if wrong else looked
    )


def _deterministic(experiment: Experiment, found: CheckedProblems) -> TaskCheck:
    """A resumed run must have the problems with which it began, in their order."""
    name = "another process gets the same problems"
    try:
        elsewhere = digests_elsewhere(experiment.task)
    except ConfigurationError as error:
        return TaskCheck(name, False, error.message)
    here = {"train": digest_of(found.train), "test": digest_of(found.test)}
    differ = [split for split, digest in here.items() if elsewhere[split] != digest]
    return TaskCheck(
        name, not differ, f"other problems for {differ[0]}ing" if differ else "the same ids, questions and answers"
    )


# --- grades -----------------------------------------------------------------------------------------------------------


def _reference_answers(found: CheckedProblems) -> TaskCheck:
    name = "reference answers are correct"
    known = [(problem, correct_solution(found.task, problem)) for problem in found.sample]
    tried = [(problem, solution) for problem, solution in known if solution is not None]
    if not tried:
        return TaskCheck(name, None, _why_unknown(found.train[0]))
    wrong = [(p, s, grade) for p, s in tried if not (grade := found.task.grade(p, s.text)).correct]
    if not wrong:
        return TaskCheck(name, True, f"{len(tried)} of {len(tried)} in the documented form")
    problem, solution, grade = wrong[0]
    detail = f"{len(wrong)} of {len(tried)} are graded wrong, such as {shortened(repr(solution.text))} of {problem.id}"
    return TaskCheck(name, False, f"{detail}{f' ({grade.note})' if grade.note else ''}")


def _why_unknown(problem: Problem) -> str:
    wording = wording_of(problem)
    if wording is NEUTRAL:
        return "not checked: the task has no wording, so pvg does not know the form of an answer (docs/prompts.md)"
    if wording.form:
        return "the problems have no reference answers"
    return "not checked: the task does not give pvg the form of an answer, so pvg cannot write a correct one"


def _near_misses(found: CheckedProblems) -> TaskCheck:
    """Texts that are certainly wrong must be graded wrong, and most answers of other problems too."""
    name = "wrong answers are graded wrong"
    others, accepted = 0, 0
    for problem in found.train[:NEAR]:
        for solution in wrong_solutions(found.task, problem, found.train):
            correct = found.task.grade(problem, solution.text).correct
            if correct and solution.certain:
                return TaskCheck(name, False, f"{_quoted(solution)} is graded correct for {problem.id}")
            others += not solution.certain
            accepted += correct
    if others and 2 * accepted > others:
        return TaskCheck(name, False, f"{accepted} of {others} answers of other problems are graded correct")
    if not others:
        return TaskCheck(name, True, "all that pvg tried")
    also = f"; the other {accepted} are graded correct, because they may be right here too" if accepted else ""
    return TaskCheck(name, True, f"{others - accepted} of {others} answers of other problems are graded wrong{also}")


def _quoted(solution: KnownSolution) -> str:
    return f"{solution.name}, {shortened(repr(solution.text))},"


def _grades_repeat(found: CheckedProblems) -> TaskCheck:
    name, problem = "grades are the same each time", found.train[0]
    texts = [solution.text for solution in wrong_solutions(found.task, problem, found.train)]
    right = correct_solution(found.task, problem)
    for text in [*texts, *([] if right is None else [right.text])]:
        if found.task.grade(problem, text) != found.task.grade(problem, text):
            return TaskCheck(name, False, f"two grades of {shortened(repr(text))} differ")
    return TaskCheck(name, True, f"{counted(len(texts) + (right is not None), 'text')} graded twice")


def _any_text(found: CheckedProblems) -> TaskCheck:
    """Whether the grader raises no error. The other checks of grades need this."""
    texts = [(found.train[0], text) for text in HOSTILE]
    for problem in [*found.train[:NEAR], *found.sample]:
        right = correct_solution(found.task, problem)
        texts += [(problem, right.text)] if right is not None else []
    for problem in found.train[:NEAR]:
        texts += [(problem, each.text) for each in wrong_solutions(found.task, problem, found.train)]
    for problem, text in texts:
        try:
            found.task.grade(problem, text)
        except PvgError as error:
            return TaskCheck(ANY_TEXT, False, f"{shortened(repr(text))}: {error.message}")
    return TaskCheck(ANY_TEXT, True, counted(len(texts), "text"))


# --- prompts ----------------------------------------------------------------------------------------------------------


def _prompt_checks(experiment: Experiment, found: CheckedProblems, gradable: bool) -> Iterator[TaskCheck]:
    prompts, problem = experiment.prompts, found.train[0]
    if not isinstance(prompts, WordedPrompts):
        yield TaskCheck("prompts", None, f"not checked: prompts = {prompts.kind!r} contains no instructions in words")
        return
    written = {role: worded(prompts, problem, role) for role in Role}
    differ = written[Role.HELPFUL].text() != written[Role.SNEAKY].text()
    yield TaskCheck("the roles have different prompts", differ, "helpful and sneaky" if differ else "both are the same")
    tested = {each.question for each in found.test}
    examples = [question for question, _ in written[Role.HELPFUL].examples]
    leaked = [question for question in examples if question in tested]
    yield _none_of("no example is a test question", leaked, len(examples), "example")
    if gradable:
        yield _readable_examples(found, [answer for each in written.values() for _, answer in each.examples])


def _readable_examples(found: CheckedProblems, answers: Sequence[str]) -> TaskCheck:
    name = "the grader reads the examples"
    if not answers:
        return TaskCheck(name, None, "the prompts have no examples")
    if isinstance(found.task, WritesSolutions):
        return TaskCheck(name, None, "the form of a solution depends on its problem")
    unmarked = []
    for answer in answers:
        grade = found.task.grade(found.train[0], answer)
        if not grade.well_formed:
            return TaskCheck(name, False, f"no answer is found in {shortened(repr(answer))}: {grade.note}")
        if by_fallback(grade.note):
            unmarked.append(f"{shortened(repr(answer))} ({grade.note})")
    if unmarked:
        form = wording_of(found.train[0]).form.replace("{answer}", "ANSWER")
        detail = f"{len(unmarked)} of {counted(len(answers), 'example')} show no answer marker, such as {unmarked[0]}"
        return TaskCheck(name, True, f"{detail}; end them with {form!r}" if form else detail, warning=True)
    return TaskCheck(name, True, f"an answer is found in {counted(len(answers), 'example')}")


def _can_be_written(experiment: Experiment, found: CheckedProblems, models: PlayerModels) -> TaskCheck:
    name = "the models can write a correct solution"
    try:
        tokenizers = models.prover.tokenizer, models.verifier.tokenizer
        text = writable_solution(experiment, found.task, found.train, *tokenizers)
    except ConfigurationError as error:
        return TaskCheck(name, False, f"{error.message} {error.remedy}")
    if text:
        return TaskCheck(name, True, f"such as {shortened(repr(text))}")
    taught = experiment.warmup.kind != "none"
    return TaskCheck(name, None, "demonstrations teach the form" if taught else _why_unknown(found.train[0]))


def _verifier_input(experiment: Experiment, found: CheckedProblems, models: PlayerModels | None) -> TaskCheck:
    """Invariant 3 as a user can break it: by a role's instructions in a question, or in prompts.frame."""
    name, problem, text = "the verifier's input does not tell the role", found.train[0], ""
    size = "the question alone: the models' tokenizers are not here"
    if models is None:
        text = problem.question
    else:
        template = verifier_template_of(experiment, found.task, models.verifier)
        ids, _ = template.tokens(problem.question, "", None, None)
        text, size = models.verifier.tokenizer.shown(ids), f"{len(ids)} tokens without a solution"
    told: list[str] = []
    if isinstance(experiment.prompts, WordedPrompts):
        prompts = [worded(experiment.prompts, problem, role) for role in Role]
        said = [part for each in prompts for part in (each.instructions, *(answer for _, answer in each.examples))]
        told = [part for part in said if part and part in text]
    if told:
        return TaskCheck(name, False, f"it contains {shortened(repr(told[0]))}")
    return TaskCheck(name, True, size)
