"""Play: the starts of a game (pvg.games) as problems. Training plays whole games from them (pvg.game.play_phase)."""

from __future__ import annotations

from collections.abc import Iterator

from pvg.config.task import PlayTask
from pvg.games import open_game
from pvg.records import Grade, Problem, Split


class Play:
    def __init__(self, section: PlayTask) -> None:
        """Raises ConfigurationError for an unknown game."""
        self.section = section
        self.game = open_game(section.game)

    def problems(self, split: Split) -> Iterator[Problem]:
        count = self.section.problems if split == "train" else self.section.test_problems
        return (self.game.opening(split, number) for number in range(count))

    def grade(self, problem: Problem, completion: str) -> Grade:
        """Correct and well-formed: a legal first decision of the start's first seat."""
        state = self.game.start(problem)
        action = self.game.parse(state, self.game.seats(state)[0], completion)
        return Grade(action.legal, action.legal, action.text, action.note)
