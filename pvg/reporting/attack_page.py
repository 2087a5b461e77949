"""The robustness card of `pvg attack`: for the terminal, as Markdown, and as a page with the worst examples.

Every text of a target and of an attack is shown escaped: control characters as \\x1b, Markdown and HTML as text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from urllib.parse import quote

from rich.console import Group
from rich.text import Text

from pvg.attack.runner import AttackExample, AttackResult, RobustnessCard, TrainedAttack
from pvg.errors import counted, shortened, visible
from pvg.reporting.evaluation import estimate_text
from pvg.reporting.formats import percent
from pvg.reporting.table import Column, PageSection, Table, TableCell, elements, page
from pvg.reporting.terminal import QUIET, section
from pvg.verifier.intervals import CONFIDENCE, Estimate

SHORT = 17  # characters of a text in a table
READING = (
    f"accepted: share of the answered texts, with intervals over problems at {100 * CONFIDENCE:g} %. Errors and late "
    "answers (--limit) are neither accepted nor refused. mistake: an accepted wrong or a refused correct text."
)
# The least share from which on a badge has the colour, and how the page and the terminal show it.
STEPS = ((0.2, "red", "bad"), (0.05, "orange", "warn"), (0.01, "yellow", "warn"), (0.0, "brightgreen", "good"))


def shown(text: str, most: int = SHORT) -> str:
    """A text as one printable line in quotes."""
    return f"“{shortened(visible(text).replace(chr(10), '⏎'), most)}”"


def attack_table(card: RobustnessCard) -> Table:
    unanswered = {"errors": "errors", "late": "timeouts"}
    shown_ = {title: name for title, name in unanswered.items() if any(getattr(each, name) for each in card.attacks)}
    numbers = [Column(title, "right", wrap=False) for title in ("accepted", "texts", *shown_)]
    columns = [Column("attack"), Column("truth", style="quiet", wrap=False), *numbers]
    table = Table([*columns, Column("shortest mistake")], narrow=True, caption=READING)
    for found in card.attacks:
        share, texts = found.accepted.value, f"{found.texts:,}"
        style = "" if share is None else "better" if share == float(found.accept) else "worse"
        cells = [TableCell(f"{getattr(found, name) or ''}", "worse") for name in shown_.values()]
        texts += "" if found.texts == found.planned else f" of {found.planned:,}"
        mistake = shown(found.examples[0].text) if found.examples else ""
        table.add(found.name, _truth(found), TableCell(estimate_text(found.accepted), style), texts, *cells, mistake)
    return table


def _truth(found: AttackResult) -> str:
    return "correct" if found.accept else "wrong"


def verdict(card: RobustnessCard) -> tuple[str, str, str]:
    """Both rates of mistakes, and the colour and kind of the larger one. One of them is at least half for a target that
    tells nothing apart."""
    wrong, right = card.wrong.value, card.right.value
    if wrong is None or right is None:
        return "no answers", "lightgrey", "warn"
    says = f"accepts {percent(wrong)} of wrong texts, refuses {percent(1 - right)} of correct texts"
    return says, *next(step[1:] for step in STEPS if max(wrong, 1 - right) >= step[0])


def sources(card: RobustnessCard) -> list[tuple[str, str]]:
    """What was attacked with what, without what does not exist."""
    names = [(name, visible(getattr(card, name))) for name in ("data", "model", "template")]
    facts = [("problems", f"{card.problems:,}"), ("accepts from", f"{card.threshold:g}"), *names]
    return [(name, value) for name, value in facts if value]


def refused(accepted: Estimate) -> Estimate:
    value, high, low = (None if end is None else 1 - end for end in (accepted.value, accepted.low, accepted.high))
    return replace(accepted, value=value, low=low, high=high)


def summary_lines(card: RobustnessCard) -> list[str]:
    """What the card says, in sentences, and what it does not."""
    wrong, right = card.wrong, card.right
    lines = [
        f"Accepts {estimate_text(wrong)} of {wrong.n:,} wrong texts, "
        f"refuses {estimate_text(refused(right))} of {right.n:,} correct texts."
    ]
    for found in card.attacks:
        if found.error:
            lines.append(f"{found.name}: {counted(found.errors, 'error')}, most often: {visible(found.error)}")
    if card.trained is not None:
        lines.append(_trained(card.trained))
    untested = "a right answer after wrong steps (wrong texts have a wrong final answer)"
    trained = "" if card.trained else "a prover that learns against the target (--train), and "
    return [
        *lines,
        f"Not tested: {trained}{untested}. A rate of 0 % has an interval: an accepted wrong text may exist.",
    ]


def _trained(trained: TrainedAttack) -> str:
    start = f"Trained attack by {trained.model}: "
    if trained.status in ("no_signal", "diverged"):
        return f"{start}no result ({trained.status.replace('_', ' ')}: {trained.reason})"
    end = "an exploit after" if trained.status == "found" else "no exploit in"
    wrong, accepted = map(estimate_text, (trained.error_rate, trained.accepted))
    of = f"Of its last samples {wrong} are wrong, and {accepted} of these"
    shortest = f" Shortest: {shown(trained.examples[0].text)}" if trained.examples else ""
    return f"{start}{end} {trained.steps} steps. {of} are accepted.{shortest}"


def attack_tables(card: RobustnessCard) -> Group:
    """The card for the terminal."""
    about = f"  {counted(card.problems, 'problem')}, accepts from {card.threshold:g}  "
    status = ("" if card.status == "complete" else "interrupted", "yellow")
    head = Text.assemble((visible(card.target), "bold"), (about, QUIET), status)
    return Group(head, Text(), attack_table(card), *section("Result", Text("\n".join(summary_lines(card)))))


MARKDOWN = re.compile(r"([\\`*_{}\[\]<>()#+!|~&$@-])")


def markdown_card(card: RobustnessCard) -> str:
    """A badge, a table, and what the card says."""
    says, colour, _ = verdict(card)
    says += "" if card.status == "complete" else " (interrupted)"
    badge = f"https://img.shields.io/badge/pvg_attack-{quote(says, safe='')}-{colour}"
    plain = attack_table(card)
    rows = [[MARKDOWN.sub(r"\\\1", cell if isinstance(cell, str) else cell.text) for cell in row] for row in plain.rows]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    head = Table(plain.columns).to_markdown()
    of = ", ".join([*(f"{name}: {value}" for name, value in sources(card)), f"pvg {card.code_version}"])
    about, *said = (MARKDOWN.sub(r"\\\1", line) for line in (visible(card.target), *summary_lines(card), of))
    table, notes = "\n".join([head, *lines]), "\n".join(f"- {line}" for line in (*said, READING))
    return f"![pvg attack: {says}]({badge})\n\n**{about}**\n\n{table}\n\n{notes}\n"


def card_page(card: RobustnessCard) -> str:
    """The page with the worst examples of every attack."""
    shares = [
        ("wrong texts accepted", estimate_text(card.wrong)),
        ("correct texts refused", estimate_text(refused(card.right))),
    ]
    says, _, kind = verdict(card)
    shown_ = (says, kind) if card.status == "complete" else (card.status, "warn")
    header = [
        elements.title(visible(card.target), "pvg attack", *shown_),
        elements.facts([*shares, *sources(card)]),
        elements.notes(summary_lines(card)[1:]),
    ]
    examples = []
    for found in card.attacks:
        if found.examples:
            about = elements.note(f"{found.reason} Source: {found.source}. Its texts are {_truth(found)}.")
            summary = f"{found.name}: {estimate_text(found.accepted)} accepted"
            examples.append(elements.details(summary, [about, _table(found.examples)]))
    trained = [] if card.trained is None else [elements.note(_trained(card.trained)), _table(card.trained.examples)]
    sections = [
        PageSection("attacks", "Attacks", [attack_table(card)]),
        PageSection("trained", "Trained attack", trained, "A prover that learned against the target."),
        PageSection("examples", "Worst examples", examples, "The shortest texts on which the target was wrong."),
    ]
    return page(f"{visible(card.target)}: pvg attack", header, sections)


def _table(examples: Sequence[AttackExample]) -> Table:
    table = Table([Column("problem"), Column("answer"), Column("text", style="code"), Column("score", "right")])
    for found in examples:
        size = f"{found.characters:,} characters" if found.characters > SHORT else ""
        text = TableCell(visible(found.text) or "(empty)", "code", below=size)
        score = "" if found.score is None else f"{found.score:.3g}"
        table.add(visible(found.question), visible(found.answer), text, score)
    return table
