"""The parts of a time budget: their order and their families, on the terminal and on pages.

A family is one kind of work and has one colour; its parts differ in shade. A part that no family lists (from a newer
pvg or from a user's own spans) belongs to `other`. Unaccounted time comes last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pvg.telemetry.spans import UNACCOUNTED

OTHER = "other"

FAMILIES: dict[str, tuple[str, ...]] = {
    "sampling": ("rollout", "decode", "prefill", "grade"),
    "scoring": ("score", "score_service", "score_queue"),
    "training": ("forward_backward", "survey", "reference", "recompute", "optimizer", "credit", "pack", "draw_pairs"),
    "bookkeeping": ("sync", "checkpoint", "evaluate", "record", "open_models"),
    "waiting": ("wait_for_rollouts", "wait_for_pairs", "wait_for_demonstrations", "wait_for_weights"),
    OTHER: (),
    UNACCOUNTED: (UNACCOUNTED,),
}
MEANING = {
    "sampling": "writing and grading solutions",
    "scoring": "scores of the verifier",
    "training": "forward and backward passes, optimizer",
    "bookkeeping": "weight updates, commits, evaluation",
    "waiting": "waiting for other work",
    OTHER: "other work",
    UNACCOUNTED: "outside of all spans",
}

SHADES = 4  # per family; the fifth part has the first shade again

_FAMILY_OF = {part: family for family, parts in FAMILIES.items() for part in parts}


@dataclass(frozen=True, slots=True)
class BudgetPart:
    """A part of a budget, its family and its shade within the family (0 is the strongest)."""

    name: str
    family: str
    shade: int

    @property
    def label(self) -> str:
        return self.name.replace("_", " ")

    @property
    def style(self) -> str:
        """The class of its colour in the page's style sheet."""
        return f"part-{self.family}-{self.shade}"


def in_order(names: Iterable[str]) -> list[BudgetPart]:
    """The parts in the order of FAMILIES, each name once. Unknown parts are sorted by name."""
    given = set(names)
    found = []
    for family, known in FAMILIES.items():
        names_in_order = sorted(given - _FAMILY_OF.keys()) if family == OTHER else known
        # By the place in the whole list, so that a part has the same shade in every chart.
        found += [
            BudgetPart(name, family, place % SHADES) for place, name in enumerate(names_in_order) if name in given
        ]
    return found


def by_family(budget: Mapping[str, float]) -> dict[str, float]:
    """Seconds by family, in order; only families with a part in the budget."""
    totals: dict[str, float] = {}
    for part in in_order(budget):
        totals[part.family] = totals.get(part.family, 0.0) + budget[part.name]
    return totals
