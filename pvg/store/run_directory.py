"""The run directory: the paths of a run's files, and the lock that lets one process at a time drive it.

Invariants: `experiment.toml` is written once, when the run is created. At most one process commits to a run at a time.

The kernel releases the lock of the lock file when the process ends in any way. A moved folder stays locked. If the lock
file or the folder is deleted or replaced, another process may lock it; `unchanged` then stops the first one before its
next commit. A lease (pvg.store.lease) keeps drivers on several hosts apart.
"""

from __future__ import annotations

import itertools
import os
import re
import secrets
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pvg.config.experiment import Experiment
from pvg.config.load import build_experiment, did_you_mean, overridden
from pvg.config.operation import Store
from pvg.errors import (
    ConfigurationError,
    MissingRequirementError,
    PvgError,
    StateError,
    StoppedAtStart,
    UsageError,
    listed,
    path_error,
    system_module,
    user_paths,
)
from pvg.inputs import open_own
from pvg.store.atomic import (
    OLD_S,
    DamagedFileError,
    disk_full_explained,
    is_temporary,
    make_directory,
    remove_temporaries,
    sync_directory,
    write_atomic,
)
from pvg.store.lease import Work, check_lease, is_lease, lease_of, leased
from pvg.store.state import FileStateStore, JournalMark, JsonLinesReader, LoadedState, State, verify


@contextmanager
def exclusive(file: Path, refusal: Callable[[str], PvgError]) -> Iterator[None]:
    """Lock `file`, creating it if it is missing. Raises `refusal(owner)` if another process has locked it.

    The lock belongs to the open file, so a forked child shares it until it ends or executes another program.
    """
    fcntl = system_module("fcntl")
    with user_paths(), disk_full_explained(file):
        descriptor = open_own(file, os.O_RDWR)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # Empty for the instant between another process's flock and its writing of its process id.
            content = os.pread(descriptor, 32, 0)
            owner = f"process {content.decode()}" if content.isdigit() else "another process"
            raise refusal(owner) from None
        with disk_full_explained(file):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _identity(path: Path) -> tuple[int, int] | None:
    """The device and the inode of a file."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


# --- the run ----------------------------------------------------------------------------------------------------------

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")


def as_run_name(text: str, longest: int) -> str:
    """What of a text may be in the name of a run: other characters become dashes. May be empty."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:longest]


# In a source such as run:runs/mine/round-2/verifier these words mean a part of the run (pvg.config.base).
PARTS_OF_A_RUN = re.compile(r"prover|verifier|warmup|round-\d{1,6}", re.ASCII)


def refuse_name(name: str) -> None:
    """Raises UsageError if `name` cannot be the name of a run."""
    if not RUN_NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot be the name of a run.", "Use at most 120 letters, digits, dots, dashes and underscores."
        )
    if PARTS_OF_A_RUN.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot be the name of a run, because run:RUN/{name} means a part of the run RUN.",
            f"Choose another name, such as --name my-{name}",
        )


@user_paths()
def refuse_no_folder(root: Path, option: str = "--runs FOLDER") -> None:
    """Raises UsageError if `root` cannot contain runs, because something other than a folder is in its place, or in
    that of a folder above it. A missing folder is fine. `option`: how a user chooses another folder."""
    for place in (root, *root.parents):
        if os.path.lexists(place) and not place.is_dir():
            raise UsageError(
                f"{place} is not a folder, so it cannot contain runs.", f"Move it away, or choose a folder: {option}"
            )


@user_paths()
def free_name(root: Path, name: str) -> str:
    """`name`, or `name-2`, `name-3` and so on: the first one that does not exist in `root`."""
    free, number = name, 1
    while (root / free).exists():
        number += 1
        free = f"{name}-{number}"
    return free


# Kinds of records that a run may write before its first commit. Any other kind proves a commit.
BEFORE_THE_FIRST_COMMIT = frozenset({"start", "scaling", "device", "loop", "workers", "alert"})


class _Inside:
    """A file or a folder of a run, by its name in the run's folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunDirectory, owner: object = None) -> Path:
        return run.path / self._name


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The paths of one run. The constructor does not touch the disk; use `create` or `open`."""

    path: Path

    @property
    def name(self) -> str:
        return Path(os.path.abspath(self.path)).name  # a link to a run has its own name, which commands take

    @property
    def argument(self) -> str:
        """How a command names this run: its name in the default folder, its path elsewhere. Quoted for a shell."""
        in_default = self.path.absolute() == (Store().root / self.name).absolute()
        return shlex.quote(self.name if in_default else str(self.path))

    experiment_file = _Inside("experiment.toml")
    state = _Inside("state.json")  # the previous commit is next to it (pvg.store.state)
    manifest = _Inside("manifest")
    rollouts = _Inside("rollouts")
    metrics = _Inside("metrics.jsonl")
    spans = _Inside("spans.jsonl")
    events = _Inside("events.log")
    checkpoints = _Inside("checkpoints")
    weights = _Inside("weights")
    code = _Inside("code")  # copies of the user's files that the experiment names
    evaluation = _Inside("evaluation")
    report = _Inside("report.html")
    rollouts_page = _Inside("rollouts.html")
    lock_file = _Inside("lock")

    @classmethod
    def create(cls, root: Path, name: str, experiment: Experiment) -> RunDirectory:
        """Make `root/name` with its folders and its experiment.toml.

        Completes a folder whose creator died before it wrote experiment.toml. Raises UsageError if the run exists, if
        the name cannot be a folder's, or if the folder has content that is not a run.
        """
        refuse_name(name)
        refuse_no_folder(root, "--set store.root=FOLDER")
        run = cls(root / name)
        run.refuse_existing()
        made = not run.path.exists()
        make_directory(run.path)
        try:
            with run.lock(discard=lambda: made and not run.experiment_file.exists()):
                run.refuse_existing()  # another process may have created it in the meantime
                for folder in (run.manifest, run.rollouts, run.checkpoints, run.weights):
                    make_directory(folder)
                run._write_experiment(experiment)
        except (OSError, MissingRequirementError):
            left = [entry for entry in run.path.iterdir() if not is_lease(entry)] if run.path.exists() else []
            if made and run.path.exists() and {entry.name for entry in left} <= {run.lock_file.name}:
                shutil.rmtree(run.path)  # the lock file could not be written either
            raise
        return run

    @classmethod
    @user_paths()
    def open(cls, path_or_name: str | Path, root: Path) -> RunDirectory:
        """The existing run with that name in `root`, or at that path.

        Raises UsageError, with the nearest run of `root`, if there is none, and StateError if it has lost its
        experiment.toml.
        """
        candidates = (root / path_or_name, Path(path_or_name))
        for candidate in candidates:
            run = cls(candidate)
            if run.is_run:
                return run
        refuse_no_folder(root)
        for run in map(cls, candidates):
            if run.experiment_file.is_file():
                raise UsageError(
                    f"{run.path} is not a run. It has an {run.experiment_file.name}, but no other file of a run.",
                    f"To play this experiment: pvg train {shlex.quote(str(run.experiment_file))}",
                )
            if os.path.lexists(run.experiment_file) or (run.path.is_dir() and run.has_state):
                found = "is not a file" if os.path.lexists(run.experiment_file) else "is missing"
                raise StateError(f"{run.experiment_file} {found}.", "Restore it from a copy, or delete the folder.")
        name = Path(path_or_name).name
        known = runs_in(root)
        raise UsageError(
            f"There is no run {str(path_or_name)!r} in {root}.{did_you_mean(name, known)}",
            f"Known runs: {listed(known)}." if known else "Start one with: pvg train",
        )

    def experiment(self) -> Experiment:
        """The configuration with which the run was created, with its present number of rounds. Raises
        ConfigurationError if the file is damaged."""
        data, origins = overridden(self.experiment_file, ())
        if "store" not in data:  # the last section of all that pvg has written
            raise ConfigurationError(
                f"{self.experiment_file} is damaged: it ends before [store].", "Restore it from a copy."
            )
        return build_experiment(data, str(self.experiment_file), origins)

    def set_rounds(self, rounds: int) -> None:
        """Give the run more rounds than it was created with. Call this under the lock; fewer rounds change nothing."""
        own = self.experiment()
        if own.game.rounds < rounds:
            self._write_experiment(own.model_copy(update={"game": own.game.model_copy(update={"rounds": rounds})}))

    def _write_experiment(self, experiment: Experiment) -> None:
        write_atomic(self.experiment_file, experiment.to_toml().encode())

    @contextmanager
    def lock(
        self,
        discard: Callable[[], bool] = lambda: False,
        waiting: Callable[[str], None] = lambda line: None,
        work: Work = "play",
    ) -> Iterator[RunDirectory]:
        """Become the one process that drives this run. The kernel releases the lock when the process ends.

        `waiting` gets a line if a driver on another host has not released the run: this call then waits for WATCH_S to
        see whether it is alive. Raises UsageError with the other driver's process id if one drives the run. If an error
        leaves the block and the folder was moved, deleted or replaced, or another driver has taken over the run, raises
        a StateError about that instead. If an Exception or StoppedAtStart leaves the block and `discard()` is true,
        removes the folder. `work`: what this process does with the run.
        """
        journals = (self.metrics, self.spans, self.events)
        with exclusive(self.lock_file, self._driven_elsewhere), leased(self.path, journals, waiting, work):
            unchanged = self.unchanged()
            try:
                yield self
            except (Exception, StoppedAtStart) as error:
                try:
                    unchanged()
                except StateError as cause:
                    raise cause from error
                if discard():
                    shutil.rmtree(self.path)
                raise

    def unchanged(self) -> Callable[[], None]:
        """A function that raises StateError if the folder or its lock file is no longer the one that it was at this
        call, or if a driver on another host has taken the lease. A driver calls it before each commit."""
        was, lease = _identity(self.lock_file), lease_of(self.path)

        def check() -> None:
            if was is None or _identity(self.lock_file) != was:
                raise StateError(
                    f"The folder {self.path} or its file {self.lock_file.name} was moved, deleted or replaced, so "
                    "another process may be writing to it.",
                    "This process stopped before its next commit. All commits are in the old folder. If you moved it, "
                    "continue there: pvg train --resume PATH",
                )
            check_lease(self.path, lease)

        return check

    @property
    def is_run(self) -> bool:
        """Whether the folder is that of a run. A user's own folder may have an experiment.toml too (`pvg init`)."""
        others = (self.manifest, self.lock_file, self.metrics, self.events, self.spans, self.rollouts, self.checkpoints)
        return self.experiment_file.is_file() and (self.has_state or any(path.exists() for path in others))

    @property
    def has_state(self) -> bool:
        """Whether one of the last two commits has left its state. Then nothing may discard the run."""
        store = FileStateStore(self.state)
        return store.path.exists() or store.previous_path.exists()

    @user_paths()
    def load_state(self, check: Callable[[State], None] | None = None) -> LoadedState:
        """The last valid commit; see FileStateStore.load. Changes no file.

        A run without state files has made no commit. Raises StateError if other files show that it has.
        """
        store = FileStateStore(self.state)
        loaded = store.load(check)
        if loaded.state is None and (signs := self._signs_of_commits()):
            raise StateError(
                f"{self.path} has no {store.path.name} and no {store.previous_path.name}, but it has commits: "
                f"it holds {', '.join(signs)}.",
                "Restore one of the two files from a copy, or start a new run with --name. pvg changed nothing. "
                f"You can read the run: pvg view {self.argument}",
            )
        return loaded

    def verify_journal(self, state: State, path: Path) -> None:
        """Check the journal `path` (metrics or spans) against a committed state. Raises DamagedFileError with the
        lines. A state without marks checks nothing."""
        verify(path, [JournalMark(*mark) for mark in state.get("marks", {}).get(path.stem, ())])

    def _signs_of_commits(self) -> list[str]:
        """Files that only a run with a commit has."""
        folders = (self.manifest, self.rollouts, self.checkpoints, self.weights)
        entries = [min(folder.iterdir(), default=None) for folder in folders if folder.is_dir()]
        signs = [f"{entry.parent.name}/{entry.name}" for entry in entries if entry is not None]
        if self.spans.is_file() and self.spans.stat().st_size:
            signs.append(self.spans.name)
        try:
            records = JsonLinesReader(self.metrics) if self.metrics.is_file() else ()
            played = any(record.get("kind") not in BEFORE_THE_FIRST_COMMIT for record in records)
        except DamagedFileError:
            played = True  # its records are unreadable, so assume commits
        return [*signs, self.metrics.name] if played else signs

    def remove_temporaries(self) -> list[Path]:
        """Remove the temporary files of dead processes in the run's folder, its manifests and its code; returns their
        paths. Only for the process that holds the lock.

        A living process may write a report without the lock, so only old temporary files of these are removed.
        """
        store = FileStateStore(self.state)
        removed = []
        journals = (self.metrics, self.spans, self.events)
        for path in (self.experiment_file, store.path, store.previous_path, *journals):
            removed += remove_temporaries(self.path, path.name)
        for path in (self.report, self.rollouts_page):
            removed += remove_temporaries(self.path, path.name, older_than_s=OLD_S)
        for folder in (self.manifest, self.code):
            removed += remove_temporaries(folder)
        return removed

    def refuse_existing(self) -> None:
        """Raises UsageError if a new run cannot have this folder."""
        if self.experiment_file.exists() and not self.is_run:
            raise UsageError(f"{self.path} has files, but is not a run.", "Give the run another name.")
        if self.experiment_file.exists():
            raise UsageError(
                f"The run {self.name!r} already exists in {self.path.parent}.",
                "Continue it with --resume, or give the new run another name.",
            )
        ours = {path.name for path in (self.manifest, self.rollouts, self.checkpoints)}
        ours |= {self.weights.name, self.lock_file.name}
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"{self.path} is a file, not a run directory.", "Give the run another name.")
        strangers = [
            entry.name
            for entry in (self.path.iterdir() if self.path.is_dir() else ())
            if entry.name not in ours and not is_temporary(entry) and not is_lease(entry)
        ]
        if strangers:
            raise UsageError(
                f"{self.path} exists and is not a run: it holds {min(strangers)}, but no {self.experiment_file.name}.",
                "Give the run another name, or move that folder away.",
            )

    def _driven_elsewhere(self, owner: str) -> UsageError:
        return UsageError(
            f"The run {self.name!r} is being driven by {owner}.",
            "Wait until it is done, or stop it (Ctrl-C commits first).",
        )


def runs_in(root: Path) -> list[str]:
    """The names of the runs in `root`, sorted. A folder that is being deleted is none."""
    if not root.is_dir():
        return []
    names = [path.parent.name for path in root.glob("*/experiment.toml")]
    return sorted(name for name in names if RunDirectory(root / name).is_run and not REMOVED_NAME.fullmatch(name))


REMOVED_NAME = re.compile(r"\.removed-(?P<of>.+)-[0-9a-f]{8}")  # of the folder of a run while it is deleted


def half_removed(root: Path) -> dict[str, list[Path]]:
    """What killed removals have left in `root`, by the name of the run."""
    found: dict[str, list[Path]] = {}
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        if match := REMOVED_NAME.fullmatch(path.name):
            found.setdefault(match["of"], []).append(path)
    return found


# What users do with the folders of runs: sizes, removal, and runs without a game.

SAMPLING_PHASE = "init"  # the state a run stays in while `pvg rollout` fills it


def has_only_samples(state: Mapping[str, Any]) -> bool:
    """Whether a run with the committed `state` (empty: none) is of `pvg rollout`, which plays no game and leaves a run
    in its first phase."""
    return state.get("phase", SAMPLING_PHASE) == SAMPLING_PHASE and bool(state.get("shards"))


def refuse_samples(run: RunDirectory, state: Mapping[str, Any]) -> None:
    """Raises UsageError if `run` with the committed `state` (empty: none) is of `pvg rollout`, which has no game."""
    if has_only_samples(state):
        raise UsageError(
            f"The run {run.name!r} contains samples of `pvg rollout`, not a game.", "Start a game: pvg train"
        )


def folder_bytes(folder: Path) -> int:
    """The size of all files below `folder`, in bytes. A file with several names counts once. Links are not followed."""
    seen: dict[tuple[int, int], int] = {}
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                found = os.lstat(os.path.join(place, name))
            except FileNotFoundError:  # a temporary file of a process that plays the run
                continue
            seen[found.st_dev, found.st_ino] = found.st_size
    return sum(seen.values())


def remove_run(run: RunDirectory, waiting: Callable[[str], None]) -> None:
    """Delete a run, and what killed removals have left beside it.

    The folder first gets a name that is no run's, and then loses its files. Raises UsageError if a process plays the
    run; `waiting` is that of `RunDirectory.lock`. Raises StateError if files cannot be deleted.
    """
    if run.path.is_symlink():
        raise UsageError(
            f"{run.path} is a link to {run.path.resolve()}.", "Give that folder, or delete only the link with rm."
        )
    folder = run.path.resolve()
    grave = folder.parent / f".removed-{folder.name}-{secrets.token_hex(4)}"
    with run.lock(waiting=waiting), user_paths():
        os.rename(folder, grave)
        sync_directory(folder.parent)
    for left in itertools.chain(*half_removed(folder.parent).values()):
        delete_removed(left)


def delete_removed(folder: Path) -> None:
    """Delete what a removal has renamed. Raises StateError if that is impossible."""
    try:
        # First the file that makes a folder a run, in case a user gives the folder its old name.
        RunDirectory(folder).experiment_file.unlink(missing_ok=True)
        shutil.rmtree(folder)
    except FileNotFoundError:  # another `pvg runs remove` deletes it at this moment
        return
    except OSError as error:
        raise path_error(error, StateError, f"Delete the rest yourself: rm -r {folder}") from error
