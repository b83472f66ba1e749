"""The supervised warm start of a tiny agent: skill in arithmetic everywhere, a habit of showing steps in some families.

Two kinds of text, drawn afresh for every optimizer step from the training side of the hash split alone:

- drills, rows of arithmetic facts (`8+7=15 24/4=6 ...`) of which the results are learned. An agent that does not know
  its facts has nothing to gain from writing steps, and reinforcement learning stays flat;
- solutions, prompt and response exactly as in a rollout, of which the response is learned. Most show their steps, now
  and then with a planted slip; the others are guesses, a box with the right number or a neighbour of it.

Whether a response starts with a box or with a step is a habit; which digit a step starts with is a skill. Of the first
tokens from which the habit is learned, the share `guessing` of the family are boxes, but no more than `_MOST_GUESSES`
of its texts are guesses: of the other texts, many teach their first token only as a choice among all tokens but the
box. So an agent can work out every family and yet hardly ever does so in its weak ones, where a few responses in a
hundred are all that reinforcement learning has to find; or it meets them in another agent's rollouts.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.nn.functional import cross_entropy

from hacpo.artifacts.problem_rows import Problem
from hacpo.data import gym, tasks
from hacpo.data.tiny_vocabularies import BOX
from hacpo.engines.models.tiny import build_model, build_tokenizer
from hacpo.errors import SettingsError
from hacpo.seeds import derive_seed
from hacpo.settings.agents import TinySettings, WarmupSettings

OnUpdate = Callable[[int, int, float], None]
"""Called with (optimizer steps done, steps in all, loss of the last one)."""

_IGNORED = -100  # the target that torch's cross entropy leaves out
_BETAS = (0.9, 0.95)
_MAX_GRAD_NORM = 1.0
_RISING_SHARE = 0.05  # share of the steps in which the learning rate rises to its peak
_FACTS_PER_DRILL = 4
_MOST_GUESSES = 0.4  # guesses carry little to learn; more of them would take the place of worked solutions


@dataclass(frozen=True)
class Text:
    """One row to train on.

    Attributes:
        token_ids: the whole row.
        targets: as long; the token itself where it is learned, `_IGNORED` elsewhere.
        given_no_box: where in the row a token is learned as a choice among all tokens but the box; None if nowhere.
    """

    token_ids: list[int]
    targets: list[int]
    given_no_box: int | None = None


class Corpus:
    """Draws texts, without end, from the problems that are not held out.

    Args:
        name: the agent's, for messages.
        settings: the shares of drills, guesses and slips, and the longest row.
        tokenizer: the agent's own.
        seed: which texts are drawn, in which order.

    Raises:
        SettingsError: `guessing` names an unknown task family, or `context` is too short for the tasks.
    """

    def __init__(self, name: str, settings: TinySettings, tokenizer: Any, seed: int) -> None:
        families = tuple(settings.warmup.mixture) or tasks.FAMILIES
        for family in settings.warmup.guessing:
            if family not in families:
                raise SettingsError(
                    f"unknown task family {family!r}",
                    where=f"agents.{name}.tiny.warmup.guessing",
                    expected=" or ".join(families),
                )
        self._settings = settings.warmup
        self._random = random.Random(seed)
        self._tokenizer = tokenizer
        self._problems = _families(settings.warmup)
        steps = {step for family in self._problems for problem in family for step in tasks.steps_of(problem)}
        self._facts = [self._fact(step) for step in sorted(steps, key=str)]
        self._prompt = cache(self._encode_prompt)
        self._encode = cache(self._encode_text)
        every = [problem for family in self._problems for problem in family]
        longest = max(len(self._prompt(problem.problem)) + len(self._encode(problem.solution)) + 1 for problem in every)
        if longest > settings.context:
            raise SettingsError(
                "too short for the tasks",
                where=f"agents.{name}.tiny.context",
                expected=f"at least {longest}",
                found=settings.context,
            )

    def draw(self) -> Text:
        """The next text."""
        return self._drill() if self._random.random() < self._settings.drills else self._solution()

    def _drill(self) -> Text:
        facts = self._random.choices(self._facts, k=_FACTS_PER_DRILL)
        start = self._tokenizer.convert_tokens_to_ids("<assistant>")
        return Text(
            [start, *(token for fact in facts for token in fact.token_ids)],
            [_IGNORED, *(target for fact in facts for target in fact.targets)],
        )

    def _fact(self, step: tasks.Step) -> Text:
        # The space after the result is learned with it: it says that the number ends there.
        given, learned = self._encode_text(f"{step.expression}="), self._encode_text(f"{step.result} ")
        return Text(given + learned, [_IGNORED] * len(given) + learned)

    def _solution(self) -> Text:
        family = self._random.choice(self._problems)
        problem = self._random.choice(family)
        guessing = self._settings.guessing.get(problem.subject or "", 0.0)
        guesses = min(guessing, _MOST_GUESSES)
        prompt = self._prompt(problem.problem)
        if self._random.random() < guesses:
            response, teaches_habit = tasks.boxed(self._guess(problem, family)), True
        else:
            # Of all first tokens that teach the habit, the share `guessing` must be boxes.
            teaching = guesses * (1 - guessing) / (guessing * (1 - guesses)) if guessing else 1.0
            response, teaches_habit = self._worked(problem), self._random.random() < teaching
            teaches_habit |= response.startswith(BOX)  # no steps: a choice among all but the box cannot be the box
        token_ids = [*self._encode(response), self._tokenizer.eos_token_id]
        targets = [_IGNORED] * len(prompt) + token_ids
        return Text(prompt + token_ids, targets, None if teaches_habit else len(prompt))

    def _guess(self, problem: Problem, family: Sequence[Problem]) -> object:
        """The right number or a neighbour of it; where the answer is no number, that of any problem of the family."""
        try:
            return self._near(int(problem.answer), (-1, 0, 1))
        except ValueError:
            return self._random.choice(family).answer

    def _worked(self, problem: Problem) -> str:
        steps = tasks.steps_of(problem)
        if self._random.random() >= self._settings.slips or not steps:
            return problem.solution or ""
        last = tasks.Step(steps[-1].expression, self._near(steps[-1].result, (-2, -1, 1, 2)))
        return tasks.worked([*steps[:-1], last], last.result)

    def _near(self, number: int, distances: Sequence[int]) -> int:
        near = [number + distance for distance in distances]
        return self._random.choice([other for other in near if other >= 0 or number < 0])

    def _encode_prompt(self, problem: str) -> list[int]:
        messages = [{"role": "user", "content": problem}]
        token_ids: list[int] = self._tokenizer.apply_chat_template(
            messages, tokenize=True, add_generation_prompt=True, return_dict=False
        )
        return token_ids

    def _encode_text(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])


def _families(settings: WarmupSettings) -> list[Sequence[Problem]]:
    """The problems of each family on the training side of its split."""
    if not settings.mixture:
        return [tasks.family_problems(family, "train") for family in tasks.FAMILIES]
    # Which ones does not follow from the run's seed: agents of other seeds have learned the same facts.
    made = gym.problems(settings.mixture, "train", settings.problems, seed=0)
    return [[problem for problem in made if problem.subject == task] for task in settings.mixture]


def warm_start(
    name: str,
    settings: TinySettings,
    seed: int,
    directory: Path,
    on_progress: OnUpdate | None = None,
    limit: int | None = None,
) -> dict[str, float]:
    """Make an agent from scratch and write it to `directory` as a Hugging Face model folder.

    The same name, settings and seed give the same bytes; torch's global random generator is left as found.

    Args:
        name: the agent's; agents of different names differ, whatever else they share.
        settings: architecture, vocabulary and the warm start itself.
        seed: initial weights and texts derive from it.
        directory: an existing, empty folder.
        on_progress: called after every optimizer step.
        limit: stop after so many optimizer steps, as if the schedule were that short.

    Returns:
        `loss` (nats per learned token, mean over the last tenth of the steps), `steps`, `texts`, `tokens` (of all rows,
        without padding), `parameters`, `seconds` (of training).

    Raises:
        SettingsError: an unknown task family, or a context too short for the tasks.
    """
    tokenizer = build_tokenizer(settings)
    corpus = Corpus(name, settings, tokenizer, derive_seed(seed, name, "texts"))
    model = build_model(settings, tokenizer, derive_seed(seed, name, "weights"))
    box = tokenizer.convert_tokens_to_ids(BOX)

    def learn() -> tuple[float, int]:
        texts = [corpus.draw() for _ in range(settings.warmup.batch_size)]
        return backward(model, texts, box), sum(len(text.token_ids) for text in texts)

    model.train()
    metrics = fit(model, learn, settings.warmup, on_progress, limit)
    model.eval()
    model.save_pretrained(str(directory))
    for file in directory.iterdir():
        file.chmod(0o644)  # safetensors makes files that only their owner may read
    tokenizer.save_pretrained(str(directory))
    return metrics


class Schedule(Protocol):
    """What `fit` is told of a warm start."""

    @property
    def steps(self) -> int:
        """Optimizer steps."""

    @property
    def batch_size(self) -> int:
        """Texts of each."""

    @property
    def learning_rate(self) -> float:
        """The peak."""


def fit(
    model: Any,
    learn: Callable[[], tuple[float, int]],
    settings: Schedule,
    on_progress: OnUpdate | None = None,
    limit: int | None = None,
) -> dict[str, float]:
    """Train all of a model's weights with AdamW; gives the metrics of `warm_start`.

    Args:
        learn: adds the gradients of one step's texts; returns the loss per learned token, and the texts' tokens.
        limit: see `warm_start`.
    """
    steps = min(settings.steps, limit or settings.steps)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, betas=_BETAS, weight_decay=0.0, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: _learning_rate_factor(done, steps))
    started = time.perf_counter()
    losses = []
    tokens = 0
    for step in range(1, steps + 1):
        loss, held = learn()
        losses.append(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), _MAX_GRAD_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        tokens += held
        if on_progress:
            on_progress(step, steps, losses[-1])
    last = losses[-max(1, steps // 10) :]
    return {
        "loss": sum(last) / len(last),
        "steps": steps,
        "texts": steps * settings.batch_size,
        "tokens": tokens,
        "parameters": model.num_parameters(),
        "seconds": time.perf_counter() - started,
    }


def backward(model: Any, texts: Sequence[Text], box: int) -> float:
    """Add the gradient of the mean loss per learned token; two passes, each padded to its own longest row.

    Args:
        model: the agent's.
        texts: one optimizer step's.
        box: the token that starts a guess.

    Returns:
        The loss, in nats per learned token.
    """
    learned = sum(target != _IGNORED for text in texts for target in text.targets)
    total = 0.0
    for part in _two_widths(texts):
        width = len(part[-1].token_ids)
        # Causal attention never looks ahead, so padding at the end needs no mask.
        token_ids = torch.tensor([text.token_ids + [0] * (width - len(text.token_ids)) for text in part])
        targets = torch.tensor([text.targets + [_IGNORED] * (width - len(text.targets)) for text in part])
        given_no_box = torch.tensor([-1 if text.given_no_box is None else text.given_no_box for text in part])
        no_box = torch.arange(width) == given_no_box.unsqueeze(1)  # [rows, width]
        hidden = model.base_model(input_ids=token_ids, use_cache=False).last_hidden_state
        scored = targets[:, 1:] != _IGNORED
        logits = model.get_output_embeddings()(hidden[:, :-1][scored])  # [learned tokens, vocabulary]
        is_box = torch.arange(logits.shape[1]) == box
        logits = logits.masked_fill(no_box[:, 1:][scored].unsqueeze(1) & is_box, float("-inf"))
        loss = cross_entropy(logits, targets[:, 1:][scored], reduction="sum") / learned
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    return total


def _two_widths(texts: Sequence[Text]) -> list[list[Text]]:
    """The texts by length, cut in two where the least padding remains (in one part if there is nothing to gain)."""
    ordered = sorted(texts, key=lambda text: len(text.token_ids))
    lengths = [len(text.token_ids) for text in ordered]
    count = len(ordered)
    cut = min(range(1, count + 1), key=lambda cut: cut * lengths[cut - 1] + (count - cut) * lengths[-1])
    return [part for part in (ordered[:cut], ordered[cut:]) if part]


def _learning_rate_factor(done: int, steps: int) -> float:
    """Linear rise, then half a cosine down to zero; `done` counts finished optimizer steps."""
    rising = max(1, round(_RISING_SHARE * steps))
    if done < rising:
        return (done + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (done - rising + 1) / (steps - rising + 1)))
