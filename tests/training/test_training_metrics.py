"""Metrics merge as if gathered in one, and are read from the device once per step."""

import numpy as np
import pytest
import torch
from table_policy import policy_batch, small_llama
from torch._subclasses import FakeTensorMode

from pvg.config.rollout import Rollouts
from pvg.config.training import Training
from pvg.models.logprobs import trust
from pvg.telemetry.metrics import Metrics
from pvg.training.losses import PolicyObjective
from pvg.training.trainer import accumulate


def test_merging_weighs_means_by_their_counts():
    first, second = Metrics(), Metrics()
    first.add_mean("kl", total=6.0, weight=2.0)
    second.add_mean("kl", total=1.0, weight=8.0)
    first.add_sum("loss", 0.25)
    second.add_sum("loss", -1.0)
    first.add_max("ratio_max", -3.0)
    second.add_max("ratio_max", -5.0)
    first.merge(second)
    assert first.result() == {"kl": 0.7, "loss": -0.75, "ratio_max": -3.0}


def test_a_mean_over_nothing_has_no_value():
    metrics = Metrics()
    metrics.add_mean("kl", 0.0, 0.0)
    assert metrics.result() == {}


@pytest.mark.parametrize("loss", ["grpo", "gspo"])
def test_nothing_is_read_from_the_device_before_all_micro_batches_are_computed(loss):
    """Fake tensors have no values, so torch refuses to read them."""
    random = np.random.default_rng(0)
    rows = [random.integers(3, 12, 4 + row) for row in range(6)]
    start = [random.normal(-2.4, 0.3, 2 + row) for row in range(6)]
    batch = policy_batch(rows, [2] * 6, random.normal(0, 1, 6), groups=[0] * 6, sampled=start, reference=start)
    section = Training(loss=loss, kl={"coefficient": 0.1}, importance="truncated", micro_batch_tokens=30)
    objective = PolicyObjective(section, Rollouts(max_tokens=32), pad_id=0)
    parts = objective.split(objective.prepare(batch))
    assert len(parts) > 1
    module, computed = small_llama(12), []
    trust(module)

    def counted(*arguments):
        computed.append(arguments)
        return objective(*arguments)

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for part in module.modules():
            for table, kind in ((part._parameters, torch.nn.Parameter), (part._buffers, torch.detach)):
                table.update({n: kind(mode.from_tensor(t.detach())) for n, t in table.items() if t is not None})
        with pytest.raises(RuntimeError):
            accumulate(module, counted, parts, "float32")
    assert len(computed) == len(parts)
