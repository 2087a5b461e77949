"""docs/environments.md: its Python examples run, and say what the page says."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "servers"))
from environment_servers import served

from pvg.config.task import OpenEnvTask
from pvg.games.negotiation import Negotiation
from pvg.servers.environments import GameEnvironment

PAGE = (Path(__file__).parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")
OF_TEXTARENA, OF_OPENENV, OF_CLIENT = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
URL = OpenEnvTask().url


def test_the_game_of_textarena(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("textarena")
    exec(OF_TEXTARENA, {})
    printed = capsys.readouterr().out
    assert "3 | O | 5" in printed
    assert printed.splitlines()[-1] == OF_TEXTARENA.rpartition("# ")[2].strip()


@pytest.mark.parametrize(
    ("package", "example", "printed"),
    [
        ("openenv", OF_OPENENV, "{'buyer': 1.8, 'seller': 1.8}\n"),
        ("pvg", OF_CLIENT, "{'buyer': 1.8, 'seller': 1.8} 7+0?\n"),
    ],
)
def test_a_client(package: str, example: str, printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(package)
    assert URL in example
    with served(GameEnvironment("negotiation", Negotiation())) as server:
        exec(example.replace(URL, server.url), {})
    assert capsys.readouterr().out == printed
