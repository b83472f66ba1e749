"""Checking pipelines: every remark about each of them, however many are wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hacpo.errors import HacpoError
from hacpo.pipeline.project import Pipeline
from hacpo.settings import params as settings_of
from hacpo.settings.engine import EngineSettings, sampling_engine
from hacpo.tools.check.agent_models import OnHub, ask_hub, check_agents, known_shape
from hacpo.tools.check.fit import check_fit, check_launcher
from hacpo.tools.check.machine import check_machine, check_project, engine_here
from hacpo.tools.check.problem_files import Files, check_data, check_oracle, check_reward
from hacpo.tools.check.remarks import Remark, error
from hacpo.tools.check.starts import check_starts

PARAMS = "params.yaml"


def pipelines_below(folder: Path) -> list[Path]:
    """The pipeline folders that a name stands for: itself, or all in a group such as `pipelines/paper`.

    A folder without any is given back, so that checking it says what is wrong.
    """
    if folder.name == PARAMS or (folder / PARAMS).is_file():
        return [folder.parent if folder.name == PARAMS else folder]
    return sorted(path.parent for path in folder.rglob(PARAMS)) or [folder]


@dataclass
class Checker:
    """Checks pipelines one after another; what they share is looked at once.

    Attributes:
        online: ask the hub whether models are there and may be downloaded.
        elsewhere: the runs will be on another machine, so what this one lacks is not said.
    """

    online: bool = False
    elsewhere: bool = False
    _files: Files = field(default_factory=Files)
    _rewards: dict[str, Remark | None] = field(default_factory=dict)
    _starts: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    _answers: dict[tuple[str, str | None], Sequence[str] | HacpoError] = field(default_factory=dict)

    def check(self, folder: Path) -> list[Remark]:
        """Every remark about the pipeline in a folder; none if it can run as it is."""
        try:
            pipeline = Pipeline.open(folder)
        except HacpoError as refusal:
            found = settings_of.complaints(folder / PARAMS) if (folder / PARAMS).is_file() else []
            return [error(line) for line in found] or [error(refusal)]
        return list(self._remarks(pipeline))

    def _remarks(self, pipeline: Pipeline) -> Iterator[Remark]:
        try:
            _ = pipeline.settings_files
        except HacpoError as refusal:
            yield error(refusal)
        yield from check_project(pipeline)
        yield from check_agents(pipeline, self._on_hub)
        yield from check_starts(pipeline, self._starts)
        yield from check_data(pipeline, self._files)
        yield from check_reward(pipeline, self._files, self._rewards)
        yield from check_oracle(pipeline)
        shapes = {name: known_shape(pipeline, name) for name in pipeline.settings.agents}
        if not self.elsewhere:
            yield from check_machine(pipeline.settings, shapes)
        yield from check_fit(pipeline.settings, pipeline.folder, shapes, self._engine(pipeline.settings.engine))
        yield from check_launcher(pipeline.settings, pipeline.root)

    def _engine(self, engine: EngineSettings) -> str:
        """What samples; on another machine vLLM wherever the settings let it."""
        return sampling_engine(engine, on_gpu=True, vllm="gpu") if self.elsewhere else engine_here(engine)

    @property
    def _on_hub(self) -> OnHub | None:
        return self._ask if self.online else None

    def _ask(self, repository: str, revision: str | None, where: str) -> Sequence[str]:
        key = repository, revision
        if key not in self._answers:
            try:
                self._answers[key] = ask_hub(repository, revision, where)
            except HacpoError as refusal:
                self._answers[key] = refusal
        answer = self._answers[key]
        if isinstance(answer, HacpoError):
            raise answer
        return answer
