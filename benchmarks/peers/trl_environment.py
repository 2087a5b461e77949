"""What both workers of TRL share: the training arguments that cost nothing, and what they tell of their environment."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any

import torch

MANY = 1_000_000  # optimizer steps: whoever asks for samples ends it
OF_NO_INTEREST = ("output_dir", "max_steps")
PACKAGES = ("trl", "transformers", "torch", "accelerate", "datasets")


def arguments(folder: Path) -> dict[str, Any]:
    """Everything that a training step need not do is off, and what the defaults would do in bfloat16 or twice is not
    done: float32 as on our side, no recomputed activations."""
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


def worker_description(parameters: int, settings: dict[str, Any]) -> dict[str, Any]:
    """For the report; `settings`: the arguments that were given, less what is of this machine."""
    return {
        "parameters": parameters,
        "settings": {key: value for key, value in settings.items() if key not in OF_NO_INTEREST},
        "threads": torch.get_num_threads(),
        "versions": {"python": python_version()} | {name: version(name) for name in PACKAGES},
    }
