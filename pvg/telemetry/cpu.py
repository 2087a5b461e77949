"""Whether this machine's CPU computes in bfloat16, and float32 for the settings that need it where it does not.

    experiment, notice = without_slow_bfloat16(experiment, chosen_keys(overrides))

A CPU without such instructions converts every number, and a step takes 10 to 100 times as long as in float32. A new run
on such a CPU gets float32 where the experiment's file says "bfloat16". A setting that the user has chosen is kept.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path

from pvg.config.experiment import Experiment
from pvg.config.load import changed
from pvg.config.sections import value_of
from pvg.installation import usable_gpus

# Of the kernel's flags: x86 (matrix tiles, vectors), and Arm.
NATIVE = frozenset({"amx_bf16", "avx512_bf16", "bf16"})
SYSTEM = Path("/")


def native_bfloat16(root: Path) -> bool | None:
    """Whether the CPU has instructions for products in bfloat16; None if the system does not tell (not Linux). `root`:
    the root of the file system."""
    try:
        text = (root / "proc/cpuinfo").read_text()
    except OSError:
        return None
    lines = re.findall(r"^(?:flags|Features)\s*:(.*)$", text, flags=re.MULTILINE)
    return all(NATIVE & set(line.split()) for line in lines) if lines else None


def bfloat16_settings(experiment: Experiment) -> list[str]:
    """The settings with which this process computes in bfloat16."""
    return [key for key in ("models.dtype", "models.precision") if value_of(experiment, key) == "bfloat16"]


def slow_settings(experiment: Experiment, root: Path) -> list[str]:
    """The settings with the value "bfloat16" that make this machine slow, because its CPU computes them and has no
    instructions for that."""
    device = experiment.models.device
    on_cpu = device == "cpu" or (device == "auto" and not usable_gpus(root))
    return bfloat16_settings(experiment) if on_cpu and native_bfloat16(root) is False else []


def precision_warnings(experiment: Experiment, root: Path = SYSTEM, *, resumed: bool = False) -> list[str]:
    """One sentence if settings of the experiment make this machine slow; empty otherwise. `resumed`: the settings are
    those of a run, so they cannot be changed."""
    models = experiment.models
    if models.precision == "float32" and models.on_gpu and not models.embedded and not resumed:
        return [
            "models.precision = 'float32': on a GPU, bfloat16 is several times as fast and halves the memory of "
            "activations; leave the setting out"
        ]
    slow = slow_settings(experiment, root)
    if not slow:
        return []
    instead = " ".join(f"-s {key}=float32" for key in slow)
    remedy = "a new run on this machine can use float32" if resumed else f"use {instead}"
    return [
        f"{', '.join(slow)} = 'bfloat16': this CPU has no instructions for bfloat16, so steps take 10 to 100 times as "
        f"long as in float32; {remedy}"
    ]


# --- float32 in place of bfloat16 -------------------------------------------------------------------------------------


def without_slow_bfloat16(
    experiment: Experiment, chosen: Collection[str], root: Path = SYSTEM
) -> tuple[Experiment, str]:
    """The experiment with float32 for its slow settings, except the `chosen` ones, and one line about the change.

    `chosen`: the keys that the user has set. The line is empty if nothing changes: with vLLM servers nothing does,
    because `pvg serve` starts them with the same settings, perhaps on another machine.
    """
    slow = [key for key in slow_settings(experiment, root) if key not in chosen]
    if not slow or "vllm" in (experiment.rollout.engine.kind, experiment.verifier.engine):
        return experiment, ""
    keep = " ".join(f"-s {key}=bfloat16" for key in slow)
    return in_float32(experiment, slow), (
        f"This CPU has no instructions for bfloat16, so pvg uses float32 for {', '.join(slow)}. "
        f"To keep bfloat16, which is 10 to 100 times slower here: {keep}"
    )


def as_the_run_computes(experiment: Experiment, run: Experiment, chosen: Collection[str]) -> tuple[Experiment, str]:
    """The experiment of an existing run, read again from its file: the run's values where the file says bfloat16 and
    the run began in float32. Also one line about the difference, empty without one. The `chosen` settings are not
    changed."""
    other = float32_settings(experiment, run, chosen)
    if not other:
        return experiment, ""
    return in_float32(experiment, other), (
        f"The run began with float32 for {', '.join(other)}, so it goes on with float32, where the experiment says "
        "bfloat16."
    )


def float32_settings(experiment: Experiment, run: Experiment, chosen: Collection[str]) -> list[str]:
    """The settings that have bfloat16 in the experiment's file and float32 in its run, without the `chosen` ones."""
    settings = bfloat16_settings(experiment)
    return [key for key in settings if key not in chosen and value_of(run, key) == "float32"]


def in_float32(experiment: Experiment, keys: Sequence[str]) -> Experiment:
    """The experiment with float32 for these of its `bfloat16_settings`."""
    found = changed(experiment, dict.fromkeys(keys, "float32"))
    assert found is not None, "float32 works with all other settings"
    return found
