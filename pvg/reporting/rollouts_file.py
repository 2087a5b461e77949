"""The page that contains the stored solutions of a run: a browser searches and filters them without a server.

    stored = stored_rollouts(run, summary)
    if stored.count:
        write_page(path, rollouts_file(stored, run, summary, "report.html"))

`pvg report` writes it beside a run's page, and `pvg watch` serves it. templates/rollouts.js filters and sorts.

The solutions are in script elements that a browser does not execute: JSON, compressed, as base64. The first element has
the columns that filters need. The others are blocks of texts, which the script unpacks when it shows or searches them.
A problem is in the block of its newest solution.

Invariants: the page has at most MOST_CHARACTERS, those of the newest solutions, and says how many solutions it leaves
out. A block has at most BLOCK_CHARACTERS, or one solution. Both limits count every text: problems, solutions, what a
translation was made of, turns, grades and ids. Each text has at most LONGEST characters and says how many it leaves
out. Texts of models are data in the page, and the script writes them as text, never as markup.
"""

from __future__ import annotations

import base64
import gzip
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from pvg.errors import counted
from pvg.records import Rollout
from pvg.reporting.formats import phase_label
from pvg.reporting.run_summary import RunSummary
from pvg.reporting.solutions import committed_shards, phase_of, rollout_side, shortened, threshold_of, verdict_word
from pvg.reporting.table import PageKind, TemplateMacros, elements, page, showable
from pvg.store.atomic import DamagedFileError
from pvg.store.run_directory import RunDirectory
from pvg.store.shards import RolloutShards, ShardInfo

MOST_CHARACTERS = 115_000_000  # 50,000 solutions of 2,000 characters: a page of about 50 MB
ROW_CHARACTERS = 250  # the columns of a solution, counted as so many characters of text
BLOCK_CHARACTERS = 500_000  # a browser unpacks such a block in some milliseconds
LONGEST = 100_000  # characters of one text
LEVEL = 5  # of gzip
ROWS = 50  # of one page of the list
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
VERDICTS = ("", "accepted", "refused")
NUMBERED = ("role", "grade", "verdict", "phase", "source", "problem")  # these columns are numbers of words
COLUMNS = (*NUMBERED, "round", "step", "group", "tokens", "score", "reward")
TEXTS = ("id", "text", "mark", "said", "before", "after")

markup = TemplateMacros("rollouts.html.j2")


@dataclass
class StoredRollouts:
    """Solutions, the newest first. `columns`: a value per solution; those of NUMBERED are places in `words`. `starts`:
    the first solution of each block. `blocks`: the packed texts, with the problems that are in no earlier block.
    `left_out`: older solutions that do not fit. `problems`: sentences about damaged shards."""

    columns: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in COLUMNS})
    words: dict[str, list[Any]] = field(default_factory=dict)
    starts: list[int] = field(default_factory=list)
    blocks: list[str] = field(default_factory=list)
    left_out: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.columns["role"])


def stored_rollouts(run: RunDirectory, summary: RunSummary, most: int = MOST_CHARACTERS) -> StoredRollouts:
    """The solutions of the last commit, from the newest on, until they have `most` characters."""
    infos, packer = committed_shards(run), _Packer(summary, most)
    damaged: dict[str, str] = {}
    for info, rollout in _newest_first(RolloutShards(run.path), infos, damaged):
        if not packer.add(rollout, phase_of(info)):
            break
    stored = packer.finish()
    stored.problems += damaged.values()
    stored.left_out = sum(info.rows for info in infos if info.path not in damaged) - stored.count
    return stored


def _newest_first(
    shards: RolloutShards, infos: Sequence[ShardInfo], damaged: dict[str, str]
) -> Iterator[tuple[ShardInfo, Rollout]]:
    for info in reversed(infos):
        try:
            rollouts = shards.read(info)
        except DamagedFileError as error:
            damaged[info.path] = str(error)
            continue
        for rollout in reversed(rollouts):
            yield info, rollout


class _Packer:
    """Collects solutions as columns and as blocks of texts, until they have `most` characters."""

    def __init__(self, summary: RunSummary, most: int) -> None:
        self._summary = summary
        self._room = most
        self._stored = StoredRollouts()
        self._thresholds: dict[int, float | None] = {}
        self._numbers: dict[str, dict[Any, int]] = {
            name: {word: number for number, word in enumerate(words)}
            for name, words in (("role", ROLES), ("grade", GRADES), ("verdict", VERDICTS))
        }
        self._texts: dict[str, list[Any]] = {name: [] for name in TEXTS}
        self._asked: dict[int, tuple[str, str]] = {}  # the new problems of this block
        self._characters = 0

    def add(self, rollout: Rollout, phase: str) -> bool:
        """Whether there was room for the solution."""
        if rollout.round not in self._thresholds:
            self._thresholds[rollout.round] = threshold_of(self._summary, rollout.round)
        threshold = self._thresholds[rollout.round]
        problem = (_shown(rollout.problem_id), _cut(rollout.question), _cut(rollout.reference))
        texts = _texts(rollout, threshold)
        is_new = problem not in self._numbers.get("problem", {})
        size = ROW_CHARACTERS + _characters(texts.values()) + is_new * _characters(problem)
        if size > self._room:
            return False
        self._room -= size
        row = {
            "role": rollout.role.value,
            "grade": _grade_word(rollout),
            "verdict": verdict_word(rollout.score, threshold),
            "phase": (phase, phase_label(phase)),
            "source": _shown(rollout.source),
            "problem": problem,
            "round": rollout.round,
            "step": rollout.step,
            "group": rollout.group,
            "tokens": rollout.sampled_tokens,
            "score": _rounded(rollout.score),
            "reward": _rounded(rollout.reward),
        }
        for name, value in row.items():
            self._stored.columns[name].append(self._number(name, value) if name in NUMBERED else value)
        self._add_texts(texts, size)
        if is_new:
            self._asked[self._stored.columns["problem"][-1]] = problem[1:]
        return True

    def _number(self, name: str, word: Any) -> int:
        numbers = self._numbers.setdefault(name, {})
        return numbers.setdefault(word, len(numbers))

    def _add_texts(self, texts: dict[str, Any], size: int) -> None:
        if self._characters + size > BLOCK_CHARACTERS:
            self._end_block()
        if not self._texts["id"]:
            self._stored.starts.append(self._stored.count - 1)
        for name, value in texts.items():
            self._texts[name].append(value)
        self._characters += size

    def _end_block(self) -> None:
        if self._texts["id"]:
            asked = {str(number): texts for number, texts in self._asked.items()}
            self._stored.blocks.append(_packed({**self._texts, "problems": asked}))
        self._texts, self._asked, self._characters = {name: [] for name in TEXTS}, {}, 0

    def finish(self) -> StoredRollouts:
        self._end_block()
        self._stored.words = {name: list(self._numbers.get(name, ())) for name in NUMBERED}
        self._stored.words["problem"] = [name for name, *_ in self._stored.words["problem"]]
        return self._stored


def _grade_word(rollout: Rollout) -> str:
    """The narrowest of GRADES that fits."""
    if not rollout.grade.well_formed:
        return "malformed"
    return "correct" if rollout.grade.correct else "flaw" if rollout.is_flaw else "wrong"


def _texts(rollout: Rollout, threshold: float | None) -> dict[str, Any]:
    """The values of TEXTS. `mark`: begin and end of the wrong step in `text`. 0 for none, because JSON has many."""
    side = rollout_side(rollout, threshold, LONGEST)
    pieces = [_shown(piece) for piece in side.pieces]
    begin = _utf16_length("".join(pieces[: max(0, side.wrong)]))
    return {
        "id": _shown(rollout.id),
        "text": "".join(pieces),
        "mark": [begin, begin + _utf16_length(pieces[side.wrong])] if side.wrong >= 0 else 0,
        "said": _cut(side.grade),
        "before": [_shown(text) for text in side.before] or 0,
        "after": [_shown(text) for text in side.after] or 0,
    }


def _characters(values: Iterable[Any]) -> int:
    """Of the texts, and of the texts in lists."""
    found = 0
    for value in values:
        if isinstance(value, str):
            found += len(value)
        elif isinstance(value, list):
            found += sum(len(text) for text in value if isinstance(text, str))
    return found


def _shown(text: str) -> str:
    return str(showable(text))


def _cut(text: str) -> str:
    return _shown(shortened(text, LONGEST))


def _rounded(value: float | None) -> float | None:
    """Six decimals, because random digits cannot be compressed."""
    return None if value is None else round(value, 6)


def _utf16_length(text: str) -> int:
    """The length of a text in a browser, which counts in units of 16 bits."""
    return len(text) + sum(character > "\uffff" for character in text)


def _packed(value: object) -> str:
    """JSON, compressed, as base64."""
    return base64.b64encode(gzip.compress(orjson.dumps(value), LEVEL, mtime=0)).decode()


def rollouts_file(stored: StoredRollouts, run: RunDirectory, summary: RunSummary, report: str) -> str:
    """The whole page. `report`: the file name of the run's page, which is beside it."""
    title = elements.title("All rollouts", summary.name)
    choices = {
        "role": [(role, role) for role in ROLES],
        "grade": [(grade, grade) for grade in GRADES],
        "round": [(round_, round_) for round_ in sorted(set(stored.columns["round"]))],
        "phase": stored.words["phase"],
    }
    form = markup.form(choices, ORDERS, NUMBERS)
    packed = _packed({**stored.columns, "words": stored.words, "starts": stored.starts, "page": ROWS})
    body = [elements.notes(_notes(stored, run)), markup.browser(form), markup.packed(packed, stored.blocks)]
    return page(f"{summary.name}: rollouts", [title, *body], [], rollouts_kind(report))


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
        return stored.problems
    everything = f"{stored.count + stored.left_out:,}"
    newest = (
        f"This page has the newest {counted(stored.count, 'solution')} of {everything}, so that a browser can open it."
    )
    return [f"{newest} The files in {run.argument}/rollouts have all of them.", *stored.problems]
