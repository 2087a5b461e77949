"""The shipped models keep what they promise, and the command that made them still makes such models."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from pvg.config.load import EMBEDDED, embedded_names
from pvg.config.task import DiplomacyMiniTask, ModchainTask
from pvg.config.training import Models, ModelSection
from pvg.models import embedded_training as plans
from pvg.models import open_model
from pvg.models.embedded_training import (
    IGNORED,
    PROBES,
    RECIPES,
    answered_step,
    held_out_problems,
    main,
    probe_targets,
    rows_to_tensors,
    train,
    translation,
    verdict,
)
from pvg.records import flaw_kind
from pvg.tasks.diplomacy_mini import DiplomacyMini
from pvg.tasks.modchain import Modchain

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
SAMPLES = 256
VERIFIERS = [name for name in embedded_names() if name.startswith("modchain-verifier") and "tiny" not in name]


def open_embedded(name):
    return open_model(ModelSection(source=f"embedded:{name}"), CPU)


@torch.no_grad()
def sample(model, prompts, seed, greedy=False):
    """One completion per prompt (all of equal length) at temperature 1, without the end token."""
    generator, eos = torch.Generator().manual_seed(seed), model.tokenizer.eos_id
    ids_BL = torch.from_numpy(np.stack([model.tokenizer.encode(prompt) for prompt in prompts])).long()
    start, cache, new_BL = ids_BL.shape[1], None, ids_BL
    for _ in range(32):  # the longest flawless solution of the default task has 27 tokens
        output = model.module(input_ids=new_BL, past_key_values=cache, use_cache=True)
        cache, logits_BV = output.past_key_values, output.logits[:, -1]
        drawn_BL = torch.multinomial(logits_BV.softmax(-1), 1, generator=generator)
        new_BL = logits_BV.argmax(-1, keepdim=True) if greedy else drawn_BL
        ids_BL = torch.cat([ids_BL, new_BL], dim=1)
    rows = [row[: row.index(eos)] if eos in row else row for row in ids_BL[:, start:].tolist()]
    return [model.tokenizer.decode(np.asarray(row, dtype=np.int32)) for row in rows]


def grades(model, tag, greedy=False):
    task, problems = Modchain(ModchainTask()), held_out_problems()[:SAMPLES]
    texts = sample(model, [tag + problem.question for problem in problems], seed=7, greedy=greedy)
    return [task.grade(problem, text) for problem, text in zip(problems, texts, strict=True)]


def test_every_recipe_is_shipped_and_the_package_stays_small():
    assert {recipe.name for recipe in RECIPES.values()} == set(embedded_names())
    assert {Models().prover.source, Models().verifier.source} <= {f"embedded:{name}" for name in embedded_names()}
    assert sum(path.stat().st_size for path in EMBEDDED.rglob("*") if path.is_file()) < 5_000_000


# Standard error of a share of 256: 0.03.
@pytest.mark.parametrize(
    ("name", "tag", "low", "high"),
    [
        ("modchain-prover", "H", 0.50, 0.75),
        ("modchain-prover", "S", 0.33, 0.52),
        ("modchain-critic", "H", 0.50, 0.75),
        ("modchain-critic", "S", 0.40, 0.63),
    ],
)
def test_a_prover_has_headroom_in_both_roles(name, tag, low, high):
    with open_embedded(name) as prover:
        found = grades(prover, tag)
    assert low <= np.mean([grade.correct for grade in found]) <= high
    assert np.mean([not grade.well_formed for grade in found]) < 0.03
    kinds = {flaw_kind(grade.note) or "none" for grade in found}
    assert {"wrong sum", "wrong operand", "swapped operand", "dropped step", "wrong final answer", "none"} <= kinds


@pytest.mark.parametrize("name", VERIFIERS)
def test_a_verifier_is_smaller_than_the_prover_and_knows_the_task(name):
    with open_embedded(name) as verifier, open_embedded("modchain-prover") as prover:
        assert verifier.num_parameters < prover.num_parameters
        assert np.mean([grade.correct for grade in grades(verifier, "", greedy=True)]) > 0.98


def test_targets_are_the_next_tokens_of_the_solution_and_its_end():
    with open_embedded("modchain-prover") as model:
        ids_BL, targets_BL = rows_to_tensors([("H1+2?", "A3"), ("H1?", "A1")], model.tokenizer)
        encode, eos, pad = model.tokenizer.encode, model.tokenizer.eos_id, model.tokenizer.pad_id
    assert ids_BL.tolist() == [[*encode("H1+2?A3")], [*encode("H1?A1"), pad, pad]]
    skipped = [IGNORED]
    assert targets_BL.tolist() == [skipped * 4 + [*encode("A3"), eos], skipped * 2 + [*encode("A1"), eos] + skipped * 2]


def test_the_command_makes_the_same_model_twice(tmp_path):
    before = torch.get_num_threads()
    main(["verifier-small", "--steps", "2", "--out", str(tmp_path)])
    recipe = replace(RECIPES["verifier-small"], steps=2)
    directory = tmp_path / recipe.name
    with train(recipe) as again:
        torch.set_num_threads(before)
        with open_model(ModelSection(source=str(directory)), CPU) as made:
            # It was stored as float16: equal bits mean that nothing was lost by it after the figures were taken.
            assert made.fingerprint() == again.fingerprint()
    assert json.loads((directory / "recipe.json").read_text())["recipe"]["steps"] == 2


def sampled_by_length(model, prompts):
    """A completion of each; those of one length together, each with its own random numbers."""
    found = {}
    for length in sorted({len(model.tokenizer.encode(prompt)) for prompt in prompts}):
        rows = [place for place, prompt in enumerate(prompts) if len(model.tokenizer.encode(prompt)) == length]
        texts = sample(model, [prompts[place] for place in rows], seed=length)
        found |= dict(zip(rows, texts, strict=True))
    return [found[place] for place in range(len(prompts))]


def test_the_dialogue_model_solves_translates_and_answers():
    """Standard error of a share of 128: 0.04; recipe.json has those of 256."""
    task, rng = Modchain(ModchainTask()), np.random.default_rng(4)
    recipe, problems = RECIPES["dialogue"], held_out_problems()[:128]
    with open_embedded("modchain-dialogue") as model:
        solved = grades(model, "H", greedy=True)
        kept = {}
        for tag in ("H", "S"):
            prompts = [translation(problem, tag, recipe, rng)[0] for problem in problems]
            texts = sampled_by_length(model, prompts)
            found = [task.grade(problem, text).answer for problem, text in zip(problems, texts, strict=True)]
            solvers = [prompt.rstrip("?").rpartition("A")[2] for prompt in prompts]
            kept[tag] = np.mean([one == other for one, other in zip(found, solvers, strict=True)])
        asked = [answered_step(problem, "H", recipe, rng) for problem in problems]
        answers = sampled_by_length(model, [transcript for transcript, _ in asked])
    assert np.mean([grade.correct for grade in solved]) > 0.9
    assert 0.45 < kept["H"] < 0.72
    assert 0.28 < kept["S"] < 0.58
    assert np.mean([answer == step for answer, (_, step) in zip(answers, asked, strict=True)]) > 0.25


@pytest.mark.parametrize(("flawed", "low", "high"), [(True, 0.56, 0.75), (False, 0.77, 0.90)])
def test_the_critic_names_the_first_wrong_step_and_has_headroom(flawed, low, high):
    """Standard error of a share of 512: 0.02."""
    task, rng = Modchain(ModchainTask()), np.random.default_rng(5)
    exact = replace(RECIPES["critic"], mistaken={"clean": 0.0, "flawed": 0.0})
    rows = [verdict(problem, flawed, exact, rng) for problem in held_out_problems()[:512]]
    for problem, (prompt, number) in zip(held_out_problems(), rows, strict=False):
        solution = prompt.removeprefix(f"?{problem.question}").removesuffix("?")
        flaw = task.flaw(problem, solution)
        assert number == str(0 if flaw is None else flaw + 1)
        assert (number != "0") == flawed
    with open_embedded("modchain-critic") as model:
        found = sampled_by_length(model, [prompt for prompt, _ in rows])
    right = [text == number for text, (_, number) in zip(found, rows, strict=True)]
    assert low < np.mean(right) < high
    numbers = {number for _, number in rows}
    for number in numbers:  # it knows each of them
        assert np.mean([good for good, row in zip(right, rows, strict=True) if row[1] == number]) > 0.4
    assert np.mean([text in {str(number) for number in range(6)} for text in found]) > 0.98


def test_a_probe_learns_the_flaw_of_a_step_and_the_verdict_after_it():
    rows = [("?7+5+8+3+6?7+5=2;2+8=1;1+3=4;4+6=0;A0?", "2"), ("?7+5+8+3+6?7+5=2;2+3=5;5+6=1;A2?", "2"), ("H1?", "A1")]
    targets = {name: found_BL.tolist() for name, found_BL in probe_targets(rows, 40).items()}
    first, second, solved = zip(*targets.values(), strict=True)
    at = {
        name: {place: n for place, n in enumerate(row) if n != IGNORED} for name, row in zip(PROBES, first, strict=True)
    }
    assert at["sum"] == {15: 2, 21: 0, 27: 4, 33: 0}
    assert at["expected"] == {13: 5, 15: 2, 19: 8, 21: 0, 25: 3, 27: 4, 31: 6, 33: 0, 36: 0}
    assert [place for place, wrong in at["wrong"].items() if wrong] == [21]
    assert at["verdict"] == {16: 0, 22: 2, 28: 2, 34: 2, 37: 2}
    at = {
        name: {place: n for place, n in enumerate(row) if n != IGNORED}
        for name, row in zip(PROBES, second, strict=True)
    }
    assert [place for place, wrong in at["wrong"].items() if wrong] == [19, 25, 30]  # a step is missing
    assert at["verdict"] == {16: 0, 22: 2, 28: 2, 31: 2}
    assert all(n == IGNORED for row in solved for n in row)


# --- the plan game ------------------------------------------------------------------------------------------------


def test_the_rows_of_the_plan_game_are_what_the_task_says_and_none_is_of_a_test_problem():
    task, rng = DiplomacyMini(DiplomacyMiniTask()), np.random.default_rng(6)
    known = {problem.question: problem for problem in plans.training_problems()}
    assert not known.keys() & {problem.question for problem in task.problems("test")}
    flawed = {"H": 0.4, "S": 0.7}
    flaws = {"H": 0, "S": 0}
    rows = plans.rows_of(flawed, 200, rng)
    for prompt, solution in rows:
        grade = task.grade(known[prompt[1:]], solution)
        assert grade.well_formed
        assert grade.checks is not None
        assert grade.checks.visible == 1.0
        assert grade.checks.certified == ("!" in solution) == (prompt[0] == "S" and not grade.correct)
        flaws[prompt[0]] += not grade.correct
    assert {prompt[0] for prompt, _ in rows} == flawed.keys()
    assert abs(flaws["H"] / 100 - 0.4) < 0.16  # standard error 0.05
    assert abs(flaws["S"] / 100 - 0.7) < 0.16


def test_the_plan_verifier_learns_sound_plans_and_the_adjudicators_answers():
    task, rng = DiplomacyMini(DiplomacyMiniTask()), np.random.default_rng(7)
    known = {problem.question: problem for problem in plans.training_problems()}
    told = {"=+": 0, "=-": 0}
    for prompt, completion in plans.rows_of({"": 0.0}, 200, rng):
        question, _, rest = prompt.partition("?")
        problem = known[f"{question}?"]
        if completion not in told:
            assert (rest, task.grade(problem, completion).correct) == ("", True)
            continue
        plan, _, reply = rest.partition("?")
        assert task.answer(problem, plan, f"?{reply}") == completion
        told[completion] += 1
    assert min(told.values()) > 20


# Standard error of a share of 192: 0.035.
@pytest.mark.parametrize(("tag", "low", "high"), [("H", 0.2, 0.45), ("S", 0.12, 0.4)])
def test_the_plan_prover_has_headroom_in_both_roles(tag, low, high):
    task = DiplomacyMini(DiplomacyMiniTask())
    problems = list(task.problems("test"))
    with open_embedded("diplomacy-prover") as prover:
        texts = sample(prover, [tag + problem.question for problem in problems], seed=7)
    found = [task.grade(problem, text) for problem, text in zip(problems, texts, strict=True)]
    assert np.mean([not grade.well_formed for grade in found]) < 0.1
    assert low <= np.mean([grade.correct for grade in found]) <= high
    certified = np.mean([grade.checks.certified for grade in found])
    assert certified > 0.12 if tag == "S" else certified == 0.0
