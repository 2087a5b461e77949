"""TRL's side of a GRPO step: GRPOTrainer in its own environment, one optimizer step at a time.

    .venv-peers/bin/python benchmarks/peers/trl_grpo.py FOLDER      # started by sides.py

A step is all of its training loop between the ends of two steps: data loader, generation, rewards, the reference's
log-probs, loss, backward, optimizer.
"""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path
from typing import Any

import torch
from trl_environment import grpo_arguments
from work import Orders, model_folder, peak_gb, read_work, reward

# Before the imports below: what they print must not reach the driver as an answer.
ORDERS = Orders()

from datasets import Dataset  # noqa: E402
from transformers import TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402


class TimedTrainer(GRPOTrainer):
    """Measures the time of the part before the loss."""

    rollout_s = 0.0

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        began = time.perf_counter()
        found = super()._generate_and_score_completions(inputs)
        self.rollout_s = time.perf_counter() - began
        return found


class PauseBetweenSteps(TrainerCallback):
    """Holds the training loop at the end of each step until the driver orders the next one."""

    trainer: TimedTrainer

    def __init__(self) -> None:
        self._began = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        gc.collect()
        gc.freeze()  # as pvg does once its models are open
        return self._wait(control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        step_s = time.perf_counter() - self._began
        trainer = self.trainer
        ORDERS.answer(
            {
                "step_s": step_s,
                "rollout_s": trainer.rollout_s,
                "train_s": step_s - trainer.rollout_s,
                "peak_gb": peak_gb(),
                "completion_tokens": trainer._metrics["train"]["completions/mean_length"][-1],
            }
        )
        return self._wait(control)

    def _wait(self, control: Any) -> Any:
        control.should_training_stop = not ORDERS.wait()
        self._began = time.perf_counter()
        return control


def main(folder: Path) -> None:
    work = read_work(folder)
    torch.set_num_threads(work["threads"])
    opening = {"model_init_kwargs": {"dtype": "float32", "attn_implementation": "sdpa"}}
    pauses = PauseBetweenSteps()
    trainer = TimedTrainer(
        model=str(model_folder(folder)),
        reward_funcs=lambda completions, **_: [reward(text) for text in completions],
        args=GRPOConfig(**opening | grpo_arguments(folder, work)),
        train_dataset=Dataset.from_dict({"prompt": work["prompts"]}),
        callbacks=[pauses],
    )
    pauses.trainer = trainer
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    prompt_ids = trainer.processing_class(work["prompts"][0])["input_ids"]
    counts = {"threads": torch.get_num_threads(), "prompt_tokens": len(prompt_ids)}
    ORDERS.answer({"parameters": parameters} | counts)
    trainer.train()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
