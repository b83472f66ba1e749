"""From a command's options to a stage at work: what is refused, its lock, its metrics file."""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hacpo.artifacts import storage, tables
from hacpo.artifacts.durability import flushing
from hacpo.artifacts.slices import Slice
from hacpo.engines.training.processes import launched, leads
from hacpo.errors import ArtifactError, MissingInputError, SettingsError
from hacpo.pipeline.catalogue import RESOLVE, StageSpec
from hacpo.pipeline.declared import DeclaredLayout
from hacpo.pipeline.execution.launching import LineProgress
from hacpo.pipeline.execution.session import ConsoleProgress, Session
from hacpo.pipeline.execution.stage import Stage
from hacpo.pipeline.locking.locks import stage_lock
from hacpo.pipeline.noted import POLICY, POLICY_CONFIG
from hacpo.pipeline.project import Pipeline
from hacpo.settings import params
from hacpo.settings.agents import INHERITED
from hacpo.settings.root import Settings


def _checked(
    spec: StageSpec,
    session: Session | None,
    folder: Path,
    step: int,
    agent: str | None,
    out: Path | None,
    limit: int | None,
    shard: str | None,
    overrides: Sequence[str],
) -> tuple[Pipeline, Stage]:
    """The run and its stage that the options ask for, if they fit."""
    session = session or (Session(LineProgress()) if launched() or not leads() else Session())
    if (limit is not None or overrides) and out is None:
        raise SettingsError(
            "--limit and --set are for debugging and need --out",
            remedy="add --out DIR, or change params.yaml to change the run itself",
        )
    if limit is not None and limit < 1:
        raise SettingsError("--limit must be at least 1", found=limit)
    resolves = spec.makes(tables.SETTINGS)  # from params.yaml alone, every key of it
    whole = any(use.artifact == tables.SETTINGS for use in (*spec.reads, *spec.writes))
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
    return pipeline, Stage(
        spec=spec,
        _pipeline=pipeline,
        step=step,
        agent=agent,
        inputs=DeclaredLayout(run, "reads", *place),
        outputs=DeclaredLayout(run if out is None else out, "writes", *place),
        in_place=out is None,
        limit=limit,
        slice=None if shard is None else Slice.parse(shard),
        overrides=overrides,
        session=session,
        settings=pipeline.settings if whole else params.restrict(pipeline.settings, spec.settings, agent),
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
    shard: str | None = None,
    overrides: Sequence[str] = (),
) -> Iterator[Stage]:
    """Open a stage, and write its metrics when its body ends well.

    Args:
        step, agent: which part of the run; checked against the settings.
        out: write below this folder instead of `artifacts/<run>`; nothing of the run is touched.
        shard: make only some files of the table (`hacpo.artifacts.slices`); the stage's metrics come with all of them.
        limit, overrides: for debugging; both need `out`, so that the run's own files always follow params.yaml.

    Raises:
        SettingsError: an option does not fit.
        BusyError: `hacpo run` works on this pipeline.
    """
    pipeline, stage = _checked(spec, session, folder, step, agent, out, limit, shard, overrides)
    session = stage.session
    lock_name = "-".join(filter(None, [spec.name, f"{step:04d}", agent, shard and shard.replace("/", "-")]))
    held = session.driver or out is not None or launched() or not leads()
    with contextlib.ExitStack() as stack:
        if not session.driver:
            stack.callback(session.close)
        stack.enter_context(flushing(pipeline.settings.disk.fsync))
        if not held:
            stack.enter_context(stage_lock(pipeline.layout, lock_name))
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
        if spec.metrics and leads() and stage.slice is None:
            made = {POLICY: stage.policy, POLICY_CONFIG: stage.policy_config}
            made = {key: value for key, value in made.items() if value is not None}
            storage.write_json(stage.outputs.metrics(spec.name, step, agent or ""), {**stage.metrics, **made})
            if made and stage.in_place:
                stage.check_policy(step, stage.policy)
    session.progress.finished(stage.title, f"{stage.summary} ({stage.metrics['seconds']:.1f} s)")
    for line in stage.remarks(pipeline, step):
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
    read = ["agents" if known == "agent_names" else known for known in params.declared(spec.settings, agent)]
    read += ["seed"] if "start_seed" in read else []  # which is the run's where nothing else is said
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
