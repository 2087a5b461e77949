"""The page that contains the stored solutions of a run: a browser searches and filters them without a server.

    stored = stored_rollouts(run, summary)
    if stored.count:
        write_page(path, rollouts_file(stored, run, summary, "report.html"))

`pvg report` writes it beside a run's page, and `pvg watch` serves it. templates/rollouts.js filters and sorts.

The solutions are in a script element that a browser does not execute: JSON, compressed, as base64.

Invariants: the page has at most MOST_CHARACTERS of JSON, those of the newest solutions, and says how many solutions it
leaves out. Each text has at most LONGEST characters and says how many it leaves out. Texts of models are data in the
page, and the script writes them as text, never as markup.
"""

from __future__ import annotations

import base64
import gzip
from dataclasses import dataclass, field

import orjson

from pvg.errors import counted
from pvg.records import Rollout
from pvg.reporting.formats import phase_label
from pvg.reporting.run_summary import RunSummary
from pvg.reporting.solutions import committed_shards, phase_of, rollout_side, shortened, threshold_of, verdict_word
from pvg.reporting.table import PageKind, TemplateMacros, elements, page, showable
from pvg.store.atomic import DamagedFileError
from pvg.store.run_directory import RunDirectory
from pvg.store.shards import RolloutShards

MOST_CHARACTERS = 60_000_000  # 25,000 solutions of 2,000 characters; a browser unpacks them in about a second
LONGEST = 100_000  # characters of one text
LEVEL = 5  # of gzip
PAGE = 50  # solutions of one page of the list
ROLES = ("helpful", "sneaky")
# "flaw": a wrong sneaky solution that is well formed (and proven, if its task requires that).
GRADES = ("correct", "wrong", "malformed", "flaw")
ORDERS = {
    "newest": "newest",
    "oldest": "oldest",
    "highest": "highest score",
    "lowest": "lowest score",
    "longest": "longest",
    "shortest": "shortest",
}
# The fields of the form that are numbers. All ranges include their ends.
NUMBERS = {"first_step": "step from", "last_step": "step to", "lowest": "score from", "highest": "score to"}
markup = TemplateMacros("rollouts.html.j2")


@dataclass
class StoredRollouts:
    """Solutions, the newest first. `rows`: each as JSON. `problems`: (id, question, reference), to which the rows refer
    by number. `left_out`: older solutions that do not fit. `notes`: sentences about damaged shards."""

    rows: list[bytes] = field(default_factory=list)
    problems: dict[tuple[str, str, str], int] = field(default_factory=dict)
    rounds: set[int] = field(default_factory=set)
    phases: dict[str, str] = field(default_factory=dict)
    left_out: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.rows)


def stored_rollouts(run: RunDirectory, summary: RunSummary, most: int = MOST_CHARACTERS) -> StoredRollouts:
    """The solutions of the last commit, from the newest on, until they have `most` characters."""
    stored, shards, room = StoredRollouts(), RolloutShards(run.path), most
    for info in reversed(committed_shards(run)):
        if room <= 0:
            stored.left_out += info.rows
            continue
        try:
            rollouts = shards.read(info)
        except DamagedFileError as error:
            stored.notes.append(str(error))
            continue
        for rollout in reversed(rollouts):
            row = _row(stored, rollout, phase_of(info), threshold_of(summary, rollout.round))
            room -= len(row)
            if room > 0:
                stored.rows.append(row)
            else:
                stored.left_out += 1
    return stored


def _row(stored: StoredRollouts, rollout: Rollout, phase: str, threshold: float | None) -> bytes:
    """`text`: what comes before the wrong step, the wrong step, and what follows it."""
    side = rollout_side(rollout, threshold, LONGEST)
    wrong = side.wrong if side.wrong >= 0 else len(side.pieces)
    pieces = (side.pieces[:wrong], side.pieces[wrong : wrong + 1], side.pieces[wrong + 1 :])
    question, reference = (_shown(shortened(text, LONGEST)) for text in (rollout.question, rollout.reference))
    problem = (_shown(rollout.problem_id), question, reference)
    stored.rounds.add(rollout.round)
    stored.phases[phase] = phase_label(phase)
    return orjson.dumps(
        {
            "problem": stored.problems.setdefault(problem, len(stored.problems)),
            "role": rollout.role.value,
            "grade": _grade_word(rollout),
            "verdict": verdict_word(rollout.score, threshold),
            "phase": phase,
            "label": phase_label(phase),
            "round": rollout.round,
            "step": rollout.step,
            "tokens": rollout.sampled_tokens,
            "score": None if rollout.score is None else round(rollout.score, 6),
            "reward": None if rollout.reward is None else round(rollout.reward, 6),
            "id": _shown(rollout.id),
            "text": [_shown("".join(part)) for part in pieces],
            "said": _shown(shortened(side.grade, LONGEST)),
            "before": [_shown(text) for text in side.before],
            "after": [_shown(text) for text in side.after],
        }
    )


def _grade_word(rollout: Rollout) -> str:
    """The narrowest of GRADES that fits."""
    if not rollout.grade.well_formed:
        return "malformed"
    return "correct" if rollout.grade.correct else "flaw" if rollout.is_flaw else "wrong"


def _shown(text: str) -> str:
    return str(showable(text))


def rollouts_file(stored: StoredRollouts, run: RunDirectory, summary: RunSummary, report: str) -> str:
    """The whole page. `report`: the file name of the run's page, which is beside it."""
    title = elements.title("All rollouts", summary.name)
    choices = {
        "role": [(role, role) for role in ROLES],
        "grade": [(grade, grade) for grade in GRADES],
        "round": [(round_, round_) for round_ in sorted(stored.rounds)],
        "phase": list(stored.phases.items()),
    }
    form = markup.form(choices, ORDERS, NUMBERS)
    body = [elements.notes(_notes(stored, run)), markup.browser(form), markup.packed(_packed(stored))]
    return page(f"{summary.name}: rollouts", [title, *body], [], rollouts_kind(report))


def _packed(stored: StoredRollouts) -> str:
    """All solutions as JSON, compressed, as base64."""
    head = orjson.dumps({"page": PAGE, "problems": list(stored.problems)})
    found = head[:-1] + b',"rows":[' + b",".join(stored.rows) + b"]}"
    return base64.b64encode(gzip.compress(found, LEVEL, mtime=0)).decode()


def rollouts_kind(report: str) -> PageKind:
    """What the page may do. `report`: the address of the run's page."""
    return PageKind(
        scripts=("page.js", "rollouts.js"),
        policy="form-action 'none'; base-uri 'none'",
        sheets=("rollouts.css",),
        links=((report, "Report"),),
    )


def _notes(stored: StoredRollouts, run: RunDirectory) -> list[str]:
    if not stored.left_out:
        return stored.notes
    everything = f"{stored.count + stored.left_out:,}"
    newest = (
        f"This page has the newest {counted(stored.count, 'solution')} of {everything}, so that a browser can open it."
    )
    return [f"{newest} The files in {run.argument}/rollouts have all of them.", *stored.notes]
