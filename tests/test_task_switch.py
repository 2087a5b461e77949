"""`-s task.kind=KIND`: what of the file is dropped, and what stays."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from pvg.config.experiment import TABLES
from pvg.config.load import assign, build_experiment, find_experiment, overridden
from pvg.config.rollout import ChatPrompts
from pvg.errors import ConfigurationError
from pvg_cli.runs import resolve

MODCHAIN = find_experiment("modchain").resolve()
DIPLOMACY_MODELS = [
    "models.prover.source=embedded:diplomacy-prover",
    "models.verifier.source=embedded:diplomacy-verifier",
]


def test_the_settings_of_the_files_kind_are_dropped_with_one_note(capsys: pytest.CaptureFixture[str]) -> None:
    switched = resolve("modchain", [*DIPLOMACY_MODELS, "task.kind=diplomacy_mini", "task.problems=90"])
    assert (switched.task.kind, switched.task.problems) == ("diplomacy_mini", 90)  # type: ignore[union-attr]
    dropped = "task.max_terms, task.min_terms, task.modulus"
    note = f"task.kind = 'diplomacy_mini' replaces 'modchain', so these settings of the file are dropped: {dropped}.\n"
    assert capsys.readouterr().err == note


def test_instructions_for_the_files_task_are_dropped_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = find_experiment("smollm2-gsm8k").read_text().replace('prompts = "chat"', "")
    words = '[prompts]\nkind = "chat"\nhelpful = "Solve it."\nexamples = []\n'
    file = tmp_path / "mine.toml"
    file.write_text(text + words)
    found = resolve(str(file), ["task.kind=code", "prompts.sneaky=Deceive."]).prompts
    assert found == ChatPrompts(sneaky="Deceive.")
    assert "dropped: prompts.examples, prompts.helpful, task.max_steps, task.path." in capsys.readouterr().err
    assert resolve(str(file), []).prompts.helpful == "Solve it."  # type: ignore[union-attr]


def test_the_files_own_kind_is_no_switch(capsys: pytest.CaptureFixture[str]) -> None:
    assert resolve("modchain", ["task.kind=modchain", "task.modulus=7"]).task.min_terms == 5  # type: ignore[union-attr]
    assert capsys.readouterr().err == ""


def test_a_setting_with_its_default_never_warns() -> None:
    """A run's own experiment.toml names every setting, so a resumed run must warn like the run that it resumes."""
    for key, table in TABLES.items():
        for kind in table.kinds():
            data: dict[str, object] = {}
            assign(data, key, kind)
            try:
                experiment = build_experiment(data)
            except ConfigurationError:  # this kind needs other settings
                continue
            resumed = build_experiment(tomllib.loads(experiment.to_toml()))
            assert resumed.warnings() == experiment.warnings(), (key, kind)
    assert build_experiment({}).warnings() == []


OWN_WORDS = ["task.path=d.jsonl", *(f"models.{player}.source=hf:o/n@{'0' * 40}" for player in ("prover", "verifier"))]
PROMPTS = 'prompts={kind="chat",helpful="MINE",sneaky="BAD"}'


@pytest.mark.parametrize("kind", ["task.kind=data", "task=data", 'task={kind="data"}'])
def test_instructions_of_the_command_line_stay_in_any_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("d.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    for overrides in ([PROMPTS, kind], [kind, PROMPTS]):
        found = resolve(str(MODCHAIN), [*overrides, *OWN_WORDS]).prompts
        assert (found.helpful, found.sneaky) == ("MINE", "BAD")  # type: ignore[union-attr]


def test_a_table_of_a_task_drops_the_files_instructions_like_its_kind(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[task]\nkind = "code"\n[prompts]\nkind = "chat"\nhelpful = "Solve it."\n')
    data, _ = overridden(file, ['task={kind="gsm8k"}'])
    assert data["prompts"] == {"kind": "chat"}
    assert overridden(file, ['task={kind="code"}'])[0]["prompts"]["helpful"] == "Solve it."
