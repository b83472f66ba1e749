"""`hacpo run` starts a stage when its inputs are there, and records what was made while the workers go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conftest import Cli, contents
from hacpo.errors import HacpoError
from hacpo.pipeline.execution import workers as workers_module
from hacpo.pipeline.execution.workers import Workers
from hacpo.pipeline.project import Pipeline
from hacpo.pipeline.records.bookkeeping import Books
from hacpo.pipeline.records.seen import Seen
from hacpo.pipeline.running.task_graph import Task, TaskGraph

RUN = "pipelines/small"


def name(task: Task) -> str:
    """`generate@ada 2`."""
    return f"{task.stage.name} {task.step}"


@pytest.fixture
def graph(project: Path, cli: Cli) -> TaskGraph:
    """Of a run that has not begun, its start and first step taken for done."""
    assert cli("plan", RUN).code == 0
    pipeline = Pipeline.open(Path(RUN))
    books = Books(pipeline.root)
    made = TaskGraph(pipeline, books, Seen(pipeline, books))
    for _ in range(2):
        step = made.tasks[0].step
        for task in made.tasks:
            task.made = task.recorded = task.step == step
        assert [closed for closed, _ in made.closed()] == [step]
    return made


def test_a_stage_needs_what_it_reads_and_nothing_else(graph: TaskGraph) -> None:
    needs = {name(task): {name(need) for need in task.needs if not need.recorded} for task in graph.tasks}
    assert needs["generate@ada 2"] == set()
    assert needs["verify@ada 2"] == {"generate@ada 2"}
    assert needs["pool@ada 2"] == {f"{stage}@{agent} 2" for stage in ("generate", "verify") for agent in ("ada", "bo")}
    assert needs["advantage 2"] == {"verify@ada 2", "verify@bo 2"}
    assert needs["update@bo 2"] == {"generate@bo 2", "pool@bo 2", "advantage 2"}
    assert needs["evaluate@bo 2"] == {"update@bo 2"}
    assert needs["report 2"] == set(needs) - {"report 2"}


def test_the_next_step_waits_for_its_own_agent_alone(project: Path, cli: Cli) -> None:
    assert cli("plan", RUN).code == 0
    pipeline = Pipeline.open(Path(RUN))
    books = Books(pipeline.root)
    graph = TaskGraph(pipeline, books, Seen(pipeline, books))
    for task in graph.tasks:
        task.made = task.recorded = task.step == 0
    assert [step for step, _ in graph.closed()] == [0]
    (sampling,) = (task for task in graph.tasks if name(task) == "generate@ada 2")
    assert {name(need) for need in sampling.needs} == {"resolve 0", "prepare 0", "update@ada 1"}


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What a run does from here on: `begin` and `record`, with the stage's command line."""
    seen: list[tuple[str, str]] = []
    give, finish = Workers.give, Books.finish

    def noted_give(self: Workers, worker: int, arguments: Any) -> None:
        seen.append(("begin", " ".join(arguments)))
        give(self, worker, arguments)

    def noted_finish(self: Books, stage: Any) -> None:
        finish(self, stage)
        seen.append(("record", stage.cmd.removeprefix("hacpo ")))

    monkeypatch.setattr(Workers, "give", noted_give)
    monkeypatch.setattr(Books, "finish", noted_finish)
    return seen


@pytest.mark.slow
def test_what_comes_next_begins_before_what_was_made_is_recorded(
    project: Path, finished: Path, cli: Cli, events: list[tuple[str, str]]
) -> None:
    assert cli("run", RUN, "--jobs", "2").code == 0
    assert contents(project) == contents(finished)
    for agent in ("ada", "bo"):
        sampled = f"generate {RUN} --step 0001 --agent {agent}"
        assert events.index(("begin", sampled.replace("generate", "verify"))) < events.index(("record", sampled))
    recorded = [command for kind, command in events if kind == "record"]
    for before, after in (("generate", "verify"), ("verify", "update"), ("update", "evaluate")):
        for agent in ("ada", "bo"):
            part = f"{RUN} --step 0002 --agent {agent}"
            assert recorded.index(f"{before} {part}") < recorded.index(f"{after} {part}")


@pytest.mark.slow
def test_nothing_made_of_what_cannot_be_recorded_is_recorded(
    project: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, finished: Path
) -> None:
    finish = Books.finish
    recorded: list[str] = []

    def refusing(self: Books, stage: Any) -> None:
        if stage.name == "generate@bo":
            raise HacpoError("changed while the stage ran")
        finish(self, stage)
        recorded.append(stage.name)

    monkeypatch.setattr(Books, "finish", refusing)
    stopped = cli("run", RUN, "--jobs", "2")
    assert stopped.code == 1
    assert "changed while the stage ran" in stopped.error
    assert not {"generate@bo", "verify@bo", "pool@ada", "advantage"} & set(recorded)
    lock = Path(RUN, "steps/0001/dvc.lock")
    assert not lock.exists() or "generate@bo" not in lock.read_text()
    monkeypatch.undo()
    monkeypatch.chdir(project)
    assert cli("run", RUN).code == 0
    assert contents(project) == contents(finished)


def test_a_run_with_nothing_to_do_starts_no_process(
    finished_copy: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> Any:
        raise AssertionError("a worker was started")

    monkeypatch.setattr(workers_module, "_started", refused)
    done = cli("run", RUN, "--jobs", "2")
    assert done.code == 0, done.err
    assert "everything is done already" in done.err


def test_a_file_is_there_at_every_moment_of_its_record(
    project: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DVC removes a single file that it has put in its cache, and copies it back: stages read settings and metrics."""
    from dvc_objects.fs.local import LocalFileSystem

    settings = project / "artifacts/small/settings.json"
    gone: list[str] = []
    remove = LocalFileSystem.remove

    def noted(self: LocalFileSystem, path: Any, *how: Any, **options: Any) -> None:
        gone.extend([str(path)] if Path(path).is_file() else [])
        remove(self, path, *how, **options)

    monkeypatch.setattr(LocalFileSystem, "remove", noted)
    assert cli("run", RUN, "--until", 0).code == 0
    assert settings.is_file()
    assert not [path for path in gone if path.startswith(str(settings.parent)) and not path.endswith(".tmp")]
    assert not list(settings.parent.rglob("*.tmp"))
