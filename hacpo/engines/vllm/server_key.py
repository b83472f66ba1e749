"""What stands before every endpoint of `hacpo serve`: without the key, nothing but `/health`.

vLLM asks for its key under `/v1` and a few other prefixes only; the endpoints of its development mode, which load
weights and call methods of its workers, are open. Named to vLLM as `--middleware`; an ASGI application (ASGI 3.0, HTTP
and WebSocket), without imports of a web framework's.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from hacpo.engines.vllm.servers import KEY_VARIABLE

MIDDLEWARE = f"{__name__}.KeyRequired"
"""As vLLM is told of it."""

OPEN = "/health"
"""Says that the server is up, and nothing else."""

_REFUSAL = b'{"error":"Unauthorized"}'
_POLICY_VIOLATION = 1008
"""Close code of RFC 6455, section 7.4.1; before a connection is accepted, servers make it status 403."""

Message = MutableMapping[str, Any]
Application = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]
]


class KeyRequired:
    """Lets through what carries `Authorization: Bearer <key>`, and answers the rest with 401.

    The key is read from the environment (`VLLM_API_KEY`), where no list of processes shows it.

    Args:
        app: what is guarded.

    Raises:
        RuntimeError: there is no key: a server that guards nothing must not start.
    """

    def __init__(self, app: Application) -> None:
        key = os.environ.get(KEY_VARIABLE)
        if not key:
            raise RuntimeError(f"{KEY_VARIABLE} is not set")
        self._app = app
        self._wanted = _digest(b"Bearer " + key.encode())

    async def __call__(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        if scope["type"] == "lifespan" or self._is_allowed(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
        else:
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": _REFUSAL})

    def _is_allowed(self, scope: Message) -> bool:
        if scope["type"] == "http" and scope["path"] == OPEN and scope["method"] in ("GET", "HEAD"):
            return True
        return self._carries_key(scope["headers"])

    def _carries_key(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        given = [value for name, value in headers if name.lower() == b"authorization"]
        # Digests have one length, so that the time says nothing of the key's.
        return len(given) == 1 and hmac.compare_digest(_digest(given[0]), self._wanted)


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()
