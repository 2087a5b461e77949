"""Profiles: looked up, changed by keys, and refused with the nearest valid key."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_runs import load_profile
from tiny_workload import PROFILE, Settings, write_profile

from pvg.bench.workloads import workload_settings
from pvg.config.load import find_experiment, known_files, load_experiment
from pvg.errors import ConfigurationError, PvgError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_profile(tmp_path)
    return tmp_path


def test_a_profile_starts_from_its_experiment_and_its_own_settings() -> None:
    settings = load_profile("tiny")
    modchain = load_experiment(find_experiment("modchain"))
    assert settings.experiment.rollout.engine.max_rows == 128  # "rollout.engine.max_rows" = 128, the key in quotes
    assert settings.experiment.training.steps == 7  # training.steps = 7, without
    assert settings.experiment.verifier == modchain.verifier
    assert workload_settings(Settings, settings) == Settings(numbers=2000)
    assert (settings.profile.warmup, settings.profile.repeats) == (1, 3)


def test_overrides_reach_the_experiment_the_workload_and_the_profile_in_order() -> None:
    settings = load_profile(
        "tiny",
        [
            "rollout.engine.max_rows=64",
            "rollout.engine.max_rows=32",
            "workload.numbers=5",
            "workload.kind=stable",
            "repeats=9",
        ],
    )
    assert settings.experiment.rollout.engine.max_rows == 32
    assert workload_settings(Settings, settings) == Settings(numbers=5, kind="stable")
    assert (settings.profile.warmup, settings.profile.repeats) == (1, 9)
    plain = settings.plain()
    assert plain["profile"]["repeats"] == 9
    assert plain["profile"]["workload"] == {"numbers": 5, "kind": "stable"}
    assert plain["experiment"]["rollout"]["engine"]["max_rows"] == 32


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "rollout.engine.max_row=1",
            ["'rollout.engine.max_row'", "--set rollout.engine.max_row=1", "'rollout.engine.max_rows'"],
        ),
        ("workload.number=1", ["'workload.number'", "--set workload.number=1", "'workload.numbers'"]),
        ("repeat=3", ["'repeat'", "'repeats'"]),
        ("repeats=0", ["repeats", "--set repeats=0"]),
        ("workload.numbers=many", ["workload.numbers", "'many'", "--set workload.numbers=many"]),
    ],
)
def test_a_wrong_override_names_itself_and_the_nearest_key(override: str, words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        workload_settings(Settings, load_profile("tiny", [override]))
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('headline = "numbers_per_s"', 'headlin = "x"', ["'headlin'", "'headline'"]),
        ('about = "sorts numbers"\n', "", ["'about' is missing"]),
        ('fast = "quicksort"', 'fast = "stable"', ["'workload.kind' has the same"]),
        (
            '"rollout.engine.max_rows" = 128',
            '"rollout.engine.max_row" = 128',
            ["'rollout.engine.max_row'", "[set] of", "rollout.engine.max_rows"],
        ),
        ("numbers = 2000", "nombers = 2000", ["'workload.nombers'", "'workload.numbers'", "[workload] table"]),
        ('name = "tiny"', 'name = "../tiny"', ["name"]),
    ],
)
def test_a_wrong_file_names_the_key(folder: Path, old: str, new: str, words: list[str]) -> None:
    assert old in PROFILE
    write_profile(folder, PROFILE.replace(old, new))
    with pytest.raises(PvgError) as caught:
        workload_settings(Settings, load_profile("tiny"))
    for word in words:
        assert word in str(caught.value)


def test_a_profile_of_this_folder_hides_the_shipped_one_of_its_name(folder: Path) -> None:
    shipped = known_files("profiles")
    assert shipped["tiny"] == Path("profiles/tiny.toml")
    other = next(name for name in shipped if name != "tiny")
    write_profile(folder, name=other)
    assert load_profile(other).profile.profile == "tiny"
