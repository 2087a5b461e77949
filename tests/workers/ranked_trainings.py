"""Trainings of a small model in separate processes: `python ranked_trainings.py JOBS`, started once per rank.

JOBS is a JSON file with a list of jobs, which are trained one after the other. Each writes a file of `torch.save`:
metrics, state, bytes that each rank holds, addresses, and the error if there was one.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch.distributed.tensor import DTensor

from pvg.config.experiment import Experiment
from pvg.config.load import build_experiment
from pvg.errors import TrainingDivergedError
from pvg.models import open_model
from pvg.models.adapters import attach_adapters
from pvg.telemetry.events import SilentEvents
from pvg.training.batch import PolicyBatch
from pvg.training.losses import PolicyObjective
from pvg.training.trainer import OptimizerSettings, Trainer, optimizer_tensors, trainable_parameters
from pvg.workers import ranks as ranks_module
from pvg.workers.launch import Launch
from pvg.workers.ranks import ModelInRanks, RankGroup, joined, rank_fields

SETTINGS = OptimizerSettings(learning_rate=1e-3, total_steps=8, gradient_clip=0.05)


@dataclass
class Job:
    """`batches`: their seeds; "silent" has no signal, "endless" no finite gradient. `start`: a file of another job."""

    model: str
    save: str
    batches: list[int | str]
    training: dict[str, Any] = field(default_factory=dict)
    precision: str = "float32"
    dtype: str = "float32"
    start: str = ""


def experiment(job: Job) -> Experiment:
    sections = {
        "models": {
            "prover": {"source": job.model},
            "device": "cpu",
            "threads": 1,
            "precision": job.precision,
            "dtype": job.dtype,
        },
        "rollout": {"max_tokens": 8},
        "verifier": {"adapters": {"rank": 1}},  # of which nothing is opened here
        "training": {"micro_batch_tokens": 40, "kl": {"target": 0.001}, **job.training},
    }
    return build_experiment(sections)


def batch(kind: int | str) -> PolicyBatch:
    """Groups of two rows, with prompts of three tokens and completions of different lengths."""
    generator = np.random.default_rng(kind if isinstance(kind, int) else 0)
    groups = 1 if kind == 1 else 5  # a batch without work for every rank
    rows = 2 * groups
    counts = generator.integers(2, 12, rows)
    prompts = generator.integers(2, 19, (groups, 3))
    sampled = [generator.normal(-2.9, 0.2, count).astype(np.float32) for count in counts]
    found = PolicyBatch(
        sequences=[
            np.concatenate([prompts[row // 2], generator.integers(2, 19, count)]).astype(np.int32)
            for row, count in enumerate(counts)
        ],
        prompt_lengths=np.full(rows, 3, np.int32),
        sampled_logprobs=sampled,
        reference_logprobs=[logprobs + np.float32(0.05) for logprobs in sampled],
        advantages_N=generator.choice([-1.0, 0.5, 2.0], rows).astype(np.float32),
        role_ids_N=np.zeros(rows, np.int8),
        group_ids_N=(np.arange(rows) // 2).astype(np.int32),
        versions_N=np.zeros(rows, np.int32),
    )
    if kind == "silent":
        found.advantages_N[:] = 0.0
    elif kind == "endless":
        found.advantages_N[0] = 1e38
    return found


class Listed:
    def __init__(self, batches: list[PolicyBatch]) -> None:
        self.batches = list(batches)

    async def next_batch(self) -> PolicyBatch | None:
        return self.batches.pop(0) if self.batches else None


async def train(job: Job, group: RankGroup | None) -> dict[str, Any]:
    """Train in the ranks of `group`; None: in this process."""
    chosen = experiment(job)
    learner = open_model(chosen.models.prover, torch.device("cpu"), chosen.models.dtype)
    if chosen.training.adapters.rank:
        learner = attach_adapters(learner, chosen.training.adapters.rank, chosen.training.adapters.alpha, 1)
    learner.require_gradients()
    metrics, model, error = list[dict[str, float]](), None, ""
    with ThreadPoolExecutor(1) as executor:
        if group is not None:
            fields = rank_fields(chosen.training, chosen.rollout, chosen.models, SETTINGS, torch.device("cpu"))
            model = ModelInRanks(group, executor, fields, trainable_parameters(learner.module), SilentEvents())
        source = Listed([batch(kind) for kind in job.batches])
        trainer = Trainer(
            learner.module,
            PolicyObjective(chosen.training, chosen.rollout, learner.tokenizer.pad_id, chosen.models.compute_dtype),
            SETTINGS,
            source,
            executor=executor,
            precision=chosen.models.compute_dtype,
            gradient_checkpointing=chosen.training.gradient_checkpointing,
            ranks=model,
        )
        if job.start:
            trainer.load_state(*torch.load(job.start)["state"])
        if model is not None:
            await model.prepare()
        try:
            while (report := await trainer.step()) is not None:
                metrics.append(report.metrics)
        except TrainingDivergedError as diverged:
            error = diverged.message
        state = await asyncio.get_running_loop().run_in_executor(executor, trainer.state)
        tensors = {name: tensor.clone() for name, tensor in state[0].items()}
        if metrics and not error:  # a small trainer copies its state, so a further step does not change it
            source.batches.append(batch(2))
            await trainer.step()
            assert all(torch.equal(state[0][name], tensor) for name, tensor in tensors.items())
        if model is not None:
            await model.close()
    return {"metrics": metrics, "state": state, "error": error, "addresses": addresses()}


def addresses() -> set[str]:
    """Where this process listens and to whom it is connected."""
    found = psutil.Process().net_connections("inet")
    ends = [address for connection in found for address in (connection.laddr, connection.raddr) if address]
    return {address.ip.removeprefix("::ffff:") for address in ends}


def trained(folder: Path, ranks: int, jobs: list[Job]) -> list[dict[str, Any]]:
    """The results of these jobs in so many processes, or in this one (ranks: 0)."""
    folder.mkdir(exist_ok=True)
    for number, job in enumerate(jobs):
        job.save = job.save or str(folder / f"{number}.pt")
    if not ranks:
        for job in jobs:
            torch.save(asyncio.run(train(job, None)), job.save)
    else:
        (folder / "jobs.json").write_text(json.dumps([vars(job) for job in jobs]))
        store = {"STORE": str(folder / "store"), "COUNT": str(ranks), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, str(folder / "jobs.json")]
        processes = [subprocess.Popen(command, env={**os.environ, **store, "NUMBER": str(n)}) for n in range(ranks)]
        try:
            assert [process.wait(300) for process in processes] == [0] * ranks
        finally:
            for process in processes:
                process.kill()
                process.wait()
    return [torch.load(job.save, weights_only=False) for job in jobs]


def main(file: str) -> int:
    number, count = int(os.environ["NUMBER"]), int(os.environ["COUNT"])
    os.environ["TORCHELASTIC_RUN_ID"] = "test"
    torch.set_num_threads(1)
    moments, jobs = ranks_module._Part.moments, json.loads(Path(file).read_text())
    saves = iter([job["save"] for job in jobs])

    def noted(part: ranks_module._Part) -> dict[str, torch.Tensor]:
        """Note the bytes of this rank's trained weights and moments at the end of a job."""
        tensors = [*part._parameters.values(), *optimizer_tensors(part._optimizer, part._parameters).values()]
        held = sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)
        Path(f"{next(saves)}.{number}").write_text(str(held))
        return moments(part)

    ranks_module._Part.moments = noted  # type: ignore[method-assign]
    with joined(Launch(number, count, number, count, store=os.environ["STORE"])) as group:
        if number:
            return group.serve()
        for job in jobs:
            found = asyncio.run(train(Job(**job), group))
            found["held"] = [int(Path(f"{job['save']}.{rank}").read_text()) for rank in range(count)]
            torch.save(found, job["save"])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
