"""`-s task.kind=KIND`: what is dropped, what else is needed, and that it plays."""

from __future__ import annotations

import importlib
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

from pvg.config.experiment import TABLES
from pvg.config.load import assign, build_experiment, find_experiment, overridden, shipped_directories
from pvg.config.prompts import ChatPrompts
from pvg.config.switching import task_switch
from pvg.errors import ConfigurationError, UsageError
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
    words = '[prompts]\nkind = "chat"\nplace = "user"\nhelpful = "Solve it."\nexamples = []\n'
    file = tmp_path / "mine.toml"
    file.write_text(text + words)
    found = resolve(str(file), ["task.kind=code", "prompts.sneaky=Deceive."]).prompts
    assert found == ChatPrompts(place="user", sneaky="Deceive.")
    assert "dropped: prompts.examples, prompts.helpful, task.max_steps, task.path." in capsys.readouterr().err
    assert resolve(str(file), []).prompts.helpful == "Solve it."  # type: ignore[union-attr]


def test_the_files_own_kind_is_no_switch(capsys: pytest.CaptureFixture[str]) -> None:
    assert resolve("modchain", ["task.kind=modchain", "task.modulus=7"]).task.min_terms == 5  # type: ignore[union-attr]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("overrides", "named", "remedy"),
    [
        (
            ["task=diplomacy_mini"],
            "models.verifier.source = 'embedded:modchain-verifier-small' does not know the characters",
            "Add: -s models.prover.source=embedded:diplomacy-prover "
            "-s models.verifier.source=embedded:diplomacy-verifier. "
            "Or play the experiment of this task: diplomacy-mini",
        ),
        (
            ["task.kind=gsm8k", "models.verifier.source=mine"],
            "prompts = 'tag'",
            "Add: -s task.path=hf:openai/gsm8k -s models.prover.source=hf:OWNER/NAME -s prompts=chat. "
            "Or play the experiment of this task: smollm2-gsm8k",
        ),
        (
            ["task=code"],
            "models.prover.source = 'embedded:modchain-prover' does not know the characters",
            "Add: -s models.prover.source=hf:OWNER/NAME -s models.verifier.source=hf:OWNER/NAME -s prompts=chat. "
            "Or play the experiment of this task: code",
        ),
        (["task.kind=custom"], "task.source is not set", "Add: -s task.source=FILE.py:NAME"),
    ],
)
def test_one_error_names_all_that_the_new_task_needs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, overrides: list[str], named: str, remedy: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        task_switch(MODCHAIN, overrides)
    assert caught.value.message.startswith(f"-s {overrides[0]} needs more changes to ")
    assert named in caught.value.message
    assert caught.value.remedy == remedy


EXPERIMENTS = sorted(path.stem for place in shipped_directories() for path in place.glob("*.toml"))


def test_there_are_experiments_to_switch() -> None:
    assert {"modchain", "smollm2-gsm8k", "qwen-gsm8k-lora", "code", "negotiation"} <= set(EXPERIMENTS)


@pytest.mark.parametrize("kind", TABLES["task"].kinds())
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_kind_is_accepted_with_the_settings_that_the_one_error_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, kind: str
) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", importlib.import_module("json"))  # a module with a spec
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE.py").write_text("class NAME: ...\n")
    overrides = [f"task.kind={kind}"]
    try:
        found = resolve(name, overrides)
    except UsageError as error:
        words = shlex.split(error.remedy.removeprefix("Add: ").partition(". Or play")[0])
        assert set(words[::2]) == {"-s"}
        found = resolve(name, [*overrides, *words[1::2]])
    assert found.task.kind == kind
    assert capsys.readouterr().err.count("\n") <= 1


def test_all_that_is_wrong_is_named_also_where_no_setting_of_pvg_helps() -> None:
    """A setting of the user that excludes the new task is one problem more of the same error."""
    overrides = ["task.kind=play", "rollout.prefetch=fresh", "prompts=chat", "prompts.helpful=Win."]
    with pytest.raises(UsageError) as caught:
        task_switch(MODCHAIN, overrides)
    assert "self-play does not support rollout.prefetch = 'fresh'" in caught.value.message
    assert "prompts.helpful has no effect with task.kind = 'play'" in caught.value.message
    assert caught.value.remedy == "Add: -s rollout.prefetch=none"


def test_a_chat_model_may_play_a_task_in_characters_with_instructions_of_the_user() -> None:
    path = find_experiment("smollm2-gsm8k")
    with pytest.raises(UsageError, match=r"prompts = 'chat' has no instructions for this task"):
        task_switch(path, ["task.kind=modchain"])
    assert task_switch(path, ["task.kind=modchain", "prompts.helpful=Add.", "prompts.sneaky=Add wrongly."])


def test_a_missing_package_is_named_with_the_other_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    overrides = ["task.kind=reasoning_gym", "prompts=chat", "models.verifier.source=mine"]
    with pytest.raises(
        UsageError, match=r"reasoning-gym is not installed \(type: .*\[reasoning-gym\]'\); models.prover"
    ):
        task_switch(MODCHAIN, overrides)


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


@pytest.mark.parametrize(
    ("name", "overrides", "remedy"),
    [
        ("diplomacy-mini", ["task.kind=play"], "Add: -s models.prover.source=embedded:modchain-prover. Or play"),
        ("diplomacy-mini", ["task.kind=play", "task.game=FILE.py:NAME"], ""),
        ("diplomacy-mini", ["task.kind=diplomacy_plan"], "Add: -s models.prover.source=hf:OWNER/NAME -s models."),
        ("smollm2-gsm8k", ["task.kind=play"], ""),
        ("qwen-gsm8k-lora", ["task.kind=play"], 'Add: -s \'task.references=["random", "greedy"]\''),
        (
            "code",
            ["task.kind=diplomacy_mini", "prompts.helpful=Plan."],
            "Add: -s models.prover.source=embedded:diplomacy-prover "
            "-s models.verifier.source=embedded:diplomacy-verifier -s prompts=tag "
            "-s game.reward.similarity_weight=0.0 -s rollout.max_tokens=48.",
        ),
    ],
)
def test_the_settings_fit_the_task(name: str, overrides: list[str], remedy: str) -> None:
    path = find_experiment(name)
    if not remedy:
        assert task_switch(path, overrides) is not None
        return
    with pytest.raises(UsageError) as caught:
        task_switch(path, overrides)
    assert caught.value.remedy.startswith(remedy)


OWN_WORDS = [
    "task.path=d.jsonl",
    *(f"models.{player}.source=hf:o/n@{'0' * 40}" for player in ("prover", "verifier")),
]
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


def test_a_conflict_that_the_option_cluster_removes_is_none(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[cluster]\nkind = "local"\nworkers = 2\n')
    overrides = ["task.kind=diplomacy_mini", "models.device=cuda"]
    assert resolve(str(file), [*DIPLOMACY_MODELS, *overrides], "none").cluster.kind == "none"
    conflict = "cluster = 'local' computes on the CPU"
    for cluster, named in ((None, True), ("none", False)):
        with pytest.raises(UsageError) as caught:
            resolve(str(file), overrides, cluster)
        assert (conflict in caught.value.message) is named


def test_a_conflict_with_any_task_is_not_blamed_on_the_task() -> None:
    plain = [*DIPLOMACY_MODELS, "task.kind=diplomacy_mini", "prompts=plain"]
    assert task_switch(MODCHAIN, plain) is not None
    with pytest.raises(ConfigurationError) as own:
        resolve(str(MODCHAIN), plain)
    assert "needs more changes" not in own.value.message
    with pytest.raises(UsageError) as caught:
        task_switch(MODCHAIN, ["task.kind=diplomacy_mini", "prompts=plain"])
    of_the_task, _, general = caught.value.message.partition(" Wrong with any task: ")
    assert "does not know the characters" in of_the_task
    assert "plain" not in of_the_task
    assert "plain" in general
