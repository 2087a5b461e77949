"""What the players wrote, both roles side by side, and what verifier and grader said."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pvg.reporting.examples import Example, Pairing
from pvg.reporting.page.document import Section, details
from pvg.reporting.page.markup import Html, div, join, span, tag

LONGEST = 4000  # characters of a solution; the rest can be read in the shard
STEP = re.compile(r"\bstep (\d+)\b")


def solutions_section(pairings: Sequence[Pairing], thresholds: dict[int, float]) -> Section:
    """The newest round open, the earlier ones folded."""
    if not pairings:
        return Section("solutions", "Solutions", [])
    newest = max(pairing.round for pairing in pairings)
    body: list[Html | None] = [_pair(pairing, thresholds) for pairing in pairings if pairing.round == newest]
    for round_ in sorted({pairing.round for pairing in pairings} - {newest}, reverse=True):
        body.append(details(f"Round {round_}", *(_pair(p, thresholds) for p in pairings if p.round == round_)))
    lead = f"Round {newest}: the flaws its verifier believed most, each beside a helpful solution of the same problem."
    return Section("solutions", "Solutions", body, lead)


def _pair(pairing: Pairing, thresholds: dict[int, float]) -> Html:
    head = div(
        "question",
        span("quiet", "problem "),
        tag("span", pairing.question, class_="given"),
        span("quiet", " answer "),
        tag("span", pairing.reference, class_="given"),
    )
    threshold = thresholds.get(pairing.round)
    sides = [_solution(side, threshold) for side in (pairing.helpful, pairing.sneaky) if side is not None]
    return tag("article", head, div("sides", *sides), class_="pairing")


def _solution(example: Example, threshold: float | None) -> Html:
    score = None
    if example.score is not None:
        verdict = "" if threshold is None else (", accepted" if example.score >= threshold else ", refused")
        score = span("score", f"score {example.score:+.3f}{verdict}")
    right = span("grade right" if example.correct else "grade wrong", _grade(example))
    return div(
        f"solution {example.role}",
        div("who", span("role", example.role), score),
        *(
            []
            if example.solver_text is None
            else [tag("pre", f"solver: {example.solver_text[:LONGEST]}", class_="quiet")]
        ),
        tag("pre", marked(example.text, example.note)),
        *(tag("pre", f"{who}: {said[:LONGEST]}", class_="quiet") for who, said in example.dialogue),
        div("said", right, span("quiet id", example.id)),
    )


def _grade(example: Example) -> str:
    found = f"answer {example.answer}" if example.answer is not None else "no answer"
    verdict = "correct" if example.correct else ("wrong" if example.well_formed else "malformed")
    note = example.note.removeprefix("malformed: ")
    return f"{verdict}: {found}" + (f", {note}" if note else "")


def marked(text: str, note: str) -> Html:
    """The text with the step marked that the grader's note names, or the end where it names the final answer."""
    cut = text[:LONGEST]
    rest = f" … and {len(text) - LONGEST} more characters" if len(text) > LONGEST else ""
    pieces = _pieces(cut)
    match = STEP.search(note)
    place = (
        int(match[1]) - 1 if match else (len(pieces) - 1 if "final answer" in note and "no final" not in note else -1)
    )
    if not 0 <= place < len(pieces):
        return join([cut, rest])
    return join([*pieces[:place], tag("mark", pieces[place], title=note), *pieces[place + 1 :], rest])


def _pieces(text: str) -> list[str]:
    """The steps of a solution with what separates them: its lines, or where it has one line, what semicolons divide."""
    if "\n" in text.strip():
        found = re.findall(r"[^\n]*\n*", text)
        return [piece for piece in found if piece]
    return [piece for piece in re.findall(r"[^;]*;?", text) if piece]
