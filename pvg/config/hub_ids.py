"""Ids of models and datasets of the Hugging Face hub: `hf:OWNER/NAME` or `hf:OWNER/NAME@REVISION`.

This module only checks their form. pvg.hub downloads.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pvg.errors import ConfigurationError

SCHEME = "hf:"
FORM = "Write hf:OWNER/NAME or hf:OWNER/NAME@REVISION."
WORD = r"\w(?:[\w.-]*\w)?"
HUB_ID = re.compile(rf"hf:(?P<repository>{WORD}(?:/{WORD})?)(?:@(?P<revision>{WORD}(?:/{WORD})*))?", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")
LONGEST = 96  # characters of OWNER/NAME


@dataclass(frozen=True, slots=True)
class HubId:
    """`revision`: a branch, a tag, `refs/pr/N` or a commit; None: the newest commit of the main branch."""

    repository: str
    revision: str | None = None

    @property
    def name(self) -> str:
        return self.repository.rpartition("/")[2]

    @property
    def is_pinned(self) -> bool:
        return self.revision is not None and COMMIT.fullmatch(self.revision) is not None

    def __str__(self) -> str:
        return f"{SCHEME}{self.repository}" + (f"@{self.revision}" if self.revision else "")


def is_hub_id(source: str) -> bool:
    return source.startswith(SCHEME)


def parse(source: str) -> HubId:
    """Raises ConfigurationError for an invalid name of a repository or a revision."""
    found = HUB_ID.fullmatch(source)
    if found is None or len(found["repository"]) > LONGEST or ".." in source or "--" in found["repository"]:
        raise ConfigurationError(f"{source[:LONGEST]!r} is not an id of the Hugging Face hub.", FORM)
    return HubId(found["repository"], found["revision"])
