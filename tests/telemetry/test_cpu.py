"""bfloat16 on the CPU: what the kernel's flags say, and the settings that a machine computes slowly."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pvg.config.experiment import Experiment
from pvg.installation import native_bfloat16, usable_gpus
from pvg.telemetry.cpu import precision_warnings


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


def test_a_run_keeps_the_precision_that_was_native_where_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = {}
    for here in (True, False, None):
        monkeypatch.setattr("pvg.config.training.native_bfloat16", lambda here=here: here)
        begun[here] = Experiment(models={"precision": "native", "device": "cpu"})
    monkeypatch.setattr("pvg.config.training.native_bfloat16", lambda: True)
    pretrained = {"prover": {"source": "a"}, "verifier": {"source": "a"}}
    again = {here: Experiment(models=each.models.model_dump() | pretrained) for here, each in begun.items()}
    assert [again[here].models.compute_dtype for here in begun] == ["bfloat16", "float32", "float32"]


def test_settings_that_this_cpu_computes_slowly_are_named_with_the_command(tmp_path: Path) -> None:
    root = machine(tmp_path, "flags\t\t: avx2")
    assert precision_warnings(Experiment(), root) == []
    (warning,) = precision_warnings(Experiment(**WHOLE), root)
    assert warning.startswith("models.dtype, models.precision = 'bfloat16'")
    assert warning.endswith("use -s models.dtype=float32 -s models.precision=float32")


@pytest.mark.parametrize(("visible", "count"), [(None, 3), ("0,2", 2), ("1,-1,2", 1), ("", 0), ("0,1,2,3,4", 3)])
def test_gpus_are_counted_without_torch_as_torch_counts_them(
    visible: str | None, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    monkeypatch.setattr("importlib.metadata.distributions", lambda name: [SimpleNamespace(version="2.11.0")])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert usable_gpus(tmp_path) == count


def test_nothing_is_said_about_a_gpu_or_a_cpu_with_instructions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = machine(tmp_path, "flags\t\t: avx2")
    on_gpu = Experiment(models={"precision": "bfloat16", "device": "cuda"})
    on_either = Experiment(**HALF)
    assert precision_warnings(on_gpu, root) == []
    assert precision_warnings(on_either, root) != []
    (root / "dev").mkdir()
    (root / "dev/nvidia0").touch()
    for build, visible, warned in (("2.11.0+cpu", "0", True), ("2.11.0", "", True), ("2.11.0", "0,1", False)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        torches = [SimpleNamespace(version=build)]
        monkeypatch.setattr("importlib.metadata.distributions", lambda name, found=torches: found)
        assert (precision_warnings(on_either, root) != []) == warned
    assert precision_warnings(on_either, root) == []
    (root / "dev/nvidia0").unlink()
    (root / "proc/cpuinfo").write_text("flags\t: avx512_bf16\n")
    assert precision_warnings(on_either, root) == []


# --- the precision of a machine's kind -------------------------------------------------------------------------------

LORA: dict[str, Any] = {"adapters": {"rank": 16}}
HALF: dict[str, Any] = {"models": {"precision": "bfloat16"}}
WHOLE: dict[str, Any] = {"models": {"precision": "bfloat16", "dtype": "bfloat16"}, "training": LORA, "verifier": LORA}


@pytest.mark.parametrize(
    ("models", "dtype", "warnings"),
    [
        ({"device": "cuda"}, "bfloat16", 0),
        ({"device": "cuda", "precision": "float32"}, "float32", 1),
        ({"device": "cpu"}, "float32", 0),
        ({"device": "cuda", "prover": {}, "verifier": {}}, "float32", 0),
    ],
)
def test_models_of_ones_own_compute_in_bfloat16_on_a_gpu(models: dict[str, Any], dtype: str, warnings: int) -> None:
    own = {"prover": {"source": "hf:a/b"}, "verifier": {"source": "hf:a/b"}}
    experiment = Experiment(models={**own, **models})
    assert experiment.models.compute_dtype == experiment.sampling_dtype == dtype
    assert len(precision_warnings(experiment)) == warnings
