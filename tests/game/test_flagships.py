"""The studies that wait for a GPU, whole, with tiny stand-ins of their models: the shipped files, with their
hub ids and commits, from a cache that the test fills. Only sizes are smaller."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.calling import ENTRY, pvg
from huggingface_hub import constants
from small_games import recorded, state_of
from tiny_chat import chatting
from transformers import Qwen2Config, Qwen2ForCausalLM

from pvg import hub
from pvg.evaluation.report import report_of
from pvg.evaluation.runner import evaluate
from pvg.game.run import play
from pvg.records import Role
from pvg.store.run_directory import RunDirectory
from pvg.study.plan import Cell, StudyPlan, load_study
from pvg.tasks import open_task
from pvg.tasks.task import half_of
from pvg.telemetry.events import SilentObserver

pytestmark = pytest.mark.slow

SMALL = {
    "rollout.max_tokens": 4,
    "rollout.group_size": 4,
    "training.groups": 4,
    "training.steps": 1,
    "verifier.pairs": 4,
    "verifier.held_out": 0.3,
    "game.test.problems": 12,
    "game.test.samples": 1,
    "evaluate.problems": 6,
    "evaluate.samples": 2,
    "evaluate.attack_steps": 2,
    "evaluate.attack_window": 1,
    "evaluate.attack_groups": 2,
    "evaluate.baseline_probes": 1,
    "store.commit_every": 1,
}
# Two of the datasets are so easy that answers repeat: the stand-in is right by chance.
CHECKABLE = {
    "task.problems": 72,
    "task.test_problems": 12,
    "task.settings.leg_counting": {"min_animals": 1, "max_animals": 1, "max_instances": 1},
    "task.settings.calendar_arithmetic": {"tasks": ["is_leap_year"]},
    "game.mint_problems": 24,
    "verifier.steps": 2,
    "game.rounds": 1,
}
KIRCHNER = {"game.mint_problems": 12, "verifier.steps": 2}
PHASES = {"mint": {"verifier"}, "train_prover": {"prover"}}
DIGITS = [f"\n#### {digit}" for digit in range(8)]


def words(settings: dict[str, Any]) -> list[str]:
    return [f"{key}={toml(value)}" for key, value in {**SMALL, **settings}.items()]


def options(settings: dict[str, Any]) -> list[str]:
    return [word for setting in words(settings) for word in ("-s", setting)]


def toml(value: Any) -> str:
    table = isinstance(value, dict)
    return f"{{{', '.join(f'{key} = {toml(each)}' for key, each in value.items())}}}" if table else json.dumps(value)


def write_stand_in(folder: Path, answers: list[str], seed: int) -> None:
    """A random Qwen 2 of two layers, with grouped keys and tied weights as the real one. One dimension of its hidden
    states, which no layer changes, makes it write `answers`, each of which is one token, and little else."""
    tokenizer = chatting(*(words := ["yes", "no", *answers]))
    ids = [int(tokenizer.encode(word)[0]) for word in words]
    torch.manual_seed(seed)
    module = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=max(ids) + 1, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True, bos_token_id=None,
            eos_token_id=tokenizer.eos_id, pad_token_id=tokenizer.pad_id,
        )
    )  # fmt: skip
    with torch.no_grad():
        embedding = module.model.embed_tokens.weight
        embedding[:, 0] = 0.2
        embedding[[*ids[2:], tokenizer.eos_id], 0] = 1.5
        for layer in module.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
    module.save_pretrained(folder)
    tokenizer.save(folder)


def cached(source: str, kind: str) -> Path:
    """The folder of a pinned hub id in the cache."""
    named = hub.parse(source)
    assert named.is_pinned
    return (
        Path(constants.HF_HUB_CACHE) / f"{kind}s--{named.repository.replace('/', '--')}" / "snapshots" / named.revision
    )


def write_gsm8k(folder: Path) -> None:
    """Questions whose answers are small, in the files of the hub's dataset."""
    (folder / "main").mkdir(parents=True)
    for split, count in (("train", 96), ("test", 24)):
        rows = [
            {"question": f"What is {n} modulo 8 ({split})?", "answer": f"It is.\n#### {n % 8}"} for n in range(count)
        ]
        (folder / "main" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of this process and of those that it starts. huggingface_hub reads its environment when imported."""
    monkeypatch.chdir(tmp_path)
    for name, value in (("HF_HUB_CACHE", str(tmp_path / "cache")), ("HF_HUB_OFFLINE", True)):
        monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv(name, str(value))


def load(name: str, settings: dict[str, Any]) -> StudyPlan:
    return load_study(name, words(settings), seeds=1, threads=1)


def write_models(plan: StudyPlan, answers: list[str]) -> None:
    models = plan.arms[0].experiment.models
    for seed, model in enumerate((models.prover, models.verifier)):
        write_stand_in(cached(model.source, "model"), answers, seed)


def play_in_this_process(cell: Cell, study: StudyPlan | None = None) -> None:
    """What `pvg train` calls, and for a cell of a `study` what `pvg evaluate` calls."""
    run = RunDirectory.create(cell.experiment.store.root, cell.name, cell.experiment)

    async def work() -> None:
        observed: dict[str, Any] = {"observer": SilentObserver(), "stop": asyncio.Event()}
        assert (await play(cell.experiment, run, resume=False, **observed)).status == "complete"
        if study is not None and study.evaluate is not None and cell.evaluated is not None:
            rounds = study.evaluate.numbers(cell.experiment.game.rounds)
            assert (await evaluate(cell.evaluated, run, study.evaluate.parts, rounds, **observed)).status == "complete"

    with run.lock():
        asyncio.run(work())


def page_of(name: str, settings: dict[str, Any]) -> dict[tuple[str, str], float | None]:
    """(arm, measure) -> its mean after the last round, in the document of a study, which also wrote its page."""
    found = pvg("study", name, *options(settings), "--seeds", "1", "--threads", "1", "--only-table", "--json").document
    assert found["status"] == "complete"
    assert Path(found["html"]).is_file()
    assert {cell["status"] for cell in found["cells"]} == {"complete"}
    return {(result["arm"], result["measure"]): result["summary"]["mean"] for result in found["results"]}


@pytest.mark.usefixtures("offline")
def test_checkable_plays_its_four_arms_and_ends_with_a_page() -> None:
    pytest.importorskip("reasoning_gym", reason="`make install`")
    plan = load("checkable", CHECKABLE)
    assert [arm.name for arm in plan.arms] == ["outcome", "outcome-sr", "game", "decoupled"]
    task = open_task(plan.arms[0].experiment.task)
    problems = [problem for split in ("train", "test") for problem in task.problems(split)]
    frequent = Counter(problem.answer for problem in problems).most_common(6)
    write_models(plan, [f"<answer>{answer}</answer>" for answer, _ in frequent])
    # Prompts, the verifier's input, and the grades of known answers.
    assert pvg("check", "checkable", *options(CHECKABLE)).code == 0
    for cell in plan.cells:
        play_in_this_process(cell, plan)
    found = page_of("checkable", CHECKABLE)
    for arm in plan.arms:
        assert all(found[arm.name, measure] is not None for measure in ("helpful_accuracy", "cir", "sr", "kl"))
    played = {cell.arm: recorded(cell.run) for cell in plan.cells}
    roles = {name: {r.role for r in rows if "/train_prover/" in r.id} for name, rows in played.items()}
    assert roles == {name: {Role.HELPFUL, *[Role.SNEAKY] * (name in ("game", "decoupled"))} for name in roles}
    assert any(r.sr is not None for r in played["outcome-sr"])
    assert not any(r.sr is not None for r in played["outcome"])
    assert {r.id.split("/")[1] for r in played["decoupled"]} >= {"solve"}


@pytest.mark.usefixtures("offline")
def test_kirchner_plays_four_rounds_with_attacks_and_a_baseline() -> None:
    plan = load("kirchner-gsm8k", KIRCHNER)
    write_gsm8k(cached(f"{plan.arms[0].experiment.task.path}", "dataset"))
    write_models(plan, DIGITS)
    checked = pvg("check", "kirchner-gsm8k", *options(KIRCHNER))
    assert checked.code == 0, checked.out
    growing = plan.cells[1]
    play_in_this_process(growing, plan)
    report = report_of(growing.run)
    assert report is not None
    rounds = report.plain()["rounds"]
    assert [row["round"] for row in rounds] == [0, 3]
    for row in rounds:
        assert {attack["kind"] for attack in row["exploit"]} == {"src", "cgc"}
        assert row["tax"]["kl_range"][0] is not None  # of a baseline, which was trained and measured
    halves = {phase: {half_of(r.problem_id) for r in recorded(growing.run) if f"/{phase}/" in r.id} for phase in PHASES}
    assert halves == PHASES
    mints = Counter(r.round for r in recorded(growing.run) if "/mint/" in r.id)
    assert [mints[number] for number in range(4)] == [number * mints[0] for number in (1, 2, 3, 4)]


@pytest.mark.drill
def test_a_killed_study_goes_on_with_the_same_command_to_the_same_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_gsm8k(tmp_path / "gsm8k")
    for seed, player in enumerate(("prover", "verifier")):
        write_stand_in(tmp_path / player, DIGITS, seed)
    places = {"task.path": "gsm8k", "models.prover.source": "./prover", "models.verifier.source": "./verifier"}
    settings = {**KIRCHNER, **places}
    command = [*ENTRY, "study", "kirchner-gsm8k", *options(settings), "--seeds", "1", "--threads", "1", "--json"]
    whole = load_study("kirchner-gsm8k", words(settings), seeds=1, threads=1, runs=Path("whole")).cells[0]
    killed = load("kirchner-gsm8k", settings).cells[0]

    def round_reached() -> int:
        return int(state_of(killed.run)["round"]) if killed.run.state.exists() else 0

    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as first:
        while first.poll() is None and round_reached() < 1:
            time.sleep(0.05)
        first.send_signal(signal.SIGKILL)
    assert first.returncode == -signal.SIGKILL
    assert state_of(killed.run)["phase"] != "complete"
    done = subprocess.run(command, capture_output=True, check=True, timeout=600)
    assert json.loads(done.stdout)["status"] == "complete"
    assert (tmp_path / "runs" / "kirchner-gsm8k" / "study.html").is_file()
    play_in_this_process(whole)
    assert state_of(killed.run)["rounds"] == state_of(whole.run)["rounds"]
