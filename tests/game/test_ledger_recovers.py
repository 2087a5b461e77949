"""What a ledger finds when it opens a run again: killed anywhere, without its state, or with changed files."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from test_ledger_off_the_loop import rollout

from pvg.config.experiment import Experiment
from pvg.config.load import find_experiment, load_experiment
from pvg.errors import StateError
from pvg.game.ledger import Ledger
from pvg.game.states import Phase
from pvg.store.run_directory import RunDirectory
from pvg.store.shards import RolloutShards, ShardInfo

EXPERIMENT = Experiment()
WATCHED = frozenset({"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"})


def play(root: Path, *, resume: bool, commits: int = 4) -> RunDirectory:
    """Commit the start of a game, two steps with rollouts, a checkpoint and weights, and the end of a phase."""
    run = RunDirectory.open("first", root) if resume else RunDirectory.create(root, "first", EXPERIMENT)
    with run.lock():
        ledger = Ledger(run, EXPERIMENT, "test")
        try:
            asyncio.run(commit_all(ledger, commits))
        finally:
            ledger.close()
    return run


async def commit_all(ledger: Ledger, commits: int) -> None:
    for number in range(commits):
        state = ledger.state
        ledger.record("device" if state.phase is Phase.INIT else "step", number=number, loss=0.25)
        if state.phase is Phase.INIT:
            await ledger.commit(state.enter(Phase.MINT))
        elif state.phase is Phase.MINT and state.step < 2:
            ledger.keep([rollout(state.step)])
            checkpoint = ({"w": torch.full((2,), float(state.step))}, {"step": state.step})
            await ledger.commit(replace(state, step=state.step + 1), checkpoint)
        elif state.phase is Phase.MINT:
            await ledger.save_weights("round-000-verifier", {"w": torch.ones(2)}, {})
            named = replace(state, weights=("round-000-verifier",))
            await ledger.commit(named.enter(Phase.TRAIN_VERIFIER), finished={"loss": 0.5})


def committed(run: RunDirectory) -> tuple[str, int, list[str]]:
    """Phase, step and rollouts of the last commit, every file of which must be whole."""
    state = run.load_state().state
    assert state is not None
    shards = RolloutShards(run.path)
    ids = [rollout.id for plain in state["shards"] for rollout in shards.read(ShardInfo.from_plain(plain))]
    run.verify_journal(state, run.metrics)
    return state["phase"], state["step"], ids


def killed_at(event: int, root: Path) -> bool:
    """Play in a child that kills itself just before its nth change of the disk; whether it came so far."""
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            seen = 0

            def die(name: str, arguments: tuple[object, ...]) -> None:
                nonlocal seen
                if name in WATCHED and str(root) in str(arguments[0]):
                    seen += 1
                    if seen == event:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(die)
            play(root, resume=False)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


@pytest.mark.drill
@pytest.mark.timeout(900)
def test_a_run_killed_before_any_change_of_the_disk_goes_on(tmp_path: Path) -> None:
    """Also before its first commit, where it has no state, and must not be taken for one that has lost it."""
    expected = committed(play(tmp_path / "whole", resume=False))
    assert expected == ("train_verifier", 0, ["r0", "r1"])
    event, without_state = 1, 0
    while killed_at(event, root := tmp_path / str(event)):
        run = RunDirectory(root / "first")
        begun = run.experiment_file.exists()
        without_state += begun and not run.state.exists()
        done = 0
        if run.state.exists():
            phase, step, _ = committed(run)
            done = 4 if phase == "train_verifier" else 1 + step
        play(root, resume=begun, commits=4 - done)
        assert committed(run) == expected, event
        assert list(run.path.rglob(".tmp-*")) == [], event
        shutil.rmtree(root)
        event += 1
    assert event > 60
    assert without_state > 5


def contents(run: RunDirectory) -> dict[str, bytes]:
    names = sorted(path for path in run.path.rglob("*") if path.is_file())
    return {str(path.relative_to(run.path)): path.read_bytes() for path in names if path != run.events}


def test_a_run_without_its_state_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    run = play(tmp_path, resume=False)
    for path in run.path.glob("state*.json"):
        path.unlink()
    before = contents(run)
    with pytest.raises(StateError, match=r"manifest/round-000-mint\.json, rollouts/round-000, .*metrics\.jsonl"):
        play(tmp_path, resume=True)
    assert contents(run) == before
    for folder in (run.manifest, run.rollouts, run.checkpoints, run.weights):
        shutil.rmtree(folder)
    with pytest.raises(StateError, match=r"it holds metrics\.jsonl"):  # the records alone tell it
        play(tmp_path, resume=True)
    run.metrics.unlink()
    play(tmp_path, resume=True)  # nothing is left that could be lost


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_a_changed_record_is_refused_with_its_lines(tmp_path: Path) -> None:
    run = play(tmp_path, resume=False)
    flip(run.metrics, run.metrics.read_bytes().index(b"0.25"))
    before = contents(run)
    with pytest.raises(StateError, match=r"metrics\.jsonl, lines 1 to 1: .*cannot be used either: .*lines 1 to 1: "):
        play(tmp_path, resume=True)
    assert contents(run) == before


def test_a_record_that_only_the_last_commit_vouches_for_costs_that_commit(tmp_path: Path) -> None:
    run = play(tmp_path, resume=False)
    flip(run.metrics, run.metrics.read_bytes().rindex(b"0.25"))
    with run.lock():
        ledger = Ledger(run, EXPERIMENT, "test")
        ledger.close()
    assert "metrics.jsonl, lines 4 to 4" in ledger.notices[0]
    assert committed(run) == ("mint", 2, ["r0", "r1"])


def test_marks_stay_few_in_a_long_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pvg.game.ledger.MOST_MARKS", 8)
    run = RunDirectory.create(tmp_path, "first", EXPERIMENT)
    with run.lock():
        ledger = Ledger(run, EXPERIMENT, "test")

        async def commit() -> None:
            for number in range(40):
                ledger.record("step", number=number)
                await ledger.commit(ledger.state)
                assert len(ledger.state.marks["metrics"]) <= 8

        asyncio.run(commit())
        ledger.close()
    state = run.load_state().state
    assert state is not None
    run.verify_journal(state, run.metrics)
    assert len(state["marks"]["metrics"]) >= 4


def test_a_half_written_last_word_does_not_stop_the_next_process(tmp_path: Path) -> None:
    run = play(tmp_path, resume=False)
    with open(run.metrics, "ab") as file:
        file.write(b'{"kind":"run","status":"interrupted"}\n{"kind":"run","sta\x00us"\n')
    play(tmp_path, resume=True, commits=0)
    assert run.metrics.read_bytes().endswith(b'{"kind":"run","status":"interrupted"}\n')


def test_nothing_is_committed_to_a_folder_that_was_moved(tmp_path: Path) -> None:
    run = play(tmp_path, resume=False, commits=2)

    def move_and_commit() -> None:
        with run.lock():
            ledger = Ledger(run, EXPERIMENT, "test")
            try:
                run.path.rename(tmp_path / "away")
                asyncio.run(commit_all(ledger, 1))
            finally:
                ledger.close()

    with pytest.raises(StateError, match="was moved, deleted or replaced"):
        move_and_commit()
    assert not run.path.exists()  # not made again either
    assert committed(RunDirectory(tmp_path / "away")) == ("mint", 1, ["r0"])


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.zeros(2000, 1000), "b": torch.full((9,), value), "v": torch.zeros(999)}


def write_inputs(folder: Path) -> Experiment:
    """A data folder, two models and a Python file that imports another one, all with relative paths."""
    for name in ("data", "prover", "verifier", "package", "pvg"):
        (folder / name).mkdir()
    (folder / "data/train.csv").write_text("question,answer\na?,1\n")
    (folder / "data/test.csv").write_text("question,answer\nb?,1\n")
    for name in ("prover", "verifier"):
        (folder / name / "config.json").write_text("{}")
        (folder / name / "tokenizer.json").write_text("{}")
        save_file(weights(0.0), folder / name / "model.safetensors")
    (folder / "package/inner.py").write_text("A = 1\n")
    (folder / "package/for_python_2.py").write_text("print 1\n")
    (folder / "package/.#inner.py").symlink_to("editor@host")  # Emacs locks files so
    (folder / "pvg/tasks.py").write_text("")  # in a checkout of pvg
    (folder / "beside.py").write_text("import package.inner\nimport json\n")
    (folder / "mine.py").write_text(
        "import pvg\nfrom beside import package\ndef reward(outcomes, game):\n    return 0\n"
    )
    settings = ["task=data", "task.path=data", "models.prover.source=prover", "models.verifier.source=verifier"]
    return load_experiment(find_experiment("modchain"), [*settings, "game.reward=mine.py:reward"])


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("data/train.csv", "data/train.csv has changed since"),
        ("data/test.csv", "data/test.csv has changed since"),
        ("verifier/tokenizer.json", "verifier/tokenizer.json has changed since"),
        ("prover/model.safetensors", "prover/model.safetensors has changed since"),
        ("prover/chat_template.jinja", "prover has other files than when"),
        ("mine.py", "mine.py has changed since"),
        ("package/inner.py", "package/inner.py has changed since"),
        ("prover/eval_results.json", ""),
        ("json.py", ""),
        ("pvg/tasks.py", ""),
        ("data/more.csv", ""),
    ],
)
def test_a_run_goes_on_only_with_the_files_that_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, refused: str
) -> None:
    monkeypatch.setattr("pvg.inputs.TEXT_BYTES", 1 << 20)  # larger weights are sampled
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    monkeypatch.chdir(first)
    experiment = write_inputs(first)
    run = RunDirectory.create(Path("runs"), "one", experiment)

    def begin() -> None:
        ledger = Ledger(run, experiment, "test")
        asyncio.run(commit_all(ledger, 1))
        ledger.close()

    begin()
    shutil.copytree(first, second, symlinks=True)  # as on another machine
    shutil.rmtree(first)
    monkeypatch.chdir(second)
    if name.endswith(".safetensors"):
        save_file(weights(1.0), second / name)
    else:
        with (second / name).open("a") as file:
            file.write("\n#")
    if not refused:
        begin()
        return
    with pytest.raises(StateError, match=refused) as raised:
        begin()
    assert f"It started in the folder {first}" in raised.value.message
