"""A small Hugging Face hub on loopback: the routes that huggingface_hub calls for a download, and their failures.

As the real one does, it redirects large files (here: safetensors) to another address, which needs no token.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import orjson

TOKEN = "hf_good"


def commit_of(name: str) -> str:
    return hashlib.sha1(name.encode()).hexdigest()


@dataclass
class Repository:
    """`commits`: the files of each commit; `refs`: where branches and tags stand."""

    commits: dict[str, dict[str, bytes]]
    refs: dict[str, str]
    gated: bool = False


@dataclass
class Hub:
    """`cuts`: file name -> after how many bytes the connection ends, for each answer in turn. `seen`: a line for each
    request, with its method, path and range. `slow`: files that come as one kilobyte every 50 ms. `sent`:
    slow files that were sent to their end."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    cuts: dict[str, list[int]] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)
    slow: set[str] = field(default_factory=set)
    sent: list[str] = field(default_factory=list)

    def add(self, name: str, files: dict[str, bytes], *, kind: str = "models", gated: bool = False) -> str:
        """A new commit on main. Returns it."""
        repository = self.repositories.setdefault(f"{kind}/{name}", Repository({}, {}, gated))
        commit = commit_of(f"{name} {len(repository.commits)}")
        repository.commits[commit] = files
        repository.refs["main"] = commit
        return commit

    def downloads(self) -> list[str]:
        """The files whose content was asked for."""
        paths = [line.split()[1] for line in self.seen if line.startswith("GET")]
        return [path.rpartition("/")[2] for path in paths if "/resolve/" in path or path.startswith("/lfs/")]

    def forget(self) -> None:
        self.seen.clear()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None:
        """Not on stderr."""

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # a client that was stopped
            super().handle()

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        self.hub.seen.append(f"{self.command} /{path} {self.headers.get('Range', '')}".strip())
        if path.startswith("lfs/"):
            _, commit, file = path.split("/", 2)
            files = next(r.commits[commit] for r in self.hub.repositories.values() if commit in r.commits)
            self._content(file, files[file], commit, with_body)
        elif self.headers.get("Authorization") not in (None, f"Bearer {TOKEN}"):
            self._refuse(401, "", "Invalid credentials in Authorization header")
        elif path.startswith("api/"):
            self._api(path.split("/")[1:])
        else:
            self._file(path, with_body)

    def _api(self, parts: list[str]) -> None:
        kind, rest = parts[0], parts[1:]
        verb = next((word for word in ("revision", "tree") if word in rest), None)
        name = "/".join(rest[: rest.index(verb)] if verb else rest)
        revision = "/".join(rest[rest.index(verb) + 1 :]) if verb else "main"
        found = self._commit(f"{kind}/{name}", revision)
        if found is None:
            return
        commit, files = found
        if verb == "tree":
            self._json([{"type": "file", "path": p, "size": len(d), "oid": commit_of(p)} for p, d in files.items()])
        else:
            self._json({"id": name, "sha": commit, "siblings": [{"rfilename": path} for path in files]})

    def _file(self, path: str, with_body: bool) -> None:
        left, _, right = path.partition("/resolve/")
        kind, name = ("datasets", left.removeprefix("datasets/")) if left.startswith("datasets/") else ("models", left)
        revision, _, file = right.partition("/")
        found = self._commit(f"{kind}/{name}", revision)
        if found is None:
            return
        commit, files = found
        if self.hub.repositories[f"{kind}/{name}"].gated and self.headers.get("Authorization") is None:
            self._refuse(401, "GatedRepo", "Access to this model is restricted.")
        elif file not in files:
            self._refuse(404, "EntryNotFound", "Entry not found")
        elif file.endswith(".safetensors"):
            self._redirect(f"/lfs/{commit}/{file}", files[file], commit)
        else:
            self._content(file, files[file], commit, with_body)

    def _redirect(self, location: str, content: bytes, commit: str) -> None:
        self.send_response(302)
        self.send_header("Location", f"{self.hub.url}{location}")
        self.send_header("X-Linked-ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Linked-Size", str(len(content)))
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _content(self, file: str, content: bytes, commit: str, with_body: bool) -> None:
        begin = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        part = content[begin:]
        self.send_response(206 if begin else 200)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(part)))
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if with_body:
            self._body(file, part)

    def _body(self, file: str, part: bytes) -> None:
        cuts = self.hub.cuts.get(file)
        end = cuts.pop(0) if cuts else None
        if file in self.hub.slow:
            for place in range(0, len(part), 1000):
                self.wfile.write(part[place : place + 1000])
                time.sleep(0.05)
            self.hub.sent.append(file)
        else:
            self.wfile.write(part[:end])
        self.close_connection = end is not None

    def _commit(self, key: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        repository = self.hub.repositories.get(key)
        if repository is None:
            self._refuse(404, "RepoNotFound", "Repository not found")
            return None
        commit = repository.refs.get(revision, revision)
        if commit not in repository.commits:
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return None
        return commit, repository.commits[commit]

    def _refuse(self, status: int, code: str, message: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _json(self, document: Any) -> None:
        body = orjson.dumps(document)
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def start(hub: Hub) -> ThreadingHTTPServer:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("HubHandler", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    return server
