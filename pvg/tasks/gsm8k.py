"""The GSM8K task: grade-school word problems in the published form, a `DataTask` with numbers as answers.

    {"question": "Natalia sold ...", "answer": "Natalia sold 48/2 = <<48/2=24>>24 clips ...\\n#### 72"}

Invariant: an id depends only on the split and the question (`gsm8k-train-1a2b3c4d`), so it does not change if rows are
reordered, added, or left out by `limit`.
"""

from __future__ import annotations

from collections import Counter

from pvg.config.task import DataTask, Gsm8kTask
from pvg.errors import MissingRequirementError
from pvg.records import Problem, Split
from pvg.tasks.data import ID_DIGITS, Data, DataRow, digest_of
from pvg.tasks.task import NUMBER

SHORT_ID = 8  # hex digits of an id, unless short digests of a file's questions collide
REMEDY = (
    "Set it with -s task.path=hf:openai/gsm8k, or task.path=DIRECTORY. The directory needs train and test in the "
    "published form, as .jsonl or .parquet."
)


class Gsm8k(Data):
    """The GSM8K task of one section. Its problems have the published `solution` in their metadata."""

    def __init__(self, section: Gsm8kTask) -> None:
        """Raises MissingRequirementError if `task.path` is not set or a file is missing, and errors of
        pvg.hub.fetch."""
        if section.path is None:
            raise MissingRequirementError("gsm8k needs its data, but task.path is not set.", REMEDY)
        super().__init__(DataTask(path=section.path, limit=section.limit, grader="number"))
        if not self._test:
            raise MissingRequirementError(f"There is no file {self._place / 'test'}.jsonl or test.parquet.", REMEDY)
        self._max_steps = section.max_steps

    def _problems(self, split: Split, rows: dict[str, DataRow]) -> list[Problem]:
        """Those with at most `max_steps` calculations."""
        short = Counter(digest_of(question)[:SHORT_ID] for question in rows)
        found = []
        for question, row in rows.items():
            if self._max_steps is not None and calculations(row.written) > self._max_steps:
                continue
            digest = digest_of(question)
            id_ = f"gsm8k-{split}-{digest[: SHORT_ID if short[digest[:SHORT_ID]] == 1 else ID_DIGITS]}"
            found.append(Problem(id_, question, row.answer, {"solution": row.written, "wording": NUMBER}))
        return found


def calculations(solution: str) -> int:
    """The number of calculations in a published solution: its `<<...>>` annotations or its lines, whichever are more,
    because not every calculation is annotated."""
    lines = [line for line in solution.splitlines() if line.strip() and not line.startswith("####")]
    return max(len(lines), solution.count("<<"), 1)
