"""What a study's file may say, what it resolves to, and how its mistakes are reported."""

from __future__ import annotations

from pathlib import Path

import pytest
from study_samples import SMALL, small

from pvg.config.load import find_experiment, known_files
from pvg.errors import ConfigurationError, UsageError
from pvg.store.run_directory import RUN_NAME
from pvg.study.measures import MEASURES
from pvg.study.plan import find_study, load_study


def test_a_study_is_arms_times_seeds_seed_by_seed() -> None:
    plan = small()
    assert [cell.name for cell in plan.cells] == ["cgc-seed-000", "src-seed-000", "cgc-seed-001", "src-seed-001"]
    cell = plan.cells[3]
    assert (cell.experiment.seed, cell.experiment.game.reward.kind, cell.experiment.game.rounds) == (1, "src", 2)
    assert (cell.experiment.models.threads, cell.experiment.store.root) == (1, Path("runs/small"))
    assert cell.run.path == Path("runs/small/src-seed-001")
    assert (cell.steps, plan.steps) == (2 * (3 + 5), 4 * 16)


def test_a_grid_is_a_product_and_its_arms_are_named_after_their_values() -> None:
    plan = small(
        'name = "grid"\nseeds = [3, 9]\n[grid]\ngame.reward = ["src", "cgc"]\nverifier.steps = [10, 20]\n'
        '"models.verifier.source" = ["embedded:modchain-verifier-small"]\n'
    )
    assert [arm.name for arm in plan.arms] == [
        f"{reward}-steps-{steps}-modchain-verifier-small" for reward in ("src", "cgc") for steps in (10, 20)
    ]
    assert plan.arms[3].settings == {
        "game.reward": "cgc",
        "verifier.steps": 20,
        "models.verifier.source": "embedded:modchain-verifier-small",
    }
    assert plan.arms[3].experiment.verifier.steps == 20
    assert plan.seeds == (3, 9)


def test_arms_and_a_grid_are_crossed_and_the_later_word_counts() -> None:
    plan = small(f"{SMALL}\n[grid]\ngame.rounds = [1, 4]\n".replace('"cgc"\nthreads', '"cgc-rounds-1"\nthreads'))
    assert [arm.name for arm in plan.arms] == ["cgc-rounds-1", "cgc-rounds-4", "src-rounds-1", "src-rounds-4"]
    assert [arm.experiment.game.rounds for arm in plan.arms] == [1, 4, 1, 4]
    assert small(overrides=["game.rounds=7"]).arms[0].experiment.game.rounds == 7


def test_without_arms_there_is_one_and_an_arm_may_have_an_experiment_of_its_own() -> None:
    assert [arm.name for arm in small('name = "one"').arms] == ["modchain"]
    Path("experiments").mkdir()
    Path("experiments/mine.toml").write_text('name = "mine"\ngame.rounds = 9\n')
    plan = small('name = "two"\n[[arm]]\nname = "a"\nexperiment = "mine"\n[[arm]]\nname = "b"\n')
    assert [(arm.source, arm.experiment.game.rounds) for arm in plan.arms] == [("mine", 9), ("modchain", 5)]


@pytest.mark.parametrize(
    ("stem", "name"), [("my game", "my-game"), ("_x+y", "x-y"), ("日本", "game"), ("a" * 200, "a" * 60)]
)
def test_an_arm_without_a_name_gets_one_that_a_run_may_have(stem: str, name: str) -> None:
    Path(f"{stem}.toml").write_text('name = "mine"')
    plan = small(f'name = "one"\nexperiment = "{stem}.toml"')
    assert [arm.name for arm in plan.arms] == [name]
    assert all(RUN_NAME.fullmatch(cell.name) for cell in plan.cells)


def test_two_arms_may_differ_by_their_workers_alone() -> None:
    text = SMALL + '[[arm]]\nname = "two"\nset = { game.reward = "cgc", cluster = %s }\n'
    plan = small(text % '{ kind = "local", workers = 2 }')
    assert plan.arms[0].experiment.hash() == plan.arms[2].experiment.hash()
    with pytest.raises(ConfigurationError, match=r"'cgc' and 'two' of .* are the same game"):
        small(text % '"auto"')


def test_options_take_the_files_place_and_threads_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pvg.study.plan.usable_cores", lambda: 8)
    text = SMALL.replace("threads = 1\n", "")
    assert small(text).threads == 0  # of the models' sizes
    assert {cell.experiment.models.threads for cell in small(text).cells} == {0}
    plan = small(text, processes=3, seeds=4)
    assert (plan.processes, plan.most_threads, plan.seeds) == (3, 2, (0, 1, 2, 3))
    assert small(text, processes=9).most_threads == 1
    assert small(text, processes=3, threads=5).threads == 5


def test_shipped_studies_are_valid_and_named_after_their_file() -> None:
    found = known_files("studies")
    assert {"quick", "published-shape", "robust"} <= found.keys()
    for name, path in found.items():
        plan = load_study(str(path))
        assert plan.name == name
        assert plan.about
        assert len(plan.arms) == 1 or plan.reference in [arm.name for arm in plan.arms]
        # Those for a GPU have the seeds of a small budget, and their plan says what these cannot show.
        assert len(plan.seeds) >= (2 if name == "quick" else 3 if plan.gpu else 5)


def test_a_study_in_the_folder_hides_the_shipped_one() -> None:
    Path("studies").mkdir()
    Path("studies/quick.toml").write_text('name = "quick"\n')
    assert find_study("quick") == Path("studies/quick.toml")
    with pytest.raises(UsageError, match=r"no study 'qick'. Did you mean 'quick'"):
        find_study("qick")


# --- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nmae = 1", "Unknown key 'nmae' (small.toml). The nearest valid key is 'name'"),
        ("evaluate = {prats = []}", "The nearest valid key is 'parts'"),
        ('evaluate = {rounds = "first"}', "ounds must be 'all', 'last' or a list of rounds, such as [0, 2]"),
        ("evaluate = {rounds = [5, 0]}", "names round 5, but the games of arm 'modchain' have the rounds 0 to 4"),
        ("seeds = 0", "A study needs 1 to 10,000 seeds"),
        ("seeds = [1, 1]", "Seeds has a seed twice"),
        ('measures = ["helpful_acuracy"]', "no measure 'helpful_acuracy'. Did you mean 'helpful_accuracy'?"),
        ("[common]\nseed = 3", "seed cannot be set here ([common] of small.toml): use the study's `seeds`"),
        ('[[arm]]\nname = "a"\nset = {models.threads = 2}', "models.threads cannot be set here (arm 'a' of small"),
        ("[grid]\ngame.rounds = 3", "[grid] game.rounds must be a list of values"),
        ("[common]\ntrainin.steps = 3", "Unknown key 'trainin' ([common] of small.toml)"),
        ('reference = "sr"\n[grid]\ngame.reward = ["src", "cgc"]', "is not an arm of small.toml. Did you mean 'src'?"),
        ('[[arm]]\nname = "a"\n[[arm]]\nname = "a"\nset = {game.rounds = 1}', "arms of small.toml have the name 'a'"),
        ('[[arm]]\nname = "a"\n[[arm]]\nname = "b"\nset = {game.rounds = 5}', "arms 'a' and 'b' of small.toml are"),
        ('[grid]\ngame.reward = ["s rc"]', "arm 's-rc' of small.toml"),
        ("seeds = 99999999999999999999", "beyond 64 bits"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_with_what_was_meant(text: str, message: str) -> None:
    head = "" if text.startswith("nmae") else 'name = "small"\n'
    with pytest.raises(ConfigurationError) as error:
        small(head + text)
    assert message in error.value.message
    assert "\n" not in error.value.message


def test_all_wrong_arms_are_told_at_once() -> None:
    text = SMALL.replace('game.reward = "cgc"', 'game.rewrad = "cgc"').replace('game.reward = "src"', "game.rounds = 0")
    with pytest.raises(ConfigurationError) as error:
        small(text)
    first, second = error.value.message.split(" | ")
    assert first.startswith("2 mistakes in small.toml: ")
    assert all(words in first for words in ("game.rewrad", "arm 'cgc' of small.toml"))
    assert all(words in second for words in ("game.rounds", "arm 'src' of small.toml"))


def test_a_measure_of_an_evaluation_needs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    monkeypatch.setitem(MEASURES, "attack", replace(MEASURES["kl"], name="attack", parts=("exploit",)))
    text = SMALL.replace('"seconds"', '"attack"')
    with pytest.raises(ConfigurationError, match=r"'attack' needs an evaluation"):
        small(text)
    with pytest.raises(ConfigurationError, match=r"needs the part 'exploit' of an evaluation, which arm 'cgc'"):
        small(text.replace("threads = 1", 'threads = 1\nevaluate = ["tax"]'))
    with pytest.raises(ConfigurationError, match=r"no part 'expliot' of an evaluation .* Did you mean 'exploit'"):
        small(text.replace("threads = 1", 'threads = 1\nevaluate = ["expliot"]'))
    parts = small(text.replace("threads = 1", 'threads = 1\nevaluate = ["exploit", "tax"]')).evaluate
    assert parts is not None
    assert parts.parts == ("exploit", "tax")


@pytest.mark.parametrize(
    ("evaluate", "measure", "message"),
    [
        ("{set = {evaluate.atack_steps = 9}}", "", "'evaluate.atack_steps' ([evaluate] set of small.toml)"),
        ("{set = {training.steps = 9}}", "", "training.steps cannot be set here ([evaluate] set of small.toml)"),
        ("{set = {evaluate.attack_steps = 9}}", "", "attack_window = 10 batches do not fit"),
        ('["detection"]', "attack_fooled_rate_src", "needs the part 'exploit' of an evaluation"),
        ('{set = {evaluate.attacks = ["goodhart"]}}', "steps_to_exploit_cgc", "an attack of the kind 'cgc'"),
        ('{set = {evaluate.attacks = ["cgc"]}}', "attack_fooled_rate_src", "an attack of the kind 'src'"),
        ("{set = {evaluate.samples = 3}}", "best_of_n_natural", "evaluate.samples = 4 or more"),
    ],
)
def test_an_evaluation_that_cannot_be_or_leaves_a_measure_empty_is_refused(
    evaluate: str, measure: str, message: str
) -> None:
    text = SMALL.replace("threads = 1", f"threads = 1\nevaluate = {evaluate}")
    with pytest.raises(ConfigurationError) as error:
        small(text.replace('"seconds"', f'"{measure}"') if measure else text)
    assert message in error.value.message


def test_an_arm_that_cannot_be_evaluated_is_named() -> None:
    text = SMALL.replace("threads = 1", 'threads = 1\nevaluate = ["exploit", "tax"]').replace(
        'game.reward = "src"', 'game.reward = "cgc", game.protocol = "decoupled"'
    )
    with pytest.raises(ConfigurationError, match=r"Arm 'src' of small\.toml: There is no legibility tax .*decoupled"):
        small(text)


def test_another_task_in_an_arm_says_what_it_drops_and_keeps_the_arms_own_instructions() -> None:
    Path("words.toml").write_text(
        find_experiment("smollm2-gsm8k").read_text().replace('prompts = "chat"', "").replace("hf:openai/", "./")
        + '[prompts]\nkind = "chat"\nhelpful = "FILE"\nsneaky = "FILE"\n'
    )
    models = "".join(f"models.{player}.source = 'hf:o/n@{'0' * 40}'\n" for player in ("prover", "verifier"))
    arms = "".join(
        f"[[arm]]\nname = '{name}'\n"
        f"set = {{ prompts.sneaky = 'MINE', task.kind = '{kind}', training.steps = {steps} }}\n"
        for name, kind, steps in (("same", "gsm8k", 5), ("other", "code", 5), ("third", "code", 6))
    )
    Path("words-study.toml").write_text(f"name = 'words'\nexperiment = 'words.toml'\n[common]\n{models}{arms}")
    plan = load_study("words-study.toml")
    texts = [(arm.experiment.prompts.helpful, arm.experiment.prompts.sneaky) for arm in plan.arms]  # type: ignore[union-attr]
    assert texts == [("FILE", "MINE"), (None, "MINE"), (None, "MINE")]
    (note,) = plan.notes
    assert note.startswith("Arms other, third: task.kind = 'code' replaces 'gsm8k', so these settings of the file are")
    assert note.endswith("dropped: prompts.helpful, prompts.sneaky, task.max_steps, task.path.")
