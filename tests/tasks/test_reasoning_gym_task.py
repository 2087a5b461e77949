"""The adapter to reasoning-gym against the real package, where it is installed, and the error where it is not."""

import re
import subprocess
import sys

import pytest

from pvg.config.task import ReasoningGymTask
from pvg.errors import ConfigurationError
from pvg.tasks import open_task
from pvg.tasks.data import tagged


@pytest.fixture
def gym():
    return pytest.importorskip("reasoning_gym", reason="`make install`")


def small(**changes):
    return ReasoningGymTask(**{"problems": 30, "test_problems": 10, **changes})


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("I think\n<answer> 42 </answer> done", "42"),
        ("<answer>1</answer> no, <answer>2</answer>", "2"),
        ("<answer>1 0\n0 1</answer>", "1 0\n0 1"),
        ("<answer>42", "42"),  # the end of the tag was cut off
        ("first\nthe last line \n\n", "the last line"),
        ("</answer>", "</answer>"),
        (" \n ", ""),
        ("<answer></answer>", ""),
    ],
)
def test_reading_the_answer_of_a_completion(completion, answer):
    assert (tagged(completion) or ("", ""))[0] == answer


def test_references_are_correct_and_the_neighbours_are_not(gym):
    task = open_task(small(settings={"min_terms": 3, "max_terms": 4}))
    problems = list(task.problems("train"))
    assert len(problems) == 30
    for problem, neighbour in zip(problems, problems[1:] + problems[:1], strict=True):
        grade = task.grade(problem, f"So\n<answer>{problem.answer}</answer>")
        assert (grade.correct, grade.well_formed, grade.answer, grade.note) == (True, True, problem.answer, "")
        assert task.grade(problem, neighbour.answer).correct == (float(problem.answer) == float(neighbour.answer))
    assert not task.grade(problems[0], "  ").well_formed


def test_a_mixture_has_equal_parts_in_turn_each_with_its_own_problems_and_grader(gym):
    names = ["leg_counting", "chain_sum", "family_relationships"]
    changes = {"settings": {"chain_sum": {"min_terms": 3, "max_terms": 3}}}
    mixed = open_task(small(dataset=names, problems=8, test_problems=6, **changes))
    for split, count in (("train", 8), ("test", 6)):
        problems = list(mixed.problems(split))
        assert [problem.metadata["dataset"] for problem in problems] == [names[n % 3] for n in range(count)]
        assert all(mixed.grade(problem, f"<answer>{problem.answer}</answer>").correct for problem in problems)
        assert not any(mixed.grade(problem, "<answer>x</answer>").correct for problem in problems)
    alone = open_task(
        small(dataset="chain_sum", problems=3, test_problems=2, settings={"min_terms": 3, "max_terms": 3})
    )
    assert list(alone.problems("train")) == [p for p in mixed.problems("train") if p.metadata["dataset"] == "chain_sum"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dataset": []}, "must name one or several datasets"),
        ({"dataset": ["chain_sum", "chain_sum"]}, "each once"),
        ({"dataset": ["chain_sum", "leg_counting"], "settings": {"min_terms": 3}}, "a table for each"),
        ({"dataset": ["chain_sum", "leg_counting"], "problems": 1}, "at least as many"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(changes, says):
    with pytest.raises(ValueError, match=says):
        small(**changes)


def test_splits_share_no_question_though_neighbouring_seeds_of_the_package_do(gym):
    def items(seed):
        return {item["question"] for item in gym.create_dataset("chain_sum", seed=seed, size=50)}

    assert items(1) & items(2)  # why the adapter's seeds lie far apart
    task = open_task(small(problems=300, test_problems=100))
    train, test = ([problem.question for problem in task.problems(split)] for split in ("train", "test"))
    assert len(set(train) | set(test)) == 400


@pytest.mark.slow
def test_problems_are_the_same_in_another_process(gym):
    code = (
        "from pvg.config.task import ReasoningGymTask; from pvg.tasks import open_task\n"
        "print([p.question for p in open_task(ReasoningGymTask(problems=5, test_problems=2)).problems('train')])"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    task = open_task(ReasoningGymTask(problems=5, test_problems=2))
    assert printed.strip() == str([problem.question for problem in task.problems("train")])


def test_a_grader_that_cannot_read_an_answer_is_no_accident(gym):
    task = open_task(small(dataset="prime_factorization"))
    grade = task.grade(next(iter(task.problems("train"))), "no idea")
    assert (grade.correct, grade.well_formed) == (False, True)
    assert grade.note == "answer unreadable for its grader (ValueError)"


def test_model_text_is_never_run(gym, tmp_path):
    victim = tmp_path / "victim"
    attack = f"__import__('pathlib').Path({str(victim)!r}).write_text('x')"
    for dataset in ("countdown", "puzzle24", "n_queens", "binary_matrix", "spiral_matrix", "string_insertion"):
        task = open_task(small(dataset=dataset, problems=2, test_problems=1))
        problem = next(iter(task.problems("train")))
        # The package itself would run it: without that, this test would prove nothing.
        gym.create_dataset(dataset, seed=0, size=1).score_answer(attack, problem.metadata["entry"])
        assert victim.exists(), dataset
        victim.unlink()
        grade = task.grade(problem, attack)
        assert (grade.correct, grade.note.partition(":")[0]) == (False, "answer refused")
        assert not victim.exists(), dataset


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dataset", "right", "wrong"),
    [
        ("coin_flip", "{}", "0"),
        ("game_of_life", "{}", lambda answer: answer[:-1] + ",[0]]"),
        ("gsm_symbolic", "{} apples", "-{}"),
        ("gsm_symbolic", "{}.0", "{} or 1"),
        ("letter_jumble", "{}", "{} zzz"),
        (
            "number_sorting",
            "{}",
            lambda answer: re.sub(r"(-?[0-9.]+)", lambda found: str(float(found[1]) + 0.9), answer),
        ),
        ("puzzle24", "({})", "6*4*1*1"),
        ("puzzle24", "{}", "{} + 0.5"),
        ("spell_backward", "{}", "{}zzz"),
        ("word_sorting", "{}", "{}, zzz"),
    ],
)
def test_what_a_grader_accepts_must_have_the_references_value(gym, dataset, right, wrong):
    task = open_task(small(dataset=dataset, problems=8, test_problems=8))
    written = wrong if callable(wrong) else wrong.format
    for problem in task.problems("train"):
        assert task.grade(problem, f"<answer>{right.format(problem.answer)}</answer>").correct
        assert not task.grade(problem, f"<answer>{written(problem.answer)}</answer>").correct


@pytest.mark.parametrize("accepted", ["0", "6*4*1*1", "another reference", "-reference"])
def test_a_grader_that_accepts_one_answer_for_most_problems_is_refused(gym, monkeypatch, accepted):
    references = [problem.answer for problem in open_task(small(dataset="leg_counting")).problems("test")]
    task = open_task(small(dataset="leg_counting"))

    def score(answer, entry):
        text = {"another reference": references[0], "-reference": f"-{entry['answer']}"}.get(accepted, accepted)
        return float(answer in (entry["answer"], text))

    for opened in task._datasets["leg_counting"]._opened.values():
        monkeypatch.setattr(opened, "score_answer", score)
    with pytest.raises(ConfigurationError, match=r"'leg_counting' accepts '.*' as a correct answer"):
        list(task.problems("train"))


def test_a_threshold_at_which_nonsense_is_correct_is_refused(gym):
    with pytest.raises(ConfigurationError, match=r"accepts '\?' as a correct answer at task\.threshold = 0\.0"):
        list(open_task(small(threshold=0.0)).problems("train"))
