"""`hacpo copy`: a new run that begins where another one did, so that the two differ in nothing but what is changed.

The new run has the other's params.yaml and, by hard link, its checkpoints of step 0, where that run's record of their
warm-up holds. The new one is recorded in DVC from the files and settings as they are, as after making them again.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from hacpo.artifacts import storage, tables
from hacpo.artifacts.durability import flush, make_folders
from hacpo.artifacts.model_folder import check_checkpoint, copy_file
from hacpo.errors import MissingInputError, SettingsError
from hacpo.pipeline.bookkeeping import Books
from hacpo.pipeline.catalogue import WARMUP
from hacpo.pipeline.dvc_files import stamp
from hacpo.pipeline.locks import driver_lock
from hacpo.pipeline.order import agent_of, command_of, makes_checkpoint, stage_groups, step_file
from hacpo.pipeline.policies import check_policy
from hacpo.pipeline.project import Pipeline
from hacpo.pipeline.session import ConsoleProgress
from hacpo.pipeline.workers import Workers
from hacpo.settings import params

_EXTENDS = re.compile(r"^extends:[ \t]*(['\"]?)([^'\"#\n]+?)\1[ \t]*(#.*)?$", re.MULTILINE)


def copy_run(source: Pipeline, folder: Path) -> list[str]:
    """Make the pipeline folder and the start of a new run; returns the agents whose warm-up it shares.

    An agent whose warm-up settings in params.yaml are not those that its start was made with is not among them.

    Args:
        folder: the new run's pipeline folder.

    Raises:
        SettingsError: the new run is there already, or is none of this project.
        MissingInputError: no agent of the source has a start that is recorded and current.
        HacpoError: the new run's settings cannot be used; nothing is left of it.
    """
    if folder.exists():
        raise _is_there(folder)
    books = Books(source.root)
    with books.open():
        shared = [agent for agent in _current_starts(source, books) if _same_start(source, agent)]
    if not shared:
        raise MissingInputError(
            "no agent's start is made and up to date",
            where=source.layout.path(tables.CHECKPOINT, 0),
            remedy=f"run `{source.command('run')} --until 0`, or copy params.yaml yourself",
        )
    for agent in shared:
        check_policy(source, 0, agent)
    made: list[Path] = []
    try:
        _make(folder)
        made.append(folder)
        with storage.atomic(folder / "params.yaml") as scratch:
            scratch.write_text(_params(source.folder, folder), encoding="utf-8")
        target = Pipeline.open(folder)
        if target.root.resolve() != source.root.resolve():
            raise SettingsError("lies in another project", where=folder, expected=f"below {source.root / 'pipelines'}")
        if target.layout.root.exists():
            raise SettingsError("there are artifacts of such a run", where=target.layout.root)
        made.append(target.layout.root)
        with books.claimed(target.layout.root), driver_lock(target.layout, command="hacpo copy"):
            _begin(source, target, books, shared)
    except BaseException:
        for path in made:
            storage.remove(path)
        raise
    return shared


def _make(folder: Path) -> None:
    """Make the new run's folder. Of two copies at once to one folder, one finds it there.

    Raises:
        SettingsError: it is there already.
        StorageError: the disk refuses.
    """
    try:
        make_folders(folder.parent)
        folder.mkdir()
        flush(folder.parent)
    except FileExistsError:
        raise _is_there(folder) from None
    except OSError as error:
        raise storage.refused(folder, error) from None


def _is_there(folder: Path) -> SettingsError:
    return SettingsError("is there already", where=folder, remedy="name another folder")


def _current_starts(source: Pipeline, books: Books) -> list[str]:
    path = step_file(source, 0)
    stages = books.stages(path) if path.is_file() else []
    return [agent_of(stage) for stage in stages if makes_checkpoint(stage) and books.is_current(stage)]


def _same_start(source: Pipeline, agent: str) -> bool:
    """Whether params.yaml says of the agent's warm-up what the run's files were made with."""
    try:
        before = params.recorded(source.layout.settings)
        was, now = (params.leaves(tree) for tree in (before, params.dump(source.settings)))
    except (OSError, ValueError, AttributeError):
        return False
    read = tuple(f"{key}." for key in params.tracked(WARMUP.settings, agent))
    return all(was.get(key) == now.get(key) for key in was.keys() | now.keys() if f"{key}.".startswith(read))


def _params(source: Path, target: Path) -> str:
    """The source's params.yaml; what it extends is named from where the new one lies."""

    def moved(found: re.Match[str]) -> str:
        path = os.path.relpath((source / found[2]).resolve(), target.resolve())
        return f"extends: {found[1]}{path}{found[1]}" + (f"  {found[3]}" if found[3] else "")

    return _EXTENDS.sub(moved, (source / "params.yaml").read_text(encoding="utf-8"))


def _begin(source: Pipeline, target: Pipeline, books: Books, shared: Sequence[str]) -> None:
    """Stamp the new run, resolve its settings, and record the starts that it shares."""
    stamp(target)
    with Workers(0, ConsoleProgress()) as workers:
        for _, group in stage_groups(target, books, 0):
            for stage in group:
                if command_of(stage) == "resolve":
                    books.begin(stage)
                    _, failure = workers.run([(0, shlex.split(stage.cmd)[1:])])
                    if failure is not None:
                        raise failure
                    books.finish(stage)
                elif makes_checkpoint(stage) and agent_of(stage) in shared:
                    books.begin(stage)
                    _link_start(source, target, agent_of(stage))
                    books.finish(stage)


def _link_start(source: Pipeline, target: Pipeline, agent: str) -> None:
    """The start of an agent with its metrics, by hard link where the filesystem has them."""
    old, new = source.layout, target.layout
    check_checkpoint(old.checkpoint(0, agent))
    with storage.atomic(new.checkpoint(0, agent)) as scratch:
        for file in sorted(path for path in old.checkpoint(0, agent).rglob("*") if path.is_file()):
            inside = scratch / file.relative_to(old.checkpoint(0, agent))
            inside.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(file, inside)
            except OSError:
                copy_file(file, inside)
    with storage.atomic(new.metrics("warmup", 0, agent)) as scratch:
        copy_file(old.metrics("warmup", 0, agent), scratch)
    check_policy(target, 0, agent)
