"""Checks of a task, its prompts and its grader: `pvg check`.

A check that cannot be made has `passed` None, and the detail says why. Only `preview` opens the weights of models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from pvg.config.experiment import Experiment
from pvg.config.rollout import WordedPrompts
from pvg.config.training import AnswerHead
from pvg.errors import ConfigurationError, PvgError, UsageError, counted, shortened
from pvg.extensions import is_reference, load
from pvg.game.audit import check_truth
from pvg.game.prompt_checks import check_prompts_fit, check_verifier_input_fits, check_voices_fit, writable_solution
from pvg.game.roles import TAGS, PromptSection, prompt_builder, worded
from pvg.records import Half, Problem, Role
from pvg.tasks import digest_of, digests_elsewhere
from pvg.tasks.answers import by_fallback
from pvg.tasks.task import (
    NEUTRAL,
    KnownSolution,
    Task,
    WritesSolutions,
    correct_solution,
    half_of,
    wording_of,
    wrong_solutions,
)

if TYPE_CHECKING:
    from pvg.models.sources import BaseProver, WeightlessModel
    from pvg.verifier.data import VerifierTemplate


# What players would read, and how the task grades: for `pvg train --dry-run` and `pvg check`.

NO_SOLUTION = "(a solution)"  # shown to the players if the task writes none


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


def preview(experiment: Experiment, task: Task, models: PlayerModels | None, *, grades: bool = True) -> dict[str, Any]:
    """The first training problem of the prover's half as the players read it, as JSON data, with the grades of a
    correct solution (if the task can write one) and of a wrong one of each sort. Without `models`, prompts are shown
    without a chat template. Without `grades`, nothing is graded. Self-play has only the problem: its prompts come from
    the game.

    Raises ConfigurationError for problems and prompts with which `pvg train` would fail.
    """
    check_truth(experiment.game.stop, task)
    train, test = list(task.problems("train")), list(task.problems("test"))
    halves: dict[Half, list[Problem]] = {"prover": [], "verifier": []}
    for problem in train:
        halves[half_of(problem.id)].append(problem)
    problem, plays = (halves["prover"] or train)[0], experiment.task.kind == "play"
    found: dict[str, Any] = {"problem": problem.id, "question": problem.question, "prompts": {}}
    found |= {"episode": [], "verifier_input": None, "graded": [], "notices": []}
    prompts = None
    if models is not None:
        prompts = prompt_builder(experiment.prompts, experiment.game.protocol, models.prover.tokenizer, task)
        longest = check_prompts_fit(experiment.token_limits(), prompts, halves, test, models.prover.max_length)
    if models is not None and not plays:
        template = verifier_template_of(experiment, task, models.verifier)
        limits, verdict = experiment.token_limits(), experiment.verifier.verdict_tokens
        check_verifier_input_fits(limits, template, train, models.verifier.max_length, verdict)
    if models is not None:
        found["notices"] = _tried_models(experiment, task, halves, longest)
    if plays:
        return found
    right = correct_solution(task, problem)
    solution = _expressible(models, NO_SOLUTION if right is None else right.text)
    solution = solution or _expressible(models, problem.answer)
    if grades:
        found["graded"] = graded_solutions(task, problem, train)
    if models is None or prompts is None:
        found["prompts"] = {role.value: _untokenized_prompt(experiment.prompts, problem, role) for role in Role}
        return found
    from pvg.game.protocols import ProtocolParts, check_rules, example_episode, interaction_for, longest_episode

    tokenizer = models.prover.tokenizer
    for role in Role:  # in the decoupled game, the prompt for the translation of the solution
        translate = prompts.translate
        ids = prompts.prompt(problem, role) if translate is None else translate(problem, role, solution)
        found["prompts"][role.value] = {"text": tokenizer.shown(ids), "tokens": len(ids)}
    parts = ProtocolParts(task, tokenizer, experiment.prompts, None, experiment.seed)
    interaction = interaction_for(experiment.game.protocol, parts)
    check_rules(interaction, parts, halves["prover"] or train)
    lines = example_episode(interaction, tokenizer, problem, solution)
    check_voices_fit(experiment.token_limits(), longest_episode(interaction, parts, train), models.prover.max_length)
    turns = next(iter(lines.values())).turns
    completion = np.concatenate([turn.token_ids for turn in turns]) if len(turns) > 1 else None
    text = "".join(turn.text for turn in turns)
    read, _ = template.tokens(problem.question, text, completion, tokenizer.fingerprint)
    episode = [(turn.phase, voice, turn.by, turn.token_ids) for voice in lines for turn in lines[voice].turns]
    begun = [(line.turns[0].phase, voice, line.by, line.prompt_ids) for voice, line in lines.items()]
    found["episode"] = [
        {"seat": seat, "by": by, "text": tokenizer.shown(ids), "tokens": len(ids)}
        for _, seat, by, ids in sorted([*begun, *episode], key=lambda turn: turn[0])
        if ids is not None
    ]
    shown = {"text": models.verifier.tokenizer.shown(read), "tokens": len(read)}
    return found | {"verifier_input": shown}


LARGEST_TRIED = 2**30  # bytes of weights


def _tried_models(
    experiment: Experiment, task: Task, halves: Mapping[Half, Sequence[Problem]], longest: int
) -> list[str]:
    """Try the models as `pvg train` does before it samples, if their weights are small. Returns what the user should
    know. Raises what `check_models` raises."""
    import torch

    from pvg.game.run import check_models
    from pvg.models import open_model
    from pvg.models.logprobs import refuse_without_head
    from pvg.models.sources import weight_bytes
    from pvg.training.forward import fitted

    models, training = experiment.models, experiment.training
    if (size := sum(weight_bytes(each) for each in (models.prover, models.verifier))) > LARGEST_TRIED:
        return [f"The models have {size / 1e9:.1f} GB of weights, which only pvg train tries, before it samples."]
    with open_model(models.prover, torch.device("cpu"), models.dtype) as base:
        refuse_without_head(base.module)
        _, why = fitted(training, base.module, longest)
        players = SimpleNamespace(seed=experiment.seed, adapters=training.adapters, base=base)
        check_models(experiment, task, cast("BaseProver", players), halves, longest)
    return [why] if why else []


def graded_solutions(task: Task, problem: Problem, others: Iterable[Problem]) -> list[dict[str, Any]]:
    """The correct solution if the task can write one, otherwise the reference answer alone; then a wrong solution of
    each sort."""
    right = correct_solution(task, problem)
    if right is None and problem.answer:
        right = KnownSolution("the reference answer alone", problem.answer, True, certain=False)
    known = {} if right is None else {right.name: right}
    for solution in wrong_solutions(task, problem, others):
        known.setdefault(solution.name, solution)
    found = []
    for each in known.values():
        grade = task.grade(problem, each.text)
        shown = {"correct": grade.correct, "well_formed": grade.well_formed, "answer": grade.answer, "note": grade.note}
        found.append({"solution": each.name, "text": each.text, "expected_correct": each.correct, **shown})
    return found


def _expressible(models: PlayerModels | None, solution: str) -> str:
    """The solution, or "" if a model of few characters can neither write nor read it."""
    try:
        for model in () if models is None else (models.prover, models.verifier):
            model.tokenizer.encode(solution)
    except UsageError:
        return ""
    return solution


def _untokenized_prompt(prompts: PromptSection, problem: Problem, role: Role) -> dict[str, Any]:
    if not isinstance(prompts, WordedPrompts):
        return {"text": f"{TAGS[role] if prompts.kind == 'tag' else ''}{problem.question}", "tokens": None}
    messages = worded(prompts, problem, role).messages()
    return {"text": "\n".join(f"[{each['role']}]\n{each['content']}" for each in messages), "tokens": None}


def verifier_template_of(experiment: Experiment, task: Task, model: WeightlessModel) -> VerifierTemplate:
    """The template of the experiment's verifier. Raises ConfigurationError if the tokenizer does not fit its head."""
    from pvg.game.players import verifier_template
    from pvg.models.heads import answer_tokens

    head = experiment.verifier.head
    if isinstance(head, AnswerHead):
        answer_tokens(model.tokenizer, model.name)
    own = is_reference(head.kind)  # a user's head says which built-in head's input it takes
    reads: Any = getattr(load("verifier.head", head.kind), "reads", "scalar") if own else head.kind
    return verifier_template(experiment.prompts, task, model.tokenizer, reads)


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
                text = f"{solution.name}, {shortened(repr(solution.text))}, is graded correct for {problem.id}"
                return TaskCheck(name, False, text)
            others += not solution.certain
            accepted += correct
    if others and 2 * accepted > others:
        return TaskCheck(name, False, f"{accepted} of {others} answers of other problems are graded correct")
    if not others:
        return TaskCheck(name, True, "all that pvg tried")
    also = f"; the other {accepted} are graded correct, because they may be right here too" if accepted else ""
    return TaskCheck(name, True, f"{others - accepted} of {others} answers of other problems are graded wrong{also}")


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
    name, teaches = "the models can write a correct solution", experiment.warmup.path is not None
    try:
        tokenizers = models.prover.tokenizer, models.verifier.tokenizer
        text = (
            ""
            if teaches or experiment.task.kind == "play"
            else writable_solution(
                experiment.sources(), found.task, found.train, *tokenizers, own_data=experiment.task.kind == "data"
            )
        )
    except ConfigurationError as error:
        return TaskCheck(name, False, f"{error.message} {error.remedy}")
    if text:
        return TaskCheck(name, True, f"such as {shortened(repr(text))}")
    return TaskCheck(name, None, "demonstrations teach the form" if teaches else _why_unknown(found.train[0]))


def _verifier_input(experiment: Experiment, found: CheckedProblems, models: PlayerModels | None) -> TaskCheck:
    """Invariant 3 as a user can break it: by a role's instructions in a question."""
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
