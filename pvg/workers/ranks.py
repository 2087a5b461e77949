"""The prover in training on several ranks, each of which keeps a part of its weights, gradients and moments.

    model = ModelInRanks(group, rank_fields(experiment), settings, trainable_parameters(learner.module), committed)
    trainer = Trainer(..., ranks=model)

The driver samples, prepares batches and divides them into one part per rank; it has no optimizer. Its own copy of the
weights is in shared memory. Ranks on its machine write every step's weights there; ranks on a cluster send them.

If a rank ends, all start again from the last commit and repeat the optimizer steps since then, with the same
micro-batches. So the bits are those of a run without the loss.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from pvg.config.rollout import Rollouts
from pvg.config.training import Models, Training
from pvg.errors import StateError, WorkerLostError
from pvg.telemetry.metrics import Metrics
from pvg.training.batch import PolicyBatch
from pvg.training.trainer import MODEL_PREFIX, MOMENTS, OPTIMIZER_PREFIX, OptimizerSettings, TrainerRanks
from pvg.workers.frames import Array, Frame, record_arrays
from pvg.workers.pool import MOST_ATTEMPTS
from pvg.workers.rank_group import RankEndedError, RankGroup
from pvg.workers.shared import SharedTensors, own_rows, packed_tensors, unpacked_tensors
from pvg.workers.training import plain, policy_shards

T = TypeVar("T")
Committed = Callable[[], tuple[Mapping[str, Tensor], Mapping[str, Any]] | None]


def rank_fields(training: Training, rollout: Rollouts, models: Models) -> dict[str, Any]:
    """How a rank opens the prover and its loss."""
    return {"training": plain(training), "rollout": plain(rollout), "models": plain(models)}


@dataclass(eq=False)
class _Step:
    """One optimizer step, to repeat it: the requests for its gradient, one per rank, and for its update."""

    gradient: list[Frame]
    update: Frame | None = None


class ModelInRanks(TrainerRanks[PolicyBatch]):
    """A prover in training. `gradients`, `update` and `moments` block: call them from a thread, not from the event
    loop. `parameters` lie in shared memory."""

    def __init__(
        self,
        group: RankGroup,
        fields: Mapping[str, Any],
        optimizer: OptimizerSettings,
        parameters: Mapping[str, nn.Parameter],
        committed: Committed,
    ) -> None:
        """`committed`: reads the trainer's state of the last commit; None at the start of a phase."""
        self._group = group
        self._fields = {**fields, "optimizer": asdict(optimizer)}
        self._parameters = parameters
        self._committed = committed
        self._shared = SharedTensors(parameters)
        self._shared.write(parameters)
        for name, tensor in self._shared.tensors.items():
            parameters[name].data = tensor
        self._initial: dict[str, Tensor] | None = None  # the weights before the first step, until a commit has others
        self._moments: Mapping[str, Tensor] = {}  # to load with the weights, when the ranks are opened
        self._opened = self._lost = False
        self._journal: list[_Step] = []  # the optimizer steps since the last commit but one
        self._first = self._done = 0  # the number of the journal's first step, and of all steps
        self._saved = 0  # the number of steps in the newest state
        self._step: _Step | None = None  # whose gradient the ranks have
        self._loop = asyncio.get_running_loop()
        self.held_bytes: list[int] = []  # of each rank: weights, gradients and moments in the last step

    async def prepare(self) -> None:
        """Start the ranks and open their parts before their first work."""
        await self._reliably(self._nothing)

    async def close(self) -> None:
        """End the ranks and free the memory, which the parameters keep until they go. A second call does nothing."""
        await self._group.end()
        self._opened = False
        self._shared.close()

    def shards(self, batch: PolicyBatch) -> list[PolicyBatch]:
        return policy_shards(batch, self._group.count)

    def gradients(
        self, parts: Sequence[Sequence[PolicyBatch]], state: Mapping[str, Any]
    ) -> tuple[list[float], Metrics]:
        step = _Step(self._frames(parts, state))
        losses, metrics = list[float](), Metrics()
        # In the order of the ranks, because the order of a sum changes its bits.
        for answer in self._wait(self._reliably(lambda: self._gradient(step))):
            losses += answer.arrays["losses"].tolist()
            metrics.merge(Metrics.from_array(answer.fields["names"], answer.arrays["metrics"]))
        return losses, metrics

    def update(self, rate: float, clip: float) -> float:
        step = self._step
        assert step is not None, "compute a gradient before the update"
        step.update = Frame("rank", {"do": "update", "rate": rate, "clip": clip})

        async def work() -> float:
            if self._step is not step:  # the ranks have started again since
                await self._gradient(step)
            return await self._update(step)

        norm = self._wait(self._reliably(work))
        if math.isfinite(norm):  # otherwise nothing has changed
            self._journal.append(step)
            self._done += 1
        return norm

    def moments(self) -> dict[str, Tensor]:
        found = self._wait(self._reliably(self._gathered))
        # The state before this one is committed by now; this one soon.
        del self._journal[: self._saved - self._first]
        self._first, self._saved = self._saved, self._done
        if self._first:
            self._initial = None
        return found

    def load(self, moments: Mapping[str, Tensor]) -> None:
        self._moments, self._initial = moments, None
        self._opened = self._lost = False
        self._journal, self._step = [], None
        self._first = self._done = self._saved = _steps(moments)

    # --- the ranks ----------------------------------------------------------------------------------------------------

    async def _reliably(self, work: Callable[[], Awaitable[T]]) -> T:
        """The result of `work` by ranks that are open. If one ends, all start again, and so does `work`."""
        attempts = 0
        while True:
            try:
                if not self._opened:
                    await self._open()
                return await work()
            except RankEndedError as ended:
                attempts += 1
                self._lost, self._opened, self._step = self._lost or self._opened, False, None
                self._group.events.event("workers", event="rank lost", rank=ended.number, why=ended.why)
                if attempts == MOST_ATTEMPTS:
                    raise WorkerLostError(
                        f"The trainer's ranks ended {attempts} times in the same step; the last one was rank "
                        f"{ended.number}: {ended.why}.",
                        "Train in one process: -s cluster=none",
                    ) from None

    async def _open(self) -> None:
        """Start the ranks, give them the weights and moments, and repeat the steps since then."""
        began = time.perf_counter()
        first = await self._restored() if self._lost else self._done
        if not self._group.running:
            await self._group.start()
        if self._initial is None and not self._done:
            self._initial = {name: tensor.clone() for name, tensor in self._shared.tensors.items()}
        await self._give()
        steps = self._journal[first - self._first :] if self._lost else []
        for step in steps:
            await self._gradient(step)
            await self._update(step)
        self._moments, self._opened, self._lost, self._step = {}, True, False, None
        self._group.events.event(
            "workers",
            event="ranks up",
            ranks=self._group.count,
            **({"nodes": " ".join(self._group.nodes)} if self._group.on_cluster else {}),
            repeated=len(steps),
            ms=(time.perf_counter() - began) * 1e3,
        )

    async def _give(self) -> None:
        """Let the ranks open the model with the driver's weights and moments."""
        fields = {**self._fields, "do": "open"}
        if self._group.on_cluster:
            parts = await asyncio.get_running_loop().run_in_executor(None, self._parts)
            await self._group.ask([Frame("rank", {**fields, **places}, arrays) for places, arrays in parts])
            return
        moments = SharedTensors(self._moments) if self._moments else None
        try:
            if moments is not None:
                moments.write(self._moments)
            place = None if moments is None else moments.place
            await self._ask(Frame("rank", {**fields, "weights": self._shared.place, "moments": place}))
        finally:
            if moments is not None:
                moments.close()

    def _parts(self) -> list[tuple[dict[str, Any], dict[str, Array]]]:
        """For each rank on a cluster, its rows of the weights and moments, as fields and arrays of a frame."""
        parts = []
        for number in range(self._group.count):
            fields, arrays = dict[str, Any](moments=None), dict[str, Array]()
            for what, whole in (("weights", self._shared.tensors), ("moments", self._moments)):
                if whole:
                    rows = {name: own_rows(tensor, number, self._group.count) for name, tensor in whole.items()}
                    layout, arrays[what] = packed_tensors(rows)
                    fields[what] = {"layout": layout}
            parts.append((fields, arrays))
        return parts

    def _take(self, what: str, answers: Sequence[Frame], whole: Mapping[str, Tensor]) -> None:
        """Write the rows that ranks on a cluster have sent into whole tensors."""
        for number, answer in enumerate(answers):
            rows = unpacked_tensors(answer.fields[what]["layout"], answer.arrays[what])
            with torch.no_grad():
                for name, tensor in rows.items():
                    own_rows(whole[name], number, len(answers)).copy_(tensor)

    async def _restored(self) -> int:
        """Write the weights of the last commit to the shared memory, and remember its moments. Returns the number of
        its steps."""
        found = await asyncio.get_running_loop().run_in_executor(None, self._committed)
        if found is None:
            weights, self._moments = self._initial, {}
        else:
            weights = {name: found[0][MODEL_PREFIX + name] for name in self._parameters}
            self._moments = {
                f"{moment}.{name}": found[0][f"{OPTIMIZER_PREFIX}{moment}.{name}"]
                for moment in MOMENTS
                for name in self._parameters
                if f"{OPTIMIZER_PREFIX}{moment}.{name}" in found[0]
            }
        first = _steps(self._moments)
        if weights is None or not self._first <= first <= self._done:
            raise StateError(
                f"The last commit has {first} optimizer steps, but the ranks can repeat only steps from {self._first} "
                "on; this is a defect of pvg.",
                "Continue the run with pvg train --resume.",
            )
        self._shared.write(weights)
        return first

    async def _ask(self, frame: Frame) -> list[Frame]:
        return await self._group.ask([frame] * self._group.count)

    async def _gradient(self, step: _Step) -> list[Frame]:
        self._step = None
        answers = await self._group.ask(step.gradient)
        self._step = step
        return answers

    async def _update(self, step: _Step) -> float:
        assert step.update is not None
        answers = await self._ask(step.update)
        if "weights" in answers[0].arrays:
            await asyncio.get_running_loop().run_in_executor(None, self._take, "weights", answers, self._shared.tensors)
        self.held_bytes = [answer.fields["bytes"] for answer in answers]
        self._step = None
        return float(answers[0].arrays["norm"].item())

    async def _gathered(self) -> dict[str, Tensor]:
        like = {f"{moment}.{name}": p for moment in MOMENTS[:2] for name, p in self._parameters.items()}
        if self._group.on_cluster:
            answers = await self._ask(Frame("rank", {"do": "moments", "memory": None}))
            whole = {name: torch.empty_like(tensor) for name, tensor in like.items()}
            await asyncio.get_running_loop().run_in_executor(None, self._take, "moments", answers, whole)
        else:
            shared = SharedTensors(like)
            try:
                answers = await self._ask(Frame("rank", {"do": "moments", "memory": shared.place}))
                whole = dict(shared.tensors)
            finally:
                shared.close()
        steps = answers[0].fields["steps"]
        found = {f"{moment}.{name}": whole[f"{moment}.{name}"] for name in steps for moment in MOMENTS[:2]}
        return found | {f"step.{name}": torch.tensor(count) for name, count in steps.items()}

    async def _nothing(self) -> None:
        """The work of `prepare`."""

    def _frames(self, parts: Sequence[Sequence[PolicyBatch]], state: Mapping[str, Any]) -> list[Frame]:
        """The requests for a gradient. Ranks with fewer micro-batches than others get the shortest row for passes of
        weight 0."""
        passes = max(len(part) for part in parts)
        padding = record_arrays("padding.", _shortest_row(parts))
        frames = []
        for number in range(self._group.count):
            own = parts[number] if number < len(parts) else []
            arrays: dict[str, Array] = dict(padding)
            for index, micro_batch in enumerate(own):
                arrays |= record_arrays(f"{index}.", micro_batch)
            fields = {"do": "gradient", "micro_batches": len(own), "passes": passes, "state": state}
            frames.append(Frame("rank", fields, arrays))
        return frames

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _shortest_row(parts: Sequence[Sequence[PolicyBatch]]) -> PolicyBatch:
    shortest = min((m for part in parts for m in part), key=lambda micro_batch: int(micro_batch.lengths_N.min()))
    return shortest.select(np.array([int(shortest.lengths_N.argmin())]))


def _steps(moments: Mapping[str, Tensor]) -> int:
    """The optimizer steps that moments of AdamW have seen."""
    return max((int(tensor.item()) for name, tensor in moments.items() if name.startswith("step.")), default=0)
