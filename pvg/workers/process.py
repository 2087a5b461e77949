"""What runs in a worker process: one compute thread that samples, scores and differentiates on request.

A process serves one or more shards of the work. Each has its own models, weights and engine, so a batch never
mixes shards, and a shard may move to another process.

A worker keeps no state that could be lost: models and weights come from the driver. Requests that compute run one after
the other, in the order of arrival, so that each uses the weights that were sent before it. Sampling shares the thread
with them, one decoding turn at a time. The answer depends only on the request and on the weights, not on the process.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from inspect import iscoroutinefunction
from typing import Any

import numpy as np
import torch
from torch import nn

from pvg.config.experiment import Experiment
from pvg.config.load import build_experiment
from pvg.config.rollout import Rollouts
from pvg.config.training import Training
from pvg.errors import MissingRequirementError, PvgError
from pvg.models import open_model
from pvg.models.compute import allow_tf32
from pvg.models.heads import ScoreScales, VerifierEnsemble, VerifierModel
from pvg.models.language_model import UNLIMITED, LanguageModel, LowRankAdapter
from pvg.models.sources import open_learner, open_verifier
from pvg.rollout import EngineSetup, open_engine
from pvg.rollout.engine import Completion, CutShort, Engine, EngineStats, GenerationRequest, PartialCompletion
from pvg.servers.publishing import WeightUpdate
from pvg.telemetry.device import peak_memory
from pvg.telemetry.spans import run_in
from pvg.telemetry.waits import CoreWaits
from pvg.training.losses import PolicyObjective
from pvg.training.trainer import AdaptsCoefficients, Objective, accumulate, checkpoint_layers, trainable_parameters
from pvg.verifier.losses import PairObjective
from pvg.verifier.scorer import ScoreCache, ScoreInput, ScoringModel, TorchBackend, digest_of
from pvg.workers.frames import Frame, receive, send
from pvg.workers.models import tensors_of
from pvg.workers.shared import copy_tensors, tensors_at


class TrainedModel:
    """A model in training with its objective. `close` frees `model`, to which `module` belongs."""

    def __init__(
        self, model: LanguageModel | VerifierModel, module: nn.Module, objective: Objective[Any], training: Training
    ) -> None:
        self.module, self.objective, self.close = module.eval(), objective, model.close
        if training.gradient_checkpointing:
            checkpoint_layers(module)


class Worker:
    """Does the work of one shard, in the thread of its process. `send`: to the driver."""

    def __init__(self, send: Callable[[Frame], None], executor: ThreadPoolExecutor) -> None:
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._executor = executor
        self._tasks: set[asyncio.Task[None]] = set()
        self._models: dict[int, TrainedModel | ScoringModel] = {}
        self._cut: dict[int, set[str]] = {}  # by block: an engine ignores a cut of what has not reached it yet
        self._reported = EngineStats()
        self.base: LanguageModel
        self.experiment: Experiment
        self._engine: Engine
        self._opened = False

    def take(self, frame: Frame) -> None:
        """Answer each frame in a separate task, by the method of its kind. The executor keeps the order of work."""
        if frame.kind == "cut":
            for cut in self._cut.values():
                cut.update(frame.fields["ids"])
            if self._opened:
                self._engine.cut(frame.fields["ids"])
            return
        if frame.kind == "generate":
            self._cut[frame.fields["id"]] = set(frame.fields["cut"])
        task = asyncio.create_task(self._answer(getattr(self, f"_{frame.kind}"), frame))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def leave(self) -> None:
        """Another process has the shard: stop, and free the models."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await run_in(self._executor, int)  # what it had begun has ended
        if self._opened:
            await self._engine.close()
            for model in [*map(self._models.pop, [*self._models]), self.base]:
                await run_in(self._executor, model.close)

    async def _answer(self, work: Callable[[Frame], Any], frame: Frame) -> None:
        """Methods that compute run in the thread."""
        number = frame.fields["id"]
        try:
            answer = await (work(frame) if iscoroutinefunction(work) else run_in(self._executor, work, frame))
        except PvgError as error:
            fields = {"id": number, "type": type(error).__name__, "message": error.message, "remedy": error.remedy}
            fields["exit_code"] = error.exit_code
            self._send(Frame("refused", fields))
        except Exception:  # noqa: BLE001 - the driver raises it
            self._send(Frame("failed", {"id": number, "traceback": traceback.format_exc()}))
        else:
            self._send(Frame("done", {**(answer or {}), "id": number}))

    # --- models and weights -------------------------------------------------------------------------------------------

    def _start(self, frame: Frame) -> None:
        self.experiment = build_experiment(dict(frame.fields["experiment"]), "the driver's experiment")
        self._device = torch.device("cpu")
        if frame.fields["device"] == "cuda":  # the GPUs of the machine in turn, or the one that Ray has reserved
            if not (found := torch.cuda.device_count()):
                what = f"torch {torch.__version__} finds no GPU for a worker, which computes where the trainer does."
                raise MissingRequirementError(what, "Correct the driver or torch there, or set models.device to cpu")
            self._device = torch.device("cuda", frame.fields["worker"] % found)
            torch.cuda.set_device(self._device)
            allow_tf32(self._device, self.experiment.models.compute_dtype)
        self.base = open_model(self.experiment.models.prover, self._device, self.experiment.models.dtype)
        rollout = self.experiment.rollout.model_copy(update={"concurrency": UNLIMITED})  # the driver bounds it
        self.seed, self.adapters = self.experiment.seed, self.experiment.training.adapters
        replayed = self.experiment.training.router_replay
        sampled = open_learner(self, 0) if self.experiment.samples_on_base else self.base
        setup = EngineSetup(rollout, sampled, self._executor, self, replayed, dtype=self.experiment.sampling_dtype)
        self._engine = open_engine(setup)
        self._opened = True

    def event(self, tag: str, **fields: object) -> None:
        """Pass an event of the engine on to the driver's log. Any thread may call this."""
        self._loop.call_soon_threadsafe(self._send, Frame("event", {"tag": tag, "event": fields}))

    def _open(self, frame: Frame) -> None:
        fields = frame.fields
        self._models[fields["slot"]] = getattr(self, f"_open_{fields['what']}")(fields)

    def _open_policy(self, fields: Mapping[str, Any]) -> TrainedModel:
        training = Training.model_validate_json(fields["training"])
        rollout = Rollouts.model_validate_json(fields["rollout"])
        learner = open_learner(self, 0)
        objective = PolicyObjective(training, rollout, learner.tokenizer.pad_id, self.experiment.models.compute_dtype)
        return TrainedModel(learner, learner.module, objective, training)

    def _open_pairs(self, _: Mapping[str, Any]) -> TrainedModel:
        verifier, training = self._open_verifier(), self.experiment.training
        longest = verifier.longest_packed if training.shared_prompts else 0
        objective = PairObjective(self.experiment.verifier, verifier.tokenizer.pad_id, longest_packed=longest)
        return TrainedModel(verifier, verifier, objective, training)

    def _open_verifier(self, like: VerifierModel | None = None) -> VerifierModel:
        game, device = self.experiment, self._device
        return open_verifier(game.verifier, game.models, game.seed, device, self.base, like=like, rounded="reference")

    def _open_scorer(self, fields: Mapping[str, Any]) -> ScoringModel:
        members = [self._open_verifier()]
        members += [self._open_verifier(like=members[0]) for _ in range(1, fields["members"])]
        if fields["aggregation"] is None:
            return members[0]
        return VerifierEnsemble(members, fields["aggregation"], ScoreScales.none(len(members)))

    def _load(self, frame: Frame) -> None:
        tensors, model = tensors_at(frame.fields["place"]), self._models[frame.fields["slot"]]
        own = trainable_parameters(model.module) if isinstance(model, TrainedModel) else tensors_of(model)
        copy_tensors(tensors, own)

    def _close(self, frame: Frame) -> None:
        self._models.pop(frame.fields["slot"]).close()

    # --- sampling -----------------------------------------------------------------------------------------------------

    async def _policy(self, frame: Frame) -> dict[str, Any]:
        # One trip to the thread, as `_generate` makes: so requests that come later are sampled with these weights.
        tensors, adapter = await run_in(self._executor, self._policy_of, frame)
        update = WeightUpdate(frame.fields["version"], tensors, frame.fields["trace"], adapter)
        timing = await self._engine.load_weights(update)
        return {"rpc_ms": timing.rpc_ms}

    def _policy_of(self, frame: Frame) -> tuple[Mapping[str, torch.Tensor], LowRankAdapter | None]:
        """The whole policy's weights, and its adapters. Those that come alone are merged into the weights of the base
        that this worker has, one layer at a time, if the engine copies them."""
        tensors = tensors_at(frame.fields["place"])
        if not frame.fields["adapted"]:
            return tensors, None
        from pvg.models.adapters import with_adapter

        config = {"r": self.adapters.rank, "lora_alpha": self.adapters.alpha}
        adapter = LowRankAdapter(tensors, config)
        return with_adapter(self.base.weights(), adapter), adapter

    async def _generate(self, frame: Frame) -> None:
        """Sample a block of requests. Completions are sent as they finish, those of one turn of the loop together."""
        found: dict[int, Completion | PartialCompletion | None] = {}

        async def sample(row: int, request: GenerationRequest) -> None:
            try:
                if request.id in self._cut[frame.fields["id"]]:
                    raise CutShort(request.resumed_from)
                found[row] = await self._engine.generate(request)
            except CutShort as cut:
                found[row] = cut.partial

        await run_in(self._executor, int)  # the first work of the thread opens the engine
        tasks = [asyncio.create_task(sample(*entry)) for entry in enumerate(frame.fields["requests"])]
        waiting = set(tasks)
        while waiting:
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            before, self._reported = self._reported, self._engine.stats
            fields = {"rows": [*found], "found": [*found.values()], "stats": self._reported.since(before)}
            self._send(Frame("completed", {**fields, "id": frame.fields["id"]}))
            found.clear()
        del self._cut[frame.fields["id"]]
        for task in tasks:
            task.result()  # raises what the engine has raised

    # --- computing, in the thread -------------------------------------------------------------------------------------

    def _score(self, frame: Frame) -> dict[str, Any]:
        model = self._models[frame.fields["slot"]]
        assert not isinstance(model, TrainedModel)
        given = zip(frame.fields["ids"], frame.fields["prompt_lengths"], strict=True)
        inputs = [ScoreInput(ids, start, digest_of(ids, start), "") for ids, start in given]
        budget, precision = frame.fields["token_budget"], self.experiment.models.compute_dtype
        backend = TorchBackend(
            model, "", ScoreCache(len(inputs)), token_budget=budget, executor=self._executor, precision=precision
        )
        batches = backend.batches(inputs)
        scores_N = np.empty(len(inputs), np.float32)
        for rows in batches:
            scores_N[rows] = backend.forward([inputs[row] for row in rows.tolist()]).scores
        return {"scores": scores_N, "passes": len(batches)}

    def _logprobs(self, frame: Frame) -> dict[str, Any]:
        """Log-probs of a batch's completions, under the base prover or the policy in training."""
        trained = self._models[frame.fields["slot"]]
        assert isinstance(trained, TrainedModel)
        assert isinstance(trained.objective, PolicyObjective)
        module = self.base.module if frame.fields["of"] == "base" else trained.module
        return {"logprobs": trained.objective.recompute(module, frame.fields["batch"])}

    def _gradient(self, frame: Frame) -> dict[str, Any]:
        """The summed gradient of micro-batches, their losses and their metrics."""
        trained = self._models[frame.fields["slot"]]
        assert isinstance(trained, TrainedModel)
        if isinstance(trained.objective, AdaptsCoefficients):
            trained.objective.load_state(frame.fields["state"])
        parameters = trainable_parameters(trained.module)
        try:
            precision = self.experiment.models.compute_dtype
            losses, metrics = accumulate(trained.module, trained.objective, frame.fields["micro_batches"], precision)
            found = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters.values()]
            gradient = torch.cat([part.reshape(-1) for part in found])
        finally:
            trained.module.zero_grad(set_to_none=True)
        return {"gradient": gradient.cpu().numpy(), "losses": losses, "metrics": metrics}


class WorkerProcess:
    """Serves the driver: one `Worker` for each shard that the driver gives this process. They share one thread."""

    def __init__(self, send: Callable[[Frame], None]) -> None:
        self._send = send
        self._executor = ThreadPoolExecutor(1, "pvg-compute", initializer=torch.set_num_threads, initargs=(1,))
        self._cores, self._probed = CoreWaits(), time.monotonic()
        self._workers: dict[int, Worker] = {}
        self._leaving: set[asyncio.Task[None]] = set()

    def take(self, frame: Frame) -> None:
        if frame.kind == "ping":
            cores, before, self._probed = self._cores.take(), self._probed, time.monotonic()
            load = {} if cores is None else cores.metrics()
            wall_s, peak_bytes = self._probed - before, peak_memory()["rss_bytes"]
            self._send(Frame("pong", {**load, "wall_s": wall_s, "peak_bytes": peak_bytes}))
            return
        shard = frame.fields["shard"]
        if frame.kind == "leave":
            task = asyncio.create_task(self._workers.pop(shard).leave())
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
            return
        if frame.kind == "start":
            self._workers[shard] = Worker(self._send, self._executor)
        self._workers[shard].take(frame)


async def _serve(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection, limit=1 << 20)
    process = WorkerProcess(partial(send, writer))
    while (frame := await receive(reader)) is not None:
        process.take(frame)


def work(connection: socket.socket) -> None:
    """Serve until the driver closes its end. A computation in progress ends with the process."""
    torch.set_num_threads(1)
    try:
        asyncio.run(_serve(connection))
    except BaseException:  # noqa: BLE001 - a child of a fork must never return
        traceback.print_exc()
        os._exit(70)
    os._exit(0)
