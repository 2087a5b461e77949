"""`WeightLabel`: names the weights of a server as a string, which vLLM reports with the tokens sampled from them.

A label is `SESSION/VERSION`. A session is one publishing process; its versions only go up. Of two sessions the one that
started later wins, so a trainer that was presumed dead cannot overwrite the weights of its replacement.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass

SEPARATOR = "/"
BROKEN = "broken:"  # prefix for the label of weights that arrived only in part (protocol 1)


@dataclass(frozen=True, slots=True)
class PublishingSession:
    """A process that publishes weights: its start in nanoseconds since 1970, and a random tail."""

    began_ns: int
    tail: str

    @classmethod
    def begin(cls) -> PublishingSession:
        return cls(time.time_ns(), secrets.token_hex(4))

    def __str__(self) -> str:
        return f"{self.began_ns:x}-{self.tail}"


@dataclass(frozen=True, slots=True)
class WeightLabel:
    """Version `version`, from 0, of the weights that `session` published."""

    session: PublishingSession
    version: int

    def __str__(self) -> str:
        return f"{self.session}{SEPARATOR}{self.version}"

    @classmethod
    def parse(cls, text: str) -> WeightLabel | None:
        """The label in `text`; None for any text that is not pvg's, such as vLLM's "default"."""
        name, separator, version = text.partition(SEPARATOR)
        began, dash, tail = name.partition("-")
        try:
            found = cls(PublishingSession(int(began, 16), tail), int(version))
        except ValueError:
            return None
        return found if separator and dash and found.version >= 0 and str(found) == text else None


def salt(label: str) -> str:
    """The salt of the label for prefix caches. vLLM accepts no slash in a salt."""
    return label.replace(SEPARATOR, ".")
