"""The first hour on a GPU, in nine minutes: tests, memory, times, parity, and one round of the embedded game.

    make gpu                                                       # finds a Python, then calls this
    python -m benchmarks.gpu --out docs/benchmarks/gpu             # with a Python that has everything
    python -m benchmarks.gpu --device cpu --small --out /tmp/gpu   # tests the scripts without a GPU

Every part is a process (`--only PART --here` runs one in this process), so a part that fails or takes too long costs no
other part. Their results go to OUT/PART.json, and together to OUT/report.md. Exit codes: 0 if all passed, 1 if a part
failed, 3 without a GPU. Nothing uses the network.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path

import torch

from benchmarks.gpu.results import Results, page_of
from benchmarks.gpu.sizes import LARGE, SMALL

ROOT = Path(__file__).parent.parent.parent
TOTAL_S = 540.0
EXIT_FAILED, EXIT_ENVIRONMENT = 1, 3
PART_S = 150.0  # of one part; on an H100 none should take more than 70 s
TESTS = "tests"  # the part that is pytest; the others are modules of this folder, with a function `measure`
# Part -> its title on the page, in the order of what a failure would tell most.
PARTS = {
    TESTS: "",
    "verifier": "verifier steps on long solutions",
    "steps": "optimizer steps",
    "decoding": "decoding",
    "full": "all weights trained",
    "ipc": "weights between two processes",
    "parity": "parity",
    "peer": "TRL, and a vocabulary of 262k",
    "game": "embedded game",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda:0", help="a torch device, such as cuda:1")
    parser.add_argument("--small", action="store_true", help="small models and batches, to test the scripts")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks" / "gpu", help="the folder for results")
    parser.add_argument("--only", choices=list(PARTS), help="run one part")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if complaint := _without(torch.device(arguments.device)):
        print(f"make gpu: {complaint}", file=sys.stderr)
        return EXIT_ENVIRONMENT
    if arguments.here:
        results, device = Results(PARTS[arguments.only]), torch.device(arguments.device)
        import_module(f"benchmarks.gpu.{arguments.only}").measure(results, SMALL if arguments.small else LARGE, device)
        return results.write(arguments.out / f"{arguments.only}.json", device)
    arguments.out.mkdir(parents=True, exist_ok=True)
    began, failures, written = time.monotonic(), list[str](), list[Path]()
    for part in PARTS:
        if arguments.only not in (None, part):
            continue
        found = arguments.out.resolve() / f"{part}.json"
        found.unlink(missing_ok=True)  # of an earlier call
        left_s = TOTAL_S - (time.monotonic() - began)
        if failure := run(part, arguments, min(PART_S, left_s)):
            failures.append(failure)
        if found.exists():
            written.append(found)
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in written]
    (arguments.out / "report.md").write_text(page_of(documents, failures), encoding="utf-8")
    print(f"\n{time.monotonic() - began:.0f} s. Results: {arguments.out / 'report.md'}")
    for failure in failures:
        print(failure, file=sys.stderr)
    return EXIT_FAILED if failures else 0


def run(part: str, arguments: argparse.Namespace, limit_s: float) -> str | None:
    """Run a part in a process. Returns what went wrong, if anything."""
    print(f"\n== {part}", flush=True)
    if limit_s <= 0:
        return f"{part}: no time was left."
    options = ["--device", arguments.device, "--out", str(arguments.out.resolve())]
    options += ["--small"] if arguments.small else []
    own = ["benchmarks.gpu", "--only", part, "--here", *options]
    command = [sys.executable, "-m", *(["pytest", "-q", "-m", "gpu", "tests/gpu"] if part == TESTS else own)]
    paths = [str(ROOT), str(ROOT / "cli"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PVG_GPU_TESTS_DEVICE": arguments.device}
    environment |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    if torch.device(arguments.device).type == "cpu":
        environment["OMP_NUM_THREADS"] = "1"
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as caught:
        try:
            code = subprocess.run(
                command, cwd=ROOT, env=environment, stderr=caught, timeout=limit_s, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            return f"{part}: stopped after its limit of {limit_s:.0f} s."
        caught.seek(0)
        errors = caught.read()
    sys.stderr.write(errors)
    print(f"   {time.monotonic() - began:.0f} s", flush=True)
    if code == 0:
        return None
    last = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "see the output above")
    return f"{part}: failed with exit code {code} ({last})."


def _without(device: torch.device) -> str | None:
    """Why the device cannot be used, if it cannot."""
    if device.type != "cuda":
        return None
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) < count:
        return None
    return f"there is no GPU {device} here; torch {torch.__version__} sees {count} GPUs."


if __name__ == "__main__":
    sys.exit(main())
