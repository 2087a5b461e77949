"""Labels of weights, `SESSION/VERSION` (see pvg.servers.labels), and which of them may follow which.

A label that follows `broken:` names weights whose loading failed halfway: whatever the engine has, it is not these.
"""

from __future__ import annotations

from dataclasses import dataclass

from .refusal import Refusal

BROKEN = "broken:"


@dataclass(frozen=True, slots=True)
class ServedLabel:
    """`version` of the weights of a session, which began `began_ns` nanoseconds after 1970."""

    began_ns: int
    tail: str
    version: int

    @property
    def session(self) -> str:
        return f"{self.began_ns:x}-{self.tail}"

    def __str__(self) -> str:
        return f"{self.session}/{self.version}"

    @classmethod
    def parse(cls, text: str) -> ServedLabel | None:
        """The label in `text`; None for what no pvg wrote, such as vLLM's own "default"."""
        session, separator, version = text.partition("/")
        began, dash, tail = session.partition("-")
        try:
            found = cls(int(began, 16), tail, int(version))
        except ValueError:
            return None
        return found if separator and dash and found.version >= 0 and str(found) == text else None


def check_order(current: str, new: ServedLabel) -> None:
    """Raise a Refusal for weights that must not replace `current`, the engine's weight version: an older version of
    the same session, or any of a session that began earlier. Broken weights may be replaced by any version."""
    broken = current.startswith(BROKEN)
    there = ServedLabel.parse(current.removeprefix(BROKEN))
    if there is None:
        return
    check_session(there, new)
    if there.session == new.session and new.version < there.version and not broken:
        raise Refusal(
            409,
            "version_backwards",
            f"The server has version {there.version} of this session, and was sent {new.version}.",
        )


def check_session(there: ServedLabel, new: ServedLabel) -> None:
    """Raise a Refusal for a label of a session that began before the one of `there`."""
    if there.session != new.session and new.began_ns < there.began_ns:
        raise Refusal(
            409, "older_session", f"The server has weights of session {there.session}, which began after {new.session}."
        )
