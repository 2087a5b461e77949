"""Episodes of games and tasks as plain requests and replies: rewards, seats, forks, and requests that make no sense."""

from __future__ import annotations

import base64
import sys
from pathlib import Path
from typing import Any

import pytest
from environment_servers import Sums

sys.path.insert(0, str(Path(__file__).parent.parent / "games"))
from tiny_games import EvenOdd, Guessing

from pvg.games.negotiation import Negotiation
from pvg.games.replay import ReplayedGame
from pvg.servers.environments import BadRequestError, GameEnvironment, TaskEnvironment


def even_odd() -> Any:
    return GameEnvironment("even-odd", EvenOdd()).episode()


def seen(reply: dict[str, Any]) -> tuple[str, float | None, bool]:
    return reply["observation"]["seat"], reply["reward"], reply["done"]


def test_seats_that_decide_together_are_asked_one_after_the_other() -> None:
    episode = even_odd()
    first = episode.reset({"seed": 4})
    assert seen(first) == ("even", None, False)
    assert first["observation"]["prompt"] == "even, round 0, +0: a number?"
    half = episode.step({"message": "1"})
    assert seen(half) == ("odd", 0.0, False)
    assert half["observation"]["prompt"] == "odd, round 0, +0: a number?", "it shows what the other seat decided"
    assert episode.state()["decided"] == ["even"]
    whole = episode.step({"message": "2", "metadata": {"who": "a typed client"}})
    assert seen(whole) == ("even", 1.0, False), "the sum is odd, and odd decided last"
    assert whole["observation"]["rewards"] == {"even": -1.0, "odd": 1.0}
    for _ in range(4):
        end = episode.step({"message": "no number"})
    assert seen(end) == ("", -1.0, True)
    assert end["observation"]["values"] == {"even": 1.0, "odd": -1.0}
    assert end["observation"]["note"] == "no number: 0"
    assert episode.state()["step_count"] == 6
    with pytest.raises(BadRequestError, match="The episode is over"):
        episode.step({"message": "1"})


def test_a_client_with_one_seat_plays_against_a_script() -> None:
    episode = even_odd()
    assert seen(episode.reset({"seed": 1, "seat": "odd", "opponents": "greedy"})) == ("odd", None, False)
    replies = [episode.step({"message": text}) for text in ("2", "3", "4")]  # the script "greedy" says 1
    assert [seen(reply) for reply in replies] == [("odd", 1.0, False), ("odd", -1.0, False), ("", 1.0, True)]
    assert replies[-1]["observation"]["values"] == {"even": -1.0, "odd": 1.0}


def test_a_fork_goes_on_from_the_state_and_leaves_the_first_game_alone() -> None:
    episode = even_odd()
    episode.reset({"seed": 3})
    episode.step({"message": "1"})
    episode.step({"message": "1"})
    state = episode.state()
    assert (state["game"], state["start"], state["seed"]) == ("even-odd", "even-odd-train-3", 3)
    fork = even_odd()
    reply = fork.reset({"state": state["state"], "seed": 9})
    assert reply["observation"]["prompt"] == "even, round 1, +1: a number?"
    assert fork.state()["state"] == state["state"]
    assert fork.state()["start"] == ""
    for each in (episode, fork):
        each.step({"message": "1"})
        each.step({"message": "1"})
    assert episode.state()["state"] != fork.state()["state"], "another seed, another chance"
    again = even_odd()
    again.reset({"state": state["state"], "seed": 9})
    again.step({"message": "1"})
    again.step({"message": "1"})
    assert again.state()["state"] == fork.state()["state"]


def test_the_seed_chooses_the_start_and_a_missing_one_is_drawn() -> None:
    environment = GameEnvironment("negotiation", Negotiation())
    episodes = [environment.episode() for _ in range(3)]
    prompts = [episode.reset({"seed": 5})["observation"]["prompt"] for episode in episodes]
    assert len(set(prompts)) == 1
    starts = set()
    for episode in episodes:
        episode.reset({"episode_id": "mine", "split": "test"})
        state = episode.state()
        assert state["episode_id"] == "mine"
        assert state["start"] == f"negotiation-test-{state['seed']}"
        starts.add(state["start"])
    assert len(starts) == 3


def test_a_task_takes_one_step_and_does_not_tell_its_answer() -> None:
    episode = TaskEnvironment("sums", Sums()).episode()
    reply = episode.reset({"seed": 41})
    assert reply == {"observation": {"prompt": "1+1?", "problem": "sum-1"}, "reward": None, "done": False}
    assert "2" not in repr(episode.state()["problem"])
    right = episode.step({"message": "2"})
    assert (right["reward"], right["done"]) == (1.0, True)
    with pytest.raises(BadRequestError, match="no open episode"):
        episode.step({"message": "2"})
    assert episode.reset({"seed": 2, "split": "test"})["observation"]["prompt"] == "1002+1?"
    wrong = episode.step({"message": "x"})
    assert wrong["reward"] == 0.0
    assert wrong["observation"]["note"] == "wrong sum"
    assert wrong["observation"]["well_formed"] is False


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"sed": 1}, "no parameter 'sed'"),
        ({"seed": "1"}, "seed must be a number"),
        ({"seed": True}, "seed must be a number"),
        ({"seed": -1}, "seed must be a number"),
        ({"seed": 2**63}, "seed must be a number"),
        ({"split": "dev"}, "split must be one of train, test"),
        ({"split": ["train"]}, "split must be one of train, test"),
        ({"episode_id": "x" * 256}, "episode_id must be"),
        ({"episode_id": 7}, "episode_id must be"),
        ({"state": 7}, "state must be the text"),
        ({"state": "%%%"}, "state is not base64"),
        ({"state": "ü"}, "state is not base64"),
        ({"state": base64.b64encode(b"[1]").decode()}, "no state of even-odd"),
        ({"seat": "north"}, "no seat 'north'. Its seats: even, odd"),
        ({"seat": ["even"]}, "no seat"),
        ({"seat": "odd", "opponents": "best"}, "opponents must be one of random, greedy"),
        ({"seat": "odd", "opponents": {}}, "opponents must be one of"),
        ({"opponents": "greedy"}, "opponents needs seat"),
    ],
)
def test_a_reset_that_makes_no_sense_leaves_the_episode_as_it_was(data: dict[str, Any], message: str) -> None:
    episode = even_odd()
    episode.reset({"seed": 1})
    episode.step({"message": "1"})
    before = episode.state()
    with pytest.raises(BadRequestError, match=message):
        episode.reset(data)
    assert episode.state() == before


@pytest.mark.parametrize(
    "action", [{}, {"message": 4}, {"message": None}, {"text": "4"}, {"message": "4", "seat": "odd"}]
)
def test_an_action_that_is_no_message_is_refused(action: dict[str, Any]) -> None:
    for episode in (even_odd(), TaskEnvironment("sums", Sums()).episode()):
        episode.reset({})
        with pytest.raises(BadRequestError, match="An action "):
            episode.step(action)


def test_requests_before_the_first_reset() -> None:
    for episode in (even_odd(), TaskEnvironment("sums", Sums()).episode()):
        with pytest.raises(BadRequestError, match="Send reset first") as error:
            episode.step({"message": "1"})
        assert error.value.code == "EXECUTION_ERROR"
        with pytest.raises(BadRequestError, match="Send reset first"):
            episode.state()


def test_a_game_without_scripts_needs_a_player_for_each_seat() -> None:
    alone = GameEnvironment("guessing", ReplayedGame("guessing", Guessing)).episode()
    assert seen(alone.reset({"seat": "player"})) == ("player", None, False)

    class Plain:
        def __getattr__(self, name: str) -> Any:
            if name == "scripted":
                raise AttributeError(name)
            return getattr(EvenOdd(), name)

    episode = GameEnvironment("plain", Plain()).episode()  # type: ignore[arg-type]
    with pytest.raises(BadRequestError, match="no scripts"):
        episode.reset({"seat": "odd"})
