"""`WeightLabel`: which weights a server has, as a string that vLLM reports with the tokens sampled from them.

A label is `SESSION/VERSION`. A session is one process that publishes; its versions only go up. Of two sessions the one
that began later wins: a trainer that was believed dead cannot overwrite the weights of the one that took its place.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass

SEPARATOR = "/"
BROKEN = "broken:"  # before the label of weights that arrived in part (protocol 1)


@dataclass(frozen=True, slots=True)
class PublishingSession:
    """A process that publishes weights: when it began, in nanoseconds since 1970, and a random tail."""

    began_ns: int
    tail: str

    @classmethod
    def begin(cls) -> PublishingSession:
        return cls(time.time_ns(), secrets.token_hex(4))

    def __str__(self) -> str:
        return f"{self.began_ns:x}-{self.tail}"


@dataclass(frozen=True, slots=True)
class WeightLabel:
    """`version` of the weights that `session` published, from 0."""

    session: PublishingSession
    version: int

    def __str__(self) -> str:
        return f"{self.session}{SEPARATOR}{self.version}"

    @classmethod
    def parse(cls, text: str) -> WeightLabel | None:
        """The label in `text`; None for what no pvg wrote, such as vLLM's own "default"."""
        name, separator, version = text.partition(SEPARATOR)
        began, dash, tail = name.partition("-")
        try:
            found = cls(PublishingSession(int(began, 16), tail), int(version))
        except ValueError:
            return None
        return found if separator and dash and found.version >= 0 and str(found) == text else None


def salt(label: str) -> str:
    """A salt for prefix caches that is the label's own; vLLM takes no slash in one."""
    return label.replace(SEPARATOR, ".")
