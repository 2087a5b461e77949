"""The metrics endpoint, scraped as Prometheus does it: over a real socket."""

import http.client
import math
import re
import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from test_device_sampler import FakeNvml

from pvg.errors import MissingRequirementError
from pvg.telemetry import prometheus
from pvg.telemetry.catalogue import METRICS, exposed_name
from pvg.telemetry.device import gpus_of
from pvg.telemetry.prometheus import MOST_CONNECTIONS, MetricsEndpoint, _labels
from pvg.telemetry.sinks import MetricPoint

Scraped = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(endpoint: MetricsEndpoint) -> Scraped:
    with urllib.request.urlopen(endpoint.url, timeout=30) as answer:
        text = answer.read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.startswith("pvg_alerts_")
    }


@pytest.fixture(autouse=True)
def prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "POLL_S", 0.005)


@pytest.fixture
def endpoint() -> Iterator[MetricsEndpoint]:
    made = MetricsEndpoint(0)
    yield made
    made.close()


def write(endpoint: MetricsEndpoint, phase: str, metrics: dict[str, float], *, step: int = 1, round_: int = 0) -> None:
    endpoint.write(MetricPoint(1000.0, step, round_, phase, metrics))


def test_a_scrape_shows_the_newest_values_with_their_labels(endpoint: MetricsEndpoint) -> None:
    write(endpoint, "mint", {"mint/helpful_accuracy": 0.5, "budget/decode": 1.5})
    write(endpoint, "train_prover", {"train_prover/helpful_accuracy": 0.75, "train_prover/latency_p50_s": 0.2}, step=7)
    write(endpoint, "train_prover", {"device/rss_bytes": 1e9, "device/gpu1_power_w": 400.0}, step=7, round_=2)
    write(endpoint, "train_prover", {"workers/busy": 0.75, "workers/w1_restarts": 2.0}, step=7, round_=2)
    assert scrape(endpoint) == {
        ("pvg_helpful_accuracy_ratio", (("phase", "mint"),)): 0.5,
        ("pvg_helpful_accuracy_ratio", (("phase", "train_prover"),)): 0.75,
        ("pvg_latency_p50_seconds", (("phase", "train_prover"),)): 0.2,
        ("pvg_budget_seconds", (("part", "decode"), ("phase", "mint"))): 1.5,
        ("pvg_device_rss_bytes", ()): 1e9,
        ("pvg_device_gpu_power_watts", (("gpu", "1"),)): 400.0,
        ("pvg_workers_busy_ratio", ()): 0.75,
        ("pvg_workers_worker_restarts", (("worker", "1"),)): 2.0,
        ("pvg_step", ()): 7.0,
        ("pvg_round", ()): 2.0,
    }


def test_what_the_newest_point_of_its_kind_lacks_is_no_longer_shown(endpoint: MetricsEndpoint) -> None:
    write(endpoint, "mint", {"budget/decode": 1.0, "budget/sync": 0.1})
    write(endpoint, "mint", {"device/cpu": 0.5, "device/gpu0_power_w": 1.0, "device/gpu1_power_w": 2.0})
    write(endpoint, "train_prover", {"budget/pack": 3.0})
    write(endpoint, "mint", {"budget/decode": 2.0})
    write(endpoint, "mint", {"device/gpu0_power_w": 3.0})
    found = {name: value for name, value in scrape(endpoint).items() if name[0] not in ("pvg_step", "pvg_round")}
    assert found == {
        ("pvg_budget_seconds", (("part", "decode"), ("phase", "mint"))): 2.0,
        ("pvg_budget_seconds", (("part", "pack"), ("phase", "train_prover"))): 3.0,
        ("pvg_device_gpu_power_watts", (("gpu", "0"),)): 3.0,
    }
    write(endpoint, "mint", {"device/cpu": 0.25})
    assert scrape(endpoint)["pvg_device_cpu_ratio", ()] == 0.25


def test_a_further_step_on_a_batch_keeps_the_figures_of_the_batch_and_has_its_own_times(
    endpoint: MetricsEndpoint,
) -> None:
    phase, label = "train_prover", ("phase", "train_prover")
    write(endpoint, phase, {"train_prover/rollouts": 16.0, "train_prover/loss": 0.4, "budget/decode": 2.0})
    further = {"train_prover/loss": 0.3, "budget/pack": 0.5}
    endpoint.write(MetricPoint(1000.0, 2, 0, phase, further, whole=False))
    found = scrape(endpoint)
    assert (found["pvg_rollouts", (label,)], found["pvg_loss", (label,)]) == (16.0, 0.3)
    assert {name: value for name, value in found.items() if name[0] == "pvg_budget_seconds"} == {
        ("pvg_budget_seconds", (("part", "pack"), label)): 0.5
    }


def test_rounds_stay_side_by_side_and_missing_values_are_nan(endpoint: MetricsEndpoint) -> None:
    write(endpoint, "checkpoint", {"round/verifier_auc": 0.9})
    write(endpoint, "checkpoint", {"round/verifier_auc": math.nan}, round_=1)
    found = scrape(endpoint)
    assert found["pvg_round_verifier_auc_ratio", (("round", "0"),)] == 0.9
    assert math.isnan(found["pvg_round_verifier_auc_ratio", (("round", "1"),)])


def test_only_requests_to_this_machine_are_answered(endpoint: MetricsEndpoint) -> None:
    hosts = {"127.0.0.1": 200, "localhost:9090": 200, "evil.example": 403, "[::1": 403, "": 403}
    for host, status in hosts.items():
        connection = http.client.HTTPConnection("127.0.0.1", endpoint.port, timeout=30)
        connection.request("GET", "/metrics", headers={"Host": host})
        answer = connection.getresponse()
        assert answer.status == status
        assert (b"pvg_alerts" in answer.read()) == (status == 200)
        connection.close()


def test_silent_clients_take_few_threads_and_only_for_a_moment(
    endpoint: MetricsEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pvg.telemetry.prometheus.CONNECTION_S", 0.5)
    before = threading.active_count()
    with ExitStack() as silent:
        for number in range(60):
            each = silent.enter_context(socket.create_connection(("127.0.0.1", endpoint.port), timeout=30))
            with suppress(OSError):  # refused
                each.sendall(b"GET /met" if number % 2 else b"")
        assert threading.active_count() - before <= 2 * MOST_CONNECTIONS
        found = None
        while found is None:
            with suppress(OSError):  # until the silent ones are gone
                found = scrape(endpoint)


def test_a_port_that_is_taken_is_an_error_with_a_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(MissingRequirementError, match=f"cannot listen on 127.0.0.1:{port}") as raised:
            MetricsEndpoint(port)
    assert "--metrics-port" in raised.value.remedy


def test_closing_frees_the_port() -> None:
    first = MetricsEndpoint(0)
    scrape(first)
    first.close()
    first.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", first.port), timeout=5)
    second = MetricsEndpoint(first.port)
    assert second.port == first.port
    second.close()


def test_every_metric_of_the_catalogue_can_be_shown_at_once(endpoint: MetricsEndpoint) -> None:
    """No two share a name with other labels, and no two share a series."""
    names = [name.replace("{i}", "0") for name in METRICS]
    series = set()
    for name in names:
        place, _, short = name.partition("/")
        phase = place if place in ("init", "mint", "train_verifier", "train_prover", "checkpoint") else "mint"
        write(endpoint, phase, {name: 1.0})
        labels = _labels(place, short, MetricPoint(0.0, 0, 0, phase, {}))
        series.add((exposed_name(name), tuple(sorted(labels.items()))))
    assert len(series) == len(names)


def test_the_dashboard_names_only_what_is_served_of_a_gpu(endpoint: MetricsEndpoint) -> None:
    """That its other metrics are served is checked on a real run, in tests/game/test_run_is_measured.py."""
    gpu = gpus_of(FakeNvml(sm_percents=(50.0, 50.0)))[0]
    gpu.read()  # GPM's shares lie between two reads
    write(endpoint, "mint", {f"device/gpu0_{name}": value for name, value in gpu.read().items()})
    dashboard = Path(__file__).parent.parent.parent / "docs" / "grafana-dashboard.json"
    named = set(re.findall(r"\bpvg_device_gpu_\w+", dashboard.read_text()))
    assert len(named) >= 7
    assert named <= {name for name, _ in scrape(endpoint)}
