"""`pvg measure` is killed again and again, and ends with the numbers of a measurement that ran through."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time

import pytest
from cli.calling import ENTRY

from pvg.tasks.modchain import chain_problem, clean_trace

pytestmark = pytest.mark.drill
COMMAND = [*ENTRY, "measure", "t.jsonl", "--reader", "embedded:modchain-prover", "--max-tokens", "24", "--out"]


def numbers(folder):
    found = json.loads((folder / "measures.json").read_text())
    return found["sources"], found["traces"]


def test_a_killed_measurement_continues(tmp_path):
    problems = [chain_problem((a, b, 3, 4, c), 10) for a in range(10) for b in range(10) for c in range(4)]
    rows = [{"question": p.question, "text": clean_trace(p), "truth": p.answer} for p in problems]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    subprocess.run([*COMMAND, "whole"], cwd=tmp_path, check=True, capture_output=True, timeout=600)
    kept, kills, draw = tmp_path / "killed" / "results.jsonl", 0, random.Random(0)
    while True:
        process = subprocess.Popen(
            [*COMMAND, "killed"], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        size, wanted = kept.stat().st_size if kept.exists() else 0, draw.randrange(1, 40_000)
        while process.poll() is None and not (kept.exists() and kept.stat().st_size > size + wanted):
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL if kills else signal.SIGINT)
        _, said = process.communicate()
        if process.returncode == 0:
            break
        assert process.returncode == (-signal.SIGKILL if kills else 130), said.decode()
        kills += 1
    assert kills >= 2
    assert numbers(tmp_path / "killed") == numbers(tmp_path / "whole")
