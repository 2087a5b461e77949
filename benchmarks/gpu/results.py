"""Results of the parts of `make gpu`: checks that pass or fail, and figures; as JSON files and as one page."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from pvg.telemetry.device import processor
from pvg.version import code_version

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class GpuCheck:
    """`value` must be at most `limit`."""

    name: str
    value: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.value <= self.limit  # false for nan


@dataclass(frozen=True, slots=True)
class GpuFigure:
    name: str
    value: float
    unit: str


@dataclass(slots=True)
class Results:
    """Of one part. `notes`: what was left out, and why."""

    part: str
    checks: list[GpuCheck] = field(default_factory=list)
    figures: list[GpuFigure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _began: float = field(default_factory=time.perf_counter)

    def check(self, name: str, value: float, limit: float) -> None:
        self.checks.append(GpuCheck(name, value, limit))
        print(f"{'ok  ' if self.checks[-1].passed else 'FAIL'} {name}: {value:.3g} (at most {limit:g})", flush=True)

    def figure(self, name: str, value: float, unit: str) -> None:
        self.figures.append(GpuFigure(name, value, unit))
        print(f"     {name}: {value:.4g} {unit}", flush=True)

    def note(self, text: str) -> None:
        self.notes.append(text)
        print(f"     {text}", flush=True)

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def write(self, path: Path, device: torch.device) -> int:
        """Write the file. Returns the exit code: 1 if a check failed."""
        document = {
            "schema_version": SCHEMA_VERSION,
            "part": self.part,
            "machine": machine_facts(device),
            "pvg": code_version(),
            "seconds": round(time.perf_counter() - self._began, 1),
            "passed": self.passed,
            "checks": [asdict(check) | {"passed": check.passed} for check in self.checks],
            "figures": [asdict(figure) for figure in self.figures],
            "notes": self.notes,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        return 0 if self.passed else 1


def machine_facts(device: torch.device) -> dict[str, Any]:
    facts: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version(), "device": str(device)}
    if device.type != "cuda":
        return facts | {"name": processor(), "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(device)
    return facts | {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gb": round(properties.total_memory / 1e9, 1),
        "processors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
    }


def page_of(documents: Sequence[dict[str, Any]], failures: Sequence[str]) -> str:
    """The results as Markdown. `failures`: parts without results."""
    return "\n".join(_page_lines(documents, failures)) + "\n"


def _page_lines(documents: Sequence[dict[str, Any]], failures: Sequence[str]) -> Iterator[str]:
    yield "# One GPU, measured by `make gpu`"
    for failure in failures:
        yield f"\n**{failure}**"
    for document in documents:
        facts = ", ".join(f"{name} {value}" for name, value in document["machine"].items())
        yield f"\n## {document['part']}\n"
        yield f"{document['seconds']:g} s. {facts}. pvg {document['pvg']}.\n"
        if document["checks"]:
            yield "| check | found | at most | |\n|---|---:|---:|---|"
            for check in document["checks"]:
                verdict = "ok" if check["passed"] else "**failed**"
                yield f"| {check['name']} | {check['value']:.3g} | {check['limit']:g} | {verdict} |"
            yield ""
        if document["figures"]:
            yield "| figure | | |\n|---|---:|---|"
            for figure in document["figures"]:
                yield f"| {figure['name']} | {figure['value']:.4g} | {figure['unit']} |"
            yield ""
        for note in document["notes"]:
            yield f"{note}\n"
