"""TRL's side of verifier training: RewardTrainer in its own environment, one epoch over all pairs per sample.

    .venv-peers/bin/python benchmarks/peers/trl_verifier.py FOLDER      # started by sides.py

A sample begins with the pairs as text in memory and a model that is loaded, and ends with the last optimizer step.
"""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path
from typing import Any

import torch
from trl_environment import arguments, facts
from work import Orders, model_folder, pairs_of, read_work

# Before the imports below: what they print must not reach the driver as an answer.
ORDERS = Orders()

from datasets import Dataset, disable_caching, disable_progress_bars  # noqa: E402
from transformers import AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback  # noqa: E402
from trl import RewardConfig, RewardTrainer  # noqa: E402


class Watch(TrainerCallback):
    """When the first batch was there, and when the last step was done."""

    first_batch = last_step = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.first_batch = self.first_batch or time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.last_step = time.perf_counter()


def main(folder: Path) -> None:
    work = read_work(folder)
    torch.set_num_threads(work["threads"])
    disable_caching()  # or the second sample would find the first one's tokens
    disable_progress_bars()
    pairs = [pair for problem in work["problems"] for pair in pairs_of(problem)]
    steps = len(pairs) // work["pairs"]
    tokenizer = AutoTokenizer.from_pretrained(model_folder(folder))
    lengths = [len(tokenizer(pair["prompt"] + pair["chosen"])["input_ids"]) + 1 for pair in pairs]
    parameters = sum(parameter.numel() for parameter in _model(folder).parameters())
    settings = {
        **arguments(folder),
        "max_steps": steps,
        "per_device_train_batch_size": work["pairs"],
        "learning_rate": work["learning_rate"],
        "max_grad_norm": work["gradient_clip"],
        "max_length": None,  # nothing to filter
        **work["trl"],
    }
    ORDERS.answer(facts(parameters, settings) | {"solution_tokens": sum(lengths) / len(lengths)})
    gc.collect()
    gc.freeze()  # as on our side
    while ORDERS.wait():
        model = _model(folder)
        gc.collect()
        began = time.perf_counter()
        watch = Watch()
        trainer = RewardTrainer(
            model=model,
            args=RewardConfig(**settings),
            train_dataset=Dataset.from_list(pairs),
            processing_class=tokenizer,
            callbacks=[watch],
        )
        trainer.train()
        trained = steps * work["pairs"]
        ORDERS.answer(
            {
                "pairs_per_s": trained / (watch.last_step - watch.first_batch),
                "pairs_per_s_in_all": trained / (watch.last_step - began),
                "first_batch_s": watch.first_batch - began,
                "pairs": float(trained),
                "solutions_forwarded": 2.0 * trained,
            }
        )


def _model(folder: Path) -> Any:
    return AutoModelForSequenceClassification.from_pretrained(
        model_folder(folder), num_labels=1, dtype=torch.float32, attn_implementation="sdpa"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
