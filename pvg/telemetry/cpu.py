"""Whether this machine's CPU computes in bfloat16, and which settings of an experiment need that.

A CPU without such instructions converts every number, and a step takes 10 to 100 times as long as in float32.
"""

from __future__ import annotations

import re
from pathlib import Path

from pvg.config.experiment import Experiment
from pvg.telemetry.device import has_nvidia_gpu

# Of the kernel's flags: x86 (matrix tiles, vectors), and Arm.
NATIVE = frozenset({"amx_bf16", "avx512_bf16", "bf16"})


def native_bfloat16(root: Path) -> bool | None:
    """Whether the CPU has instructions for products in bfloat16; None if the system does not tell (not Linux). `root`:
    the root of the file system."""
    try:
        text = (root / "proc/cpuinfo").read_text()
    except OSError:
        return None
    lines = re.findall(r"^(?:flags|Features)\s*:(.*)$", text, flags=re.MULTILINE)
    return all(NATIVE & set(line.split()) for line in lines) if lines else None


def slow_settings(experiment: Experiment, root: Path) -> list[str]:
    """The settings with the value "bfloat16" that make this machine slow, because its CPU computes them and has no
    instructions for that."""
    device = experiment.models.device
    if native_bfloat16(root) is not False or not (device == "cpu" or (device == "auto" and not has_nvidia_gpu(root))):
        return []
    models = experiment.models
    values = {
        "models.prover.dtype": models.prover.dtype,
        "models.verifier.dtype": models.verifier.dtype,
        "rollout.dtype": experiment.rollout.dtype,
        "training.precision": experiment.training.precision,
        "verifier.precision": experiment.verifier.precision,
    }
    return [key for key, value in values.items() if value == "bfloat16"]


def bfloat16_warnings(experiment: Experiment, root: Path = Path("/")) -> list[str]:
    """One sentence if settings of the experiment make this machine slow; empty otherwise."""
    slow = slow_settings(experiment, root)
    if not slow:
        return []
    instead = " ".join(f"-s {key}={'model' if key == 'rollout.dtype' else 'float32'}" for key in slow)
    return [
        f"{', '.join(slow)} = 'bfloat16': this CPU has no instructions for bfloat16, so steps take 10 to 100 times as "
        f"long as in float32; use {instead}"
    ]
