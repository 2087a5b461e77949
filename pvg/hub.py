"""Models and datasets of the Hugging Face hub, `hf:OWNER/NAME` or `hf:OWNER/NAME@REVISION`, and uploads to it.

huggingface_hub does the transfers, so its settings apply: HF_HOME (the cache), HF_TOKEN or `hf auth login`,
HF_HUB_OFFLINE, HF_ENDPOINT. It retries broken connections, and keeps complete files.

Invariant: pvg downloads only safetensors, JSON and text of a model, and only parquet, CSV and JSON lines of a dataset.
So no pickle and no code reaches the disk. Importing this module does not import huggingface_hub.
"""

from __future__ import annotations

import functools
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pvg.config.base import READER, HubId, is_hub_id, parse
from pvg.errors import (
    DISK_FULL,
    ConfigurationError,
    MissingRequirementError,
    PvgError,
    UsageError,
    causes,
    counted,
    first_line,
    packages_in,
    raised_by_pvg,
    variables_quoted,
)

if TYPE_CHECKING:
    from huggingface_hub import DryRunFileInfo
    from huggingface_hub.utils.tqdm import tqdm


Kind = Literal["model", "dataset"]
Say = Callable[[str], object]  # shows a line to the user
SILENT: Say = len  # does nothing with the line

# Variables that huggingface_hub's HTTP client reads.
CERTIFICATES, ROUTES = re.compile("SSL_CERT_(FILE|DIR)"), re.compile("HF_ENDPOINT|(?i:(https?|all)_proxy)")
DEFECTS = (LookupError, TypeError, AttributeError, AssertionError, NotImplementedError)  # no network raises them
LOGIN = "set HF_TOKEN or type: hf auth login"
TIMEOUT_S = 30.0  # for an answer about a repository
AGAIN = "Run the same command again: it does not download complete files again."
OFFLINE: dict[Kind, str] = {
    "model": "Without a network, name a folder with the model, such as -s models.prover.source=DIR",
    "dataset": "Without a network, name a folder with train and test files: -s task.path=DIR",
}
# Files to download. A tokenizer's files have many names, but none of these patterns matches a Python file.
WEIGHTS = ("model.safetensors", "model-*.safetensors")
MODEL_FILES = (
    *WEIGHTS,
    "model.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer*.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
DATA_FOLDERS = ("", "main/", "data/")  # folders of a repository that may have the splits; openai/gsm8k uses "main"
DATA_FILES = tuple(
    f"{folder}{split}{ending}"
    for folder in DATA_FOLDERS
    for split in ("train", "test")
    for ending in (".jsonl", ".csv", ".parquet", "-*.parquet")
)
PATTERNS: dict[Kind, tuple[str, ...]] = {"model": MODEL_FILES, "dataset": DATA_FILES}
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# Settings that accept a hub id.
MODELS = ("models.prover.source", "models.verifier.source", READER)
KEYS: dict[str, Kind] = {**dict.fromkeys(MODELS, "model"), "task.path": "dataset"}


@dataclass(frozen=True, slots=True)
class Download:
    """The files of one repository: their number, and the number and size in bytes of those not in the cache."""

    files: int
    missing: int
    size: int

    def __str__(self) -> str:
        if not self.missing:
            return "complete in the cache"
        return f"{self.missing} of {counted(self.files, 'file')} to download, {self.size / 1e6:,.1f} MB"


def hub_ids(sources: Mapping[str, str], keys: Collection[str] = tuple(KEYS)) -> dict[str, str]:
    """The hub ids of `sources` (`Experiment.sources`) among `keys`."""
    return {key: source for key, source in sources.items() if key in keys and is_hub_id(source)}


def pinned(sources: Mapping[str, str], say: Say, keys: Collection[str] = tuple(KEYS)) -> dict[str, str]:
    """The sources with a commit in each hub id among `keys`. Asks the hub for missing commits.

    Raises the errors of `resolve`.
    """
    found = hub_ids(sources, keys)
    return {**sources, **{key: str(resolve(parse(source), KEYS[key], say)) for key, source in found.items()}}


def pinned_as(sources: Mapping[str, str], earlier: Mapping[str, str]) -> dict[str, str]:
    """The sources; hub ids without a revision get the commits of `earlier`, those of the run to resume."""
    found, before = dict(sources), hub_ids(earlier)
    for key, source in hub_ids(sources).items():
        hub_id = parse(source)
        if hub_id.revision is None and key in before and parse(before[key]).repository == hub_id.repository:
            found[key] = before[key]
    return found


# --- asking the hub ----------------------------------------------------------------------------------------------


def resolve(hub_id: HubId, kind: Kind, say: Say) -> HubId:
    """The hub id with its commit. If the hub does not answer, uses the commit that the cache has for the revision, and
    gives `say` a sentence about it.

    Raises UsageError for a repository or a revision that does not exist, MissingRequirementError if the hub does not
    answer and the cache does not have it.
    """
    if hub_id.is_pinned:
        return hub_id
    commit, notice = _commit(hub_id, kind)
    if notice:
        say(notice)
    return replace(hub_id, revision=commit)


@functools.cache
def _commit(hub_id: HubId, kind: Kind) -> tuple[str, str]:
    """(commit, notice). Asks once per process, so all models of a process have the same commit."""
    from huggingface_hub import HfApi, is_offline_mode
    from huggingface_hub.errors import RevisionResolutionError

    api = HfApi()
    asked: dict[str, Any] = {"repo_id": hub_id.repository, "repo_type": kind, "revision": hub_id.revision}
    try:
        with _explained(hub_id, kind):
            api.repo_info(**asked, timeout=TIMEOUT_S)  # first, because the next call has no timeout
            return api.resolve_revision(**asked).resolved, ""
    except UnreachableError as error:
        try:
            commit = api.resolve_revision(**asked, local_files_only=True).resolved
        except RevisionResolutionError:
            raise error from None
        reason = "HF_HUB_OFFLINE is set" if is_offline_mode() else error.message.rstrip(".")
        return commit, f"{reason}. {hub_id} is commit {commit}, from the cache."


def download_of(source: str, kind: Kind) -> Download:
    """The pending download of `fetch`. Asks only for file names and sizes. Raises the errors of `fetch`."""
    hub_id = resolve(parse(source), kind, lambda notice: None)
    with _explained(hub_id, kind):
        files = _listed(hub_id, kind)
    lacking = [file for file in files if file.will_download]
    return Download(len(files), len(lacking), sum(file.file_size or 0 for file in lacking))


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr)


def fetch(source: str, kind: Kind, say: Say = _to_stderr) -> Path:
    """The folder with the files of a hub id. Downloads files that are not in the cache; a commit that is complete in
    the cache needs no network. `say` gets a line before a download. If stderr is a terminal, it shows the progress.

    Raises the errors of `resolve`; MissingRequirementError for a gated repository, an interrupted download or a full
    disk; ConfigurationError for a repository without safetensors, or without train and test files.
    """
    from huggingface_hub import snapshot_download

    hub_id = resolve(parse(source), kind, say)
    try:
        download = download_of(str(hub_id), kind)
    except UnreachableError:
        folder = _cached(hub_id, kind)
        if folder is None:
            raise
        return folder
    if download.missing:
        say(f"{hub_id.repository}: {download}, to {cache_folder()}.")
    with _explained(hub_id, kind), _stoppable(shown=True) as bars:
        return Path(
            snapshot_download(
                hub_id.repository,
                repo_type=kind,
                revision=hub_id.revision,
                allow_patterns=list(PATTERNS[kind]),
                tqdm_class=bars,
            )
        )


def fetch_config(source: str, say: Say = _to_stderr) -> Path:
    """The config.json of a model, without its weights: from the cache, or downloaded. Raises the errors of `resolve`
    and `fetch`."""
    from huggingface_hub import hf_hub_download

    hub_id = resolve(parse(source), "model", say)
    with _explained(hub_id, "model"):
        return Path(hf_hub_download(hub_id.repository, "config.json", revision=hub_id.revision))


def _cached(hub_id: HubId, kind: Kind) -> Path | None:
    """The folder of a revision in the cache; None if files are missing. huggingface_hub knows the files of a revision
    unless an old version filled the cache; the folder is then used without this check."""
    from huggingface_hub import snapshot_download

    asked: dict[str, Any] = {"repo_type": kind, "revision": hub_id.revision}
    try:
        folder = snapshot_download(
            hub_id.repository, **asked, allow_patterns=list(PATTERNS[kind]), local_files_only=True
        )
    except FileNotFoundError:
        return None
    return Path(folder)


def is_cached(source: str, kind: Kind) -> bool:
    """Whether all files of a hub id are in the cache, as far as is known without the network."""
    return _cached(resolve(parse(source), kind, lambda notice: None), kind) is not None


def fetch_all(sources: Mapping[str, str], say: Say, keys: Collection[str] = tuple(KEYS)) -> None:
    """`fetch` every hub id among `keys`. Call it before the live display starts, which has no room for a progress
    bar."""
    for source, kind in dict.fromkeys((source, KEYS[key]) for key, source in hub_ids(sources, keys).items()):
        fetch(source, kind, say)


def cache_folder() -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def _listed(hub_id: HubId, kind: Kind) -> list[DryRunFileInfo]:
    """The files of a pinned repository that pvg reads. Raises ConfigurationError if required files are missing."""
    from huggingface_hub import HfApi, snapshot_download

    asked: dict[str, Any] = {"repo_type": kind, "revision": hub_id.revision}
    with _stoppable(shown=False) as bars:
        files: list[DryRunFileInfo] = snapshot_download(
            hub_id.repository, **asked, allow_patterns=list(PATTERNS[kind]), dry_run=True, tqdm_class=bars
        )
    names = {file.filename for file in files}
    if kind == "dataset":
        if not all(any(name.rpartition("/")[2].startswith(split) for name in names) for split in ("train", "test")):
            raise ConfigurationError(
                f"The dataset {hub_id.repository!r} has no train and test files that pvg reads.",
                "It needs train and test as .jsonl, .csv or .parquet, at its root, in main/ or in data/.",
            )
        return files
    if not any(name.endswith(".safetensors") for name in names):
        everything = HfApi().list_repo_files(hub_id.repository, **asked)
        pickles = sorted(name for name in everything if name.endswith(PICKLES))
        if pickles:
            raise ConfigurationError(
                f"{hub_id.repository!r} has its weights only as {pickles[0]}, a pickle, which pvg never opens.",
                "Name a repository or a revision with model.safetensors (often a pull request: @refs/pr/1).",
            )
        raise ConfigurationError(f"{hub_id.repository!r} has no model.safetensors.", "Name another model.")
    if "config.json" not in names:
        raise ConfigurationError(f"{hub_id.repository!r} has no config.json, so it is not a transformers model.")
    return files


@contextmanager
def _stoppable(shown: bool) -> Iterator[type[tqdm]]:
    """huggingface_hub's progress bars, drawn if `shown` and stderr is a terminal. They abort the download after SIGINT
    or SIGTERM. Without them, huggingface_hub waits for the files in transfer, which may take an hour. Signals that are
    ignored, or that end the process at once, stay so."""
    from huggingface_hub.utils.tqdm import tqdm

    stopped = threading.Event()

    class Bar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            disable = not (shown and sys.stderr.isatty()) or options.get("disable")
            super().__init__(*args, **{**options, "disable": disable})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> bool | None:
            if stopped.is_set():
                raise KeyboardInterrupt  # in the thread that downloads one file, which removes the incomplete file
            return super().update(n)  # type: ignore[no-any-return]

    def stop(number: int, frame: object) -> None:
        stopped.set()
        raise KeyboardInterrupt

    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        before = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in before:
        signal.signal(number, stop)
    try:
        yield Bar
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def check_client() -> None:
    """Raises UnreachableError if the environment's proxies or certificates allow no request at all. Sends nothing."""
    from huggingface_hub import get_session

    with _explained(HubId("any/model"), "model"):
        get_session()


# --- uploading ---------------------------------------------------------------------------------------------------


def upload(folder: Path, repository: str, *, public: bool) -> tuple[str, str]:
    """Upload `folder` as one commit. Returns the address of the repository, and who can see it.

    An existing repository keeps its visibility. Raises MissingRequirementError if the hub refuses or does not answer.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        with _explained(parse(f"hf:{repository}"), "model", "cannot be uploaded to {}"):
            url = api.create_repo(repository, repo_type="model", private=not public, exist_ok=True)
            private = bool(api.model_info(repository).private)
            api.upload_folder(repo_id=repository, folder_path=folder, commit_message=f"Upload {folder.name} from pvg")
    except PvgError as error:
        raise MissingRequirementError(
            f"The upload to {repository} failed: {error.message}",
            f"The export is in {folder}. Check the token's permission to write, and repeat with --overwrite.",
        ) from error
    return str(url), "you and the members of the organisation only" if private else "everyone"


# --- errors --------------------------------------------------------------------------------------------------------


class UnreachableError(MissingRequirementError):
    """The hub does not answer, or HF_HUB_OFFLINE forbids requests."""


@contextmanager
def _explained(hub_id: HubId, kind: Kind, doing: str = "cannot be downloaded from {}") -> Iterator[None]:
    """Convert an exception of huggingface_hub, or of a library below it, to a PvgError with the repository and a
    remedy. `doing`: what failed, with a place for the address of the hub."""
    try:
        yield
    except Exception as error:
        if isinstance(error, PvgError) or raised_by_pvg(error):
            raise
        raise _explanation(error, hub_id, kind, doing) from error


def _explanation(error: BaseException, hub_id: HubId, kind: Kind, doing: str) -> PvgError:
    from huggingface_hub import errors
    from huggingface_hub.constants import ENDPOINT

    if isinstance(error, errors.HfHubHTTPError):
        return _refusal(error, hub_id, kind, ENDPOINT)
    if isinstance(error, errors.OfflineModeIsEnabled):
        return UnreachableError(
            f"HF_HUB_OFFLINE is set, but {hub_id} is not completely in the cache {cache_folder()}.",
            f"Unset HF_HUB_OFFLINE for one command, or set HF_HOME to a cache that has it. {OFFLINE[kind]}",
        )
    if isinstance(error, errors.LocalEntryNotFoundError | errors.DryRunError) and error.__cause__ is not None:
        return _explanation(error.__cause__, hub_id, kind, doing)
    # Transport errors of huggingface_hub's HTTP client may be OSErrors too.
    if isinstance(error, OSError) and (error.filename or error.errno in DISK_FULL or type(error) is OSError):
        return _disk_error(error, hub_id)
    if isinstance(error, UnicodeEncodeError):  # of a header, and the token is the one that a user writes
        return MissingRequirementError(f"The token of the hub is none: {first_line(error)}.", f"Correct it: {LOGIN}.")
    said, variables = first_line(error), variables_quoted(error) or _connection_variables(error)
    remedy = f"Check {', '.join(['the network', *variables])}. {AGAIN} {OFFLINE[kind]}"
    if isinstance(error, DEFECTS) and not variables_quoted(error):
        said = f"huggingface_hub {metadata.version('huggingface_hub')} failed ({type(error).__name__}: {said})"
        remedy = f"Install another version of huggingface_hub. {OFFLINE[kind]}"
    return UnreachableError(f"{hub_id} {doing.format(ENDPOINT)}: {said}.", remedy)


def _connection_variables(error: BaseException) -> list[str]:
    """The variables of this environment that may have caused an error of huggingface_hub's HTTP client."""
    of_tls = any("ssl" in packages_in(cause) or "CERTIFICATE" in str(cause) for cause in causes(error))
    return sorted(filter((CERTIFICATES if of_tls else ROUTES).fullmatch, os.environ))


def _disk_error(error: OSError, hub_id: HubId) -> PvgError:
    if not error.errno:  # the size of a downloaded file differs from the size on the hub
        return MissingRequirementError(f"The download of {hub_id.repository} is damaged: {first_line(error)}.", AGAIN)
    place = cache_folder() if error.errno in DISK_FULL else error.filename or cache_folder()
    return MissingRequirementError(f"{place}: {error.strerror}.", f"Set HF_HOME to a folder with room. {AGAIN}")


def _refusal(error: Any, hub_id: HubId, kind: Kind, host: str) -> PvgError:
    """The PvgError for an HTTP status of the hub. `error` is an HfHubHTTPError."""
    from huggingface_hub import errors

    page = f"{host}/{'datasets/' if kind == 'dataset' else ''}{hub_id.repository}"
    name, status = f"The {kind} {hub_id.repository!r}", error.response.status_code
    if isinstance(error, errors.GatedRepoError):
        return MissingRequirementError(f"{name} is gated.", f"Request access at {page}, then {LOGIN}.")
    if isinstance(error, errors.RevisionNotFoundError):
        return UsageError(f"{name} has no revision {hub_id.revision or 'main'!r}.", f"See {page}/commits.")
    if status == 403 or "Invalid credentials" in error.response.headers.get("X-Error-Message", ""):
        return MissingRequirementError(f"{host} does not accept your token.", f"Make a new one, then {LOGIN}.")
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 404):
        return UsageError(f"{name} is not at {host}, or is private.", f"Check the name; for a private one {LOGIN}.")
    words = f": {error.server_message}" if error.server_message else ""
    return UnreachableError(f"{host} answers with HTTP status {status}{words}.", "Try again later.")
