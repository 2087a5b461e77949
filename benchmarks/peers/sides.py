"""pvg beside the best-known trainer, TRL: one side of a comparison, as a workload of `pvg bench` that takes turns.

    make bench-peers                                                              # all rows, and the page
    pvg bench --profile benchmarks/peers/grpo.toml -s training.kl.coefficient=0   # one row; in the root of a checkout
    pvg bench --profile benchmarks/peers/game.toml -s game.rounds=2 --out game.json

Settings: those of pvg's experiment as anywhere else, `workload.X` for what is worked on, `workload.trl.X` for TRL's
own.

Each side is a process in its own environment with the same number of threads. While the other side is measured, it
waits for its next order (work.py). It measures its own times, so they do not include the sending of orders. What a
side tells of its work is part of the report's work: if the sides differ in it, the report quotes no ratio.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from pydantic import Field

from benchmarks.peers.work import CHAIN, CONTEXT, SAMPLE, STOP, make_model, model_folder, write_work
from pvg.bench.workloads import BenchMetric, BenchSettings, workload_settings
from pvg.config.base import Count, Section
from pvg.config.experiment import Experiment
from pvg.config.load import build_experiment
from pvg.errors import EXIT_ENVIRONMENT, ConfigurationError, MissingRequirementError, PvgError
from pvg.game.roles import TAGS, prompt_builder, prompt_renderer
from pvg.game.verifier_phase import WARMUP
from pvg.game.warm_start import read_demonstrations, tokens_of
from pvg.models import open_model
from pvg.models.sources import open_without_weights
from pvg.planning.plan import fitted_here
from pvg.records import Problem, Role
from pvg.tasks import open_task
from pvg.tasks.task import problems_of_half
from pvg.telemetry.spans import span
from pvg.telemetry.waits import usable_cores
from pvg.training.trainer import OptimizerSettings
from pvg.verifier.data import VerifierTemplate

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PEER = ROOT / ".venv-peers" / "bin" / "python"
LOG_LINES = 5  # shown of a worker's log if it fails
CLOSE_S = 30.0  # for a worker to end after the order to stop

GRPO = {
    "step_s": BenchMetric("s", "lower"),
    "rollout_s": BenchMetric("s", "lower"),  # of a step, up to a batch with rewards, advantages and reference log-probs
    "train_s": BenchMetric("s", "lower"),  # the rest: loss, gradient, update
    "peak_gb": BenchMetric("GB", "lower"),  # summed over the side's processes, without cached files
}
GAME = {
    "game_s": BenchMetric("s", "lower"),
    "verifier_s": BenchMetric("s", "lower"),  # of it, the training of verifiers
    "prover_s": BenchMetric("s", "lower"),
    "peak_gb": GRPO["peak_gb"],
    "helpful_accuracy": BenchMetric("1", "higher"),  # of the last round's prover on test problems
    "flaws_accepted": BenchMetric("1", "lower"),  # where the verifier accepts 90 % of its correct solutions
    "verifier_auc": BenchMetric("1", "higher"),  # of its correct against its other solutions
}


class SideFailedError(PvgError):
    """A worker ended before the order to stop. The message contains the last lines of its log."""

    exit_code = EXIT_ENVIRONMENT


class PeerSettings(Section):
    """What both tables have. `trl`: TRL's settings besides those of trl_environment.py."""

    trainer: Literal["TRL", "pvg"] = "pvg"
    trl: dict[str, Any] = Field(default_factory=dict)


class GrpoSettings(PeerSettings):
    """`stops`: completions end where the end token is drawn; otherwise all have rollout.max_tokens tokens.
    `pretrained`: both sides train the experiment's prover, whose completions stop, and no small random model."""

    prompts: Count = 512
    stops: bool = False
    pretrained: bool = False


@dataclass
class Side:
    """See the module. `script` is the worker's. `prepare` writes what the worker reads into the folder. `shared`: the
    work of both sides. `counted`: what the worker tells of its work, and may not differ."""

    name: str
    python: Path
    script: Path
    measures: Mapping[str, BenchMetric]
    prepare: Callable[[Path], None]
    shared: Mapping[str, Any]
    counted: tuple[str, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)  # the worker's first answer
    told: dict[str, list[float]] = field(default_factory=dict)  # other numbers in its answers

    async def open(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pvg-peers-")
        folder = Path(self._folder.name)
        self._log = folder / "worker.log"
        self.prepare(folder)
        paths = [str(ROOT), os.environ.get("PYTHONPATH")] if self.name == "pvg" else []
        variables = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hub"), "TOKENIZERS_PARALLELISM": "true"}
        variables |= {"OMP_NUM_THREADS": str(self.shared.get("threads", 1))}
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(str(self.python), str(self.script), str(folder)),
                env={**os.environ, **variables, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
            )
        try:
            self.facts = await self._answer()
        except PvgError:
            await self.close()
            raise

    def work(self) -> Mapping[str, Any]:
        """The parameters are rounded: pvg's scalar head has a bias, TRL's has none."""
        own = self.derived()
        found = {name: own[name] for name in self.counted if name in own}
        return {**self.shared, **found, "parameters": round(own.get("parameters", 0), -3)}

    async def sample(self, index: int) -> Mapping[str, float]:
        with span("worker"):
            await self._send(SAMPLE)
            answer = await self._answer()
        for name in answer.keys() - self.measures.keys():
            self.told.setdefault(name, []).append(answer[name])
        return {name: answer[name] for name in self.measures}

    def derived(self) -> Mapping[str, float]:
        """The worker's counts, and the medians over all samples of the other numbers in its answers."""
        counts = {name: float(value) for name, value in self.facts.items() if isinstance(value, int | float)}
        return counts | {name: median(values) for name, values in sorted(self.told.items())}

    async def close(self) -> None:
        if self._process.returncode is None:
            await self._send(STOP)
            try:
                await asyncio.wait_for(self._process.wait(), CLOSE_S)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        self._folder.cleanup()

    async def _send(self, order: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(order.encode() + b"\n")
            await self._process.stdin.drain()
        except ConnectionError:
            pass  # it has ended: `_answer` raises with its log

    async def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            code = await self._process.wait()
            said = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-LOG_LINES:]
            raise SideFailedError(f"The worker of {self.name} ended with code {code}: {' / '.join(said)}")
        answer: dict[str, Any] = json.loads(line)
        return answer


# --- the two comparisons ----------------------------------------------------------------------------------------------


def grpo(settings: BenchSettings) -> Side:
    """Raises MissingRequirementError without TRL's environment."""
    table, experiment = workload_settings(GrpoSettings, settings), settings.experiment
    if experiment.training.minibatches != 1:
        raise ConfigurationError("A step of the comparison is a whole batch.", "Leave training.minibatches at 1.")
    stops, pool = table.stops or table.pretrained, problems_of_half(open_task(experiment.task), "prover")
    told = _told(experiment, "rollout", "training")
    own = told | {"prompts": _prompts(experiment, pool[: table.prompts], pretrained=table.pretrained)}
    shared = told | {"stops": stops}
    # Drawn ends differ by chance.
    counted = ("prompt_tokens", "threads") + (() if stops else ("completion_tokens",))
    return _side("grpo", table, experiment, GRPO, own, shared, counted, stops=stops, pretrained=table.pretrained)


def _told(experiment: Experiment, *sections: str) -> dict[str, Any]:
    """The settings of both sides."""
    own, bfloat16 = experiment.plain(), experiment.models.compute_dtype == "bfloat16"
    optimizer = {"gradient_clip": OptimizerSettings(0.0).gradient_clip, "adam_beta2": OptimizerSettings(0.0).beta2}
    return {name: own[name] for name in sections} | {"bfloat16": bfloat16} | optimizer


def _prompts(experiment: Experiment, problems: Sequence[Problem], *, pretrained: bool) -> list[str]:
    """The texts that both sides tokenize. Those of a pretrained model are in its chat template."""
    if not pretrained:
        return [TAGS[Role.HELPFUL] + problem.question for problem in problems]
    tokenizer = open_without_weights(experiment.models.prover).tokenizer
    render = prompt_renderer(experiment.prompts, tokenizer)
    return [tokenizer.shown(render(problem, Role.HELPFUL)) for problem in problems]


def game(settings: BenchSettings) -> Side:
    """Raises MissingRequirementError without TRL's environment, ConfigurationError for a task without a pattern."""
    table, experiment = workload_settings(PeerSettings, settings), settings.experiment
    rounds = range(experiment.game.rounds)
    told = _told(experiment, "seed", "warmup", "rollout", "verifier", "training", "game") | {
        "mint_problems": [experiment.game.problems_of_mint(number) for number in rounds],
        "verifier_steps": [experiment.verifier_phase_steps(number) for number in rounds],
        "rising": WARMUP,
    }
    return _side("game", table, experiment, GAME, told | texts_of(experiment), told, (), pretrained=True)


def texts_of(experiment: Experiment) -> dict[str, Any]:
    """For TRL's side: the problems with their prompts as texts (for each role, and for the verifier), `opening`: the
    tokens with which every prompt to the verifier ends, and the demonstrations of a warm start."""
    task, models = open_task(experiment.task), experiment.models
    pattern = CHAIN if experiment.task.kind == "modchain" else getattr(experiment.task, "pattern", None)
    if pattern is None:
        raise ConfigurationError("TRL's side grades by a pattern.", 'Set task.grader to "regex", and task.pattern.')
    prover = open_without_weights(models.prover)
    verifier = (prover if models.verifier == models.prover else open_without_weights(models.verifier)).tokenizer
    prompts = prompt_builder(experiment.prompts, experiment.game.protocol, prover.tokenizer, task)
    template = VerifierTemplate(verifier, experiment.prompts.kind, experiment.verifier.head.kind)
    asked = list[list[int]]()  # of verifiers, as token ids

    def told(problem: Problem) -> dict[str, str]:
        ids, length = template.tokens(problem.question, "", None, None)
        asked.append(ids[:length].tolist())
        posed = {tag: prover.tokenizer.shown(prompts.prompt(problem, role)) for role, tag in TAGS.items()}
        return {"id": problem.id, "answer": problem.answer, "verifier": verifier.shown(ids[:length]), **posed}

    problems = {half: [told(p) for p in problems_of_half(task, half)] for half in ("prover", "verifier")}
    problems["test"] = [told(p) for p in list(task.problems("test"))[: experiment.game.test.problems]]
    ends = zip(*(reversed(ids) for ids in asked), strict=False)
    opening = [column[0] for column in takewhile(lambda column: len({*column}) == 1, ends)][::-1]
    rows = read_demonstrations(experiment.warmup).train if experiment.warmup.path else []
    starts, _ = tokens_of(rows, task, prompts, prover, experiment.rollout.max_tokens)
    demonstrations = [(prover.tokenizer.shown(ids), row.solution) for ids, row in zip(starts, rows, strict=True)]
    return {"pattern": pattern, "problems": problems, "opening": opening, "demonstrations": demonstrations}


def _side(
    row: str,
    table: PeerSettings,
    experiment: Experiment,
    measures: Mapping[str, BenchMetric],
    own: dict[str, Any],
    shared: dict[str, Any],
    counted: tuple[str, ...],
    *,
    stops: bool = True,
    pretrained: bool = False,
) -> Side:
    if table.trainer == "TRL" and not PEER.exists():
        raise MissingRequirementError("TRL's environment is not there.", "make peers")
    threads = experiment.models.threads or usable_cores()
    python, script = (PEER, f"trl_{row}.py") if table.trainer == "TRL" else (Path(sys.executable), f"pvg_{row}_side.py")
    versions = dict(line.split("==") for line in (HERE / "constraints.txt").read_text().split() if "==" in line)
    shared |= {"context": CONTEXT, "threads": threads, "peer": {"versions": versions}}
    work = own | {"threads": threads, "trl": table.trl}
    prepare = partial(write_folder, experiment=experiment, work=work, stops=stops, pretrained=pretrained)
    return Side(table.trainer, python, HERE / script, measures, prepare, shared, counted)


def write_folder(
    folder: Path, experiment: Experiment, work: dict[str, Any], *, stops: bool, pretrained: bool = False
) -> Experiment:
    """Write what the workers read: the model, and the work with pvg's experiment on that model. With worker processes
    each of them has one thread."""
    models, data = experiment.models, experiment.plain()
    places = {"prover": model_folder(folder), "verifier": model_folder(folder)}
    if not pretrained:
        make_model(folder, stops=stops)
    elif models.verifier != models.prover:
        places["verifier"] = folder / "verifier"
    for player, place in places.items():
        if not place.exists():
            with open_model(getattr(models, player), torch.device("cpu"), "float32") as model:
                model.module.save_pretrained(place)
                model.tokenizer.save(place)
        data["models"][player] = {"source": str(place)}
    data["models"]["threads"] = work["threads"]
    if data["cluster"]["kind"] == "local":
        data["models"]["threads"] = 1  # of the driver
        data["cluster"]["workers"] = data["cluster"].get("workers") or work["threads"]
    built, _ = fitted_here(build_experiment(data), lambda said: None)  # micro-batches as `pvg train` chooses them
    write_work(folder, work | {"experiment": built.plain()})
    return built
