"""The challenge protocol: which step is asked about, in what words, and a game of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_games import changed, played, recorded, rows

from pvg.config.game import ChallengeProtocol
from pvg.config.load import load_experiment
from pvg.config.rollout import TagPrompts
from pvg.config.task import DiplomacyMiniTask, ModchainTask
from pvg.config.training import ModelSection
from pvg.errors import ConfigurationError
from pvg.game.protocols import MOST_CONSIDERED, ProtocolParts, challenge, example_episode, steps_of, tokens_of, weakest
from pvg.games.game import Action
from pvg.models import open_model, pick_device
from pvg.models.embedded_training import diplomacy_tokenizer
from pvg.models.tokenizer import Tokenizer
from pvg.records import Float32, Problem, Role, Rollout, Scorable
from pvg.rollout.interaction import Ask, Interaction, Talk
from pvg.store.run_directory import RunDirectory
from pvg.tasks.diplomacy_mini import DiplomacyMini, plan_problem
from pvg.tasks.modchain import Modchain
from pvg.telemetry.catalogue import metric as catalogued

TALKING = {
    "game.protocol": "challenge",
    "models.prover": {"source": "embedded:modchain-dialogue"},
    "task.min_terms": 5,
    "task.max_terms": 5,
    "rollout.max_tokens": 40,
    "verifier.steps": 3,
    "game.test.problems": 4,
    "training.steps": 3,
}
MODCHAIN = Modchain(ModchainTask())
PROBLEM = Problem("p", "7+5+8?", "0")


class Lines:
    """A task that defines no steps."""

    problems = MODCHAIN.problems
    grade = MODCHAIN.grade


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    with open_model(ModelSection(source="embedded:modchain-dialogue"), pick_device("cpu")) as model:
        yield model.tokenizer


class Judge:
    """Scores a prefix by its length: the third step is the weakest."""

    version = "v"

    def __init__(self) -> None:
        self.seen: list[Scorable] = []

    async def score(self, rollouts: Sequence[Scorable]) -> Float32:
        self.seen += rollouts
        by_steps = [1.0, 3.0, 2.5, -4.0, -3.0]
        return np.array([by_steps[rollout.text.count(";")] for rollout in rollouts], dtype=np.float32)


def ask_about(tokenizer: Tokenizer, text: str, name: str = "r/0", problem: Problem = PROBLEM) -> Ask[Talk]:
    ids = np.append(tokenizer.encode(text), np.int32(tokenizer.eos_id))
    return Ask(name, problem, Talk(problem, (("prover", Action(text, text)),)), ids)


def challenge_of(
    task: Any, tokenizer: Tokenizer, scorer: Any = None, seed: int = 0, step: Any = "weakest"
) -> Interaction[Talk]:
    return challenge(ChallengeProtocol(step=step, tokens=9), ProtocolParts(task, tokenizer, TagPrompts(), scorer, seed))


def asked(interaction: Interaction[Talk], *asks: Ask[Talk]) -> list[str]:
    """The question to each."""
    return asyncio.run(cast(Any, interaction.deciders["verifier"])(asks))


def test_the_weakest_step_is_that_which_takes_most_of_the_score():
    assert weakest(np.array([0.0, 1.0, -2.0, -1.0, -3.5], dtype=np.float32)) == 1  # -3 against -2.5
    assert weakest(np.array([0.0, -1.0, -2.0], dtype=np.float32)) == 0  # the first of two


def test_it_is_found_by_scoring_the_solution_up_to_each_step(tokenizer: Tokenizer):
    judge = Judge()
    interaction = challenge_of(MODCHAIN, tokenizer, judge)
    text = "7+5=2;2+8=0;0+0=0;0+1=1;A1"
    assert asked(interaction, ask_about(tokenizer, text)) == ["3?"]
    ids, shown = interaction.turn("3?", False)
    assert (ids.tolist(), shown) == (tokenizer.encode("3?").tolist(), "3?")
    assert [prefix.text for prefix in judge.seen] == ["", text[:6], text[:12], text[:18], text[:24]]
    assert {prefix.question for prefix in judge.seen} == {PROBLEM.question}


def test_what_has_no_step_was_cut_off_or_was_asked_already_is_asked_nothing(tokenizer: Tokenizer):
    interaction, solution = challenge_of(MODCHAIN, tokenizer), "7+5=2;2+8=0;A0"
    rules = interaction.rules
    assert asked(interaction, ask_about(tokenizer, "A0"), ask_about(tokenizer, solution)) != ["", ""]
    assert asked(interaction, ask_about(tokenizer, "A0")) == [""]

    def seats(*said: tuple[str, Action]) -> Sequence[str]:
        return rules.seats(Talk(PROBLEM, said))

    wrote, asks = ("prover", Action(solution, solution)), ("verifier", Action("1?", "1?"))
    assert seats() == ("prover",)
    assert seats(wrote) == ("verifier",)
    assert seats(("prover", Action(solution, solution, cut=True))) == ()
    assert seats(wrote, ("verifier", Action("", ""))) == ()
    assert seats(wrote, asks) == ("prover",)
    assert seats(wrote, asks, ("prover", Action("2", "2"))) == ()


def test_a_random_question_depends_on_seed_and_episode_alone(tokenizer: Tokenizer):
    text = "7+5=2;2+8=0;0+3=3;3+6=9;A9"
    many = [ask_about(tokenizer, text, f"r/{i}") for i in range(400)]
    told = asked(challenge_of(MODCHAIN, tokenizer, seed=3), *many)
    counts = [told.count(f"{step}?") for step in (1, 2, 3, 4)]
    assert sum(counts) == 400
    assert min(counts) > 60  # 100 each, standard error 8.7
    assert asked(challenge_of(MODCHAIN, tokenizer, Judge(), seed=3, step="random"), *reversed(many)) == told[::-1]
    assert asked(challenge_of(MODCHAIN, tokenizer, seed=4), *many) != told


def test_steps_are_the_tasks_or_lines_or_what_semicolons_divide():
    text = "7+5=2;2+8=0;A0"
    assert [text[slice(*place)] for place in steps_of(MODCHAIN, text)] == ["7+5=2;", "2+8=0;"]
    assert steps_of(MODCHAIN, "nothing") == []
    assert [text[slice(*place)] for place in steps_of(Lines(), text)] == ["7+5=2;", "2+8=0;", "A0"]
    lines = "First; then.\n\nSecond.\n"
    assert [lines[slice(*place)] for place in steps_of(Lines(), lines)] == ["First; then.", "Second."]
    assert steps_of(Lines(), " ;\t;; ") == []


@given(st.text(max_size=60))
def test_steps_of_any_text_are_in_order_and_not_empty(text: str):
    for task in (Lines(), MODCHAIN):
        places = steps_of(task, text)
        assert all(start < end for start, end in places)
        assert all(before[1] <= after[0] for before, after in pairwise(places))


def test_tokens_of_a_prefix_are_the_least_that_say_it(tokenizer: Tokenizer):
    ids = tokenizer.encode("7+5=2;2+8=0;A0")
    assert [tokens_of(tokenizer, ids, count) for count in (0, 1, 6, 14, 99)] == [0, 1, 6, 14, 14]


# --- a task that answers ------------------------------------------------------------------------------------------

PLANS = DiplomacyMini(DiplomacyMiniTask())
PLAN_PROBLEM = plan_problem("ade/bg>d")
FLAWED = "ab;d.;e."  # only bd;g+bd refutes it


PLAN_TOKENIZER = Tokenizer(diplomacy_tokenizer())


def about_plan(text: str, name: str = "r/0") -> Ask[Talk]:
    return ask_about(PLAN_TOKENIZER, text, name, PLAN_PROBLEM)


class Curious:
    """Scores the longest question lowest."""

    version = "v"

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def score(self, rollouts: Sequence[Scorable]) -> Float32:
        self.seen += [rollout.text for rollout in rollouts]
        return np.array([-len(rollout.text) for rollout in rollouts], dtype=np.float32)


def test_a_task_answers_the_question_with_the_lowest_score_which_is_chosen_before_the_answer():
    judge = Curious()
    interaction = challenge_of(PLANS, PLAN_TOKENIZER, judge)
    texts = [FLAWED, "a.;d.;e+d", "a.", f"{FLAWED}!bd;g+bd"]
    found = asked(interaction, *(about_plan(text, f"r/{number}") for number, text in enumerate(texts)))
    assert len(judge.seen) == 3 * MOST_CONSIDERED
    assert found[2] == ""
    for text, question, first in zip(texts, found, (0, MOST_CONSIDERED, 0, 2 * MOST_CONSIDERED), strict=True):
        if question:
            longest = max(judge.seen[first : first + MOST_CONSIDERED], key=len)
            assert question == longest.removeprefix(text)
            assert question in PLANS.questions(PLAN_PROBLEM, text)
            over = Talk(PLAN_PROBLEM, (("prover", Action(text, text)), ("verifier", Action(question, question))))
            assert interaction.rules.seats(over) == ()
            told = interaction.rules.prompt(over, "prover", Role.HELPFUL)
            assert told == question + PLANS.answer(PLAN_PROBLEM, text, question)


def test_without_a_verifier_a_seed_draws_the_question():
    interactions = [challenge_of(PLANS, PLAN_TOKENIZER, seed=seed) for seed in (3, 4)]
    many = [about_plan(FLAWED, f"r/{number}") for number in range(60)]
    told = [asked(interaction, *many) for interaction in interactions]
    assert told[0] != told[1]
    assert asked(interactions[0], *many) == told[0]
    assert len(set(told[0])) > 10


@pytest.mark.slow
def test_a_plan_game_in_which_the_task_answers(tmp_path: Path):
    small = ["game.rounds=1", "training.steps=2", "training.groups=4", "rollout.group_size=4", "verifier.steps=3"]
    small += ["game.mint_problems=16", "game.test.problems=8", "game.protocol=challenge", "verifier.pairs=8"]
    kept = recorded(played(load_experiment(Path("experiments/diplomacy-mini.toml"), small), tmp_path)[1])
    talked = [rollout for rollout in kept if rollout.turns]
    assert len(talked) > len(kept) / 2
    for rollout in talked:
        solution, told = rollout.turns
        assert (solution.sampled, told.sampled) == (True, False)
        assert rollout.text == solution.text + told.text
        assert not rollout.sampled_mask[told.start :].any()
        question, _, answer = told.text.partition("=")
        problem = plan_problem(rollout.question.rstrip("?"))
        assert PLANS.answer(problem, solution.text, question) == f"={answer}"
        assert rollout.grade == PLANS.grade(problem, solution.text)


def test_a_preview_asks_what_a_game_asks(tokenizer: Tokenizer):
    solution = "7+5=2;"  # one step, so a game can ask about nothing else
    interaction = challenge_of(MODCHAIN, tokenizer)
    turns = example_episode(interaction, tokenizer, PROBLEM, solution)["prover"].turns
    assert asked(interaction, ask_about(tokenizer, solution)) == ["1?"]
    assert [(turn.text, turn.sampled) for turn in turns] == [(solution, True), ("1?", False), (solution, True)]
    assert turns[1].token_ids.tolist() == tokenizer.encode("1?").tolist()
    assert len(example_episode(interaction, tokenizer, PROBLEM, "")["prover"].turns) == 1


# --- a game -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return played(changed(TALKING), tmp_path_factory.mktemp("challenge"))[1]


@pytest.mark.slow
def test_every_phase_plays_dialogues_and_the_verifier_reads_them_whole(run: RunDirectory):
    kept = recorded(run)
    assert {rollout.id.split("/")[1] for rollout in kept} == {"mint", "train_prover", "evaluation"}
    talks = [rollout for rollout in kept if rollout.turns]
    assert len(talks) > 0.9 * len(kept)
    for rollout in talks:
        assert [turn.sampled for turn in rollout.turns] == [True, False, True]
        assert rollout.turns[1].text in ("1?", "2?", "3?", "4?", "5?")
        assert MODCHAIN.grade(problem_of(rollout), rollout.turns[0].text) == rollout.grade
        assert not rollout.logprobs[~rollout.sampled_mask].any()
        assert rollout.text == "".join(turn.text for turn in rollout.turns)
    # The mint has no verifier yet: it asks at random. All steps come up.
    minted = {rollout.turns[1].text for rollout in talks if "/mint/" in rollout.id}
    assert minted >= {"1?", "2?", "3?", "4?"}


def problem_of(rollout: Rollout) -> Problem:
    terms = tuple(int(term) for term in rollout.question.rstrip("?").split("+"))
    return Problem(rollout.problem_id, rollout.question, rollout.reference, {"terms": terms, "modulus": 10})


def test_its_metrics_count_what_was_sampled_and_are_in_the_catalogue(run: RunDirectory):
    steps = [row for row in rows(run, "step") if row["phase"] == "train_prover"]
    trained = [rollout for rollout in recorded(run) if "/train_prover/" in rollout.id and rollout.step == 0]
    told = steps[0]["metrics"]
    assert told["completion_tokens"] == pytest.approx(np.mean([r.sampled_mask.sum() for r in trained]))
    assert 0.9 < told["challenged"] <= 1.0
    assert 1.0 <= told["answer_tokens"] <= 16.0
    names = [f"{row['phase']}/{name}" for row in rows(run, "step") for name in row["metrics"]]
    assert [name for name in names if not catalogued(name)] == []
    # The policy's log-probs are those that were sampled, whatever stands between them.
    assert told["ratio_max"] == pytest.approx(1.0, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["rollout.deadline", "rollout.prefetch"])
def test_deadlines_and_sampling_ahead_play_dialogues_too(tmp_path: Path, setting: str):
    settings = {setting: "cut" if "deadline" in setting else "fresh"}
    few = {"training.steps": 2, "game.mint_problems": 12, "verifier.steps": 1, "game.test.problems": 1}
    outcome, run = played(changed(TALKING | settings | few), tmp_path)
    assert outcome.status == "complete"
    assert any(rollout.turns for rollout in recorded(run) if "/train_prover/" in rollout.id)


def test_a_verifier_that_has_never_seen_an_answer_gets_a_warning_which_the_event_log_keeps(run: RunDirectory):
    (warning,) = [line for line in changed(TALKING).warnings() if "embedded:modchain-dialogue" in line]
    kept = [line for line in run.events.read_text().splitlines() if line.endswith(f'event=warning text="{warning}"')]
    assert len(kept) == 1
    talking = changed({**TALKING, "models.verifier": {"source": "embedded:modchain-dialogue"}})
    assert not any("models.verifier.source" in line for line in talking.warnings())


def test_what_counts_completions_of_one_turn_is_refused():
    for settings in ({"rollout.deadline": "continue"}, {"training.router_replay": True}):
        with pytest.raises(ConfigurationError, match="challenge"):
            changed(TALKING | settings)
    assert changed(TALKING).completion_room() == 40 + 16 + 16
    assert changed({}).completion_room() == 20
    with pytest.raises(ConfigurationError, match=r"game\.protocol\.tokens belongs to kinds .*, not to 'direct'"):
        changed({"game.protocol.tokens": 3})
