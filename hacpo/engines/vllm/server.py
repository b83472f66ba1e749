"""Sampling through a vLLM server that somebody else started: the same token ids and log-probabilities, over HTTP.

The server speaks OpenAI's completions API with vLLM's additions, and takes over weights through the endpoints of vLLM's
development mode (`VLLM_SERVER_DEV_MODE=1`) and `engines.vllm.worker_extension`. `hacpo serve` starts one that way.

A server may be shared by accident: by a second run, or by a stage tried out by hand. So every load leaves a ticket with
its worker, and responses count only if the same ticket is still there after the last of them.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hacpo.callbacks import OnProgress
from hacpo.engines.interface import SampledResponse, SamplingParameters, SamplingRequest
from hacpo.engines.vllm.connection import Connection, completion_bytes, shown
from hacpo.engines.vllm.local import finish_reason, sampling_fields
from hacpo.engines.vllm.refusals import model_config
from hacpo.settings.engine import EngineSettings
from hacpo.tokens.context_length import context_length, vocabulary_rows
from hacpo.tokens.stopping import first_stop

COMPLETIONS = "/v1/completions"

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
        self._server = Connection(url, agent, key=key, at_once=settings.batch_size)
        self.remedy = self._server.remedy
        self.longest, self._rows = 0, _MOST_ROWS
        self._agent, self._settings, self._eos = agent, settings, list(eos_token_ids)
        self._decode = decode
        self._ticket = ""
        with self._server.as_vllm_answers():
            served = [str(model.get("id")) for model in self._server.get("/v1/models").get("data", [])]
            if agent not in served:
                raise self._server.error(
                    f"serves {shown(', '.join(served)) or 'no model'}", f"name the server of {agent} in servers.yaml"
                )
            self._check_copies()
        self.load(folder)

    def _check_copies(self) -> None:
        """Each copy is probed after each load, so there must be as many as the run expects, and no more.

        Raises:
            ModelError: there are others.
        """
        # Not from the workers: of several copies each takes itself for the only one.
        info = self._server.get("/server_info?config_format=json")
        copies, wanted = info["vllm_config"]["parallel_config"]["data_parallel_size"], self._settings.vllm.data_parallel
        if type(copies) is not int or copies < 1:
            raise self._server.stranger(f"a data_parallel_size of {shown(copies)}")
        if copies != wanted:
            raise self._server.error(
                f"was started with data_parallel_size {shown(copies)}, and the run wants {wanted}",
                f"set engine.vllm.data_parallel, or {self.remedy}",
            )

    def load(self, folder: Path) -> None:
        """Take over the weights of another checkpoint of the same model.

        Raises:
            ModelError: the server does not see the folder, cannot load it, or samples in another way than asked.
        """
        with self._server.as_vllm_answers():
            self._load(folder)

    def _load(self, folder: Path) -> None:
        path = str(folder.resolve())
        facts = self._facts(path)
        if not facts["finds"]:
            raise self._server.error(
                f"does not find weights in {path}",
                "start it where the project's folder is the same path, on the same file system",
            )
        for name, wanted in {
            "logprobs_mode": "processed_logprobs",
            "dtype": self._settings.dtype,
        }.items():
            if facts[name] != wanted:
                raise self._server.error(
                    f"was started with {name} {shown(facts[name])}, and the run wants {wanted}", self.remedy
                )
        config = model_config(folder)
        longest = self._settings.vllm.max_model_len or context_length(config)
        if facts["longest"] < (longest or 0):
            raise self._server.error(
                f"takes at most {shown(facts['longest'])} tokens, and the run wants {longest}", self.remedy
            )
        self.longest = self._settings.vllm.max_model_len or int(facts["longest"])
        self._rows = vocabulary_rows(config) or _MOST_ROWS
        self._ticket = uuid.uuid4().hex
        self._call("hacpo_load", path, self._ticket)
        if not self._server.post("/reset_prefix_cache", {}).get("success"):  # its entries belong to the old weights
            raise self._server.error("did not empty its cache: it is at work for somebody else", self.remedy)

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
        responses = self._server.post_all(
            COMPLETIONS,
            [(body, completion_bytes(len(body["prompt"]) + body["max_tokens"])) for body in bodies],
            lambda answer, body: self._response(answer["choices"][0], body),
            on_progress,
        )
        with self._server.as_vllm_answers():
            if self._facts("")["ticket"] != self._ticket:
                raise self._server.error(
                    "was restarted or given other weights while it was sampled from, so no response was kept",
                    "let one run at a time use it, and run again",
                )
        return responses

    def probe(self, token_ids: Sequence[int]) -> list[npt.NDArray[np.float64]]:
        """Log-probability of every token but the first, at temperature 1, from each copy of the model."""
        body = {
            "model": self._agent,
            "prompt": list(token_ids),
            "temperature": 0.0,
            "max_tokens": 1,
            "prompt_logprobs": 0,
        }
        most = completion_bytes(len(token_ids) + 1)
        logprobs = []
        for copy in range(self._settings.vllm.data_parallel):
            rank = {"X-data-parallel-rank": str(copy)}
            with self._server.as_vllm_answers():
                (choice,) = self._server.post(COMPLETIONS, body, rank, most=most)["choices"]
                pairs = zip(token_ids[1:], choice["prompt_logprobs"][1:], strict=True)
                logprobs.append(np.array([entry[str(token)]["logprob"] for token, entry in pairs], dtype=np.float64))
        return logprobs

    def sleep(self) -> bool:
        """Nothing: its memory is its own. But the weights must be loaded again, since others may use it meanwhile."""
        return True

    def close(self) -> None:
        """Nothing: who started the server ends it."""

    def _facts(self, folder: str) -> dict[str, Any]:
        facts: dict[str, Any] = self._call("hacpo_facts", folder)[0]
        return facts

    def _call(self, method: str, *arguments: str) -> list[Any]:
        """A method of `worker_extension.CheckpointReload`, on every worker."""
        answer = self._server.post("/collective_rpc", {"method": method, "args": list(arguments)})
        results: list[Any] = answer["results"]
        return results

    # --- responses ---------------------------------------------------------------------------------------------------

    def _response(self, choice: dict[str, Any], asked: dict[str, Any]) -> SampledResponse:
        """One completion as a sampled response, if the request may have given it: training takes that for granted."""
        token_ids, reported = list(choice["token_ids"]), list(choice["logprobs"]["token_logprobs"])
        with np.errstate(over="ignore"):
            logprobs = np.array(reported, dtype=np.float32)  # which is what they are, written with all their digits
        outside = [token for token in token_ids if type(token) is not int or not 0 <= token < self._rows]
        if outside:
            raise self._server.stranger(f"token {outside[0]!r:.40} of a model that has {self._rows}")
        if not 1 <= len(token_ids) <= asked["max_tokens"]:
            raise self._server.stranger(f"a response of {len(token_ids)} tokens, not of 1 to {asked['max_tokens']}")
        numbers = all(type(value) in (int, float) for value in reported) and np.isfinite(logprobs) & (logprobs <= 0)
        if len(reported) != len(token_ids) or not np.all(numbers):
            raise self._server.stranger("log-probabilities that are not a finite number up to 0 for each token")
        if not self._ends(token_ids, choice["finish_reason"], asked):
            raise self._server.stranger(f"a response that ends otherwise than by {choice['finish_reason']!r:.40}")
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
