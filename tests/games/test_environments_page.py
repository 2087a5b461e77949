"""docs/environments.md: its Python example runs, and says what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")
(OF_TEXTARENA,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_game_of_textarena(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("textarena", reason="`make install`")
    exec(OF_TEXTARENA, {})
    printed = capsys.readouterr().out
    assert "3 | O | 5" in printed
    assert printed.splitlines()[-1] == OF_TEXTARENA.rpartition("# ")[2].strip()
