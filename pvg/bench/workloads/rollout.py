"""Engine and dispatcher alone: the base prover samples groups of fixed prompts, and the solutions are graded.

Each request has a fixed seed, the same in every sample. So the sampled tokens depend neither on the batches nor on
earlier samples, up to floating-point ties. The report's work therefore describes the orders; the tokens that they
yield are in `derived`.

Servers choose their batches themselves, and one token that is rounded differently changes all after it. So use fixed
lengths on servers (`workload.fixed_length`): nothing ends a completion early, and every sample does equal work.
`workload.prompt_tokens` replaces the prompts by that many random tokens, if the task's prompts are too short for prefix
sharing to matter. Each sample first publishes the weights again, which empties the servers' prefix caches, so sharing
happens only within a sample.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import orjson

from pvg.bench.runner import RESET
from pvg.bench.workloads import BenchMetric, BenchSettings, Workload, workload_settings
from pvg.config.base import Count, Section
from pvg.config.experiment import Experiment
from pvg.errors import ConfigurationError
from pvg.game.players import Players
from pvg.game.roles import Render, assign_roles, prompt_renderer
from pvg.models.language_model import LanguageModel
from pvg.records import Float32, Int32, Rollout
from pvg.rollout.dispatcher import Dispatcher, GroupOrder, SampleCall
from pvg.rollout.engine import Engine, Sampling
from pvg.rollout.vllm_requests import read_generated
from pvg.seeds import draw_cyclic, generator_for, seed_for
from pvg.tasks import open_task
from pvg.tasks.task import Task, problems_of_half
from pvg.telemetry.spans import span

# Inputs of workloads: groups of fixed prompts, and batches of rollouts. All follow from the experiment and a seed,
# so every sample and every variant does the same work.


def check_work(experiment: Experiment, rollouts: int) -> None:
    """Raises ConfigurationError if `rollouts` is not a multiple of the group size."""
    size = experiment.rollout.group_size
    if rollouts % size:
        raise ConfigurationError(
            f"workload.rollouts = {rollouts} is not a multiple of rollout.group_size = {size}.",
            f"Set it to {max(1, rollouts // size) * size}.",
        )


def fixed_orders(experiment: Experiment, task: Task, render: Render, rollouts: int, seed: int) -> list[GroupOrder]:
    """Groups of the experiment's size with `rollouts` rollouts in all, on the prover's problems, with the game's role
    shares.

    Raises ConfigurationError for a task without such problems.
    """
    size = experiment.rollout.group_size
    groups = rollouts // size
    pool = problems_of_half(task, "prover")
    if not pool:
        raise ConfigurationError(
            "The task has no training problems for the prover.", "Raise task.problems or task.limit."
        )
    chosen = draw_cyclic(len(pool), 0, groups, seed_for(seed, "bench", "problems"))
    roles = assign_roles(groups, experiment.game.sneaky_share, generator_for(seed, "bench", "roles"))
    return [
        GroupOrder(pool[i], role, render(pool[i], role), group, size)
        for group, (i, role) in enumerate(zip(chosen, roles, strict=True))
    ]


def fixed_call(seed: int) -> SampleCall:
    """The same requests in every sample."""
    return SampleCall(0, "bench", 0, seed_for(seed, "bench", "requests", "fixed"), prefix="bench/fixed")


def drawn_rewards(rollouts: Sequence[Rollout], seed: int) -> Float32:
    """float32 [N], standard normal. The work of a step does not depend on the values, if each group has a signal."""
    return generator_for(seed, "bench", "rewards").standard_normal(len(rollouts)).astype(np.float32)


def digest_of(rows: Iterable[Int32]) -> str:
    """A short checksum of rows of token ids. Equal counts alone do not mean that two reports did the same work."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(len(row).to_bytes(8) + row.tobytes())
    return digest.hexdigest()[:12]


def model_facts(model: LanguageModel) -> dict[str, Any]:
    return {"model": model.name, "parameters": model.num_parameters}


# --- the workload -----------------------------------------------------------------------------------------------------

FIRST_PLAIN = 3  # lower ids are often special tokens

MEASURES = {
    "tokens_per_s": BenchMetric("tokens/s", "higher"),  # of completions
    "prompt_tokens_per_s": BenchMetric("tokens/s", "higher"),  # shared or not
    "rollouts_per_s": BenchMetric("rollouts/s", "higher"),
    # A rollout's time in the engine, queued and served.
    **{f"latency_p{percentile}_s": BenchMetric("s", "lower") for percentile in (50, 90, 99)},
    "group_straggle_s": BenchMetric("s", "lower"),  # from a group's first finished rollout to its last, mean
    "engine_batch": BenchMetric("rows", "higher"),  # unfinished rows per decoding step; on servers: requests in flight
}
ON_SERVERS = {
    "prefix_share": BenchMetric("1", "higher"),  # share of the prompt tokens that came from a prefix cache
    "reading_us": BenchMetric("us/token", "lower"),  # this process's time to read the completions from replies
    "reading_json_us": BenchMetric("us/token", "lower"),  # the same for vLLM's own form, a JSON object per token
}


class RolloutWorkloadSettings(Section):
    """The `[workload]` table. `fixed_length`: every completion has rollout.max_tokens tokens."""

    rollouts: Count = 256
    prompt_tokens: Count | None = None  # random tokens per prompt; None: the task's prompts
    fixed_length: bool = False
    seed: int = 0


def make(settings: BenchSettings) -> Workload:
    workload = workload_settings(RolloutWorkloadSettings, settings)
    check_work(settings.experiment, workload.rollouts)
    return RolloutWorkload(settings, workload)


class RolloutWorkload:
    """See the module. One sample is one call of the dispatcher."""

    def __init__(self, settings: BenchSettings, workload: RolloutWorkloadSettings) -> None:
        self._experiment, self._workload, self._executor = settings.experiment, workload, settings.executor
        self._on_servers = settings.experiment.rollout.engine.kind == "vllm"
        self.measures: Mapping[str, BenchMetric] = MEASURES | (ON_SERVERS if self._on_servers else {})
        self._derived: dict[str, float] = {}  # of the last sample

    async def open(self) -> None:
        task = open_task(self._experiment.task)
        async with AsyncExitStack() as stack:
            self._players = Players(self._experiment, task, executor=self._executor)
            stack.push_async_callback(self._players.close)
            await self._players.ready(scoring=False)
            self._engine: Engine = self._players.engine
            self._dispatcher = dispatcher(self._players, fixed_length=self._workload.fixed_length)
            self._orders = self._fixed()
            stack.pop_all()  # opened; from now on `close` frees it

    def _fixed(self) -> list[GroupOrder]:
        players, workload = self._players, self._workload
        render = prompt_renderer(self._experiment.prompts, players.base.tokenizer)
        orders = fixed_orders(self._experiment, players.task, render, workload.rollouts, workload.seed)
        if (length := workload.prompt_tokens) is None:
            return orders
        random, ids = generator_for(workload.seed, "bench", "prompts"), (FIRST_PLAIN, players.base.tokenizer.vocab_size)
        return [replace(order, prompt_ids=random.integers(*ids, length, dtype=np.int32)) for order in orders]

    def work(self) -> dict[str, Any]:
        orders, rollout = self._orders, self._experiment.rollout
        found = {
            **model_facts(self._players.base),
            "task": self._experiment.task.kind,
            "groups": len(orders),
            "rollouts": sum(order.size for order in orders),
            "prompt_tokens": sum(len(order.prompt_ids) * order.size for order in orders),
            "prompts": digest_of(order.prompt_ids for order in orders),
            "max_tokens": rollout.max_tokens,
            "temperature": rollout.temperature,
            "top_p": 1.0,  # fixed: so that `pvg compare` takes reports of versions with this setting
            "top_k": 0,
            "seed": self._workload.seed,
        }
        return found | ({"fixed_length": True} if self._workload.fixed_length else {})

    async def sample(self, index: int) -> dict[str, float]:
        if self._on_servers:
            with span(RESET):
                await self._players.publish(self._players.base.weights(), self._players.publisher.version + 1)
        before, started = self._engine.stats, time.perf_counter()
        with span("rollout"):
            groups = await self._dispatcher.sample(self._orders, fixed_call(self._workload.seed))
        wall_s = time.perf_counter() - started
        stats = self._engine.stats.since(before)
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        tokens = sum(len(rollout.completion_ids) for rollout in rollouts)
        self._derived = {
            "prefix_share": stats.prefix_share,
            "completion_length": tokens / len(rollouts),
            "completion_tokens": float(tokens),
            "truncated": sum(rollout.finish_reason == "length" for rollout in rollouts) / len(rollouts),
        }
        latencies_N = [r.timing.queued_s + r.timing.service_s for r in rollouts]
        p50, p90, p99 = np.percentile(latencies_N, (50, 90, 99)).tolist()
        return {
            "tokens_per_s": tokens / wall_s,
            "prompt_tokens_per_s": sum(len(r.prompt_ids) for r in rollouts) / wall_s,
            "rollouts_per_s": len(rollouts) / wall_s,
            "latency_p50_s": p50,
            "latency_p90_s": p90,
            "latency_p99_s": p99,
            "group_straggle_s": float(np.mean([group.spread_s for group in groups])),
            "engine_batch": stats.mean_batch,
            **({"prefix_share": stats.prefix_share, **reading_us(rollouts)} if self._on_servers else {}),
        }

    def derived(self) -> dict[str, float]:
        """Of the last sample (equal in all samples): the share of prompt tokens whose computation was shared, the mean
        completion length, all completion tokens, and the share of rollouts cut off at max_tokens."""
        return self._derived

    async def close(self) -> None:
        await self._players.close()


def reading_us(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """The times of ON_SERVERS to read these rollouts' completions, from replies that are made of them here. For vLLM's
    own replies only what any client must do: parse the JSON, and take ids and log-probs into arrays."""
    arrays, objects = [], []
    for rollout in rollouts:
        ids, logprobs = rollout.completion_ids, rollout.logprobs
        pairs = zip(ids.tolist(), logprobs.tolist(), strict=True)
        entries = [{"token_id": token, "logprob": logprob, "rank": 1} for token, logprob in pairs]
        content = [entry | {"top_logprobs": [entry]} for entry in entries]
        values = {"token_ids": ids, "logprobs": logprobs}
        packed = {name: base64.b64encode(array.tobytes()).decode() for name, array in values.items()}
        choice = {"finish_reason": "length", "weight_versions": [{"start": 0, "version": "0-a/0"}]}
        arrays.append(orjson.dumps({"choices": [choice | packed], "usage": {"prompt_tokens": 1}}))
        objects.append(orjson.dumps({"token_ids": ids.tolist(), "content": content}))
    started = time.thread_time()
    for body in arrays:
        read_generated(orjson.loads(body), "")
    between = time.thread_time()
    for body in objects:
        found = orjson.loads(body)
        np.array(found["token_ids"], np.int32), np.array([entry["logprob"] for entry in found["content"]], np.float32)
    tokens = sum(len(rollout.completion_ids) for rollout in rollouts)
    times = {"reading_us": between - started, "reading_json_us": time.thread_time() - between}
    return {name: seconds / tokens * 1e6 for name, seconds in times.items()}


def dispatcher(players: Players, *, fixed_length: bool) -> Dispatcher:
    """The players' dispatcher. `fixed_length`: no completion ends before rollout.max_tokens."""
    rollout, tokenizer = players.rollout, players.base.tokenizer
    stops = () if fixed_length else tokenizer.end_ids
    sampling = Sampling(rollout.max_tokens, stops, rollout.temperature)
    return Dispatcher(players.engine, players.task, tokenizer, sampling, rollout.concurrency, players.grading)
