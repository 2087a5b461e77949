"""What both workers of TRL share: training arguments, and facts for the report."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any

import torch

MANY = 1_000_000  # optimizer steps: the driver of the comparison ends the training
NOT_REPORTED = ("output_dir", "max_steps")
PACKAGES = ("trl", "transformers", "torch", "accelerate", "datasets")


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


def facts(parameters: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Facts for the report. `settings`: TRL's arguments; those that name this machine's folders are left out."""
    return {
        "parameters": parameters,
        "settings": {key: value for key, value in settings.items() if key not in NOT_REPORTED},
        "threads": torch.get_num_threads(),
        "versions": {"python": python_version()} | {name: version(name) for name in PACKAGES},
    }
