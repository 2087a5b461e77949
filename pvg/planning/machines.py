"""GPUs by their data sheets, and what the planner assumes about how well they are used."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MachineSpeed:
    """`flops`: dense bfloat16 operations per second. `bytes_per_s`: memory bandwidth. `memory_gb`: 10^9 bytes; 0: not a
    GPU. `source`: where the figures come from."""

    flops: float
    bytes_per_s: float
    memory_gb: float
    source: str


# The dense bfloat16 rate, the memory bandwidth and the memory of NVIDIA's data sheets (SXM where there are several).
MACHINES: dict[str, MachineSpeed] = {
    "h100": MachineSpeed(989e12, 3.35e12, 80.0, "data sheet"),
    "h200": MachineSpeed(989e12, 4.8e12, 141.0, "data sheet"),
    "a100": MachineSpeed(312e12, 2.04e12, 80.0, "data sheet"),
    "h20": MachineSpeed(148e12, 4.0e12, 96.0, "data sheet"),
    "l40s": MachineSpeed(362e12, 0.864e12, 48.0, "data sheet"),
    # Two cores: 195 GFLOP/s of float32 matrix products, measured; the bandwidth is that of one memory channel.
    "cpu": MachineSpeed(195e9, 20e9, 0.0, "two cores"),
}

# Share of the bandwidth that a decoding step reaches. Assumed.
DECODING_SHARE = 0.5
# Share of the arithmetic rate that training reaches. Llama 3 reports 0.38 to 0.43 for pretraining (arXiv 2407.21783);
# batches of short rows reach less. Assumed.
TRAINING_SHARE = 0.3
# Bytes per second of a weight update through a shared folder, written and read once. Assumed.
UPDATE_BYTES_PER_S = 1e9
# Hours between two interruptions of one GPU: Llama 3 had 419 in 54 days on 16,384 GPUs (arXiv 2407.21783).
GPU_HOURS_BETWEEN_FAILURES = 54 * 24 * 16384 / 419
