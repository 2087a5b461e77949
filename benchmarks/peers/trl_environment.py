"""What both workers of TRL share: training arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MANY = 1_000_000  # optimizer steps: the driver of the comparison ends the training


def arguments(folder: Path) -> dict[str, Any]:
    """Training arguments without work that a step does not need: no logging, no saving, no recomputed activations.
    float32 as in pvg, where TRL's default is bfloat16."""
    return {
        "output_dir": str(folder / "trl"),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_dropout": True,
        "max_steps": MANY,
        "lr_scheduler_type": "constant",
        "logging_strategy": "no",
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": 0,
    }


def grpo_arguments(folder: Path, work: dict[str, Any]) -> dict[str, Any]:
    """Those of GRPOConfig, from the sections of pvg's experiment."""
    training, rollout = work["training"], work["rollout"]
    own = {
        "per_device_train_batch_size": training["groups"] * rollout["group_size"],
        "num_generations": rollout["group_size"],
        "max_completion_length": rollout["max_tokens"],
        "temperature": rollout["temperature"],
        "beta": training["kl"]["coefficient"],
        "learning_rate": training["learning_rate"],
        "loss_type": training["loss"]["kind"],
    }
    own |= {"adam_beta2": work["adam_beta2"], "max_grad_norm": work["gradient_clip"], "bf16": work["bfloat16"]}
    return arguments(folder) | own | work["trl"]
