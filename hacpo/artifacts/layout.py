"""Where every artifact of a run lives (docs/artifacts.md)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hacpo.artifacts import tables
from hacpo.artifacts.tables import Artifact, owner_dir, step_dir

LOCKS, SAVED, MERGED, SLICES, PRUNED = ".locks", ".saved", ".merged", ".slices", "pruned.json"
BESIDE = (LOCKS, SAVED, MERGED, SLICES, PRUNED)
"""What lies beside a run's artifacts: notes about itself, on which no result depends."""


@dataclass(frozen=True)
class Layout:
    """Paths below the root of a run, `artifacts/<run>`."""

    root: Path

    def path(self, artifact: Artifact, step: int | None = None, agent: str = "") -> Path:
        """One artifact, or the folder of all of a step's where no agent is named, or of all steps' without a step."""
        return self.root / artifact.path("" if step is None else step_dir(step), agent)

    @property
    def settings(self) -> Path:
        """The resolved settings."""
        return self.path(tables.SETTINGS)

    @property
    def data(self) -> Path:
        """All problem sets."""
        return self.path(tables.PROBLEMS)

    def problems(self, name: str) -> Path:
        """One `<set>/<split>`."""
        return self.data / f"{name}.parquet"

    @property
    def schedule(self) -> Path:
        """Every step's problems."""
        return self.path(tables.SCHEDULE)

    def prompts(self, step: int) -> Path:
        """The schedule's rows of one step."""
        return self.path(tables.PROMPTS, step)

    def checkpoint(self, step: int, agent: str) -> Path:
        """A Hugging Face model folder after `step`."""
        return self.path(tables.CHECKPOINT, step, agent)

    def rollouts(self, step: int, agent: str) -> Path:
        """What `agent` sampled."""
        return self.path(tables.ROLLOUTS, step, agent)

    def verdicts(self, step: int, agent: str) -> Path:
        """Rewards of `agent`'s rollouts."""
        return self.path(tables.VERDICTS, step, agent)

    def side_rollouts(self, step: int, agent: str) -> Path:
        """What `agent` sampled for nothing but its capability (`capability.oracle_samples`)."""
        return self.path(tables.SIDE_ROLLOUTS, step, agent)

    def pool(self, step: int, learner: str) -> Path:
        """Every usable rollout in `learner`'s tokens."""
        return self.path(tables.POOL, step, learner)

    def capability(self, step: int) -> Path:
        """Smoothed capability of every agent."""
        return self.path(tables.CAPABILITY, step)

    def advantages(self, step: int, learner: str) -> Path:
        """Advantages of every rollout for `learner`."""
        return self.path(tables.ADVANTAGES, step, learner)

    def trace(self, step: int, agent: str) -> Path:
        """What each rollout contributed to `agent`'s updates."""
        return self.path(tables.TRACE, step, agent)

    def evaluation(self, step: int, agent: str) -> Path:
        """Held-out answers after `step`."""
        return self.path(tables.EVALUATIONS, step, agent)

    def metrics(self, stage: str, step: int, agent: str) -> Path:
        """Flat numbers about one stage's work, as a whole where no agent is named."""
        return self.root / tables.metrics_file(stage, step_dir(step), agent)

    def saved(self, table: str, step: int, agent: str) -> Path:
        """What a stage keeps while it is at work, so that it can go on after a kill; outside every table's folder."""
        return self.root / SAVED / table / step_dir(step) / owner_dir("agent", agent)

    def slices(self, table: str, step: int, agent: str) -> Path:
        """Files of a table that is made by several processes, until all are there; outside every table's folder."""
        return self.root / SLICES / table / step_dir(step) / owner_dir("agent", agent)

    def merged(self, agent: str) -> Path:
        """A checkpoint's adapter merged with its base, while an engine loads it; outside every table's folder."""
        return self.root / MERGED / owner_dir("agent", agent)

    @property
    def locks(self) -> Path:
        """Where who works on the run notes that, and what it is in the middle of."""
        return self.root / LOCKS

    def known_policy(self, step: int, agent: str) -> Path:
        """What a checkpoint's weights hashed to when they were last read or written; DVC and audits pass it by."""
        return self.locks / "policies" / step_dir(step) / f"{agent}.json"

    @property
    def pruned(self) -> Path:
        """The record of pruned checkpoints."""
        return self.root / PRUNED

    @property
    def restoring(self) -> Path:
        """Where pruned checkpoints are trained again, beside the run."""
        return self.root.with_name(f".{self.root.name}.restoring")

    @property
    def report(self) -> Path:
        """The HTML report and the joined metrics."""
        return self.path(tables.REPORT).parent
