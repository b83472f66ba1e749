"""Which checkpoints DVC has in its cache: put there by link, taken out when they are superseded or pruned.

DVC itself is told to leave checkpoints alone (`cache: false`): it would copy each into its cache, never take one out
again, and refuse `dvc checkout` and `dvc pull` over those that retention has removed. So only the steps that
`retention.cache` names lose that flag in their DVC file, once their files are objects of the cache, and get it back
before these go. What a lock says of a checkpoint is the same either way.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hacpo.artifacts import storage
from hacpo.artifacts.durability import flush, flush_names
from hacpo.artifacts.text_files import load_json, read_bytes
from hacpo.phrases import ranges
from hacpo.pipeline.project import Pipeline
from hacpo.pipeline.records.bookkeeping import Books
from hacpo.pipeline.records.distrust import check_object
from hacpo.pipeline.records.dvc_files import cached_steps, is_cached, set_cached
from hacpo.pipeline.records.flushing import flushed_copies
from hacpo.pipeline.records.history import MD5, History, dvc_records
from hacpo.pipeline.records.lock_text import output_md5
from hacpo.pipeline.records.order import makes_checkpoint, step_file
from hacpo.pipeline.retention.pruning import AgentPlan


class _NotByLinkError(Exception):
    """A checkpoint cannot be put in the cache without a second copy, or without more people being able to read it."""


@dataclass
class CheckpointCache:
    """The checkpoints of one run in DVC's cache.

    Attributes:
        told: remarks for the user, each once.
    """

    pipeline: Pipeline
    books: Books
    told: list[str] = field(default_factory=list)
    _said: set[str] = field(default_factory=set)
    _manifests: dict[str, frozenset[str]] = field(default_factory=dict)
    """`.dir` objects of the cache that have been read -> the objects that they name."""
    _tracked: frozenset[str] | None = None
    """What the project's `.dvc` files name; None until somebody asks."""
    _gone: set[int] = field(default_factory=set)
    """Steps that the cache has nothing of and that are not wanted there; nobody else puts them there as long as this
    run is held, so that a long run need not look at all its steps after every one."""
    _committed: set[int] = field(default_factory=set)
    """Steps that stay in the cache because a commit names them, or may."""

    def follow(self, plans: Sequence[AgentPlan], steps_done: int, *, newest: bool = True) -> list[int]:
        """Have the cache hold what the settings say, and nothing else of the steps that are done. To be called before
        anything is pruned, with the books `open`.

        What a commit names stays, pruned or not, so that `dvc checkout` of that commit works; and nothing is taken out
        of a cache outside the project, which others may share.

        Args:
            plans: what retention lets go, and what stays.
            newest: whether nothing after `steps_done` is made yet. A run that finds its steps done on its way to those
                that are not adds none of them.

        Returns:
            The steps whose checkpoints are in the cache.

        Raises:
            StorageError: the disk refuses.
        """
        self._tracked = None
        self._committed = set()
        flagged = cached_steps(self.pipeline)
        named = self._wanted(plans, steps_done)
        wanted = [step for step in sorted(named if newest else named & flagged) if self._keep(step, flagged)]
        self._gone -= {*wanted, *flagged}
        for step in range(steps_done + 1):
            if step in wanted or step in self._gone:
                continue
            if any(self._folder(step, agent).is_dir() for agent in self._agents):
                if step in flagged:
                    set_cached(self.pipeline, step, cached=False)
                if self._drop(step):
                    self._gone.add(step)
        return wanted

    def release(self, step: int, stage: Any) -> None:
        """Before a stage is run: if it makes a checkpoint anew, the step is no more in the cache. A flag beside a lock
        that names what the cache lacks would have `dvc repro` train again, and `dvc checkout` remove what is there."""
        if makes_checkpoint(stage) and is_cached(self.pipeline, step):
            with self.books.open():
                set_cached(self.pipeline, step, cached=False)

    def release_partial(self, step: int) -> None:
        """The same for a step that has been brought back without its objects."""
        if is_cached(self.pipeline, step):
            with self.books.open():
                if not all(self._is_whole(step, agent) for agent in self._agents):
                    set_cached(self.pipeline, step, cached=False)

    def has(self, step: int) -> bool:
        """Whether the cache holds all that the lock names of a step's checkpoints."""
        self.books.stages(step_file(self.pipeline, step))  # which notes what is recorded of them
        return all(self._is_whole(step, agent) for agent in self._agents)

    @property
    def remarks(self) -> list[str]:
        """What of the steps that are no longer wanted is still in the cache, and why."""
        if not self._committed:
            return []
        several = len(self._committed) > 1
        which = f"step{'s' if several else ''} {ranges(sorted(self._committed))}"
        if not self._is_own:
            return [f"{which} may still be in DVC's cache, which lies outside the project: nothing is taken out of it"]
        are, them = ("are", "them") if several else ("is", "it")
        if self._history.named() is None:
            return [f"{which} {are} still in DVC's cache: git does not tell whether a commit names {them}"]
        return [f"{which} {are} still in DVC's cache, because a commit names {them}; `dvc gc -w` removes {them}"]

    def _wanted(self, plans: Sequence[AgentPlan], steps_done: int) -> set[int]:
        """The steps that `retention.cache` names; all agents' checkpoints of them are there."""
        which = self.pipeline.settings.retention.cache or "last"
        if which == "none" or steps_done < 0:
            return set()
        stay = set.intersection(*(set(plan.stay) for plan in plans)) & set(range(steps_done + 1))
        return stay if which == "kept" else stay & {0, steps_done}

    # --- into the cache ----------------------------------------------------------------------------------------------

    def _keep(self, step: int, flagged: set[int]) -> bool:
        """Whether a step's checkpoints are in the cache, after putting them there."""
        if step in flagged and all(self._is_whole(step, agent) for agent in self._agents):
            return True
        try:
            recorded = all(self._add(step, agent) for agent in self._agents)
        except _NotByLinkError as refusal:
            self._tell(step, str(refusal))
            return False
        if recorded and step not in flagged:
            set_cached(self.pipeline, step, cached=True)
        return recorded

    def _tell(self, step: int, why: str) -> None:
        # A start that is linked with its model folder is made again from that; everything else is worth a word.
        if why and why not in self._said:
            self._said.add(why)
            self.told.append(
                f"checkpoints are not in DVC's cache: {why} (step {step}). They do not follow `dvc checkout` and "
                "`dvc push`; `retention.cache: last` puts them there all the same, `none` says no more of it"
            )

    def _add(self, step: int, agent: str) -> bool:
        """Put a checkpoint into the cache, the list of its files first; False if it is not the recorded one."""
        from dvc_data.hashfile.build import build
        from dvc_data.hashfile.db import add_update_tree
        from dvc_data.hashfile.tree import Tree

        folder, recorded = self._folder(step, agent), self._recorded(step, agent)
        repo = self.books.repo
        _, _, tree = build(self._odb, str(folder.resolve()), repo.fs, "md5", ignore=repo.dvcignore, dry_run=True)
        if not isinstance(tree, Tree) or tree.oid != recorded:
            return False
        files = [(folder.joinpath(*name), info.value) for name, _, info in tree]
        self._check_free(path for path, _ in files)
        listed = Path(self._odb.oid_to_path(recorded))
        if not self._has(recorded):
            with flushed_copies():
                add_update_tree(self._odb, tree)  # before its files: what a kill leaves of them is found by it
        for path, oid in files:
            if not self._has(oid):
                self._put(path, oid, linked_elsewhere=step == 0)
        objects = [Path(self._odb.oid_to_path(oid)) for _, oid in files]
        flush_names({path.parent for path in (listed, *objects)}, Path(self._odb.path), set())
        return True

    def _has(self, oid: str) -> bool:
        """Whether the cache has an object; a damaged one is removed."""
        from dvc_objects.errors import ObjectFormatError

        try:
            check_object(self._odb, oid)
        except (FileNotFoundError, ObjectFormatError):
            return False
        return True

    def _check_free(self, files: Iterable[Path]) -> None:
        """Raises: _NotByLinkError: a file is private, and nobody has asked for it to be in the cache."""
        if self._is_asked:
            return
        for path in files:
            if not path.stat().st_mode & stat.S_IROTH:
                raise _NotByLinkError(f"{path.name} is not readable to all, and what DVC has in its cache is")

    def _put(self, path: Path, oid: str, *, linked_elsewhere: bool) -> None:
        """Make an object of a file: by reflink, else by hard link, else, where that was asked for, by copying.

        A file that has another name besides is not linked: it may be the user's own, and an object is write-protected.
        """
        from dvc_objects.fs.system import reflink
        from dvc_objects.fs.utils import tmp_fname

        target = Path(self._odb.oid_to_path(oid))
        self._odb.makedirs(str(target.parent))
        scratch = target.with_name(tmp_fname(target.name))
        try:
            try:
                reflink(str(path), str(scratch))  # type: ignore[no-untyped-call]
            except OSError:
                if path.is_symlink() or path.stat().st_nlink > 1:
                    self._copy(path, scratch, "" if linked_elsewhere else "its files have other names besides")
                else:
                    try:
                        os.link(path, scratch)
                    except OSError:
                        self._copy(path, scratch, "the cache is where neither reflinks nor hard links reach")
            self._odb.protect(str(scratch))
            flush(scratch)
            scratch.replace(target)
        finally:
            scratch.unlink(missing_ok=True)

    def _copy(self, path: Path, scratch: Path, why: str) -> None:
        if not self._is_asked:
            raise _NotByLinkError(why)
        shutil.copyfile(path, scratch)

    @property
    def _is_asked(self) -> bool:
        return self.pipeline.settings.retention.cache is not None

    # --- out of the cache --------------------------------------------------------------------------------------------

    def _drop(self, step: int) -> bool:
        """Take a step's weights and optimizers out of the cache, where nothing else is known to need them; returns
        whether there was nothing of it.

        Objects that a commit names, that another folder in the cache lists, or that a `.dvc` file or the lock of a
        stage of the user's names, stay, and so do the small files beside the weights: steps and runs share them, and
        `dvc gc` removes them.
        """
        nothing = True
        for agent in self._agents:
            oid = self._recorded(step, agent)
            own = Path(self._odb.oid_to_path(oid)) if oid else None
            if own is None or not own.is_file():
                continue
            nothing = False
            if self._is_another_runs(step, oid):
                continue
            committed = self._history.named() if self._is_own else None
            if committed is None or oid.removesuffix(".dir") in committed:
                self._committed.add(step)
                continue
            needed = self._needed(own) | committed
            if oid in needed or oid.removesuffix(".dir") in needed:  # another's as well: a start as it came
                continue
            listed = self._listed(own).items()
            going = {
                name: Path(self._odb.oid_to_path(md5))
                for name, md5 in listed
                if name.endswith(".safetensors") and md5 not in needed
            }
            _unlink_from(self._folder(step, agent), going)
            for path in going.values():
                path.unlink(missing_ok=True)
            self._manifests.pop(str(own), None)
            own.unlink(missing_ok=True)
        return nothing

    def _needed(self, own: Path) -> frozenset[str]:
        """All objects that other folders in the cache list, and the text of every `.dvc` file's hash."""
        others = {path for path in _listings(own.parent.parent) if path != str(own)}
        self._manifests = {path: names for path, names in self._manifests.items() if path in others}
        for path in others - self._manifests.keys():
            self._manifests[path] = frozenset(self._listed(Path(path)).values())
        if self._tracked is None:
            self._tracked = frozenset(_tracked_files(self.pipeline.root, self.pipeline.folder))
        return frozenset().union(*self._manifests.values(), self._tracked)

    @staticmethod
    def _listed(path: Path) -> dict[str, str]:
        """File -> object of a folder in the cache; empty where that cannot be read."""
        try:
            return {item["relpath"]: item["md5"] for item in load_json(path)}
        except (OSError, ValueError, TypeError, KeyError):
            return {}

    def _is_another_runs(self, step: int, oid: str) -> bool:
        """Whether another run of the project has made the same checkpoint: equal runs do."""
        mine = step_file(self.pipeline, step).with_name("dvc.lock").resolve()
        locks = (self.pipeline.root / "pipelines").rglob(f"steps/{step:04d}/dvc.lock")
        return any(oid.encode() in _content(path) for path in locks if path.resolve() != mine)

    @functools.cached_property
    def _is_own(self) -> bool:
        """Whether the cache lies in the project; one elsewhere may be shared with projects that nobody here knows."""
        return Path(self._odb.path).resolve().is_relative_to(Path(self.books.repo.root_dir).resolve())

    @functools.cached_property
    def _history(self) -> History:
        return History(self.pipeline.root)

    # --- names -------------------------------------------------------------------------------------------------------

    @property
    def _agents(self) -> list[str]:
        return list(self.pipeline.settings.agents)

    @functools.cached_property
    def _odb(self) -> Any:
        return self.books.repo.cache.local

    def _folder(self, step: int, agent: str) -> Path:
        return self.pipeline.layout.checkpoint(step, agent)

    def _recorded(self, step: int, agent: str) -> str:
        """The hash of a checkpoint in the lock; empty where there is none. Of a step that nobody has looked at, its
        text says it."""
        folder = self._folder(step, agent)
        if (known := self.books.checkpoints.get(folder.resolve())) is not None:
            return known
        text = _content(step_file(self.pipeline, step).with_name("dvc.lock")).decode("utf-8", "replace")
        recorded = output_md5(text, os.path.relpath(folder, self.pipeline.root))
        return self.books.checkpoints.setdefault(folder.resolve(), recorded)

    def _is_whole(self, step: int, agent: str) -> bool:
        """Whether the cache has the recorded checkpoint's list, undamaged, and every file of it."""
        oid = self._recorded(step, agent)
        listed = Path(self._odb.oid_to_path(oid)) if oid else Path()
        if not oid or f"{hashlib.md5(_content(listed), usedforsecurity=False).hexdigest()}.dir" != oid:
            return False
        return all(Path(self._odb.oid_to_path(md5)).is_file() for md5 in self._listed(listed).values())


def _listings(objects: Path) -> Iterator[str]:
    """The paths of all lists of folders in the cache: thousands, after every step."""
    with os.scandir(objects) as folders:
        for folder in folders:
            if len(folder.name) == 2 and folder.is_dir():
                with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
                    yield from (entry.path for entry in entries if entry.name.endswith(".dir"))


def _unlink_from(folder: Path, going: Mapping[str, Path]) -> None:
    """Where a checkpoint's files are symbolic links to objects that go (`cache.type symlink`), make them files."""
    scratch = folder.with_name(f".{folder.name}.tmp-{os.getpid()}-pruned")  # beside it: `remove_leftovers` clears that
    for name, target in going.items():
        file = folder / name
        if not file.is_symlink() or not target.is_file() or file.resolve() != target.resolve():
            continue
        storage.remove(scratch)
        try:
            os.link(target, scratch)
        except OSError:
            shutil.copy2(target, scratch)
        flush(scratch)
        scratch.replace(file)
        flush(file.parent)


def _tracked_files(root: Path, pipeline: Path) -> Iterator[str]:
    """The hashes that `.dvc` files and the locks of the user's own stages name; `_is_another_runs` looks at runs'."""
    run = pipeline.resolve()
    for path in dvc_records(root):
        is_of_a_step = path.parent.parent.name == "steps"
        if path.suffix == ".dvc" or not (is_of_a_step or path.resolve().is_relative_to(run)):
            yield from (found.decode() for found in MD5.findall(_content(path)))


def _content(path: Path) -> bytes:
    """A file's content; empty where it cannot be read: a pipe, a link that leads nowhere."""
    with contextlib.suppress(OSError):
        return read_bytes(path)
    return b""
