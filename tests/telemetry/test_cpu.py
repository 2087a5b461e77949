"""bfloat16 on the CPU: what the kernel's flags say, and the settings that a machine computes slowly."""

from __future__ import annotations

from pathlib import Path

import pytest

from pvg.config.experiment import Experiment
from pvg.telemetry.cpu import bfloat16_warnings, native_bfloat16


def machine(root: Path, *lines: str) -> Path:
    (root / "proc").mkdir()
    (root / "proc/cpuinfo").write_text("".join(f"processor\t: {n}\n{line}\n\n" for n, line in enumerate(lines)))
    return root


@pytest.mark.parametrize(
    ("lines", "native"),
    [
        (("flags\t\t: fpu avx2 avx512f avx512_bf16",), True),
        (("flags\t\t: fpu amx_bf16 amx_tile", "flags\t\t: fpu amx_bf16 amx_tile"), True),
        (("flags\t\t: fpu avx2 avx512f avx512bw",), False),
        (("flags\t\t: fpu avx2 my_avx512_bf16x",), False),
        (("Features\t: fp asimd bf16 i8mm",), True),
        (("Features\t: fp asimd bf16", "Features\t: fp asimd"), False),
        (("model name\t: a processor",), None),
    ],
)
def test_the_flags_of_all_cores_decide(tmp_path: Path, lines: tuple[str, ...], native: bool | None) -> None:
    assert native_bfloat16(machine(tmp_path, *lines)) is native


def test_another_system_does_not_tell(tmp_path: Path) -> None:
    assert native_bfloat16(tmp_path) is None
    assert bfloat16_warnings(Experiment(training={"precision": "bfloat16"}), tmp_path) == []


def test_settings_that_this_cpu_computes_slowly_are_named_with_the_command(tmp_path: Path) -> None:
    root = machine(tmp_path, "flags\t\t: avx2")
    assert bfloat16_warnings(Experiment(), root) == []
    settings = {"training": {"precision": "bfloat16"}, "models": {"verifier": {"dtype": "bfloat16"}}}
    adapters = {"adapters": {"kind": "lora"}}
    (warning,) = bfloat16_warnings(Experiment(**settings, verifier=adapters), root)
    assert warning.startswith("models.verifier.dtype, training.precision = 'bfloat16'")
    assert warning.endswith("use -s models.verifier.dtype=float32 -s training.precision=float32")


def test_nothing_is_said_about_a_gpu_or_a_cpu_with_instructions(tmp_path: Path) -> None:
    root = machine(tmp_path, "flags\t\t: avx2")
    on_gpu = Experiment(training={"precision": "bfloat16"}, models={"device": "cuda"})
    on_either = Experiment(training={"precision": "bfloat16"})
    assert bfloat16_warnings(on_gpu, root) == []
    assert bfloat16_warnings(on_either, root) != []
    (root / "dev").mkdir()
    (root / "dev/nvidia0").touch()
    assert bfloat16_warnings(on_either, root) == []
    (root / "dev/nvidia0").unlink()
    (root / "proc/cpuinfo").write_text("flags\t: avx512_bf16\n")
    assert bfloat16_warnings(on_either, root) == []
