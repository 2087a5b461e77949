"""What both workers of TRL share: training arguments, the start of several processes, and facts for the report."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
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


def join_processes(processes: int) -> int:
    """Make this process rank 0 of `processes`, and start the other ranks as `accelerate launch --cpu` does: the same
    script, with the variables that accelerate reads. Returns the rank of this process. Ranks other than 0 have no
    standard input, and end with an error if rank 0 ends."""
    if processes == 1 or "RANK" in os.environ:
        return int(os.environ.get("RANK", "0"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {
        "ACCELERATE_USE_CPU": "true",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
    }
    for rank in range(1, processes):
        environment = dict(os.environ) | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, *sys.argv]
        subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0"}
    return 0


def facts(parameters: int, settings: dict[str, Any], processes: int = 1) -> dict[str, Any]:
    """Facts for the report. `settings`: TRL's arguments; those that name this machine's folders are left out."""
    return {
        "parameters": parameters,
        "settings": {key: value for key, value in settings.items() if key not in NOT_REPORTED},
        "threads": torch.get_num_threads() * processes,
        "processes": processes,
        "versions": {"python": python_version()} | {name: version(name) for name in PACKAGES},
    }
