"""docs/grafana-dashboard.json can be imported, and its panels about GPUs name what the endpoint serves of a GPU.

That its other metrics are served is checked on a real run, in tests/game/test_run_is_measured.py.
"""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

from test_device_sampler import FakeNvml

from pvg.telemetry.device import gpus_of
from pvg.telemetry.prometheus import MetricsEndpoint
from pvg.telemetry.sinks import MetricPoint

DASHBOARD = Path(__file__).parent.parent.parent / "docs" / "grafana-dashboard.json"


def test_what_it_names_of_gpus_is_served_of_a_gpu() -> None:
    gpu = gpus_of(FakeNvml(sm_percents=(50.0, 50.0)))[0]
    gpu.read()  # GPM's shares lie between two reads
    endpoint = MetricsEndpoint(0)
    try:
        metrics = {f"device/gpu0_{name}": value for name, value in gpu.read().items()}
        endpoint.write(MetricPoint(1000.0, 1, 0, "mint", metrics))
        with urllib.request.urlopen(endpoint.url, timeout=30) as answer:
            served = set(re.findall(r"^(pvg_\w+)[{ ]", answer.read().decode(), re.MULTILINE))
    finally:
        endpoint.close()
    named = {name for name in re.findall(r"\bpvg_\w+", DASHBOARD.read_text()) if name.startswith("pvg_device_gpu_")}
    assert len(named) >= 7
    assert named <= served
