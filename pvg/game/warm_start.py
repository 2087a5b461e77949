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
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from pvg.config.base import RunId
from pvg.config.experiment import Experiment
from pvg.config.operation import NoCluster
from pvg.config.rollout import TorchSampling
from pvg.config.training import Training, Warmup
from pvg.errors import ConfigurationError, MissingRequirementError, StateError, UsageError, shortened, user_paths
from pvg.game.session import Session
from pvg.game.states import GameState, Phase
from pvg.inputs import check_regular, expanded, file_digest
from pvg.models.language_model import LanguageModel
from pvg.models.sources import open_learner
from pvg.records import Float32, Int32, Problem, Role
from pvg.seeds import draw_cyclic, seed_for
from pvg.store.checkpoints import TENSORS_FILE
from pvg.store.pairs import is_held_out
from pvg.store.run_directory import RunDirectory
from pvg.store.run_players import WARMED_PROVER, find_player
from pvg.tasks.data import no_column, rows_of
from pvg.tasks.task import Task
from pvg.telemetry.metrics import Metrics
from pvg.telemetry.spans import span
from pvg.training.batch import PolicyBatch
from pvg.training.forward import ForwardSettings, batch_logprobs, forward_batches, recompute_logprobs
from pvg.training.trainer import OptimizerSettings, Trainer

if TYPE_CHECKING:
    from pvg.game.roles import PromptBuilder
    from pvg.models.language_model import LanguageModel
    from pvg.models.sources import WeightlessModel
    from pvg.models.tokenizer import Tokenizer


# Supervised training: the prover learns to write given solutions, with the forward passes of policy training.


def demonstration_batch(prompts: Sequence[Int32], solutions: Sequence[Int32], roles: Sequence[Role]) -> PolicyBatch:
    """N solutions with their prompts as a batch: no policy sampled them, so their log-probs and advantages are 0."""
    count = len(prompts)
    return PolicyBatch(
        sequences=[np.concatenate(pair) for pair in zip(prompts, solutions, strict=True)],
        prompt_lengths=np.array([len(prompt) for prompt in prompts], dtype=np.int32),
        sampled_logprobs=[np.zeros(len(solution), dtype=np.float32) for solution in solutions],
        reference_logprobs=None,
        advantages_N=np.zeros(count, dtype=np.float32),
        role_ids_N=np.array([role.number for role in roles], dtype=np.int8),
        group_ids_N=np.arange(count, dtype=np.int32),
        versions_N=np.zeros(count, dtype=np.int32),
    )


class SupervisedObjective:
    """The mean loss per solution token as the trainer's objective. The temperature is 1, as in the model itself."""

    def __init__(self, section: Training, pad_id: int, precision: str = "float32") -> None:
        # No sampler has chosen experts for these solutions.
        self._forward = replace(ForwardSettings.of(section, 1.0, pad_id, precision), router_replay=False)

    def prepare(self, batch: PolicyBatch) -> PolicyBatch:
        """Each token of the batch counts the same."""
        weight = 1.0 / float(batch.completion_lengths_N.sum())
        return batch.with_weights(np.full(len(batch), weight, dtype=np.float32))

    def split(self, batch: PolicyBatch) -> list[PolicyBatch]:
        """Micro-batches within the token budget. Raises ConfigurationError if a single row exceeds it."""
        return [batch.select(part) for part in forward_batches(batch, np.arange(len(batch)), self._forward)]

    def __call__(self, module: nn.Module, micro_batch: PolicyBatch) -> tuple[Tensor, Metrics]:
        assert micro_batch.row_weights_N is not None, "prepare the batch before computing its loss"
        logprobs_BL = batch_logprobs(module, micro_batch, self._forward)
        weights_B = torch.from_numpy(micro_batch.row_weights_N).to(logprobs_BL.device)
        loss = -(logprobs_BL.sum(dim=1) * weights_B).sum()
        metrics = Metrics()
        tokens = int(micro_batch.completion_lengths_N.sum())
        metrics.add_mean("loss", -float(logprobs_BL.detach().double().sum()), tokens)
        metrics.add_sum("tokens", tokens)
        total = int(micro_batch.lengths_N.sum())
        positions = total if self._forward.shared_prompts else logprobs_BL.numel()  # shared: prompts once, no padding
        metrics.add_mean("padding", positions - total, positions)
        return loss, metrics

    def mean_loss(self, module: nn.Module, batch: PolicyBatch) -> float:
        """The loss of a whole batch without a gradient, in nats per token. Blocks."""
        found: list[Float32] = recompute_logprobs(module, batch, self._forward)
        return -float(np.concatenate(found).mean(dtype=np.float64))


# The file of a warm start: questions with solutions that the prover learns to write. Needs no torch.

ROLE = "role"  # the column with a role, if there is one
HELD_OUT = 0.1  # share of the questions whose solutions are not trained on
LEAST_TO_HOLD_OUT = 20  # demonstrations; of fewer ones none is held out


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A row of the file. `place`: its file and line."""

    question: str
    solution: str
    role: Role
    place: str


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """The rows of the file, in order. `digest`: of the file's bytes."""

    train: Sequence[Demonstration]
    held_out: Sequence[Demonstration]
    digest: str


@user_paths()
def read_demonstrations(section: Warmup) -> Demonstrations:
    """Raises MissingRequirementError without the file, ConfigurationError with file and line for an invalid row."""
    assert section.path is not None, "there is no warm start without a file"
    file = expanded(section.path, "warmup.path")
    check_regular(file)
    if not file.is_file():
        raise MissingRequirementError(
            f"There is no file {file}.", "Check warmup.path. A relative path starts in the current folder."
        )
    wanted = ("question", "solution", ROLE)
    rows = [_demonstration(row, f"{file}, {where}") for where, row in rows_of(file, wanted)]
    if not rows:
        raise ConfigurationError(f"{file} has no rows.", 'Add lines like {"question": "...", "solution": "..."}')
    kept = [is_held_out(row.question, HELD_OUT) and len(rows) >= LEAST_TO_HOLD_OUT for row in rows]
    train = [row for row, out in zip(rows, kept, strict=True) if not out]
    held_out = [row for row, out in zip(rows, kept, strict=True) if out]
    return Demonstrations(train or rows, held_out if train else [], file_digest(file))


def _demonstration(row: object, place: str) -> Demonstration:
    if not isinstance(row, dict):
        raise ConfigurationError(f"{place}: not a JSON object.", 'Write {"question": "...", "solution": "..."}')
    question = _text(row, "question", place)
    solution = _text(row, "solution", place)
    role = row.get(ROLE)
    if role not in (None, "", *(known.value for known in Role)):
        raise ConfigurationError(
            f"{place}: the column {ROLE!r} is {shortened(str(role))!r}.", 'Write "helpful" or "sneaky".'
        )
    return Demonstration(question, solution, Role(role) if role else Role.HELPFUL, place)


def _text(row: dict[str, object], column: str, place: str) -> str:
    value = row.get(column)
    if column not in row:
        raise no_column(row, {column: ""}, place)
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise ConfigurationError(
            f"{place}: the column {column!r} is {shortened(repr(value))}, not a text.",
            "Write some text without NUL characters there, or remove the row.",
        )
    return value


def problems_of(demonstrations: Sequence[Demonstration], task: Task) -> list[Problem]:
    """The problem of each demonstration: that of the task with its question, or a new one in the task's wording.

    Raises ConfigurationError for a question of the task's test problems, which measure what the prover has learned.
    """
    known = {problem.question: problem for problem in task.problems("train")}
    tests = {problem.question for problem in task.problems("test")}
    pattern = next(iter(known.values()))
    found = []
    for number, row in enumerate(demonstrations):
        if row.question in tests:
            raise ConfigurationError(
                f"{row.place}: the question is one of the task's test problems.", "Remove the row from the file."
            )
        found.append(known.get(row.question) or replace(pattern, id=f"warmup-{number}", question=row.question))
    return found


def tokens_of(
    rows: Sequence[Demonstration],
    task: Task,
    prompts: PromptBuilder,
    model: LanguageModel | WeightlessModel,
    max_tokens: int,
) -> tuple[list[Int32], list[Int32]]:
    """The prompt of each row in the game, and its solution, which ends with the end token.

    Raises ConfigurationError with the line of a solution that the prover cannot write.
    """
    rendered = [prompts.render(problem, row.role) for problem, row in zip(problems_of(rows, task), rows, strict=True)]
    solutions = [_solution(row, model.tokenizer, max_tokens) for row in rows]
    longest = max((len(start) + len(end) for start, end in zip(rendered, solutions, strict=True)), default=0)
    if longest > model.max_length:
        raise ConfigurationError(
            f"A prompt and its solution have {longest} tokens, but models.prover takes at most {model.max_length}.",
            "Remove the longest rows of warmup.path, or choose a model with a longer context.",
        )
    return rendered, solutions


def _solution(row: Demonstration, tokenizer: Tokenizer, most: int) -> Int32:
    try:
        ids = np.append(tokenizer.encode(row.solution), np.int32(tokenizer.eos_id))
    except UsageError as error:
        raise ConfigurationError(f"{row.place}: {error.message}", error.remedy) from None
    if len(ids) > most:
        raise ConfigurationError(
            f"{row.place}: the solution has {len(ids)} tokens with its end, but rollout.max_tokens = {most}.",
            "Shorten or remove the row, or raise rollout.max_tokens.",
        )
    return ids.astype(np.int32)


# Demonstrations whose loss is measured before and after: enough for two digits, and a moment's work.
MEASURED = 256
# Steps in which the learning rate grows from 0: AdamW's first steps have no reliable second moment.
RISING = 10


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
    if experiment.warmup.path is None or WARMED_PROVER not in state.weights:
        return experiment
    warm = find_player(RunId(str(run.path.absolute()), "warmup", "prover"))
    return experiment.with_sources({"models.prover.source": warm.source})


async def warm_up(session: Session, section: Warmup, following: Phase) -> None:
    """Run the phase from the last committed step on, then enter the `following` one."""
    players, state, training = session.players, session.state, session.training
    info = session.begin("steps", section.steps, state.step)
    started = time.perf_counter()
    with span("open_models"):
        demonstrations = read_demonstrations(section)
        if state.progress.get("digest") not in (None, demonstrations.digest):
            raise StateError(
                "The file warmup.path has changed since this run began its warm start.",
                "Restore the file, or start a new run with --name.",
            )
        train, held_out = batches_of(session, demonstrations)
        learner = await players.compute(lambda: open_learner(players, round_=0))
    try:
        learner.require_gradients()
        objective = SupervisedObjective(training, learner.tokenizer.pad_id, players.models.compute_dtype)
        settings = OptimizerSettings(
            learning_rate=section.learning_rate, warmup=RISING, schedule="linear", total_steps=section.steps
        )
        trainer: Trainer[PolicyBatch] = Trainer(
            learner.module,
            objective,
            settings,
            _DemonstrationSource(train, section.batch, seed_for(session.seed, "warmup"), state.step),
            executor=players.executor,
            precision=players.models.compute_dtype,
            gradient_checkpointing=training.gradient_checkpointing,
            waits_for="demonstrations",
        )
        if (checkpoint := session.ledger.read_checkpoint()) is not None:
            trainer.load_state(*checkpoint)

        async def losses(when: str) -> dict[str, float]:
            """The mean losses of trained and of held-out solutions, in nats per token."""
            found: dict[str, float] = {}
            for name, batch in ((f"loss_{when}", train), (f"held_out_loss_{when}", held_out)):
                if len(batch):
                    first = batch.select(np.arange(min(MEASURED, len(batch))))
                    found[name] = await players.compute(partial(objective.mean_loss, learner.module, first))
            return found

        await players.engine.rest()
        progress = dict(state.progress)
        if not progress:  # an earlier process has measured the losses before the first step
            with span("evaluate"):
                progress = {"digest": demonstrations.digest, "before": await losses("before")}
        session.first_step()
        while trainer.steps_done < section.steps:
            report = await trainer.step()
            assert report is not None, "the demonstrations never end"
            session.report_step(info, trainer.steps_done, report.metrics)
            if session.due(trainer.steps_done, info.total):
                await session.commit_trainer(trainer, progress=progress)
        await session.settled()
        with span("evaluate"):
            metrics = {**progress["before"], **await losses("after")}
        metrics |= {"demonstrations": float(len(train)), "held_out": float(len(held_out))}
        with span("checkpoint"):
            tensors = await players.compute(lambda: {n: tensor.cpu() for n, tensor in learner.weights().items()})
            files = await players.compute(lambda: learner.description(TENSORS_FILE))
            meta = {"steps": section.steps, "demonstrations": demonstrations.digest}
            await session.ledger.save_weights(WARMED_PROVER, tensors, meta, files)
        session.finish_phase(info, metrics, time.perf_counter() - started)
        entered = session.state.enter(following)
        await session.leave_phase(replace(entered, weights=(*entered.weights, WARMED_PROVER)))
    finally:
        learner.close()


def batches_of(session: Session, demonstrations: Demonstrations) -> tuple[PolicyBatch, PolicyBatch]:
    """The solutions to train on, and those that are held out. Raises ConfigurationError with the line of a solution
    that the prover cannot write."""
    return _batch(session, demonstrations.train), _batch(session, demonstrations.held_out)


class _DemonstrationSource:
    """Batches of all demonstrations in an order that depends only on the seed and the step."""

    def __init__(self, rows: PolicyBatch, size: int, seed: int, step: int) -> None:
        self._rows, self._size, self._seed, self._step = rows, size, seed, step

    async def next_batch(self) -> PolicyBatch:
        chosen = draw_cyclic(len(self._rows), self._step * self._size, self._size, self._seed)
        self._step += 1
        return self._rows.select(np.array(chosen, dtype=np.int64))


def _batch(session: Session, rows: Sequence[Demonstration]) -> PolicyBatch:
    """The prompts of the game with the given solutions, which end with the end token."""
    longest = session.rollout.max_tokens
    prompts, solutions = tokens_of(rows, session.task, session.prompts, session.players.base, longest)
    return demonstration_batch(prompts, solutions, [row.role for row in rows])
