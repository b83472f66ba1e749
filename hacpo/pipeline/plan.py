"""Stamping the DVC files of a run: one small dvc.yaml per step, and one for what belongs to no step.

DVC rewrites a whole dvc.lock after every stage, so one file per step keeps a long run linear. The step files differ
only in `step` and `prev` (the first step has no predecessor's capability, and only some steps are evaluated). Which
settings re-run a stage is `hacpo.settings.READS`; DVC tracks them key by key in the `resolve` stage's output,
`artifacts/<run>/settings.json`.

DVC knows of no stage that is not stamped: with more steps in params.yaml than files here it would make nothing of them
and call that up to date. So `resolve`, which params.yaml re-runs and which everything hangs on, refuses where the files
are not those of params.yaml (`hacpo.pipeline.stamped`). Its command carries a digest of them, because DVC would
otherwise not run it for settings that it has seen before, but restore what it made of them then.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from hacpo import settings as settings_of
from hacpo.config import AgentSettings, Settings
from hacpo.errors import SettingsError
from hacpo.model_source import hub_repository
from hacpo.pipeline.order import step_file, step_files
from hacpo.pipeline.project import Pipeline
from hacpo.reward_function import module_file
from hacpo.schema import atomic

_HEADER = "# Stamped by `hacpo plan pipelines/{run}` from params.yaml; change that, not this.\n"
_UNCACHED = "          cache: false"


@dataclass(frozen=True)
class _StageEntry:
    """One stage of a dvc.yaml; paths are below `artifacts/<run>` unless they are `outside` it."""

    name: str
    options: str
    reads: str
    deps: tuple[str, ...]
    outs: tuple[str, ...]
    uncached: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()
    metrics: str = ""
    matrix: bool = False
    agent: str = ""
    """A stage of this agent alone, where agents differ in more than their name."""
    cached: bool = False
    """Whether `uncached` outs are in DVC's cache for once; see `cached_steps`."""

    def render(self, pipeline: Pipeline, below: int) -> str:
        """The stage in a dvc.yaml that lies `below` so many folders under the pipeline's."""
        run, root = pipeline.run, f"artifacts/{pipeline.run}"
        up = "/".join([".."] * (1 + len(run.split("/")) + below))
        agents = ", ".join(f"'{name}'" for name in pipeline.settings.agents)
        keys = settings_of.tracked(self.reads, self.agent or "${item.agent}") if self.reads else []
        lines = [f"  {self.name}{self.agent and f'-{self.agent}'}:"]
        lines += [f"    matrix: {{agent: [{agents}]}}"] if self.matrix else []
        lines += [f"    wdir: {up}", f"    cmd: hacpo {self.name.removeprefix('side_')} pipelines/{run}{self.options}"]
        deps = [*self.outside, *(f"{root}/{dep}" for dep in self.deps)]
        lines += ["    deps:", *(f"      - {dep}" for dep in deps)] if deps else []
        lines += ["    params:", f"      - {root}/settings.json:"] if keys else []
        lines += [f"          - {key}" for key in keys]
        outs = [*self.outs, f"metrics/{self.metrics}"] if self.metrics else self.outs
        lines += ["    outs:", *(f"      - {root}/{out}" for out in outs)]
        for out in self.uncached:
            lines += [f"      - {root}/{out}"] if self.cached else [f"      - {root}/{out}:", _UNCACHED]
        return "\n".join(lines) + "\n"


def evaluated(settings: Settings, step: int) -> bool:
    """Whether the agents are evaluated after `step`: at the start, every so many steps, and at the end."""
    return step % settings.evaluation.every == 0 or step == settings.steps


def _reward_file(pipeline: Pipeline) -> tuple[str, ...]:
    """The module of the run's reward function, where it is a file of the project: editing it re-runs what calls it."""
    verification = pipeline.settings.verification
    file = None if verification.is_math else module_file(verification.reward, pipeline.root)
    return () if file is None else (file.as_posix(),)


def _bases(pipeline: Pipeline, step: int) -> tuple[str, ...]:
    """The weights that the checkpoint of a step leaves to its base, which is that of step 0: if any agent trains an
    adapter."""
    adapters = any(agent.adapter is not None for agent in pipeline.settings.agents.values())
    return ("checkpoints/step=0000/agent=${item.agent}",) if adapters and step > 0 else ()


def _evaluate(pipeline: Pipeline, step: int) -> _StageEntry:
    return _StageEntry(
        "evaluate",
        " --step ${step} --agent ${item.agent}",
        "evaluate",
        ("data", "checkpoints/step=${step}/agent=${item.agent}", *_bases(pipeline, step)),
        ("evaluations/step=${step}/agent=${item.agent}",),
        outside=_reward_file(pipeline),
        metrics="evaluate/step=${step}/${item.agent}.json",
        matrix=True,
    )


def _run_file(pipeline: Pipeline, digest: str) -> str:
    settings = pipeline.settings
    sources = tuple(source.path for source in settings.data.sets.values() if source.path is not None)
    entries = [
        _StageEntry("resolve", f" --stamped {digest}", "", (), ("settings.json",), outside=pipeline.settings_files),
        _StageEntry(
            "prepare",
            "",
            "prepare",
            (),
            ("data", "schedule.parquet", "prompts"),
            outside=sources,
            metrics="prepare/step=0000/all.json",
        ),
        _StageEntry(
            "report",
            "",
            "report",
            (
                "settings.json",
                "data",
                "schedule.parquet",
                "checkpoints/step=0000",
                *("rollouts", "verdicts", "capability", "pool", "advantages", "updates", "evaluations", "metrics"),
            ),
            ("report/index.html", "report/curves.csv", "report/metrics.json"),
        ),
    ]
    return _file(pipeline, "", entries, below=0)


def _folder(pipeline: Pipeline, agent: AgentSettings) -> str | None:
    """The model folder an agent starts from; a model on the hub is no file that DVC could follow."""
    return None if hub_repository(agent.model, pipeline.root) is not None else agent.model


def _start_file(pipeline: Pipeline, *, cached: bool) -> str:
    warmups = [
        _StageEntry(
            "warmup",
            f" --agent {name}",
            "warmup",
            (),
            (),
            uncached=(f"checkpoints/step=0000/agent={name}",),
            outside=tuple(path for path in (_folder(pipeline, agent), agent.chat_template) if path is not None),
            metrics=f"warmup/step=0000/{name}.json",
            agent=name,
            cached=cached,
        )
        for name, agent in pipeline.settings.agents.items()
    ]
    return _templated(pipeline, 0, [*warmups, _evaluate(pipeline, 0)])


def _side_sample(pipeline: Pipeline, generate: _StageEntry, verify: _StageEntry) -> list[_StageEntry]:
    """The stages that draw and verify a side sample for capability, where the settings ask for one."""
    if pipeline.settings.algorithm.capability.oracle_samples is None:
        return []

    def aside(paths: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(f"side_{path}" if path.startswith(("rollouts/", "verdicts/")) else path for path in paths)

    def beside(entry: _StageEntry) -> _StageEntry:
        name = f"side_{entry.name}"
        return replace(
            entry,
            name=name,
            reads=name,
            options=f"{entry.options} --side",
            deps=aside(entry.deps),
            outs=aside(entry.outs),
            metrics=f"side_{entry.metrics}",
        )

    return [beside(generate), beside(verify)]


def _step_file(pipeline: Pipeline, step: int, *, cached: bool) -> str:
    mine = "step=${step}/agent=${item.agent}"
    before = "checkpoints/step=${prev}/agent=${item.agent}"
    each = " --step ${step} --agent ${item.agent}"
    # Paths that coincide with the previous step's at step 1, where DVC accepts no dependency twice.
    start = ("checkpoints/step=0000/agent=${item.agent}",)
    capability = ("capability/step=${prev}/capability.parquet",)
    # A reward function gets the problem's whole row, of which prompts hold a part.
    settings = pipeline.settings
    problems = () if settings.verification.is_math else (f"data/{settings.data.train}.parquet",)
    estimate = settings.algorithm.capability
    side = () if estimate.oracle_samples is None else ("side_verdicts/step=${step}",)
    oracle = () if estimate.oracle_table is None else (estimate.oracle_table,)
    entries = [
        _StageEntry(
            "generate",
            each,
            "generate",
            ("prompts/step=${step}", before, *_bases(pipeline, step - 1)),
            (f"rollouts/{mine}",),
            metrics="generate/step=${step}/${item.agent}.json",
            matrix=True,
        ),
        _StageEntry(
            "verify",
            each,
            "verify",
            ("prompts/step=${step}", f"rollouts/{mine}", *problems),
            (f"verdicts/{mine}",),
            outside=_reward_file(pipeline),
            metrics="verify/step=${step}/${item.agent}.json",
            matrix=True,
        ),
        _StageEntry(
            "pool",
            " --step ${step} --learner ${item.agent}",
            "pool",
            ("prompts/step=${step}", "rollouts/step=${step}", "verdicts/step=${step}", "checkpoints/step=0000"),
            ("pool/step=${step}/learner=${item.agent}",),
            metrics="pool/step=${step}/${item.agent}.json",
            matrix=True,
        ),
        _StageEntry(
            "advantage",
            " --step ${step}",
            "advantage",
            ("prompts/step=${step}", "verdicts/step=${step}", *side, *(capability if step > 1 else ())),
            ("capability/step=${step}", "advantages/step=${step}"),
            outside=oracle,
            metrics="advantage/step=${step}/all.json",
        ),
        _StageEntry(
            "update",
            each,
            "update",
            (
                f"rollouts/{mine}",
                "pool/step=${step}/learner=${item.agent}",
                "advantages/step=${step}/learner=${item.agent}",
                before,
                *(start if step > 1 else ()),
            ),
            (f"updates/{mine}",),
            uncached=(f"checkpoints/{mine}",),
            cached=cached,
            metrics="update/step=${step}/${item.agent}.json",
            matrix=True,
        ),
    ]
    entries[2:2] = _side_sample(pipeline, *entries[:2])
    if evaluated(pipeline.settings, step):
        entries.append(_evaluate(pipeline, step))
    return _templated(pipeline, step, entries)


def _templated(pipeline: Pipeline, step: int, entries: list[_StageEntry]) -> str:
    return _file(pipeline, f"vars:\n  - {{step: '{step:04d}', prev: '{max(step - 1, 0):04d}'}}\n", entries, below=2)


def _file(pipeline: Pipeline, variables: str, entries: list[_StageEntry], *, below: int) -> str:
    stages = "".join(entry.render(pipeline, below) for entry in entries)
    return f"{_HEADER.format(run=pipeline.run)}{variables}stages:\n{stages}"


def _digest(texts: Iterable[str]) -> str:
    """A short digest of DVC files, without the settings that they track: which those are is the code's to say."""
    tracked = " " * 10 + "- "
    lines = (line for text in texts for line in text.splitlines() if not line.startswith(tracked))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def rendered(pipeline: Pipeline) -> dict[Path, str]:
    """Every DVC file of the run and its content. Which checkpoints are in DVC's cache is as the files say that are
    there: settings alone do not tell."""
    cached = cached_steps(pipeline)
    steps = {step: _file_of(pipeline, step, cached=step in cached) for step in range(pipeline.settings.steps + 1)}
    plain = {step: _file_of(pipeline, step, cached=False) if step in cached else text for step, text in steps.items()}
    digest = _digest([_run_file(pipeline, ""), *plain.values()])
    files = {pipeline.folder / "dvc.yaml": _run_file(pipeline, digest)}
    return files | {step_file(pipeline, step): text for step, text in steps.items()}


def _file_of(pipeline: Pipeline, step: int, *, cached: bool) -> str:
    return _step_file(pipeline, step, cached=cached) if step else _start_file(pipeline, cached=cached)


def cached_steps(pipeline: Pipeline) -> set[int]:
    """The steps whose checkpoints, those of all agents, DVC has in its cache, as the DVC files say.

    It is a flag of the output and no part of a lock: whether it is set re-runs nothing.
    """
    return {
        int(path.parent.name)
        for path in step_files(pipeline)
        if _UNCACHED not in path.read_text(encoding="utf-8", errors="replace").splitlines()
    }


def set_cached(pipeline: Pipeline, step: int, *, cached: bool) -> None:
    """Say in a step's DVC file whether its checkpoints are in DVC's cache."""
    with atomic(step_file(pipeline, step)) as scratch:
        scratch.write_text(_file_of(pipeline, step, cached=cached), encoding="utf-8")


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
    files = rendered(pipeline)
    changed = [path for path, text in files.items() if not path.is_file() or path.read_text() != text]
    for path in changed:
        with atomic(path) as scratch:
            scratch.write_text(files[path], encoding="utf-8")
    for extra in step_files(pipeline):
        if extra not in files:
            extra.unlink()
            changed.append(extra)
    return changed
