"""Pages that list things name all of them, and the page about files is right about the files of a run."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pvg
from pvg.config.load import load_experiment
from pvg.game.rewards import REWARDS
from pvg.store.shards import SCHEMA
from pvg.telemetry.catalogue import LABELS, METRICS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
# These modules write the tables and the curves of a run and of its evaluation.
SHOWN_BY = ("formats.py", "terminal.py", "run_sections.py", "evaluation.py")
DATA = ("formats.toml", "evaluation.toml")
ABBREVIATION = re.compile(r"\b[A-Z]{2,}\b")


def terms() -> set[str]:
    """The words of the first columns of the tables of terms."""
    rows = re.findall(r"^\| (?!term \|)([^|]+) \|", (DOCS / "concepts.md").read_text(), flags=re.MULTILINE)
    return {term.strip(" `") for row in rows for term in row.split(",")}


def sentences(path: Path) -> Iterator[str]:
    """The string constants of a module that contain several words, without docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    texts = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in docstrings)
    yield from (node.value for node in texts if isinstance(node.value, str) and " " in node.value)


def test_the_glossary_has_every_abbreviation_that_the_display_and_the_reports_show() -> None:
    texts = [metric.meaning for metric in METRICS.values()] + list(LABELS.values())
    texts += [text for name in SHOWN_BY for text in sentences(ROOT / "pvg" / "reporting" / name)]
    texts += re.findall(
        r"^[^#].*", "\n".join((ROOT / "pvg/reporting" / name).read_text() for name in DATA), re.MULTILINE
    )
    shown = {word for text in texts for word in ABBREVIATION.findall(text)}
    assert {"AUC", "KL", "ROC"} <= shown
    assert shown - terms() == set()


def test_the_glossary_has_every_reward_and_the_columns_of_the_rounds_table() -> None:
    named = {"helpful accuracy", "sneaky errors", "fooled rate", "acceptance threshold", "score gap", "malformed"}
    assert {*REWARDS, *named} - terms() == set()


@pytest.mark.parametrize("path", sorted((ROOT / "experiments").glob("*.toml")), ids=lambda path: str(path.stem))
def test_every_experiment_is_a_recipe_with_a_command(path: Path) -> None:
    page = (DOCS / "quickstart.md").read_text()
    name = load_experiment(path).name
    assert re.search(rf"^\| `pvg train {name}[` ]", page, flags=re.MULTILINE)


SHORT = {"cluster": "none", "game.rounds": 1, "game.mint_problems": 24, "game.test.problems": 8}
SHORT |= {"training.steps": 1, "training.groups": 2, "verifier.steps": 2}


def test_the_programs_of_the_page_about_files_read_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = pvg.play(str(ROOT / "experiments" / "modchain.toml"), SHORT, name="modchain")
    page = (DOCS / "files.md").read_text()
    programs = re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    assert len(programs) == 3
    printed = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
        for program in programs
    ]
    solutions, metrics, weights = printed
    assert all(f"'source': '{source}', 'role': 'sneaky'" in solutions for source in ("base", "round-000"))
    assert f"[{run.rounds[0]['fooled_rate']}]" in metrics
    assert "(19, 64)" in weights  # tokens and width of the embedded verifier
    files = {str(path.relative_to(run.path)) for path in run.path.rglob("*") if path.is_file()}
    unknown = {name for name in files if f"`{name.split('/')[0]}" not in page}
    assert unknown == set()


def test_the_page_about_files_has_every_column_of_a_shard() -> None:
    rows = re.findall(r"^\| (`[^|]+) \|", (DOCS / "files.md").read_text(), flags=re.MULTILINE)
    named = {name.strip(" `") for row in rows for name in row.split(",")}
    assert set(SCHEMA.names) - named == set()
