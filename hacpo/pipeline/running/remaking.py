"""Finished training is not made again unawares: most checkpoints are not in DVC's cache, and are lost when overwritten.

What surely re-trains is known from the settings, before anything is written. The rest (a problem file, a model folder,
a verifier that judges otherwise) shows when a stage that makes or uses a checkpoint is about to run although it is
recorded. More steps, other retention, a resumed run and outputs that are merely gone change no finished step.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hacpo.artifacts import storage
from hacpo.artifacts.storage import disk_bytes
from hacpo.artifacts.tables import CHECKPOINT, ROLLOUTS, SIDE_ROLLOUTS
from hacpo.artifacts.text_files import load_json
from hacpo.errors import RemakeError, StorageError
from hacpo.phrases import mebibytes, ranges
from hacpo.pipeline.catalogue import PIPELINE
from hacpo.pipeline.project import Pipeline
from hacpo.pipeline.records.bookkeeping import Books
from hacpo.pipeline.records.order import agent_of, spec_of
from hacpo.pipeline.records.seen import notes_folder
from hacpo.pipeline.retention.pruned import checkpoints_there
from hacpo.settings import params

_SURE = tuple(spec for spec in PIPELINE if spec.makes(CHECKPOINT, ROLLOUTS, SIDE_ROLLOUTS))
"""Stages whose settings change what is trained. Of the others (prompts, verdicts, pool, advantages) the files tell."""


@dataclass
class Remaking:
    """Asks before the first finished training step is made again.

    Attributes:
        agreed: the user has said yes. Noted until the run is done, so that a killed one resumes unasked; outside the
            project, for what came with somebody's files is not this user's word.
        told: what was agreed to, in words, for the driver to say.
    """

    pipeline: Pipeline
    books: Books
    agreed: bool
    told: list[str] = field(default_factory=list)
    _settled: bool = False

    def check_settings(self) -> None:
        """Compare params.yaml with the settings that the run's files were made with.

        Raises:
            RemakeError: stages that train, or sample what is learned from, read something that has changed.
        """
        try:
            before = params.recorded(self.pipeline.layout.settings)
            changes = _changes(before, params.dump(self.pipeline.settings))
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return  # a first run, or a file that is made anew
        if changes:
            shared = self.pipeline.settings.algorithm.rollouts.coupled
            key = next(iter(next(iter(changes.values()))))
            self._ask(1, self.pipeline.settings.agents if shared else changes, f"{key} has changed")

    def check_stage(self, step: int, stage: Any) -> None:
        """Look at a stage that is not current, before anything of it is touched. The caller has the books `open`.

        Raises:
            RemakeError: it would make something else than it has made.
        """
        if spec_of(stage) in _SURE and (why := self.books.difference(stage)) is not None:
            self._ask(max(step, 1), self._taught_by(stage), why)

    def _taught_by(self, stage: Any) -> Collection[str]:
        """The agents that train on what a stage makes, and on what its like make that differ too."""
        if self.pipeline.settings.algorithm.rollouts.coupled:
            return self.pipeline.settings.agents
        like = [other for other in self.books.stages(Path(stage.path)) if spec_of(other) == spec_of(stage)]
        return [agent_of(other) for other in like if self.books.difference(other) is not None]

    def done(self) -> None:
        """The run is through: the next one asks again."""
        if self._note is not None:
            storage.remove(self._note)

    @functools.cached_property
    def _note(self) -> Path | None:
        folder = notes_folder(self.pipeline, self.books)
        return folder / "remaking.json" if folder is not None else None

    def _ask(self, first: int, agents: Collection[str], why: str) -> None:
        if self._settled:
            return
        layout, last = self.pipeline.layout, self.pipeline.settings.steps
        trained = [step for step in range(first, last + 1) for agent in agents if layout.trace(step, agent).is_file()]
        if not trained:
            return
        agreed_to = {"settings": _digest(params.dump(self.pipeline.settings))}
        lost = [
            layout.checkpoint(step, agent)
            for agent in agents
            for step in checkpoints_there(layout, agent)
            if step >= first
        ]
        count = f"{len(lost)} checkpoint{'s' if len(lost) != 1 else ''}"
        steps = sorted(set(trained))
        what = (
            f"step{'s' if len(steps) > 1 else ''} {ranges(steps)} of {', '.join(agents)} would be trained again, and "
            f"{count} ({mebibytes(sum(map(disk_bytes, lost)))}) overwritten, because {why}"
        )
        if self.agreed:
            if self._note is not None:
                with contextlib.suppress(StorageError):  # then a killed run asks again
                    storage.write_json(self._note, agreed_to)
        elif self._note is None or _read(self._note) != agreed_to:
            remedy = f"add --yes to do that, or change it back (`{self.pipeline.command('copy')} NEW` makes a variant)"
            raise RemakeError(what, where=self.pipeline.folder, remedy=remedy)
        self._settled = True
        self.told.append(what.replace("would be", "are"))


def _changes(before: dict[str, Any], now: dict[str, Any]) -> dict[str, list[str]]:
    """Agent -> dotted keys, with old and new value, that its training reads and that differ."""
    changed = sorted(params.changed(before, now).items())
    changes: dict[str, list[str]] = {}
    for agent in now["agents"]:
        if agent not in before["agents"]:
            continue  # nothing was trained yet, and whom it joins learn it from `agent_names`
        read = tuple(f"{key}." for spec in _SURE for key in params.declared(spec.settings, agent))
        if keys := [(key, values) for key, values in changed if f"{key}.".startswith(read)]:
            changes[agent] = [f"{key} ({json.dumps(was)} -> {json.dumps(new)})" for key, (was, new) in keys]
    return changes


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _read(path: Path) -> Any:
    try:
        return load_json(path)
    except (OSError, ValueError):
        return None
