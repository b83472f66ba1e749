"""Sampling through a vLLM server that somebody else started: the same token ids and log-probabilities, over HTTP.

The server speaks OpenAI's completions API with vLLM's additions, and takes over weights through the endpoints of vLLM's
development mode (`VLLM_SERVER_DEV_MODE=1`) and `engines.vllm.worker_extension`. `hacpo serve` starts one that way.

A server may be shared by accident: by a second run, or by a stage tried out by hand. So every load leaves a ticket with
its worker, and responses count only if the same ticket is still there after the last of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import numpy as np
import numpy.typing as npt

from hacpo.artifacts.text_files import parse_json
from hacpo.callbacks import OnProgress
from hacpo.engines.interface import SampledResponse, SamplingParameters, SamplingRequest
from hacpo.engines.vllm.local import finish_reason, sampling_fields
from hacpo.engines.vllm.refusals import model_config
from hacpo.engines.vllm.servers import HOSTS_VARIABLE, KEY_VARIABLE, keeps_secrets
from hacpo.errors import ModelError
from hacpo.settings.engine import EngineSettings
from hacpo.tokens.context_length import context_length, vocabulary_rows
from hacpo.tokens.stopping import first_stop

ATTEMPTS = 4
"""Tries of a request whose connection failed, 1, 2 and 4 seconds apart: requests are seeded, so another try is safe."""

TIMEOUT = httpx2.Timeout(3600.0, connect=10.0)
"""Seconds. A response of many tokens takes as long as it takes; a server that hangs is noticed after an hour."""

COMPLETIONS = "/v1/completions"

LARGEST = 1 << 28
"""Bytes of an answer, which is read as it is sent: nothing is unpacked. A token takes some 50 of them."""

_MOST_ROWS = 1 << 31
"""Token ids are int32, where config.json does not say how many the model has."""


class VllmServer:
    """A connection to one agent's server, which holds the weights of the folder that was loaded last.

    Args:
        url: `http://host:port`.
        agent: the name under which the server serves its model.
        folder: model folder to load first; the server reads it itself, from a file system that both see.
        settings: what the server must sample with; `batch_size` requests are under way at once.
        eos_token_ids: tokens that end a response.
        decode: text of a response's tokens.
        key: what the server asks for; sent over https or to this machine only.

    Raises:
        ModelError: nothing listens there, or a server that cannot be used, in one line with the remedy.
    """

    def __init__(
        self,
        url: str,
        agent: str,
        folder: Path,
        settings: EngineSettings,
        *,
        eos_token_ids: Sequence[int],
        decode: Callable[[list[int]], str],
        key: str | None = None,
    ) -> None:
        self.url = url
        self.remedy = f"restart `hacpo serve` for {agent} ({url})"
        self.longest, self._rows = 0, _MOST_ROWS
        self._has_key = bool(key)
        self._agent, self._settings, self._eos = agent, settings, list(eos_token_ids)
        self._decode = decode
        self._ticket = ""
        if key and not keeps_secrets(url):
            raise self._error(
                "is reached over plain http, where anybody on the way could read its key",
                f"use https, or an SSH tunnel from 127.0.0.1, or a server without a key (then unset {KEY_VARIABLE})",
            )
        self._options: dict[str, Any] = {
            "base_url": url,
            "timeout": TIMEOUT,
            "headers": {"Accept-Encoding": "identity", **({"Authorization": f"Bearer {key}"} if key else {})},
            "verify": urlsplit(url).scheme == "https",  # reading certificates takes longer than a request
            "trust_env": False,  # straight to the server: proxies in the environment are for the internet
            "limits": httpx2.Limits(max_connections=None, max_keepalive_connections=settings.batch_size),
        }
        with self._as_vllm_answers():
            served = [str(model.get("id")) for model in self._get("/v1/models").get("data", [])]
            if agent not in served:
                raise self._error(
                    f"serves {', '.join(served) or 'no model'}", f"name the server of {agent} in servers.yaml"
                )
            # Not from the workers: of several copies each takes itself for the only one.
            info = self._get("/server_info?config_format=json")
            self._copies = int(info["vllm_config"]["parallel_config"]["data_parallel_size"])
        self.load(folder)

    def load(self, folder: Path) -> None:
        """Take over the weights of another checkpoint of the same model.

        Raises:
            ModelError: the server does not see the folder, cannot load it, or samples in another way than asked.
        """
        with self._as_vllm_answers():
            self._load(folder)

    def _load(self, folder: Path) -> None:
        path = str(folder.resolve())
        facts = self._facts(path)
        if not facts["finds"]:
            raise self._error(
                f"does not find weights in {path}",
                "start it where the project's folder is the same path, on the same file system",
            )
        for name, wanted in {
            "logprobs_mode": "processed_logprobs",
            "dtype": self._settings.dtype,
        }.items():
            if facts[name] != wanted:
                raise self._error(f"was started with {name} {facts[name]}, and the run wants {wanted}", self.remedy)
        config = model_config(folder)
        longest = self._settings.vllm.max_model_len or context_length(config)
        if facts["longest"] < (longest or 0):
            raise self._error(f"takes at most {facts['longest']} tokens, and the run wants {longest}", self.remedy)
        self.longest = self._settings.vllm.max_model_len or int(facts["longest"])
        self._rows = vocabulary_rows(config) or _MOST_ROWS
        self._ticket = uuid.uuid4().hex
        self._call("hacpo_load", path, self._ticket)
        if not self._post("/reset_prefix_cache", {}).get("success"):  # its entries belong to the old weights
            raise self._error("did not empty its cache: it is at work for somebody else", self.remedy)

    def sample(
        self,
        requests: Sequence[SamplingRequest],
        parameters: SamplingParameters,
        on_progress: OnProgress | None = None,
    ) -> list[SampledResponse]:
        """See `interface.Sampler`.

        Raises:
            ModelError: the server fails, was given other weights meanwhile, or answers what cannot have been drawn.
        """
        bodies = [
            {
                "model": self._agent,
                "prompt": list(map(int, request.prompt_token_ids)),
                "return_token_ids": True,
                **sampling_fields(request, parameters, self._eos, self.longest),
            }
            for request in requests
        ]
        answers = asyncio.run(self._post_all(bodies, on_progress))
        with self._as_vllm_answers():
            if self._facts("")["ticket"] != self._ticket:
                raise self._error(
                    "was restarted or given other weights while it was sampled from, so no response was kept",
                    "let one run at a time use it, and run again",
                )
            return [self._response(answer["choices"][0], body) for answer, body in zip(answers, bodies, strict=True)]

    def probe(self, token_ids: Sequence[int]) -> list[npt.NDArray[np.float64]]:
        """Log-probability of every token but the first, at temperature 1, from each copy of the model."""
        body = {
            "model": self._agent,
            "prompt": list(token_ids),
            "temperature": 0.0,
            "max_tokens": 1,
            "prompt_logprobs": 0,
        }
        logprobs = []
        for copy in range(self._copies):
            rank = {"X-data-parallel-rank": str(copy)}
            with self._as_vllm_answers():
                (choice,) = self._post(COMPLETIONS, body, rank)["choices"]
                pairs = zip(token_ids[1:], choice["prompt_logprobs"][1:], strict=True)
                logprobs.append(np.array([entry[str(token)]["logprob"] for token, entry in pairs], dtype=np.float64))
        return logprobs

    def sleep(self) -> bool:
        """Nothing: its memory is its own. But the weights must be loaded again, since others may use it meanwhile."""
        return True

    def close(self) -> None:
        """Nothing: who started the server ends it."""

    # --- requests ----------------------------------------------------------------------------------------------------

    def _facts(self, folder: str) -> dict[str, Any]:
        facts: dict[str, Any] = self._call("hacpo_facts", folder)[0]
        return facts

    def _call(self, method: str, *arguments: str) -> list[Any]:
        """A method of `worker_extension.CheckpointReload`, on every worker."""
        results: list[Any] = self._post("/collective_rpc", {"method": method, "args": list(arguments)})["results"]
        return results

    def _get(self, path: str) -> dict[str, Any]:
        return asyncio.run(self._one("GET", path, None, {}))

    def _post(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> dict[str, Any]:
        return asyncio.run(self._one("POST", path, body, headers or {}))

    async def _one(self, verb: str, path: str, body: Any, headers: dict[str, str]) -> dict[str, Any]:
        async with httpx2.AsyncClient(**self._options) as client:
            return await self._answer(lambda: self._received(client, verb, path, body, headers), path)

    async def _post_all(self, bodies: Sequence[dict[str, Any]], on_progress: OnProgress | None) -> list[dict[str, Any]]:
        """Answers in order. One failure ends the others; an interrupt closes all connections, and the server stops."""
        gate = asyncio.Semaphore(self._settings.batch_size)
        done = 0

        async def ask(client: httpx2.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
            nonlocal done
            async with gate:
                answer = await self._answer(lambda: self._received(client, "POST", COMPLETIONS, body), COMPLETIONS)
            done += 1
            if on_progress:
                on_progress(done, len(bodies))
            return answer

        try:
            async with httpx2.AsyncClient(**self._options) as client, asyncio.TaskGroup() as group:
                tasks = [group.create_task(ask(client, body)) for body in bodies]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _received(
        self, client: httpx2.AsyncClient, verb: str, path: str, body: Any, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Status and body of an answer, as many bytes as an answer has."""
        received = bytearray()
        async with client.stream(verb, path, json=body, headers=headers or {}) as response:
            async for part in response.aiter_raw():
                received += part
                if len(received) > LARGEST:
                    raise self._error(f"answers {path} with more than {LARGEST >> 20} MiB", "correct servers.yaml")
        return response.status_code, bytes(received)

    @contextlib.contextmanager
    def _as_vllm_answers(self) -> Iterator[None]:
        """Whatever JSON a server sends, what is looked for is there, or one line says that it is not."""
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError, AssertionError, OverflowError):
            raise self._stranger() from None

    async def _answer(self, send: Callable[[], Awaitable[tuple[int, bytes]]], path: str) -> dict[str, Any]:
        """A request's JSON, tried again where the connection fails."""
        begun = time.monotonic()
        for attempt in range(ATTEMPTS):
            try:
                status, received = await send()
                break
            except httpx2.ReadTimeout:
                raise self._error(f"gave no answer in {time.monotonic() - begun:.0f} s", self.remedy) from None
            except httpx2.TransportError as error:
                if attempt == ATTEMPTS - 1:
                    reason = str(error) or type(error).__name__
                    raise self._error(
                        f"cannot be reached ({reason})",
                        f"start it with `hacpo serve` for agent {self._agent}, or correct servers.yaml",
                    ) from None
                await asyncio.sleep(2**attempt)
        if status == 200:
            try:
                content = parse_json(received) if received else {}
            except ValueError:
                content = None
            if not isinstance(content, dict):
                raise self._stranger()
            return content
        raise self._refused(status, received, path)

    def _refused(self, status: int, received: bytes, path: str) -> ModelError:
        """What an answer other than 200 means, and what helps."""
        answer = " ".join(received.decode(errors="replace").split())
        if status == 401:
            remedy = (
                f"name its key_file in servers.yaml as `hacpo serve` says, or set {KEY_VARIABLE}, and {HOSTS_VARIABLE} "
                "to its host if that is another machine"
            )
            return self._error("wants another key" if self._has_key else "wants a key", remedy)
        if status in (404, 405) and not path.startswith("/v1"):
            return self._error(f"has no {path.partition('?')[0]}: vLLM's development mode is off", self.remedy)
        if "has no attribute 'hacpo_" in answer:
            return self._error("was started without hacpo's worker extension", self.remedy)
        return self._error(f"answers {path} with {status}: {answer[:300]}", self.remedy)

    def _error(self, what: str, remedy: str) -> ModelError:
        return ModelError(f"the vLLM server {what}", where=self.url, remedy=remedy)

    def _stranger(self, what: str = "") -> ModelError:
        return self._error(f"answers something else than vLLM does{what and f': {what}'}", "correct servers.yaml")

    # --- responses ---------------------------------------------------------------------------------------------------

    def _response(self, choice: dict[str, Any], asked: dict[str, Any]) -> SampledResponse:
        """One completion as a sampled response, if the request may have given it: training takes that for granted."""
        token_ids, reported = list(choice["token_ids"]), list(choice["logprobs"]["token_logprobs"])
        with np.errstate(over="ignore"):
            logprobs = np.array(reported, dtype=np.float32)  # which is what they are, written with all their digits
        outside = [token for token in token_ids if type(token) is not int or not 0 <= token < self._rows]
        if outside:
            raise self._stranger(f"token {outside[0]!r:.40} of a model that has {self._rows}")
        if not 1 <= len(token_ids) <= asked["max_tokens"]:
            raise self._stranger(f"a response of {len(token_ids)} tokens, not of 1 to {asked['max_tokens']}")
        numbers = all(type(value) in (int, float) for value in reported) and np.isfinite(logprobs) & (logprobs <= 0)
        if len(reported) != len(token_ids) or not np.all(numbers):
            raise self._stranger("log-probabilities that are not a finite number up to 0 for each token")
        if not self._ends(token_ids, choice["finish_reason"], asked):
            raise self._stranger(f"a response that ends otherwise than by {choice['finish_reason']!r:.40}")
        return SampledResponse(token_ids, logprobs, finish_reason(choice["finish_reason"]))

    def _ends(self, token_ids: list[int], reason: object, asked: dict[str, Any]) -> bool:
        """Whether a response ends where and how it is said to."""
        if not set(self._eos).isdisjoint(token_ids[:-1]):
            return False
        if token_ids[-1] in self._eos:
            return reason == "stop"
        if reason == "stop":
            return first_stop(self._decode(token_ids), asked["stop"]) is not None
        return reason == "length" and len(token_ids) == asked["max_tokens"]
