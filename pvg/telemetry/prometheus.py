"""Serves the newest value of every metric over HTTP for Prometheus: `curl http://127.0.0.1:PORT/metrics`.

Invariants: it listens on the loopback interface alone, and answers only requests whose Host header names this machine.
It shows only values of the newest point of each kind, so values that no longer exist disappear. `close` frees the port.
"""

from __future__ import annotations

import contextlib
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_args
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, Counter, Gauge, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from pvg.errors import MissingRequirementError
from pvg.inputs import LOOPBACK, names_this_machine
from pvg.telemetry.alerts import AlertKind
from pvg.telemetry.catalogue import PLACES_IN_NAMES, TIMES, exposed_name, metric
from pvg.telemetry.sinks import AlertPoint, MetricPoint, MetricSink

Series = tuple[str, tuple[str, ...]]  # a gauge's name and its label values
CONNECTION_S = 10.0  # a connection is closed after this time, also one that sends or reads byte by byte
MOST_CONNECTIONS = 16  # at a time; each has a thread. Further ones are closed at once
POLL_S = 0.1  # until the thread sees that the run has ended


class _Server(ThreadingWSGIServer):
    def __init__(self, *arguments: Any) -> None:
        self._room = threading.BoundedSemaphore(MOST_CONNECTIONS)
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        def end() -> None:
            with contextlib.suppress(OSError):  # the client has left already
                request.shutdown(socket.SHUT_RDWR)

        ending = threading.Timer(CONNECTION_S, end)
        ending.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            ending.cancel()
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # a client that goes away or says nothing
            super().handle_error(request, client_address)


class _Handler(WSGIRequestHandler):
    timeout = CONNECTION_S

    def log_message(self, *_: Any) -> None:
        return  # the terminal belongs to the run's display


def _for_this_machine(app: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    def guarded(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if not names_this_machine(environ.get("HTTP_HOST", "")):
            start_response("403 Forbidden", [("Content-Type", "text/plain")])
            return [b"The metrics endpoint answers only requests to 127.0.0.1 or localhost.\n"]
        return app(environ, start_response)

    return guarded


class MetricsEndpoint(MetricSink):
    """Serves from a separate thread. Port 0 takes a free one: see `port` and `url`.

    Raises MissingRequirementError if it cannot listen on the port.
    """

    def __init__(self, port: int) -> None:
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        self._shown: dict[str, set[Series]] = {}
        self._lock = threading.Lock()
        self._alerts = Counter("pvg_alerts", "Alerts of this process, by kind.", ("kind",), registry=self._registry)
        for kind in get_args(AlertKind):
            self._alerts.labels(kind)  # starts at 0, so that `increase` counts the first alert
        try:
            app = _for_this_machine(make_wsgi_app(self._registry))
            self._server = make_server(LOOPBACK, port, app, _Server, _Handler)
        except OSError as error:
            raise MissingRequirementError(
                f"The metrics endpoint cannot listen on {LOOPBACK}:{port} ({error.strerror or error}).",
                "Choose another port with --metrics-port, or 0 for none.",
            ) from error
        self.port = int(self._server.server_port)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(POLL_S,), name="metrics endpoint", daemon=True
        )
        self._thread.start()
        self._closed = False

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}/metrics"

    def write(self, point: MetricPoint) -> None:
        """Replace the values of the last point of the same kind and phase, or add to them if the point is not
        whole."""
        by_place: dict[str, dict[str, float]] = {}
        for name, value in point.metrics.items():
            place, _, short = name.partition("/")
            by_place.setdefault(place, {})[short] = value
        with self._lock:
            for place, values in by_place.items():
                self._show(place, values, point)
            self._set("pvg_step", "Steps of the run so far.", {}, point.step)
            self._set("pvg_round", "The round being played.", {}, point.round)

    def alert(self, point: AlertPoint) -> None:
        self._alerts.labels(point.kind).inc()

    def close(self) -> None:
        """Stop serving and free the port; a second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _show(self, place: str, values: Mapping[str, float], point: MetricPoint) -> None:
        group = f"{place} {point.phase}" if place in TIMES else f"{place}"
        if place == "round":
            group += f" {point.round}"  # earlier rounds stay visible
        shown = set()
        for short, value in values.items():
            name = f"{place}/{short}"
            entry = metric(name)
            meaning = entry.meaning if entry is not None else name
            shown.add(self._set(exposed_name(name), meaning, _labels(place, short, point), value))
        if not point.whole and place not in TIMES:  # every step has all its times
            shown |= self._shown.get(group, set())
        for gauge, labels in self._shown.get(group, set()) - shown:
            if labels:
                self._gauges[gauge].remove(*labels)
            else:
                self._registry.unregister(self._gauges.pop(gauge))
        self._shown[group] = shown

    def _set(self, name: str, meaning: str, labels: Mapping[str, str], value: float) -> Series:
        gauge = self._gauges.get(name)
        if gauge is None:
            gauge = self._gauges[name] = Gauge(name, meaning, tuple(labels), registry=self._registry)
        (gauge.labels(**labels) if labels else gauge).set(value)
        return name, tuple(labels.values())


def _labels(place: str, short: str, point: MetricPoint) -> dict[str, str]:
    if place in TIMES:
        return {"phase": point.phase, "part": short}
    if place == "round":
        return {"round": str(point.round)}
    if found := re.match(r"gpu(\d+)_", short):
        return {"gpu": found[1]}
    if place == "workers" and (found := re.match(r"w(\d+)_", short)):
        return {"worker": found[1]}
    return {} if place in PLACES_IN_NAMES else {"phase": place}
