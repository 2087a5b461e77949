"""`play_games`: forks, early ends, opponents, and games in step and on their own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from pvg.config.task import ModchainTask
from pvg.config.training import ModelSection
from pvg.games.negotiation import Bargain, Negotiation
from pvg.models import open_model, pick_device
from pvg.records import Int32
from pvg.rollout.dispatcher import Dispatcher
from pvg.rollout.engine import Sampling
from pvg.rollout.interaction import Decider, Fork, PlayedGame, SampleCall, game_start, play_games
from pvg.rollout.torch_engine import TorchEngine
from pvg.tasks.modchain import Modchain

pytestmark = pytest.mark.slow

GAME = Negotiation()
STARTS = [game_start(GAME, GAME.opening("train", number)) for number in range(6)]
WHOLE = Fork()
CALL = SampleCall(0, "base", 3, 17, "play")


def played(
    forks: Fork | Sequence[Fork] = WHOLE,
    *,
    opponents: Sequence[Mapping[str, Decider]] | None = None,
    concurrency: int = 64,
) -> list[list[PlayedGame[Bargain]]]:
    async def play() -> list[list[PlayedGame[Bargain]]]:
        with ThreadPoolExecutor(1) as executor:
            model = open_model(ModelSection(), pick_device("cpu"))
            tokenizer = model.tokenizer
            engine = TorchEngine(model, max_rows=32, max_in_flight=64, executor=executor)
            sampling = Sampling(6, (tokenizer.eos_id,))
            dispatcher = Dispatcher(engine, Modchain(ModchainTask()), tokenizer, sampling, concurrency)

            def encode(prompt: str) -> Int32:
                return tokenizer.encode("H" + prompt)

            try:
                return await play_games(dispatcher, STARTS, GAME, CALL, encode=encode, forks=forks, opponents=opponents)
            finally:
                await engine.close()

    return asyncio.run(play())


def summary(groups: list[list[PlayedGame[Bargain]]]) -> list[list[tuple[object, ...]]]:
    return [
        [
            (
                game.states,
                game.ended,
                [(d.seat, d.number, d.rollout and (d.rollout.id, d.rollout.text)) for d in game.decisions],
            )
            for game in group
        ]
        for group in groups
    ]


def test_states_follow_from_the_decisions_and_rollouts_are_complete() -> None:
    for group in played():
        (game,) = group
        assert game.states[0] == game.start.state
        assert game.ended == "over"
        assert GAME.seats(game.states[-1]) == ()
        for decision in game.decisions:
            rollout = decision.rollout
            assert rollout is not None
            assert decision.state == game.states[decision.number]
            assert rollout.question == GAME.prompt(decision.state, decision.seat, rollout.role)
            assert decision.action == GAME.parse(decision.state, decision.seat, rollout.text)
            assert rollout.grade.correct == decision.action.legal
            assert rollout.problem_id == game.start.problem.id
            assert len(rollout.logprobs) == len(rollout.completion_ids) > 0
            assert GAME.step(decision.state, {decision.seat: decision.action}, 0) == game.states[decision.number + 1]


def test_a_fork_shares_its_warmup_and_differs_after_it() -> None:
    groups = played(Fork(warmup=1, samples=4))
    ids = [d.rollout.id for group in groups for d in group[0].decisions if d.rollout]
    assert len(set(ids)) == len(ids)
    for group in groups:
        assert {game.states[:2] for game in group} == {group[0].states[:2]}
        assert [game.sample for game in group] == [0, 1, 2, 3]
        assert all(game.fork == 1 for game in group)
        first = [game.decisions[1].rollout for game in group]
        assert len({rollout.prompt_ids.tobytes() for rollout in first if rollout}) == 1
    assert any(len({game.states[2] for game in group}) > 1 for group in groups)


def test_a_fork_waits_for_the_decision_of_its_seat() -> None:
    """The seats of the negotiation decide in turn, and the start says who begins."""
    for seat in ("buyer", "seller"):
        other = {"buyer": "seller", "seller": "buyer"}[seat]
        for warmup in (0, 1, 9):
            groups = played(Fork(warmup=warmup, samples=2, seat=seat), opponents=[{other: "random"}] * len(STARTS))
            for game in (game for group in groups for game in group):
                assert GAME.seats(game.states[game.fork]) == (seat,)
                assert [d.seat for d in game.decisions if d.number == game.fork] == [seat]
                assert game.fork <= min(warmup + 1, 3)
    early = played(Fork(seat="buyer", horizon=1))
    assert {len(game.states) - game.fork for group in early for game in group} == {2}
    assert {group[0].fork for group in early} == {0, 1}


def test_a_horizon_ends_a_continuation_early() -> None:
    assert {len(game.states) for group in played(Fork(warmup=1, horizon=1)) for game in group} == {3}


def test_games_in_step_repeat_and_equal_games_on_their_own() -> None:
    """The engine's rows do not depend on their batch, so the order of requests changes nothing here."""
    forks = Fork(warmup=1, samples=3)
    whole = summary(played(forks))
    assert whole == summary(played(forks))
    assert whole == summary(played(forks, concurrency=5))


def test_scripts_play_the_seats_that_they_are_given() -> None:
    groups = played(opponents=[{"buyer": "greedy"}] * len(STARTS))
    for group in groups:
        for decision in group[0].decisions:
            assert (decision.rollout is None) == (decision.seat == "buyer")
            if decision.seat == "buyer":
                assert decision.action.text == GAME.scripted("greedy", decision.state, "buyer", 0)
