"""Digests of a task's problems, to compare two processes: a run continues in another process than it began in.

    python -m pvg.tasks.identity < task.json      # prints {"train": DIGEST, "test": DIGEST}

A set of texts, for example, has another order in each process.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import orjson

from pvg.config.sections import AllSections
from pvg.config.task import TaskSection
from pvg.errors import ConfigurationError, PvgError, shortened
from pvg.records import Problem
from pvg.tasks import open_task


def digest_of(problems: Iterable[Problem]) -> str:
    """A digest of ids, questions and answers, in their order."""
    digest = hashlib.sha256()
    for problem in problems:
        parts = (problem.id, problem.question, problem.answer)
        digest.update(orjson.dumps([part.encode("utf-8", "surrogatepass").hex() for part in parts]))
    return digest.hexdigest()


def digests_elsewhere(section: TaskSection) -> dict[str, str]:
    """Split -> digest of its problems in a new process. Raises ConfigurationError if that process fails."""
    data = orjson.dumps(section.model_dump(mode="json", exclude_none=True))
    done = subprocess.run([sys.executable, "-m", "pvg.tasks.identity"], input=data, capture_output=True, check=False)
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise ConfigurationError(f"The task does not open in another process: {shortened(last)}")
    found: dict[str, str] = orjson.loads(done.stdout)
    return found


def _print_digests(data: Any) -> None:
    task = open_task(AllSections.model_validate({"task": data}).task)
    with task if isinstance(task, AbstractContextManager) else nullcontext():
        print(
            orjson.dumps(
                {"train": digest_of(task.problems("train")), "test": digest_of(task.problems("test"))}
            ).decode()
        )


if __name__ == "__main__":
    try:
        _print_digests(orjson.loads(sys.stdin.buffer.read()))
    except PvgError as error:
        print(error.message, file=sys.stderr)
        sys.exit(error.exit_code)
