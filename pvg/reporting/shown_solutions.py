"""A solution as a page shows it: its text with the wrong step marked, its score and its grade."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pvg.records import Rollout
from pvg.reporting.solutions import Example, example_of, verdict_word

LONGEST = 4000  # characters of a solution; the rest can be read in the shard
STEP = re.compile(r"\bstep (\d+)\b")


@dataclass(frozen=True, slots=True)
class ShownSolution:
    """A solution as the page shows it: `pieces` of its text, the number `wrong` of the marked piece (-1: none), and the
    texts before and after it."""

    example: Example
    score: str
    grade: str
    pieces: list[str]
    wrong: int
    before: list[str]
    after: list[str]


def rollout_side(rollout: Rollout, threshold: float | None, longest: int) -> ShownSolution:
    """A stored solution as a page shows it, with at most `longest` characters of each text."""
    return shown_solution(example_of(rollout, ""), threshold, longest)


def shown_solution(example: Example, threshold: float | None, longest: int = LONGEST) -> ShownSolution:
    """An example as a page shows it, with at most `longest` characters of each text."""
    score = ""
    if example.score is not None:
        score = ", ".join(filter(None, [f"score {example.score:+.3f}", verdict_word(example.score, threshold)]))
    pieces, wrong = text_pieces(example.text, example.note, longest)
    before = [] if example.solver_text is None else [f"solver: {shortened(example.solver_text, longest)}"]
    after = [f"{role}: {shortened(text, longest)}" for role, text in example.dialogue]
    return ShownSolution(example, score, _grade(example), pieces, wrong, before, after)


def _grade(example: Example) -> str:
    found = f"answer {example.answer}" if example.answer is not None else "no answer"
    verdict = "correct" if example.correct else ("wrong" if example.well_formed else "malformed")
    note = example.note.removeprefix("malformed: ")
    return f"{verdict}: {found}" + (f", {note}" if note else "")


def text_pieces(text: str, note: str, longest: int = LONGEST) -> tuple[list[str], int]:
    """The steps of a text, and the number of the step that the grader's note names: the last step if the note names
    the final answer, -1 if it names no step."""
    pieces = _pieces(text[:longest])
    match = STEP.search(note)
    last = len(pieces) - 1 if "final answer" in note and "no final" not in note else -1
    place = int(match[1]) - 1 if match else last
    wrong = place if 0 <= place < len(pieces) else -1
    rest = [shortened(text, longest)[longest:]] if len(text) > longest else []
    return [*pieces, *rest], wrong


def shortened(text: str, longest: int) -> str:
    """The first `longest` characters, and how many more there are."""
    return text if len(text) <= longest else f"{text[:longest]} … and {len(text) - longest} more characters"


def _pieces(text: str) -> list[str]:
    """The steps of a solution with their separators: lines, or parts between semicolons if there is one line."""
    if "\n" in text.strip():
        found = re.findall(r"[^\n]*\n*", text)
        return [piece for piece in found if piece]
    return [piece for piece in re.findall(r"[^;]*;?", text) if piece]
