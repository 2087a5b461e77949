"""Settings of the precision that make this machine slow. A CPU without instructions for bfloat16 converts every number,
and a step takes 10 to 100 times as long as in float32."""

from __future__ import annotations

from pathlib import Path

from pvg.config.experiment import Experiment
from pvg.config.sections import value_of
from pvg.installation import native_bfloat16, usable_gpus

SYSTEM = Path("/")


def precision_warnings(experiment: Experiment, root: Path = SYSTEM, *, resumed: bool = False) -> list[str]:
    """One sentence if settings of the experiment make this machine slow; empty otherwise. `resumed`: the settings are
    those of a run, so they cannot be changed."""
    models = experiment.models
    if models.precision == "float32" and models.on_gpu and not models.embedded and not resumed:
        return [
            "models.precision = 'float32': on a GPU, bfloat16 is several times as fast and halves the memory of "
            "activations; leave the setting out"
        ]
    on_cpu = models.device == "cpu" or (models.device == "auto" and not usable_gpus(root))
    slow = [key for key in ("models.dtype", "models.precision") if value_of(experiment, key) == "bfloat16"]
    if not slow or not on_cpu or native_bfloat16(root) is not False:
        return []
    instead = " ".join(f"-s {key}=float32" for key in slow)
    remedy = "a new run on this machine can use float32" if resumed else f"use {instead}"
    return [
        f"{', '.join(slow)} = 'bfloat16': this CPU has no instructions for bfloat16, so steps take 10 to 100 times as "
        f"long as in float32; {remedy}"
    ]
