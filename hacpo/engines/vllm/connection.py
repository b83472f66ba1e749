"""JSON over HTTP with a server that may be anybody's: every answer within bounds of bytes and time.

What comes from the server is cut to `SHOWN` characters where a message says it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx2

from hacpo.artifacts.text_files import parse_json
from hacpo.callbacks import OnProgress
from hacpo.engines.vllm.servers import HOSTS_VARIABLE, KEY_VARIABLE, keeps_secrets
from hacpo.errors import ModelError

ATTEMPTS = 4
"""Tries of a request whose connection failed, 1, 2 and 4 seconds apart: requests are seeded, so another try is safe."""

CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 3600.0
"""From a request, with its further tries, to the end of its answer: a response of many tokens takes as long as it
takes, and a server that hangs, or sends a byte now and then, is noticed after an hour."""

FACTS_BYTES = 4 << 20
"""Most bytes of an answer that says how the server is set up, with room for vLLM's whole configuration."""

ERROR_BYTES = 1 << 16
"""As many bytes are read of an answer that is none."""

COMPLETION_BYTES, TOKEN_BYTES = 1 << 16, 1 << 10
"""Most bytes of a completion: these, and so many for each token of its prompt and response, which takes some 150."""

SHOWN = 300

T = TypeVar("T")


def completion_bytes(tokens: int) -> int:
    """Most bytes of an answer to a request for a completion of so many tokens, its prompt's among them."""
    return COMPLETION_BYTES + TOKEN_BYTES * tokens


def shown(foreign: object) -> str:
    """What a server sent, as long as a message may say it."""
    return str(foreign)[:SHOWN]


class Connection:
    """The requests to one agent's server. Nothing that is sent back is unpacked, followed or believed.

    Args:
        url: `http://host:port`.
        agent: whose server it is, for remedies.
        key: what the server asks for; sent over https or to this machine only.
        at_once: most requests of `post_all` under way together.

    Raises:
        ModelError: the key could be read on the way.
    """

    def __init__(self, url: str, agent: str, *, key: str | None, at_once: int) -> None:
        self.url, self._agent, self._at_once = url, agent, at_once
        self.remedy = f"restart `hacpo serve` for {agent} ({url})"
        self._has_key = bool(key)
        if key and not keeps_secrets(url):
            raise self.error(
                "is reached over plain http, where anybody on the way could read its key",
                f"use https, or an SSH tunnel from 127.0.0.1, or a server without a key (then unset {KEY_VARIABLE})",
            )
        self._options: dict[str, Any] = {
            "base_url": url,
            "timeout": httpx2.Timeout(None, connect=CONNECT_SECONDS),
            "headers": {"Accept-Encoding": "identity", **({"Authorization": f"Bearer {key}"} if key else {})},
            "verify": urlsplit(url).scheme == "https",  # reading certificates takes longer than a request
            "trust_env": False,  # straight to the server: proxies in the environment are for the internet
            "limits": httpx2.Limits(max_connections=None, max_keepalive_connections=at_once),
        }

    def get(self, path: str) -> dict[str, Any]:
        """The answer of a path that says how the server is set up.

        Raises:
            ModelError: there is none, or another than JSON of `FACTS_BYTES` in `ANSWER_SECONDS`.
        """
        return asyncio.run(self._one("GET", path, None, {}, FACTS_BYTES))

    def post(
        self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None, *, most: int = FACTS_BYTES
    ) -> dict[str, Any]:
        """The answer to a request.

        Args:
            most: bytes that it may have.

        Raises:
            ModelError: as `get`.
        """
        return asyncio.run(self._one("POST", path, body, headers or {}, most))

    def post_all(
        self,
        path: str,
        bodies: Sequence[tuple[dict[str, Any], int]],
        read: Callable[[dict[str, Any], dict[str, Any]], T],
        on_progress: OnProgress | None,
    ) -> list[T]:
        """What `read` makes of each answer and its request, in order; nothing else is kept of an answer. One failure
        ends the others; an interrupt closes all connections, and the server stops.

        Args:
            bodies: the requests, and how many bytes the answer to each may have.

        Raises:
            ModelError: as `get`, of one of them.
        """
        return asyncio.run(self._all(path, bodies, read, on_progress))

    @contextlib.contextmanager
    def as_vllm_answers(self) -> Iterator[None]:
        """Whatever JSON a server sends, what is looked for is there, or one line says that it is not."""
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError, AssertionError, OverflowError):
            raise self.stranger() from None

    def error(self, what: str, remedy: str) -> ModelError:
        """`what` the server does, in one line with its address."""
        return ModelError(f"the vLLM server {what}", where=self.url, remedy=remedy)

    def stranger(self, what: str = "") -> ModelError:
        """The server is none of vLLM's, or a broken one."""
        return self.error(f"answers something else than vLLM does{what and f': {what}'}", "correct servers.yaml")

    # --- one request -------------------------------------------------------------------------------------------------

    async def _one(self, verb: str, path: str, body: Any, headers: dict[str, str], most: int) -> dict[str, Any]:
        async with httpx2.AsyncClient(**self._options) as client:
            return await self._answer(lambda: self._received(client, verb, path, body, headers, most), path)

    async def _all(
        self,
        path: str,
        bodies: Sequence[tuple[dict[str, Any], int]],
        read: Callable[[dict[str, Any], dict[str, Any]], T],
        on_progress: OnProgress | None,
    ) -> list[T]:
        gate = asyncio.Semaphore(self._at_once)
        done = 0

        async def ask(client: httpx2.AsyncClient, body: dict[str, Any], most: int) -> T:
            nonlocal done
            async with gate:
                answer = await self._answer(lambda: self._received(client, "POST", path, body, {}, most), path)
                with self.as_vllm_answers():
                    result = read(answer, body)
            done += 1
            if on_progress:
                on_progress(done, len(bodies))
            return result

        try:
            async with httpx2.AsyncClient(**self._options) as client, asyncio.TaskGroup() as group:
                tasks = [group.create_task(ask(client, body, most)) for body, most in bodies]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _received(
        self, client: httpx2.AsyncClient, verb: str, path: str, body: Any, headers: dict[str, str], most: int
    ) -> tuple[int, bytes]:
        """Status and body of an answer: of one that is an error, its beginning."""
        received = bytearray()
        async with client.stream(verb, path, json=body, headers=headers) as response:
            async for part in response.aiter_raw():
                received += part
                if response.status_code != 200 and len(received) >= ERROR_BYTES:
                    break
                if len(received) > most:
                    raise self.error(f"answers {path} with more than {most >> 10} KiB", "correct servers.yaml")
        return response.status_code, bytes(received)

    async def _answer(self, send: Callable[[], Awaitable[tuple[int, bytes]]], path: str) -> dict[str, Any]:
        """A request's JSON, tried again where the connection fails."""
        begun = time.monotonic()
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                status, received = await self._tried(send)
        except TimeoutError:
            raise self.error(f"gave no whole answer in {time.monotonic() - begun:.0f} s", self.remedy) from None
        if status != 200:
            raise self._refused(status, received, path)
        try:
            content = parse_json(received, deepest=None) if received else {}
        except ValueError:
            content = None
        if not isinstance(content, dict):
            raise self.stranger()
        return content

    async def _tried(self, send: Callable[[], Awaitable[tuple[int, bytes]]]) -> tuple[int, bytes]:
        for wait in [2.0**attempt for attempt in range(ATTEMPTS - 1)]:
            try:
                return await send()
            except httpx2.TransportError:
                await asyncio.sleep(wait)
        try:
            return await send()
        except httpx2.TransportError as error:
            raise self.error(
                f"cannot be reached ({shown(error) or type(error).__name__})",
                f"start it with `hacpo serve` for agent {self._agent}, or correct servers.yaml",
            ) from None

    def _refused(self, status: int, received: bytes, path: str) -> ModelError:
        """What an answer other than 200 means, and what helps."""
        answer = " ".join(received[:ERROR_BYTES].decode(errors="replace").split())
        if status == 401:
            remedy = (
                f"name its key_file in servers.yaml as `hacpo serve` says, or set {KEY_VARIABLE}, and {HOSTS_VARIABLE} "
                "to its host if that is another machine"
            )
            return self.error("wants another key" if self._has_key else "wants a key", remedy)
        if status in (404, 405) and not path.startswith("/v1"):
            return self.error(f"has no {path.partition('?')[0]}: vLLM's development mode is off", self.remedy)
        if "has no attribute 'hacpo_" in answer:
            return self.error("was started without hacpo's worker extension", self.remedy)
        return self.error(f"answers {path} with {status}: {shown(answer)}", self.remedy)
