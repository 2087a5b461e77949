"""A protocol: the prover solves a problem, a clerk repeats the question, and the prover solves it again."""

from collections.abc import Sequence

from pvg.games.game import Script
from pvg.records import Role
from pvg.rollout.interaction import Direct, Talk


class SecondLook(Direct):
    """The verifier reads everything; the task grades the first solution. The clerk is no model: a script decides."""

    def seats(self, state: Talk) -> Sequence[str]:
        """Who speaks now. A solution that was cut off gets no second look."""
        if state.said and state.said[0][1].cut:
            return ()
        return (("prover",), ("clerk",), ("prover",), ())[len(state.said)]

    def scripted(self, script: Script, state: Talk, seat: str, seed: int) -> str:
        """What the clerk says, and in previews the prover's second turn."""
        return state.problem.question if seat == "clerk" else state.said[0][1].text

    def prompt(self, state: Talk, seat: str, role: Role) -> str:
        """What the prover reads before its second turn. Nothing follows that turn."""
        return state.said[1][1].text if len(state.said) == 2 else ""

    def limit(self, state: Talk, seat: str) -> int | None:
        """The most tokens of a turn; None: rollout.max_tokens."""
        return 40 if state.said else None
