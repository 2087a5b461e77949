"""Commits: make a run's finished work durable, in an order that survives a kill at any instant.

A commit writes rollout shards, then the checkpoint, syncs the appended files, writes the manifest if a phase ends, and
finally replaces state.json. After a kill, the next start reads the state of the last commit, deletes files that this
state does not name, and truncates appended files to their committed length. So a run loses no committed data and never
reads uncommitted data twice (invariant 1).

Without a state the ledger deletes nothing. It refuses a run whose state files are lost although other files show
commits (`RunDirectory.load_state`). It commits only to the folder that this process opened (`RunDirectory.unchanged`).

The ledger's thread does the whole commit: encoding, writing and every fsync. Meanwhile the event loop serves engines,
servers and the display, and a training phase takes its next steps (`begin_commit`, `settled`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from pvg import hub
from pvg.config.experiment import Experiment, digest_of, without_memory_settings
from pvg.config.load import differences
from pvg.errors import StateError, counted, user_paths
from pvg.extensions import digests, sources
from pvg.game.states import GameState, Phase, later_rounds_begin_with
from pvg.inputs import expanded, file_digest
from pvg.records import Rollout
from pvg.store.atomic import make_directory, open_stored, write_atomic
from pvg.store.checkpoints import prune, read_checkpoint, verify_checkpoint, write_checkpoint
from pvg.store.run_directory import RunDirectory
from pvg.store.run_players import base_source
from pvg.store.samples import SampleColumns
from pvg.store.shards import RolloutShards, ShardInfo
from pvg.store.state import FileStateStore, JournalMark, JsonLines, JsonLinesReader, State
from pvg.tasks.data import files_of
from pvg.telemetry.device import larger, peak_memory
from pvg.telemetry.events import EventLog
from pvg.telemetry.spans import Span, run_in, span, span_rows

if TYPE_CHECKING:
    from torch import Tensor


MANIFEST_SCHEMA = 1
# The files of a folder on which a model depends. Other programs may write their results beside them.
MODEL_FILES = (*hub.MODEL_FILES, "*.safetensors", "*.jinja", "*.model", "*.tiktoken")

Checkpoint = tuple[Mapping[str, "Tensor"], Mapping[str, Any]]

MOST_MARKS = 64  # marks per journal in a state; they narrow down which lines of a damaged journal changed


class Ledger:
    """The durable side of one run. `state`: the last committed state, and `newest`: the last one of which a commit has
    begun. Only `begin_commit` and `settled` change them, so code that does not call these finds the same state all the
    time. `steps_before`: committed steps of earlier processes. Call all methods but `close` from one event loop."""

    @user_paths()
    def __init__(
        self, directory: RunDirectory, experiment: Experiment, code_version: str, disk: Executor | None = None
    ) -> None:
        """`disk` runs the disk work, one job at a time; None: a thread that ends with the ledger."""
        self.directory = directory
        self.log = EventLog(directory.events)
        self.notices: list[str] = []
        self._unchanged = directory.unchanged()
        self._store = FileStateStore(directory.state, self._unchanged)
        self._shards = RolloutShards(directory.path, self._unchanged)
        self._pending: list[Rollout] = []
        self._in_flight: Future[GameState] | None = None
        self._begun = 0  # rollouts of the commit in flight
        self._unchanged()  # recovery removes files
        self._disk = ThreadPoolExecutor(1, "pvg-disk") if disk is None else disk
        self.state = self.newest = self._recover(experiment, code_version)
        self._metrics = JsonLines(directory.metrics)
        self._spans = JsonLines(directory.spans)
        records = self._processes_after(self.state.offsets.get("metrics", 0))
        self._metrics.truncate(self.state.offsets.get("metrics", 0))
        for record in records:
            self._metrics.append(record)
        self._spans.truncate(self.state.offsets.get("spans", 0))
        self.steps_before = sum(record.get("kind") == "step" for record in JsonLinesReader(directory.metrics))

    def record_machine(self, machine: str) -> str | None:
        """Record the machine of this process. Returns a notice if the run started on another kind of machine."""
        before = self.state.machine
        self.state = self.newest = replace(self.state, machine=machine)
        if before in ("", machine):
            return None
        return f"This run started with {before} and continues with {machine}: the last bits of the weights may differ."

    # --- appending ---------------------------------------------------------------------------------------------

    def record(self, kind: str, **fields: Any) -> None:
        """Append one object to metrics.jsonl; the next commit makes it durable."""
        self._metrics.append({"kind": kind, "time": time.time(), **fields})

    def record_spans(self, spans: Iterable[Span], **place: Any) -> None:
        for row in span_rows(spans, **place):
            self._spans.append(row)

    def keep(self, rollouts: Sequence[Rollout]) -> None:
        """Add rollouts to the next commit."""
        self._pending.extend(rollouts)

    # --- committing --------------------------------------------------------------------------------------------

    def begin_commit(
        self,
        state: GameState,
        checkpoint: Checkpoint | None = None,
        *,
        finished: Mapping[str, float | None] | None = None,
    ) -> None:
        """Begin to make `state` and everything kept since the last commit durable. `settled` waits for the end.

        `checkpoint` (tensors, meta) replaces the trainer's; without one the state keeps its checkpoint name.
        `finished`: metrics of the phase that this commit ends, for its manifest. Until the end, nothing may change the
        tensors or the data of `state`. The end of the commit in flight must have been awaited before `state` was
        derived from the ledger's.
        """
        assert self._in_flight is None, "the state lacks what the commit in flight adds"
        self._unchanged()
        label = f"{state.phase.value}-{state.step:05d}"
        rollouts = tuple(self._pending)
        # Taken now: the event loop may append records while the thread works, and those belong to the next commit.
        marks = {"metrics": self._metrics.mark, "spans": self._spans.mark}
        state = replace(
            state,
            offsets={name: mark.bytes for name, mark in marks.items()},
            marks={name: self._marks(name, mark) for name, mark in marks.items()},
        )
        save = partial(self._save, time.perf_counter(), state, label, rollouts, checkpoint, finished)
        # As pvg.telemetry.spans.submit_in, but `close` needs the thread's own future.
        self._in_flight = self._disk.submit(partial(copy_context().run, save))
        self.newest, self._begun = state, len(rollouts)

    async def settled(self) -> None:
        """Wait until the commit in flight, if any, is on the disk. Raises its error; then `state`, and what the next
        commit writes, are those before it. Cancelling waits for the thread and keeps its result, so that `state` is
        the one on the disk."""
        if self._in_flight is None:
            return
        waiting = asyncio.wrap_future(self._in_flight)
        try:
            await asyncio.wait([waiting])
        except asyncio.CancelledError:
            await asyncio.wait([waiting])
            raise  # `close` raises the error of the commit
        finally:
            if waiting.done() and waiting.exception() is None:
                self.state, self._in_flight = waiting.result(), None
                del self._pending[: self._begun]
        self._in_flight, self.newest = None, self.state
        waiting.result()

    async def commit(
        self,
        state: GameState,
        checkpoint: Checkpoint | None = None,
        *,
        finished: Mapping[str, float | None] | None = None,
    ) -> None:
        """`begin_commit`, and wait for the end."""
        self.begin_commit(state, checkpoint, finished=finished)
        await self.settled()

    def _save(
        self,
        started: float,
        state: GameState,
        label: str,
        rollouts: Sequence[Rollout],
        checkpoint: Checkpoint | None,
        finished: Mapping[str, float | None] | None,
    ) -> GameState:
        """The whole commit in order, in the disk thread. Returns the committed state."""
        with span("write_commit"):
            state = self._write(state, label, rollouts, checkpoint)
            state = replace(state, peak_memory=larger(self.state.peak_memory, peak_memory()))
            self._metrics.sync()
            self._spans.sync()
            if finished is not None:
                self._write_manifest(state, finished)
            self._store.save(state.plain())
            self._unchanged()  # another driver that has taken over keeps its checkpoints
            prune(self.directory.checkpoints, checkpoints_of(self._store))
        self.log.event("ckpt", event="write.done", write_ms=(time.perf_counter() - started) * 1e3, label=label)
        return state

    def _write(
        self, state: GameState, label: str, rollouts: Sequence[Rollout], checkpoint: Checkpoint | None
    ) -> GameState:
        """Write shards and checkpoint. Returns the state that names them."""
        if rollouts:
            # Kept rollouts belong to the current phase, also when this commit leaves it.
            phase = self.state.phase.value
            label_of_shard = f"{phase}-{len(self.shards(self.state.round, phase)):05d}"
            info = self._shards.write(self.state.round, label_of_shard, rollouts)
            state = replace(state, shards=(*state.shards, info.plain()))
        if checkpoint is not None:
            name = f"round-{state.round:03d}-{label}"
            write_checkpoint(self.directory.checkpoints, name, *checkpoint, before=self._unchanged)
            state = replace(state, checkpoint=name)
        return state

    def _marks(self, name: str, mark: JournalMark) -> list[JournalMark]:
        """The marks of earlier commits, thinned out with age, and this commit's mark."""
        kept = [JournalMark(*plain) for plain in self.state.marks.get(name, ())]
        if len(kept) >= MOST_MARKS:
            kept = [*kept[:-1:2], kept[-1]]
        return [*kept, mark]

    def _write_manifest(self, after: GameState, metrics: Mapping[str, float | None]) -> None:
        """Write `manifest/round-002-train_prover.json`: the inputs and outputs of the phase that ends, and what its
        results depend on. `peak_memory`: the maximum over the run's processes so far, in bytes.

        It is written before the state: a process killed in between ends the phase again and replaces it."""
        before, phase = self.state, self.state.phase.value
        own = [info.path for info in shards_of(after, before.round, phase)]
        earlier = before.progress.get("weights", ())  # weights of this phase in an earlier commit
        manifest = {
            "round": before.round,
            "phase": phase,
            "inputs": {
                "weights": [name for name in before.weights if name not in earlier],
                "shards": len(after.shards) - len(own),
            },
            "outputs": {
                "weights": [name for name in after.weights if name not in before.weights or name in earlier],
                "shards": own,
            },
            "config_hash": after.config_hash,
            "code_version": after.code_version,
            "metrics": metrics,
            "finished": time.time(),
            "peak_memory": after.peak_memory,
            "machine": after.machine,
            "schema": MANIFEST_SCHEMA,
        }
        make_directory(self.directory.manifest)
        path = self.directory.manifest / f"round-{before.round:03d}-{phase}.json"
        options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY
        write_atomic(path, orjson.dumps(manifest, option=options), self._unchanged)

    async def save_weights(
        self,
        name: str,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, Any],
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        """Write a player's final weights; they become durable with a commit whose state names them. `files`: those with
        which transformers opens the folder as a model."""
        folder, check = self.directory.weights, self._unchanged
        await run_in(self._disk, write_checkpoint, folder, name, tensors, dict(meta), check, files)

    def read_weights(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return read_checkpoint(self.directory.weights, name)

    def read_checkpoint(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The trainer's committed state of the phase; None at the start of the phase."""
        return read_checkpoint(self.directory.checkpoints, self.state.checkpoint) if self.state.checkpoint else None

    def shards(self, round_: int, phase: str) -> list[ShardInfo]:
        """The committed shards of one phase, in write order."""
        return shards_of(self.state, round_, phase)

    async def read_rollouts(self, round_: int, phase: str) -> list[Rollout]:
        shards = self.shards(round_, phase)
        return await run_in(self._disk, lambda: [rollout for info in shards for rollout in self._shards.read(info)])

    async def read_rollouts_where(self, round_: int, phase: str, id_prefixes: Sequence[str]) -> list[Rollout]:
        shards = self.shards(round_, phase)
        return await run_in(
            self._disk, lambda: [r for info in shards for r in self._shards.read_where(info, id_prefixes)]
        )

    async def sample_columns(self, round_: int, phase: str) -> SampleColumns:
        """Roles, grades and lengths of a phase's rollouts, without `Rollout` objects, which may not fit into memory."""
        return await run_in(self._disk, self._shards.sample_columns, self.shards(round_, phase))

    @property
    def rollout_shards(self) -> RolloutShards:
        return self._shards

    def close(self) -> None:
        """Waits for the commit in flight, and raises its error: after another error nothing else awaits it."""
        self._disk.shutdown(wait=True)
        self._metrics.close()
        self._spans.close()
        self.log.close()
        if self._in_flight is not None:
            self._in_flight.result()

    # --- recovering --------------------------------------------------------------------------------------------

    def _recover(self, experiment: Experiment, code_version: str) -> GameState:
        """The last commit whose files are all intact. Removes everything that no commit names."""
        loaded = self.directory.load_state(partial(check_files, self.directory))
        if loaded.state is None:
            inputs = {name: digest for name, (_, digest) in inputs_of(experiment).items()}
            settings = experiment.hash(), experiment.hashed()
            state = GameState(*settings, code_version, inputs=inputs, folder=str(Path.cwd()))
            for name, source in sources(experiment.own_code()).items():  # for people; pvg loads nothing from there
                make_directory(self.directory.code)
                write_atomic(self.directory.code / name, source)
        else:
            state = extended(GameState.from_plain(loaded.state), experiment)
            if limits := check_same_configuration(state, experiment):
                self.notices.append(f"The last bits of the weights may change: {'; '.join(limits)}.")
                self.log.event("run", event="settings", changed="; ".join(limits))
            check_same_inputs(loaded.state, experiment)
            if state.code_version != code_version:
                self.notices.append(
                    f"This run started with pvg {state.code_version} and continues with {code_version}."
                )
                state = replace(state, code_version=code_version)
        if loaded.notice:
            self.notices.append(loaded.notice)
            self._store.go_back()
        removed = remove_uncommitted(self.directory, state.plain())
        if removed:
            self.notices.append(f"Removed {counted(len(removed), 'unfinished file')} of an interrupted commit.")
        return state

    def _processes_after(self, offset: int) -> list[dict[str, Any]]:
        """Final records of earlier processes. They follow the last commit and stay true when work is repeated."""
        with open_stored(self.directory.metrics) as file:
            file.seek(offset)
            lines = file.read().splitlines()
        found = []
        for line in lines:
            if line.startswith(b'{"kind":"run"'):
                with contextlib.suppress(orjson.JSONDecodeError):  # a record after the commit may be incomplete
                    found.append(orjson.loads(line))
        return found


def check_files(directory: RunDirectory, state: State) -> None:
    """Raises DamagedFileError if a file that a commit names is missing or damaged. `state`: the commit as plain
    data."""
    shards = RolloutShards(directory.path)
    for shard in state["shards"]:
        shards.verify(ShardInfo.from_plain(shard))
    for name in state["weights"]:
        verify_checkpoint(directory.weights, name)
    if state["checkpoint"]:
        verify_checkpoint(directory.checkpoints, state["checkpoint"])
    for path in (directory.metrics, directory.spans):
        directory.verify_journal(state, path)


def checkpoints_of(store: FileStateStore) -> set[str]:
    """Names of the checkpoints of the last two commits; a run may have to resume from either."""
    return {commit["checkpoint"] for commit in store.commits() if commit["checkpoint"]}


def remove_uncommitted(directory: RunDirectory, state: Mapping[str, Any]) -> list[Path]:
    """Remove files that no commit names and temporary files of dead processes. Returns the removed paths. `state`: the
    last commit as plain data. Only the process that holds the run's lock may call this."""
    removed = RolloutShards(directory.path).recover([ShardInfo.from_plain(plain) for plain in state["shards"]])
    removed += prune(directory.checkpoints, checkpoints_of(FileStateStore(directory.state)))
    removed += prune(directory.weights, set(state["weights"]))
    return removed + directory.remove_temporaries()


def inputs_of(experiment: Experiment, *, only: str = "") -> dict[str, tuple[Path, str]]:
    """The digest of every file that a run of `experiment` reads, with its path, by a name that does not depend on the
    machine. A folder also has the digest of its files' names. Not what has a commit or a digest in its source (the hub,
    players of runs), belongs to an installed package, is part of the settings (prompts) or is missing. `only`: the
    setting of the only input to look at, such as a model that is read without the others."""
    found: dict[str, tuple[Path, str]] = {}
    for key, source in experiment.sources().items():
        if only not in ("", key):
            continue
        place = expanded(base_source(source), key)  # of a player of a run: the model that the run trained
        if key == "task.path":
            splits = files_of(place)[0].values() if place.is_dir() else [[place]]
            files = [file for split in splits for file in split if file.is_file()]
        elif place.is_dir():
            files = sorted(file for file in place.iterdir() if any(map(file.match, MODEL_FILES)) and file.is_file())
        else:
            continue
        weights = key != "task.path"
        found |= {f"{key}/{file.name}": (file, file_digest(file, weights=weights)) for file in files}
        if place.is_dir():
            names = orjson.dumps([file.name for file in files])
            found[key] = place, hashlib.sha256(names).hexdigest()
    own = {} if only else digests(experiment.own_code())
    return found | {path: (Path(path), digest) for path, digest in own.items()}


def check_same_inputs(state: State, experiment: Experiment, *, only: str = "") -> None:
    """Raises StateError if a file that the run reads has changed since it started. One that is missing is for the code
    that opens it. `state`: a commit as plain data."""
    inputs, folder = state.get("inputs", {}), state.get("folder", "")
    for name, (path, digest) in inputs_of(experiment, only=only).items():
        if inputs.get(name, digest) != digest:
            what = "has other files than when" if path.is_dir() else "has changed since"
            elsewhere = "" if folder in ("", str(Path.cwd())) else f" It started in the folder {folder}."
            raise StateError(
                f"{path} {what} this run started.{elsewhere}",
                "Restore it (the run's folder code/ has copies of Python files), or start a new run with --name.",
            )


def check_same_configuration(state: GameState, experiment: Experiment) -> list[str]:
    """The changes of MEMORY_SETTINGS, as text. Raises StateError, naming the changed settings, if a run is resumed with
    another configuration."""
    before, now = dict(state.config), experiment.hashed()
    changed = differences(without_memory_settings(before), without_memory_settings(now))
    if changed:
        raise StateError(
            f"The configuration differs from the one this run started with: {'; '.join(changed)}.",
            "Resume without the change, or start a new run with --name.",
        )
    return differences(before, now)


def extended(state: GameState, experiment: Experiment) -> GameState:
    """`state` with the rounds of `experiment`, if it has more: a complete run then enters its next round. No round
    depends on the number of rounds, so the result is that of a run that was planned with all of them."""
    wanted = experiment.game.rounds
    if state.config.get("game", {}).get("rounds", wanted) >= wanted:
        return state
    longer = {**state.config, "game": {**state.config["game"], "rounds": wanted}}
    # Not that of `experiment`, which may have other MEMORY_SETTINGS.
    state = replace(state, config=longer, config_hash=digest_of(longer))
    if state.phase is not Phase.COMPLETE:
        return state
    first = later_rounds_begin_with(self_play=experiment.task.kind == "play")
    return replace(state, phase=first, round=state.round + 1)


def shards_of(state: GameState, round_: int, phase: str) -> list[ShardInfo]:
    """The shards of one phase that `state` commits, in write order."""
    found = [ShardInfo.from_plain(plain) for plain in state.shards]
    return [info for info in found if info.round == round_ and info.label.startswith(f"{phase}-")]
