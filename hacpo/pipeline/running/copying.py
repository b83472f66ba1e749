"""`hacpo copy`: a new run that begins where another one did, so that the two differ in nothing but what is changed.

It has the other's params.yaml and, by hard link, its checkpoints of step 0, where that run's record of their warm-up
holds. It is recorded in DVC from the files and settings as they are, as after making them again. Its folder is marked
until it is whole: no other command works on it before, and the next copy to it begins anew.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from hacpo.artifacts import storage, tables
from hacpo.artifacts.durability import flush, make_folders
from hacpo.artifacts.layout import LOCKS
from hacpo.artifacts.model_folder import check_checkpoint, copy_file
from hacpo.errors import MissingInputError, SettingsError
from hacpo.pipeline.catalogue import RESOLVE, WARMUP
from hacpo.pipeline.execution.session import ConsoleProgress, ProgressSink
from hacpo.pipeline.execution.workers import Workers
from hacpo.pipeline.locking.locks import driver_lock
from hacpo.pipeline.policies import check_policy
from hacpo.pipeline.project import COPYING, Pipeline
from hacpo.pipeline.records.bookkeeping import Books
from hacpo.pipeline.records.dvc_files import stamp
from hacpo.pipeline.records.order import agent_of, command_of, makes_checkpoint, stage_groups, step_file
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
    target = Pipeline.to_be(folder, source.settings)
    if target.root.resolve() != source.root.resolve():
        raise SettingsError("lies in another project", where=folder, expected=f"below {source.root / 'pipelines'}")
    _check_free(target)
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
    _check_free(target)
    try:
        with books.claimed(target.layout.root), driver_lock(target.layout, command="hacpo copy"):
            _check_free(target)  # another copy may have been quicker
            with _in_making(target):
                with storage.atomic(folder / "params.yaml") as scratch:
                    scratch.write_text(_params(source.folder, folder), encoding="utf-8")
                _begin(source, Pipeline.open(folder, within=True), books, shared, ConsoleProgress())
    except BaseException:
        if not folder.exists():
            storage.remove(target.layout.root)  # the locks
        raise
    return shared


def share_start(source: Pipeline, target: Pipeline, agents: Sequence[str]) -> list[str]:
    """Give a run that is described, and whose agents have no start yet, those of another run; returns whose.

    As `copy_run` does: by hard link, recorded in DVC as after making them. An agent whose warm-up settings differ
    between the two is not among them, nor one whose start the target has. Killed at any moment, the next call, or a
    run, goes on.

    Raises:
        BusyError: somebody works on the target.
        HacpoError: the target's settings cannot be used.
    """
    books = Books(source.root)
    with books.claimed(target.layout.root), driver_lock(target.layout, command="hacpo sweep"):
        with books.open():
            lacking = [agent for agent in agents if agent not in _current_starts(target, books)]
            current = _current_starts(source, books) if lacking else []
        shared = [agent for agent in lacking if agent in current and same_start(source, target, agent)]
        for agent in shared:
            check_policy(source, 0, agent)
        if shared:
            _begin(source, target, books, shared, _Silent())
    return shared


class _Silent(ConsoleProgress):
    """Says nothing of the settings that are resolved."""

    def finished(self, stage: str, summary: str) -> None:
        """Nobody waits for it."""


def same_start(one: Pipeline, other: Pipeline, agent: str) -> bool:
    """Whether two runs say the same of all that an agent's start is made from."""
    return all(agent in run.settings.agents for run in (one, other)) and start_of(one, agent) == start_of(other, agent)


def start_of(pipeline: Pipeline, agent: str) -> str:
    """What decides which start an agent has, as text: its name and what `warmup` reads."""
    read = params.reads(pipeline.settings, WARMUP.settings, agent)
    read.setdefault("start_seed", read.pop("seed", None))
    return json.dumps([agent, read, WARMUP.outside(pipeline, agent)], sort_keys=True)


def _check_free(target: Pipeline) -> None:
    """Nothing is where the new run goes but what a copy that was killed has left, or one makes.

    Raises:
        SettingsError: something is.
    """
    folder, root = target.folder, target.layout.root
    if folder.is_symlink() or not (_names(folder) == set() or COPYING in _names(folder)):
        raise SettingsError("is there already", where=folder, remedy="name another folder")
    if root.is_symlink() or not (_names(root) <= {LOCKS} or COPYING in _names(folder)):
        raise SettingsError("there are artifacts of such a run", where=root)


def _names(folder: Path) -> set[str]:
    """Of what is in a folder; of no folder none."""
    try:
        return set(os.listdir(folder))
    except FileNotFoundError:
        return set()
    except NotADirectoryError:
        return {folder.name}


@contextlib.contextmanager
def _in_making(target: Pipeline) -> Iterator[None]:
    """Mark the new run's folder as one that is being made while the block runs, from nothing. If the block raises,
    nothing is left; if it is killed the mark is, and the next copy begins anew.

    Raises:
        StorageError: the disk refuses.
    """
    folder, mark = target.folder, target.folder / COPYING
    try:
        make_folders(folder)
        mark.touch()
        flush(folder)
    except OSError as error:
        raise storage.refused(folder, error) from None
    _clear(target)
    try:
        yield
        mark.unlink()
        flush(folder)
    except BaseException:
        with contextlib.suppress(OSError):  # then the mark is left
            mark.touch()
            _clear(target)
            mark.unlink()
            folder.rmdir()
        raise


def _clear(target: Pipeline) -> None:
    """Remove all of the new run but its locks, which are held, and its mark."""
    for folder, kept in ((target.layout.root, LOCKS), (target.folder, COPYING)):
        for name in _names(folder) - {kept}:
            storage.remove(folder / name)


def _current_starts(source: Pipeline, books: Books) -> list[str]:
    path = step_file(source, 0)
    stages = books.stages(path) if path.is_file() else []
    return [agent_of(stage) for stage in stages if makes_checkpoint(stage) and books.compare(stage)]


def _same_start(source: Pipeline, agent: str) -> bool:
    """Whether params.yaml says of the agent's warm-up what the run's files were made with."""
    try:
        changed = params.changed(params.recorded(source.layout.settings), params.dump(source.settings))
    except (OSError, ValueError, AttributeError):
        return False
    now = source.settings
    read = (*params.declared(WARMUP.settings, agent), *params.tracked(now, WARMUP.settings, agent))
    return not any(f"{key}.".startswith(tuple(f"{known}." for known in read)) for key in changed)


def _params(source: Path, target: Path) -> str:
    """The source's params.yaml; what it extends is named from where the new one lies."""

    def moved(found: re.Match[str]) -> str:
        path = os.path.relpath((source / found[2]).resolve(), target.resolve())
        return f"extends: {found[1]}{path}{found[1]}" + (f"  {found[3]}" if found[3] else "")

    return _EXTENDS.sub(moved, (source / "params.yaml").read_text(encoding="utf-8"))


def _begin(source: Pipeline, target: Pipeline, books: Books, shared: Sequence[str], progress: ProgressSink) -> None:
    """Stamp the new run, resolve its settings, and record the starts that it shares."""
    stamp(target)
    with Workers(0, progress) as workers:
        for _, group in stage_groups(target, books, 0):
            for stage in group:
                if command_of(stage) == RESOLVE.command:
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
    with storage.atomic(new.metrics(WARMUP.name, 0, agent)) as scratch:
        copy_file(old.metrics(WARMUP.name, 0, agent), scratch)
    check_policy(target, 0, agent)
