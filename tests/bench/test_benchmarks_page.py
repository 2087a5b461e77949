"""docs/benchmarks.md and the README's ladder are what the committed reports give, and other systems stand beside ours
for the same work only. (Targets and scaling: test_benchmarks_page_tables.py.)"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
from bench_runs import load_profile
from made_reports import ENVIRONMENT, PROFILE, failed_report, higher, lower, made_report, saved, variant

from benchmarks.pages.make_benchmarks import main
from benchmarks.pages.other_ladders import outdated
from benchmarks.pages.reference_figures import reference_lines
from benchmarks.pages.targets import TARGETS
from pvg.bench.planning import plan_bench

DOCS = Path(__file__).parents[2] / "docs"


def made(reports: Path, *arguments: str) -> tuple[int, str, str]:
    """(exit code, the page, stderr) of the script, for the reports of a folder."""
    out, told = reports / "page.md", io.StringIO()
    with contextlib.redirect_stderr(told):
        code = main(["--reports", str(reports), "--out", str(out), *arguments])
    return code, out.read_text() if out.exists() else "", told.getvalue()


def test_page_and_readme_in_the_repository_are_what_the_reports_give() -> None:
    command = [sys.executable, "-m", "benchmarks.pages.make_benchmarks", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=DOCS.parent)
    assert done.returncode == 0, done.stderr


def test_a_page_without_reports_says_so(tmp_path: Path) -> None:
    code, page, _ = made(tmp_path)
    assert code == 0
    assert "There are no reports yet." in page
    assert "**500k preference pairs (1.9 GB of JSONL) up to the first batch**: 13.1 s" in page
    assert "There is no report of the profile `data` yet." in page


LADDER = {
    **PROFILE,
    "ladder": [{"switch": "rollout.engine.max_rows", "slow": 8, "fast": 256, "says": "decoded together"}],
}


def write_three(folder: Path) -> None:
    fast, slow = [100.0, 101.0, 99.0, 100.5, 99.5], [50.0, 50.5, 49.5, 50.25, 49.75]
    ran = variant(
        {"wall_s": lower([0.5, 0.4, 0.6]), "tokens_per_s": higher([90.0, 100.0, 110.0])}, derived={"share": 0.25}
    )
    saved(made_report(ran), folder / "z.json")
    saved(
        made_report(
            variant({"tokens_per_s": higher(slow)}, "all slow"),
            variant({"tokens_per_s": higher(fast)}, "rollout.engine.max_rows=256"),
            kind="ablation",
            config={"profile": LADDER, "experiment": {}, "interleave": True},
            command="pvg bench --profile rollout --ablate",
        ),
        folder / "a.json",
    )
    saved(
        made_report(
            *[variant({"tokens_per_s": higher(values), "wall_s": lower(values)}, f"rollout.engine.max_rows={rows}")
              for rows, values in ((8, slow), (256, fast))],
            command="pvg bench --profile rollout --sweep rollout.engine.max_rows=8,256",
        ),
        folder / "s.json",
    )  # fmt: skip


def test_measures_ladder_and_sweep(tmp_path: Path) -> None:
    write_three(tmp_path)
    code, page, _ = made(tmp_path)
    assert code == 0
    assert (
        page.index("### Measures")
        < page.index("### Gain of each switch")
        < page.index("### By rollout.engine.max_rows")
    )
    assert "Tokens per second.\n" in page
    assert "    pvg bench --profile rollout --ablate\n" in page
    assert "| tokens_per_s | 100 | 90 – 110 | tokens/s | higher |" in page
    assert "| share | 0.25 |" in page
    assert "Time by part: decode 100 %; unaccounted: 0.0 %." in page
    assert "| all slow |  | 50 |  |  |" in page
    (rung,) = [
        line
        for line in page.splitlines()
        if line.startswith("| `rollout.engine.max_rows=256` | decoded together | 100 |")
    ]
    assert rung.endswith("| **2.00x** (2.000–2.000) | 2.00x (2.000–2.000) |")  # round by round, it is exactly twice
    assert "samples taken in turn, 2026-11-21, pvg 0.1.0 (0123456789)." in page
    assert any(line.startswith("| 256 | 100 | 2.00x (1.9") and line.endswith("| 100 |") for line in page.splitlines())
    assert page.count("A CPU, 2 cores") == 1


def test_machines_that_differ_are_named_at_each_report(tmp_path: Path) -> None:
    write_three(tmp_path)
    other = ENVIRONMENT.model_copy(update={"gpu": "H200", "driver": "580", "cores": 16, "git_dirty": True})
    ran = variant({"wall_s": lower([1.0] * 5)})
    saved(made_report(ran, environment=other, config={"profile": PROFILE, "experiment": {}}), tmp_path / "gpu.json")
    page = made(tmp_path)[1]
    assert "the machines differ" in page
    assert page.count("A CPU, 2 cores, 8 GB of memory; Python") == 3
    assert "A CPU, 16 cores, 8 GB of memory, H200 (driver 580)" in page
    assert "(0123456789, with uncommitted changes)" in page


def test_reports_on_servers_have_their_own_part_and_say_what_served(tmp_path: Path) -> None:
    """Of the same workload and machine: only the version of vLLM and the servers are shown with the report."""
    write_three(tmp_path)
    served = made_report(
        *[variant({"tokens_per_s": higher(values)}, f"rollout.concurrency={n}")
          for n, values in ((8, [50.0] * 5), (64, [100.0] * 5))],
        name="rollout-vllm",
        environment=ENVIRONMENT.model_copy(update={"vllm": "0.32.0"}),
        config={
            "profile": PROFILE | {"name": "rollout-vllm", "about": "tokens per second of a server"},
            "experiment": {},
            "servers": {"count": 2, "model": "modchain-prover", "max_num_seqs": [16, 64]},
        },
    )  # fmt: skip
    saved(served, tmp_path / "v.json")
    page = made(tmp_path)[1]
    assert page.index("## rollout\n") < page.index("## rollout-vllm\n")
    assert "Tokens per second of a server.\n" in page
    assert page.count("A CPU, 2 cores") == 1
    assert "pvg 0.1.0 (0123456789), vLLM 0.32.0." in page
    assert "2 servers: model modchain-prover, max_num_seqs [16, 64]." in page
    assert "| 64 | 100 | 2.00x (2.00" in page


def test_check_fails_when_the_page_is_another_one(tmp_path: Path) -> None:
    write_three(tmp_path)
    (tmp_path / "a.json").unlink()  # of another ladder than the shipped profile's
    code, page, err = made(tmp_path, "--check")
    assert (code, page) == (1, "")
    assert "python -m benchmarks.pages.make_benchmarks" in err
    made(tmp_path)
    assert made(tmp_path, "--check")[0] == 0
    (tmp_path / "page.md").write_text((tmp_path / "page.md").read_text().replace("| 100 | 90", "| 101 | 90"))
    code, page, err = made(tmp_path, "--check")
    assert code == 1
    assert "| 101 | 90" in page  # it writes nothing
    assert "-| tokens_per_s | 101 | 90" in err
    assert "+| tokens_per_s | 100 | 90" in err


def of_its_profile(name: str, kind: str, **changes: Any) -> Any:
    """A report as the shipped profile's own ladder, or sweep, would give it; `changes` are of its profile then."""
    own = DOCS.parent / "benchmarks" / f"{name}.toml"
    settings = load_profile(str(own) if own.is_file() else name)
    profile = json.loads(orjson.dumps(settings.plain()["profile"])) | changes
    labels = ("first", "second")
    return made_report(
        *(variant({profile["headline"]: higher([1.0] * 5)}, label) for label in labels),
        kind=kind,
        name=name,
        profile=settings.profile.workload_name,
        config={"profile": profile, "experiment": {}},
        command=f"pvg bench --profile {name}" + (" --ablate" if kind == "ablation" else ""),
    )


def test_a_report_of_another_ladder_than_its_profiles_is_named_with_what_to_repeat(tmp_path: Path) -> None:
    (tmp_path / "now").mkdir()
    (tmp_path / "then").mkdir()
    rungs = load_profile("benchmarks/loop.toml").plain()["profile"]["ladder"]
    words = [rung | {"says": "in other words"} for rung in rungs]  # measures nothing else
    saved(of_its_profile("loop", "ablation", ladder=words), tmp_path / "now" / "loop-ablation.json")
    assert made(tmp_path / "now")[::2] == (0, "")
    assert made(tmp_path / "now", "--check")[::2] == (0, "")
    for other in (rungs[:-1], [*rungs[:-1], rungs[-1] | {"slow": "elsewhere"}], [*rungs[1:], rungs[0]]):
        saved(of_its_profile("loop", "ablation", ladder=other), tmp_path / "then" / "loop-ablation.json")
        told = "loop-ablation.json was measured with another ladder: repeat pvg bench --profile loop --ablate\n"
        assert made(tmp_path / "then")[::2] == (0, told)  # the page is as the reports are
        assert made(tmp_path / "then", "--check")[::2] == (1, told)


def test_a_sweep_that_was_asked_for_is_no_other_sweep_but_an_older_one_of_the_profile_is() -> None:
    whole = of_its_profile("stragglers", "sweep")
    older = of_its_profile("stragglers", "sweep", sweep=whole.config["profile"]["sweep"][:-1])
    asked = older.model_copy(update={"command": "pvg bench --profile stragglers --sweep workload.sigma=1,2"})
    plain = of_its_profile("rollout", "sweep", ladder=[])
    found = list(outdated({"a.json": whole, "b.json": older, "c.json": asked, "d.json": plain}))
    assert found == ["b.json was measured with another sweep: repeat pvg bench --profile stragglers"]


def test_failed_and_broken_reports_make_no_page(tmp_path: Path) -> None:
    saved(failed_report(), tmp_path / "failed.json")
    code, page, err = made(tmp_path)
    assert (code, page) == (2, "")
    assert "failed: No model of that name." in err
    (tmp_path / "failed.json").write_text("{}")
    assert made(tmp_path)[0] == 2


# --- how the reports are made -----------------------------------------------------------------------------------------


def made_by_make() -> set[str]:
    """The reports that the Makefile's targets write; those of vLLM's sweeps, whose names the shell makes, aside."""
    text = (DOCS.parent / "Makefile").read_text()
    loops = re.findall(r"for profile in ([^;]+);[^;]+--out \$\(REPORTS\)/\$\$profile(\S*\.json)", text)
    swept = {f"{name}{end}" for names, end in loops for name in names.replace("\\", " ").split()}
    return swept | set(re.findall(r"\$\(REPORTS\)/([a-z0-9-]+\.json)", text))


def test_make_writes_every_report_that_the_page_shows_or_wants() -> None:
    shown = {path.name for path in (DOCS / "benchmarks").glob("*.json") if not path.name.startswith("rollout-vllm-")}
    assert (shown | {target.file for target in TARGETS}) - made_by_make() == set()


def test_every_command_that_a_profile_names_can_be_planned() -> None:
    """Those that need no server or run, up to their first sample."""
    planned = 0
    for path in sorted(path for folder in ("profiles", "benchmarks") for path in (DOCS.parent / folder).glob("*.toml")):
        for command in re.findall(r"^#   pvg bench (--profile .*?)(?:  .*)?$", path.read_text(), re.MULTILINE):
            words = shlex.split(command)
            if {"--server", "--serve", "--replay"} & set(words):
                continue
            options = argparse.ArgumentParser()
            options.add_argument("--profile")
            options.add_argument("--sweep")
            options.add_argument("-s", action="append", default=[])
            options.add_argument("--ablate", action="store_true")
            options.add_argument("--interleave", action="store_true")
            given = options.parse_args(words)
            plan_bench(given.profile, given.s, sweep=given.sweep, ablate=given.ablate)
            planned += 1
    assert planned > 20


# --- beside the figures of others ------------------------------------------------------------------------------------

DATA_WORK = {"pairs": [5008, 50_000, 500_000], "mean_tokens": 450}
TRL_WORK = {
    "prover_parameters": 860_032, "groups": 32, "group_size": 8, "steps": 1, "kl": 0.01,
}  # fmt: skip


def data_report(**changes: Any) -> Any:
    ran = variant({"first_batch_s_500k": lower([1.31] * 5), "peak_memory_mb_500k": lower([50.0] * 5, "MB")})
    return made_report(ran, **({"profile": "data", "work": DATA_WORK} | changes))


def beside(*reports: Any) -> list[str]:
    return [line for line in reference_lines(reports) if line.startswith("| ") and "---" not in line][1:]


def test_the_same_work_stands_beside() -> None:
    rows = beside(data_report())
    assert len(rows) == 2
    assert "| 13.1 s | 1.31 s | 10.00x |" in rows[0]
    assert "| 2.5 GB | 50 MB | 50.00x |" in rows[1]


def test_other_work_does_not_and_the_page_says_why() -> None:
    small = data_report(work=DATA_WORK | {"pairs": [5008, 50_000]})
    cores = data_report(environment=ENVIRONMENT.model_copy(update={"cores": 16}))
    assert beside(small) == beside(cores) == []
    assert "Ours has 5,008 / 50,000 pairs, not 500,000." in "\n".join(reference_lines([small]))
    assert "Ours is of 16 cores, not 2." in "\n".join(reference_lines([cores]))
    assert len(beside(small, data_report())) == 2  # any report of the same work will do


def test_a_sweep_has_no_default_to_stand_beside() -> None:
    variants = [variant({"first_batch_s_500k": lower([1.0] * 5)}, f"k={value}") for value in (1, 2)]
    assert beside(made_report(*variants, profile="data", work=DATA_WORK)) == []


def test_a_step_with_kl_stands_beside_the_one_with_kl_only() -> None:
    def step(work: dict[str, Any], tokens: float = 37.0) -> Any:
        ran = variant({"step_s": lower([0.62] * 5)}, derived={"completion_tokens": tokens})
        return made_report(ran, profile="e2e", work=work)

    (row,) = beside(step(TRL_WORK))
    assert "a step with KL to a reference" in row
    assert "| 1.24 s | 0.62 s | 2.00x |" in row
    (row,) = beside(step(TRL_WORK | {"kl": 0.0}))
    assert "| 1.10 s | 0.62 s | 1.77x |" in row
    assert beside(step(TRL_WORK, tokens=12.0)) == []
    assert beside(step(TRL_WORK | {"prover_parameters": 421_120})) == []
    assert beside(step({})) == []


def test_figures_of_another_kind_of_system_never_stand_beside() -> None:
    ran = variant({"loaded_wall_p50_ms": lower([1.0] * 5, "ms"), "lag_max_ms": lower([1.0] * 5, "ms")})
    assert beside(made_report(ran, profile="sync"), made_report(ran, profile="loop")) == []
    text = "\n".join(reference_lines([]))
    assert "8.58 s through a shared client, 55 ms through a dedicated one (prime-rl's own figures)." in text
