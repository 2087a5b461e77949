"""The reference of settings: the page, `config show` and `config explain` have one text."""

from __future__ import annotations

import tomllib

import pytest

from pvg.config.describe import commented_toml, explained, json_schema, page, settings, used
from pvg.config.experiment import TABLES, Experiment
from pvg.config.load import build_experiment, find_experiment, load_experiment, valid_keys
from pvg.config.sections import value_of
from pvg.errors import UsageError


def test_the_page_has_every_setting() -> None:
    text = page()
    keys = {setting.key for setting in settings() if not setting.key.endswith(".kind")}
    assert {key for key in keys if f"`{key}`" not in text} == set()


def test_every_setting_has_a_short_meaning() -> None:
    for setting in settings():
        assert setting.meaning.endswith("."), setting.key
        assert len(setting.meaning) <= 140, setting.key
    assert {setting.key for setting in settings()} == set(valid_keys())


UNITS = {"_s": "second", "seconds": "second", "_ms": "ms", "_mb": "MB", "_kb": "kB"}
UNITS |= {"_tokens": "token", "_rollouts": "rollout", "_share": "share"}


def test_a_setting_with_a_unit_in_its_name_says_it() -> None:
    for setting in settings():
        unit = next((unit for end, unit in UNITS.items() if setting.key.endswith(end)), "")
        assert unit.lower() in setting.meaning.lower(), (setting.key, setting.meaning)


def test_a_setting_says_its_range() -> None:
    ranges = {setting.key: setting.range for setting in settings()}
    assert ranges["training.groups"] == "at least 1"
    assert ranges["verifier.held_out"] == "at least 0 and below 1"
    assert ranges["game.sneaky_share"] == "0 to 1"
    assert ranges["training.learning_rate"] == "above 0"
    assert ranges["cluster.trainer_ranks"] == "2 to 64"  # may be left out
    assert ranges["serving.gpu_memory_utilization"] == "above 0 and at most 1"
    assert ranges["models.precision"] == ""
    assert ranges["task.warmup"] == "0 to 1,000,000"
    numbers = [each for each in settings() if each.type.startswith(("integer", "number"))]
    free = {each.key for each in numbers if not each.range}
    assert free == {"game.reward.floor", "task.threshold"}


def test_the_json_schema_describes_every_setting() -> None:
    schema = json_schema()
    for section in [schema, *schema["$defs"].values()]:
        for name, field in section.get("properties", {}).items():
            described = field.get("description") or "$ref" in field or "oneOf" in field
            assert described, (section["title"], name)


def test_a_section_is_explained_with_its_settings() -> None:
    told = explained("game.test")
    assert told["meaning"].startswith("Fresh samples")
    assert [inside["key"] for inside in told["settings"]] == ["game.test.problems", "game.test.samples"]
    assert "training.kl.target" in [inside["key"] for inside in explained("training")["settings"]]
    assert explained("rollout.deadline")["settings"][0]["kinds"] == ["cut"]


def test_there_are_no_more_settings_than_one_can_know() -> None:
    """A new setting has to take the place of another one. A debate needs its turns, its order and its fork, a critic
    its pay, a verifier that writes its votes and their length, a reward that reads its reader and two weights, the part
    legibility its reader, and a verifier what it keeps and how much of the reference it subtracts."""
    assert len(valid_keys()) <= 158


NAMES = ("modchain", "code", "diplomacy-mini", "diplomacy-plan", "qwen-gsm8k-lora", "smollm2-gsm8k")


@pytest.mark.parametrize("name", NAMES)
def test_the_commented_experiment_reads_back_as_the_same_one(name: str) -> None:
    experiment = load_experiment(find_experiment(name))
    text = commented_toml(experiment)
    assert build_experiment(tomllib.loads(text)) == experiment
    assert "groups = " in text
    assert "# Groups sampled per batch." in text


def test_the_kind_of_a_table_is_found_where_it_stands_alone_and_in_its_table() -> None:
    assert explained("prompts.kind")["experiments"]["smollm2-gsm8k"] == '"chat"'  # prompts = "chat"
    assert explained("task.kind")["experiments"]["code"] == '"code"'  # [task] kind = "code"
    assert explained("game.reward.kind")["experiments"] == explained("game.reward")["experiments"] != {}


def test_a_setting_is_explained_with_its_use_in_the_experiments() -> None:
    told = explained("training.kl.coefficient")
    assert [form["kinds"] for form in told["forms"]] == [[]]
    assert [form["kinds"] for form in explained("rollout.deadline.seconds")["forms"]] == [["cut"], ["continue"]]
    assert told["experiments"]["modchain"] == "0.01"
    assert used("game.reward")["modchain"] == '"cgc"'
    assert "decoupled" in explained("game.reward")["kinds"]
    with pytest.raises(UsageError, match="The nearest one is"):
        explained("training.kl_coefficient")


def test_every_table_starts_with_its_default_kind() -> None:
    for key, table in TABLES.items():
        assert value_of(Experiment(), key) == table.default
