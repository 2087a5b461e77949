"""docs/research.md: its examples are the files of examples/, and a game is played with each of them."""

from __future__ import annotations

import asyncio
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from game.kill_drill import small_experiment

from pvg.config.load import assign, build_experiment, parse_override
from pvg.extensions import check_references
from pvg.game.run import play
from pvg.store.run_directory import RunDirectory
from pvg.telemetry.events import SilentObserver

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "research.md").read_text()
PROGRAMS = ("game_in_one_file.py", "hack_alarm.py")  # tests/test_example_programs.py runs them
BLOCKS = dict(re.findall(r"```python\n# (examples/\w+\.py)\n(.*?)```", PAGE, flags=re.DOTALL))
# Whatever the page tells to set: the TOML block of the task, and the settings of each command.
TOML_BLOCKS = [tomllib.loads(block) for block in re.findall(r"```toml\n(.*?)```", PAGE, flags=re.DOTALL)]
COMMANDS = [re.findall(r"-s (\S+)", line) for line in re.findall(r"^pvg train (.*)$", PAGE, flags=re.MULTILINE)]


def test_the_page_has_every_example_and_shows_it_as_it_is() -> None:
    paths = [path for path in (ROOT / "examples").glob("*.py") if path.name not in PROGRAMS]
    files = {f"examples/{path.name}": path.read_text() for path in paths}
    linked = {f"examples/{name}" for name in re.findall(r"\]\(\.\./examples/(\w+\.py)\)", PAGE)}
    assert {*BLOCKS, *linked} == {*files}
    assert {name: files[name] for name in BLOCKS} == BLOCKS
    shown = str(TOML_BLOCKS) + str(COMMANDS)
    assert [name for name in files if name not in shown] == [], "an example that no game is played with"


@pytest.mark.drill
@pytest.mark.parametrize("settings", [*TOML_BLOCKS, *COMMANDS], ids=str)
def test_a_game_is_played_with_it(settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    data = small_experiment().plain()
    if isinstance(settings, dict):
        data |= settings
        if settings["task"]["kind"] == "custom":  # the drill's own prover has seen chains of three only
            data["models"]["prover"]["source"] = "embedded:modchain-prover"
            data["rollout"]["max_tokens"] = 48
    else:
        for setting in settings:
            assign(data, *parse_override(setting))
    data["game"]["rounds"] = 1
    experiment = build_experiment(data)
    check_references(experiment.own_code())
    run = RunDirectory.create(tmp_path, "example", experiment)
    with run.lock():
        outcome = asyncio.run(play(experiment, run, observer=SilentObserver(), stop=asyncio.Event(), resume=False))
    assert outcome.status == "complete"
    assert len(outcome.rounds) == experiment.game.rounds
    examples = [path.read_text() for path in (ROOT / "examples").glob("*.py")]
    assert next(path.read_text() for path in run.code.iterdir()) in examples
