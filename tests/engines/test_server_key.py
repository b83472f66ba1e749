"""What stands before the endpoints of `hacpo serve`, asked as an ASGI server asks an application.

tests/engines/test_vllm_pipeline.py asks a real server.
"""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest

from hacpo.engines.vllm.server_key import KeyRequired, Message

KEY = [(b"authorization", b"Bearer secret")]


def asked(
    monkeypatch: pytest.MonkeyPatch, path: str, headers: list[tuple[bytes, bytes]], *, kind: str = "http", **more: str
) -> tuple[bool, list[Message]]:
    """Whether a request gets to the application, and what is sent to whoever asked."""
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    reached, sent = [], []

    async def application(*_: Any) -> None:
        reached.append(True)

    async def receive() -> MutableMapping[str, Any]:
        raise AssertionError("the body of a request without the key is not read")

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": kind, "path": path, "headers": headers, "method": "POST", **more}
    asyncio.run(KeyRequired(application)(scope, receive, send))
    return bool(reached), sent


@pytest.mark.parametrize(
    "path",
    [
        "/collective_rpc",
        "/sleep",
        "/wake_up",
        "/reset_prefix_cache",
        "/server_info",
        "/v1/completions",
        "/metrics",
        "/",
    ],
)
def test_every_endpoint_asks_for_the_key(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    reached, sent = asked(monkeypatch, path, [])
    assert not reached
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert sent[0]["status"] == 401
    assert asked(monkeypatch, path, KEY) == (True, [])


@pytest.mark.parametrize(
    "headers",
    [
        [(b"authorization", b"Bearer secreT")],
        [(b"authorization", b"Bearer secret ")],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"Basic secret")],
        [(b"authorization", b"secret")],
        [(b"authorization", "Bearer sécret".encode())],
        [(b"x-authorization", b"Bearer secret")],
        KEY * 2,
    ],
)
def test_another_key_is_none(monkeypatch: pytest.MonkeyPatch, headers: list[tuple[bytes, bytes]]) -> None:
    assert not asked(monkeypatch, "/collective_rpc", headers)[0]


@pytest.mark.parametrize("path", ["/health/", "//health", "/health/../sleep", "/healthy", "/HEALTH", "/v1/health"])
def test_health_alone_is_open_and_only_to_be_read(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    assert asked(monkeypatch, "/health", [], method="GET")[0]
    assert asked(monkeypatch, "/health", [], method="HEAD")[0]
    assert not asked(monkeypatch, "/health", [], method="POST")[0]
    assert not asked(monkeypatch, path, [], method="GET")[0]
    assert not asked(monkeypatch, "/collective_rpc", [], method="OPTIONS")[0]  # vLLM's own check lets these through


def test_a_websocket_is_closed_before_it_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    reached, sent = asked(monkeypatch, "/health", [], kind="websocket")
    assert (reached, [message["type"] for message in sent]) == (False, ["websocket.close"])
    assert asked(monkeypatch, "/v1/realtime", KEY, kind="websocket")[0]
    assert asked(monkeypatch, "", [], kind="lifespan")[0]  # of the server itself


@pytest.mark.parametrize("key", ["", None])
def test_a_guard_without_a_key_does_not_start(monkeypatch: pytest.MonkeyPatch, key: str | None) -> None:
    if key is None:
        monkeypatch.delenv("VLLM_API_KEY", raising=False)
    else:
        monkeypatch.setenv("VLLM_API_KEY", key)

    async def application(*_: Any) -> None:
        pass

    with pytest.raises(RuntimeError, match="VLLM_API_KEY is not set"):
        KeyRequired(application)
