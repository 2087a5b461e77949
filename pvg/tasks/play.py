"""Play: the starts of a game (pvg.games) as problems. Training plays whole games from them (pvg.game.play_phase)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from pvg.config.task import PlayTask
from pvg.errors import ConfigurationError
from pvg.games import open_game
from pvg.games.game import PlaysByScript, Script
from pvg.records import Grade, Problem, Split


class Play:
    """A context manager: it closes the connections of a game of another project."""

    def __init__(self, section: PlayTask) -> None:
        """Raises ConfigurationError for an unknown game, and if a script should play a game that has none."""
        self.section = section
        self.game = open_game(section.game)
        scripts = sorted({section.opponent, *section.references} & {*get_args(Script)})
        if scripts and not isinstance(self.game, PlaysByScript):
            raise ConfigurationError(
                f"The game {section.game} has no scripts, so {scripts[0]!r} cannot play it.",
                'Set task.references to ["base"], and task.opponent to "self" or "base".',
            )

    def __enter__(self) -> Play:
        return self

    def __exit__(self, *_: object) -> None:
        if (close := getattr(self.game, "close", None)) is not None:
            close()

    def problems(self, split: Split) -> Iterator[Problem]:
        count = self.section.problems if split == "train" else self.section.test_problems
        return (self.game.opening(split, number) for number in range(count))

    def grade(self, problem: Problem, completion: str) -> Grade:
        """Correct and well-formed: a legal first decision of the start's first seat."""
        state = self.game.start(problem)
        action = self.game.parse(state, self.game.seats(state)[0], completion)
        return Grade(action.legal, action.legal, action.text, action.note)
