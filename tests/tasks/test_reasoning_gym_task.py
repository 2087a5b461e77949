"""The adapter to reasoning-gym against the real package, where it is installed, and the error where it is not."""

import subprocess
import sys

import pytest

from pvg.config.task import ReasoningGymTask
from pvg.errors import ConfigurationError, MissingRequirementError
from pvg.tasks import open_task
from pvg.tasks.reasoning_gym import read_answer


@pytest.fixture
def gym():
    return pytest.importorskip("reasoning_gym")


def small(**changes):
    return ReasoningGymTask(**{"problems": 30, "test_problems": 10, **changes})


def ids(section, split="train"):
    return [problem.id for problem in open_task(section).problems(split)]


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
    assert read_answer(completion) == answer


@pytest.mark.timeout(60)
def test_reading_huge_completions():
    assert read_answer("<answer>" * 100_000 + "7") == "7"
    assert read_answer("\n" * 1_000_000) == ""


def test_a_missing_extra_names_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(MissingRequirementError, match=r"reasoning-gym .*pip install .*\.\[reasoning-gym\]'"):
        open_task(small())


def test_the_package_of_tasks_needs_neither_torch_nor_the_extra():
    code = "import pvg.tasks, sys; print([m for m in ('torch', 'transformers', 'reasoning_gym') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_references_are_correct_and_the_neighbours_are_not(gym):
    task = open_task(small(settings={"min_terms": 3, "max_terms": 4}))
    problems = list(task.problems("train"))
    assert len(problems) == 30
    for problem, neighbour in zip(problems, problems[1:] + problems[:1], strict=True):
        grade = task.grade(problem, f"So\n<answer>{problem.answer}</answer>")
        assert (grade.correct, grade.well_formed, grade.answer, grade.note) == (True, True, problem.answer, "")
        assert task.grade(problem, neighbour.answer).correct == (float(problem.answer) == float(neighbour.answer))
    assert not task.grade(problems[0], "  ").well_formed


def test_splits_share_no_question_though_neighbouring_seeds_of_the_package_do(gym):
    def items(seed):
        return {item["question"] for item in gym.create_dataset("chain_sum", seed=seed, size=50)}

    assert items(1) & items(2)  # why the adapter's seeds lie far apart
    task = open_task(small(problems=300, test_problems=100))
    train, test = ([problem.question for problem in task.problems(split)] for split in ("train", "test"))
    assert len(set(train) | set(test)) == 400


def test_ids_are_those_of_dataset_settings_seed_split_and_index(gym):
    base = ids(small())
    assert base == ids(small())
    assert base[0].startswith("reasoning_gym-chain_sum-")
    assert base[0].endswith("-train-0")
    assert ids(small(problems=40))[:30] == base
    for changed in (small(settings={"max_terms": 7}), small(dataset="products")):
        assert not set(ids(changed)) & set(base)
    assert not set(ids(small(), "test")) & set(base)


def test_problems_are_the_same_in_another_process(gym):
    code = (
        "from pvg.config.experiment import ReasoningGymTask; from pvg.tasks import open_task\n"
        "print([p.question for p in open_task(ReasoningGymTask(problems=5, test_problems=2)).problems('train')])"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    task = open_task(ReasoningGymTask(problems=5, test_problems=2))
    assert printed.strip() == str([problem.question for problem in task.problems("train")])


def test_the_threshold_decides_about_partial_scores(gym):
    strict = open_task(small(dataset="spell_backward", threshold=1.0))
    problem = next(iter(strict.problems("train")))
    almost = problem.answer[:-1] + ("x" if problem.answer[-1] != "x" else "y")
    entry = problem.metadata["entry"]
    score = gym.create_dataset("spell_backward", seed=0, size=1).score_answer(almost, entry)
    assert 0 < score < 1
    grade = strict.grade(problem, almost)
    assert (grade.correct, grade.note) == (False, f"score {score:.2f} of 1.00")
    assert open_task(small(dataset="spell_backward", threshold=score)).grade(problem, almost).correct


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


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"dataset": "chain_sun"}, "no dataset 'chain_sun'.*nearest names are chain_sum"),
        ({"settings": {"max_term": 3}}, "no setting 'max_term'.*It has .*max_terms"),
        ({"settings": {"seed": 3}}, r"pvg sets task\.settings\.seed"),
        ({"settings": {"size": 3}}, r"pvg sets task\.settings\.size.*task\.problems"),
        ({"settings": {"min_terms": 9, "max_terms": 3}}, "rejects the settings of 'chain_sum': max_terms must be"),
        ({"settings": {"min_terms": "many"}}, "rejects the settings of 'chain_sum'"),
        ({"dataset": "game_of_life_halting"}, "does not open .*accepts any answer"),
        ({"dataset": "simple_integration"}, "does not open .*may never end"),
    ],
)
def test_wrong_settings_are_refused_with_a_remedy(gym, changes, complaint):
    with pytest.raises(ConfigurationError, match=complaint) as refused:
        open_task(small(**changes))
    assert refused.value.remedy


def test_a_dataset_that_repeats_itself_is_refused(gym):
    settings = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    with pytest.raises(ConfigurationError, match=r"repeats questions: 2000 draws gave \d+ new .*task\.problems = 1000"):
        list(open_task(small(problems=1000, settings=settings)).problems("train"))


def test_a_threshold_at_which_nonsense_is_correct_is_refused(gym):
    with pytest.raises(ConfigurationError, match=r"accepts '\?' as a correct answer at task\.threshold = 0\.0"):
        list(open_task(small(threshold=0.0)).problems("train"))


def test_datasets_in_hash_order_need_a_fixed_hash_seed(gym, monkeypatch):
    section = small(dataset="ransom_note", problems=3, test_problems=2)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ConfigurationError, match="PYTHONHASHSEED=0"):
        open_task(section)
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    one = ids(section)
    monkeypatch.setenv("PYTHONHASHSEED", "2")
    assert not set(one) & set(ids(section))
