"""The first hour on a GPU, in ten minutes: tests, parity, times, and one round of the embedded game, on one device.

    make gpu                                                       # finds a Python, then calls this
    python -m benchmarks.gpu --out docs/benchmarks/gpu             # with a Python that has everything
    python -m benchmarks.gpu --device cpu --small --out /tmp/gpu   # tests the scripts without a GPU

Every part is a process, so a part that fails or takes too long costs no other part. Their results go to OUT/PART.json,
and together to OUT/report.md. Exit codes: 0 if all passed, 1 if a part failed, 3 without a GPU. Nothing uses the
network.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu.results import page_of

ROOT = Path(__file__).parent.parent.parent
TOTAL_S = 585.0  # leaves some seconds of ten minutes for the environment
EXIT_FAILED, EXIT_ENVIRONMENT = 1, 3


@dataclass(frozen=True, slots=True)
class Part:
    """`command` follows "python -m". `limit_s`: of this part; also, all parts together take at most TOTAL_S."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    takes_arguments: bool = True


# In the order of what a failure would tell most. On an H100 no part took more than 70 s.
PARTS = (
    Part("tests", ("pytest", "-q", "-m", "gpu", "tests/gpu"), 150, takes_arguments=False),
    Part("parity", ("benchmarks.gpu.parity",), 150),
    Part("steps", ("benchmarks.gpu.steps",), 150),
    Part("decoding", ("benchmarks.gpu.decoding",), 150),
    Part("game", ("benchmarks.gpu.game",), 150),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda:0", help="a torch device, such as cuda:1")
    parser.add_argument("--small", action="store_true", help="small models and batches, to test the scripts")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks" / "gpu", help="the folder for results")
    parser.add_argument("--only", choices=[part.name for part in PARTS], help="run one part")
    arguments = parser.parse_args()
    if complaint := _without(torch.device(arguments.device)):
        print(f"make gpu: {complaint}", file=sys.stderr)
        return EXIT_ENVIRONMENT
    arguments.out.mkdir(parents=True, exist_ok=True)
    began, failures, written = time.monotonic(), list[str](), list[Path]()
    for part in PARTS:
        if arguments.only not in (None, part.name):
            continue
        found = arguments.out.resolve() / f"{part.name}.json"
        found.unlink(missing_ok=True)  # of an earlier call
        left_s = TOTAL_S - (time.monotonic() - began)
        if failure := run(part, arguments, found, min(part.limit_s, left_s)):
            failures.append(failure)
        if found.exists():
            written.append(found)
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in written]
    (arguments.out / "report.md").write_text(page_of(documents, failures), encoding="utf-8")
    print(f"\n{time.monotonic() - began:.0f} s. Results: {arguments.out / 'report.md'}")
    for failure in failures:
        print(failure, file=sys.stderr)
    return EXIT_FAILED if failures else 0


def run(part: Part, arguments: argparse.Namespace, found: Path, limit_s: float) -> str | None:
    """Run a part in a process. Returns what went wrong, if anything."""
    print(f"\n== {part.name}", flush=True)
    if limit_s <= 0:
        return f"{part.name}: no time was left."
    command = [sys.executable, "-m", *part.command]
    if part.takes_arguments:
        command += ["--device", arguments.device, "--out", str(found), *(["--small"] if arguments.small else [])]
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
            return f"{part.name}: stopped after its limit of {limit_s:.0f} s."
        caught.seek(0)
        errors = caught.read()
    sys.stderr.write(errors)
    print(f"   {time.monotonic() - began:.0f} s", flush=True)
    if code == 0:
        return None
    last = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "see the output above")
    return f"{part.name}: failed with exit code {code} ({last})."


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
