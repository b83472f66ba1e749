"""What has to be sampled and learned: responses and tokens per step, per evaluation and in the whole run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hacpo.settings.root import Settings
from hacpo.tools.estimate.lengths import Lengths


@dataclass(frozen=True)
class Drawn:
    """Responses that one agent samples at a time, and their tokens on average and at most."""

    responses: int
    prompt_tokens: float
    tokens: float
    most_tokens: int


@dataclass(frozen=True)
class AgentWork:
    """One agent's work.

    Attributes:
        step: rollouts of one step that are learned from.
        side: responses of one step's side sample (`capability.oracle_samples`).
        evaluation: answers of one evaluation, all benchmarks together.
        pooled: responses in one step's pool: its own and, when sharing, everybody's.
        pooled_tokens: their tokens on average, prompts included. A response is taken to have as many tokens for a
            learner as it had for its source.
        learned: responses that one step's updates see, each as often as passes go over it; where they are chosen
            (`rollouts.select`), at most.
        learned_tokens: their tokens, as those of the pool.
        updates: optimizer updates of one step.
    """

    step: Drawn
    side: Drawn
    evaluation: Drawn
    pooled: int
    pooled_tokens: float
    learned: int
    learned_tokens: float
    updates: int


@dataclass(frozen=True)
class Work:
    """All agents' work, and how often it is repeated.

    Attributes:
        evaluations: at the start, every so many steps, and at the end.
    """

    agents: dict[str, AgentWork]
    steps: int
    evaluations: int

    def rollouts(self) -> int:
        """Responses sampled for training, in all, side samples included: the cost that recipes are compared by."""
        return self.steps * sum(agent.step.responses for agent in self.agents.values()) + self.side()

    def side(self) -> int:
        """Of these, responses of side samples: sampled for capability alone."""
        return self.steps * sum(agent.side.responses for agent in self.agents.values())

    def answers(self) -> int:
        """Responses sampled to evaluate, in all."""
        return self.evaluations * sum(agent.evaluation.responses for agent in self.agents.values())

    def learned(self) -> int:
        """Responses in all updates of all agents."""
        return self.steps * sum(agent.learned for agent in self.agents.values())

    def sampled_tokens(self) -> float:
        """Response tokens sampled in all, for training and to evaluate, on average."""
        return self._sampled(lambda part: part.tokens)

    def most_sampled_tokens(self) -> int:
        """The same, if every response is as long as it may be."""
        return int(self._sampled(lambda part: part.most_tokens))

    def _sampled(self, tokens: Callable[[Drawn], float]) -> float:
        return sum(
            self.steps * (tokens(agent.step) + tokens(agent.side)) + self.evaluations * tokens(agent.evaluation)
            for agent in self.agents.values()
        )

    def learned_tokens(self) -> float:
        """Tokens of all responses in all updates, prompts included."""
        return self.steps * sum(agent.learned_tokens for agent in self.agents.values())


def _learned(settings: Settings, others: int) -> tuple[float, float]:
    """Responses of one's own and of so many others that a pass over a step sees, at most."""
    rollouts, prompts, each = settings.algorithm.rollouts, settings.batch.prompts, settings.responses_per_prompt
    if rollouts.select == "sample":
        own, external = rollouts.groups_drawn(prompts)
        return own * each, min(external, others * prompts) * each
    return prompts * each, prompts if rollouts.select == "rescue" and others else others * prompts * each


def _tokens(learner: Lengths, sources: list[Lengths]) -> float:
    """Of one response of the sources, on average, the learner's prompt included."""
    return learner.prompt + sum(source.response for source in sources) / len(sources) if sources else 0.0


def drawn(responses: int, lengths: Lengths) -> Drawn:
    """So many responses of such lengths."""
    return Drawn(responses, responses * lengths.prompt, responses * lengths.response, responses * lengths.most_response)


def together(parts: list[Drawn]) -> Drawn:
    """All of them."""
    return Drawn(
        sum(part.responses for part in parts),
        sum(part.prompt_tokens for part in parts),
        sum(part.tokens for part in parts),
        sum(part.most_tokens for part in parts),
    )


def workload(
    settings: Settings,
    training: Mapping[str, Lengths],
    benchmarks: Mapping[str, Mapping[str, tuple[int, Lengths]]],
    *,
    evaluations: int,
) -> Work:
    """The work of a run.

    Args:
        training: agent -> lengths of its rollouts.
        benchmarks: agent -> benchmark -> responses of one evaluation, and their lengths.
        evaluations: how many there are.
    """
    responses = settings.batch.prompts * settings.responses_per_prompt
    rollouts = settings.algorithm.rollouts
    agents = {}
    for name, lengths in training.items():
        sources = list(training.values()) if rollouts.share else [lengths]
        tokens = responses * sum(lengths.prompt + source.response for source in sources)
        others = [source for agent, source in training.items() if agent != name and rollouts.share]
        own, cross = _learned(settings, len(others))
        agents[name] = AgentWork(
            step=drawn(responses, lengths),
            side=drawn(settings.batch.prompts * (settings.algorithm.capability.oracle_samples or 0), lengths),
            evaluation=together([drawn(*part) for part in benchmarks[name].values()]),
            pooled=responses * len(sources),
            pooled_tokens=tokens,
            learned=round(own + cross) * rollouts.passes,
            learned_tokens=(own * _tokens(lengths, [lengths]) + cross * _tokens(lengths, others)) * rollouts.passes,
            updates=settings.updates_per_step,
        )
    return Work(agents, settings.steps, evaluations)
