"""Where every artifact of a run lives (ARTIFACTS, "The artifact contract")."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


def step_dir(step: int) -> str:
    """`step=0007`: zero-padded, so that names sort by step."""
    return f"step={step:04d}"


@dataclass(frozen=True)
class Layout:
    """Paths below the root of a run, `artifacts/<run>`."""

    root: Path

    @property
    def settings(self) -> Path:
        """The resolved settings."""
        return self.root / "settings.json"

    @property
    def data(self) -> Path:
        """All problem sets."""
        return self.root / "data"

    def problems(self, name: str) -> Path:
        """One `<set>/<split>`."""
        return self.root / "data" / f"{name}.parquet"

    @property
    def schedule(self) -> Path:
        """Every step's problems."""
        return self.root / "schedule.parquet"

    def prompts(self, step: int) -> Path:
        """The schedule's rows of one step."""
        return self.root / "prompts" / step_dir(step)

    def checkpoint(self, step: int, agent: str) -> Path:
        """A Hugging Face model folder after `step`."""
        return self.root / "checkpoints" / step_dir(step) / f"agent={agent}"

    def rollouts(self, step: int, agent: str) -> Path:
        """What `agent` sampled."""
        return self.root / "rollouts" / step_dir(step) / f"agent={agent}"

    def verdicts(self, step: int, agent: str) -> Path:
        """Rewards of `agent`'s rollouts."""
        return self.root / "verdicts" / step_dir(step) / f"agent={agent}"

    def side_rollouts(self, step: int, agent: str) -> Path:
        """What `agent` sampled for nothing but its capability (`capability.oracle_samples`)."""
        return self.root / "side_rollouts" / step_dir(step) / f"agent={agent}"

    def side_verdicts(self, step: int, agent: str) -> Path:
        """Rewards of `agent`'s side sample."""
        return self.root / "side_verdicts" / step_dir(step) / f"agent={agent}"

    def pool(self, step: int, learner: str) -> Path:
        """Every usable rollout in `learner`'s tokens."""
        return self.root / "pool" / step_dir(step) / f"learner={learner}"

    def capability(self, step: int) -> Path:
        """Smoothed capability of every agent."""
        return self.root / "capability" / step_dir(step) / "capability.parquet"

    def advantages(self, step: int, learner: str) -> Path:
        """Advantages of every rollout for `learner`."""
        return self.root / "advantages" / step_dir(step) / f"learner={learner}"

    def trace(self, step: int, agent: str) -> Path:
        """What each rollout contributed to `agent`'s updates."""
        return self.root / "updates" / step_dir(step) / f"agent={agent}" / "trace.parquet"

    def evaluation(self, step: int, agent: str) -> Path:
        """Held-out answers after `step`."""
        return self.root / "evaluations" / step_dir(step) / f"agent={agent}"

    def metrics(self, stage: str, step: int, agent: str) -> Path:
        """Flat numbers about one stage's work."""
        return self.root / "metrics" / stage / step_dir(step) / f"{agent}.json"

    def saved(self, table: str, step: int, agent: str) -> Path:
        """What a stage keeps while it is at work, so that it can go on after a kill; outside every table's folder."""
        return self.root / ".saved" / table / step_dir(step) / f"agent={agent}"

    def merged(self, agent: str) -> Path:
        """A checkpoint's adapter merged with its base, while an engine loads it; outside every table's folder."""
        return self.root / ".merged" / f"agent={agent}"

    def known_policy(self, step: int, agent: str) -> Path:
        """What a checkpoint's weights hashed to when they were last read or written; DVC and audits pass it by."""
        return self.root / ".locks" / "policies" / step_dir(step) / f"{agent}.json"

    @property
    def pruned(self) -> Path:
        """The record of pruned checkpoints."""
        return self.root / "pruned.json"

    @property
    def restoring(self) -> Path:
        """Where pruned checkpoints are trained again, beside the run."""
        return self.root.with_name(f".{self.root.name}.restoring")

    @property
    def report(self) -> Path:
        """The HTML report and the joined metrics."""
        return self.root / "report"


def partition(step: int, **agent: str) -> str:
    """What `hacpo.partition` says: `step=0007/agent=ada`."""
    return "/".join([step_dir(step), *(f"{key}={name}" for key, name in agent.items())])
