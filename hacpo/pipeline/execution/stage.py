"""One invocation of a stage: checked options, its view of the settings, its lock, its progress and its metrics file."""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from hacpo.artifacts import parquet, storage, tables
from hacpo.artifacts.durability import flushing
from hacpo.artifacts.model_folder import config_hash
from hacpo.artifacts.run_files import RunFiles
from hacpo.artifacts.tables import Artifact, step_dir
from hacpo.artifacts.weights import policy_hash
from hacpo.engines.training.processes import launched, leads
from hacpo.errors import ArtifactError, MissingInputError, SettingsError
from hacpo.pipeline.catalogue import RESOLVE, StageSpec, Use, maker_of
from hacpo.pipeline.declared import DeclaredLayout
from hacpo.pipeline.execution.launching import LineProgress
from hacpo.pipeline.execution.session import ConsoleProgress, Session
from hacpo.pipeline.locking.locks import stage_lock
from hacpo.pipeline.noted import POLICY, POLICY_CONFIG
from hacpo.pipeline.policies import check_config, check_policy
from hacpo.pipeline.project import Pipeline
from hacpo.pipeline.records.elsewhere import checkpoint_command
from hacpo.settings import params
from hacpo.settings.agents import INHERITED
from hacpo.settings.root import Settings

if TYPE_CHECKING:
    from hacpo.tokens.tokenizers import ChatTokenizer


@dataclass
class Stage:
    """What a stage's body works with.

    Attributes:
        inputs, outputs: where what it declares to read and to write lies; another place is refused.
        in_place: it works on the run's own files, and not below `--out`.
    """

    spec: StageSpec
    pipeline: Pipeline
    step: int
    agent: str | None
    inputs: DeclaredLayout
    outputs: DeclaredLayout
    in_place: bool
    limit: int | None
    overrides: Sequence[str]
    session: Session
    settings: Settings
    """Only what the stage declares in `hacpo.pipeline.catalogue`; anything else raises AttributeError."""
    metrics: dict[str, float] = field(default_factory=dict)
    policy: str | None = None
    """Hash of the weights in the checkpoint that the stage has made: it stands in the metrics file too."""
    policy_config: str | None = None
    """Hash of what libraries read beside them, likewise."""
    summary: str = "done"
    started: float = field(default_factory=time.perf_counter)
    remarks: Callable[[], Iterable[str]] = tuple
    """Lines to say when the stage is done."""
    _replacing: dict[Path, Path] = field(default_factory=dict)
    """Folders of outputs that are being written -> where."""

    @property
    def name(self) -> str:
        """The stage's name."""
        return self.spec.name

    @property
    def run(self) -> str:
        """The run's name."""
        return self.pipeline.run

    @property
    def mine(self) -> str:
        """The agent or learner whose part of the step this is."""
        assert self.agent is not None
        return self.agent

    @property
    def title(self) -> str:
        """For progress: `generate step 7 ada`."""
        words = [self.name, f"step {self.step}" if self.step else "", self.agent or ""]
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
        made_by = self.pipeline.command_for(maker_of(table), of_step or 0, part)
        return RunFiles(self.run, self.inputs).read(table, of_step, part, columns=columns, made_by=made_by)

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
        rows: Sequence[Mapping[str, Any]] | Mapping[str, Any] | pa.Table,
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
            rows if isinstance(rows, pa.Table) else parquet.to_arrow(table, rows),
            run=self.run,
            partition=table.partition(of_step, part),
            settings=self.spec.recorded(table, self.pipeline.settings, self.agent),
            rows_per_shard=rows_per_shard,
        )

    def note_policy(self, checkpoint: Path) -> str:
        """Have the metrics say what the checkpoint holds that the stage has made; returns the hash of its weights."""
        self.policy, self.policy_config = policy_hash(checkpoint), config_hash(checkpoint)
        return self.policy

    def check_policy(self, step: int, policy: str | None = None) -> None:
        """Refuse the agent's checkpoint of a step if its weights (hash: `policy`), or what is read beside them, are not
        the run's; see `policies`."""
        assert self.agent is not None
        check_policy(self.pipeline, step, self.agent, policy, remembered=self.in_place)

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
            made_by = checkpoint_command(self.pipeline, 0, agent)
            raise MissingInputError("the checkpoint is missing", where=folder, remedy=f"run `{made_by}`")
        check_config(self.pipeline, 0, agent)
        return folder


def _checked(
    spec: StageSpec,
    session: Session | None,
    folder: Path,
    step: int,
    agent: str | None,
    out: Path | None,
    limit: int | None,
    overrides: Sequence[str],
) -> Stage:
    """The stage that the options ask for, if they fit."""
    session = session or (Session(LineProgress()) if launched() or not leads() else Session())
    if (limit is not None or overrides) and out is None:
        raise SettingsError(
            "--limit and --set are for debugging and need --out",
            remedy="add --out DIR, or change params.yaml to change the run itself",
        )
    if limit is not None and limit < 1:
        raise SettingsError("--limit must be at least 1", found=limit)
    resolves = spec.makes(tables.SETTINGS)  # from params.yaml alone, every key of it
    for override in () if resolves else overrides:
        _check_read(spec, agent, override.partition("=")[0].strip())
    pipeline = Pipeline.open(folder, overrides, within=session.driver)
    if overrides and not resolves:
        _check_changes(spec, agent, Pipeline.open(folder, within=True).settings, pipeline.settings)
    _check_part(pipeline, step, agent, steps_from=1 if spec.at == "step" else 0)
    if out is None and not resolves:
        check_resolved(pipeline)
    if out is not None:
        _check_outside(out, pipeline)
    run, place = pipeline.layout.root, (spec, pipeline.settings, step, agent or "")
    return Stage(
        spec=spec,
        pipeline=pipeline,
        step=step,
        agent=agent,
        inputs=DeclaredLayout(run, "reads", *place),
        outputs=DeclaredLayout(run if out is None else out, "writes", *place),
        in_place=out is None,
        limit=limit,
        overrides=overrides,
        session=session,
        settings=params.restrict(pipeline.settings, spec.settings, agent),
    )


@contextlib.contextmanager
def open_stage(
    spec: StageSpec,
    session: Session | None,
    folder: Path,
    *,
    step: int = 0,
    agent: str | None = None,
    out: Path | None = None,
    limit: int | None = None,
    overrides: Sequence[str] = (),
) -> Iterator[Stage]:
    """Open a stage, and write its metrics when its body ends well.

    Args:
        step, agent: which part of the run; checked against the settings.
        out: write below this folder instead of `artifacts/<run>`; nothing of the run is touched.
        limit, overrides: for debugging; both need `out`, so that the run's own files always follow params.yaml.

    Raises:
        SettingsError: an option does not fit.
        BusyError: `hacpo run` works on this pipeline.
    """
    stage = _checked(spec, session, folder, step, agent, out, limit, overrides)
    session = stage.session
    lock_name = "-".join(filter(None, [spec.name, f"{step:04d}", agent]))
    held = session.driver or out is not None or launched() or not leads()
    with contextlib.ExitStack() as stack:
        stack.enter_context(flushing(stage.pipeline.settings.disk.fsync))
        if not held:
            stack.enter_context(stage_lock(stage.pipeline.layout, lock_name))
        if isinstance(session.progress, ConsoleProgress):
            stack.enter_context(session.progress.showing(stage.title))
        if gpu := _gpu():
            gpu.reset_peak_memory_stats()
        yield stage
        stage.metrics["seconds"] = round(time.perf_counter() - stage.started, 4)
        # A stage that other processes computed has theirs.
        stage.metrics.setdefault("peak_memory_mib", round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1))
        if gpu := _gpu():
            stage.metrics.setdefault("peak_gpu_memory_mib", round(gpu.max_memory_allocated() / 2**20, 1))
        if spec.metrics and leads():
            made = {POLICY: stage.policy, POLICY_CONFIG: stage.policy_config}
            made = {key: value for key, value in made.items() if value is not None}
            storage.write_json(stage.outputs.metrics(spec.name, step, agent or ""), {**stage.metrics, **made})
            if made and stage.in_place:
                stage.check_policy(step, stage.policy)
    session.progress.finished(stage.title, f"{stage.summary} ({stage.metrics['seconds']:.1f} s)")
    for line in stage.remarks():
        session.progress.remark(line)


def _check_part(pipeline: Pipeline, step: int, agent: str | None, *, steps_from: int) -> None:
    """The run has such an agent and such a step."""
    settings = pipeline.settings
    if agent is not None and agent not in settings.agents:
        known = ", ".join(settings.agents)
        raise SettingsError(f"no agent {agent!r} in params.yaml", where=pipeline.folder, expected=f"one of {known}")
    if not steps_from <= step <= settings.steps:
        raise SettingsError(
            "--step is out of range", where=pipeline.folder, expected=f"{steps_from} to {settings.steps}", found=step
        )


def _gpu() -> Any:
    """`torch.cuda` where this process uses it; a stage without torch does not import it for this."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized() else None


def _check_read(spec: StageSpec, agent: str | None, key: str) -> None:
    """An override that the stage does not read would silently do nothing."""
    read = ["agents" if known == "agent_names" else known for known in params.tracked(spec.settings, agent)]
    mine = [known.removeprefix(f"agents.{agent}.") for known in read]
    read += [known for known in mine if known.partition(".")[0] in INHERITED and known not in read]
    dotted = f"{key}."
    if key != "algorithm.recipe" and not any(dotted.startswith(f"{r}.") or f"{r}.".startswith(dotted) for r in read):
        raise SettingsError(f"{spec.name} does not read this setting", where=f"--set {key}", expected=", ".join(read))


def _check_changes(spec: StageSpec, agent: str | None, before: Settings, after: Settings) -> None:
    """Overrides of what this agent has a value of its own for, or of another agent's, would silently do nothing."""
    changed = params.dump(before) != params.dump(after)
    if changed and params.reads(before, spec.settings, agent) == params.reads(after, spec.settings, agent):
        whom = f"{spec.name} of {agent}" if agent else spec.name
        raise SettingsError(f"{whom} reads nothing that this changes", where="--set", remedy="name the agent's own key")


def check_resolved(pipeline: Pipeline) -> None:
    """The run's files follow `settings.json`, which DVC tracks: params.yaml must still say the same.

    Raises:
        MissingInputError: there is no settings.json yet.
        ArtifactError: it is damaged.
        SettingsError: params.yaml says something else.
    """
    path = pipeline.layout.settings
    command = pipeline.command_for(RESOLVE)
    if not path.is_file():
        raise MissingInputError("the resolved settings are missing", where=path, remedy=f"run `{command}`")
    try:
        resolved = params.recorded(path)
    except ValueError:
        raise ArtifactError("not readable as JSON", where=path, remedy=f"run `{command}`") from None
    if resolved != params.dump(pipeline.settings):
        raise SettingsError(
            "has changed since the settings were resolved",
            where=pipeline.folder / "params.yaml",
            remedy=f"`hacpo run` repeats what depends on it; for this stage alone, first `{command}`",
        )


def _check_outside(out: Path, pipeline: Pipeline) -> None:
    run, target = pipeline.layout.root.resolve(), out.resolve()
    if target.is_relative_to(run) or run.is_relative_to(target):
        raise SettingsError("--out must lie outside the run's own artifacts", where=out, remedy="name another folder")
