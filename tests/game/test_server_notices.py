"""Changes of servers are shown to the observer, and logged."""

from __future__ import annotations

from pvg.telemetry.events import Events, ServerNotices


class Kept(Events):
    def __init__(self) -> None:
        self.kept: list[tuple[str, object]] = []

    def event(self, tag: str, **fields: object) -> None:
        self.kept.append((tag, fields["event"]))


def test_a_server_that_goes_and_comes_back_is_told_once_each_and_everything_is_logged() -> None:
    log, told = Kept(), []
    events = ServerNotices(log, told.append, [["http://a", "http://b"], ["http://verifier"]])
    events.event("gen", event="server.up", server="http://a")  # the first time is no news
    events.event("gen", event="server.away", server="http://a", why="no reply")
    events.event("gen", event="server.stale", server="http://a")
    events.event("gen", event="server.up", server="http://a")
    events.event("weights", event="client.send", trace="t")
    assert told == [
        "http://a is unavailable (no reply); the others take its requests.",
        "http://a is back, with the newest weights.",
    ]
    assert [name for _, name in log.kept] == ["server.up", "server.away", "server.stale", "server.up", "client.send"]


def test_the_last_server_of_its_kind_has_nobody_to_stand_in() -> None:
    told: list[str] = []
    events = ServerNotices(Kept(), told.append, [["http://a", "http://b"], ["http://verifier"]])
    for server in ("http://verifier", "http://a", "http://b"):
        events.event("gen", event="server.away", server=server, why="no reply")
    rest = [line.rpartition("; ")[2] for line in told]
    assert rest == ["its requests wait for it.", "the others take its requests.", "its requests wait for it."]


def test_what_happens_to_servers_on_a_cluster_is_told() -> None:
    told: list[str] = []
    events = ServerNotices(Kept(), told.append, [["http://a"]])
    events.event("workers", event="server started", node="n1", server="http://n1:8000")
    events.event("gen", event="server.away", server="http://n1:8000", why="no reply")
    events.event("workers", event="server lost", node="n1", why="The server ended (killed by SIGKILL)")
    assert told == [
        "A vLLM server on node n1 is ready.",
        "http://n1:8000 is unavailable (no reply); pvg repeats its requests.",
        "vLLM on node n1: The server ended (killed by SIGKILL).",
    ]


def test_what_happens_to_workers_and_nodes_is_told_with_its_reason() -> None:
    told: list[str] = []
    events = ServerNotices(Kept(), told.append, [["http://a"]])
    events.event("gen", event="server.silent", server="http://a", requests=3, silent_s=300.0)
    events.event("workers", event="waits", why="room for 3 workers on the Ray cluster")
    events.event("workers", event="node joined", node="n1", device="GPUs")
    events.event("workers", event="node shared", node="n1", why="Ray has no room for worker 2")
    events.event("workers", event="added", worker=3, workers=4, why="12 groups waited for 4.2 of 5 s")
    events.event("workers", event="removed", worker=0, workers=1, why="it had work for 2% of the last 30 s")
    events.event("workers", event="not added", worker=3, why="No worker process could be started: no memory.")
    assert told == [
        "http://a has answered no request for 300 s; 3 are in flight. If they hang, restart it: pvg repeats them.",
        "pvg waits for room for 3 workers on the Ray cluster.",
        "Workers on node n1 compute on GPUs.",
        "Ray has no room for worker 2.",
        "Added worker 3: 12 groups waited for 4.2 of 5 s. Now 4 workers.",
        "Removed worker 0: it had work for 2% of the last 30 s. Now 1 worker.",
        "Worker 3 could not be added: No worker process could be started: no memory.",
    ]
