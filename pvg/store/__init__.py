"""A run's files on disk, which survive a kill at any instant. Each module states its invariants.

`pvg.store.checkpoints` is not imported here, because it is the only module that loads torch (when it is called).
"""

from pvg.store.atomic import DamagedFileError, write_atomic
from pvg.store.journal import JsonLines, JsonLinesReader, read_json_lines
from pvg.store.manifest import Manifest, write_manifest
from pvg.store.pairs import MissingPairsError, Pairs, PairStream, PairView, Singles, is_held_out
from pvg.store.run_directory import RunDirectory, runs_in
from pvg.store.samples import SolutionRow
from pvg.store.shards import RolloutShards, ShardInfo
from pvg.store.state import FileStateStore, LoadedState

__all__ = [
    "DamagedFileError",
    "FileStateStore",
    "JsonLines",
    "JsonLinesReader",
    "LoadedState",
    "Manifest",
    "MissingPairsError",
    "PairStream",
    "PairView",
    "Pairs",
    "RolloutShards",
    "RunDirectory",
    "ShardInfo",
    "Singles",
    "SolutionRow",
    "is_held_out",
    "read_json_lines",
    "runs_in",
    "write_atomic",
    "write_manifest",
]
