"""A Hugging Face hub on this machine: as much of its HTTP interface as downloads and uploads of small files need."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlparse


@dataclass
class HubStub:
    """What the hub holds, and what has been sent to it."""

    address: str = ""
    commits: dict[str, str] = field(default_factory=dict)
    """`owner/name@revision` -> commit, of data sets and models."""
    licences: dict[str, Any] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    """`owner/name@commit/path` -> content."""
    gated: set[str] = field(default_factory=set)
    """Models whose licence must be accepted first."""
    asked: list[str] = field(default_factory=list)
    """Paths of all requests for reading, in order."""
    created: list[dict[str, Any]] = field(default_factory=list)
    uploaded: dict[str, bytes] = field(default_factory=dict)
    tokens: set[str] = field(default_factory=set)
    refuse: int | None = None
    """Answer every upload with this status."""


def _model(hub: HubStub, path: str) -> tuple[int, Any, dict[str, str]]:
    """What the hub answers to a question about a model: status, content, headers."""
    found = re.fullmatch(
        r"/api/models/(?P<name>[^/]+/[^/]+)(?:/(?P<what>auth-check|revision|tree)(?:/(?P<revision>[^/]+))?)?", path
    ) or re.fullmatch(r"/(?P<name>[^/]+/[^/]+)/(?P<what>resolve)/(?P<revision>[^/]+)/(?P<file>.+)", path)
    if found is None or not any(key.startswith(f"{found['name']}@") for key in hub.commits):
        return 401, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}
    name, what, revision = found["name"], found["what"], found["revision"] or "main"
    if name in hub.gated and what in ("auth-check", "resolve"):
        return 403, {"error": "gated"}, {"X-Error-Code": "GatedRepo"}
    commit = hub.commits.get(f"{name}@{revision}")
    if commit is None:
        return 404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"}
    if what == "auth-check":
        return 200, {}, {}
    if what == "tree":
        return 200, [_entry(file, hub.files[f"{name}@{commit}/{file}"]) for file in _files(hub, name, commit)], {}
    if what == "resolve":
        content = hub.files.get(f"{name}@{commit}/{found['file']}")
        if content is None:
            return 404, {"error": "not found"}, {"X-Error-Code": "EntryNotFound"}
        return 200, content, {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": commit}
    siblings = [{"rfilename": file} for file in _files(hub, name, commit)]
    return 200, {"id": name, "sha": commit, "siblings": siblings, "tags": []}, {}


def _files(hub: HubStub, name: str, commit: str) -> list[str]:
    start = f"{name}@{commit}/"
    return [key.removeprefix(start) for key in hub.files if key.startswith(start)]


def _entry(file: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}


@contextmanager
def running_hub() -> Iterator[HubStub]:
    """Serve until the block ends."""
    hub = HubStub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(urlparse(self.path).path)
            hub.asked.append(path)
            if path.startswith("/api/models/") or not path.startswith(("/api/", "/datasets/")):
                return self._answer(*_model(hub, path))
            if found := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/revision/(.+)", path):
                commit = hub.commits.get(f"{found[1]}@{found[2]}")
                if commit is None:
                    return self._answer(404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"})
                licence = hub.licences.get(found[1])
                card = {"license": licence} if licence else {}
                return self._answer(200, {"id": found[1], "sha": commit, "siblings": [], "tags": [], "cardData": card})
            if found := re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                content = hub.files.get(f"{found[1]}@{found[2]}/{found[3]}")
                if content is not None:
                    tag = hashlib.sha256(content).hexdigest()
                    return self._answer(200, content, {"ETag": f'"{tag}"', "X-Repo-Commit": found[2]})
            return self._answer(404, {"error": "not found"})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = unquote(urlparse(self.path).path)
            hub.tokens.add(self.headers.get("Authorization", ""))
            if hub.refuse is not None:
                return self._answer(hub.refuse, {"error": "You don't have the rights to do this"})
            if path == "/api/repos/create":
                request = json.loads(body)
                hub.created.append(request)
                name = (
                    f"{request['organization']}/{request['name']}" if request.get("organization") else request["name"]
                )
                return self._answer(200, {"url": f"{hub.address}/{name}"})
            if path.endswith("/preupload/main"):
                files = [
                    {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
                    for file in json.loads(body)["files"]
                ]
                return self._answer(200, {"files": files})
            if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", path):
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        hub.uploaded[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                commit = "c" * 40
                url = f"{hub.address}/{found[1]}/commit/{commit}"
                return self._answer(200, {"success": True, "commitOid": commit, "commitUrl": url})
            return self._answer(200, {})

        def _answer(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
