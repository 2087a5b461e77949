"""The experiment's configuration: reading, overriding, refusing what cannot work, and saying why in one line."""

from __future__ import annotations

import copy
import re
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pvg.config.experiment import Experiment
from pvg.config.game import CgcReward, DecoupledReward
from pvg.config.load import (
    NAMES_ELSEWHERE,
    assign,
    build_experiment,
    differences,
    find_experiment,
    load_experiment,
    nearest_key,
    parse_override,
    shipped_directories,
    valid_keys,
)
from pvg.config.task import TASKS
from pvg.errors import ConfigurationError, UsageError

SHIPPED = sorted(path for place in shipped_directories() for path in place.glob("*.toml"))


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return path


def complaint(tmp_path: Path, *overrides: str, text: str = "") -> ConfigurationError:
    with pytest.raises(ConfigurationError) as caught:
        load_experiment(write(tmp_path, text), overrides)
    assert "\n" not in caught.value.message
    return caught.value


# --- what ships ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_experiments_are_valid_and_named_after_their_file(path: Path) -> None:
    assert load_experiment(path).name == path.stem


def test_the_experiment_for_a_gpu_has_room_for_solutions_and_repeats_no_default() -> None:
    data = tomllib.loads(find_experiment("qwen-gsm8k-lora").read_text())
    assert data["rollout"]["max_tokens"] >= 768  # 320 would cut about half of the solutions
    whole, repeated = build_experiment(data), []
    for section, values in data.items():
        for key in values if isinstance(values, dict) else ():
            other = copy.deepcopy(data)
            del other[section][key]
            with suppress(ConfigurationError):  # it is needed
                repeated += [f"{section}.{key}"] * (build_experiment(other) == whole)
    assert repeated == []


# --- reading and overriding ------------------------------------------------------------------------------------------


def test_overrides_are_applied_in_order_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "seed = 4\n[training]\nsteps = 7\n")
    experiment = load_experiment(path, ["training.steps=8", "training.steps=9", "game.reward=cgc"])
    assert (experiment.seed, experiment.training.steps, experiment.game.reward.kind) == (4, 9, "cgc")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a.b=3", 3),
        ("a.b = 3e-4", 3e-4),
        ("a.b=true", True),
        ('a.b="3"', "3"),
        ("a.b=some/path", "some/path"),
        ("a.b=x=y", "x=y"),
        ("a.b=", ""),
        ("a.b=[1, 2]", [1, 2]),
    ],
)
def test_an_override_is_toml_where_it_can_be(text: str, value: Any) -> None:
    assert parse_override(text) == ("a.b", value)


@pytest.mark.parametrize("text", ["training.steps", "=3", " = 3"])
def test_an_override_without_key_or_value_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="key=value"):
        parse_override(text)


def test_an_override_cannot_reach_into_a_setting(tmp_path: Path) -> None:
    assert "not a section" in complaint(tmp_path, "seed.inner=3", text="seed = 1").message


def test_files_of_windows_editors_are_read(tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_bytes("\ufeffHelp.\r\nWell.\r".encode())
    mine = f'seed = 3\r\n[prompts]\r\nkind = "chat"\r\nhelpful.file = "{tmp_path / "prompt.txt"}"\r\n'
    (tmp_path / "mine.toml").write_bytes(b"\xef\xbb\xbf" + mine.encode())
    (tmp_path / "more.toml").write_bytes(b"\xef\xbb\xbfname = 'more'")
    experiment = load_experiment(tmp_path / "mine.toml", [f"@{tmp_path / 'more.toml'}"])
    assert (experiment.seed, experiment.name) == (3, "more")
    assert getattr(experiment.prompts, "helpful", None) == "Help.\nWell."


@pytest.mark.parametrize("text", ["seed = ", "seed = 1\nseed = 2"])
def test_a_broken_file_is_named(tmp_path: Path, text: str) -> None:
    error = complaint(tmp_path, text=text)
    assert re.search(r"mine\.toml is not valid TOML: .* \(at (line|end)", error.message)
    assert "Write tables as [name]" in error.remedy
    (tmp_path / "mine.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match=r"mine\.toml, line 1: not UTF-8"):
        load_experiment(tmp_path / "mine.toml")
    with pytest.raises(UsageError, match="cannot be read"):
        load_experiment(tmp_path)


def test_a_folder_in_place_of_an_experiment_is_named_with_a_file_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "mine.toml", "modchain"):
        Path(name).mkdir()
    for name in ("mine", "mine.toml", "."):
        with pytest.raises(UsageError, match=f"The experiment '{name}' is a folder. Give a path to a TOML file"):
            find_experiment(name)
    Path("mine/experiment.toml").touch()
    with pytest.raises(UsageError) as caught:
        find_experiment("mine")
    assert caught.value.remedy == "Name a TOML file, such as mine/experiment.toml"
    assert find_experiment("modchain").is_file()  # a folder does not hide what ships


settings = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**31),
        "task": st.sampled_from(
            [
                {"kind": "modchain", "min_terms": 3, "max_terms": 6},
                {"kind": "gsm8k", "path": "some where/gsm8k", "limit": 5},
                {"kind": "reasoning_gym", "dataset": "chain_sum", "settings": {"min_terms": 2, "x": [1.5, "ü"]}},
            ]
        ),
        "training": st.fixed_dictionaries(
            {
                "learning_rate": st.floats(1e-9, 1.0),
                "groups": st.integers(1, 64),
                "kl": st.builds(dict, coefficient=st.floats(0.0, 1.0)),
            }
        ),
        "game": st.fixed_dictionaries({"reward": st.sampled_from(["src", "cgc", "goodhart"])}),
    }
)


@given(settings)
def test_what_is_written_reads_back_equal_with_the_same_hash(tmp_path_factory: Any, data: dict[str, Any]) -> None:
    experiment = build_experiment(data)
    path = tmp_path_factory.mktemp("toml") / "e.toml"
    path.write_text(experiment.to_toml(), encoding="utf-8")
    again = load_experiment(path)
    assert again == experiment
    assert again.hash() == experiment.hash()


def test_the_hash_sees_what_changes_the_outcome_and_nothing_else() -> None:
    base = Experiment().hash()
    assert build_experiment({"training": {"learning_rate": 2e-4}}).hash() != base
    assert build_experiment({"seed": 1}).hash() != base
    assert build_experiment({"rollout": {"engine": "vllm"}}).hash() != base
    assert build_experiment({"store": {"commit_every": 3}, "telemetry": {"stall_s": 1.0}}).hash() == base
    elsewhere = {"serving": {"servers": ["http://10.0.0.1:8000"]}, "weights": {"root": "elsewhere"}}
    assert build_experiment(elsewhere).hash() == base


def test_differences_name_key_and_both_sides() -> None:
    before = build_experiment({"seed": 1}).hashed()
    after = build_experiment({"seed": 2, "training": {"groups": 9}}).hashed()
    assert differences(before, after) == ["seed: 1 -> 2", "training.groups: 32 -> 9"]
    assert differences(before, before) == []


# --- finding ---------------------------------------------------------------------------------------------------------


def test_a_name_is_looked_up_in_the_folder_then_in_the_package(tmp_path: Path) -> None:
    assert find_experiment("modchain", tmp_path).stem == "modchain"
    mine = tmp_path / "modchain.toml"
    mine.write_text("")
    assert find_experiment("modchain", tmp_path) == mine
    assert find_experiment(str(mine), Path("nowhere")) == mine


def test_an_unknown_name_gets_the_nearest_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Did you mean 'modchain'") as caught:
        find_experiment("modchian", tmp_path)
    assert "modchain" in caught.value.remedy
    with pytest.raises(UsageError, match=r"no experiment file .*gone\.toml"):
        find_experiment("gone.toml", tmp_path)


# --- what is wrong, by key -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("training.step", "training.steps"),
        ("trainings.steps", "training"),
        ("kl", "training.kl"),
        ("task.min_term", "task.min_terms"),
        ("lr", "training.learning_rate"),
        ("verifier.lr", "verifier.learning_rate"),
        ("rollout.batch_size", "training.groups"),
        ("num_generations", "rollout.group_size"),
        ("beta", "training.kl.coefficient"),
        ("verifier.beta", "verifier.head.beta"),
    ],
)
def test_an_unknown_key_gets_the_nearest_valid_one_and_its_origin(tmp_path: Path, key: str, hint: str) -> None:
    error = complaint(tmp_path, f"{key}=3", text="[task]\nkind = 'modchain'")
    assert f"nearest valid key is '{hint}'." in error.message
    assert f"(--set {key}=3)" in error.message


@pytest.mark.parametrize("name", NAMES_ELSEWHERE)
def test_a_name_of_another_library_has_a_hint_in_every_section(name: str) -> None:
    for section in ("", "game.", "rollout.", "a.b."):
        assert nearest_key(section + name) in valid_keys()
    assert nearest_key("qqqqqqqq") is None


def test_an_unknown_key_of_the_file_names_the_file(tmp_path: Path) -> None:
    error = complaint(tmp_path, "seed=3", text="[game]\nround = 2\n")
    assert "'game.round'" in error.message
    assert "mine.toml" in error.message
    assert "--set" not in error.message
    error = complaint(tmp_path, "seed=3", text="game = 3\n")
    assert error.message.startswith("game: Input should be a table of settings, not 3 (")
    assert error.remedy.endswith("pvg config explain game")
    error = complaint(tmp_path, text="[task]\nkind = 'modchain'\nmin_terms = 6\nmax_terms = 5")
    assert "min_terms (6) is above max_terms (5)" in error.message


@pytest.mark.parametrize(
    "override",
    [
        "training.steps=many",
        'training.steps="30"',
        "training.steps=2.5",
        "training.learning_rate=nan",
        "training.loss=ppo",
        "serving.gpu_memory_utilization=0",
        "seed=-1",
        "name=../elsewhere",
        "store.root=3",
        "verifier.held_out=1.0",
    ],
)
def test_a_wrong_value_names_its_key_and_its_origin(tmp_path: Path, override: str) -> None:
    error = complaint(tmp_path, override)
    assert error.message.startswith(f"{override.split('=', maxsplit=1)[0]}: ")
    assert f"(--set {override})" in error.message


OTHER_KINDS = [
    (["game.reward=src", "game.reward.floor=0.1"], "belongs to kinds 'cgc', 'decoupled', 'gated', not to 'src'"),
    (["rollout.deadline=0"], "rollout.deadline: there is no kind '0'; its kinds are none, cut, continue"),
    (["training.kl.coefficient=0", "training.kl.target=0.1"], "training.kl.target has no effect"),
    (
        ["verifier.head=scalar", "verifier.head.beta=0.5"],
        "verifier.head.beta belongs to kind 'implicit', not to 'scalar'",
    ),
    (["rollout.engine=vllm", "rollout.engine.max_rows=8"], "belongs to kind 'torch', not to 'vllm'"),
    (["rollout.prefetch.batches=2"], "belongs to kinds 'fresh', 'old', not to 'none'"),
]


@pytest.mark.parametrize(("overrides", "says"), OTHER_KINDS, ids=lambda value: str(value)[:40])
def test_a_setting_of_another_kind_is_refused(tmp_path: Path, overrides: list[str], says: str) -> None:
    assert says in complaint(tmp_path, *overrides).message


def test_a_later_key_inside_an_assigned_table_leaves_the_callers_table_alone() -> None:
    ahead = {"kind": "fresh", "batches": 1}
    plain: dict[str, Any] = {}
    assign(plain, "rollout.prefetch", ahead)
    assign(plain, "rollout.prefetch.batches", 99)
    assert plain == {"rollout": {"prefetch": {"kind": "fresh", "batches": 99}}}
    assert ahead == {"kind": "fresh", "batches": 1}


def test_a_bare_string_is_a_table_of_that_kind_wherever_it_stands(tmp_path: Path) -> None:
    by_text = load_experiment(write(tmp_path, '[game]\nreward = "cgc"'))
    by_table = load_experiment(write(tmp_path, '[game.reward]\nkind = "cgc"'))
    by_override = load_experiment(write(tmp_path, ""), ["game.reward=cgc"])
    assert by_text == by_table == by_override
    by_text, by_override = (
        load_experiment(write(tmp_path, text), more)
        for text, more in (('[game]\nreward = "goodhart"', []), ("", ["game.reward=goodhart"]))
    )
    assert by_text.hash() == by_override.hash() != Experiment().hash()
    further = load_experiment(write(tmp_path, '[game]\nreward = "cgc"'), ["game.reward.floor=-3"]).game
    assert further.reward == CgcReward(floor=-3.0)


def test_another_kind_starts_with_its_own_defaults_and_the_same_kind_keeps_what_is_set(tmp_path: Path) -> None:
    path = write(tmp_path, '[game.reward]\nkind = "cgc"\nfloor = -3.0')
    assert load_experiment(path, ["game.reward=decoupled"]).game.reward == DecoupledReward(floor=-2.0)
    assert load_experiment(path, ["game.reward.kind=cgc"]).game.reward == CgcReward(floor=-3.0)
    swapped = load_experiment(path, ["game.reward.floor=-4", "game.reward=decoupled"])  # in any order
    assert swapped.game.reward == DecoupledReward(floor=-4.0)


@pytest.mark.parametrize("text", ["[task]\nkind = 'gsm9k'", "task = 'gsm9k'", "task = 3"])
def test_the_kind_of_task_is_one_of_the_known(tmp_path: Path, text: str) -> None:
    error = complaint(tmp_path, text=text)
    assert all(kind in error.message for kind in TASKS)


# --- what cannot work ------------------------------------------------------------------------------------------------

IMPOSSIBLE = [
    (["rollout.group_size=1"], "too small for training.loss = 'grpo'"),
    (["weights.transport=lora"], "training.adapters.rank = 0 trains none"),
    (["rollout.engine=vllm", "serving.servers=[]"], "needs serving.servers"),
    (["rollout.engine=vllm", "serving.verifier_servers=http://127.0.0.1:8000"], "also serves the verifier"),
    (["training.minibatches=3"], "training.minibatches = 3 does not divide"),
    (["training.micro_batch_tokens=48"], "training.micro_batch_tokens = 48 is too small"),
    (["verifier.micro_batch_tokens=48"], "verifier.micro_batch_tokens = 48 is too small"),
    (["verifier.pairing=problem", "verifier.pairs=15"], "verifier.pairs = 15 is below the 16 pairs"),
    (["game.sneaky_share=0.0"], "game.sneaky_share = 0.0 leaves one"),
    (["game.reward=decoupled", "game.sneaky_share=1.0"], "game.sneaky_share = 1.0 leaves one"),
    (["game.reward=src", "training.loss=spo", "rollout.group_size=1"], "game.reward = 'src' compares a score"),
    (["rollout.deadline=cut", "training.minibatches=128"], "training.minibatches = 128 is above the 64 rollouts"),
    (
        ["rollout.deadline=cut", "training.loss=spo", "game.reward=cgc", "training.minibatches=4"],
        "training.minibatches = 4 is above the 2 rollouts",
    ),
    (
        ["game.reward=src", "rollout.deadline=cut", "training.loss=spo"],
        "with training.loss = 'spo' rollout.deadline = 'cut' may leave a single one",
    ),
    (
        ["rollout.deadline=continue", "rollout.prefetch=fresh"],
        "rollout.prefetch takes the groups that arrive first, so a batch has no deadline",
    ),
    (
        ["rollout.deadline=continue", "training.router_replay=true", "rollout.engine=vllm"],
        "vLLM reports them for complete ones only",
    ),
    (
        ["rollout.deadline=continue", "rollout.logprobs=recomputed"],
        "rollout.deadline = 'continue' trains on rollouts of several weights",
    ),
    (["training.dynamic_sampling=4", "training.loss=spo", "game.reward=cgc"], "training.loss = 'spo' uses none"),
    (["training.dynamic_sampling=4", "rollout.prefetch=fresh"], "rollout.prefetch samples before"),
    (["training.dynamic_sampling=4", "rollout.deadline=continue"], "leaves groups to later batches"),
    (["training.importance=masked", "rollout.logprobs=recomputed"], "training.importance = 'masked' needs the sampler"),
    (["training.loss=rae", "rollout.prefetch=fresh", "rollout.deadline=cut"], "so a batch has no deadline"),
]

# The nearest setting that does work, for each of them: the rule must not refuse more than it says.
POSSIBLE = [
    ["rollout.group_size=2"],
    ["training.micro_batch_tokens=49"],
    ["verifier.micro_batch_tokens=49"],
    ["game.sneaky_share=0.0", "game.reward=correctness"],
    ["game.sneaky_share=1.0", "game.reward=goodhart"],
    ["training.loss=spo", "rollout.group_size=1", "game.reward=cgc"],
    ["rollout.deadline=cut", "training.minibatches=64"],
    ["rollout.deadline=cut", "training.loss=spo", "game.reward=cgc"],
    ["rollout.deadline=continue", "training.loss=spo"],
    ["rollout.deadline=cut", "rollout.prefetch=fresh"],
    ["rollout.deadline=continue", "training.router_replay=true"],
]
# These work together, and are not even odd.
AS_INTENDED = [
    ["training.importance=decoupled", "rollout.deadline=continue"],
    ["training.importance=decoupled", "rollout.deadline=continue", "training.loss=rloo"],
    ["training.dynamic_sampling=4", "rollout.deadline=cut"],
    ["training.dynamic_sampling=4", "training.loss=dapo"],
    ["training.importance=none", "rollout.logprobs=recomputed"],
    ["training.kl.target=0.05"],
    ["training.loss=rae", "rollout.group_size=1", "rollout.prefetch=fresh", "rollout.engine=vllm"],
    ["training.loss=rae", "rollout.group_size=1", "rollout.deadline=continue"],
    ["rollout.prefetch=fresh", "cluster.kind=local", "cluster.workers=2", "cluster.trainers=1"],
]


@pytest.mark.parametrize(("overrides", "says"), IMPOSSIBLE, ids=lambda value: str(value)[:40])
def test_what_cannot_work_is_refused(tmp_path: Path, overrides: list[str], says: str) -> None:
    error = complaint(tmp_path, *overrides)
    assert says in error.message
    assert "mine.toml" in error.message


@pytest.mark.parametrize("overrides", POSSIBLE, ids=lambda value: str(value)[:40])
def test_what_just_works_is_taken(tmp_path: Path, overrides: list[str]) -> None:
    load_experiment(write(tmp_path, ""), overrides)


@pytest.mark.parametrize("overrides", AS_INTENDED, ids=lambda value: str(value)[:40])
def test_what_works_as_intended_is_not_warned_of(tmp_path: Path, overrides: list[str]) -> None:
    assert load_experiment(write(tmp_path, ""), ["game.reward=cgc", *overrides]).warnings() == []


@pytest.mark.parametrize("address", ["127.0.0.1:8000", "http://127.0.0.1:8000/v1"])
def test_an_address_is_that_of_a_server(tmp_path: Path, address: str) -> None:
    assert "is not a server address" in complaint(tmp_path, f"serving.servers={address}").message


def test_a_server_counts_once_however_its_address_is_written(tmp_path: Path) -> None:
    urls = "http://Localhost:8000/,http://localhost:8000,http://localhost:8001"
    found = load_experiment(write(tmp_path, ""), [f"serving.servers={urls}"]).serving.servers
    assert found == ("http://localhost:8000", "http://localhost:8001")
    both = ["rollout.engine=vllm", "serving.servers=http://a:1/", "serving.verifier_servers=http://a:1"]
    assert "also serves the verifier" in complaint(tmp_path, *both).message


# --- arithmetic ------------------------------------------------------------------------------------------------------


def test_arithmetic_by_hand(tmp_path: Path) -> None:
    numbers = load_experiment(
        write(tmp_path, ""),
        [
            *("training.groups=6", "training.minibatches=2", "training.steps=5", "game.rounds=2"),
            *("rollout.group_size=4", "rollout.max_tokens=48", "training.micro_batch_tokens=320"),  # 5 rows of 48 + 16
            *("verifier.steps=7", "verifier.pairs=3", "game.mint_problems=10", "game.mint_samples=4"),
        ],
    ).arithmetic()
    assert (numbers.rollouts_per_batch, numbers.rollouts_per_optimizer_step) == (24, 12)
    assert (numbers.micro_batch_rollouts, numbers.accumulation_steps) == (5, 3)  # 5 + 5 + 2
    assert numbers.completion_tokens_per_batch == 24 * 48
    assert numbers.mint_rollouts_per_round == 40
    assert numbers.verifier_pairs_per_round == 21
    assert numbers.prover_rollouts_per_round == 72  # 5 steps of 2 to a batch: 3 batches
    assert numbers.optimizer_steps == 2 * (7 + 5)


def test_a_growing_game_adds_problems_and_steps_in_each_round() -> None:
    growing = {"growing": True, "rounds": 3}
    experiment = build_experiment({"game": growing, "verifier": {"steps": 7}, "training": {"steps": 5}})
    game = experiment.game
    assert [game.problems_of_mint(round_) for round_ in range(3)] == [game.mint_problems * size for size in (1, 2, 3)]
    assert [experiment.verifier_steps(round_) for round_ in range(3)] == [7, 14, 21]
    assert experiment.arithmetic().optimizer_steps == 7 + 14 + 21 + 3 * 5
    # The verifier's updates do not grow: 6 batches of 2 steps, so 3 updates of 2 steps in each round.
    turns = {"kind": "simultaneous", "every": 2}
    training = {"steps": 13, "minibatches": 2}
    experiment = build_experiment(
        {"game": growing | {"schedule": turns}, "verifier": {"steps": 7}, "training": training}
    )
    assert [experiment.verifier_update_steps(done) for done in (3, 4, 11, 12, 13)] == [0, 2, 4, 6, 6]
    numbers = experiment.arithmetic()
    assert (numbers.verifier_update_steps_per_round, numbers.optimizer_steps) == (6, 7 + 14 + 21 + 3 * (13 + 6))
    many = {"growing": True, "rounds": 10**12}  # no command may count to it
    assert build_experiment({"game": many}).arithmetic().optimizer_steps > 10**24


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ({"game": {"reward": {"kind": "decoupled", "floor": 0.5}}}, "game.reward.floor"),
        ({"game": {"reward": "cgc"}, "training": {"loss": "dapo", "kl": {"coefficient": 0.1}}}, "training.kl"),
        (
            {"game": {"reward": "cgc"}, "training": {"loss": "rloo"}, "rollout": {"deadline": "continue"}},
            "training.loss = 'rloo' has no ratio, so stale rollouts",
        ),
        (
            {"game": {"reward": "cgc"}, "training": {"loss": "rloo", "minibatches": 2, "steps": 4}},
            "training.loss = 'rloo' has no ratio, so later minibatches",
        ),
        (
            {"game": {"reward": "cgc"}, "rollout": {"group_size": 2, "deadline": "cut"}},
            "rollout.deadline has no effect",
        ),
    ],
)
def test_a_setting_that_works_but_is_odd_is_warned_of(overrides, key):
    assert any(key in warning for warning in build_experiment(overrides).warnings())
    assert build_experiment({"game": {"reward": "cgc"}}).warnings() == []


def test_a_setting_of_another_kind_of_task_is_named_as_such():
    with pytest.raises(ConfigurationError, match=r"task\.path belongs to kinds 'gsm8k', 'data', 'code'"):
        build_experiment({"task": {"kind": "modchain", "path": "/data"}})


@pytest.mark.parametrize(("given", "sinks"), [("tensorboard, wandb,tensorboard", ("tensorboard", "wandb")), ("[]", ())])
def test_sinks_are_named_in_any_of_the_usual_ways_and_once_each(given: str, sinks: tuple[str, ...]) -> None:
    assert load_experiment(find_experiment("modchain"), [f"telemetry.sinks={given}"]).telemetry.sinks == sinks
    with pytest.raises(ConfigurationError, match=r"telemetry\.sinks"):
        load_experiment(find_experiment("modchain"), ["telemetry.sinks=tensorbord"])


# --- files of settings -----------------------------------------------------------------------------------------------


def test_a_file_of_settings_counts_where_it_stands_among_the_overrides(tmp_path: Path) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text('training.steps = 9\n[rollout]\nengine.max_rows = 64\n"temperature" = 0.5\n')
    path = write(tmp_path, "")
    first = load_experiment(path, [f"@{settings}", "training.steps=5"])
    assert (first.training.steps, first.rollout.engine.max_rows, first.rollout.temperature) == (5, 64, 0.5)
    assert load_experiment(path, ["training.steps=5", f"@{settings}"]).training.steps == 9


def test_what_is_wrong_with_a_file_of_settings_names_it(tmp_path: Path) -> None:
    path = write(tmp_path, "")
    with pytest.raises(UsageError, match=r"no settings file .*missing\.toml"):
        load_experiment(path, [f"@{tmp_path / 'missing.toml'}"])
    (tmp_path / "odd.toml").write_text("rollout.engine.max_row = 8\n")
    with pytest.raises(ConfigurationError, match=r"odd\.toml"):
        load_experiment(path, [f"@{tmp_path / 'odd.toml'}"])


def test_an_experiment_replaces_settings_of_its_base(tmp_path: Path) -> None:
    first, second = tmp_path / "first.toml", tmp_path / "second.toml"
    first.write_text('name = "first"\nbase = "modchain"\n[game]\nrounds = 2\nreward = "goodhart"\n')
    second.write_text('name = "second"\nbase = "first.toml"\n[training]\nsteps = 3\n')  # beside it
    found, above = load_experiment(second, ["training.groups=7"]), load_experiment(find_experiment("modchain"))
    assert (found.name, found.game.rounds, found.game.reward.kind) == ("second", 2, "goodhart")
    assert (found.training.steps, found.training.groups) == (3, 7)
    assert (found.verifier, found.task) == (above.verifier, above.task)
    first.write_text(f'base = "{second}"')
    with pytest.raises(ConfigurationError, match="leads back"):
        load_experiment(second)


@pytest.mark.parametrize(
    ("changed", "served"),
    [
        ({}, True),
        ({"training": {"loss": "dapo"}}, False),
        ({"training": {"kl": {"coefficient": 0.0}}}, False),
        ({"rollout": {"temperature": 0.8}}, False),
        ({"rollout": {"logprobs": "recomputed"}}, False),
        ({"weights": {"transport": "filesystem"}}, False),
    ],
)
def test_servers_compute_the_reference_only_where_the_loss_reads_the_same_numbers(
    changed: dict[str, dict[str, Any]], served: bool
) -> None:
    settings: dict[str, dict[str, Any]] = {
        "rollout": {"engine": "vllm"},
        "weights": {"transport": "lora"},
        "training": {"adapters": {"rank": 4}},
    }
    data = {name: settings.get(name, {}) | changed.get(name, {}) for name in settings.keys() | changed.keys()}
    assert Experiment.model_validate(data | {"name": "served"}).reference_served == served
