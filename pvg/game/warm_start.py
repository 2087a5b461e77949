"""WARMUP: before round 0 the prover learns to write the solutions of a file (`[warmup]`). Optional.

A base that solves nothing gives the game nothing to learn from: no pair of a correct and a wrong solution, and no group
with different rewards. A few demonstrations change that. The result, WARMED_PROVER, is the base prover of the game:
`game.start` treats it as the base prover, and the KL penalty refers to it. The verifier starts from models.verifier as
always.

One process trains, without workers, ranks and servers, so the weights do not depend on their number. Then the game
opens its players with `warmed`, in which models.prover is this run's own warmed prover.

Invariant: the phase depends only on the file, the settings and the last commit.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from pvg.config.cluster import NoCluster
from pvg.config.experiment import Experiment
from pvg.config.rollout import TorchSampling
from pvg.config.run_ids import RunId
from pvg.config.warmup import DemonstrationWarmup
from pvg.errors import StateError
from pvg.game.demonstrations import Demonstration, Demonstrations, read_demonstrations, tokens_of
from pvg.game.session import Session
from pvg.game.states import GameState, Phase
from pvg.models.language_model import LanguageModel
from pvg.models.starts import open_learner
from pvg.seeds import draw_cyclic, seed_for
from pvg.store.checkpoints import TENSORS_FILE
from pvg.store.run_directory import RunDirectory
from pvg.store.run_players import WARMED_PROVER, find_player, with_source
from pvg.telemetry.spans import span
from pvg.training.batch import PolicyBatch
from pvg.training.optimizer import OptimizerSettings
from pvg.training.supervised import SupervisedObjective, demonstration_batch
from pvg.training.trainer import Trainer

# Demonstrations whose loss is measured before and after: enough for two digits, and a moment's work.
MEASURED = 256
# Steps in which the learning rate grows from 0: AdamW's first steps have no reliable second moment.
RISING = 10


def first_phase(experiment: Experiment) -> Phase:
    """The phase in which the game itself begins."""
    if experiment.task.kind == "play":
        return Phase.TRAIN_PROVER
    return Phase.SOLVE if experiment.game.protocol.kind == "decoupled" else Phase.MINT


def is_cold(experiment: Experiment, run: RunDirectory) -> bool:
    """Whether the run has a warm start and has not finished it."""
    if experiment.warmup.kind == "none":
        return False
    state = run.load_state().state
    return state is None or state["phase"] in (Phase.INIT.value, Phase.WARMUP.value)


def alone(experiment: Experiment) -> Experiment:
    """The experiment for one process, without workers, ranks and servers."""
    changes = {
        "cluster": NoCluster(),
        "rollout": experiment.rollout.model_copy(update={"engine": TorchSampling()}),
        "verifier": experiment.verifier.model_copy(update={"engine": "torch"}),
    }
    return experiment.model_copy(update=changes)


def warmed(experiment: Experiment, run: RunDirectory, state: GameState) -> Experiment:
    """The experiment whose models.prover is the warmed prover of this run; unchanged without a warm start."""
    if experiment.warmup.kind == "none" or WARMED_PROVER not in state.weights:
        return experiment
    return with_source(experiment, "prover", find_player(RunId(str(run.path.absolute()), "warmup", "prover")).source)


async def warm_up(session: Session) -> None:
    """Run the phase from the last committed step on, then enter the first phase of the game."""
    section, players, state = session.experiment.warmup, session.players, session.state
    assert isinstance(section, DemonstrationWarmup)
    info = session.begin("steps", section.steps, state.step)
    started = time.perf_counter()
    with span("open_models"):
        demonstrations = read_demonstrations(section)
        _refuse_changed(demonstrations, state)
        train, held_out = batches_of(session, demonstrations)
        learner = await players.compute(lambda: open_learner(players, round_=0))
    try:
        learning = _Learning(session, section, learner, train, held_out)
        await learning.begin(demonstrations.digest)
        session.first_step()
        while learning.trainer.steps_done < section.steps:
            metrics = await learning.step()
            session.report_step(info, learning.trainer.steps_done, metrics)
            if session.due(learning.trainer.steps_done, info.total):
                await session.commit_trainer(learning.trainer, progress=learning.progress)
        with span("evaluate"):
            metrics = {**learning.progress["before"], **await learning.losses("after")}
        metrics |= {"demonstrations": float(len(train)), "held_out": float(len(held_out))}
        with span("checkpoint"):
            tensors = await players.compute(learner.weights)
            files = await players.compute(lambda: learner.description(TENSORS_FILE))
            meta = {"steps": section.steps, "demonstrations": demonstrations.digest}
            await session.ledger.save_weights(WARMED_PROVER, tensors, meta, files)
        session.finish_phase(info, metrics, time.perf_counter() - started)
        entered = session.state.enter(first_phase(session.experiment))
        await session.leave_phase(replace(entered, weights=(*entered.weights, WARMED_PROVER)))
    finally:
        learner.close()


def check_demonstrations(session: Session) -> None:
    """Raises what is wrong with the file of the warm start, before the run has a commit."""
    section = session.experiment.warmup
    assert isinstance(section, DemonstrationWarmup)
    batches_of(session, read_demonstrations(section))


def batches_of(session: Session, demonstrations: Demonstrations) -> tuple[PolicyBatch, PolicyBatch]:
    """The solutions to train on, and those that are held out. Raises ConfigurationError with the line of a solution
    that the prover cannot write."""
    return _batch(session, demonstrations.train), _batch(session, demonstrations.held_out)


def _refuse_changed(demonstrations: Demonstrations, state: GameState) -> None:
    before = state.progress.get("digest")
    if before not in (None, demonstrations.digest):
        raise StateError(
            "The file warmup.path has changed since this run began its warm start.",
            "Restore the file, or start a new run with --name.",
        )


class _Learning:
    """The trainer of the phase, and what it measures."""

    def __init__(
        self,
        session: Session,
        section: DemonstrationWarmup,
        learner: LanguageModel,
        train: PolicyBatch,
        held_out: PolicyBatch,
    ) -> None:
        training, self._session, self._learner = session.experiment.training, session, learner
        self._objective = SupervisedObjective(training, learner.tokenizer.pad_id)
        self._measured = {"loss": _first(train), "held_out_loss": _first(held_out)}
        learner.require_gradients()
        self.progress: dict[str, Any] = dict(session.state.progress)
        self.trainer = Trainer(
            learner.module,
            self._objective,
            OptimizerSettings(
                learning_rate=section.learning_rate, warmup=RISING, schedule="linear", total_steps=section.steps
            ),
            _DemonstrationSource(train, section.batch, seed_for(session.seed, "warmup"), session.state.step),
            executor=session.players.executor,
            precision=training.precision,
            gradient_checkpointing=training.gradient_checkpointing,
            waits_for="demonstrations",
            section="training",
            events=session.ledger.log,
        )
        if (checkpoint := session.ledger.read_checkpoint()) is not None:
            self.trainer.load_state(*checkpoint)

    async def begin(self, digest: str) -> None:
        """Measure the losses before the first step, unless an earlier process has."""
        if not self.progress:
            with span("evaluate"):
                self.progress = {"digest": digest, "before": await self.losses("before")}

    async def step(self) -> dict[str, float]:
        report = await self.trainer.step()
        assert report is not None, "the demonstrations never end"
        return report.metrics

    async def losses(self, when: str) -> dict[str, float]:
        """The mean losses of trained and of held-out solutions, in nats per token."""
        found: dict[str, float] = {}
        for name, batch in self._measured.items():
            if len(batch):
                measure = partial(self._objective.mean_loss, self._learner.module, batch)
                found[f"{name}_{when}"] = await self._session.players.compute(measure)
        return found


class _DemonstrationSource:
    """Batches of all demonstrations in an order that depends only on the seed and the step."""

    def __init__(self, rows: PolicyBatch, size: int, seed: int, step: int) -> None:
        self._rows, self._size, self._seed, self._step = rows, size, seed, step

    async def next_batch(self) -> PolicyBatch:
        chosen = draw_cyclic(len(self._rows), self._step * self._size, self._size, self._seed)
        self._step += 1
        return self._rows.select(np.array(chosen, dtype=np.int64))


def _first(batch: PolicyBatch) -> PolicyBatch:
    return batch.select(np.arange(min(MEASURED, len(batch))))


def _batch(session: Session, rows: Sequence[Demonstration]) -> PolicyBatch:
    """The prompts of the game with the given solutions, which end with the end token."""
    longest = session.experiment.rollout.max_tokens
    prompts, solutions = tokens_of(rows, session.task, session.prompts, session.players.base, longest)
    return demonstration_batch(prompts, solutions, [row.role for row in rows])
