"""What a stage's body works with: its view of the settings, its inputs and outputs, its progress, its metrics."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from hacpo.artifacts import parquet, slices, storage, tables
from hacpo.artifacts.model_folder import config_hash
from hacpo.artifacts.row_stream import Pieces
from hacpo.artifacts.run_files import RunFiles
from hacpo.artifacts.slices import Slice, Staging
from hacpo.artifacts.tables import Artifact, step_dir
from hacpo.artifacts.weights import policy_hash
from hacpo.errors import MissingInputError
from hacpo.pipeline.catalogue import StageSpec, Use, maker_of
from hacpo.pipeline.declared import DeclaredLayout
from hacpo.pipeline.execution.launching import launch
from hacpo.pipeline.execution.session import Session
from hacpo.pipeline.execution.slicing import made_of
from hacpo.pipeline.noted import POLICY, POLICY_CONFIG, stage_metrics
from hacpo.pipeline.policies import check_config, check_policy
from hacpo.pipeline.project import Pipeline
from hacpo.pipeline.records.elsewhere import checkpoint_command
from hacpo.pipeline.records.stamp_check import check_stamped
from hacpo.settings.root import Settings

if TYPE_CHECKING:
    from hacpo.tokens.tokenizers import ChatTokenizer


@dataclass
class Stage:
    """What a stage's body works with. The run itself (`_pipeline`) is not for bodies: by it they could read what their
    entry in the catalogue does not name.

    Attributes:
        inputs, outputs: where what it declares to read and to write lies; another place is refused.
        in_place: it works on the run's own files, and not below `--out`.
        slice: which files of its table it makes; None: all that are not there.
    """

    spec: StageSpec
    _pipeline: Pipeline
    step: int
    agent: str | None
    inputs: DeclaredLayout
    outputs: DeclaredLayout
    in_place: bool
    limit: int | None
    slice: Slice | None
    overrides: Sequence[str]
    session: Session
    settings: Settings
    """Only what the stage declares in `hacpo.pipeline.catalogue`; anything else raises AttributeError. All of them for
    one that reads or writes settings.json as a whole."""
    metrics: dict[str, float] = field(default_factory=dict)
    policy: str | None = None
    """Hash of the weights in the checkpoint that the stage has made: it stands in the metrics file too."""
    policy_config: str | None = None
    """Hash of what libraries read beside them, likewise."""
    summary: str = "done"
    started: float = field(default_factory=time.perf_counter)
    remarks: Callable[[Pipeline, int], Iterable[str]] = lambda _pipeline, _step: ()
    """Lines to say of the run and the step when the stage is done."""
    _replacing: dict[Path, Path] = field(default_factory=dict)
    """Folders of outputs that are being written -> where."""

    @property
    def name(self) -> str:
        """The stage's name."""
        return self.spec.name

    @property
    def run(self) -> str:
        """The run's name."""
        return self._pipeline.run

    @property
    def folder(self) -> Path:
        """The pipeline's folder: for messages, and for what the user lays beside params.yaml."""
        return self._pipeline.folder

    @property
    def root(self) -> Path:
        """The project's root, from which its own files are named."""
        return self._pipeline.root

    @property
    def mine(self) -> str:
        """The agent or learner whose part of the step this is."""
        assert self.agent is not None
        return self.agent

    @property
    def title(self) -> str:
        """For progress: `generate step 7 ada`."""
        words = [self.name, f"step {self.step}" if self.step else "", self.agent or "", str(self.slice or "")]
        return " ".join(word for word in words if word)

    def progress(self, done: int, total: int, **facts: float) -> None:
        """Tell how far the stage is."""
        self.session.progress.report(self.title, done, total, facts)

    def place(self, artifact: Artifact, agent: str | None = None, step: int | None = None) -> Path:
        """Where an artifact lies that the stage reads: of this step and agent unless others are named.

        Raises:
            UndeclaredError: the catalogue does not say so, and DVC would not re-run the stage for it.
        """
        return self.inputs.path(artifact, *self._part(artifact, agent, step))

    def _part(self, artifact: Artifact, whose: str | None, step: int | None) -> tuple[int | None, str]:
        """Step of an artifact, and whose it is (`RunFiles`): of this step and agent unless others are named."""
        if whose is None:
            whose = self.agent or "" if artifact.per in ("agent", "learner") else ""
        return None if artifact.per == "run" else self.step if step is None else step, whose

    def checkpoint(self, step: int, agent: str | None = None) -> Path:
        """An agent's checkpoint (its own unless another is named) that the stage reads."""
        return self.place(tables.CHECKPOINT, agent, step)

    def read(
        self,
        table: tables.Table,
        whose: str | None = None,
        *,
        step: int | None = None,
        columns: Sequence[str] | None = None,
    ) -> pa.Table:
        """Read and check an input table of this run: of this step and agent unless others are named.

        Args:
            whose: an agent or a learner; of the problems the name of the set, `<set>/<split>`.

        Raises:
            UndeclaredError: the stage does not declare it.
            MissingInputError, ArtifactError: see `parquet.read_table`.
        """
        of_step, part = self._part(table, whose, step)
        made_by = self.made_by(table, whose, step=step)
        return RunFiles(self.run, self.inputs).read(table, of_step, part, columns=columns, made_by=made_by)

    def shards(
        self,
        table: tables.Table,
        whose: str | None = None,
        *,
        columns: Sequence[str] | None = None,
        rows: range | None = None,
    ) -> Iterator[pa.Table]:
        """An input table of this step one shard after another; arguments and errors as for `read`.

        Args:
            rows: only these; shards with none of them are not read.
        """
        of_step, part = self._part(table, whose, None)
        files, made_by = RunFiles(self.run, self.inputs), self.made_by(table, whose)
        for shard in files.shards(table, of_step, part, columns=columns, rows=rows, made_by=made_by):
            first = 0 if rows is None else max(rows.start - shard.first, 0)
            end = len(shard.content) if rows is None else min(rows.stop - shard.first, len(shard.content))
            yield shard.content.slice(first, end - first)

    def made_by(self, artifact: Artifact, whose: str | None = None, *, step: int | None = None) -> str:
        """The command that makes, or brings, an artifact: of this step and agent unless others are named."""
        of_step, part = self._part(artifact, whose, step)
        if artifact == tables.CHECKPOINT:
            return checkpoint_command(self._pipeline, of_step or 0, part)
        return self._pipeline.command_for(maker_of(artifact), of_step or 0, part)

    @contextlib.contextmanager
    def replacing(self, artifact: Artifact) -> Iterator[Path]:
        """A folder that takes an output's place as a whole when the block ends: what the stage makes of an artifact, be
        it all steps' or all agents'. `write` puts tables into it meanwhile.

        Raises:
            UndeclaredError: the stage does not declare it.
            StorageError: see `storage.atomic`.
        """
        use = next((use for use in self.spec.writes if use.artifact == artifact), Use(artifact))
        step = None if use.step == "all" else self.step
        whose = "" if use.whose == "all" else self.agent or ""
        self.outputs.path(artifact, step, whose)
        folder = self.outputs.root / artifact.within("" if step is None else step_dir(step), whose)
        with storage.atomic(folder) as scratch:
            scratch.mkdir()
            self._replacing[folder] = scratch
            try:
                yield scratch
            finally:
                del self._replacing[folder]

    def write(
        self,
        table: tables.Table,
        rows: Sequence[Mapping[str, Any]] | Mapping[str, Any] | pa.Table | Pieces,
        *,
        whose: str | None = None,
        step: int | None = None,
        rows_per_shard: int | None = None,
    ) -> None:
        """Write an output table of this run with the settings that the stage read (`StageSpec.recorded`).

        Args:
            whose, step: see `read`.

        Raises:
            UndeclaredError: the stage does not declare it.
            StorageError: see `storage.atomic`.
        """
        of_step, part = self._part(table, whose, step)
        path = RunFiles(self.run, self.outputs).path(table, of_step, part)
        for folder, scratch in self._replacing.items():
            if path.is_relative_to(folder):
                path = scratch / path.relative_to(folder)
        parquet.write_table(
            path,
            table,
            rows if isinstance(rows, pa.Table | Pieces) else parquet.to_arrow(table, rows),
            run=self.run,
            partition=table.partition(of_step, part),
            settings=self.spec.recorded(table, self._pipeline.settings, self.agent),
            rows_per_shard=rows_per_shard,
        )

    def make(
        self,
        table: tables.Table,
        rows: int,
        content: Callable[[range], Mapping[str, Any] | pa.Table | Pieces],
    ) -> bool:
        """Write the output table of this step, with what slices have left of it; or a slice's files. Returns whether
        the table is there, so that metrics can be made of it.

        Args:
            rows: of the whole table.
            content: makes some of them; they do not depend on which are made together.

        Raises:
            UndeclaredError: the stage does not declare it.
            StorageError: see `storage.atomic`.
        """
        size, begun = self.settings.storage.rows_per_shard, self.outputs.slices(table.name, self.step, self.mine)
        if self.slice is None and not begun.is_dir():
            self.write(table, content(range(rows)), rows_per_shard=size)
            return True
        of_step, part = self._part(table, None, None)
        inputs = made_of(self.spec, self._pipeline, self.step, self.mine, self.limit, self.overrides)
        staging = Staging(
            begun / slices.digest(inputs),
            table,
            rows,
            size,
            run=self.run,
            partition=table.partition(of_step, part),
            settings=self.spec.recorded(table, self._pipeline.settings, self.agent),
        )
        made = 0
        for missing in staging.missing(None if self.slice is None else self.slice.shards(staging.shards)):
            some = content(missing)
            staging.write(missing, some if isinstance(some, pa.Table | Pieces) else parquet.to_arrow(table, some))
            made += len(missing)
        if self.slice is not None:
            self.metrics["seconds"] = round(time.perf_counter() - self.started, 4)
            staging.report(self.slice, self.metrics)
            self.summary = f"{made} of {rows} rows"
            return False
        for numbers in staging.reported():
            for key in ("seconds", *(key for key in numbers if key.endswith("_seconds"))):
                name = "slices_seconds" if key == "seconds" else key
                self.metrics[name] = round(self.metrics.get(name, 0.0) + numbers.get(key, 0.0), 4)
        staging.publish(RunFiles(self.run, self.outputs).path(table, of_step, part))
        return True

    def made(self, table: tables.Table, columns: Sequence[str]) -> pa.Table:
        """Some columns of the output table of this step, which has been made."""
        of_step, part = self._part(table, None, None)
        return RunFiles(self.run, self.outputs).read(table, of_step, part, columns=columns)

    def note_policy(self, checkpoint: Path) -> str:
        """Have the metrics say what the checkpoint holds that the stage has made; returns the hash of its weights."""
        self.policy, self.policy_config = policy_hash(checkpoint), config_hash(checkpoint)
        return self.policy

    def check_policy(self, step: int, policy: str | None = None) -> None:
        """Refuse the agent's checkpoint of a step if its weights (hash: `policy`), or what is read beside them, are not
        the run's; see `policies`."""
        check_policy(self._pipeline, step, self.mine, policy, remembered=self.in_place)

    def open_tokenizer(self, agent: str) -> ChatTokenizer:
        """An agent's tokenizer (the same at every step)."""
        return self.session.models.tokenizer(self.start(agent))

    def start(self, agent: str) -> Path:
        """The folder of an agent's first checkpoint, for its config and tokenizer.

        Raises:
            MissingInputError: it is not there yet.
            ArtifactError: they are not those that the run's files were made with.
        """
        folder = self.checkpoint(0, agent)
        if not folder.is_dir():
            made_by = self.made_by(tables.CHECKPOINT, agent, step=0)
            raise MissingInputError("the checkpoint is missing", where=folder, remedy=f"run `{made_by}`")
        check_config(self._pipeline, 0, agent)
        return folder

    def check_stamped(self) -> None:
        """Refuse where the run's DVC files are not those of params.yaml; see `stamp_check`."""
        check_stamped(self._pipeline)

    def launch(self) -> None:
        """Let several processes do all of it (`launching.launch`); the first of them writes everything, its metrics
        too, which are this stage's."""
        arguments = [str(self.folder), "--step", str(self.step), "--agent", self.mine]
        arguments += ["--out", str(self.outputs.root)] if not self.in_place else []
        arguments += ["--limit", str(self.limit)] if self.limit is not None else []
        for override in self.overrides:
            arguments += ["--set", override]
        self.session.free_models()
        launch(self._pipeline.settings, self.root, arguments, self.session.progress, self.title)
        written = stage_metrics(self.outputs, self.spec, self.step, self.mine, strict=True)
        self.policy, self.policy_config = (written.pop(key, None) for key in (POLICY, POLICY_CONFIG))
        self.metrics |= written
