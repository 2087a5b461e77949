"""A scripted newcomer does what docs/tutorial.md says, word by word: its experiment, its commands, its program.

Only the sizes of the experiment are smaller. The model is a local folder with a chat template; the data are one file of
JSON lines. The page's program scores the exported verifier in a process that cannot import pvg.
"""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from calling import ENTRY
from safetensors.torch import load_file, save_file

from pvg.config.load import find_experiment

ROOT = Path(__file__).parent.parent.parent
TUTORIAL = ROOT / "docs" / "tutorial.md"
PATIENCE_S = 300.0
# The embedded model has learned no words. The tokenizer therefore reads long instructions with their examples as the
# character of the role, and nothing of the words around a problem and its solution.
TEMPLATE = (
    "{% if messages[0].role == 'system' %}"
    "\2{{ messages[0].content }}\4{% for m in messages[1:-1] %}{{ m.content }}{% endfor %}\3{{ messages[-1].content }}"
    "{% else %}{{ messages[0].content }}{% endif %}"
)
READ_AS = {
    "\4[^\3]*\3": "\3",
    "\2(?=[^\3]{20})[^\3]*wrong[^\3]*\3": "S",
    "\2[^\3]{20,}\3": "H",
    "[\2\3]|Problem:\n|\n\nSolution:\n": "",
}
SIZES = {
    "max_tokens": 48,
    "steps": 3,
    "groups": 8,
    "mint_problems": 48,
    "problems": 16,
    "attack_steps": 2,
    "attack_window": 1,
    "baseline_probes": 1,
}


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```", TUTORIAL.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [text for kind, text in found if kind == language]


def write_model(folder: Path) -> None:
    """The embedded prover with a chat template, and with tokens for all printable characters. The model treats the new
    ones as padding, so it hardly ever samples them."""
    shutil.copytree(ROOT / "pvg" / "models" / "embedded" / "modchain-prover", folder)
    tokenizer, settings, config, weights = (
        folder / name for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "model.safetensors")
    )
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": TEMPLATE}))
    rules = json.loads(tokenizer.read_text())
    vocabulary = rules["model"]["vocab"]
    for character in sorted({*"\n\2\3\4", *map(chr, range(32, 127))} - vocabulary.keys()):
        vocabulary[character] = len(vocabulary)
    changes = [{"type": "Replace", "pattern": {"Regex": old}, "content": new} for old, new in READ_AS.items()]
    rules["normalizer"] = {"type": "Sequence", "normalizers": changes}
    tokenizer.write_text(json.dumps(rules))
    config.write_text(json.dumps({**json.loads(config.read_text()), "vocab_size": len(vocabulary)}))
    tensors = load_file(weights)
    known_VD = tensors["model.embed_tokens.weight"]
    padding = known_VD[:1].expand(len(vocabulary) - len(known_VD), -1)
    save_file({**tensors, "model.embed_tokens.weight": torch.cat([known_VD, padding])}, weights, {"format": "pt"})


def write_data(file: Path) -> None:
    numbers = random.Random(0)
    rows = [[numbers.randrange(10) for _ in range(5)] for _ in range(360)]
    lines = [{"question": "+".join(map(str, row)) + "?", "answer": sum(row) % 10} for row in rows]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def called(words: list[str], folder: Path, environment: dict[str, str] | None = None) -> str:
    """What a program prints."""
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def write_solutions(folder: Path) -> list[float]:
    """solutions.jsonl with test solutions of the last round. Returns the scores that the game gave them."""
    [shard] = (folder / "runs" / "mine" / "rollouts" / "round-001").glob("checkpoint-*.arrow")
    rows = pa.ipc.open_file(shard).read_all().to_pylist()
    rows = [row for row in rows if row["source"] == "round-001"]
    lines = [json.dumps({"question": row["question"], "solution": row["text"]}) + "\n" for row in rows]
    (folder / "solutions.jsonl").write_text("".join(lines))
    return [row["score"] for row in rows]


def without_pvg(program: str, folder: Path) -> str:
    """What a Python program prints that finds the installed packages, but not pvg. With -S, Python does not read the
    .pth files of site-packages, and one of them leads to this checkout."""
    paths = [str(Path(module.__file__).parents[1]) for module in (torch, pa)]
    missing = "import importlib.util\nassert importlib.util.find_spec('pvg.version') is None\n"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
    words = [sys.executable, "-S", "-c", missing + program]
    return called(words, folder, environment)


@pytest.mark.drill
@pytest.mark.timeout(1800)
def test_a_newcomer_trains_and_opens_a_verifier(tmp_path: Path) -> None:
    write_model(tmp_path / "my-model")
    write_data(tmp_path / "problems.jsonl")
    [experiment] = blocks("toml")
    (tmp_path / "mine.toml").write_text(experiment)
    base = find_experiment("own").read_text()
    for name, size in SIZES.items():
        base = re.sub(rf"^{name} = \d+", f"{name} = {size}", base, flags=re.MULTILINE)
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "own.toml").write_text(base)

    commands = [shlex.split(line, comments=True) for line in "".join(blocks("")).splitlines()]
    assert all(program == "pvg" for program, *_ in commands)
    printed: dict[str, str] = {}
    training: list[str] = []
    in_game: list[float] = []
    for _, *words in commands:
        if words[0] == "train" and words[1] == "mine.toml":
            training = words
        elif "--live" in words:
            called([*ENTRY, *training], tmp_path)  # tests/cli/test_view_command.py follows runs
            in_game = write_solutions(tmp_path)
        else:
            name = " ".join(word for word in words if word in (words[0], "--dry-run", "game.rounds=1"))
            printed[name] = called([*ENTRY, *words], tmp_path)

    first = ["train --dry-run", "train", "evaluate", "train game.rounds=1"]
    assert list(printed) == [*first, "check", "rollout", "view", "export", "score"]
    for command in ("check", "train --dry-run"):  # the prompts of both roles, and what known answers are graded
        assert re.search(r"Prompt of the helpful role .*\n  \| H\d\+", printed[command])
        assert re.search(r"Prompt of the sneaky role .*\n  \| S\d\+", printed[command])
        assert re.search(r"the reference( answer)? +'#### \d' +correct", printed[command])
    assert "FAILED" not in printed["check"]
    assert "Input of the verifier" in printed["train --dry-run"]
    assert "2 of 2 rounds" in printed["train"]
    assert "1 of 1 round" in printed["train game.rounds=1"]
    assert "correct" in printed["rollout"]
    assert (tmp_path / "runs" / "mine" / "report.html").stat().st_size > 10_000

    by_pvg = [json.loads(line)["score"] for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert by_pvg == pytest.approx(in_game, abs=1e-4)
    assert len(set(by_pvg)) > 1
    [program] = blocks("python")
    found = re.search(r"largest difference (\S+), acceptance threshold (\S+)", without_pvg(program, tmp_path))
    assert found is not None
    assert float(found[1]) < 1e-4
    facts = json.loads((tmp_path / "my-verifier" / "config.json").read_text())["pvg"]
    assert float(found[2]) == pytest.approx(facts["threshold"], abs=1e-3)
