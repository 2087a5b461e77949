from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from bench_runs import load_profile, use
from torch.utils.flop_counter import FlopCounterMode

from pvg.bench.workloads import WORKLOADS
from pvg.bench.workloads.trainer import ModelSize, operations_of
from pvg.config.training import ModelSection
from pvg.errors import ConfigurationError
from pvg.models import open_model
from pvg.models.packing import Trie
from pvg.training.batch import PolicyBatch
from pvg.training.forward import ForwardSettings

pytestmark = pytest.mark.slow

FEW = ["workload.rollouts=24", "rollout.group_size=4"]


def metrics_of(workload: Any) -> list[dict[str, float]]:
    return [report.metrics for report in workload._reports]


def forward_passes(workload: Any, count: int) -> float:
    lengths_N = workload._batch.lengths_N.astype(float)
    size, predicted = ModelSize.of(workload._players.base), float(workload._batch.completion_lengths_N.sum())
    return count * size.forward(lengths_N.sum(), predicted, (lengths_N**2).sum())


# --- the sampled batch -----------------------------------------------------------------------------------------------


def test_every_sample_computes_the_same_and_no_weight_moves() -> None:
    seen: list[list[dict[str, float]]] = []

    def look(workload: Any, measured: list[dict[str, float]]) -> None:
        seen.append(metrics_of(workload))
        learner, base = workload._trainer.module, workload._players.base.module
        assert all(torch.equal(a, b) for a, b in zip(learner.parameters(), base.parameters(), strict=True))
        lengths_N = workload._batch.lengths_N  # all in one micro-batch
        assert lengths_N.min() < lengths_N.max()
        assert (workload._batch.advantages_N != 0).all()  # no group without a signal
        assert workload.derived()["padding"] == pytest.approx(1 - lengths_N.mean() / lengths_N.max())
        assert workload.derived()["flops"] == forward_passes(workload, 4)  # with the reference

    for samples in (1, 3):
        use("trainer", [*FEW, "training.shared_prompts=false"], look, samples=samples)
    assert seen[0] == seen[1]
    assert seen[0][0]["grad_norm"] > 0.0
    assert seen[0][0]["learning_rate"] == 0.0


@pytest.mark.drill
def test_ways_of_doing_it_do_the_same_work() -> None:
    ways = [
        [],
        ["training.micro_batch_tokens=256", "rollout.logprobs=recomputed"],
        ["training.micro_batch_tokens=128"],
        ["training.shared_prompts=false", "training.micro_batch_tokens=128"],
    ]

    def look(workload: Any, measured: list[dict[str, float]]) -> Any:
        (metrics,) = metrics_of(workload)
        learned = [metrics[name] for name in ("loss", "grad_norm", "entropy", "kl")]
        return workload.work(), workload.derived()["tokens"], learned

    (work, tokens, learned), *others = [use("trainer", FEW + way, look) for way in ways]
    for other in others:
        assert other[:2] == (work, tokens)
        assert other[2] == pytest.approx(learned, rel=1e-3, abs=1e-5)


def test_the_measures_agree_with_each_other() -> None:
    def look(workload: Any, measured: list[dict[str, float]]) -> None:
        work, derived = workload.work(), workload.derived()
        assert work["optimizer_steps"] == 2
        for values in measured:
            seconds = values["step_s"] * 2
            assert values["tokens_per_s"] * seconds == pytest.approx(derived["tokens"])
            assert values["rollouts_per_s"] * seconds == pytest.approx(24)
        mean = derived["tokens"] / 24
        assert work["mean_prompt_tokens"] + work["mean_completion_tokens"] == pytest.approx(mean, abs=0.11)
        assert derived["mfu"] == pytest.approx(derived["gflops"] / derived["matmul_gflops"])
        assert 0 < derived["hardware_mfu"] < derived["mfu"]  # a row's last token is not computed
        assert derived["padding"] == 0.0
        assert derived["tokens"] == workload._batch.lengths_N.sum()
        assert (work["kl"], derived["flops"]) == (0.0, forward_passes(workload, 3))

    # One rollout per micro-batch: nothing to pad.
    one_by_one = ["training.minibatches=2", "training.micro_batch_tokens=49", "training.kl.coefficient=0"]
    use("trainer", [*FEW, *one_by_one], look, samples=2)


def test_steps_of_one_batch_in_bfloat16_are_weighted_by_the_policy_at_its_start() -> None:
    def look(workload: Any, measured: list[dict[str, float]]) -> None:
        assert [metrics["start_outside"] for metrics in metrics_of(workload)] == [0.0, 0.0]

    use("trainer", [*FEW, "training.minibatches=2", "models.precision=bfloat16"], look)


@pytest.mark.parametrize("shape", ["turns", "forks"])
def test_episodes_have_the_same_lengths_where_they_have_less_in_common(shape: str) -> None:
    def look(workload: Any, measured: list[dict[str, float]]) -> Any:
        (metrics,) = metrics_of(workload)
        assert metrics["grad_norm"] > 0.0
        batch = workload._batch
        return batch.lengths_N.tolist(), batch.prompt_lengths.tolist(), packed_tokens(batch)

    def packed_tokens(batch: Any) -> int:
        return int(Trie.of(batch.sequences, batch.prompt_lengths).lengths_S.sum())

    alike, apart = (
        use("trainer", [f"workload.shape={shape}", f"workload.alike={value}"], look) for value in ("true", "false")
    )
    assert alike[:2] == apart[:2]
    assert alike[2] * 1.5 < apart[2]


def test_more_minibatches_than_rollouts_are_refused_before_anything_opens() -> None:
    settings = load_profile("trainer", ["workload.rollouts=8", "training.minibatches=16"])
    with pytest.raises(ConfigurationError, match="minibatches"):
        WORKLOADS["trainer"](settings)


# --- floating-point operations ---------------------------------------------------------------------------------------


def test_flops_agree_with_torchs_counter() -> None:
    rows, length = 3, 40
    with open_model(ModelSection(), torch.device("cpu")) as model:
        # The plain implementation of attention, whose matrix products the counter sees.
        model.module.config._attn_implementation = "eager"
        ids_BL = torch.arange(rows * length).reshape(rows, length) % 10 + 4
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model.module(input_ids=ids_BL, use_cache=False)
        # The tied embedding is a matrix product once, as the head; norms are parameters without one.
        size, work = ModelSize.of(model), (rows * length, rows * length**2)
        counted = size.forward(work[0], work[0], work[1])
        assert counted == pytest.approx(counter.get_total_flops(), rel=0.01)
        head = model.module.get_output_embeddings().weight.numel()
        assert counted - size.forward(work[0], 0, work[1]) == 2.0 * head * rows * length


def test_operations_are_counted_as_useful_and_as_computed() -> None:
    # Two rows with a prompt of 40 tokens, and completions of 3 and 5 tokens that begin differently.
    prompt, completions = np.arange(40), ([50, 51, 52], [60, 61, 62, 63, 64])
    batch = PolicyBatch(
        sequences=[np.append(prompt, ids).astype(np.int32) for ids in completions],
        prompt_lengths=np.array([40, 40], dtype=np.int32),
        sampled_logprobs=[np.zeros(len(ids), dtype=np.float32) for ids in completions],
        reference_logprobs=None,
        advantages_N=np.ones(2, dtype=np.float32),
        role_ids_N=np.zeros(2, dtype=np.int8),
        group_ids_N=np.zeros(2, dtype=np.int32),
        versions_N=np.zeros(2, dtype=np.int32),
    )
    size, together = ModelSize(body=10, head=7, attention=2, chunk=100), ForwardSettings(1.0, 100, 0)
    # By row: 88 tokens, 8 predictions, 43^2 + 45^2 pairs of tokens.
    body, head, attention = 2 * 10 * 88, 2 * 7 * 8, 4 * 2 * (43**2 + 45**2)
    assert operations_of(size, batch, together).useful == 3 * (body + head + attention)
    assert operations_of(size, batch, together, frozen=True).useful == 2 * (body + head) + 3 * attention
    # Computed: the prompt, and all completion tokens but the last ones, each of which attends to the prompt too.
    once = 2 * 10 * (40 + 2 + 4), head, 4 * 2 * (40 * 40 + 2 * 42 + 4 * 44)
    found = operations_of(size, batch, together, frozen=True, checkpointed=True, scored=True)
    assert found.hardware == (2 + 1 + 1) * once[0] + (2 + 1) * once[1] + (3 + 1 + 1) * once[2]
    # In two passes, each row computes the prompt, and padding computes it to the longest.
    assert operations_of(size, batch, ForwardSettings(1.0, 45, 0)).hardware == 3 * (
        2 * 10 * (42 + 44) + head + 4 * 2 * (40 * 40 + 2 * 42 + 40 * 40 + 4 * 44)
    )
    padded = ForwardSettings(1.0, 100, 0, shared_prompts=False)
    assert operations_of(size, batch, padded).hardware == 3 * (2 * 10 * 90 + head + 4 * 2 * 2 * 45**2)


# --- adapters --------------------------------------------------------------------------------------------------------


def test_adapters_alone_are_trained_where_the_experiment_says_so() -> None:
    pytest.importorskip("peft", reason="`make install`")

    def look(workload: Any, measured: list[dict[str, float]]) -> None:
        trained = [n for n, weight in workload._trainer.module.named_parameters() if weight.requires_grad]
        assert trained
        assert all("lora_" in name for name in trained)
        assert workload.work()["lora_rank"] == 2
        (metrics,) = metrics_of(workload)
        assert metrics["grad_norm"] > 0.0
        assert metrics["kl"] == pytest.approx(0.0, abs=1e-9)  # untrained adapters change nothing

    use("trainer", [*FEW, "training.adapters.rank=2"], look)
