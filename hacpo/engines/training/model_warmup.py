"""The short supervised warm-up of a model that exists, before step 0: worked solutions, asked in its own chat template.

It makes another state of a model: of two agents that start from one, one may have met some families of tasks, and how
their answers are written, before reinforcement learning begins. Prompts are rendered and responses encoded as in a
rollout, losses are the log-probabilities that updates use, and all weights are trained, in float32: also those of an
agent with a LoRA adapter, which then begins beside the model that has been warmed up.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from hacpo.artifacts.problem_rows import Problem
from hacpo.data import gym, tasks
from hacpo.engines.models.checkpoint import save_model
from hacpo.engines.models.safe_load import load_whole
from hacpo.engines.training.logprobs import collate, token_logprobs
from hacpo.engines.training.warm_start import OnUpdate, fit
from hacpo.errors import SettingsError
from hacpo.seeds import derive_seed
from hacpo.settings.agents import ModelWarmupSettings
from hacpo.tokens.prompts import check_template, prompt_token_ids
from hacpo.tokens.tokenizers import ChatTokenizer

_ROWS = 8
"""Texts of a forward pass; a step's gradients add up over its passes."""

Text = tuple[list[int], list[int]]
"""Token ids of a prompt, and of the response that is learned, its EOS included."""


class Solutions:
    """Draws prompts with worked solutions, without end, from the problems that are not held out.

    Args:
        name: the agent's, for messages.
        tokenizer: the agent's own.
        seed: which texts are drawn, in which order.

    Raises:
        SettingsError: `families` names an unknown one, the longest text is longer than the model's context, or
            reasoning-gym is not installed.
        ModelError, DataError: the chat template does not render the prompts.
    """

    def __init__(self, name: str, settings: ModelWarmupSettings, tokenizer: ChatTokenizer, seed: int) -> None:
        where = f"agents.{name}.warmup"
        for family in settings.families:
            if family not in tasks.FAMILIES:
                expected = " or ".join(tasks.FAMILIES)
                raise SettingsError(f"unknown task family {family!r}", where=f"{where}.families", expected=expected)
        check_template(tokenizer, f"{name}.warmup", settings.prompt)
        self._prompt, self._tokenizer = settings.prompt, tokenizer
        self._random = random.Random(seed)
        self._families = _families(settings)
        self._encode = cache(self._encoded)
        if tokenizer.context_length is None:
            return
        # The longest in characters: rendering all takes minutes, and only what is drawn is needed.
        every = [problem for family in self._families for problem in family]
        longest = max(every, key=lambda problem: len(problem.problem))
        needed = sum(map(len, self._encode(longest)))
        if needed > tokenizer.context_length:
            raise SettingsError(
                "the model's context is too short for these problems",
                where=where,
                expected=f"at least {needed} tokens",
                found=tokenizer.context_length,
            )

    def draw(self) -> Text:
        """The next text."""
        return self._encode(self._random.choice(self._random.choice(self._families)))

    def _encoded(self, problem: Problem) -> Text:
        response = self._tokenizer.encode(problem.solution or tasks.boxed(problem.answer))
        return prompt_token_ids(self._tokenizer, problem, self._prompt), [*response, self._tokenizer.eos_token_id]


def _families(settings: ModelWarmupSettings) -> list[Sequence[Problem]]:
    if not settings.mixture:
        return [tasks.family_problems(family, "train") for family in settings.families or tasks.FAMILIES]
    made = gym.problems(settings.mixture, "train", settings.problems, seed=0)  # as in the warm start of tiny agents
    return [[problem for problem in made if problem.subject == task] for task in settings.mixture]


def warm_up(
    name: str,
    settings: ModelWarmupSettings,
    seed: int,
    folder: Path,
    on_progress: OnUpdate | None = None,
    limit: int | None = None,
) -> dict[str, float]:
    """Train the model in a folder, and put its weights in the place of those that are there, in their own dtypes.

    The same folder, name, settings and seed give the same bytes on the same kind of processor. Trained is on a GPU
    where torch sees one. A parameter takes 16 bytes of memory meanwhile.

    Args:
        name: the agent's; agents of different names draw other texts.
        folder: a model folder that answers chat prompts; its weights may be links, which are replaced.
        on_progress, limit: as of `warm_start`.

    Returns:
        As `warm_start`.

    Raises:
        SettingsError, ModelError, DataError: see `Solutions`.
    """
    tokenizer = ChatTokenizer(folder)
    texts = Solutions(name, settings, tokenizer, derive_seed(seed, name, "texts"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_whole(folder, dtype="auto")
    dtypes = {key: parameter.dtype for key, parameter in model.named_parameters()}
    for parameter in model.parameters():
        # A copy: weights are views into a mapped file, whose alignment can change the last bit of a product.
        parameter.data = parameter.data.to(device, torch.float32, copy=True)
    model = model.to(device).eval()  # no dropout, as in updates

    def learn() -> tuple[float, int]:
        drawn = [texts.draw() for _ in range(settings.batch_size)]
        return _backward(model, drawn, tokenizer.pad_token_id, device), sum(len(p) + len(r) for p, r in drawn)

    metrics = fit(model, learn, settings, on_progress, limit)
    for key, parameter in model.named_parameters():
        parameter.data = parameter.data.to("cpu", dtypes[key])
    _replace(model, folder)
    return metrics


def _backward(model: Any, texts: Sequence[Text], pad: int, device: torch.device) -> float:
    """Add the gradient of the mean loss per learned token; returns the loss, in nats."""
    learned = sum(len(response) for _, response in texts)
    ordered = sorted(texts, key=lambda text: len(text[0]) + len(text[1]))
    total = 0.0
    for start in range(0, len(ordered), _ROWS):
        batch = collate(ordered[start : start + _ROWS], pad, device)
        loss = -token_logprobs(model, batch, 1.0).sum() / learned
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    return total


def _replace(model: Any, folder: Path) -> None:
    """Put a model's weights in the place of those in its folder, in new files: the old may be links to somebody's."""
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig()  # the folder's file stays as it is, whatever it says
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        save_model(model, Path(scratch), folder)
        for old in (*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")):
            old.unlink()
        for new in (*Path(scratch).glob("*.safetensors"), *Path(scratch).glob("*.safetensors.index.json")):
            shutil.move(new, folder / new.name)
