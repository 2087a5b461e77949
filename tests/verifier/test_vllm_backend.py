"""Scores from servers: real HTTP, real weights, torch's own scores (real vLLM: tests/integration; what goes wrong:
test_vllm_backend_faults)."""

import asyncio

import numpy as np
import pytest
import torch
from score_servers_of_tests import Bench, scored, servers, some

from pvg.errors import TrainingDivergedError, WeightsNotArrivedError

HEADS = ["scalar", "implicit"]
pytestmark = [pytest.mark.usefixtures("control_key"), pytest.mark.slow]


@pytest.mark.parametrize("head", [*HEADS, "implicit 0.5", "implicit 0"])
def test_scores_are_torchs_and_servers_share_the_work(head, tmp_path, executor):
    async def play():
        async with scored(tmp_path, head, executor, 2) as (*fakes, bench):
            scorer, rollouts = bench.scorer(), some(64)
            scores = await bench.assert_right(scorer, rollouts)
            assert scores.std() > 1e-2
            proofs = [line["gap"] for line in bench.heard.weights("canary")]
            assert len(proofs) == 2
            assert max(proofs) < 1e-3
            assert bench.serving.last_sync.canary_gap == max(proofs)
            for fake in fakes:
                assert sum(fake.scored.values()) > 64 / bench.serving.head.inputs_per_request / 4
                assert fake.stale_hits == 0
            stats = scorer.stats
            assert (stats.hits, stats.misses) == (0, 64)
            assert stats.forward_passes == 64 / bench.serving.head.inputs_per_request
            await scorer.score(rollouts)
            assert scorer.stats.hits == 64
            assert scorer.stats.forward_passes == stats.forward_passes

    asyncio.run(play())


@pytest.mark.parametrize("head", HEADS)
def test_a_new_version_is_published_and_the_same_weights_are_not(head, tmp_path, executor):
    async def play():
        async with scored(tmp_path, head, executor) as (fake, bench):
            scorer, rollouts = bench.scorer(), some(12)
            first = await bench.assert_right(scorer, rollouts)
            bench.train(2)
            scorer.set_version(bench.model.version())
            second = await bench.assert_right(scorer, rollouts)
            assert np.abs(first - second).max() > 1e-2
            await bench.assert_right(bench.scorer(), rollouts)  # another scorer, as the next phase opens one
            sent, done = bench.heard.weights("client.send"), bench.heard.weights("client.done")
            assert [line["version"] for line in sent] == [1, 2]
            assert [line["trace"] for line in sent] == [line["trace"] for line in done]
            assert [line["failed"] for line in done] == [0, 0]
            assert fake.label.endswith("/2")
            assert fake.calls["/pvg/weights"] == 2

    asyncio.run(play())


@pytest.mark.parametrize("head", HEADS)
def test_a_score_under_way_when_the_version_changes_is_the_new_ones(head, tmp_path, executor):
    """Invariant 2, also for a version that comes back."""

    async def play():
        async with scored(tmp_path, head, executor, token_ms=100) as (fake, bench):
            scorer, rollouts = bench.scorer(version="a"), some(6)
            await scorer.score(rollouts[:1])  # published
            begun = sum(fake.scored.values())
            straddling = asyncio.create_task(scorer.score(rollouts[1:]))
            while sum(fake.scored.values()) == begun:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            for version, seed in (("b", 2), ("a", 3)):
                bench.train(seed)
                scorer.set_version(version)
            np.testing.assert_allclose(await straddling, await bench.torch_scores(rollouts[1:]), atol=1e-3)
            await bench.assert_right(scorer, rollouts)

    asyncio.run(play())


# --- references -----------------------------------------------------------------------------------------------------


def test_references_come_from_their_servers_once(tmp_path, executor):
    async def play():
        async with (
            servers(tmp_path, "implicit") as (reference,),
            scored(tmp_path, "implicit", executor, references=[reference.url]) as (_, bench),
        ):
            scorer, rollouts = bench.scorer(), some(20)
            await bench.assert_right(scorer, rollouts)
            (proof,) = bench.heard.weights("canary", of="reference")
            assert proof["gap"] < 1e-3
            asked = sum(reference.scored.values())
            bench.train(2)
            scorer.set_version(bench.model.version())
            await bench.assert_right(scorer, rollouts)
            assert sum(reference.scored.values()) == asked
            assert reference.label == "default"
            await reference.restart()
            await bench.assert_right(scorer, some(20, seed=2))

    asyncio.run(play())


def test_a_reference_server_with_other_weights_is_refused(tmp_path, executor):
    async def play():
        async with (
            servers(tmp_path, "implicit") as (reference,),
            scored(tmp_path, "implicit", executor, references=[reference.url]) as (_, bench),
        ):
            reference.told._module.load_state_dict(
                {name.removeprefix("backbone."): t for name, t in bench.model.trainable_state().items()}, strict=False
            )
            with pytest.raises(WeightsNotArrivedError, match="untrained start") as caught:
                await bench.scorer().score(some(4))
            assert reference.url in caught.value.message

    asyncio.run(play())


# --- what is no score -------------------------------------------------------------------------------------------------


def test_a_verifier_that_diverged_is_not_published(tmp_path, executor):
    async def play():
        async with scored(tmp_path, "scalar", executor) as (fake, bench):
            with torch.no_grad():
                bench.model.weight_D[0] = float("nan")
            with pytest.raises(TrainingDivergedError):
                await bench.scorer().score(some(4))
            assert fake.label == "default"

    asyncio.run(play())


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", HEADS)
def test_two_verifiers_on_the_same_servers_do_not_see_each_others_weights(head, tmp_path, executor):
    async def play():
        async with (
            servers(tmp_path, head) as (fake,),
            Bench(tmp_path, head, executor, [fake.url]) as bench,
            Bench(tmp_path, head, executor, [fake.url]) as other,
        ):
            other.train(5)
            other.serving = bench.serving
            rollouts = some(20)
            one, two = bench.scorer(), other.scorer()
            await asyncio.gather(*(b.assert_right(s, rollouts) for b, s in ((bench, one), (other, two))))
            await bench.assert_right(bench.scorer(), rollouts)

    asyncio.run(play())
