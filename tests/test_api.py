"""`import pvg`: what it offers, what it loads, and a game that is played, read, scored and evaluated through it."""

from __future__ import annotations

import ast
import asyncio
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from game.kill_drill import small_experiment

import pvg
from pvg.config.experiment import Experiment
from pvg.config.sections import value_of
from pvg.errors import ConfigurationError, StateError, UsageError
from pvg.store.checkpoints import read_checkpoint
from pvg.store.run_players import verifier_weights_name
from pvg.telemetry.events import PhaseInfo, SilentObserver

pytestmark = pytest.mark.slow

PROBLEM = "7+5+8+3+6?"
SOLUTIONS = ["7+5=2;2+8=0;0+3=3;3+6=9;A9", "7+5=2;2+8=0;0+3=4;4+6=0;A0", "A9", ""]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pvg.Run]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("api"))
        Path("small.toml").write_text(small_experiment().to_toml())
        yield pvg.play("small.toml", {"game.rounds": 1}, name="mine")


def test_importing_pvg_loads_no_torch() -> None:
    program = (
        "import sys, pvg\n"
        "pvg.load_experiment('modchain', {'game.rounds': 1})\n"
        "loaded = {'torch', 'transformers'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_types_of_the_names_are_told() -> None:
    stub = ast.parse(Path(pvg.__file__).with_suffix(".pyi").read_text())
    typed = {
        alias.asname: node.module for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert typed == pvg.API
    assert all(getattr(pvg, name).__name__ == name for name in pvg.API)
    with pytest.raises(AttributeError, match="no attribute 'plays'"):
        pvg.plays  # noqa: B018


def test_settings_are_those_of_the_command_line() -> None:
    changed = pvg.load_experiment("modchain", {"game.rounds": 7, "name": "a-b", "store.root": Path("x")})
    assert (changed.game.rounds, changed.name, changed.store.root) == (7, "a-b", Path("x"))
    with pytest.raises(ConfigurationError, match=r"The nearest valid key is 'game.rounds'"):
        pvg.load_experiment("modchain", {"game.round": 7})
    with pytest.raises(UsageError, match="dotted key"):
        pvg.load_experiment("modchain", {"game": {"rounds": 7}})
    with pytest.raises(UsageError, match="Did you mean 'modchain'"):
        pvg.load_experiment("modchian")


class Count(Enum):
    FIVE = 5


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        *(
            ("training.steps", value, 5)
            for value in (np.int64(5), np.array(5), torch.tensor(5), Fraction(5), Count.FIVE)
        ),
        *(
            ("training.learning_rate", value, 0.1)
            for value in (
                np.float32(0.1),
                np.float16(0.1),
                np.float64(0.1),
                torch.tensor(0.1),
                torch.tensor(0.1).half(),
            )
        ),
        *(("training.learning_rate", value, 0.1) for value in (Fraction(1, 10), Decimal("0.1"))),
        ("evaluate.attacks", np.array(["src"]), ("src",)),
        ("evaluate.attacks", ("src", "cgc"), ("src", "cgc")),
        ("training.gradient_checkpointing", np.bool_(True), True),
    ],
)
def test_values_of_other_libraries_are_settings(key: str, value: Any, expected: Any) -> None:
    assert value_of(pvg.load_experiment("modchain", {key: value}), key) == expected


@pytest.mark.parametrize(
    "value", [b"5", 1j, object(), {5}, [None], np.datetime64("2020-01-01"), float("nan"), 2**70, "a\udcff", np.nan]
)
def test_other_values_are_refused(value: Any) -> None:
    for key in ("training.steps", "name"):
        with pytest.raises(ConfigurationError, match=key):
            pvg.load_experiment("modchain", {key: value})


def test_a_run_stays_readable_from_another_folder(
    played: pvg.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (played.rounds, played.status, played.metrics, played.weights, played.name)
    found = pvg.Run("mine")
    monkeypatch.chdir(tmp_path)
    assert (played.rounds, played.status, played.metrics, played.weights, played.name) == before
    assert (found.rounds, found.examples()) == (played.rounds, played.examples())
    with pvg.VerifierScorer.load(found) as scorer:
        assert scorer.score_texts(PROBLEM, SOLUTIONS).shape == (4,)


def test_threads_may_open_scorers_at_once(played: pvg.Run) -> None:
    with ThreadPoolExecutor(4) as threads:
        for scorer in list(threads.map(pvg.VerifierScorer.load, [played] * 4)):
            with scorer:
                assert scorer.score_texts(PROBLEM, SOLUTIONS[:1]).shape == (1,)


def test_a_second_thread_is_told_to_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.toml").write_text(small_experiment().to_toml())
    begun, going_on = Event(), Event()

    class Waiting(SilentObserver):
        def phase_started(self, info: PhaseInfo) -> None:
            begun.set()
            assert going_on.wait(60)

    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(pvg.play, "small.toml", {"game.rounds": 1}, name="first", observer=Waiting())
        assert begun.wait(60)
        try:
            with pytest.raises(UsageError, match="Another thread"):
                pvg.play("small.toml", name="second")
        finally:
            going_on.set()
        assert first.result().status == "complete"
    assert [run.name for run in Path("runs").iterdir()] == ["first"]


def test_a_run_says_what_it_holds(played: pvg.Run) -> None:
    assert played.path == Path("runs/mine").absolute()
    assert (played.name, played.status, played.experiment.game.rounds) == ("mine", "complete", 1)
    assert [set(metrics) >= {"helpful_accuracy", "fooled_rate"} for metrics in played.rounds] == [True]
    assert {"step", "phase", "round"} <= {record["kind"] for record in played.metrics}
    assert list(played.weights) == ["round-000-verifier", "round-000-prover"]
    assert all(list(folder.glob("*.safetensors")) for folder in played.weights.values())
    assert played.examples()
    assert pvg.Run("mine").path == played.path
    assert repr(played) == "Run('mine')"
    with pytest.raises(UsageError, match="Did you mean 'mine'"):
        pvg.Run("mien")
    with pytest.raises(UsageError, match="already exists"):
        pvg.play("small.toml", name="mine")
    with pytest.raises(UsageError, match="is complete"):
        played.resume()


def test_texts_are_scored_by_the_verifier_of_the_round(played: pvg.Run) -> None:
    with pvg.VerifierScorer.load(played) as scorer:
        scores = scorer.score_texts(PROBLEM, SOLUTIONS)
        again = scorer.score_texts(PROBLEM, SOLUTIONS[:1])
        version, threshold = scorer.version, scorer.threshold
    assert scores.shape == (4,)
    assert scores.dtype == np.float32
    assert len(set(scores.tolist())) == 4
    assert again[0] == scores[0]
    meta = read_checkpoint(played.directory.weights, verifier_weights_name(0))[1]
    assert (meta["version"], meta["threshold"]) == (version, threshold)
    for number in (1, -2):
        with pytest.raises(UsageError, match=f"Round {number} .* is not finished"):
            pvg.VerifierScorer.load(played, number)


def test_a_notebook_may_call_it_too(played: pvg.Run) -> None:
    """A notebook's cells run inside of an event loop."""

    async def cell() -> float:
        with pvg.VerifierScorer.load(played, 0) as scorer:
            return float(scorer.score_texts(PROBLEM, SOLUTIONS[:1])[0])

    with pvg.VerifierScorer.load(played) as scorer:
        assert asyncio.run(cell()) == scorer.score_texts(PROBLEM, SOLUTIONS[:1])[0]


def test_a_run_is_evaluated(played: pvg.Run) -> None:
    report = pvg.evaluate(played, parts=["detection"], settings={"evaluate.problems": 8, "evaluate.samples": 2})
    assert report.rounds[0].detection is not None
    assert (played.path / "evaluation" / "evaluation.json").is_file()
    less_memory = {"evaluate.problems": 8, "evaluate.samples": 2, "verifier.micro_batch_tokens": 512}
    assert pvg.evaluate(played, parts=["detection"], settings=less_memory).rounds == report.rounds
    with pytest.raises(StateError, match=r"training\.steps"):
        pvg.evaluate(played, parts=["detection"], settings={"training.steps": 9})
    with pytest.raises(UsageError, match="no part 'detect'"):
        pvg.evaluate(played, parts=["detect"])


def test_an_observer_hears_that_this_cpu_is_slow_in_bfloat16(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pvg.telemetry.cpu.native_bfloat16", lambda root: False)
    monkeypatch.setattr("pvg.telemetry.cpu.usable_gpus", lambda root: 0)
    Path("half.toml").write_text('name = "half"\n[models]\nprecision = "bfloat16"\n')
    begun: list[Experiment] = []

    async def play(experiment: Experiment, run: object, **_: object) -> None:
        begun.append(experiment)

    monkeypatch.setattr("pvg.game.run.play", play)
    heard: list[str] = []

    class Hearing(SilentObserver):
        def noticed(self, message: str) -> None:
            heard.append(message)

    pvg.play("half.toml", observer=Hearing())
    assert [experiment.models.precision for experiment in begun] == ["bfloat16"]
    assert [line for line in heard if line.startswith("models.precision = 'bfloat16'")] == heard[:1]
