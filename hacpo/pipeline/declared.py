"""Where a stage's inputs lie, and its outputs: nothing but what its entry in the catalogue names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hacpo.artifacts import tables
from hacpo.artifacts.layout import Layout
from hacpo.artifacts.tables import Artifact, step_dir
from hacpo.pipeline.catalogue import StageSpec, Use
from hacpo.settings.root import Settings


class UndeclaredError(RuntimeError):
    """A stage opens what its entry in the catalogue does not name: a fault of ours, by which DVC would serve stale
    results."""


@dataclass(frozen=True, eq=False)
class DeclaredLayout(Layout):
    """The paths of artifacts that a stage declares. Every other one raises UndeclaredError: a missing dependency fails
    at once, and not as a stale result some day.

    Attributes:
        verb: `reads` or `writes`, what the stage does with them.
        at: the stage's step.
        mine: its agent or learner; empty if it serves all.
    """

    verb: Literal["reads", "writes"]
    spec: StageSpec
    _run_settings: Settings
    at: int
    mine: str

    def path(self, artifact: Artifact, step: int | None = None, agent: str = "") -> Path:
        """See `Layout.path`."""
        self._check(artifact, step, agent, artifact.path("" if step is None else step_dir(step), agent))
        return super().path(artifact, step, agent)

    def problems(self, name: str) -> Path:
        """See `Layout.problems`."""
        path = Layout(self.root).problems(name)
        self._check(tables.PROBLEMS, None, "", path.relative_to(self.root).as_posix())
        return path

    def metrics(self, stage: str, step: int, agent: str) -> Path:
        """See `Layout.metrics`. A stage that leaves metrics leaves its own."""
        path = super().metrics(stage, step, agent)
        if not (self.verb == "writes" and self.spec.metrics and stage == self.spec.name):
            self._check(tables.METRICS, None, "", path.relative_to(self.root).as_posix())
        return path

    def _check(self, artifact: Artifact, step: int | None, agent: str, place: str) -> None:
        declared = any(
            use.holds(self._run_settings, self.at)
            and use.covers(artifact, step, agent, at=self.at, mine=self.mine)
            and (use.only is None or place == f"{artifact.folder}/{use.only(self._run_settings)}")
            for use in self._uses
        )
        if not declared:
            raise UndeclaredError(f"{self.spec.name} {self.verb} {place}, which its entry does not say")

    @property
    def _uses(self) -> Sequence[Use]:
        return self.spec.reads if self.verb == "reads" else self.spec.writes
