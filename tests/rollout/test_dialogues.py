"""Dialogues: what goes to the engine, what comes back, and what is whose."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import current_thread
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_dispatcher import EOS, ParityTask
from tiny_policies import TOKENIZER, orders, tiny_model, with_engine

from pvg.errors import ConfigurationError
from pvg.records import Grade, Group, Problem, Role, Rollout, Timing, VersionSpan
from pvg.rollout.dispatcher import Dispatcher, GroupOrder, SampleCall, request_seed
from pvg.rollout.engine import Completion, GenerationRequest, Sampling
from pvg.rollout.gathering import Deadline
from pvg.rollout.interaction import Ask, Direct, Interaction, Talk
from pvg.rollout.torch_engine import TorchEngine
from pvg.training.batch import batch_of


class Talking:
    """An engine whose completions say the request's seed in a few digits and then stop; its version grows."""

    max_in_flight = 1000

    def __init__(self, hang: frozenset[str] = frozenset()) -> None:
        self.seen: list[GenerationRequest] = []
        self.version = 0
        self._hang = hang

    async def generate(self, request: GenerationRequest) -> Completion:
        self.seen.append(request)
        await asyncio.sleep(3600 if request.id in self._hang else 0)
        digits = TOKENIZER.encode(str(request.seed % 10 ** (1 + request.seed % 4)))
        ids = np.append(digits, np.int32(EOS))[: request.sampling.max_tokens]
        self.version += 1
        logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32)
        spans = (VersionSpan(0, self.version),)
        reason: Any = "stop" if ids[-1] == EOS else "length"
        return Completion(request.id, ids, logprobs, spans, reason, Timing(1.0, 2.0))

    async def with_reference(self, request: GenerationRequest, found: Completion) -> Completion:
        return replace(found, reference_logprobs=2 * found.logprobs)


class Script(Direct):
    """Someone says `lines[k]` after turn k, and to an interaction of `silent` nothing."""

    def __init__(self, lines: Sequence[str], silent: frozenset[str] = frozenset()) -> None:
        self.lines, self.silent = lines, silent
        self.calls: list[list[Ask[Talk]]] = []

    def seats(self, state: Talk) -> Sequence[str]:
        if len(state.said) % 2:
            return ("other",) if len(state.said) < 2 * len(self.lines) else ()
        return ("prover",) if not state.said or state.said[-1][1].text else ()

    def prompt(self, state: Talk, seat: str, role: Role) -> str:
        return "" if len(state.said) % 2 else state.said[-1][1].text

    def limit(self, state: Talk, seat: str) -> int | None:
        return 5 if state.said else None

    async def say(self, asks: Sequence[Ask[Talk]]) -> list[str]:
        self.calls.append(list(asks))
        return ["" if ask.id in self.silent else self.lines[len(ask.state.said) // 2] for ask in asks]


def call_of(rules: Script, room: int | None = None, **options: Any) -> SampleCall:
    deciders = {"other": rules.say}
    interaction = Interaction(rules, turn=lambda text, _: (TOKENIZER.encode(text), text), deciders=deciders, room=room)
    return SampleCall(0, "base", 3, 7, "e", interaction=interaction, **options)


def play(engine: Any, rules: Script, wanted: Sequence[GroupOrder] | None = None, **options: Any) -> list[Group]:
    dispatcher = Dispatcher(engine, ParityTask(), TOKENIZER, Sampling(6, (EOS,)), 100)
    return asyncio.run(dispatcher.sample(orders([2, 2]) if wanted is None else wanted, call_of(rules, **options)))


def rollouts(groups: Sequence[Group]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group.rollouts]


def test_the_prompt_of_a_turn_is_every_token_before_it():
    engine = Talking()
    first = rollouts(play(engine, Script(["3?", "4?"])))[0]
    own = [request for request in engine.seen if request.id.startswith("e/00000/00")]
    assert [request.id for request in own] == ["e/00000/00", "e/00000/00/1", "e/00000/00/2"]
    whole = np.concatenate([first.prompt_ids, first.completion_ids])
    for request in own:
        assert np.array_equal(whole[: len(request.prompt_ids)], request.prompt_ids)
    assert [request.sampling.max_tokens for request in own] == [6, 5, 5]
    assert [request.seed for request in own] == [request_seed(7, 0, 0, turn) for turn in range(3)]
    assert request_seed(7, 0, 0) == request_seed(7, 0, 0, 0)
    assert TOKENIZER.decode(own[1].prompt_ids[-2:]) == "3?"


@pytest.mark.parametrize("lines", [[], ["3?", "4?"]])
def test_the_log_probs_of_the_reference_are_at_the_sampled_tokens(lines: list[str]):
    found = rollouts(play(Talking(), Script(lines), reference=True))
    assert all(np.array_equal(each.reference_logprobs, 2 * each.logprobs) for each in found)
    batch = batch_of(found, np.zeros(len(found), dtype=np.float32))
    for reference, own in zip(batch.reference_logprobs, batch.sampled_logprobs, strict=True):
        assert np.array_equal(reference, 2 * own)
    with pytest.raises(ValueError, match="reference"):
        batch_of([*found, *rollouts(play(Talking(), Script(lines)))], np.zeros(2 * len(found), dtype=np.float32))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.text("0123456789+=;?", min_size=1, max_size=4), max_size=3),
    st.frozensets(st.sampled_from([f"e/{group:05d}/{index:02d}" for group in range(2) for index in range(2)])),
)
def test_the_turns_are_the_completion(lines: list[str], silent: frozenset[str]):
    engine, script = Talking(), Script(lines, silent)
    for rollout in rollouts(play(engine, script)):
        asked = [] if rollout.id in silent else lines
        assert len(rollout.turns) == (2 * len(asked) + 1 if asked else 0)
        mask = rollout.sampled_mask
        assert len(rollout.logprobs) == len(mask) == len(rollout.completion_ids)
        ends = [*(turn.start for turn in rollout.turns[1:]), len(mask)][: len(rollout.turns)]
        parts = [rollout.completion_ids[turn.start : end] for turn, end in zip(rollout.turns, ends, strict=True)]
        if parts:
            assert np.array_equal(np.concatenate(parts), rollout.completion_ids)
            assert rollout.text == "".join(turn.text for turn in rollout.turns)
            assert [turn.text for turn in rollout.turns if not turn.sampled] == asked
        for turn, part in zip(rollout.turns, parts, strict=True):
            assert TOKENIZER.decode(part) == turn.text
        # What was sampled is what the engine gave, with its log-probs and versions, and nothing else is.
        answers = [completion(request) for request in engine.seen if f"{request.id}/".startswith(f"{rollout.id}/")]
        assert np.array_equal(rollout.completion_ids[mask], np.concatenate([ids for ids, _ in answers]))
        assert np.array_equal(rollout.logprobs[mask], np.concatenate([logprobs for _, logprobs in answers]))
        assert not rollout.logprobs[~mask].any()
        assert rollout.sampled_tokens == mask.sum()
        starts = [turn.start for turn in rollout.turns if turn.sampled] or [0]
        assert [span.start for span in rollout.spans] == starts
        assert rollout.timing == Timing(1.0 * len(answers), 2.0 * len(answers))
        said = TOKENIZER.decode(answers[0][0])
        assert rollout.grade.correct == (len(said) % 2 == 0)


def completion(request: GenerationRequest) -> tuple[Any, Any]:
    found = asyncio.run(Talking().generate(request))
    return found.token_ids, found.logprobs


def test_a_speaker_is_asked_about_all_interactions_of_a_phase_at_once_and_never_told_a_role():
    script = Script(["1?", "2?"], frozenset({"e/00001/00"}))
    found = rollouts(play(Talking(), script))
    assert [len(call) for call in script.calls] == [4, 3]
    seen = script.calls[1][0]
    assert [seat for seat, _ in seen.state.said] == ["prover", "other", "prover"]
    assert seen.said.tolist() == found[0].completion_ids[: found[0].turns[3].start].tolist()
    assert not hasattr(seen, "role")


class Debate(Direct):
    """Two voices in turn, two times. Each hears what the other says, and at the end the last words."""

    voices = ("a", "b")

    def seats(self, state: Talk) -> Sequence[str]:
        return (self.voices[len(state.said) % 2],) if len(state.said) < 4 else ()

    def prompt(self, state: Talk, seat: str, role: Role) -> str:
        return state.said[-1][1].text if state.said[-1][0] != seat else ""


def test_each_voice_has_one_rollout_with_its_own_prompt_and_seeds():
    engine = Talking()
    dispatcher = Dispatcher(engine, ParityTask(), TOKENIZER, Sampling(6, (EOS,)), 100)
    debate = Interaction(Debate(), TOKENIZER.encode, lambda text, _: (TOKENIZER.encode(text), text))
    call = SampleCall(0, "base", 3, 7, "e", interaction=debate)
    (group,) = asyncio.run(dispatcher.sample(orders([2]), call))
    ids = [request.id for request in engine.seen if request.id.startswith("e/00000/00")]
    assert ids == ["e/00000/00", "e/00000/00/b", "e/00000/00/1", "e/00000/00/b/1"]
    assert len({request.seed for request in engine.seen}) == len(engine.seen) == 8
    for a in group.rollouts:
        b = a.others["b"]
        assert (a.end.problem, len(a.end.said), list(a.others), b.others) == (group.problem, 4, ["b"], {})
        assert [turn.seat for turn in a.turns] == ["a", "b", "a", "b"]
        assert [turn.seat for turn in b.turns] == ["b", "a", "b"]
        assert TOKENIZER.decode(b.prompt_ids) == a.turns[0].text
        assert [turn.text for turn in b.turns[::2]] == [turn.text for turn in a.turns[1::2]]
        assert [turn.sampled for turn in a.turns] == [True, False, True, False]
        assert [turn.text for turn in b.turns] == [turn.text for turn in a.turns[1:]]
        assert [turn.sampled for turn in b.turns] == [True, False, True]


def test_a_solution_at_its_length_limit_makes_the_rollout_one_and_an_answer_does_not():
    wanted = [GroupOrder(Problem("p", "1?", "1"), Role.HELPFUL, TOKENIZER.encode("H1?"), 0, 8)]
    dispatcher_sampling = Sampling(2, (EOS,))
    dispatcher = Dispatcher(Talking(), ParityTask(), TOKENIZER, dispatcher_sampling, 100)
    (group,) = asyncio.run(dispatcher.sample(wanted, call_of(Script(["1?"]))))
    for rollout in group.rollouts:
        cut = rollout.completion_ids[rollout.turns[1].start - 1] != EOS
        assert rollout.finish_reason == ("length" if cut else "stop")
    assert {rollout.finish_reason for rollout in group.rollouts} == {"stop", "length"}


@pytest.mark.parametrize("room", range(1, 24))
def test_an_interaction_ends_where_the_next_text_has_no_room(room: int):
    class LastWord(Script):
        def prompt(self, state: Talk, seat: str, role: Role) -> str:
            return super().prompt(state, seat, role) if self.seats(state) else "99?"

    heard = ["12?", "345?", "99?"]
    for rollout in rollouts(play(Talking(), LastWord(heard[:2]), room=room)):
        found = [turn.text for turn in rollout.turns if not turn.sampled]
        assert found == heard[: len(found)]
        later = len(rollout.completion_ids) - rollout.solution_tokens
        assert later <= room
        if len(found) < len(heard):
            assert later + len(TOKENIZER.encode(heard[len(found)])) + (len(found) < 2) > room
            assert rollout.sampled_mask[-1]
        assert room < 4 or found
        assert room < 20 or len(found) == 3


def test_the_first_turn_has_at_most_max_tokens():
    class Long(Script):
        def limit(self, state: Talk, seat: str) -> int | None:
            return 9

    engine = Talking()
    play(engine, Long(["1?"]))
    assert {(request.id[10:].count("/"), request.sampling.max_tokens) for request in engine.seen} == {(0, 6), (1, 9)}


@pytest.mark.parametrize(
    ("seats", "message"), [(("judge",), "Nothing decides for the seat 'judge'"), ((), "'prover' did not speak")]
)
def test_rules_with_which_no_game_can_be_played_are_the_users_error(seats: tuple[str, ...], message: str):
    class Wrong(Script):
        def seats(self, state: Talk) -> Sequence[str]:
            return seats

    with pytest.raises(ConfigurationError, match=message):
        play(Talking(), Wrong([]))


def test_a_deadline_gives_up_an_episode_whole_in_whatever_turn_it_is():
    engine = Talking(frozenset({"e/00000/01", "e/00001/00/1"}))
    groups = play(engine, Script(["1?"]), orders([3, 3]), deadline=Deadline(0.01, 1))
    assert [[rollout.id for rollout in group.rollouts] for group in groups] == [
        ["e/00000/00", "e/00000/02"],
        ["e/00001/01", "e/00001/02"],
    ]
    assert [group.cancelled for group in groups] == [1, 1]
    first_turn = next(request for request in engine.seen if request.id == "e/00001/00")
    assert groups[1].lost_tokens == len(completion(first_turn)[0])
    assert groups[0].lost_tokens == 0


def test_episodes_that_ended_in_an_earlier_turn_count_for_the_deadline():
    """Otherwise the last episode, which hangs, would be waited for forever."""
    engine = Talking(frozenset({"e/00000/02/1"}))
    script = Script(["1?"], silent=frozenset({"e/00000/00", "e/00000/01"}))
    for over in ("group", "batch"):
        (group,) = play(engine, script, orders([3]), deadline=Deadline(0.01, 2, over))
        assert [rollout.id for rollout in group.rollouts] == ["e/00000/00", "e/00000/01"]
        assert group.cancelled == 1


def test_what_a_speaker_raises_surfaces_and_nothing_is_left_running():
    class Failing(Script):
        async def say(self, asks: Sequence[Ask[Talk]]) -> list[str]:
            raise RuntimeError("no answer")

    async def work() -> None:
        dispatcher = Dispatcher(Talking(), ParityTask(), TOKENIZER, Sampling(6, (EOS,)), 100)
        with pytest.raises(RuntimeError, match="no answer"):
            await dispatcher.sample(orders([2, 2]), call_of(Failing(["1?"])))
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(work())


@pytest.mark.parametrize("continuous", [True, False])
def test_the_torch_engine_plays_them_and_its_log_probs_are_those_of_the_whole_transcript(continuous: bool):
    async def use(engine: TorchEngine) -> list[Group]:
        dispatcher = Dispatcher(engine, ParityTask(), TOKENIZER, Sampling(6, (EOS,)), 100)
        return await dispatcher.sample(orders([2, 2]), call_of(Script(["3?", "A"])))

    found = rollouts(with_engine(use, continuous=continuous))
    module = tiny_model().module
    for rollout in found:
        ids = np.concatenate([rollout.prompt_ids, rollout.completion_ids])
        with torch.no_grad():
            logits_LV = module(input_ids=torch.from_numpy(ids[None]).long()).logits[0]
        logprobs_L = torch.log_softmax(logits_LV, dim=-1)[torch.arange(len(ids) - 1), ids[1:]].numpy()
        own = logprobs_L[len(rollout.prompt_ids) - 1 :]
        np.testing.assert_allclose(rollout.logprobs, np.where(rollout.sampled_mask, own, 0.0), atol=2e-5)
    assert all(len(rollout.turns) == 5 for rollout in found)
    again = rollouts(with_engine(use, continuous=continuous))
    assert [r.logprobs.tobytes() for r in found] == [r.logprobs.tobytes() for r in again]


class Debaters(Direct):
    """Two solvers, one after the other, and a reply of the first."""

    voices = solvers = ("prover", "other")

    def seats(self, state: Talk) -> Sequence[str]:
        return (("prover",), ("other",), ("prover",), ())[len(state.said)]

    def prompt(self, state: Talk, seat: str, role: Role) -> str:
        return "1?" if self.seats(state) else ""


class Watched(ParityTask):
    def __init__(self) -> None:
        self.graded: list[tuple[str, str]] = []

    def grade(self, problem: Problem, completion: str) -> Grade:
        self.graded.append((completion, current_thread().name))
        return super().grade(problem, completion)


def test_each_turn_of_a_solver_is_graded_once_in_the_grading_thread():
    task = Watched()
    interaction = Interaction(Debaters(), TOKENIZER.encode, lambda text, _: (TOKENIZER.encode(text), text))
    with ThreadPoolExecutor(1, "grading") as grading:
        dispatcher = Dispatcher(Talking(), task, TOKENIZER, Sampling(6, (EOS,)), 100, grading)
        call = SampleCall(0, "base", 3, 7, "e", interaction=interaction)
        sampled = rollouts(asyncio.run(dispatcher.sample(orders([2, 2]), call)))
    said = [action for rollout in sampled for _, action in rollout.end.said]
    assert sorted(text for text, _ in task.graded) == sorted(action.text for action in said)
    assert all(thread.startswith("grading") for _, thread in task.graded)
    assert [action.grade.correct for action in said] == [len(action.text) % 2 == 0 for action in said]
    for rollout in sampled:
        assert rollout.grade == rollout.end.said[0][1].grade
        assert rollout.others["other"].grade == rollout.end.said[1][1].grade


@pytest.mark.parametrize(
    ("shared", "compared"),
    [(0, {"prover": 0, "other": -1}), (1, {"prover": -1, "other": 0}), (2, {"prover": 2, "other": -1})],
)
def test_rollouts_that_share_phases_part_at_the_next_one_and_learn_from_it_alone(
    shared: int, compared: dict[str, int]
) -> None:
    engine, interaction = Talking(), Interaction(Debaters(), TOKENIZER.encode, lambda t, _: (TOKENIZER.encode(t), t))
    dispatcher = Dispatcher(engine, ParityTask(), TOKENIZER, Sampling(6, (EOS,)), 100)
    wanted = [replace(order, shared=shared) for order in orders([4, 3])]
    call = SampleCall(0, "base", 3, 7, "e", interaction=interaction)
    groups = asyncio.run(dispatcher.sample(wanted, call))
    assert [len(group.rollouts) for group in groups] == [4, 3]
    assert len(engine.seen) == sum(shared + (3 - shared) * order.size for order in wanted)
    ids = [each.id for rollout in rollouts(groups) for each in (rollout, *rollout.others.values())]
    assert len(set(ids)) == len(ids)
    for group in groups:
        said = [[action.text for _, action in rollout.end.said] for rollout in group.rollouts]
        assert len({tuple(texts[:shared]) for texts in said}) == 1
        assert len({texts[shared] for texts in said}) > 1
        for rollout in group.rollouts:
            for seat, own in (("prover", rollout), *rollout.others.items()):
                assert own.compared == compared[seat]
                if own.compared == -1:
                    continue
                learned = own.learned.sampled_mask if own.turns else own.sampled_mask
                assert TOKENIZER.decode(own.completion_ids[learned]) == rollout.end.said[shared][1].text


def test_a_deadline_in_the_shared_phase_costs_the_whole_group():
    engine = Talking(hang=frozenset({"e/00000/00"}))
    interaction = Interaction(Debaters(), TOKENIZER.encode, lambda text, _: (TOKENIZER.encode(text), text))
    dispatcher = Dispatcher(engine, ParityTask(), TOKENIZER, Sampling(6, (EOS,)), 100)
    call = SampleCall(0, "base", 3, 7, "e", deadline=Deadline(0.05, 0), interaction=interaction)
    wanted = [replace(order, shared=1) for order in orders([3, 2])]
    cut, whole = asyncio.run(dispatcher.sample(wanted, call))
    assert (len(cut.rollouts), cut.cancelled) == (0, 3)
    assert (len(whole.rollouts), whole.cancelled) == (2, 0)
