import asyncio
from concurrent.futures import Executor, Future

import numpy as np
import pytest
import torch
from tiny_verifiers import GatedHead, digits_tokenizer, language_model, perturb, random_texts, rollout, verifier

from pvg.errors import ConfigurationError, StateError, TrainingDivergedError
from pvg.models.heads import ImplicitHead, ScoreScales, VerifierEnsemble
from pvg.models.packing import pad_right
from pvg.records import Role
from pvg.verifier.data import VerifierTemplate
from pvg.verifier.scorer import ScoreCache, ScoreKey, TorchBackend, VerifierScorer

HEADS = ["scalar", "implicit", "yes_token"]


class CallingThreadExecutor(Executor):
    """Runs each call immediately in the calling thread."""

    def submit(self, fn, /, *args, **kwargs):
        done = Future()
        done.set_result(fn(*args, **kwargs))
        return done


AT_ONCE = CallingThreadExecutor()  # so that what a call starts, it has started after some turns of the loop


def make_scorer(
    model,
    executor,
    *,
    head="implicit",
    style="plain",
    entries=1000,
    budget=4096,
    version=None,
    reading=AT_ONCE,
    precision="float32",
):
    template = VerifierTemplate(model.tokenizer, style, head)
    return VerifierScorer(
        model,
        template,
        version or model.version(),
        cache_entries=entries,
        token_budget=budget,
        executor=executor,
        prover_fingerprint=digits_tokenizer().fingerprint,
        reading=reading,
        precision=precision,
    )


def gated(executor, *, seed=0, **options):
    tokenizer = digits_tokenizer()
    model = GatedHead(language_model(tokenizer, seed))
    perturb(model)
    return model, make_scorer(model, executor, head="scalar", **options)


def alone(model, template, one):
    """The score by a separate forward pass."""
    ids, start = template.tokens(one.question, one.text, one.completion_ids, digits_tokenizer().fingerprint)
    ids_BL, lengths_B = pad_right([ids], 0)
    with torch.no_grad():
        return model(ids_BL, lengths_B, torch.tensor([start])).item()


async def began(model):
    await asyncio.get_running_loop().run_in_executor(None, model.began.acquire)


@pytest.mark.slow
@pytest.mark.parametrize("head", HEADS)
def test_scores_are_those_of_a_forward_pass_of_ones_own(head, executor):
    model = verifier(head)
    scorer = make_scorer(model, executor, head=head, budget=256)
    rollouts = [rollout(text) for text in random_texts(40, seed=1)]
    scores = asyncio.run(scorer.score(rollouts))
    assert scores.dtype == np.float32
    assert scores.std() > 1e-2
    expected = [alone(model, scorer._template, one) for one in rollouts]
    np.testing.assert_allclose(scores, expected, atol=1e-4)
    assert scorer.stats.forward_passes > 1
    assert scorer.stats.misses == 40


def test_the_role_and_its_prompt_are_not_seen(executor):
    model = verifier("implicit")
    scorer = make_scorer(model, executor)
    helpful = rollout("7+5=2;A2", role=Role.HELPFUL)
    sneaky = rollout("7+5=2;A2", role=Role.SNEAKY, prompt_ids=np.arange(5, dtype=np.int32), correct=False, number=1)
    one = asyncio.run(scorer.score([helpful]))
    two = asyncio.run(scorer.score([sneaky]))
    assert one == two
    stats = scorer.stats
    assert (stats.hits, stats.misses, stats.forward_passes, len(scorer._cache)) == (1, 1, 1, 1)


def test_duplicates_and_concurrent_calls_share_one_forward_pass(executor):
    async def play():
        model, scorer = gated(executor)
        same = [rollout("A1", number=n) for n in range(3)]
        first = asyncio.create_task(scorer.score(same))
        await began(model)
        second = asyncio.create_task(scorer.score([rollout("A1", number=7)]))
        await asyncio.sleep(0)
        model.gate.release()
        scores = [*await first, *await second]
        assert len(set(scores)) == 1
        stats = scorer.stats
        assert (stats.hits, stats.misses, stats.shared, stats.forward_passes) == (0, 1, 3, 1)
        await scorer.score(same)
        assert scorer.stats.hits == 3
        assert not model.began.acquire(blocking=False)

    asyncio.run(play())


def test_a_score_of_the_old_version_is_never_returned_for_the_new_one(executor):
    """Invariant 2: the old forward pass has read the old weights and ends after the change."""

    async def play():
        model, scorer = gated(executor, version="oldest")
        scorer.set_version("old")
        one = rollout("A1")
        old = alone_ungated(model, scorer, one)
        straddling = asyncio.create_task(scorer.score([one]))
        await began(model)  # the old score is computed, and held back
        with torch.no_grad():
            model.bias.add_(10.0)
        scorer.set_version("new")
        later = asyncio.create_task(scorer.score([one]))
        await asyncio.sleep(0)
        model.gate.release(2)  # the held-back pass, and the one that has to come
        for task in (straddling, later):
            assert (await task)[0] == pytest.approx(old + 10.0, abs=1e-4)
        assert (await scorer.score([one]))[0] == pytest.approx(old + 10.0, abs=1e-4)
        assert scorer.version == "new"
        assert len(scorer._cache) == 1

    asyncio.run(play())


def alone_ungated(model, scorer, one):
    model.gate.release()
    score = alone(model, scorer._template, one)
    model.began.acquire()
    return score


def test_a_failing_forward_pass_reaches_every_waiter_and_leaves_nothing_behind(executor):
    async def play():
        model, scorer = gated(executor)
        model.failure = MemoryError("no memory left")
        first = asyncio.create_task(scorer.score([rollout("A1"), rollout("A2")]))
        second = asyncio.create_task(scorer.score([rollout("A1")]))
        await began(model)
        model.gate.release()
        for task in (first, second):
            with pytest.raises(MemoryError, match="no memory left"):
                await task
        model.gate.release()
        assert np.isfinite(await scorer.score([rollout("A1"), rollout("A2")])).all()
        assert not scorer._under_way

    asyncio.run(play())


def test_a_fault_while_batches_are_made_reaches_every_waiter(executor, monkeypatch):
    scorer = make_scorer(verifier("scalar"), executor, head="scalar")

    async def play():
        calls = (scorer.score([rollout(text)]) for text in ("A1", "A2"))
        return await asyncio.gather(*calls, return_exceptions=True)

    monkeypatch.setattr(scorer._backend, "batches", lambda lengths: lengths[9])
    assert [type(error) for error in asyncio.run(play())] == [IndexError] * 2
    monkeypatch.undo()
    assert np.isfinite(asyncio.run(play())).all()


# --- leaving ---------------------------------------------------------------------------------------------------------


class Requests(TorchBackend):
    """As servers: each batch is a task, and an answer takes until `answer` is set; cancelled, until `left` is."""

    def __init__(self, model, template, executor):
        super().__init__(model, template.key, ScoreCache(1000), token_budget=4096, executor=executor)
        self.answer, self.left = asyncio.Event(), asyncio.Event()
        self.cancelled = 0

    def submit(self, inputs):
        return asyncio.ensure_future(self._asked(inputs))

    async def _asked(self, inputs):
        try:
            await self.answer.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            await self.left.wait()
            raise
        return await super().submit(inputs)


async def turns(count=20):
    for _ in range(count):
        await asyncio.sleep(0)


def test_leaving_cancels_what_servers_were_asked_and_loses_nothing_that_is_asked_later(executor):
    async def play():
        model = verifier("scalar")
        scorer = make_scorer(model, executor, head="scalar")
        scorer._backend = backend = Requests(model, scorer._template, executor)
        gone = asyncio.create_task(scorer.score([rollout("A1"), rollout("A2")]))
        await turns()
        gone.cancel()
        dropped = [asyncio.create_task(scorer.drop()) for _ in range(2)]
        await turns()
        seen = (backend.cancelled, [task.done() for task in dropped])
        later = asyncio.create_task(scorer.score([rollout("A2"), rollout("A3")]))  # the request has not ended yet
        await turns()
        backend.left.set()
        backend.answer.set()
        assert np.isfinite(await later).all()
        await asyncio.gather(*dropped)
        assert seen == (1, [False, False])
        assert backend.cancelled == 1
        assert not scorer._under_way
        assert scorer.stats.forward_passes == 1
        await scorer.drop()  # nothing is left to wait for

    asyncio.run(play())


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_score_that_is_not_finite_names_the_rollout_and_is_not_cached(broken, executor):
    model = verifier("scalar")
    scorer = make_scorer(model, executor, head="scalar")
    healthy = model.bias.item()
    with torch.no_grad():
        model.bias.fill_(broken)
    one = rollout("A1")
    with pytest.raises(TrainingDivergedError) as caught:
        asyncio.run(scorer.score([one]))
    assert one.id in caught.value.message
    with torch.no_grad():
        model.bias.fill_(healthy)
    assert np.isfinite(asyncio.run(scorer.score([one]))).all()


@pytest.mark.parametrize(("context", "budget"), [(24, 4096), (96, 32)])
def test_a_solution_that_fits_nowhere_is_refused_by_name_and_others_are_not(context, budget, executor):
    scorer = make_scorer(verifier("scalar", context=context), executor, head="scalar", budget=budget)
    longest = min(context, budget) - len("7+5+8?") - 1  # with the question and the end token
    short, long = rollout("1" * longest), rollout("1" * (longest + 1))

    async def play():
        return await asyncio.gather(scorer.score([short]), scorer.score([long]), return_exceptions=True)

    scores, error = asyncio.run(play())
    assert np.isfinite(scores).all()
    assert isinstance(error, ConfigurationError)
    assert long.id in error.message
    assert str(min(context, budget)) in error.message


def test_references_outlive_a_version(executor):
    model = verifier("implicit")
    scorer = make_scorer(model, executor)
    rollouts = [rollout(text) for text in random_texts(10, seed=5)]
    asyncio.run(scorer.score(rollouts))
    perturb(model, seed=9)
    scorer.set_version(model.version())
    model._reference_model.close()  # a second request for a reference fails
    fresh = asyncio.run(scorer.score(rollouts))
    scorer._references.clear()
    again = verifier("implicit")
    again.load_trainable_state(model.trainable_state())
    np.testing.assert_allclose(fresh, asyncio.run(make_scorer(again, executor).score(rollouts)), atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("head", ["scalar", "implicit"])
def test_a_score_is_the_same_bits_whatever_it_is_batched_with(head, executor):
    """What makes a resumed run, whose cache and batches are others, end with the same weights."""
    rollouts = [rollout(text) for text in random_texts(40, seed=6, longest=80)]
    model = verifier(head, width=128, spread=0.2)
    whole = asyncio.run(make_scorer(model, executor, head=head).score(rollouts))
    for size, budget in ((1, 4096), (3, 1024), (17, 2048)):
        scorer = make_scorer(model, executor, head=head, budget=budget)
        parts = [asyncio.run(scorer.score(rollouts[at : at + size])) for at in range(0, len(rollouts), size)]
        assert np.concatenate(parts).tobytes() == whole.tobytes(), size


@pytest.mark.parametrize("head", HEADS)
def test_in_bfloat16_what_solutions_share_is_computed_once(head, executor):
    computed, found = {}, {}
    rollouts = [rollout(text) for text in random_texts(16, seed=3)]
    for precision in ("float32", "bfloat16"):
        model, counts = verifier(head), []
        scorer = make_scorer(model, executor, head=head, precision=precision)
        model.backbone.get_input_embeddings().register_forward_hook(
            lambda part, rows, out, counts=counts: counts.append(rows[0].numel())
        )
        found[precision] = asyncio.run(scorer.score(rollouts))
        computed[precision] = sum(counts)
    inputs = [scorer._input(each) for each in rollouts]
    own = sum(len(each.ids) - each.prompt_length for each in inputs)
    assert computed["bfloat16"] <= inputs[0].prompt_length + own < computed["float32"]
    spread = found["float32"].std()
    np.testing.assert_allclose(found["bfloat16"], found["float32"], atol=0.1 * spread)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_an_ensemble_of_heads_that_know_no_packed_rows_scores_like_its_members(precision, executor):
    class Own(ImplicitHead):
        packs = False

        def reference(self, ids_BL, lengths_B, starts_B):
            return super().reference(ids_BL, lengths_B, starts_B)

    members = [Own(language_model(digits_tokenizer(), seed), 1.0) for seed in (1, 1)]
    for member in members:
        perturb(member)
    rollouts = [rollout(text) for text in random_texts(6, seed=3)]
    together = VerifierEnsemble(members, "mean", ScoreScales.none(2))
    found = [
        asyncio.run(make_scorer(each, executor, precision=precision).score(rollouts)) for each in (*members, together)
    ]
    np.testing.assert_allclose(found[2], (found[0] + found[1]) / 2, rtol=1e-5)


def test_a_cache_keeps_the_scores_that_were_used_last():
    def key(number):
        return ScoreKey("version", "template", bytes([number]) * 16)

    cache, smaller = ScoreCache(2), ScoreCache(1)
    cache.put(key(0), 0.5)
    cache.put(key(1), 1.5)
    assert (cache.get(key(0)), cache.get(key(2))) == (0.5, None)
    cache.put(key(2), 2.5)  # and 1 is gone
    cache.put(key(0), 0.1)
    cache.put(key(3), 3.5)  # and 2 is gone
    assert [cache.get(key(number)) for number in range(4)] == [0.1, None, None, 3.5]
    assert (cache.hits, cache.misses, cache.evictions) == (3, 3, 2)
    digests, scores = cache.entries()
    assert (digests[:, 0].tolist(), digests.shape, scores.tolist()) == ([0, 3], (2, 16), [0.1, 3.5])
    smaller.restore("version", "template", digests, scores)
    assert (smaller.get(key(0)), smaller.get(key(3)), len(smaller)) == (None, 3.5, 1)


def test_a_cache_travels_to_a_scorer_of_the_same_verifier_only(executor):
    model = verifier("implicit")
    scorer, other = make_scorer(model, executor), make_scorer(model, executor)
    rollouts = [rollout(text) for text in random_texts(5, seed=7)]
    scores = asyncio.run(scorer.score(rollouts))
    other.load_cache_state(scorer.cache_state())
    assert asyncio.run(other.score(rollouts)).tobytes() == scores.tobytes()
    assert (other.stats.hits, other.stats.misses) == (5, 0)
    other.set_version("the same weights")
    model._reference_model.close()  # its references have travelled too
    assert asyncio.run(other.score(rollouts)).tobytes() == scores.tobytes()
    perturb(model)
    with pytest.raises(StateError, match="another verifier"):
        make_scorer(model, executor).load_cache_state(scorer.cache_state())


@pytest.mark.parametrize("head", HEADS)
def test_a_frozen_verifier_has_linear_layers_in_the_precision_of_passes_and_the_same_scores(head):
    def scores(model):
        scorer = make_scorer(model, AT_ONCE, head=head, precision="bfloat16")
        return asyncio.run(scorer.score([rollout(text) for text in random_texts(12, 0)]))

    def linear(module):
        return {part.weight.dtype for layer in module.model.layers for part in layer.modules() if hasattr(part, "bias")}

    models = [verifier(head), verifier(head)]
    plain, frozen = models
    frozen.round_reference("bfloat16")
    frozen.freeze("bfloat16")
    frozen.load_trainable_state(plain.trainable_state())
    assert frozen.version() == plain.version()
    assert linear(plain.backbone) == {torch.float32}
    assert linear(frozen.backbone) == {torch.bfloat16}
    if head == "implicit":
        assert linear(frozen.start) == {torch.bfloat16}
        assert frozen.start.get_output_embeddings().weight.dtype == torch.bfloat16
    np.testing.assert_array_equal(*map(scores, models))
