"""tests/slow_tests.txt: which tests `make check` leaves out."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_line_names_a_test() -> None:
    """A test that got another name would be in `make check` again, whatever it takes."""
    wrong = []
    for line in (ROOT / "tests" / "slow_tests.txt").read_text().splitlines():
        file, _, function = line.split()[0].partition("::")
        text = (ROOT / file).read_text() if (ROOT / file).is_file() else ""
        if not re.search(rf"^(async )?def {re.escape(function)}\(" if function else ".", text, re.MULTILINE):
            wrong.append(line)
    assert wrong == []
