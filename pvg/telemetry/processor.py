"""The processor of this machine: its name with its vector instructions, and its vendor.

    processor()     # "AMD EPYC (AVX2)"

Virtual machines give processors of several generations one name. The vector instructions change the speed and the last
bits of results, so they are a part of the name here.
"""

from __future__ import annotations

import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")  # Linux
VECTORS = {"avx512f": "AVX-512", "avx2": "AVX2"}  # flags of the kernel, the widest first


def processor(cpuinfo: Path = CPUINFO) -> str:
    """The name of the first processor and its widest vector instructions, if Linux tells them; on other systems what
    Python knows, at least the architecture."""
    facts = _facts(cpuinfo)
    name = facts.get("model name") or platform.processor() or platform.machine()
    flags = facts.get("flags", "").split()
    widest = next((vectors for flag, vectors in VECTORS.items() if flag in flags), "")
    return f"{name} ({widest})" if widest else name


def vendor(cpuinfo: Path = CPUINFO) -> str:
    """The vendor of the first processor, such as "AuthenticAMD"; empty if unknown."""
    return _facts(cpuinfo).get("vendor_id", "")


def _facts(cpuinfo: Path) -> dict[str, str]:
    """What Linux tells of the first processor; empty on other systems."""
    try:
        first = cpuinfo.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}
