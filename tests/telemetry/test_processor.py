"""The name of the processor, and its vendor, from files as Linux writes them."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from pvg.telemetry.device import processor


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("fpu sse2 avx avx2 fma", "AMD EPYC (AVX2)"),
        ("fpu sse2 avx avx2 avx512f avx512bw", "AMD EPYC (AVX-512)"),
        ("fpu sse2 avx", "AMD EPYC"),
    ],
)
def test_processors_of_one_name_are_told_apart_by_their_vectors(tmp_path: Path, flags: str, name: str) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    first = f"processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC\nflags\t\t: {flags}\n"
    cpuinfo.write_text(f"{first}\nprocessor\t: 1\nvendor_id\t: Other\nmodel name\t: Other\nflags\t\t: avx512f\n")
    assert processor(cpuinfo) == name


def test_other_systems_name_at_least_the_architecture(tmp_path: Path) -> None:
    known = platform.processor() or platform.machine()
    assert known
    cpuinfo = tmp_path / "cpuinfo"
    assert processor(cpuinfo) == known
    cpuinfo.write_text("processor\t: 0\nBogoMIPS\t: 50\nFeatures\t: fp asimd\n")  # as on ARM
    assert processor(cpuinfo) == known
