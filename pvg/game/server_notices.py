"""`ServerNotices`: what becomes of the servers, told to whoever watches the run as well as to the event log."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pvg.telemetry.events import Events


class ServerNotices(Events):
    """Passes every event on to `log`. A server that goes away, and one that is back, is told to `notice` too."""

    def __init__(self, log: Events, notice: Callable[[str], None], groups: Sequence[Sequence[str]]) -> None:
        """`groups`: the addresses of the servers that stand in for each other."""
        self._log = log
        self._notice = notice
        self._groups = groups
        self._away: set[object] = set()

    def event(self, tag: str, **fields: object) -> None:
        self._log.event(tag, **fields)
        server = fields.get("server")
        if fields.get("event") == "server.away":
            self._away.add(server)
            others = {url for group in self._groups if server in group for url in group} - self._away
            rest = "the others take its requests" if others else "its requests wait for it"
            self._notice(f"{server} is away ({fields.get('why', 'no reason known')}); {rest}.")
        elif fields.get("event") == "server.up" and server in self._away:
            self._away.discard(server)
            self._notice(f"{server} is back, with the newest weights.")
