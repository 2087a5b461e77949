"""The robustness card of `pvg attack`: for the terminal, as Markdown, and as a page with the worst examples.

Every text of a target and of an attack is shown escaped: control characters as \\x1b, Markdown and HTML as text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import quote

from rich.console import Group
from rich.text import Text

from pvg.attack.runner import AttackExample, AttackResult, RobustnessCard, TrainedAttack
from pvg.errors import counted, shortened, visible
from pvg.reporting.formats import ABSENT
from pvg.reporting.table import Column, PageSection, Table, TableCell, elements, page
from pvg.reporting.terminal import QUIET, section
from pvg.verifier.intervals import CONFIDENCE, Estimate

SHORT = 26  # characters of a text in a table
READING = (
    f"accepted: share of the answered texts, with intervals over problems at {100 * CONFIDENCE:g} %. Errors and late "
    "answers (--limit) are neither accepted nor refused. mistake: an accepted wrong or a refused correct text."
)


def percent_of(share: Estimate | None) -> str:
    """`12.5 % [3.1,20]`."""
    if share is None or share.value is None:
        return ABSENT
    ends = [f"{100 * end:.{int(end < 0.1)}f}" for end in (share.low, share.high) if end is not None]
    return f"{100 * share.value:.1f} %" + (f" [{','.join(ends)}]" if ends else "")


def shown(text: str, most: int = SHORT) -> str:
    """A text as one printable line in quotes."""
    return f"“{shortened(visible(text).replace(chr(10), '⏎'), most)}”"


def attack_table(card: RobustnessCard) -> Table:
    unanswered = {"errors": "errors", "late": "timeouts"}
    shown_ = {title: name for title, name in unanswered.items() if any(getattr(each, name) for each in card.attacks)}
    numbers = [Column(title, "right", wrap=False) for title in ("accepted", "texts", *shown_)]
    columns = [Column("attack", wrap=False), Column("truth", style="quiet", wrap=False), *numbers]
    table = Table([*columns, Column("shortest mistake", wrap=False)], narrow=True, caption=READING)
    for found in card.attacks:
        share, texts = found.accepted.value, f"{found.texts:,}"
        style = "" if share is None else "better" if share == float(found.accept) else "worse"
        cells = [TableCell(f"{getattr(found, name) or ''}", "worse") for name in shown_.values()]
        texts += "" if found.texts == found.planned else f" of {found.planned:,}"
        mistake = shown(found.examples[0].text) if found.examples else ""
        table.add(found.name, _truth(found), TableCell(percent_of(found.accepted), style), texts, *cells, mistake)
    return table


def _truth(found: AttackResult) -> str:
    return "correct" if found.accept else "wrong"


def summary_lines(card: RobustnessCard) -> list[str]:
    """What the card says, in sentences."""
    wrong, right = card.wrong, card.right
    lines = [
        f"Accepted: {percent_of(wrong)} of {wrong.n:,} wrong texts, {percent_of(right)} of {right.n:,} correct ones."
    ]
    for found in card.attacks:
        if found.error:
            lines.append(f"{found.name}: {counted(found.errors, 'error')}, most often: {visible(found.error)}")
    return lines if card.trained is None else [*lines, _trained(card.trained)]


def _trained(trained: TrainedAttack) -> str:
    start = f"Trained attack by {trained.model}: "
    if trained.status in ("no_signal", "diverged"):
        return f"{start}no result ({trained.status.replace('_', ' ')}: {trained.reason})"
    end = "an exploit after" if trained.status == "found" else "no exploit in"
    of = f"Of its last samples {percent_of(trained.error_rate)} are wrong, and {percent_of(trained.accepted)} of these"
    shortest = f" Shortest: {shown(trained.examples[0].text)}" if trained.examples else ""
    return f"{start}{end} {trained.steps} steps. {of} are accepted.{shortest}"


def attack_tables(card: RobustnessCard) -> Group:
    """The card for the terminal."""
    about = f"  {counted(card.problems, 'problem')}, accepts from {card.threshold:g}  "
    status = (card.status, "green" if card.status == "complete" else "yellow")
    head = Text.assemble((visible(card.target), "bold"), (about, QUIET), status)
    return Group(head, Text(), attack_table(card), *section("Result", Text("\n".join(summary_lines(card)))))


MARKDOWN = re.compile(r"([\\`*_{}\[\]<>()#+!|~&$@-])")


def markdown_card(card: RobustnessCard) -> str:
    """A badge, a table, and what the card says."""
    share = card.wrong.value
    says = "unknown share" if share is None else f"{100 * share:.1f} %"
    colour = "lightgrey" if share is None else "brightgreen" if share < 0.01 else "orange"
    badge = f"https://img.shields.io/badge/pvg_attack-{quote(says + ' of wrong texts accepted', safe='')}-{colour}"
    plain = attack_table(card)
    rows = [[MARKDOWN.sub(r"\\\1", cell if isinstance(cell, str) else cell.text) for cell in row] for row in plain.rows]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    head = Table(plain.columns).to_markdown()
    about, *said = (MARKDOWN.sub(r"\\\1", line) for line in (visible(card.target), *summary_lines(card)))
    table, notes = "\n".join([head, *lines]), "\n".join(f"- {line}" for line in (*said, READING))
    return f"![pvg attack: {says} of wrong texts accepted]({badge})\n\n**{about}**\n\n{table}\n\n{notes}\n"


def card_page(card: RobustnessCard) -> str:
    """The page with the worst examples of every attack."""
    shares = [("wrong texts accepted", percent_of(card.wrong)), ("correct texts accepted", percent_of(card.right))]
    kind = "good" if card.status == "complete" else "warn"
    header = [
        elements.title(visible(card.target), "pvg attack", card.status, kind),
        elements.facts([*shares, ("problems", f"{card.problems:,}"), ("accepts from", f"{card.threshold:g}")]),
        elements.notes(summary_lines(card)[1:]),
    ]
    examples = [
        elements.details(
            f"{found.name}: {percent_of(found.accepted)} accepted", [_about(found), _table(found.examples)]
        )
        for found in card.attacks
    ]
    trained = [] if card.trained is None else [elements.note(_trained(card.trained)), _table(card.trained.examples)]
    sections = [
        PageSection("attacks", "Attacks", [attack_table(card)]),
        PageSection("trained", "Trained attack", trained, "A prover that learned against the target."),
        PageSection("examples", "Worst examples", examples, "The shortest texts on which the target was wrong."),
    ]
    return page(f"{visible(card.target)}: pvg attack", header, sections)


def _about(found: AttackResult) -> object:
    return elements.note(f"{found.reason} Source: {found.source}. Its texts are {_truth(found)}.")


def _table(examples: Sequence[AttackExample]) -> Table:
    table = Table([Column("problem"), Column("answer"), Column("text", style="code"), Column("score", "right")])
    for found in examples:
        size = f"{found.characters:,} characters" if found.characters > SHORT else ""
        text = TableCell(visible(found.text) or "(empty)", "code", below=size)
        score = "" if found.score is None else f"{found.score:.3g}"
        table.add(visible(found.question), visible(found.answer), text, score)
    return table
