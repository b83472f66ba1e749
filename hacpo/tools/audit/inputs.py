"""Settings, problems and schedule: what a run was given, and what every step's batch must therefore be."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from hacpo.artifacts import parquet, tables
from hacpo.artifacts.problem_rows import Asked, Problem, ScheduledProblem
from hacpo.artifacts.shards import differences
from hacpo.data import problems
from hacpo.errors import HacpoError
from hacpo.pipeline.catalogue import PREPARE
from hacpo.pipeline.project import Pipeline
from hacpo.settings import params as settings_of
from hacpo.settings.root import Settings
from hacpo.tools.audit.audit_run import AuditRun
from hacpo.tools.audit.metrics_files import check_metrics
from hacpo.tools.audit.table_checks import Content, read, stage_settings


@dataclass(frozen=True)
class Batch:
    """One step's problems, in order, and their ids and answers as Arrow strings, [P]."""

    step: int
    rows: Sequence[ScheduledProblem]
    problem_ids: Any
    answers: Any

    @classmethod
    def of(cls, step: int, rows: Sequence[ScheduledProblem]) -> Batch:
        """From the schedule's rows of a step."""
        columns = [pa.array([getattr(row, name) for row in rows], pa.string()) for name in ("problem_id", "answer")]
        return cls(step, rows, *columns)

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class Inputs:
    """What a run works on.

    Attributes:
        batches: of every step; none where that cannot be told.
        sets: data set -> its problems; None where they cannot be read.
    """

    batches: Mapping[int, Batch]
    sets: Mapping[str, Sequence[Problem] | None]


def open_run(pipeline: Pipeline) -> AuditRun:
    """An audit of a run, its settings compared with settings.json.

    Where params.yaml and settings.json differ, one of them was changed after the run. The audit goes by the one that
    more of the run's files name as theirs, so that the change is one finding and not a thousand.
    """
    run = AuditRun(pipeline)
    path = run.layout.settings
    if not path.is_file():
        run.find("settings", path, expected="the resolved settings", found="no such file")
        return run
    try:
        recorded = settings_of.recorded(path)
    except (OSError, ValueError, RecursionError) as error:
        run.find("settings", path, expected="JSON", found=str(error)[:120])
        return run
    odd = differences(settings_of.dump(pipeline.settings), recorded)
    for key, expected, value in odd:
        run.find("settings", path, column=key, expected=expected, found=value, note="expected: what params.yaml says")
    other = _settings_of(recorded) if odd else None
    if other is not None:
        by_other = AuditRun(dataclasses.replace(pipeline, settings=other))
        if _disagreements(by_other) < _disagreements(run):
            run.pipeline, run.stage_settings = by_other.pipeline, by_other.stage_settings
    return run


def _settings_of(recorded: Any) -> Settings | None:
    if not isinstance(recorded, Mapping):
        return None
    try:
        return settings_of.resolve({key: value for key, value in recorded.items() if key != "agent_names"})
    except HacpoError:
        return None


def _disagreements(run: AuditRun) -> int:
    """How many settings the run's tables (one file of each) name otherwise than the run's settings."""
    per_agent = (
        (tables.ROLLOUTS, 1),
        (tables.VERDICTS, 1),
        (tables.POOL, 1),
        (tables.ADVANTAGES, 1),
        (tables.TRACE, 1),
        (tables.EVALUATIONS, 0),
    )
    samples: list[tuple[tables.Table, int | None, str]] = [
        (tables.PROBLEMS, None, run.settings.data.train),
        (tables.SCHEDULE, None, ""),
        *((table, step, agent) for agent in run.agents for table, step in per_agent),
    ]
    count = 0
    for table, step, whose in samples:
        try:
            recorded = parquet.read_metadata(run.run_files.path(table, step, whose))["settings"]
        except (HacpoError, ValueError, RecursionError):
            continue
        count += len(differences(stage_settings(run, table, whose), recorded))
    return count


def check_inputs(run: AuditRun, *, begun: bool) -> Inputs:
    """Check data sets and schedule against their sources; what follows is audited against what they should be.

    Args:
        begun: there are tables that were made from them, so they must be there.
    """
    if not begun and not run.layout.data.is_dir() and not run.layout.schedule.is_file():
        run.skip("data, schedule and prompts", "not made yet")
        return Inputs({}, {})
    sets = _check_data(run)
    train = sets.get(run.settings.data.train)
    rows = None
    if train is None:
        run.skip("the schedule's choice of problems", "the training problems cannot be read")
    else:
        try:
            rows = problems.schedule(
                train, steps=run.settings.steps, prompts=run.settings.batch.prompts, seed=run.settings.seed
            )
        except HacpoError as error:
            run.find("schedule", run.layout.problems(run.settings.data.train), expected="enough problems", found=error)
    recorded = _check_schedule(run, rows)
    rows = rows or recorded
    if rows is None:
        run.skip("every step", "neither schedule nor training problems can be read")
        return Inputs({}, sets)
    counts = {f"problems.{name}": len(content) for name, content in sets.items() if content is not None}
    check_metrics(run, PREPARE, 0, {**counts, "scheduled": len(rows)})
    by_step: dict[int, list[ScheduledProblem]] = {}
    for row in rows:
        by_step.setdefault(row.step, []).append(row)
    return Inputs({step: Batch.of(step, content) for step, content in by_step.items()}, sets)


def _check_data(run: AuditRun) -> dict[str, list[Problem] | None]:
    """The data sets: as their source gives them, or as recorded where the source cannot be read."""
    sets: dict[str, list[Problem] | None] = {}
    for name, source in run.settings.data.sets.items():
        path = run.layout.problems(name)
        content = None
        if path.is_file():
            content = read(run, tables.PROBLEMS, None, name)
        else:
            run.find("files", path, expected="the problems table", found="no such file")
        recorded = Problem.of(content.arrow) if content else None
        try:
            made = problems.load(name, source, run.pipeline.root)
        except HacpoError as error:
            run.skip(f"{name} against its source", str(error))
            sets[name] = recorded
            continue
        sets[name] = made
        if content is not None:
            _compare_rows(run, "data", content, made, "problem_id")
    return sets


def _check_schedule(run: AuditRun, expected: Sequence[ScheduledProblem] | None) -> list[ScheduledProblem] | None:
    path = run.layout.schedule
    content = read(run, tables.SCHEDULE) if path.is_file() else None
    if not path.is_file():
        run.find("files", path, expected="the schedule table", found="no such file")
    if content is None:
        return None
    recorded = ScheduledProblem.of(content.arrow)
    if expected is not None:
        _compare_rows(run, "schedule", content, expected, "problem_id")
    return recorded


def check_prompts(run: AuditRun, batch: Batch) -> None:
    """A step's prompts against the batch that they should be."""
    path = run.layout.prompts(batch.step)
    if not path.exists():
        run.find("files", path, expected="the step's prompts", found="no such folder")
        return
    content = read(run, tables.PROMPTS, batch.step)
    if content is not None:
        _compare_rows(run, "prompts", content, batch.rows, "problem_id")


def _compare_rows(run: AuditRun, check: str, content: Content, expected: Sequence[Asked], key: str) -> None:
    """Small tables, row by row and column by column."""
    count = len(content.arrow)
    if count != len(expected):
        run.find(check, content.path, expected=f"{len(expected)} rows", found=f"{count} rows")
    names = content.arrow[key].to_pylist()
    for column in content.table.schema.names:
        values = content.arrow[column].to_pylist()
        odd = [
            number
            for number, (value, wanted) in enumerate(zip(values, expected, strict=False))
            if value != getattr(wanted, column)
        ]
        if odd:
            first = odd[0]
            file, wanted = content.file_of(first), getattr(expected[first], column)
            run.find(check, file, str(names[first]), column, expected=wanted, found=values[first], count=len(odd))
