"""Steps along an axis: the steps of one phase over all rounds, one round behind the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pvg.reporting.figures import compact
from pvg.reporting.page.charts import SMOOTHED_FROM, Line
from pvg.reporting.page.frame import FULL_NAMES, Across, Band
from pvg.reporting.page.scales import Point
from pvg.reporting.run_summary import StepRecord

PROVER, VERIFIER = "train_prover", "train_verifier"
COUNTED = {PROVER: "prover step", VERIFIER: "verifier step", "mint": "rollout", "init": "rollout"}


class Steps:
    """The steps of `phase`, with their place on the axis: the steps of earlier rounds come before.

    `longest`: the rounds' lengths to lay them out by, where several runs share the axis; default: their own.
    """

    def __init__(self, steps: Sequence[StepRecord], phase: str, longest: dict[int, int] | None = None) -> None:
        self.phase = phase
        self.rounds: dict[int, list[StepRecord]] = {}
        for step in steps:
            if step.phase == phase:
                self.rounds.setdefault(step.round, []).append(step)
        self.lengths = longest or {round_: max(s.step for s in found) for round_, found in self.rounds.items()}
        self.offsets: dict[int, int] = {}
        total = 0
        for round_ in sorted(self.lengths):
            self.offsets[round_] = total
            total += self.lengths[round_]
        self.total = total

    def __bool__(self) -> bool:
        return bool(self.rounds)

    @property
    def smoothed(self) -> bool:
        """Whether a mean is drawn through the lines of any round."""
        return any(len(found) >= SMOOTHED_FROM for found in self.rounds.values())

    def across(self) -> Across:
        """The axis, with a band per round."""
        bands = tuple(Band(at, at + self.lengths[round_], f"round {round_}") for round_, at in self.offsets.items())
        last = max(self.offsets, default=0)
        ticks = [(float(at), _count(at)) for round_, at in self.offsets.items() if self._roomy(round_, last)]
        ticks.append((float(self.total), _count(self.total)))
        counted = COUNTED.get(self.phase, "step")
        label = f"{counted}s" + (", rounds above" if len(bands) > FULL_NAMES else "")
        return Across(0.0, float(self.total), label, tuple(ticks), bands if len(bands) > 1 else (), counted)

    def _roomy(self, round_: int, last: int) -> bool:
        """Whether a round's beginning gets a label: of very many rounds only some do."""
        every = -(-len(self.offsets) // 5)
        place = sorted(self.offsets).index(round_)
        return place % every == 0 and (round_ != last or self.lengths[round_] * 8 > self.total)

    def place(self, step: StepRecord) -> float:
        return float(self.offsets[step.round] + step.step)

    def pieces(self, value: Callable[[StepRecord], float | None]) -> list[list[Point]]:
        """One piece per round; steps without the value are skipped."""
        found = []
        for round_ in sorted(self.rounds):
            points = [(self.place(s), y) for s in self.rounds[round_] if (y := value(s)) is not None]
            if points:
                found.append(points)
        return found

    def line(self, metric: str, name: str, style: str, dash: str = "", *, smooth: bool = True) -> Line:
        return Line(name, self.pieces(lambda step: step.metrics.get(metric)), style, dash, smooth=smooth)

    def level(self, values: dict[int, float], name: str, style: str, dash: str = "dotted") -> Line:
        """A value per round, drawn flat over it."""
        pieces = [
            [(float(at), values[round_]), (float(at + self.lengths[round_]), values[round_])]
            for round_, at in self.offsets.items()
            if round_ in values
        ]
        return Line(name, pieces, style, dash)

    def columns(self) -> list[tuple[float, dict[str, float]]]:
        """Every step's budget at the middle of the step."""
        return [
            (self.place(step) - 0.5, step.budget)
            for round_ in sorted(self.rounds)
            for step in self.rounds[round_]
            if step.budget
        ]


def _count(steps: int) -> str:
    return str(steps) if steps < 10_000 else compact(steps)
