"""The commands, settings and make targets that the pages name exist today."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from pvg.bench.workloads import find_profile, read_profile
from pvg.config.experiment import SECTION_NAMES, TABLES
from pvg.config.load import find_experiment, load_experiment, valid_keys
from pvg.config.operation import AutoCluster
from pvg.errors import PvgError
from pvg.study.plan import find_study
from pvg.workers.choice import cluster_settings
from pvg_cli.main import PLACES, app, load_command

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
# These pages show commands and settings of the commits that their figures come from.
OF_OTHER_COMMITS = {"benchmarks.md"}
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *(path for path in sorted((ROOT / "docs").rglob("*.md")) if path.name not in OF_OTHER_COMMITS),
]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
KEY = re.compile(rf"\b(?:{'|'.join(SECTION_NAMES)})(?:\.[a-z_0-9]+)+\b")
FILES = (".py", ".json", ".toml", ".md", ".log")
# Words of a page that stand for a name of the reader's own.
PLACEHOLDERS = {"EXPERIMENT", "RUN", "NAME", "KEY", "FILE.py:NAME", "my.toml", "mine.toml", "mine", "run"}


def texts(page: Path) -> tuple[list[str], str]:
    """The lines of code blocks that a reader may type, and the text outside of code blocks."""
    text = page.read_text(encoding="utf-8")
    blocks = [body for language, body in FENCED.findall(text) if language == ""]
    rest = FENCED.sub("", text)
    lines = [line for body in blocks for line in body.splitlines()]
    lines += [line.strip() for line in rest.splitlines() if line.startswith("    ")]
    return lines, rest


def commands(page: Path, program: str) -> Iterator[list[str]]:
    """The words of every call of `program`, from code blocks and from inline code."""
    lines, rest = texts(page)
    for line in [*lines, *INLINE.findall(rest)]:
        for part in re.split(r"&&|;(?= )", line):
            words = shlex.split(part.replace("...", ""), comments=True)
            while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
                words.pop(0)  # an environment variable of this call
            if words[:1] == [program]:
                yield words[1:]


def parsed(arguments: list[str]) -> tuple[str, dict[str, Any]]:
    """The command's name and its parameters, as typer reads them. Raises for a mistake; runs nothing."""
    command: Any = typer.main.get_command(app)
    name = "pvg"
    while hasattr(command, "commands"):
        if not arguments or arguments[0].startswith("-"):
            context = command.make_context(name, [*arguments], resilient_parsing=True)
            return name, context.params
        name, arguments = arguments[0], arguments[1:]
        assert name in command.commands, f"there is no command {name}"
        command = load_command(name) if name in PLACES else command.commands[name]
    if "--help" in arguments or not arguments:
        return name, {}
    return name, command.make_context(name, arguments).params


def complaint(arguments: list[str]) -> str:
    """What is wrong with a call of pvg; empty if nothing is."""
    try:
        name, given = parsed(arguments)
        overrides = [text for text in given.get("overrides") or () if not text.startswith("@") and "KEY" not in text]
        overrides = [*cluster_settings(given.get("cluster"), AutoCluster()), *overrides]
        which = next((given[key] for key in ("name", "experiment") if isinstance(given.get(key), str)), "modchain")
        if name in ("train", "rollout", "serve", "evaluate", "show", "validate", "profile"):
            gsm8k = any(text.startswith("task.path") for text in overrides)
            own = which in PLACEHOLDERS or name == "evaluate"
            load_experiment(find_experiment(("smollm2-gsm8k" if gsm8k else "modchain") if own else which), overrides)
        elif name == "bench" and given.get("profile") not in (None, *PLACEHOLDERS):
            read_profile(find_profile(given["profile"]))
        elif name == "study" and which not in PLACEHOLDERS and which != "modchain":
            find_study(which)
    except (AssertionError, PvgError, typer.BadParameter) as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - click's usage errors are of the copy of click inside typer
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page_can_be_called(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    wrong = [f"pvg {shlex.join(words)}: {found}" for words in commands(page, "pvg") if (found := complaint(words))]
    assert wrong == []


def test_mistakes_in_commands_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert "no command" in complaint(["trein"])
    assert complaint(["train", "--nothing"]) != ""
    assert "training.stepz" in complaint(["train", "-s", "training.stepz=3"])
    assert "nowhere" in complaint(["train", "nowhere"])
    assert "nowhere" in complaint(["bench", "--profile", "nowhere"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_make_target_of_a_page_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = {words[0] for words in commands(page, "make") if words and re.fullmatch(r"[a-z0-9-]+", words[0])}
    assert named - targets == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_setting_of_a_page_exists(page: Path) -> None:
    lines, rest = texts(page)
    known = {*valid_keys(), *TABLES, *SECTION_NAMES}
    tables = {key.rpartition(".")[0] for key in known}
    named = {key for code in [*lines, *INLINE.findall(rest)] for key in KEY.findall(code)}
    wrong = {key for key in named if key not in known | tables and not key.endswith(FILES)}
    assert wrong == set()
