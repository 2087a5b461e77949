"""The folder of an export: whether pvg may write it, and how it gets its name.

Importing this module loads no torch, so that `pvg export` can check the folder first.
"""

from __future__ import annotations

import os
from pathlib import Path

from pvg.config.base import parse
from pvg.errors import MissingRequirementError, UsageError
from pvg.hub import check_client
from pvg.store.atomic import remove_tree, temporary_beside


def check_push(repository: str) -> None:
    """Check before any work. Raises UsageError for an invalid name, MissingRequirementError without a token, or if the
    environment's proxies or certificates allow no upload."""
    from huggingface_hub import get_token

    if parse(f"hf:{repository}").revision is not None:
        raise UsageError(f"--push {repository}: a revision cannot be chosen.", "Give --push ORG/NAME.")
    if get_token() is None:
        raise MissingRequirementError(
            "--push needs a token of the Hugging Face hub.", "Set HF_TOKEN, or log in: hf auth login"
        )
    check_client()


MARK = "pvg.json"  # the facts of an export; shows that a directory is one


def check_target(out: Path, overwrite: bool) -> None:
    """Raises UsageError if `out` has something, unless it is an earlier export and `overwrite` is True. An empty folder
    is replaced, so it cannot be the working directory."""
    if Path.cwd().is_relative_to(resolved(out)):
        raise UsageError(f"{out} holds the working directory.", "Name a new folder with --out.")
    if out.is_dir() and not any(out.iterdir()):
        return
    if not out.exists():
        return
    if not (out / MARK).is_file():
        raise UsageError(f"{out} exists, and it is not an export of pvg.", "Choose another folder with --out.")
    if not overwrite:
        raise UsageError(f"{out} has an export already.", "Replace it with --overwrite, or choose another --out.")


def resolved(out: Path) -> Path:
    """The path without links. Raises UsageError for a link that leads to itself."""
    try:
        return out.resolve()
    except RuntimeError:
        raise UsageError(f"{out} is a link that leads to itself.", "Choose another folder with --out.") from None


def put(temporary: Path, out: Path) -> None:
    """Give the complete folder `temporary` the name `out`, which is not a link. An earlier export there is removed."""
    if not out.exists():
        os.rename(temporary, out)
        return
    old = temporary_beside(out)
    os.rename(out, old)
    os.rename(temporary, out)
    remove_tree(old)
