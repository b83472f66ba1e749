"""What a program may do with runs: start one, read its tables, audit it. `import hacpo` has these names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hacpo.artifacts.layout import Layout
from hacpo.artifacts.parquet import read_metadata
from hacpo.artifacts.run_files import RunFiles
from hacpo.artifacts.tables import PROBLEMS, TABLES, Table
from hacpo.errors import ArtifactError, MissingInputError
from hacpo.pipeline.project import Pipeline

if TYPE_CHECKING:
    import polars as pl

    from hacpo.tools.audit.walk import Audit


class RunTables(Mapping[str, "pl.DataFrame"]):
    """The tables of a run by name (docs/artifacts.md), each read and checked when it is asked for.

    A frame holds every step and agent there is, with `step` and `agent` (or `learner`) in front where rows do not say
    them themselves. `problems` are those of all sets, with `set`.
    """

    def __init__(self, files: RunFiles) -> None:
        self.files = files

    def __repr__(self) -> str:
        return f"<tables of the run {self.files.name}: {', '.join(self)}>"

    def __iter__(self) -> Iterator[str]:
        return (name for name, table in TABLES.items() if any(True for _ in self.files.parts(table)))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> pl.DataFrame:
        import polars as pl

        table = TABLES[name]
        frames = [self._frame(table, step, whose) for step, whose in self.files.parts(table)]
        if not frames:
            raise KeyError(name)
        return pl.concat(frames, how="vertical")

    def _frame(self, table: Table, step: int | None, whose: str) -> pl.DataFrame:
        import polars as pl

        frame = pl.from_arrow(self.files.read(table, step, whose))
        assert isinstance(frame, pl.DataFrame)
        place = {"step": step, **({"set" if table == PROBLEMS else table.per: whose} if whose else {})}
        keys = {key: value for key, value in place.items() if value is not None and key not in frame.columns}
        return frame.select(*(pl.lit(value).alias(key) for key, value in keys.items()), pl.all())


def read_run(path: str | Path) -> RunTables:
    """The tables of a run as Polars frames: `read_run("artifacts/smoke")["rollouts"]`.

    Args:
        path: the run's artifacts, or its pipeline folder.

    Raises:
        MissingInputError: there is no run.
        ArtifactError: its schedule is damaged, or does not say which run it is of.
        SettingsError: the pipeline folder is not usable.
    """
    folder = Path(path)
    if (folder / "params.yaml").is_file():
        opened = Pipeline.open(folder)
        return RunTables(RunFiles(opened.run, opened.layout))
    layout = Layout(folder)
    if not layout.schedule.is_file():
        raise MissingInputError("holds no run's tables", where=folder, expected="artifacts/<run> or pipelines/<run>")
    if not (name := read_metadata(layout.schedule).get("run")):
        raise ArtifactError("does not say which run it is of", where=layout.schedule, expected="hacpo.run")
    return RunTables(RunFiles(name, layout))


def run(pipeline: str | Path, *, jobs: int | None = None, until: int | None = None, remake: bool = False) -> RunTables:
    """Do everything of a run that is not done, as `hacpo run` does, and return its tables.

    Stages run in processes of their own, which do not import the program that calls this.

    Args:
        jobs: agents that work side by side; None: as many as the machine has room for.
        until: stop after this step.
        remake: train finished steps again where what they depend on has changed.

    Raises:
        HacpoError: see `hacpo.errors`; what is finished is kept.
        FaultElsewhereError: a stage met what nobody foresaw; its traceback is this one's note.
    """
    from hacpo.pipeline.running.driver import run_pipeline
    from hacpo.tools.check.before_run import check_before_run

    opened = Pipeline.open(Path(pipeline))
    check_before_run(opened)
    run_pipeline(opened, jobs=jobs, until=until, remake=remake, apart=True)
    return RunTables(RunFiles(opened.run, opened.layout))


def audit(pipeline: str | Path, *, deep: bool = False) -> Audit:
    """Check every invariant of a run on its files, as `hacpo audit` does; `findings` is empty where all hold."""
    from hacpo.tools.audit.walk import audit as audit_run

    return audit_run(Pipeline.open(Path(pipeline)), texts=None, deep=deep, first=None, last=None)
