"""Commands that only look: config, doctor, report, and train --dry-run."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from calling import pvg
from run_samples import played

import pvg_cli.doctor
from pvg.config.load import load_experiment
from pvg.installation import install_extra
from pvg.sandbox.sandbox import Isolation
from pvg_cli.doctor import check_extras, check_models, check_sandbox


def test_a_dry_run_begins_with_time_memory_and_arithmetic_and_makes_nothing() -> None:
    called = pvg("train", "--dry-run", "-s", "training.groups=4", "-s", "training.steps=3")
    assert called.code == 0
    texts = ("GB of memory", "rollouts per batch", "4 groups x 8", "Prompt of the helpful role", "runs/modchain")
    places = [called.out.index(text) for text in texts]
    assert places == sorted(places)
    assert not Path("runs").exists()


def test_show_can_be_saved_and_used() -> None:
    Path("mine.toml").write_text(pvg("config", "show", "-s", "seed=5").out)
    assert load_experiment(Path("mine.toml")).seed == 5
    assert pvg("config", "show", "mine.toml", "--json").document["seed"] == 5
    assert "seed = 5" in pvg("config", "show", "mine.toml").out


def test_doctor_names_the_command_for_a_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pvg_cli.doctor, "EXTRAS", {"moon": "no_such_module_anywhere"})
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


def test_doctor_says_how_programs_are_isolated(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(isolation: Isolation) -> tuple[str, str, str]:
        monkeypatch.setattr("pvg.sandbox.sandbox.probe", lambda: isolation)
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


def test_report_of_a_run_by_its_folder() -> None:
    played(Path("elsewhere"), "other")
    assert "Example solutions" in pvg("report", "other", "--runs", "elsewhere", "--no-html").out
    document = pvg("report", "elsewhere/other", "--json", "--examples", "1").document
    assert document["status"] == "complete"
    assert document["rounds"][0]["metrics"]["helpful_accuracy"] == 0.875
    assert [example["id"] for example in document["examples"]] == ["strong", "middle"]
