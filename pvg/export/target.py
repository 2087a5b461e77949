"""The folder of an export: whether pvg may write it, and how it gets its name.

Importing this module loads no torch, so that `pvg export` can check the folder first.
"""

from __future__ import annotations

import os
from pathlib import Path

from pvg.config.base import parse
from pvg.errors import MissingRequirementError, UsageError, one_line
from pvg.store.atomic import remove_tree, temporary_beside

# Uploads an export to the Hugging Face hub, as a private repository unless the user asks for a public one.


def check_push(repository: str) -> None:
    """Check before any work. Raises UsageError for an invalid name, MissingRequirementError without a token."""
    from huggingface_hub import get_token

    if parse(f"hf:{repository}").revision is not None:
        raise UsageError(f"--push {repository}: a revision cannot be chosen.", "Give --push ORG/NAME.")
    if get_token() is None:
        raise MissingRequirementError(
            "--push needs a token of the Hugging Face hub.", "Set HF_TOKEN, or log in: hf auth login"
        )


def push_folder(folder: Path, repository: str, *, public: bool) -> tuple[str, str]:
    """Upload `folder` as one commit. Returns the address of the repository, and who can see it.

    An existing repository keeps its visibility. Raises MissingRequirementError if the hub refuses or does not answer.
    """
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    try:
        url = api.create_repo(repository, repo_type="model", private=not public, exist_ok=True)
        private = bool(api.model_info(repository).private)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message=f"Upload {folder.name} from pvg")
    except (HfHubHTTPError, httpx.HTTPError, OSError) as error:
        raise MissingRequirementError(
            f"The upload to {repository} failed: {one_line(str(error))}",
            f"The export is in {folder}. Check the token's permission to write, and repeat with --overwrite.",
        ) from error
    return str(url), "you and the members of the organisation only" if private else "everyone"


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
