"""Publishes versions as fast as it can, and is killed. Run by test_transport_versions.py.

    python killed_publisher.py ROOT KILLS SEED

Forks a writer, kills it with SIGKILL at a random moment after its first version, looks at what it left, and forks the
next one, a separate session. Every folder without the name of a temporary must be whole; the next session removes
the temporaries. Prints "whole=N halves=M": versions found, and temporaries that the kills left behind.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import orjson
import torch
from safetensors.torch import load_file

from pvg.servers.publishing import PublishingSession, WeightLabel
from pvg.servers.transports.files import STABLE, VersionFolders, write_tensors

FILE = "model.safetensors"
RUN = "run"


def tensors(version: int) -> dict[str, torch.Tensor]:
    return {f"layer.{i}": torch.full((40_000,), float(version)) for i in range(20)}


def publish_for_ever(root: Path, told: int) -> None:
    session = PublishingSession.begin()
    folders = VersionFolders(root, RUN, session)
    version = 0
    while True:
        version += 1
        content = tensors(version)

        def fill(folder: Path, content: dict[str, torch.Tensor] = content) -> dict[str, int]:
            return {FILE: write_tensors(folder / FILE, content, torch.float32)}

        folders.write(WeightLabel(session, version), fill)
        os.write(told, b"version\n")
        folders.retire(2, [])


def kill_one(root: Path, fraction: float) -> None:
    """Fork a writer and kill it `fraction` of a version's time after its first."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            publish_for_ever(root, writer)
        finally:
            sys.excepthook(*sys.exc_info())  # only an error leads here
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        pipe.readline()
        started = time.monotonic()
        pipe.readline()
        time.sleep(fraction * (time.monotonic() - started))
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the writer failed"
    assert os.WTERMSIG(status) == signal.SIGKILL


def look(run: Path) -> tuple[set[str], set[str]]:
    """The versions, each of them whole, and the temporaries."""
    versions, temporaries = set(), set()
    for entry in run.iterdir():
        if entry.name.startswith(".tmp-"):
            temporaries.add(entry.name)
        elif entry.is_dir():
            sizes = orjson.loads((entry / STABLE).read_bytes())["files"]
            assert sizes == {FILE: {"bytes": (entry / FILE).stat().st_size}}
            wanted, found = tensors(int(entry.name[1:7])), load_file(entry / FILE)
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[name], wanted[name]) for name in wanted)
            versions.add(entry.name)
    return versions, temporaries


def main() -> None:
    root, kills, chance = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    torch.set_num_threads(1)
    whole: set[str] = set()
    halves: set[str] = set()
    for _ in range(kills):
        kill_one(root, chance.uniform(0.0, 1.5))
        versions, temporaries = look(root / RUN)
        whole |= versions
        halves |= temporaries
    last = VersionFolders(root, RUN, PublishingSession.begin())
    last.retire(1, [])
    assert look(root / RUN)[1] == set()
    last.close()
    print(f"whole={len(whole)} halves={len(halves)}")


if __name__ == "__main__":
    main()
