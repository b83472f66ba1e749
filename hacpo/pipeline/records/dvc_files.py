"""Stamping the DVC files of a run: one small dvc.yaml per step, and one for what belongs to no step.

DVC rewrites a whole dvc.lock after every stage, so one file per step keeps a long run linear. The step files differ
only in `step` and `prev` (the first step has no predecessor's capability, and only some steps are evaluated). What
a stage reads and writes, and which settings re-run it, is `hacpo.pipeline.catalogue`'s to say; DVC tracks settings key
by key in the `resolve` stage's output, `artifacts/<run>/settings.json`.

DVC knows of no stage that is not stamped: with more steps in params.yaml than files here it would make nothing of them
and call that up to date. So `resolve`, which params.yaml re-runs and which everything hangs on, refuses where the files
are not those of params.yaml (`hacpo.pipeline.records.stamp_check`). Its command carries a digest of them, because DVC
would otherwise not run it for settings that it has seen before, but restore what it made of them then.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from hacpo.artifacts.storage import atomic
from hacpo.artifacts.tables import CHECKPOINT, metrics_file, step_dir, step_named
from hacpo.artifacts.text_files import read_bytes, read_text
from hacpo.errors import SettingsError
from hacpo.pipeline.catalogue import PIPELINE, RESOLVE, StageSpec, Use, step_stages
from hacpo.pipeline.project import Pipeline
from hacpo.pipeline.records.order import step_file, step_files
from hacpo.settings import params
from hacpo.settings.root import Settings

_HEADER = "# Stamped by `hacpo plan pipelines/{run}` from params.yaml; change that, not this.\n"
_UNCACHED = "          cache: false"
_CACHED = re.compile(rf"      - artifacts/\S+/{CHECKPOINT.folder}/{step_named('[^:]+')}")
"""A checkpoint among the outputs, without a flag."""
_STEP, _PREVIOUS, _AGENT = step_named("${step}"), step_named("${prev}"), "${item.agent}"


def _place(use: Use, settings: Settings, step: str, agent: str, *, written: bool = False) -> str:
    """What a stage uses, below `artifacts/<run>`; what it writes as the whole folder that its file lies in.

    Args:
        step: how the folder of its own step is spelled.
        agent: how its agent is.
    """
    artifact = use.artifact
    if use.only is not None:
        return f"{artifact.folder}/{use.only(settings)}"
    [(steps, whose)] = use.parts([""], agent, (step, _PREVIOUS, step_dir(0)))
    as_folder = artifact.per != "run" and (written or use.whose == "all")
    return artifact.within(steps or "", whose) if as_folder else artifact.path(steps or "", whose)


def _entry(
    pipeline: Pipeline,
    spec: StageSpec,
    step: int,
    *,
    below: int,
    agent: str = "",
    options: str = "",
    cached: bool = False,
) -> str:
    """A stage in a dvc.yaml that lies `below` so many folders under the pipeline's.

    Args:
        agent: it is this agent's alone: where agents differ in more than their name.
        cached: whether its checkpoints are in DVC's cache for once; see `cached_steps`.
    """
    settings, run, root = pipeline.settings, pipeline.run, f"artifacts/{pipeline.run}"
    templated = spec.at in ("step", "evaluation")
    own, agents = agent or _AGENT, ", ".join(f"'{name}'" for name in settings.agents)
    folder = _STEP if templated else step_dir(0)
    words = [" --step ${step}"] if templated else []
    words += [] if spec.per == "run" else [f" --{spec.per} {own}"]
    words += [" --side"] if spec.side else []
    places = [_place(use, settings, folder, own) for use in spec.reads if use.holds(settings, step)]
    deps = [*spec.outside(pipeline, agent), *(f"{root}/{place}" for place in dict.fromkeys(places))]
    keys = params.tracked(settings, spec.settings, own)
    outs = [_place(use, settings, folder, own, written=True) for use in spec.writes if use.artifact != CHECKPOINT]
    outs += [metrics_file(spec.name, folder, "" if spec.per == "run" else own)] if spec.metrics else []
    uncached = [_place(use, settings, folder, own, written=True) for use in spec.writes if use.artifact == CHECKPOINT]
    lines = [f"  {spec.name}{agent and f'-{agent}'}:"]
    lines += [f"    matrix: {{agent: [{agents}]}}"] if spec.per != "run" and not agent else []
    lines += [f"    wdir: {'/'.join(['..'] * (1 + len(run.split('/')) + below))}"]
    lines += [f"    cmd: hacpo {spec.command} pipelines/{run}{''.join(words)}{options}"]
    lines += ["    deps:", *(f"      - {dep}" for dep in deps)] if deps else []
    lines += ["    params:", f"      - {root}/settings.json:"] if keys else []
    lines += [f"          - {key}" for key in keys]
    lines += ["    outs:", *(f"      - {root}/{out}" for out in outs)]
    for out in uncached:
        lines += [f"      - {root}/{out}"] if cached else [f"      - {root}/{out}:", _UNCACHED]
    return "\n".join(lines) + "\n"


def _run_file(pipeline: Pipeline, digest: str) -> str:
    once = [spec for spec in PIPELINE if spec.at in ("before", "after")]
    stamped = {RESOLVE: f" --stamped {digest}"}
    entries = [_entry(pipeline, spec, 0, below=0, options=stamped.get(spec, "")) for spec in once]
    return _file(pipeline, "", entries)


def _step_file(pipeline: Pipeline, step: int, *, cached: bool) -> str:
    entries = [
        _entry(pipeline, spec, step, below=2, agent=agent, cached=cached)
        for spec in step_stages(pipeline.settings, step)
        for agent in (pipeline.settings.agents if spec.at == "start" else [""])
    ]
    return _file(pipeline, f"vars:\n  - {{step: '{step:04d}', prev: '{max(step - 1, 0):04d}'}}\n", entries)


def _file(pipeline: Pipeline, variables: str, entries: Iterable[str]) -> str:
    return f"{_HEADER.format(run=pipeline.run)}{variables}stages:\n{''.join(entries)}"


def _digest(texts: Iterable[str]) -> str:
    """A short digest of DVC files, without the settings that they track: which those are is the code's to say, but for
    those that are tracked where they are set."""
    tracked = " " * 10 + "- "
    lines = (
        line
        for text in texts
        for line in text.splitlines()
        if not line.startswith(tracked) or line.rpartition(".")[2].removeprefix(tracked) in params.TRACKED_WHERE_SET
    )
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def rendered(pipeline: Pipeline) -> dict[Path, str]:
    """Every DVC file of the run and its content. Which checkpoints are in DVC's cache is as the files say that are
    there: settings alone do not tell."""
    cached = cached_steps(pipeline)
    steps = {step: _step_file(pipeline, step, cached=step in cached) for step in range(pipeline.settings.steps + 1)}
    plain = {step: _step_file(pipeline, step, cached=False) if step in cached else text for step, text in steps.items()}
    digest = _digest([_run_file(pipeline, ""), *plain.values()])
    files = {pipeline.folder / "dvc.yaml": _run_file(pipeline, digest)}
    return files | {step_file(pipeline, step): text for step, text in steps.items()}


def cached_steps(pipeline: Pipeline) -> set[int]:
    """The steps whose checkpoints, those of all agents, DVC has in its cache, as the DVC files say.

    It is a flag of the output and no part of a lock: whether it is set re-runs nothing.
    """
    return {int(path.parent.name) for path in step_files(pipeline) if _names_cached(path)}


def is_cached(pipeline: Pipeline, step: int) -> bool:
    """Whether a step is one of `cached_steps`."""
    return _names_cached(step_file(pipeline, step))


def _names_cached(path: Path) -> bool:
    """Whether a step's DVC file names a checkpoint as output, and none that is not to be cached. One that is cut off
    or cannot be read says nothing."""
    try:
        text = read_text(path)
    except (OSError, ValueError):
        return False
    lines = text.splitlines()
    return text.endswith("\n") and _UNCACHED not in lines and any(map(_CACHED.fullmatch, _outs(lines)))


def _outs(lines: Iterable[str]) -> Iterator[str]:
    within = False
    for line in lines:
        if line.startswith("    ") and not line.startswith("     "):
            within = line == "    outs:"
        elif within:
            yield line


def _says(path: Path, text: str) -> bool:
    with contextlib.suppress(OSError):
        return read_bytes(path) == text.encode()
    return False


def set_cached(pipeline: Pipeline, step: int, *, cached: bool) -> None:
    """Say in a step's DVC file whether its checkpoints are in DVC's cache."""
    with atomic(step_file(pipeline, step)) as scratch:
        scratch.write_text(_step_file(pipeline, step, cached=cached), encoding="utf-8")


def stamp(pipeline: Pipeline) -> list[Path]:
    """Write the run's DVC files; returns those that changed, removed ones included.

    Steps beyond T leave the pipeline but keep their locks and artifacts: a run made shorter can be made longer again.

    Raises:
        SettingsError: an agent's model folder or chat template is an output of this very run.
    """
    for name, agent in pipeline.settings.agents.items():
        for key, given in (("model", agent.model), ("chat_template", agent.chat_template)):
            if given is not None and Path(given).is_relative_to(f"artifacts/{pipeline.run}"):
                raise SettingsError("an agent cannot start from its own run's output", where=f"agents.{name}.{key}")
    _ignore_artifacts(pipeline)
    files = rendered(pipeline)
    changed = [path for path, text in files.items() if not _says(path, text)]
    for path in changed:
        with atomic(path) as scratch:
            scratch.write_text(files[path], encoding="utf-8")
    for extra in step_files(pipeline):
        if extra not in files:
            extra.unlink()
            changed.append(extra)
    return changed


def _ignore_artifacts(pipeline: Pipeline) -> None:
    """In a git repository, have git leave artifacts alone, as DVC would: but DVC does it output by output, with files
    in folders that other stages read by then."""
    root, ignoring = pipeline.root.resolve(), pipeline.root / "artifacts" / ".gitignore"
    if not ignoring.exists() and any((folder / ".git").exists() for folder in (root, *root.parents)):
        with atomic(ignoring) as scratch:
            scratch.write_text("*\n", encoding="utf-8")
