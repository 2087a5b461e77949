"""A user's code in an experiment: what it may be, how its mistakes are reported, and what a run stores of it."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from game.kill_drill import small_experiment

from pvg.config.experiment import Experiment
from pvg.config.game import Game
from pvg.config.load import build_experiment
from pvg.config.rollout import Rollouts
from pvg.config.task import CustomTask
from pvg.config.training import Training
from pvg.errors import ConfigurationError, StateError
from pvg.extensions import check_references, load, resolve
from pvg.game.players import Players
from pvg.game.rewards import rewards
from pvg.game.run import play
from pvg.game.statistics import BatchOutcomes
from pvg.records import Problem
from pvg.store.run_directory import RunDirectory
from pvg.tasks import open_task
from pvg.tasks.task import ConcealsText, GradesInBatches, SplitsSteps, WritesSolutions
from pvg.telemetry.events import SilentObserver
from pvg.training.losses import PolicyObjective
from pvg.verifier.losses import bradley_terry, pair_loss

TABLE = {"known": len}


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def written(text: str, name: str = "mine.py") -> str:
    Path(name).write_text(text)
    return name


def with_reward(reward: str) -> Experiment:
    return build_experiment({"game": {"reward": reward}})


def outcomes(rows: int = 4) -> BatchOutcomes:
    true_N = np.ones(rows, dtype=bool)
    scores_N = np.arange(rows, dtype=np.float32)
    return BatchOutcomes(scores_N, true_N, true_N, true_N, np.zeros(rows, dtype=np.int64), true_N)


# --- what a name means ---------------------------------------------------------------------------------------------


def test_a_name_of_the_table_is_looked_up_there_and_a_reference_in_its_file() -> None:
    written("def mine(x):\n    return 2 * x\n")
    assert resolve("a.key", "known", TABLE) is len
    assert resolve("a.key", "mine.py:mine", TABLE)(4) == 8
    assert resolve("a.key", "mine.py:mine", TABLE) is resolve("a.key", "mine.py:mine", TABLE), "run once"
    written("def mine(x):\n    return 3 * x\n")
    assert resolve("a.key", "mine.py:mine", TABLE)(4) == 12, "a changed file is run again"


def test_dataclasses_of_a_file_find_their_module() -> None:
    written(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Mine:\n    x: int = 3\n    def __call__(self):\n        return self.x\n"
    )
    assert resolve("a.key", "mine.py:Mine", TABLE)()() == 3


@pytest.mark.parametrize(
    ("text", "reference", "told"),
    [
        ("x = 1\n", "mine.py:y", "does not define 'y'"),
        ("x = 1\n", "mine.py:x", "is a int"),
        ("raise ValueError('no luck')\n", "mine.py:x", "ValueError: no luck"),
        ("import sys\nsys.exit('done')\n", "mine.py:x", "SystemExit: done"),
        ("import argparse\nargparse.ArgumentParser(prog='x').parse_args(['--no'])\n", "mine.py:x", "SystemExit: 2"),
        (
            "class E(Exception):\n    def __str__(self):\n        1 / 0\nraise E\n",
            "mine.py:x",
            "E: its message cannot be read",
        ),
        ("class Mine(BaseException): ...\nraise Mine('odd')\n", "mine.py:x", "Mine: odd"),
        ("def x(:\n", "mine.py:x", "line 1 is not valid Python"),
        ("", "other.py:x", "cannot read other.py: No such file"),
    ],
)
def test_a_file_that_cannot_serve_is_told_in_one_line(text: str, reference: str, told: str) -> None:
    written(text)
    with pytest.raises(ConfigurationError, match=r"^game\.reward: ") as caught:
        resolve("game.reward", reference, TABLE)
    assert told in caught.value.message
    assert "\n" not in caught.value.message


# --- checked before anything is run --------------------------------------------------------------------------------


def test_references_are_checked_without_running_the_file() -> None:
    written("import sys\nsys.exit('this was run')\ndef mine(o, g):\n    return o\nalso: int = 3\n")
    check_references(with_reward("mine.py:mine").own_code())
    with pytest.raises(ConfigurationError, match="does not define 'yours'") as caught:
        check_references(with_reward("mine.py:yours").own_code())
    assert caught.value.remedy == "It defines: also, mine."


@pytest.mark.parametrize(
    "text",
    [
        *("return 5", "break", "yield 1", "await x", "def f(a, a): ...", "nonlocal x", "__debug__ = 1", "x = 'a\0'"),
        *("x = 1\ndef f():\n    x = 2\n    global x", "x = 1\nfrom __future__ import annotations", "def f():\nx = 1"),
        *("# coding: nonsense", "x = " + "-" * 3000 + "1", "x = " + "+".join(["1"] * 50_000), "x = " + "(" * 500),
    ],
    ids=lambda text: text[:20],
)
def test_what_the_compiler_refuses_is_refused_without_running_the_file(text: str) -> None:
    written(f"{text}\ndef mine(o, g): ...\nraise SystemExit\n")
    for read in (
        lambda: check_references(with_reward("mine.py:mine").own_code()),
        lambda: load("a.key", "mine.py:mine"),
    ):
        with pytest.raises(ConfigurationError, match=r"mine\.py.* is not valid Python: ."):
            read()


def test_imported_names_may_be_named() -> None:
    written("from numpy import sign as mine\n")
    check_references(with_reward("mine.py:mine").own_code())
    written("from numpy import *\n")
    check_references(with_reward("mine.py:sign").own_code())


@pytest.mark.parametrize(
    ("reward", "told"),
    [("sorc", "'sorc'; its kinds are src, cgc, "), ("mine.py", "'mine.py'; its"), ("a.py:1", "gated, FILE.py:NAME")],
)
def test_a_name_that_is_neither_is_refused_with_what_fits(reward: str, told: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        with_reward(reward)
    assert caught.value.message.startswith("game.reward: there is no kind ")
    assert told in caught.value.message


# --- rewards, losses, tasks -----------------------------------------------------------------------------------------


def test_a_reward_of_ones_own_is_paid() -> None:
    written("def mine(outcomes, game):\n    return outcomes.scores_N + game.rounds\n")
    game = Game(reward="mine.py:mine", rounds=5)
    assert rewards(outcomes(), game).tolist() == [5.0, 6.0, 7.0, 8.0]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("return outcomes.scores_N[:1]", "an array (1,)"),
        ("return None", "array () of object"),
        ("return outcomes.scores", "AttributeError"),
        ("return ['a'] * 4", "of <U1"),
    ],
)
def test_a_reward_that_fails_names_itself(body: str, told: str) -> None:
    written(f"def mine(outcomes, game):\n    {body}\n")
    with pytest.raises(ConfigurationError, match=r"game\.reward = 'mine\.py:mine'") as caught:
        rewards(outcomes(), Game(reward="mine.py:mine"))
    assert told in caught.value.message


def test_a_pair_loss_must_give_one_number_for_each_pair() -> None:
    written("def mine(c, i):\n    return (i - c).exp()\ndef total(c, i):\n    return (i - c).sum()\n")
    scores_M = torch.tensor([0.0, 1.0])
    assert pair_loss("mine.py:mine")(scores_M, scores_M).tolist() == [1.0, 1.0]
    with pytest.raises(ConfigurationError, match="one number per pair, for 2 pairs"):
        pair_loss("mine.py:total")(scores_M, scores_M)
    assert pair_loss("bradley_terry") is bradley_terry


HEAD = """
import torch
from torch import nn
from pvg.models.heads import VerifierModel
class Mine(VerifierModel):
    def __init__(self, section, language_model):
        super().__init__(language_model)
        size = language_model.module.get_input_embeddings().weight.shape[1]
        self.map = nn.Linear(size, 1)
        self.register_buffer("shift", torch.randn(()))
    def _scores(self, ids, lengths, prompt_lengths, reference):
        return self.map(self._last_hidden(ids, lengths))[:, 0] + self.shift
"""


def test_a_head_without_scores_is_refused_before_it_scores() -> None:
    written(HEAD[: HEAD.index("    def _scores")])
    plain = small_experiment().plain()
    experiment = build_experiment({**plain, "verifier": {**plain["verifier"], "head": "mine.py:Mine"}})
    players = Players(experiment, open_task(experiment.task))
    with pytest.raises(ConfigurationError, match=r"verifier\.head.*abstract method.*_scores"):
        players.open_verifier()
    asyncio.run(players.close())


def test_a_head_that_draws_its_start_is_the_same_whenever_a_run_opens_it() -> None:
    """A version knows what is trained alone: a buffer that differed would be another verifier under the same name."""
    written(HEAD)
    plain = small_experiment().plain()
    experiment = build_experiment({**plain, "verifier": {**plain["verifier"], "head": "mine.py:Mine"}})
    players = Players(experiment, open_task(experiment.task))
    found = []
    for disturbed in (False, True):
        if disturbed:
            torch.randn(3)
        with contextlib.closing(players.open_verifier()) as verifier:
            found.append((verifier.version(), float(verifier.shift)))
    asyncio.run(players.close())
    assert found[0] == found[1]


def test_a_loss_without_a_kl_term_has_no_target_for_it() -> None:
    written("from pvg.training.losses import *\nmine = PolicyLoss(reinforce, mean_of_tokens, penalised=False)\n")
    for target in (None, 0.05):
        section = Training(loss="mine.py:mine", kl={"target": target})  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match="no KL term") if target else contextlib.nullcontext():
            PolicyObjective(section, Rollouts(), 0)


def test_translators_may_be_paid_by_a_reward_of_ones_own() -> None:
    game = build_experiment({"game": {"protocol": "decoupled", "reward": "mine.py:mine"}}).game
    assert game.reward.kind == "mine.py:mine"
    with pytest.raises(ConfigurationError, match="solver"):
        build_experiment({"game": {"protocol": "decoupled", "reward": "src"}})


TASK = """
from pvg.records import Grade, Problem
class Mine:
    def __init__(self, size):
        self.size = size
    def problems(self, split):
        return [Problem(str(n % self.size), "1+1?", "2") for n in range(4)]
    def grade(self, problem, completion):
        return Grade(completion == problem.answer, True) if completion else "none"
"""


OPTIONAL_PARTS = """
    def written(self, problem, correct):
        return problem.answer if correct else "0"
    def steps(self, completion):
        return [(0, len(completion))] if completion else []
    def shown(self, completion):
        return completion * (1 // 0)
"""
RESOURCE = """
    def __enter__(self):
        open("log", "w").write("entered ")
        return self
    def __exit__(self, *error):
        open("log", "a").write("left")
"""


def open_mine(**settings: Any) -> Any:
    return open_task(CustomTask(source="mine.py:Mine", settings=settings))


def test_a_task_of_ones_own_is_made_with_its_settings_and_held_to_the_protocol() -> None:
    written(TASK)
    task = open_mine(size=4)
    (first, *_) = task.problems("train")
    assert task.grade(first, "2").correct
    with pytest.raises(ConfigurationError, match="grade must return pvg's Grade, not str"):
        task.grade(first, "")
    with pytest.raises(ConfigurationError, match="the id '0' twice"):
        list(open_mine(size=2).problems("train"))
    with pytest.raises(ConfigurationError, match="ZeroDivisionError"):
        list(open_mine(size=0).problems("train"))
    with pytest.raises(ConfigurationError, match="unexpected keyword argument 'length'"):
        open_mine(length=2)


def test_the_optional_parts_of_a_task_of_ones_own_are_found() -> None:
    """`isinstance` with a protocol uses `getattr_static` since Python 3.12, which does not call `__getattr__`."""
    written(TASK + OPTIONAL_PARTS)
    task = open_mine(size=4)
    assert all(isinstance(task, protocol) for protocol in (WritesSolutions, SplitsSteps, ConcealsText))
    assert not isinstance(task, GradesInBatches)
    for name in ("written", "steps", "shown"):
        inspect.getattr_static(task, name)
    assert task.written(Problem("0", "1+1?", "2"), True) == "2"
    assert task.steps("2") == [(0, 1)]
    with pytest.raises(ConfigurationError, match=r"failed in Mine\.shown, line 16: ZeroDivisionError"):
        task.shown("2")


def test_a_task_of_ones_own_that_holds_a_resource_is_entered_and_left() -> None:
    written(TASK)
    assert not isinstance(open_mine(size=4), contextlib.AbstractContextManager)
    written(TASK + RESOURCE)
    task = open_mine(size=4)
    assert isinstance(task, contextlib.AbstractContextManager)
    with task as opened:
        assert opened is task
        assert Path("log").read_text() == "entered "
    assert Path("log").read_text() == "entered left"


# --- a run and its code ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_keeps_its_code_and_is_not_resumed_with_another(tmp_path: Path) -> None:
    reward = written("import numpy as np\ndef mine(outcomes, game):\n    return np.tanh(outcomes.scores_N)\n")
    plain = small_experiment().plain()
    experiment = build_experiment({**plain, "game": {**plain["game"], "reward": f"{reward}:mine"}})
    run = RunDirectory.create(tmp_path / "runs", "own", experiment)
    stop = asyncio.Event()
    stop.set()  # at the first commit
    with run.lock():
        outcome = asyncio.run(play(experiment, run, observer=SilentObserver(), stop=stop, resume=False))
    assert outcome.status == "interrupted"
    (copy,) = run.code.iterdir()
    assert copy.read_text() == Path(reward).read_text()

    text = Path(reward).read_text()
    written(text + "# changed\n")
    with run.lock(), pytest.raises(StateError, match=r"mine\.py has changed since this run started"):
        asyncio.run(play(experiment, run, observer=SilentObserver(), stop=asyncio.Event(), resume=True))
    written(text)
    with run.lock():
        outcome = asyncio.run(play(experiment, run, observer=SilentObserver(), stop=asyncio.Event(), resume=True))
    assert outcome.status == "complete"
