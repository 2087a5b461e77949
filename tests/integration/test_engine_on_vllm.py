"""The engine and its faults against real vLLM servers: killed and restarted, frozen, abandoned."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from served_games import Served, serving

from pvg.config.experiment import Experiment
from pvg.config.load import find_experiment, load_experiment
from pvg.config.rollout import TagPrompts
from pvg.game.players import Players
from pvg.game.roles import prompt_renderer
from pvg.records import Int32, Role, VersionSpan
from pvg.rollout.engine import Completion, CutShort, GenerationRequest, PartialCompletion, Sampling
from pvg.servers.pool import HttpPool
from pvg.tasks import open_task
from pvg.tasks.task import problems_of_half
from pvg.telemetry.events import Events

pytestmark = pytest.mark.timeout(900)


class Kept(Events):
    def __init__(self) -> None:
        self.kept: list[dict[str, object]] = []

    def event(self, tag: str, **fields: object) -> None:
        self.kept.append(fields)

    def named(self, name: str) -> list[dict[str, object]]:
        return [fields for fields in self.kept if fields["event"] == name]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    with serving(folder, "serving.max_num_seqs=64") as running:
        yield running


def experiment(folder: Path, *urls: str, **settings: object) -> Experiment:
    told = [f"weights.root={folder / 'weights'}", f"serving.servers={','.join(urls)}", "rollout.engine=vllm"]
    told += ["rollout.concurrency=256"]
    told += [f"{key.replace('__', '.')}={value}" for key, value in settings.items()]
    return load_experiment(find_experiment("modchain", Path("experiments")), told)


def run(setting: Experiment, play: Callable[[Players, Kept], Awaitable[None]], kept: Kept | None = None) -> None:
    kept = kept or Kept()

    async def opened() -> None:
        players = Players(setting, open_task(setting.task), kept, run="drill")
        try:
            await players.ready()
            await play(players, kept)
        finally:
            await players.close()

    asyncio.run(opened())


def prompts(players: Players, count: int) -> list[Int32]:
    render = prompt_renderer(TagPrompts(), players.base.tokenizer)
    problems = problems_of_half(players.task, "prover")[:count]
    return [render(problem, tuple(Role)[number % 2]) for number, problem in enumerate(problems)]


def requests(players: Players, count: int, tokens: int = 24, temperature: float = 1.0) -> list[GenerationRequest]:
    """Of fixed length: nothing stops them early."""
    sampling = Sampling(max_tokens=tokens, stop_ids=(), temperature=temperature)
    asked = prompts(players, min(count, 64))
    return [GenerationRequest(f"r{i}", asked[i % len(asked)], sampling, seed=i) for i in range(count)]


async def all_of(players: Players, wanted: list[GenerationRequest]) -> list[Completion]:
    found = await asyncio.gather(*map(players.engine.generate, wanted))
    assert [completion.request_id for completion in found] == [request.id for request in wanted]
    assert all(
        len(completion.token_ids) == request.sampling.max_tokens
        for completion, request in zip(found, wanted, strict=True)
    )
    return list(found)


def moved(players: Players, scale: float) -> dict[str, torch.Tensor]:
    """Weights that differ from the base prover's."""
    generator = torch.Generator().manual_seed(7)
    return {
        name: tensor + scale * torch.randn(tensor.shape, generator=generator)
        for name, tensor in players.base.weights().items()
    }


def teacher_forced(
    players: Players, request: GenerationRequest, completion: Completion | PartialCompletion
) -> np.ndarray:
    """The log-probs of a completion's tokens under the base prover, at the request's temperature."""
    ids = torch.from_numpy(np.concatenate([request.prompt_ids, completion.token_ids]).astype(np.int64))
    with torch.no_grad():
        logits = players.base.module(input_ids=ids[None]).logits[0].float() / request.sampling.temperature
    start = len(request.prompt_ids)
    chosen = logits.log_softmax(-1)[start - 1 : -1].gather(1, ids[start:, None])
    return chosen[:, 0].numpy()


def test_log_probs_are_those_of_the_distribution_that_was_sampled(folder: Path, server: Served) -> None:
    async def play(players: Players, kept: Kept) -> None:
        wanted = requests(players, 16, temperature=0.6)
        for request, completion in zip(wanted, await all_of(players, wanted), strict=True):
            np.testing.assert_allclose(completion.logprobs, teacher_forced(players, request, completion), atol=1e-3)

    run(experiment(folder, server.url, rollout__temperature=0.6), play)


def test_an_update_in_mid_flight_leaves_every_token_with_the_version_that_sampled_it(
    folder: Path, server: Served
) -> None:
    async def play(players: Players, kept: Kept) -> None:
        base, wanted, found = players.base.weights(), requests(players, 8192, 100), dict[str, Completion]()
        waiting, weights = iter(wanted), (base, moved(players, 0.05))

        def crosses(completion: Completion) -> bool:
            """Whether 16 tokens or more of other weights follow a start with the base's weights (the even versions)."""
            starts = [*(span.start for span in completion.spans), len(completion.token_ids)]
            return [span.version % 2 for span in completion.spans[:2]] == [0, 1] and starts[2] - starts[1] >= 16

        def across() -> list[tuple[GenerationRequest, Completion]]:
            both = [(request, found[request.id]) for request in wanted if request.id in found]
            return [pair for pair in both if crosses(pair[1])]

        async def keep_asking() -> None:
            while not across():
                request = next(waiting)
                found[request.id] = await players.engine.generate(request)

        # Asked by more than the server decodes together. Updated again and again, because a server that is faster than
        # this starved process may have nothing under way when an update comes.
        asking = [asyncio.create_task(keep_asking()) for _ in range(128)]
        for version in itertools.count(1):
            await asyncio.sleep(0.5)
            if across():
                break
            await players.publish(weights[version % 2], version)
        await asyncio.gather(*asking)
        for request, completion in across()[:8]:
            old = completion.spans[1].start
            expected = teacher_forced(players, request, completion)
            np.testing.assert_allclose(completion.logprobs[:old], expected[:old], atol=1e-3)
            assert np.abs(completion.logprobs[old:] - expected[old:]).max() > 1e-2

    run(experiment(folder, server.url), play)


def test_requests_that_are_cut_go_on_from_where_they_were_under_the_next_weights(folder: Path, server: Served) -> None:
    async def play(players: Players, kept: Kept) -> None:
        wanted, cut = requests(players, 4096, 100), list[tuple[GenerationRequest, PartialCompletion | None]]()
        waiting = iter(wanted)

        def enough() -> bool:
            return any(begun for _, begun in cut) and any(begun is None for _, begun in cut)

        async def keep_asking() -> None:
            while not enough():
                request = next(waiting)
                try:
                    await players.engine.generate(request)
                except CutShort as short:
                    cut.append((request, short.partial))

        # By more than the server decodes together: some have no token yet. Cut again and again, because a process that
        # is starved cuts what the server has long finished.
        asking = [asyncio.create_task(keep_asking()) for _ in range(128)]
        while not enough():
            await asyncio.sleep(0.5)
            players.engine.cut([request.id for request in wanted])
        await asyncio.gather(*asking)
        pool = HttpPool(1)
        await until(lambda: running_requests(pool, server.url), lambda count: count == 0)
        await pool.close()
        assert not [line for line in kept.named("retry") if "aborted" in str(line["why"])]
        some = [(request, begun) for request, begun in cut if begun][:32]
        for request, begun in some:
            assert begun.spans == (VersionSpan(0, 0),)
            np.testing.assert_allclose(begun.logprobs, teacher_forced(players, request, begun), atol=1e-3)

        await players.publish(moved(players, 0.05), 1)
        again = [replace(request, resumed_from=begun) for request, begun in some]
        changes = []
        for request, completion in zip(again, await all_of(players, again), strict=True):
            first = request.tokens_resumed
            assert completion.spans == (VersionSpan(0, 0), VersionSpan(first, 1))
            expected = teacher_forced(players, request, completion)
            np.testing.assert_allclose(completion.logprobs[:first], expected[:first], atol=1e-3)
            changes.append(np.abs(completion.logprobs[first:] - expected[first:]).max())
        assert max(changes) > 1e-2  # some have only one token left, which may be certain under both weights

    run(experiment(folder, server.url), play)


async def running_requests(pool: HttpPool, url: str) -> float:
    text = (await pool.request("GET", f"{url}/metrics", timeout_s=30.0)).body.decode()
    lines = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running")]
    assert lines, "without this metric a test that waits for 0 could not fail"
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


async def until(look: Callable[[], Awaitable[float]], enough: Callable[[float], bool]) -> None:
    for _ in range(1200):
        if enough(await look()):
            return
        await asyncio.sleep(0.05)
    raise AssertionError("it did not come to that within a minute")
