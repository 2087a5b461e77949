"""WARMUP: a base that solves nothing learns from demonstrations, and the game plays with the result."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from kill_drill import warm_experiment
from small_games import played, told
from typer.testing import CliRunner
from verifier.tiny_verifiers import english_tokenizer, language_model

import pvg
from pvg.config.base import parse_run_id
from pvg.config.experiment import Experiment
from pvg.config.load import build_experiment
from pvg.config.training import ModelSection, Training, Warmup
from pvg.errors import ConfigurationError, PvgError, StateError, UsageError
from pvg.export.finished import FinishedRound
from pvg.export.folders import export_player
from pvg.game.players import Players
from pvg.game.warm_start import SupervisedObjective, demonstration_batch, problems_of, read_demonstrations
from pvg.models import open_model
from pvg.records import Role
from pvg.store.checkpoints import read_checkpoint
from pvg.store.run_players import WARMED_PROVER, find_player
from pvg.tasks import open_task
from pvg.telemetry.catalogue import metric as catalogued
from pvg_cli.main import app

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
ENTRY = [sys.executable, "-m", "pvg"]
EXPERIMENT = """
name = "warm"

[task]
kind = "data"
path = "task"
grader = "choice"

[models]
threads = 1

[models.prover]
source = "blank"

[models.verifier]
source = "blank"

[prompts]
kind = "tag"

[rollout]
max_tokens = 16
group_size = 4
concurrency = 64

[rollout.engine]
max_rows = 32

[verifier]
head = "scalar"
steps = 3
pairs = 4

[training]
groups = 4
steps = 3

[game]
rounds = 1
mint_problems = 24
mint_samples = 4

[game.test]
problems = 8
samples = 1

[store]
commit_every = 4

[cluster]
kind = "none"

[warmup]
path = "demos.jsonl"
steps = 40
batch = 16
learning_rate = 6e-3
"""


def pvg_process(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*ENTRY, *words], capture_output=True, text=True, check=False)


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A base with random weights, a task with two answers, and demonstrations of other questions."""
    numbers = random.Random(0)
    with pytest.MonkeyPatch.context() as patch:
        made = tmp_path_factory.mktemp("warm")
        patch.chdir(made)
        with language_model(english_tokenizer(None), 3, spread=0.02) as blank:
            blank.save(made / "blank")
        Path("task").mkdir()
        for split, first, count in (("train", 0, 160), ("test", 200, 16)):
            rows = [{"question": f"{n}: A or B?", "answer": numbers.choice("AB")} for n in range(first, first + count)]
            Path(f"task/{split}.jsonl").write_text(lines(rows))
        shown = [{"question": f"{n}: A or B?", "solution": f"Answer: {numbers.choice('AB')}"} for n in range(300, 400)]
        Path("demos.jsonl").write_text(lines(shown))
        Path("warm.toml").write_text(EXPERIMENT)
        Path("cold.toml").write_text(EXPERIMENT.partition("[warmup]")[0])
        yield made


@pytest.fixture(scope="module")
def warm(folder: Path) -> pvg.Run:
    return pvg.play("warm.toml", name="warm")


def weights_of(run: str) -> dict[str, bytes]:
    return {path.parent.name: path.read_bytes() for path in Path("runs", run, "weights").glob("*/tensors.safetensors")}


def phase_record(run: pvg.Run) -> dict[str, Any]:
    return next(found for found in run.metrics if found["kind"] == "phase" and found["phase"] == "warmup")


def test_without_a_warm_start_the_verifier_has_nothing_to_compare(folder: Path) -> None:
    with pytest.raises(PvgError, match=r"nothing to compare: .*\[warmup\]"):
        pvg.play("cold.toml", name="cold")


def test_with_a_warm_start_the_game_is_played_and_its_losses_are_recorded(warm: pvg.Run) -> None:
    assert warm.status == "complete"
    found = phase_record(warm)["metrics"]
    assert found["held_out_loss_before"] > 4.0
    assert found["held_out_loss_after"] < 0.5
    assert found["loss_after"] < found["loss_before"]
    assert found["demonstrations"] + found["held_out"] == 100
    assert found["held_out"] > 0
    steps = [step for step in warm.metrics if step["kind"] == "step" and step["phase"] == "warmup"]
    assert len(steps) == 40
    assert all(step["budget"]["forward_backward"] > 0 for step in steps)
    names = {*found, *(name for step in steps for name in step["metrics"])}
    assert all(catalogued(f"warmup/{name}") is not None for name in names)
    mint = next(record for record in warm.metrics if record["kind"] == "phase" and record["phase"] == "mint")
    assert mint["metrics"]["helpful_accuracy"] > 0


def test_the_game_starts_from_the_warmed_prover_in_workers_too(warm: pvg.Run) -> None:
    """With a prover that does not train, the prover of round 0 is the base prover of the game."""
    still = pvg.play("warm.toml", {"training.steps": 0, "cluster.kind": "local", "cluster.workers": 1}, name="still")
    assert weights_of("still")["warmup-prover"] == weights_of("warm")["warmup-prover"]
    found, _ = read_checkpoint(still.directory.weights, "round-000-prover")
    base, _ = read_checkpoint(warm.directory.weights, "warmup-prover")
    assert all(torch.equal(found[name], base[name]) for name in base)
    with (
        open_model(ModelSection(source="run:warm/warmup"), CPU) as opened,
        open_model(ModelSection(source="blank"), CPU) as blank,
    ):
        assert all(torch.equal(opened.weights()[name], base[name]) for name in base)
        assert any(not torch.equal(blank.weights()[name], base[name]) for name in base)


def test_another_run_can_start_from_the_warmed_prover(warm: pvg.Run) -> None:
    other = pvg.play("cold.toml", {"models.prover.source": "run:warm/warmup"}, name="other")
    assert other.status == "complete"
    mine, theirs = weights_of("warm"), weights_of("other")
    assert theirs["round-000-prover"] == mine["round-000-prover"]


def test_an_evaluation_measures_against_the_warmed_prover(warm: pvg.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    class Watched(Players):
        def __init__(self, experiment: Experiment, *args: Any, **kwargs: Any) -> None:
            opened.append(experiment.models.prover.source)
            super().__init__(experiment, *args, **kwargs)

    monkeypatch.setattr("pvg.evaluation.runner.Players", Watched)
    report = pvg.evaluate(warm, parts=["best-of-n"], settings={"evaluate.problems": 8, "evaluate.samples": 2})
    assert [found.round for found in report.rounds] == [0]
    assert opened == [find_player(parse_run_id("run:warm/warmup")).source]


def test_adapters_are_merged_into_the_base(folder: Path, warm: pvg.Run) -> None:
    """Adapters cannot teach random weights, so this warm start continues the other one."""
    settings = {"training.adapters.rank": 8, "models.prover.source": "run:warm/warmup"}
    run = pvg.play("warm.toml", settings, name="lora")
    base, _ = read_checkpoint(run.directory.weights, "warmup-prover")
    start, _ = read_checkpoint(warm.directory.weights, "warmup-prover")
    changed = {name for name in start if not torch.equal(base[name], start[name])}
    assert base.keys() == start.keys()
    assert changed
    assert all(name.endswith("_proj.weight") for name in changed)
    finished = FinishedRound.open(run.directory)
    with pytest.raises(UsageError, match="after the warm start"):
        export_player(finished, "prover", folder / "adapters")
    facts = export_player(finished, "prover", folder / "merged", merge=True)
    assert facts["form"] == "model"


@pytest.mark.drill
def test_a_warm_start_of_adapters_that_is_killed_and_resumed_has_the_bits_of_an_undisturbed_one(
    folder: Path, warm: pvg.Run
) -> None:
    """test_kill_and_resume.py has one that trains all weights."""
    chosen = ("adapters.rank=4",)
    settings = ["-s", "models.prover.source=run:warm/warmup", "-s", "warmup.steps=200"]
    settings += [word for setting in chosen for word in ("-s", f"training.{setting}")]
    whole = pvg_process("train", "warm.toml", "--name", "whole", *settings)
    assert whole.returncode == 0, whole.stderr
    run, died = Path("runs", "killed"), []
    command = ["train", "warm.toml", "--name", run.name, *settings]
    for after in (8, 100):
        died.append(killed_after(command, run, after))
        command = ["train", "--resume", run.name]
    assert all(step >= after for step, after in zip(died, (8, 100), strict=True))
    rest = pvg_process(*command)
    assert rest.returncode == 0, rest.stderr
    assert weights_of(run.name) == weights_of("whole")
    records = [orjson.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]
    steps = [record["step"] for record in records if record["kind"] == "step" and record["phase"] == "warmup"]
    assert steps == list(range(1, 201))


def killed_after(command: list[str], run: Path, step: int) -> int:
    """Kill `pvg train` once it has committed this step of its warm start. Returns the step of its last commit."""
    playing = subprocess.Popen([*ENTRY, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while playing.poll() is None:
        state = committed(run)
        assert state.get("phase") in (None, "init", "warmup"), "the warm start ended before it was killed"
        if state.get("step", 0) >= step:
            break
        time.sleep(0.005)
    playing.send_signal(signal.SIGKILL)
    assert playing.wait() == -signal.SIGKILL
    state = committed(run)
    assert state["phase"] == "warmup"
    return int(state["step"])


def committed(run: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = orjson.loads((run / "state.json").read_bytes())["state"]
    except FileNotFoundError:
        return {}
    return found


def test_a_damaged_result_of_the_warm_start_is_made_again_from_the_commit_before(tmp_path: Path) -> None:
    experiment = warm_experiment(tmp_path)
    played(experiment, tmp_path, stop_at=("warmup", 13))  # at its last step
    run = played(experiment, tmp_path, stop_at=("warmup", 1), resume=True)[1]  # before the first solution
    assert committed(run.path)["phase"] == "mint"
    tensors = run.weights / WARMED_PROVER / "tensors.safetensors"
    whole = tensors.read_bytes()
    tensors.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    outcome, _, notices = told(experiment, tmp_path, resume=True)
    assert outcome.status == "complete"
    assert any("Went back to the previous commit" in notice for notice in notices)
    assert tensors.read_bytes() == whole


def test_a_changed_file_is_refused_while_the_warm_start_runs(folder: Path) -> None:
    run = Path("runs", "changing")
    killed_after(["train", "warm.toml", "--name", run.name, "-s", "warmup.steps=400"], run, 8)
    before = Path("demos.jsonl").read_text()
    try:
        Path("demos.jsonl").write_text(before + lines([{"question": "new?", "solution": "Answer: A"}]))
        with pytest.raises(StateError, match=r"warmup\.path has changed since this run began"):
            pvg.Run(run).resume()
    finally:
        Path("demos.jsonl").write_text(before)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ('{"question": "7?"}\n', "line 1: there is no column 'solution', but: question. Correct the row."),
        ('{"question": "7?", "solution": 7}\n', "line 1: the column 'solution' is 7, not a text."),
        ('{"question": "7?", "solution": "A", "role": "liar"}\n', "line 1: the column 'role' is 'liar'."),
        ("\n", "has no rows."),
        ('{"question": "200: A or B?", "solution": "Answer: A"}\n', "is one of the task's test problems"),
        (
            '{"question": "7?", "solution": "Answer: A, or was it B?"}\n',
            "line 1: the solution has 24 tokens with its end",
        ),
        ('{"question": "7?", "solution": "é"}\n', "line 1: The tokenizer of blank cannot express 'é'"),
    ],
)
def test_wrong_demonstrations_are_refused_before_the_run_begins(folder: Path, rows: str, says: str) -> None:
    Path("wrong.jsonl").write_text(rows)
    with pytest.raises(ConfigurationError) as caught:
        pvg.play("warm.toml", {"warmup.path": "wrong.jsonl"}, name="wrong")
    assert says in str(caught.value)
    assert not Path("runs", "wrong").exists()


def test_a_missing_file_is_an_error_of_the_dry_run_too(folder: Path) -> None:
    runner = CliRunner()
    refused = runner.invoke(app, ["train", "warm.toml", "--dry-run", "-s", "warmup.path=no.jsonl"])
    assert refused.exit_code == 3
    assert "There is no file no.jsonl." in refused.stderr
    found = orjson.loads(runner.invoke(app, ["train", "warm.toml", "--dry-run", "--json"]).stdout)["warmup"]
    assert found["demonstrations"] + found["held_out"] == 100


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"task": {"kind": "play"}}, "task.kind = 'play' has no questions"),
        (
            {"weights": {"transport": {"kind": "lora"}}, "training": {"adapters": {"rank": 16}}},
            "the servers would not have the warmed prover",
        ),
    ],
)
def test_what_a_warm_start_cannot_do_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        build_experiment({"warmup": {"path": "demos.jsonl"}, **changes})


def test_roles_and_the_wording_of_the_task_are_those_of_the_game(folder: Path) -> None:
    Path("roles.csv").write_text('question,solution,role\n"7: A or B?",Answer: A,sneaky\n"500: A or B?",Answer: B,\n')
    section = Warmup(path=Path("roles.csv"))
    found = read_demonstrations(section)
    assert [row.role for row in found.train] == [Role.SNEAKY, Role.HELPFUL]
    assert not found.held_out
    experiment = pvg.load_experiment("warm.toml")
    known, new = problems_of(found.train, open_task(experiment.task))
    assert known.id.startswith("data-train-")
    assert new.question == "500: A or B?"
    assert new.metadata["wording"] == known.metadata["wording"]


def test_the_loss_is_the_mean_over_all_tokens_however_the_batch_is_split() -> None:
    generator = np.random.default_rng(0)
    rows = [generator.integers(1, 40, size=size).astype(np.int32) for size in (9, 5, 12, 7)]
    prompts, solutions = [row[:3] for row in rows], [row[3:] for row in rows]
    batch = demonstration_batch(prompts, solutions, [Role.HELPFUL] * 4)
    with language_model(english_tokenizer(), 0) as model:
        model.require_gradients()
        logits = [model.module(torch.from_numpy(row).long()[None]).logits[0] for row in rows]
        picked = [
            found.log_softmax(-1)[2:-1].gather(1, torch.from_numpy(row[3:]).long()[:, None])[:, 0]
            for found, row in zip(logits, rows, strict=True)
        ]
        wanted = -torch.cat(picked).mean()
        for tokens in (16, 16_384):
            objective = SupervisedObjective(Training(micro_batch_tokens=tokens), pad_id=0)
            parts = objective.split(objective.prepare(batch))
            assert (len(parts) > 1) == (tokens == 16)
            assert sum(objective(model.module, part)[0].item() for part in parts) == pytest.approx(
                wanted.item(), rel=1e-5
            )
            assert objective.mean_loss(model.module, batch) == pytest.approx(wanted.item(), rel=1e-5)


def test_a_run_with_a_warm_start_can_move(warm: pvg.Run) -> None:
    shutil.copytree("runs/warm", "elsewhere/moved")
    experiment = pvg.Run("elsewhere/moved").experiment
    assert experiment.hash() == warm.experiment.hash()
    report = pvg.evaluate(
        pvg.Run("elsewhere/moved"), parts=["best-of-n"], settings={"evaluate.problems": 8, "evaluate.samples": 2}
    )
    assert report.rounds
