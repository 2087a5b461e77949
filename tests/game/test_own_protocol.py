"""A protocol in a user's file: a game of it, and what its rules may get wrong before anything is sampled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from small_games import changed, played, recorded
from test_challenge import MODCHAIN, PROBLEM, TALKING

from pvg.config.game import OwnProtocol
from pvg.config.rollout import TagPrompts
from pvg.errors import ConfigurationError
from pvg.game.protocols import ProtocolParts, check_rules, example_episode, interaction_for
from pvg.games.game import Action, Outcome
from pvg.models.embedded_training import modchain_tokenizer
from pvg.models.tokenizer import Tokenizer
from pvg.records import Grade, Problem, Role
from pvg.rollout.interaction import Talk
from pvg.store.run_directory import RunDirectory

EXAMPLE = Path(__file__).parents[2] / "examples" / "second_look.py"
SECOND_LOOK = f"{EXAMPLE}:SecondLook"
SOLUTION = "7+5=2;2+8=0;A0"
TOLD = replace(PROBLEM, metadata={"terms": [7, 5, 8], "modulus": 10})
OTHER = Problem("q", "1+2?", "3", {"terms": [1, 2], "modulus": 10})


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    def written(body: str) -> str:
        path = tmp_path / "mine.py"
        path.write_text(f"{EXAMPLE.read_text()}\n\nclass Mine(SecondLook):\n    {body}\n", encoding="utf-8")
        return f"{path}:Mine"

    return written


def episode(name: str, tokens: int = 64) -> list[tuple[str, bool]]:
    parts = ProtocolParts(MODCHAIN, tokenizer := Tokenizer(modchain_tokenizer()), TagPrompts(), None, 0)
    interaction = interaction_for(OwnProtocol(kind=name, tokens=tokens), parts)
    check_rules(interaction, parts, [TOLD, OTHER])
    lines = example_episode(interaction, tokenizer, PROBLEM, SOLUTION)
    return [(turn.text, turn.sampled) for turn in lines["prover"].turns]


def test_a_later_prompt_must_not_be_empty_in_a_state_that_the_example_did_not_reach(
    write: Callable[[str], str],
) -> None:
    name = write("def prompt(self, state, seat, role): return state.said[1][1].text if len(state.said) == 2 else ''")
    parts = ProtocolParts(MODCHAIN, Tokenizer(modchain_tokenizer()), TagPrompts(), None, 0)
    rules = interaction_for(OwnProtocol(kind=name), parts).rules
    said = (("prover", Action(SOLUTION, SOLUTION)), ("clerk", Action("", "")))
    with pytest.raises(ConfigurationError, match=r"mine\.py:Mine': prompt must return what the prover reads"):
        rules.prompt(Talk(PROBLEM, said), "prover", Role.HELPFUL)
    assert rules.prompt(Talk(PROBLEM, (*said, said[0])), "prover", Role.HELPFUL) == ""  # nothing follows the last turn


def test_an_episode_without_models_has_the_turns_of_the_rules() -> None:
    assert episode(SECOND_LOOK) == [(SOLUTION, True), (PROBLEM.question, False), (SOLUTION, True)]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def seats(self, state): return ('clerk',) if state.said else ('prover',)", "after 200 phases it does not"),
        ("def seats(self, state): return () if state.said else ('judge',)\n    scripted = None", "the seat 'judge'"),
        ("def seats(self, state): return ()", "seats must let 'prover' speak"),
        (
            "def seats(self, state): return () if state.said else ('prover', 'prover')",
            "seats must return each name once",
        ),
        ("def seats(self, state): return (['prover'],)", "seats must return a tuple of names, not (['prover'],)"),
        ("def prompt(self, state, seat, role): return chr(0xD800)", "prompt must return Unicode text"),
        ("def scripted(self, *_): return chr(0xDFFF)", "scripted must return Unicode text"),
        ("def limit(self, state, seat): return True", "limit must return a number of tokens from 1 on"),
        ("def prompt(self, state, seat, role): return role.value[:1]", "prompt must not depend on the role"),
        ("def prompt(self, state, seat, role): return ''", "prompt must return what the prover reads"),
        ("def prompt(self, state, seat, role): return None", "prompt must return str, not NoneType"),
        ("def limit(self, state, seat): return 0", "limit must return a number of tokens from 1 on"),
        ("def parse(self, state, seat, text): return text", "parse must return Action, not str"),
        ("voices = ['prover']", "voices must be a tuple of names"),
        ("voices = ('prover', 'prover')", "voices must be a tuple of names"),
        ("voices = ('prover', 'a/b')", "a voice needs a name of small letters"),
        ("voices = ('prover', 'b')", "a method `pay` must say what 'b' earns"),
        ("voices = ('prover', 'b')\n    def pay(self, state, outcome): return {}", "'b' is missing"),
        ("voices = ('prover', 'b')\n    def pay(self, state, outcome): return {'b': float('nan')}", "finite numbers"),
        ("def pay(self, state, outcome): return {'clerk': 1}", "finite numbers for voices, not 1 for 'clerk'"),
        ("def pay(self, state, outcome): return 1", "pay must return a mapping from names to numbers"),
        ("def measures(self, state, outcome): return {'a': 'b'}", "measures must return a mapping from names"),
        ("def measures(self, state, outcome): return {'fooled_rate': 0}", "the name of a metric of pvg, such as 'foo"),
        ("def measures(self, state, outcome): return 1 // 0", "failed in Mine.measures, line 33: ZeroDivisionError"),
        ("def measures(self, state, outcome): return {'a': 1 // outcome.grade.correct}", "failed in Mine.measures"),
        ("def step(self, state, actions, seed): return 1 // 0", "failed in Mine.step, line 33: ZeroDivisionError"),
        (
            "def start(self, problem): return 1 // (problem.id == 'p') and super().start(problem)",
            "failed in Mine.start",
        ),
        ("def limit(self): return 40", "failed in limit: TypeError"),
        ("def step(self, state, actions, seed): return None", "step must return a state, not NoneType"),
        (
            "def seats(self, state): return ('clerk',) if state.said else ('prover',)\n"
            "    def scripted(self, _, state, seat, seed): return '1' + ''.join(said.text for _, said in state.said)",
            "scripted returned a text of",
        ),
        (
            "def scripted(self, *_): self.number = getattr(self, 'number', 0) + 1; return str(self.number % 10)",
            "all methods must be pure",
        ),
        (
            "def pay(self, state, outcome): return {'prover': 1.0} if state.said[0][1].text else {}",
            "pay must always return the same names, not ['prover'] and []",
        ),
        (
            "def measures(self, state, outcome): return {outcome.role.value: 1.0}",
            "measures must always return the same names, not ['helpful'] and ['sneaky']",
        ),
        ("def parse(self, state, seat, text): return Direct.parse(self, state, seat, text + text[0])", "IndexError"),
        (
            "def prompt(self, state, seat, role): return 'Look again'",
            "prompt must return what the model can read. The tokenizer of tokenizer cannot express 'L'",
        ),
    ],
)
def test_wrong_rules_are_refused_before_the_mint(write: Callable[[str], str], body: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^game\.protocol = '.*mine\.py:Mine'") as refused:
        episode(write(body))
    assert message in refused.value.message


def test_rules_derive_from_those_of_pvg_and_get_the_task(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from pvg.game.voices import CriticRules\n\nclass Mine(CriticRules):\n"
        "    def pay(self, state, outcome): return {'critic': 2.0 * self.measures(state, outcome)['critic_accuracy']}\n"
    )
    parts = ProtocolParts(MODCHAIN, Tokenizer(modchain_tokenizer()), TagPrompts(), None, 0)
    rules = interaction_for(OwnProtocol(kind=f"{path}:Mine", tokens=8), parts).rules
    said = Talk(PROBLEM, (("prover", Action(SOLUTION, SOLUTION)), ("critic", Action("0", "0"))))
    assert rules.voices == ("prover", "critic")
    assert rules.prompt(Talk(PROBLEM, said.said[:1]), "critic", Role.HELPFUL) == f"?{PROBLEM.question}{SOLUTION}?"
    assert rules.pay(said, Outcome(Role.HELPFUL, Grade(True, True), 0.0)) == {"critic": 2.0}
    assert rules.measures(said, Outcome(Role.HELPFUL, Grade(True, True), 0.0))["critic_alarm"] == 0.0


@pytest.mark.parametrize("wrong", ["not text", "text == '9' * 50", "state.said and text != state.said[0][1].text"])
def test_rules_are_tried_with_texts_that_a_model_may_write(write: Callable[[str], str], wrong: str) -> None:
    name = write(
        f"def parse(self, state, seat, text):\n        if seat == 'prover' and ({wrong}): raise ValueError('odd')\n"
        "        return super().parse(state, seat, text)"
    )
    with pytest.raises(ConfigurationError, match=r"failed in Mine\.parse, line 34: ValueError: odd"):
        episode(name)


def test_rules_are_tried_with_solutions_that_reach_their_length_limit(write: Callable[[str], str]) -> None:
    name = write("def step(self, *all): return 1 // (not all[1]['prover'].cut) and super().step(*all)")
    with pytest.raises(ConfigurationError, match=r"failed in Mine\.step, line 33"):
        episode(name)


def test_control_tokens_in_a_text_of_the_rules_do_not_end_the_turn(write: Callable[[str], str]) -> None:
    name = write("def prompt(self, state, seat, role): return '1<eos>2' if len(state.said) == 2 else ''")
    tokenizer = Tokenizer(modchain_tokenizer())
    turn = interaction_for(OwnProtocol(kind=name), ProtocolParts(MODCHAIN, tokenizer, TagPrompts(), None, 0)).turn
    assert tokenizer.eos_id not in turn("1<eos>2", False)[0]


def test_an_episode_must_fit_into_its_tokens() -> None:
    assert len(episode(SECOND_LOOK, tokens=7)) == 3
    with pytest.raises(
        ConfigurationError, match=r"needs 7 tokens after the first turn of 'prover', but game.protocol.tokens = 6"
    ):
        episode(SECOND_LOOK, tokens=6)


def test_it_has_several_turns_and_room_for_them() -> None:
    own = {**TALKING, "game.protocol": {"kind": SECOND_LOOK, "tokens": 50}}
    assert changed(own).completion_room() == 40 + 50
    with pytest.raises(ConfigurationError, match="has several turns"):
        changed(own | {"rollout.deadline": "continue"})


@pytest.mark.slow
def test_a_game_is_played_with_it_and_keeps_its_tokens(tmp_path: Path) -> None:
    own = {**TALKING, "game.protocol": {"kind": SECOND_LOOK, "tokens": 20}, "training.steps": 2}
    outcome, run = played(changed(own), tmp_path)
    assert outcome.status == "complete"
    assert isinstance(run, RunDirectory)
    talks = [rollout for rollout in recorded(run) if rollout.turns]
    assert len(talks) > 0.8 * len(recorded(run))
    for rollout in talks:
        assert [turn.sampled for turn in rollout.turns] == [True, False, True]
        assert rollout.turns[1].text == rollout.question
        assert len(rollout.completion_ids) - rollout.solution_tokens <= 20
    assert {rollout.id.split("/")[1] for rollout in talks} == {"mint", "train_prover", "evaluation"}
