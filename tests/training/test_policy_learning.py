"""End to end: a tiny random policy, sampled by hand, learns by grpo to write one token more often."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import transformers
from table_policy import policy_batch

from pvg.config.rollout import Rollouts
from pvg.config.training import Training
from pvg.records import Role
from pvg.training.credit import RoleBaseline, ValueTracker, advantages, baseline_advantages, tracked_advantages
from pvg.training.losses import LOSSES, PolicyObjective
from pvg.training.trainer import OptimizerSettings, Trainer

pytestmark = pytest.mark.slow

VOCABULARY, WANTED, PROMPT, LENGTH = 8, 5, [1, 2], 4


class OnPolicy:
    """Groups of 8 completions of 4 tokens, sampled token by token; the reward is the share of the wanted token."""

    def __init__(self, model, loss, groups=8):
        self.model, self.loss, self.groups, self.rewards = model, loss, groups, []
        self.tracker = ValueTracker(half_life=100.0)
        self.baseline = RoleBaseline()
        self.generator = torch.Generator().manual_seed(0)

    async def next_batch(self):
        return self.sample()

    @torch.no_grad()
    def sample(self):
        rows = self.groups * 8
        ids_BL = torch.tensor(PROMPT).repeat(rows, 1)
        sampled = []
        for _ in range(LENGTH):
            logprobs_BV = self.model(input_ids=ids_BL).logits[:, -1].log_softmax(dim=-1)
            tokens_B1 = torch.multinomial(logprobs_BV.exp(), 1, generator=self.generator)
            sampled.append(logprobs_BV.gather(1, tokens_B1))
            ids_BL = torch.cat([ids_BL, tokens_B1], dim=1)
        rewards_N = (ids_BL[:, len(PROMPT) :] == WANTED).float().mean(dim=1).numpy()
        self.rewards.append(float(rewards_N.mean()))
        groups_N = np.repeat(np.arange(self.groups), 8)
        credit_N = self.credit(rewards_N, groups_N)
        sampled_logprobs = torch.cat(sampled, dim=1).numpy()
        return policy_batch(
            ids_BL.numpy(),
            [len(PROMPT)] * rows,
            credit_N,
            groups=groups_N,
            sampled=sampled_logprobs,
            reference=sampled_logprobs,
        )

    def credit(self, rewards_N, groups_N):
        rows = len(rewards_N)
        if self.loss == "rae":
            baselines_N = self.baseline.observe([Role.HELPFUL] * rows, rewards_N)
            return baseline_advantages(rewards_N, baselines_N, np.ones(rows))
        if self.loss != "spo":
            return advantages(self.loss, rewards_N, groups_N, np.ones(rows))
        versions_N = np.full(rows, len(self.rewards), dtype=np.int32)
        values_N = self.tracker.observe([("the only", Role.HELPFUL)] * rows, rewards_N, versions_N)
        return tracked_advantages(rewards_N, values_N, np.full(rows, LENGTH), np.ones(rows))


@pytest.mark.parametrize("loss", tuple(LOSSES))
def test_the_reward_rises(loss):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    source = OnPolicy(model, loss)
    objective = PolicyObjective(
        Training(loss=loss, kl={"coefficient": 0.0}, shared_prompts=False), Rollouts(max_tokens=LENGTH), pad_id=0
    )

    async def train():
        with ThreadPoolExecutor(1) as executor:
            settings = OptimizerSettings(learning_rate=3e-3)
            trainer = Trainer(model, objective, settings, source, executor=executor)
            return [await trainer.step() for _ in range(25)]

    reports = asyncio.run(train())
    assert source.rewards[0] < 0.25  # near 1/8: nothing was known
    assert np.mean(source.rewards[-3:]) > 0.75
    # The first step is on policy, so the trainer's log-probs are the sampler's.
    assert reports[0].metrics["ratio_max"] == pytest.approx(1.0, abs=1e-4)
