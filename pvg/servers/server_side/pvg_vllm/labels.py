"""Weight labels `SESSION/VERSION` (see pvg.servers.labels), and their order.

A label after `broken:` names weights that failed to load completely: the engine does not have them.
"""

from __future__ import annotations

from dataclasses import dataclass

from .refusal import Refusal

BROKEN = "broken:"


@dataclass(frozen=True, slots=True)
class ServedLabel:
    """Version `version` of the weights of a session that began `began_ns` nanoseconds after 1970."""

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
        """The label in `text`; None for any text that is not pvg's, such as vLLM's "default"."""
        session, separator, version = text.partition("/")
        began, dash, tail = session.partition("-")
        try:
            found = cls(int(began, 16), tail, int(version))
        except ValueError:
            return None
        return found if separator and dash and found.version >= 0 and str(found) == text else None


def check_order(current: str, new: ServedLabel) -> None:
    """Raises a Refusal for weights that must not replace `current`, the engine's weight version: an older version of
    the same session, or any version of an older session. Any version of a session may replace its broken weights."""
    broken = current.startswith(BROKEN)
    there = ServedLabel.parse(current.removeprefix(BROKEN))
    if there is None:
        return
    check_session(there, new)
    if there.session == new.session and new.version < there.version and not broken:
        raise Refusal(
            409,
            "version_backwards",
            f"The server has version {there.version} of this session, but was sent {new.version}.",
        )


def check_session(there: ServedLabel, new: ServedLabel) -> None:
    """Raises a Refusal if the session of `new` began before that of `there`."""
    if there.session != new.session and new.began_ns < there.began_ns:
        raise Refusal(
            409, "older_session", f"The server has weights of session {there.session}, which began after {new.session}."
        )
