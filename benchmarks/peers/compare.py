"""Compares pvg with the best-known trainer, TRL: the same work, both sides in turn within one run.

    make bench-peers                                                       # all rows, and the page
    .venv/bin/python benchmarks/peers/compare.py grpo -s training.kl.coefficient=0   # one row: grpo.toml, verifier.toml
    .venv/bin/python benchmarks/peers/compare.py verifier -s verifier.pairs=64 --out verifier.json

Settings (-s): of pvg's experiment as anywhere else, `work.X` for what is worked on, `trl.X` for TRL's own, `warmup` and
`repeats`. The report is one of `pvg bench`, of a sweep over the two trainers; TRL's side is in `config.peer`.
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from sides import Side
from work import CONTEXT, PARAMETERS, make_model, model_folder, solutions, write_work

from pvg import spinning
from pvg.bench.report import BenchReport, read_environment, usable_cores, write_report
from pvg.bench.runner import SampleTaken, VariantTrial, common_work, on_loop, run_trials
from pvg.bench.workloads import BenchMetric
from pvg.config.experiment import Experiment
from pvg.config.load import assign, build_experiment, parse_override, read_toml
from pvg.errors import EXIT_CHECK_FAILED, ConfigurationError, MissingRequirementError, PvgError, UsageError
from pvg.game.roles import TAGS
from pvg.records import Role
from pvg.tasks import open_task, problems_of_half
from pvg.training.trainer import OptimizerSettings
from pvg_cli.bench_tables import variants_table

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PEER = ROOT / ".venv-peers" / "bin" / "python"
NAME = "peers"
ABOUT = "pvg beside TRL, each in its own environment: the same model, the same work, in turn within one run"

MEASURES: dict[str, dict[str, BenchMetric]] = {
    "grpo": {
        "step_s": BenchMetric("s", "lower", "one whole step: rollouts, rewards, log-probs, update"),
        "rollout_s": BenchMetric("s", "lower", "of it, up to a batch with rewards, advantages and reference log-probs"),
        "train_s": BenchMetric("s", "lower", "of it, the rest: loss, gradient, update"),
    },
    "verifier": {
        "pairs_per_s": BenchMetric("pairs/s", "higher", "from the first batch to the last update"),
        "pairs_per_s_in_all": BenchMetric("pairs/s", "higher", "what comes before the first batch included"),
        "first_batch_s": BenchMetric("s", "lower", "from the stored solutions, or the texts, to the first batch"),
    },
}
# What both sides tell of their work, and by how much it may differ: pvg's scalar head has a bias, TRL's has none.
ALIKE = {"prompt_tokens": 0.0, "solution_tokens": 0.0, "threads": 0.0, "parameters": 1e-5, "completion_tokens": 0.0}
DRAWN = 0.1  # completion tokens, where it is drawn when a completion ends


class PeerWorkError(PvgError):
    """The sides did not do the same work: no ratio of theirs means anything."""

    exit_code = EXIT_CHECK_FAILED


@dataclass(frozen=True)
class PeerComparison:
    """One comparison, resolved. `work` and `trl` are the tables of its file."""

    name: str
    headline: str
    warmup: int
    repeats: int
    work: dict[str, Any]
    trl: dict[str, Any]
    experiment: Experiment
    threads: int


def read_comparison(name: str, overrides: Sequence[str]) -> PeerComparison:
    """Raises UsageError for an unknown row, ConfigurationError for a setting that is none."""
    if name not in MEASURES:
        raise UsageError(f"There is no comparison {name!r}.", f"Known: {', '.join(MEASURES)}.")
    data = read_toml(HERE / f"{name}.toml", "comparison")
    origins = {}
    for override in overrides:
        key, value = parse_override(override)
        own = key.split(".")[0] in ("work", "trl") or key in ("warmup", "repeats")
        if key.startswith("work.") and key.removeprefix("work.") not in data["work"]:
            raise ConfigurationError(f"{key!r} is no setting of {name}.", f"Known: {', '.join(data['work'])}.")
        assign(data if own else data["experiment"], key, value)
        origins[key] = f"--set {override}"
    models = data["experiment"].setdefault("models", {})
    threads = models.setdefault("threads", 0) or usable_cores()
    models["threads"] = threads
    if (cluster := data["experiment"]["cluster"])["kind"] == "local":
        models["threads"] = 1  # of the driver
        cluster.setdefault("workers", threads)
    experiment = build_experiment(data["experiment"], f"{name}.toml", origins)
    if experiment.training.minibatches != 1:
        raise ConfigurationError("A step of the comparison is a whole batch.", "Leave training.minibatches at 1.")
    return PeerComparison(
        name, data["headline"], data["warmup"], data["repeats"], data["work"], data["trl"], experiment, threads
    )


def prepare(row: PeerComparison, folder: Path) -> tuple[Experiment, dict[str, Any]]:
    """Write what the workers read; pvg's experiment with the model in it, and what a report says of the work."""
    make_model(folder, stops=row.work.get("stops", True))
    data = row.experiment.plain()
    for player in ("prover", "verifier"):
        data["models"][player] = {"source": str(model_folder(folder))}
    experiment = build_experiment(data)
    own, told = {"grpo": _grpo_work, "verifier": _verifier_work}[row.name](row, experiment)
    write_work(folder, own | {"threads": row.threads, "experiment": experiment.plain(), "trl": row.trl})
    return experiment, told | {"parameters": PARAMETERS, "context": CONTEXT, "threads": row.threads}


def _grpo_work(row: PeerComparison, experiment: Experiment) -> tuple[dict[str, Any], dict[str, Any]]:
    training, rollout = experiment.training, experiment.rollout
    told = {
        "groups": training.groups,
        "group_size": rollout.group_size,
        "max_tokens": rollout.max_tokens,
        "temperature": rollout.temperature,
        "kl": training.kl.coefficient,
        "learning_rate": training.learning_rate,
        "gradient_clip": OptimizerSettings(0.0).gradient_clip,
    }
    pool = problems_of_half(open_task(experiment.task), "prover")[: row.work["prompts"]]
    prompts = [TAGS[Role.HELPFUL] + problem.question for problem in pool]
    return told | {"prompts": prompts}, told | {"loss": training.loss.kind, "stops": row.work["stops"]}


def _verifier_work(row: PeerComparison, experiment: Experiment) -> tuple[dict[str, Any], dict[str, Any]]:
    rng, section, task = random.Random(experiment.seed), experiment.verifier, experiment.task
    count = row.work["solutions"]
    modulus = getattr(task, "modulus", 10)
    pool = problems_of_half(open_task(task), "verifier")[: row.work["problems"]]
    try:
        problems = [
            {"id": p.id, "question": p.question} | {"solutions": solutions(p.question, modulus, count, rng)}
            for p in pool
        ]
    except ValueError as error:
        raise ConfigurationError(f"{error}.", "Lower work.solutions, or raise task.min_terms.") from None
    formed = len(problems) * (count - count // 2) * (count // 2)
    if formed % section.pairs:
        raise ConfigurationError(
            f"{formed} pairs are no whole number of batches of {section.pairs} (verifier.pairs).",
            "Change work.problems, work.solutions or verifier.pairs.",
        )
    told = {
        "pairs": section.pairs,
        "learning_rate": section.learning_rate,
        "gradient_clip": OptimizerSettings(0.0).gradient_clip,
        "pairs_formed": formed,
    }
    return told | {"problems": problems}, told | {
        "head": section.head.kind,
        "loss": section.loss,
        "solutions": len(problems) * count,
    }


def sides(row: PeerComparison, folder: Path, shared: Mapping[str, Any], peer: Path) -> dict[str, Side]:
    """TRL's first: the one that ours is compared with."""
    environment = dict(os.environ) | {
        "OMP_NUM_THREADS": str(row.threads),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "hugging-face"),
        "TOKENIZERS_PARALLELISM": "true",
    }
    if not any(name in environment for name in (spinning.VARIABLE, *spinning.OTHERS)):
        environment[spinning.VARIABLE] = str(spinning.TURNS)  # as `pvg` itself has it; TRL's threads share the gain
    ours = environment | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    theirs = {key: value for key, value in environment.items() if key != "PYTHONPATH"}
    workers = {"TRL": (peer, "trl", theirs), "pvg": (Path(sys.executable), "pvg", ours)}
    return {
        name: Side(
            name,
            [str(python), str(HERE / f"{script}_{row.name}.py"), str(folder)],
            environment=variables,
            log=folder / f"{script}.log",
            measures=MEASURES[row.name],
            shared=shared,
        )
        for name, (python, script, variables) in workers.items()
    }


def compare(row: PeerComparison, *, command: str, peer: Path = PEER) -> tuple[BenchReport, int]:
    """The report, and the exit code. Raises MissingRequirementError without TRL's environment, PeerWorkError where the
    two sides' work differs."""
    if not peer.exists():
        raise MissingRequirementError("TRL's environment is not there.", "make peers")
    with tempfile.TemporaryDirectory(prefix="pvg-peers-") as scratch:
        folder = Path(scratch)
        _, shared = prepare(row, folder)
        found = sides(row, folder, shared, peer)
        trials = [_trial(row, name, side) for name, side in found.items()]
        created = datetime.now(UTC).isoformat(timespec="seconds")
        on_loop(run_trials(trials))
    results = [trial.result() for trial in trials]
    variants = [variant for variant, _ in results]
    works = [work for _, work in results]
    failed = next((trial.error for trial in trials if trial.error is not None), None)
    if failed is None:
        _check_alike(row, [variant.derived for variant in variants])
    environment = read_environment().model_copy(update={"threads": row.threads})
    facts = found["TRL"].facts
    report = BenchReport(
        kind="sweep",
        profile=NAME,
        name=NAME,
        status="failed" if failed else "ok",
        reason=str(failed) if failed else "",
        created=created,
        command=command,
        config={
            "profile": {
                "profile": NAME,
                "name": NAME,
                "about": ABOUT,
                "headline": row.headline,
                "warmup": row.warmup,
                "repeats": row.repeats,
                "workload": row.work,
                "ladder": [],
            },
            "experiment": row.experiment.plain(),
            "interleave": True,
            "row": row.name,
            "peer": {"name": "TRL", "versions": facts.get("versions", {}), "settings": facts.get("settings", {})},
        },
        work=common_work({variant.label: dict(work) for variant, work in zip(variants, works, strict=True) if work}),
        environment=environment,
        warmup=row.warmup,
        repeats=row.repeats,
        variants=variants,
    )
    return report, failed.exit_code if failed else 0


def _trial(row: PeerComparison, name: str, side: Side) -> VariantTrial:
    return VariantTrial(
        lambda: side,
        warmup=row.warmup,
        repeats=row.repeats,
        label=f"trainer={name}",
        overrides={"trainer": name},
        on_sample=_say,
    )


def _check_alike(row: PeerComparison, derived: Sequence[Mapping[str, float]]) -> None:
    theirs, ours = derived
    for key, tolerance in ALIKE.items():
        allowed = DRAWN if key == "completion_tokens" and row.work.get("stops") else tolerance
        if key in theirs and abs(ours[key] - theirs[key]) > allowed * theirs[key]:
            raise PeerWorkError(f"The sides' {key} differ: TRL has {theirs[key]:g}, pvg {ours[key]:g}.")


def _say(taken: SampleTaken) -> None:
    warmup = " (warm-up)" if taken.warmup else ""
    print(f"{taken.label} {taken.number}/{taken.of}{warmup}: {taken.wall_s:.2f} s", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row", metavar="ROW", help=" or ".join(MEASURES))
    parser.add_argument("-s", "--set", action="append", default=[], metavar="KEY=VALUE", help="a setting")
    parser.add_argument("--out", type=Path, help="where to write the report")
    options = parser.parse_args(arguments)
    told = shlex.join([options.row, *(part for setting in options.set for part in ("-s", setting))])
    try:
        row = read_comparison(options.row, options.set)
        report, code = compare(row, command=f"python benchmarks/peers/compare.py {told}")
        if options.out is not None:
            write_report(options.out, report)
    except PvgError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if code:
        print(report.reason, file=sys.stderr)
    else:
        Console().print(variants_table(report))
    return code


if __name__ == "__main__":
    sys.exit(main())
