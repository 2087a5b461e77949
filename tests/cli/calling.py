"""Calling `pvg`: in this process for speed, as a separate process where that is the point."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from cli.shipped_schemas import check_document
from typer.testing import CliRunner

from pvg_cli.main import app

# The console script's own call, without depending on where it is installed.
ENTRY = [sys.executable, "-c", "import sys; from pvg_cli.main import app; sys.exit(app(prog_name='pvg'))"]


@dataclass(frozen=True)
class Called:
    arguments: tuple[str, ...]
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The one JSON document on stdout: anything more or less does not parse. It follows its shipped schema."""
        document = orjson.loads(self.out)
        check_document(self.arguments, document)
        return document


# A game on the embedded models that is as small as it gets.
SMALL = [
    word
    for setting in (
        "game.rounds=1",
        "game.mint_problems=24",
        "game.mint_samples=8",
        "verifier.steps=2",
        "verifier.pairs=4",
        "verifier.held_out=0.3",
        "training.steps=1",
        "training.groups=2",
        "game.test.problems=4",
        "game.test.samples=1",
        "models.threads=1",
    )
    for word in ("-s", setting)
]

LOADING = "loading torch and transformers ...\n"


def pvg(*arguments: str) -> Called:
    """`err` is without LOADING, which a process prints once, so perhaps in another test."""
    result = CliRunner().invoke(app, list(arguments), prog_name="pvg")
    return Called(arguments, result.exit_code, result.stdout, result.stderr.replace(LOADING, ""))


def pvg_process(*arguments: str, **options: Any) -> Called:
    done = subprocess.run([*ENTRY, *arguments], capture_output=True, text=True, check=False, timeout=600, **options)
    return Called(arguments, done.returncode, done.stdout, done.stderr)


@contextlib.contextmanager
def pvg_serving(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """The process of a command that serves until it is stopped, which the end of the block kills, and the document that
    it has printed."""
    pipe = subprocess.PIPE
    process = subprocess.Popen([*ENTRY, *arguments], stdout=pipe, stderr=pipe, text=True, process_group=0)
    try:
        assert process.stdout is not None
        text = ""
        while not text.endswith("\n}\n") and (line := process.stdout.readline()):
            text += line
        assert text, process.stderr.read() if process.stderr else ""
        yield process, Called(arguments, 0, text, "").document
    finally:
        process.kill()
        process.communicate()


def fill(writer: int) -> None:
    """Make a pipe or a socket one that does not block, and fill it."""
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x")


# Runs `pvg` with `act()` at the moment when it imports a module: at the same place on a fast and on a busy machine.
AT_IMPORT = """
import os, signal, sys, time
class Finder:
    def find_spec(self, name, *_):
        if name == {module!r}:
            {act}
sys.meta_path.insert(0, Finder())
sys.argv = ["pvg", *{arguments!r}]
from pvg_cli.main import app
sys.exit(app(prog_name="pvg"))
"""


def at_import(module: str, act: str, arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-c", AT_IMPORT.format(module=module, act=act, arguments=list(arguments))]


class Clock:
    """A clock of a display that stands still until a test moves it."""

    now = 0.0

    def __call__(self) -> float:
        return self.now
