"""Protocols with several voices: what each reads, earns and learns; and games of them."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_games import changed, completed, played, prover_steps, recorded, rows, state_of, trained_on
from test_challenge import MODCHAIN

from pvg.config.experiment import TokenLimits, spoken_room
from pvg.config.game import CgcReward, ConsultancyProtocol, CriticProtocol, DebateProtocol, Game
from pvg.config.rollout import ChatPrompts, TagPrompts, TextPrompts
from pvg.errors import ConfigurationError
from pvg.game import mint, prover_phase
from pvg.game.prompt_checks import check_voices_fit
from pvg.game.protocols import ProtocolParts, example_episode, interaction_for
from pvg.game.prover_phase import StopRule
from pvg.game.rewards import credit_of, pay
from pvg.game.roles import ASSIGNED, prompt_builder
from pvg.game.round import GameBatches
from pvg.game.session import InterruptedByUser, Session
from pvg.game.verifier_phase import trained
from pvg.game.voices import OPPONENT, REPLY
from pvg.games.game import Action, Outcome
from pvg.models.embedded_training import modchain_tokenizer
from pvg.models.tokenizer import Tokenizer
from pvg.records import Grade, Role, Rollout, VersionSpan
from pvg.rollout.interaction import Interaction, Talk
from pvg.store.checkpoints import read_checkpoint
from pvg.store.pairs import is_held_out
from pvg.tasks.answers import NO_MARKER
from pvg.tasks.modchain import chain_problem
from pvg.traces.loaders import load_traces
from pvg.verifier.data import VERDICT_INSTRUCTIONS

TOKENIZER, TAGS = Tokenizer(modchain_tokenizer()), TagPrompts()
PROBLEM = chain_problem((7, 5, 8), 10)
RIGHT, WRONG = "7+5=2;2+8=0;A0", "7+5=2;2+8=1;A1"  # the second step of WRONG is wrong
CANCELLED = "7+5=3;3+8=0;A0"  # two mistakes, and the right answer
IDS = np.array([1], np.int32), np.array([1], np.int32), np.zeros(1, np.float32)
SMALL = {
    "task.min_terms": 3,
    "task.max_terms": 3,
    "rollout.max_tokens": 30,
    "verifier.steps": 3,
    "game.test.problems": 4,
    "training.steps": 2,
}
CRITIC_GAME = {**SMALL, "game.protocol": {"kind": "critic", "tokens": 2}}
DEBATE_GAME = {**SMALL, "game.protocol": {"kind": "debate", "turns": "ABA", "tokens": 20}, "training.loss": "rae"}


def interaction_of(section: Any, prompts: Any = TAGS) -> Interaction[Any]:
    return interaction_for(section, ProtocolParts(MODCHAIN, TOKENIZER, prompts, None, 0))


def talk(*said: tuple[str, str]) -> Talk:
    grades = (MODCHAIN.grade(PROBLEM, text) for _, text in said)
    return Talk(PROBLEM, tuple((seat, Action(text, text, grade=next(grades))) for seat, text in said))


def outcome(solution: str, score: float, role: Role = Role.HELPFUL) -> Outcome:
    return Outcome(role, MODCHAIN.grade(PROBLEM, solution), score)


@pytest.mark.parametrize(
    ("solution", "critique", "right", "of_wrong"),
    [
        (RIGHT, "0", 1.0, {"critic_accuracy": 1.0, "critic_alarm": 0.0, "critic_unread": 0.0}),
        (RIGHT, "1", 0.0, {"critic_accuracy": 0.0, "critic_alarm": 1.0, "critic_unread": 0.0}),
        (CANCELLED, "0", 1.0, {"critic_accuracy": 1.0, "critic_alarm": 0.0}),
        (CANCELLED, "1", 0.0, {"critic_accuracy": 0.0, "critic_alarm": 1.0}),
        (WRONG, "2", 1.0, {"critic_accuracy": 1.0, "critic_found": 1.0, "critic_true": 1.0}),
        (WRONG, "1", 0.0, {"critic_accuracy": 1.0, "critic_found": 1.0, "critic_true": 0.0}),
        (WRONG, "0", 0.0, {"critic_accuracy": 0.0, "critic_found": 0.0, "critic_true": 0.0}),
        (WRONG, "2;", 0.0, {"critic_accuracy": 0.0, "critic_found": 0.0, "critic_unread": 1.0}),
    ],
)
def test_a_critic_earns_the_truth_or_the_votes_against(
    solution: str, critique: str, right: float, of_wrong: dict[str, float]
) -> None:
    state = talk(("prover", solution), ("critic", critique))
    true, votes = (interaction_of(CriticProtocol(pay=pay)).rules for pay in ("truth", "votes"))
    assert true.pay(state, outcome(solution, 5.0)) == {"critic": right}
    assert votes.pay(state, outcome(solution, math.log(3)))["critic"] == pytest.approx(1 / 4)
    found = true.measures(state, outcome(solution, 0.0))
    assert {name: found[name] for name in of_wrong} == of_wrong
    unknown = ("critic_alarm",) if solution == WRONG else ("critic_found", "critic_true")
    assert [name for name, value in found.items() if math.isnan(value)] == list(unknown)


def test_debaters_divide_the_votes_and_a_text_without_a_solution_earns_none() -> None:
    rules = interaction_of(DebateProtocol()).rules
    state = talk(("prover", RIGHT), ("opponent", WRONG))
    paid = rules.pay(state, outcome(RIGHT, math.log(3)))
    assert paid == pytest.approx({"prover": 3 / 4, "opponent": 1 / 4})
    assert rules.measures(state, outcome(RIGHT, 1.0)) == {
        **{"debate_contested": 1.0, "debate_both_right": 0.0, "debate_both_wrong": 0.0, "debate_same_answer": 0.0},
        **{"debate_first_wins": 1.0, "debate_truth_wins": 1.0, "debate_concessions": 0.0},
    }
    other_way = rules.measures(talk(("prover", WRONG), ("opponent", RIGHT)), outcome(WRONG, 1.0))
    assert (other_way["debate_first_wins"], other_way["debate_truth_wins"]) == (1.0, 0.0)
    same = rules.measures(talk(("prover", WRONG), ("opponent", WRONG)), outcome(WRONG, 1.0))
    assert (same["debate_both_wrong"], same["debate_same_answer"]) == (1.0, 1.0)
    assert math.isnan(same["debate_first_wins"])
    broken = talk(("prover", "7+"), ("opponent", ";;"))
    assert rules.pay(broken, outcome("7+", 9.0)) == {"prover": 0.0, "opponent": 0.0}


def test_a_consultant_is_told_the_answer_to_argue_for_and_earns_votes_for_it_alone() -> None:
    rules = interaction_of(ConsultancyProtocol()).rules
    builder = prompt_builder(TAGS, ConsultancyProtocol(), TOKENIZER, MODCHAIN)
    wrong = MODCHAIN.grade(PROBLEM, MODCHAIN.written(PROBLEM, False)).answer
    assert wrong not in (None, PROBLEM.answer)
    for role, answer in ((Role.HELPFUL, PROBLEM.answer), (Role.SNEAKY, wrong)):
        order = builder.order(PROBLEM, role, 0, 2)
        assert TOKENIZER.decode(order.prompt_ids)[1:] == f"{PROBLEM.question}A{answer}?"
        assert order.problem == PROBLEM  # the verifier reads its question
        for said in ("0", "1", wrong):
            text = f"7+5=2;2+8=0;A{said}"
            found = outcome(text, math.log(3), role)
            assert rules.pay(talk(("prover", text)), found)["prover"] == pytest.approx(0.75 * (said == answer))
            assert rules.measures(talk(("prover", text)), found) == {"consultancy_assigned": float(said == answer)}
    assert rules.pay(talk(("prover", "7+")), outcome("7+", 9.0)) == {"prover": 0.0}
    in_words = prompt_builder(TextPrompts(), ConsultancyProtocol(), TOKENIZER, MODCHAIN).assignment
    assert in_words is not None
    assert in_words.posed(PROBLEM, Role.HELPFUL).question.endswith(ASSIGNED.format(PROBLEM.answer))


@pytest.mark.parametrize(
    ("order", "said", "conceded"),
    [
        ("sequential", (RIGHT, WRONG), 0.0),
        ("sequential", (RIGHT, RIGHT), 1.0),
        ("sequential", (RIGHT, WRONG, WRONG), 1.0),
        ("sequential", (RIGHT, WRONG, RIGHT), 0.0),
        ("simultaneous", (RIGHT, RIGHT), math.nan),
        ("simultaneous", (RIGHT, WRONG, WRONG), 1.0),
        ("simultaneous", (RIGHT, RIGHT, RIGHT), 0.0),
    ],
)
def test_a_concession_is_the_answer_of_a_side_that_was_read(order: Any, said: tuple[str, ...], conceded: float) -> None:
    rules = interaction_of(DebateProtocol(order=order, turns="ABA")).rules
    turns = zip(("prover", "opponent", "prover"), said, strict=False)
    found = rules.measures(talk(*turns), outcome(said[0], 0.0))["debate_concessions"]
    assert found == pytest.approx(conceded, nan_ok=True)


def test_a_number_in_a_reply_is_no_concession_without_the_mark_of_an_answer() -> None:
    rules = interaction_of(DebateProtocol(order="simultaneous", turns="ABA")).rules
    for note, conceded in ((NO_MARKER.format("the last number"), math.nan), ("", 1.0)):
        reply = Action("", "not 1", grade=Grade(False, True, "1", note))
        state = talk(("prover", RIGHT), ("opponent", WRONG))
        state = rules.step(state, {"prover": reply}, 0)
        measured = rules.measures(state, outcome(RIGHT, 0.0))["debate_concessions"]
        assert measured == pytest.approx(conceded, nan_ok=True)


def test_an_attack_pays_the_prover_its_own_reward_and_the_others_as_in_the_game() -> None:
    rules = interaction_of(DebateProtocol()).rules
    said = [(("prover", text), ("opponent", WRONG)) for text in (RIGHT, WRONG)]
    sample = [
        Rollout(
            f"r{n}",
            PROBLEM.id,
            PROBLEM.question,
            "0",
            Role.HELPFUL,
            0,
            "base",
            0,
            0,
            *IDS,
            (VersionSpan(0, 1),),
            "stop",
            text,
            MODCHAIN.grade(PROBLEM, text),
            end=talk(*turns),
        )
        for n, (text, turns) in enumerate(zip((RIGHT, WRONG), said, strict=True))
    ]
    scores_N = np.array([math.log(3), math.log(3)], dtype=np.float32)
    game = Game(reward={"kind": "correctness"})
    played_N, _, earned = pay(game, MODCHAIN, rules, sample, scores_N)
    attacked_N, _, also = pay(game, MODCHAIN, rules, sample, scores_N, by_rules=False)
    np.testing.assert_allclose(played_N, [0.75, 0.75])
    assert attacked_N.tolist() == [1.0, 0.0]
    assert earned == also


def lines(section: Any, solution: str = WRONG) -> dict[str, list[str]]:
    """What each voice reads and writes in an example, its prompt first."""
    found = example_episode(interaction_of(section), TOKENIZER, PROBLEM, solution)
    return {
        voice: [
            *(() if line.prompt_ids is None else (TOKENIZER.decode(line.prompt_ids),)),
            *(t.text for t in line.turns),
        ]
        for voice, line in found.items()
    }


def test_each_voice_reads_what_the_protocol_says() -> None:
    assert lines(CriticProtocol()) == {"prover": [WRONG, "?0"], "critic": [f"?{PROBLEM.question}{WRONG}?", "0"]}
    prompt = f"H{PROBLEM.question}{WRONG}?"  # both roles have prompts of one length: the first one counts
    assert lines(DebateProtocol(turns="ABA")) == {
        "prover": [WRONG, f"{RIGHT}?", RIGHT],
        "opponent": [prompt.replace("H", "S", 1), RIGHT],
    }
    assert lines(DebateProtocol(order="simultaneous")) == {
        "prover": [WRONG, RIGHT],
        "opponent": [f"S{PROBLEM.question}", RIGHT],
    }


def test_an_opponent_has_the_other_role_and_a_prompt_in_words_says_what_to_do() -> None:
    rules = interaction_of(DebateProtocol()).rules
    prompts = [rules.prompt(talk(("prover", WRONG)), "opponent", role) for role in Role]
    assert [prompt[0] for prompt in prompts] == ["S", "H"]
    example = {"question": "1+1?", "helpful": "2", "sneaky": "3"}
    worded = TextPrompts(helpful="", sneaky="Mislead.", examples=[example])
    rules = interaction_of(DebateProtocol(), worded).rules
    prompts = [rules.prompt(talk(("prover", WRONG)), "opponent", role).split("\n\n") for role in Role]
    for prompt, instructions, answer in zip(prompts, (["Mislead."], []), "32", strict=True):
        before = [*instructions, "Problem:\n1+1?", f"Solution:\n{answer}", f"Problem:\n{PROBLEM.question}"]
        assert prompt == [*before, f"{OPPONENT}\n{WRONG}"]
    critic = interaction_of(CriticProtocol(), ChatPrompts()).rules
    shown = critic.prompt(talk(("prover", WRONG)), "critic", Role.HELPFUL)
    assert shown.startswith(VERDICT_INSTRUCTIONS)
    assert shown.endswith(f"Problem:\n{PROBLEM.question}\n\nSolution:\n{WRONG}")


def test_a_reply_in_words_has_the_room_that_the_settings_say() -> None:
    section = DebateProtocol(turns="ABA", tokens=40)
    around = len(REPLY.split()) + 12  # words, and what a chat template writes around a turn
    assert spoken_room(section, in_words=True) >= around + 2 * section.tokens


def test_the_rows_of_all_voices_fit_into_the_budget() -> None:
    found = example_episode(interaction_of(CriticProtocol(tokens=2)), TOKENIZER, PROBLEM, WRONG)
    need = 1 + len(PROBLEM.question) + 30 + 1 + 18  # a solution of 30 tokens between two marks, and the room after it
    limits = TokenLimits(30, 48, {"training.micro_batch_tokens": need}, True)
    check_voices_fit(limits, found, need)
    with pytest.raises(ConfigurationError, match=f"may need {need}"):
        check_voices_fit(limits, found, need - 1)
    with pytest.raises(ConfigurationError, match=f"may have {need} tokens"):
        check_voices_fit(replace(limits, budgets={"training.micro_batch_tokens": need - 1}), found, need)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompts": "plain", "game.reward": "goodhart"}, "gives every voice of game.protocol = 'critic' one prompt"),
        ({"rollout.deadline": "continue"}, "has several turns"),
        ({"task": {"kind": "diplomacy_mini"}}, "'critic' writes numbers"),
    ],
)
def test_what_does_not_fit_several_voices_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        changed(CRITIC_GAME | settings)


def test_a_reward_without_effect_asks_for_nothing() -> None:
    alone = {"game.sneaky_share": 0, "rollout.group_size": 1, "game.reward": "src"}
    assert changed(DEBATE_GAME | alone).game.sneaky_share == 0
    with pytest.raises(ConfigurationError, match="needs two roles"):
        changed(CRITIC_GAME | alone | {"rollout.group_size": 2})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "set it to 'embedded:modchain-critic' for game.protocol = 'critic'"),
        ({"game.protocol": "debate"}, "set it to 'embedded:modchain-dialogue' for game.protocol = 'debate'"),
        ({"game.protocol": "consultancy"}, "'embedded:modchain-dialogue' for game.protocol = 'consultancy'"),
        ({"game.protocol": "debate", "game.reward": "goodhart"}, "game.reward = 'goodhart' has no effect"),
    ],
)
def test_a_model_without_the_prompts_and_a_reward_without_effect_get_a_warning(
    settings: dict[str, Any], message: str
) -> None:
    untrained = {"models.prover.source": "embedded:modchain-prover", "game.reward": CgcReward().model_dump()}
    assert any(message in line for line in changed(CRITIC_GAME | untrained | settings).warnings())
    fitting = {
        "models.prover.source": f"embedded:modchain-{'dialogue' if settings else 'critic'}",
        "game.reward": CgcReward().model_dump(),
    }
    assert not any(message in line for line in changed(CRITIC_GAME | untrained | settings | fitting).warnings())
    apart = {"game.protocol": {"kind": "debate", "order": "simultaneous"}, "game.reward": CgcReward().model_dump()}
    assert changed(CRITIC_GAME | untrained | apart).warnings() == []


# --- games ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "seats"), [(CRITIC_GAME, ["prover", "critic"]), (DEBATE_GAME, ["prover", "opponent", "prover"])]
)
def test_every_voice_learns_and_the_verifier_reads_what_they_say(
    settings: dict[str, Any], seats: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[tuple[Any, ...]] = []
    credit = GameBatches._credit

    def watched(self: GameBatches, scored: Any, trained: Any) -> Any:
        found = credit(self, scored, trained)
        batches.append((scored, *found))
        return found

    monkeypatch.setattr(GameBatches, "_credit", watched)
    result, run = played(changed(settings), tmp_path)
    assert result.status == "complete"
    for rollout in recorded(run):
        assert [turn.seat for turn in rollout.turns] == seats[: len(rollout.turns)]
        assert [turn.sampled for turn in rollout.turns] == [seat == "prover" for seat in seats[: len(rollout.turns)]]
        assert not rollout.logprobs[~rollout.sampled_mask].any()
    tested = [rollout for rollout in recorded(run) if "/evaluation/" in rollout.id]
    assert tested
    for rollout in tested:  # what the verifier thinks after each turn
        assert rollout.turns[-1].score == rollout.score
        assert None not in [turn.score for turn in rollout.turns]
    assert any(rollout.turns[0].score != rollout.score for rollout in tested)
    critiques = {r.id: r.turns[1].text.removeprefix("?") for r in tested if len(r.turns) > 1 and r.source != "base"}
    named = {key: int(text) for key, text in critiques.items() if re.fullmatch("0|[1-9][0-9]{0,3}", text)}
    judged = load_traces(str(run.path), {}, tmp_path, None).verdicts  # what pvg measure reads
    assert {each.place: each.named for each in judged} == (named if settings is CRITIC_GAME else {})
    (first, *_), voice = batches, seats[1]
    scored, trained, advantages_M, metrics = first
    provers = scored.rollouts
    spoke = [rollout.others[voice] for rollout in provers if voice in rollout.others]
    assert [rollout.id for rollout in trained] == [rollout.id for rollout in (*provers, *spoke)]
    earned_S = np.array([earned[voice] for earned in scored.earned], dtype=np.float32)
    assert metrics[f"reward_{voice}"] == pytest.approx(float(earned_S.mean()))
    if settings is CRITIC_GAME:  # compared with the critiques of the same group
        for group in {rollout.group for rollout in spoke}:
            own = [n for n, rollout in enumerate(spoke) if rollout.group == group]
            spread = earned_S[own].std() + 1e-6
            expected = (earned_S[own] - earned_S[own].mean()) / spread
            np.testing.assert_allclose(advantages_M[len(provers) :][own], expected, rtol=1e-3, atol=1e-4)
    else:  # each voice has a baseline of its own
        other, _ = credit_of("rae", None).observe(spoke, earned_S)
        np.testing.assert_array_equal(advantages_M[len(provers) :], other)
    found = rows(run, "round")[0]["metrics"]
    own = [rollout for rollout in tested if rollout.source == "round-000"]
    alone = {correct: [r.turns[0].score for r in own if r.grade.correct == correct] for correct in (True, False)}
    won = np.mean([(right > wrong) + 0.5 * (right == wrong) for right in alone[True] for wrong in alone[False]])
    assert found["verifier_auc_alone"] == pytest.approx(won)
    if voice == "critic":
        assert found["critic_balanced"] == pytest.approx((found["critic_found"] + 1 - found["critic_alarm"]) / 2)
    else:
        assert 0.0 <= found["debate_contested"] <= 1.0


@pytest.mark.slow
def test_before_the_first_round_a_critic_is_compared_with_the_verifier_of_the_direct_game(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The judge has the weights of the direct game's verifier, which reads the same solutions without critiques. A run
    that was stopped before it had a judge trains it after its resume."""
    judges: list[str] = []
    interrupts = iter([InterruptedByUser()])

    async def watched(session: Session, info: None) -> Any:
        for interrupt in interrupts:
            raise interrupt
        judge = await trained(session, info)
        judges.append(judge.version())
        return judge

    monkeypatch.setattr(mint, "trained", watched)
    settings = CRITIC_GAME | {"verifier.held_out": 0.5, "models.prover.source": "embedded:modchain-critic"}
    settings |= {"training.steps": 1, "game.rounds": 2, "game.mint_problems": 48, "rollout.max_tokens": 40}
    settings |= {"task.min_terms": 5, "task.max_terms": 5}
    assert played(changed(settings), tmp_path / "critic")[0].status == "interrupted"
    resumed, run = played(changed(settings), tmp_path / "critic", resume=True)
    assert resumed.status == "complete"
    direct = completed(changed(settings | {"game.protocol": "direct", "game.rounds": 1}), tmp_path / "direct")
    assert judges == [read_checkpoint(direct.weights, "round-000-verifier")[1]["version"]]

    first, second = (row["metrics"] for row in rows(run, "phase") if row["phase"] == "mint")
    assert "critic_lead" not in second
    minted = [r for r in recorded(run) if r.id.startswith("000/mint/") and is_held_out(r.problem_id, 0.5)]
    right = {
        correct: [(r.turns[1].text == "?0") == correct for r in minted if r.grade.correct == correct]
        for correct in (True, False)
    }
    critic = (np.mean(right[True]) + np.mean(right[False])) / 2
    assert first["critic_balanced"] == pytest.approx(critic)
    assert first["critic_lead"] == pytest.approx(critic - first["judge_balanced"])
    told = [row["name"] for row in rows(run, "alert") if row["phase"] == "mint"]
    assert told == ["weak_critic"] * (first["critic_lead"] <= 0)
    assert first["critic_lead_low"] < first["critic_lead"] < first["critic_lead_high"]


@pytest.mark.slow
def test_in_a_forked_debate_only_the_drawn_turn_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[tuple[Any, list[Rollout]]] = []
    credit = GameBatches._credit

    def watched(self: GameBatches, scored: Any, trained: Any) -> Any:
        found = credit(self, scored, trained)
        batches.append((scored, found[0]))
        return found

    monkeypatch.setattr(GameBatches, "_credit", watched)
    completed(changed(DEBATE_GAME | {"game.protocol.fork": True, "training.groups": 6}), tmp_path)
    assert batches
    for scored, learned in batches:
        parted = {seat: {r.group for r in learned if ("/opponent" in r.id) == seat} for seat in (True, False)}
        assert len(parted[True]) == 2  # of six groups, a third each part at one of the three turns
        assert not parted[True] & parted[False]
        for rollout in learned:
            assert sum(turn.sampled for turn in rollout.turns) == 1 or not rollout.turns
        for group in parted[True]:
            assert len({r.turns[0].text for r in scored.rollouts if r.group == group}) == 1


@pytest.mark.slow
def test_a_phase_whose_verifier_decays_ends_with_its_last_honest_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told of a fall after step 2, the phase ends at step 3 with the prover of step 2, and keeps the records of all."""
    monkeypatch.setattr(prover_phase, "MIN_STEPS", 2)
    told = iter([0.9, 0.9, -0.9])
    observe = StopRule.observe
    monkeypatch.setattr(StopRule, "observe", lambda self, m: observe(self, {**m, "verifier_mcc": next(told)}))
    settings = {**SMALL, "game.protocol": "direct", "game.stop": "judge_decay", "store.commit_every": 1}
    settings |= {"training.steps": 9}
    assert played(changed(settings), tmp_path / "decayed")[0].status == "complete"
    decayed = played(changed(settings), tmp_path / "decayed", resume=True)[1]
    assert len([row for row in rows(decayed, "step") if row["phase"] == "train_prover"]) == 3
    assert len({rollout.step for rollout in trained_on(decayed)}) == 3
    ended = next(row for row in rows(decayed, "phase") if row["phase"] == "train_prover")
    assert ended["metrics"]["reward_mean"] == prover_steps(decayed)[1]["reward_mean"]
    monkeypatch.undo()
    short = completed(changed(settings | {"training.steps": 2, "game.stop": "steps"}), tmp_path / "short")
    found, expected = (read_checkpoint(run.weights, "round-000-prover")[0] for run in (decayed, short))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_a_phase_that_can_go_back_is_resumed_from_its_first_commit(tmp_path: Path) -> None:
    experiment = changed({**SMALL, "game.protocol": "direct", "game.stop": "judge_decay", "training.steps": 2})
    stopped = played(experiment, tmp_path / "stopped", stop_at=("train_prover", 1))[1]
    assert (state_of(stopped)["step"], state_of(stopped)["checkpoint"]) == (0, "round-000-train_prover-00000")
    assert played(experiment, tmp_path / "stopped", resume=True)[0].status == "complete"
    whole = completed(experiment, tmp_path / "whole")
    assert state_of(stopped)["version"] == state_of(whole)["version"]
    found, expected = (read_checkpoint(run.weights, "round-000-prover")[0] for run in (stopped, whole))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
