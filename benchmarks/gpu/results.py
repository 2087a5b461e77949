"""Results of the parts of `make gpu`: checks that pass or fail, and figures; as JSON files and as one page."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pvg.reporting.table import markdown_lines
from pvg.telemetry.device import peak_memory, processor
from pvg.version import code_version

SCHEMA_VERSION = 1


@dataclass(slots=True)
class Results:
    """Of one part. `checks`: a value and the limit that it must not exceed. `notes`: what was left out, and why."""

    part: str
    checks: list[dict[str, Any]] = field(default_factory=list)
    figures: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _began: float = field(default_factory=time.perf_counter)

    def check(self, name: str, value: float, limit: float) -> None:
        passed = value <= limit  # false for nan
        self.checks.append({"name": name, "value": value, "limit": limit, "passed": passed})
        print(f"{'ok  ' if passed else 'FAIL'} {name}: {value:.3g} (at most {limit:g})", flush=True)

    def figure(self, name: str, value: float, unit: str, planned: float | None = None, goal: str = "") -> None:
        """`planned`: what pvg predicts, in the same unit. A part does not fail if a `goal` is missed."""
        foreseen = "" if planned is None else f"{planned:.4g}"
        self.figures.append({"name": name, "value": value, "unit": unit, "planned": foreseen, "goal": goal})
        beside = (f", planned {foreseen}" if foreseen else "") + (f", goal {goal}" if goal else "")
        print(f"     {name}: {value:.4g} {unit}{beside}", flush=True)

    def peak(self, name: str, device: torch.device, planned: float | None = None, goal: str = "") -> float:
        """The most bytes of tensors on a GPU since `torch.cuda.reset_peak_memory_stats`; on a CPU, the peak of the
        whole process."""
        found = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_memory()["rss_bytes"]
        self.figure(f"{name}: peak memory", found / 1e9, "GB", planned, goal)
        return found / 1e9

    def note(self, text: str) -> None:
        self.notes.append(text)
        print(f"     {text}", flush=True)

    def write(self, path: Path, device: torch.device) -> int:
        """Write the file. Returns the exit code: 1 if a check failed."""
        passed = all(check["passed"] for check in self.checks)
        document = {
            "schema_version": SCHEMA_VERSION,
            "part": self.part,
            "machine": machine_facts(device),
            "pvg": code_version(),
            "seconds": round(time.perf_counter() - self._began, 1),
            "passed": passed,
            "checks": self.checks,
            "figures": self.figures,
            "notes": self.notes,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        return 0 if passed else 1


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
        checks = [
            (check["name"], f"{check['value']:.3g}", f"{check['limit']:g}", "ok" if check["passed"] else "**failed**")
            for check in document["checks"]
        ]
        figures = [
            (found["name"], f"{found['value']:.4g}", found["unit"], found["planned"], found["goal"])
            for found in document["figures"]
        ]
        if checks:
            yield from (*markdown_lines(("check", "found", "at most", ""), "lrrl", checks), "")
        if figures:
            yield from (*markdown_lines(("figure", "", "", "planned", "goal"), "lrlrl", figures), "")
        for note in document["notes"]:
            yield f"{note}\n"
