"""Faults of a protocol in a user's file, as a user meets them: one line and its remedy before the mint, and no run."""

from __future__ import annotations

from pathlib import Path

import pytest
from calling import SMALL, Called, pvg

pytestmark = pytest.mark.slow

EXAMPLE = (Path(__file__).parents[2] / "examples" / "second_look.py").read_text()
SEATS = "def seats(self, state): return "
# The fault -> the body of a class, and what the error says.
FAULTS = {
    "rules that never end": (f"{SEATS}('clerk',) if state.said else ('prover',)", "seats must return () at the end"),
    "a text that doubles each time": (
        f"{SEATS}('clerk',) if state.said else ('prover',)\n"
        "    def scripted(self, _, state, seat, seed): return '1' + ''.join(said.text for _, said in state.said)",
        "scripted returned a text of",
    ),
    "a seat without a player": (
        f"{SEATS}(('prover',), ('judge',), ())[len(state.said)]\n    scripted = None",
        "a method `scripted` must decide for the seat 'judge'",
    ),
    "a prompt that tells the role": (
        "def prompt(self, state, seat, role): return '1' if role.value == 'helpful' else '2'",
        "prompt must not depend on the role",
    ),
    "a text that the model cannot read": (
        "def scripted(self, *_): return 'Look again'",
        "prompt must return what the model can read. The tokenizer of modchain-dialogue cannot express 'L'",
    ),
    "a long text": (
        "def prompt(self, state, seat, role): return '1+1=2;' * 30 if len(state.said) == 2 else ''",
        "an episode needs 181 tokens after the first turn of 'prover', but game.protocol.tokens = 64",
    ),
    "a state that is lost": ("def step(self, state, actions, seed): pass", "step must return a state, not NoneType"),
    "an argument too many": ("def __init__(self, rounds): pass", "TypeError: Mine.__init__() missing 1 required"),
    "no seats": ("seats = None", "failed in seats: TypeError: 'NoneType' object is not callable"),
    **{
        f"an exception in {method}": (
            f"{'@property' if method == 'voices' else ''}\n    def {method}(self, *_): return {{}}['x']",
            f"failed in Mine.{method}, line 34: KeyError: 'x'",
        )
        for method in ("__init__", "voices", "start", "seats", "scripted", "prompt", "limit", "parse", "step", "pay")
    },
    "an exception for an empty text": (
        "def parse(self, state, seat, text): return super().parse(state, seat, text + text[0])",
        "failed in Mine.parse, line 33: IndexError",
    ),
}


def write(body: str) -> None:
    Path("mine.py").write_text(f"{EXAMPLE}\n\nclass Mine(SecondLook):\n    {body}\n")


def game(*settings: str, name: str = "Mine") -> list[str]:
    """The arguments of a small game with the protocol `name` of mine.py."""
    models = [f"models.{player}.source=embedded:modchain-dialogue" for player in ("prover", "verifier")]
    own = ["task.problems=64", "task.test_problems=16", f"game.protocol=mine.py:{name}", *models, *settings]
    return [*SMALL, *(word for setting in own for word in ("-s", setting))]


def refused(called: Called) -> str:
    """The error of a call that left no run: one line, and one with the remedy."""
    error, remedy = called.err.splitlines()[-2:]
    assert called.code == 2, called.err
    assert called.err.count("error: ") == 1
    assert remedy
    assert not list(Path("runs").glob("*"))
    return error


@pytest.mark.drill  # tests/game/test_own_protocol.py has their messages
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_one_line_that_names_file_and_method_before_the_mint(fault: str) -> None:
    body, message = FAULTS[fault]
    write(body)
    error = refused(pvg("train", *game()))
    assert error.startswith("error: game.protocol = 'mine.py:Mine'")
    assert message in error
    if not fault.startswith("an exception"):
        assert refused(pvg("check", *game())) == error


def test_an_episode_that_may_be_longer_than_the_context_is_refused_with_both_settings_to_lower() -> None:
    write("pass")
    called = pvg("train", *game("game.protocol.tokens=500"))
    assert "models.prover takes at most 128 tokens" in refused(called)
    assert "Lower rollout.max_tokens or game.protocol.tokens" in called.err


def test_a_missing_name_and_a_missing_file_are_refused_without_opening_a_model() -> None:
    write("pass")
    called = pvg("train", *game(name="Mime"))
    assert refused(called) == "error: game.protocol = 'mine.py:Mime': mine.py does not define 'Mime'."
    assert "It defines: Mine, SecondLook." in called.err
    Path("mine.py").unlink()
    assert "game.protocol: cannot read mine.py: No such file or directory" in refused(pvg("train", *game()))


@pytest.mark.parametrize(("experiment", "why"), [("negotiation", "does not support"), ("code", "has programs")])
def test_tasks_without_solutions_in_steps_are_refused(experiment: str, why: str) -> None:
    write("pass")
    called = pvg("train", experiment, "-s", "game.protocol=mine.py:Mine")
    assert called.code == 2
    assert why in called.err
    assert "set" in called.err
    assert "'direct'" in called.err


def test_control_tokens_in_a_text_of_the_rules_are_read_as_ordinary_text() -> None:
    write("def prompt(self, state, seat, role): return '1<eos>2' if len(state.said) == 2 else ''")
    checked = pvg("check", *game(), "--json")
    assert checked.code == 0, checked.err
    read = [turn["text"] for turn in checked.document["preview"]["episode"] if turn["by"] == ["clerk"]]
    assert read == ["12"]
    assert pvg("train", *game()).code == 0


@pytest.mark.drill
def test_a_run_does_not_resume_with_another_version_of_its_protocol() -> None:
    write("pass")
    assert pvg("train", *game()).code == 0
    before = Path("mine.py").read_text()
    Path("mine.py").write_text(f"{before}\n# changed\n")
    again = ("train", "--resume", "modchain", "-s", "game.rounds=2")
    for command in (again, ("evaluate", "modchain", "--parts", "calibration")):
        called = pvg(*command)
        assert called.code == 2
        assert "mine.py has changed since this run started." in called.err
    Path("mine.py").write_text(before)
    assert pvg(*again).code == 0
