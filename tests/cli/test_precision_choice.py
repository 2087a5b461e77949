"""float32 in place of bfloat16, as a user of `pvg train`, `rollout`, `bench`, `profile` and `study` meets it."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from calling import pvg
from run_samples import commit, state

from pvg.bench.workloads import find_profile, parse_overrides, read_profile, settings_of
from pvg.game.run import GameOutcome
from pvg.store.run_directory import RunDirectory
from pvg.study.plan import load_study, with_precision
from pvg.study.playing import StudyFolder, train_command

HALF = """name = "half"
[models]
dtype = "bfloat16"
precision = "bfloat16"
[training]
adapters.rank = 2
[verifier]
adapters.rank = 2
"""
LINE = "This CPU has no instructions for bfloat16, so pvg uses float32 for models.dtype, models.precision. "


@pytest.fixture(autouse=True)
def stopped_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(experiment: object, run: RunDirectory, **_: Any) -> GameOutcome:
        commit(run, state("mint", step=1))
        return GameOutcome("interrupted", run.path, [], 1.0)

    monkeypatch.setattr("pvg.game.run.play", play)
    Path("half.toml").write_text(HALF)


def on_cpu(monkeypatch: pytest.MonkeyPatch, *, bfloat16: bool) -> None:
    monkeypatch.setattr("pvg.telemetry.cpu.native_bfloat16", lambda root: bfloat16)
    monkeypatch.setattr("pvg.telemetry.cpu.usable_gpus", lambda root: 0)


def precisions(run: str = "half") -> tuple[str, str]:
    found = tomllib.loads(Path("runs", run, "experiment.toml").read_text())["models"]
    return found["dtype"], found["precision"]


def test_a_new_run_records_float32_except_for_a_setting_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu(monkeypatch, bfloat16=False)
    called = pvg("train", "half.toml")
    assert called.code == 130
    assert called.err.count(LINE) == 1
    assert "To keep bfloat16, which is 10 to 100 times slower here: -s models.dtype=bfloat16" in called.err
    assert "warning" not in called.err
    assert precisions() == ("float32", "float32")
    Path("mine.toml").write_text('[models]\nprecision = "bfloat16"\n')
    called = pvg("train", "half.toml", "-s", "@mine.toml", "--name", "kept")
    assert precisions("kept") == ("float32", "bfloat16")
    assert "uses float32 for models.dtype. " in called.err
    assert called.err.count("warning: models.precision = 'bfloat16'") == 1


@pytest.mark.parametrize(
    ("native", "began", "says"),
    [
        (False, "float32", "The run began with float32 for models.dtype, models.precision"),
        (True, "bfloat16", "a new run on this machine can use float32"),
    ],
)
def test_a_run_goes_on_in_the_precision_that_it_began_with(
    monkeypatch: pytest.MonkeyPatch, native: bool, began: str, says: str
) -> None:
    on_cpu(monkeypatch, bfloat16=native)
    assert (LINE in pvg("train", "half.toml").err) is not native
    on_cpu(monkeypatch, bfloat16=not native)
    for words in (("--resume", "half"), ("half.toml", "--resume")):
        called = pvg("train", *words)
        assert called.code == 130
        assert (says in called.err) is (native or words[0] == "half.toml")
    assert precisions() == (began, began)
    other = {"float32": "bfloat16", "bfloat16": "float32"}[began]
    refused = pvg("train", "half.toml", "--resume", "-s", f"models.precision={other}")
    assert refused.code == 2
    assert f'models.precision: "{began}" -> "{other}"' in refused.err


def test_a_benchmark_measures_float32_unless_its_profile_or_a_setting_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_cpu(monkeypatch, bfloat16=False)
    path = find_profile("trainer")
    profile = read_profile(path).model_copy(update={"experiment": "half.toml", "changes": {}})
    settings = settings_of(profile, str(path), parse_overrides(["models.precision=bfloat16"]))
    assert (settings.experiment.models.dtype, settings.experiment.models.precision) == ("float32", "bfloat16")
    assert settings.note.startswith("This CPU has no instructions for bfloat16, so pvg uses float32 for models.dtype.")
    given = profile.model_copy(update={"changes": {"models": {"precision": "bfloat16"}}})
    assert settings_of(given, str(path), []).experiment.models.precision == "bfloat16"


STUDY = """name = "both"
experiment = "half.toml"
seeds = 2
[[arm]]
name = "as-it-is"
[[arm]]
name = "kept"
set = { models.precision = "bfloat16", training.steps = 5 }
"""


def test_a_study_chooses_once_for_all_of_its_games(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("both.toml").write_text(STUDY)
    on_cpu(monkeypatch, bfloat16=False)
    called = pvg("study", "both.toml", "--dry-run")
    assert called.code == 0
    assert called.err.count("uses float32 for models.dtype, models.precision.") == 1
    plan, notes = with_precision(load_study("both.toml"))
    assert len(notes) == 2  # the second arm keeps a setting
    first, second = plan.cells[:2]
    assert (first.experiment.models.precision, second.experiment.models.precision) == ("float32", "bfloat16")
    assert train_command(second, StudyFolder(plan.folder))[-3:] == ["--set", "models.precision=bfloat16", "--json"]
    # The study goes on elsewhere: its games keep the precision of the first one.
    RunDirectory.create(plan.folder, first.name, first.experiment)
    on_cpu(monkeypatch, bfloat16=True)
    later, notes = with_precision(load_study("both.toml"))
    assert [arm.experiment for arm in later.arms] == [arm.experiment for arm in plan.arms]
    assert "The run began with float32" in notes[0]
    assert pvg("study", "both.toml", "--dry-run").code == 0


def test_arms_that_would_become_the_same_game_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu(monkeypatch, bfloat16=False)
    precise = "name = 'precise'\nset = { models.dtype = 'float32', models.precision = 'float32' }\n"
    Path("both.toml").write_text(STUDY.partition('name = "kept"')[0] + precise)
    called = pvg("study", "both.toml", "--dry-run")
    assert called.code == 2
    assert "The arms 'as-it-is' and 'precise' of both.toml, in float32 instead of bfloat16, are the same" in called.err
