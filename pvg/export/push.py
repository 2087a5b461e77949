"""Uploads an export to the Hugging Face hub, as a private repository unless the user asks for a public one."""

from __future__ import annotations

from pathlib import Path

from pvg.config.base import parse
from pvg.errors import MissingRequirementError, UsageError, one_line


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
