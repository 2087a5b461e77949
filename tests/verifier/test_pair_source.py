import asyncio
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_verifiers import digits_tokenizer, language_model, perturb, rollout

from pvg.config.training import Verifier
from pvg.models.heads import build_verifier
from pvg.models.packing import pad_right
from pvg.store.pairs import PairStream, PairView
from pvg.store.shards import RolloutShards
from pvg.training.trainer import OptimizerSettings, Trainer
from pvg.verifier import data
from pvg.verifier.calibration import auc
from pvg.verifier.data import PairSource, VerifierTemplate
from pvg.verifier.losses import PairObjective
from pvg.verifier.scorer import VerifierScorer

pytestmark = pytest.mark.slow

SECTION = Verifier(pairs=16, micro_batch_tokens=2048, score_penalty=0.005)


def easily_told_apart(correct: bool, seed: int, count: int, *, problem: int):
    """Solutions of one problem: eight digits of 0-5 are correct, of 4-9 are not."""
    rng = np.random.default_rng((seed, problem, correct))
    for number in range(count):
        text = "".join(map(str, rng.integers(0, 6, 8) + (0 if correct else 4)))
        yield rollout(text, question=f"{problem}?", correct=correct, number=number)


def toy_rollouts(seed: int, problems: int):
    return [
        one
        for problem in range(problems)
        for correct in (True, False)
        for one in easily_told_apart(correct, seed, 3, problem=problem)
    ]


def open_stream(directory, rollouts):
    shards = RolloutShards(directory)
    half = len(rollouts) // 2
    infos = [shards.write(0, "part-0", rollouts[:half]), shards.write(0, "part-1", rollouts[half:])]
    return PairStream(PairView(shards, infos), {"base": 1.0}, seed=3)


def open_verifier(head="implicit", **options):
    return build_verifier(Verifier(head=head, **options), language_model(digits_tokenizer(), seed=2, spread=0.05))


def open_source(stream, model, executor, section=SECTION, **options):
    template = VerifierTemplate(model.tokenizer, "tag", section.head.kind)
    options = {"source_fingerprint": model.tokenizer.fingerprint, **options}
    return PairSource(stream, template, model, section, executor=executor, **options)


def test_batches_hold_the_drawn_pairs_with_labels_by_correctness(tmp_path, executor):
    rollouts = toy_rollouts(0, 20)
    label = {one.question + one.text: one.grade.correct for one in rollouts}
    model = open_verifier()
    stored = [replace(one, text="0") for one in rollouts]  # the sampled tokens are used, not the text
    source = open_source(open_stream(tmp_path, stored), model, executor)
    batch = asyncio.run(source.next_batch())
    assert len(batch) == 16
    assert len(np.unique(batch.pairs_M2)) == len(batch.sequences)
    texts = [model.tokenizer.decode(sequence) for sequence in batch.sequences]
    for correct, incorrect in batch.pairs_M2:
        assert label[texts[correct]]
        assert not label[texts[incorrect]]
        assert texts[correct].split("?")[0] == texts[incorrect].split("?")[0]
    for sequence, start in zip(batch.sequences, batch.prompt_lengths_N, strict=True):
        assert model.tokenizer.decode(sequence[:start]).endswith("?")
        assert sequence[-1] == model.tokenizer.eos_id
    of_another = open_source(source._stream, model, executor, source_fingerprint="another")
    encoded = asyncio.run(of_another.next_batch()).sequences
    assert all(model.tokenizer.decode(sequence).endswith("?0") for sequence in encoded)


def test_references_are_the_models_own_and_computed_once_per_solution(tmp_path, executor):
    model = open_verifier()
    few = SECTION.model_copy(update={"pairs": 3})
    source = open_source(open_stream(tmp_path, toy_rollouts(0, 3)), model, executor, few)
    for _ in range(32):  # 96 pairs of 18 solutions: all of them are drawn
        asyncio.run(source.next_batch())
    asked = []
    original = model.reference
    model.reference = lambda *inputs: asked.append(inputs) or original(*inputs)
    perturb(model)  # training moves the trained copy, not the reference
    batch = asyncio.run(source.next_batch())
    assert not asked
    ids_BL, lengths_B = pad_right(batch.sequences, 0)
    expected_N = original(ids_BL, lengths_B, torch.from_numpy(batch.prompt_lengths_N).long())
    np.testing.assert_allclose(batch.references_N, expected_N.numpy(), atol=1e-4)
    assert source._references_R.size <= 2 * 18


def test_the_next_batch_is_made_ahead_up_to_the_last_step_and_is_the_same(tmp_path, executor):
    model, stream, drawn = open_verifier(), open_stream(tmp_path, toy_rollouts(0, 20)), []
    draw = stream.draw
    stream.draw = lambda step, n: drawn.append(step) or draw(step, n)

    async def batches(**options):
        source = open_source(stream, model, executor, **options)
        for _ in range(3):
            batch = await source.next_batch()
            await source.close()
            yield batch

    async def compare():
        ahead, plain = batches(ahead=3), batches()
        for so_far in ([0, 1], [0, 1, 2], [0, 1, 2]):
            one = await anext(ahead)
            assert drawn == so_far
            other = await anext(plain)
            del drawn[-1]
            np.testing.assert_array_equal(one.references_N, other.references_N)
            np.testing.assert_array_equal(one.pairs_M2, other.pairs_M2)
            np.testing.assert_array_equal(np.concatenate(one.sequences), np.concatenate(other.sequences))

    asyncio.run(compare())


def test_a_batch_whose_caller_was_cancelled_is_awaited_or_used(tmp_path, executor):
    """It reads the model, which may be closed or trained after `close`."""
    model, stream, drawn = open_verifier(), open_stream(tmp_path, toy_rollouts(0, 20)), []
    draw, begun, may_end = stream.draw, threading.Event(), threading.Event()

    def slow(step, n):
        begun.set()
        assert may_end.wait(30)
        drawn.append(step)
        return draw(step, n)

    async def run():
        source = open_source(stream, model, executor)
        call = asyncio.create_task(source.next_batch())
        await asyncio.to_thread(begun.wait, 30)
        call.cancel()
        await asyncio.wait([call])
        closing = asyncio.create_task(source.close())
        await asyncio.wait([closing], timeout=0.1)
        assert not closing.done()
        may_end.set()
        await closing
        assert drawn == [0]
        await source.next_batch()
        await source.next_batch()
        assert drawn == [0, 1]

    stream.draw = slow
    asyncio.run(run())


BY_PROBLEM = SECTION.model_copy(update={"pairing": "problem"})


def test_by_problem_a_batch_holds_all_pairs_of_its_problems(tmp_path, executor, monkeypatch):
    """Three solutions of each kind, of which two are taken: four pairs a problem, four problems for 16 pairs."""
    monkeypatch.setattr(data, "SOLUTIONS_PER_PROBLEM", 4)
    rollouts = toy_rollouts(0, 20)
    label = {one.question + one.text: one.grade.correct for one in rollouts}
    model = open_verifier()
    source = open_source(open_stream(tmp_path, rollouts), model, executor, BY_PROBLEM)
    batch = asyncio.run(source.next_batch())
    assert (len(batch), len(batch.sequences)) == (16, 16)
    texts = [model.tokenizer.decode(sequence) for sequence in batch.sequences]
    seen = set()
    for correct, incorrect in batch.pairs_M2:
        assert (label[texts[correct]], label[texts[incorrect]]) == (True, False)
        assert texts[correct].split("?")[0] == texts[incorrect].split("?")[0]
        seen.add((texts[correct], texts[incorrect]))
    assert len(seen) == 16
    assert np.unique(batch.pairs_M2, return_counts=True)[1].tolist() == [2] * 16
    assert batch.references_N is not None
    assert batch.shares_M.tolist() == [0.25] * 16
    resumed = open_source(source._stream, model, executor, BY_PROBLEM, start_step=1)
    one, two = asyncio.run(source.next_batch()), asyncio.run(resumed.next_batch())
    np.testing.assert_array_equal(one.pairs_M2, two.pairs_M2)
    assert one.references_N.tobytes() == two.references_N.tobytes()
    assert [row.tolist() for row in one.sequences] == [row.tolist() for row in two.sequences]


@pytest.mark.parametrize(
    ("precision", "pairing", "budget"),
    [("float32", "random", 2048), ("bfloat16", "random", 2048), ("float32", "problem", 40)],
)
def test_the_implicit_verifier_learns_what_can_be_told_apart(tmp_path, executor, precision, pairing, budget):
    """40 tokens are less than a problem's solutions, so pairs are cut."""
    section = SECTION.model_copy(update={"pairing": pairing, "steps": 60, "micro_batch_tokens": budget})
    model = open_verifier()
    source = open_source(open_stream(tmp_path, toy_rollouts(0, 60)), model, executor, section, precision=precision)
    settings = OptimizerSettings(learning_rate=3e-3, total_steps=section.steps, warmup=5)
    trainer = Trainer(
        model, PairObjective(section, model.tokenizer.pad_id), settings, source, executor=executor, precision=precision
    )
    start = model.version()
    held_out = toy_rollouts(1, 40)
    correct_N = np.array([one.grade.correct for one in held_out])

    def scores_now():
        scorer = VerifierScorer(
            model,
            VerifierTemplate(model.tokenizer, "tag", section.head.kind),
            model.version(),
            cache_entries=1000,
            token_budget=4096,
            executor=executor,
            prover_fingerprint=model.tokenizer.fingerprint,
        )
        return asyncio.run(scorer.score(held_out))

    async def train():
        return [await trainer.step() for _ in range(section.steps)]

    assert np.abs(scores_now()).max() < 1e-3  # untrained: all scores are 0
    reports = asyncio.run(train())
    assert reports[0].metrics["loss"] == pytest.approx(np.log(2.0), abs=0.02)
    assert reports[-1].metrics["pair_accuracy"] > 0.9
    assert model.version() != start
    scores_N = scores_now()
    assert auc(scores_N[correct_N], scores_N[~correct_N]) > 0.9
