"""Log lines to events, one at a time: `[tag] t=SECONDS event=NAME key=value ...` (pvg.telemetry.events).

    with open_log("events.log.gz") as log:
        for event in EventReader(log):
            event.tag, event.name, event.number("wall_ms")

A tag may stand behind another program's prefix, and in old logs the name of the event is a bare word. Nothing in a log
is fatal: what cannot be read is counted, with an example.

Invariant: memory does not depend on the log, nor on the length of a line.
"""

from __future__ import annotations

import gzip
import math
import re
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, cast

from pvg.errors import UsageError
from pvg.inputs import open_input

TAGS = ("weights", "ckpt", "gen", "rollout", "step", "loop", "phase", "alert", "run")
STDIN = "-"
LONGEST_LINE = 65_536  # bytes: our lines have some hundred; more is another file's content
SHOWN_TEXT = 240  # characters of a line that are kept as evidence: an event line fits
ROUNDING = 0.1  # milliseconds
GZIP_MAGIC = b"\x1f\x8b"

_TAG = re.compile(rf"\[({'|'.join(TAGS)})\](?=\s|$)")
_FIELD = re.compile(r'([A-Za-z_][\w.-]*)=("[^"]*"|\S*)')
_WORD = re.compile(r"\s*([A-Za-z_][\w.-]*)(?=\s|$)")


class MalformedLineError(ValueError):
    """A line with a tag of ours that says something impossible. Never leaves this package."""


@dataclass(frozen=True, slots=True)
class Event:
    """One line. `t` is in seconds of the writer's monotonic clock; `line` counts from 1."""

    tag: str
    name: str
    t: float
    fields: dict[str, str]
    text: str
    source: int
    line: int

    def number(self, key: str) -> float | None:
        """The value of `key`; None where it is absent. Raises MalformedLineError unless it is finite and not negative:
        all numbers of these lines are durations or counts. (The difference of two measured times may come out a hair
        below zero.)"""
        return _number(self.fields, key)


@dataclass(slots=True)
class LineCounts:
    """What was in the logs: events, lines of others, lines that cannot be read (why, where, and the first of them)."""

    read: int = 0
    events: int = 0
    other: int = 0
    malformed: int = 0
    example: str = ""
    cut_short: list[str] = field(default_factory=list)  # compressed logs that end in the middle

    def reject(self, where: str, reason: str, text: str) -> None:
        self.malformed += 1
        self.example = self.example or f"{where}: {reason}: {text}".rstrip(": ")


def parse_line(text: str, source: int, line: int) -> Event | None:
    """The event of one line; None where it has no tag of ours. Raises MalformedLineError."""
    found = _TAG.search(text)
    if found is None:
        return None
    rest = text[found.end() :]
    fields: dict[str, str] = dict(_FIELD.findall(rest))
    if '"' in rest:
        fields = {key: value.strip('"') for key, value in fields.items()}
    word = _WORD.match(rest)
    name = fields.get("event") or (word[1] if word else "")
    t = _number(fields, "t")
    if t is None:
        raise MalformedLineError("it has no time (t=)")
    return Event(found[1], name, t, fields, text[found.start() :][:SHOWN_TEXT], source, line)


def _number(fields: dict[str, str], key: str) -> float | None:
    text = fields.get(key)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        raise MalformedLineError(f"{key} is no number") from None
    if not -ROUNDING < value < math.inf:
        raise MalformedLineError(f"{key} is out of range")
    return max(value, 0.0)


class EventReader:
    """Iterates over the events of one open log and counts the rest. `source` is its number among several logs."""

    def __init__(self, file: BinaryIO, name: str, counts: LineCounts, source: int = 0) -> None:
        self._file = file
        self._name = name
        self._counts = counts
        self._source = source

    def __iter__(self) -> Iterator[Event]:
        counts = self._counts
        for number, raw in enumerate(self._lines(), start=1):
            counts.read += 1
            if raw is None:
                self._reject(number, f"longer than {LONGEST_LINE} bytes", "")
                continue
            text = raw.decode("utf-8", "replace").strip("\r\n")
            binary = "\ufffd" in text or "\0" in text
            text = printable(text)
            if binary:
                self._reject(number, "binary", text[:SHOWN_TEXT])
                continue
            try:
                event = parse_line(text, self._source, number)
            except MalformedLineError as error:
                self._reject(number, str(error), text[:SHOWN_TEXT])
                continue
            if event is None:
                counts.other += bool(text.strip())
            else:
                counts.events += 1
                yield event

    def _reject(self, number: int, reason: str, text: str) -> None:
        self._counts.reject(f"{self._name}:{number}", reason, text)

    def _lines(self) -> Iterator[bytes | None]:
        """Line by line; None for one that is too long. A compressed file that was cut off ends where it breaks."""
        try:
            while raw := self._file.readline(LONGEST_LINE):
                if len(raw) < LONGEST_LINE or raw.endswith(b"\n"):
                    yield raw
                    continue
                while (more := self._file.readline(LONGEST_LINE)) and not more.endswith(b"\n"):
                    pass
                yield None
        except (EOFError, gzip.BadGzipFile, zlib.error):
            self._counts.cut_short.append(self._name)


def printable(text: str) -> str:
    """Without control characters: a log must not move the reader's cursor."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else "\u00b7" for character in text.replace("\t", " "))


@contextmanager
def open_log(path: str | Path) -> Iterator[BinaryIO]:
    """The bytes of a log, uncompressed; "-" is standard input. Raises UsageError when it cannot be read."""
    if str(path) == STDIN:
        yield _uncompressed(cast(BinaryIO, sys.stdin.buffer))
        return
    try:
        file = open_input(path)
    except OSError as error:
        raise UsageError(f"The log {path} cannot be read: {error.strerror}.", "Give a run, a log file, or -.") from None
    with file:
        yield _uncompressed(file)


def _uncompressed(file: BinaryIO) -> BinaryIO:
    """By its first bytes, whatever its name."""
    start = file.peek(len(GZIP_MAGIC))[: len(GZIP_MAGIC)]  # type: ignore[attr-defined]
    return cast(BinaryIO, gzip.GzipFile(fileobj=file)) if start == GZIP_MAGIC else file
