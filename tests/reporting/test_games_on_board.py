"""Whole games in the report: read from the run's records and shown phase by phase."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from page_checks import check
from run_samples import begin, tell

from pvg.games.diplomacy.game import Diplomacy
from pvg.games.game import GameRules
from pvg.games.negotiation import Negotiation
from pvg.reporting.games_on_board import newest_games, section
from pvg.reporting.table import page
from pvg.rollout.game_records import GameRecord, game_record
from pvg.rollout.games import PlayedGame, SeatDecision, game_start


def record(name: str, game: Any, round_: int = 0, policy: str = "") -> GameRecord:
    """A game of scripts, with `policy` as the seat of the policy."""
    start = game_start(game, game.opening("train", 0))
    states, decisions = [start.state], []
    while seats := game.seats(states[-1]):
        number, state = len(states) - 1, states[-1]
        texts = {seat: game.scripted("greedy", state, seat, number) for seat in seats}
        actions = {seat: game.parse(state, seat, text) for seat, text in texts.items()}
        phase = game.phase(state)
        decisions += [SeatDecision(seat, number, phase, state, actions[seat], None, 1) for seat in seats]
        states.append(game.step(state, actions, number))
    played: PlayedGame[Any] = PlayedGame(start, 0, 0, tuple(states), tuple(decisions), "over")
    rules: GameRules[Any] = game
    players = {seat: "policy" if seat == policy else "greedy" for seat in game.values(states[0])}
    return game_record(round_, name, rules, played, players)


def test_a_record_comes_back_as_it_was_written(tmp_path: Path) -> None:
    written = record("diplomacy", Diplomacy(last_year=1901), policy="France")
    run = begin(tmp_path)
    tell(run, {"kind": "game", "time": 1.0, **written.plain()}, {"kind": "game", **written.plain()})
    assert newest_games(run) == [written]  # recorded twice, shown once
    assert [phase.phase for phase in written.phases][:2] == ["S1901M", "F1901M"]
    assert written.phases[-1].phase == ""
    assert len(written.phases[0].decisions) == 7


def test_a_game_of_diplomacy_is_drawn_phase_by_phase(tmp_path: Path) -> None:
    run = begin(tmp_path)
    old, new = (record("diplomacy", Diplomacy(last_year=1901), round_, "France") for round_ in (0, 1))
    tell(run, *({"kind": "game", **game.plain()} for game in (old, new)))
    shown = check(page("games", [], [section(run, "play", {}, 2)]))
    assert "Round 1: diplomacy" in shown.text
    assert "Round 0" not in shown.text
    assert "France: policy" in shown.text
    assert "Supply centres" in shown.text
    phases = [phase for phase in new.phases if phase.decisions]
    boards = [found for name, found in shown.tags if name == "svg" and "aria-labelledby" in found]
    assert len(boards) == len(phases) + 1
    assert all(f"{phase.phase}: {len(phase.decisions)} decision" in shown.text for phase in phases)
    first = phases[0].decisions[0].text.split("\n")[0]
    assert first in shown.text


def test_another_game_has_tables(tmp_path: Path) -> None:
    run = begin(tmp_path)
    game = record("negotiation", Negotiation())
    tell(run, {"kind": "game", **game.plain()})
    shown = check(page("games", [], [section(run, "play", {}, 2)]))
    assert "Value of each seat" in shown.text
    assert game.phases[0].decisions[0].text in shown.text
    assert not [found for name, found in shown.tags if name == "svg" and "aria-labelledby" in found]


def test_a_run_without_games_has_no_section(tmp_path: Path) -> None:
    run = begin(tmp_path)
    assert not section(run, "play", {}, 2).body
    tell(run, {"kind": "round", "round": 0, "metrics": {}})
    assert not section(run, "play", {}, 2).body
