"""Recording stages in DVC without DVC running them, so that `dvc repro` and `hacpo run` leave the same locks."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hacpo.artifacts.durability import flush_names, set_aside
from hacpo.artifacts.links import check_dvc_links
from hacpo.artifacts.storage import atomic, refusal, refused, remove
from hacpo.errors import ArtifactError, BusyError, HacpoError, SettingsError, first_line
from hacpo.pipeline.locking.leases import lease
from hacpo.pipeline.records import rwlock
from hacpo.pipeline.records.databases import give_up_when_refused
from hacpo.pipeline.records.distrust import distrusting, open_regular_files_alone, refuse_odd_names
from hacpo.pipeline.records.flushing import flushed_copies, linked_at_once
from hacpo.pipeline.records.lock_text import printed, with_stage
from hacpo.pipeline.records.order import is_checkpoint
from hacpo.pipeline.records.parameters import parsed_once

_GIVE_BACK_SECONDS = 10.0
_LOOK_SECONDS = 0.01
_LISTING = re.compile(r"/\.[\w-]+\.tmp(\.with_meta)?")
"""What DVC calls the list of a folder's files that it keeps in memory (`Tree.digest`)."""


@functools.cache
def _adapt_dvc() -> None:
    """What DVC is to do otherwise in this process, from here on (see also `distrust.open_regular_files_alone`)."""
    from dvc import rwlock as dvc_rwlock
    from dvc.dependency import param

    for name in ("dvc", "dvc_data", "dvc_objects"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # also turns off their progress bars: we show our own
    dvc_rwlock._edit_rwlock = rwlock.edited  # a kill while DVC works in this process cuts nothing off
    param.read_param_file = parsed_once(param.read_param_file)
    dvc_rwlock.rwlock = rwlock.without_reading(dvc_rwlock.rwlock)


def project_root(root: Path) -> str:
    """The root of the DVC repository that a project's root lies in. Nothing is written, as `Repo` would; from here on
    DVC opens regular files alone in this process.

    Raises:
        SettingsError: it lies in none, or in one that DVC cannot use.
        ArtifactError: one of DVC's files there is none, or a link through which DVC would write.
    """
    from dulwich.repo import UnsupportedExtension, UnsupportedVersion
    from dvc.config import Config
    from dvc.exceptions import DvcException, NotDvcRepoError
    from dvc.repo import Repo
    from dvc.scm import SCM, SCMError

    open_regular_files_alone()
    refuse_odd_names()
    try:
        repo_root = str(Repo.find_root(str(root)))
        check_dvc_links(Path(repo_root, Repo.DVC_DIR))
        config = Config(str(Path(repo_root, Repo.DVC_DIR)))
        SCM(repo_root, no_scm=config["core"].get("no_scm", False))
    except NotDvcRepoError:
        raise SettingsError(
            "is no DVC project",
            where=root.resolve(),
            remedy="run `dvc init` there (without git: `dvc init --no-scm`)",
        ) from None
    except SCMError:
        raise SettingsError(
            "is a DVC project of a git repository that is not there",
            where=repo_root,
            remedy="run `git init` there, or `dvc config core.no_scm true`",
        ) from None
    except (UnsupportedExtension, UnsupportedVersion) as error:
        raise SettingsError(
            "is a git repository that DVC cannot read",
            where=repo_root,
            found=first_line(error),
            remedy="clone it whole (without --filter), or run `dvc config core.no_scm true`",
        ) from None
    except DvcException as error:
        raise SettingsError(f"DVC cannot use this project: {error}", where=root.resolve()) from None
    return repo_root


class Books:
    """DVC's view of a project.

    Raises:
        SettingsError: the project is no DVC repository.
        ArtifactError: a link lies where DVC writes (`hacpo.artifacts.links`); nothing was written.
    """

    def __init__(self, root: Path) -> None:
        from dvc.repo import Repo

        _adapt_dvc()
        self.repo = Repo(project_root(root))
        give_up_when_refused(self.repo)
        self.restored = 0
        self._claim: rwlock.Claim | None = None
        self._is_open = False
        self._order: dict[tuple[str, str], int] = {}
        """(dvc.yaml, stage) -> its place in the file."""
        self._pruned: dict[str, tuple[Any, Any]] = {}
        """Outputs that are not cached and not there, though their stage is current -> hash and size in its lock."""
        self._flushed: set[Path] = set()
        """Folders of the cache whose names are on the disk."""
        self.checkpoints: dict[Path, str] = {}
        """Checkpoints of the stages looked at so far -> the hash of the folder that their lock says."""
        self._tmp = Path(self.repo.tmp_dir)
        self._hardlink: bool = self.repo.config["core"].get("hardlink_lock", False)
        self.repo.lock = rwlock.guard(self._tmp, "lock", hardlink=self._hardlink)
        self.repo.lock._friendly = False  # no "waiting to acquire lock" across the live view

    @contextmanager
    def open(self, wait_seconds: float = 600.0) -> Iterator[None]:
        """Hold DVC's lock while the block works with DVC, and say in our words what DVC raises there. Another DVC
        command that has the lock is waited for; a block within one that has it takes nothing more.

        Raises:
            BusyError: the other command has not given it back in time.
            StorageError: the disk refuses what DVC writes.
            ArtifactError: DVC cannot do it for another reason.
        """
        if self._is_open:
            with self._in_our_words():
                yield
            return
        self._lock(wait_seconds)
        self._is_open = True
        busy = "{} records stages of this project"
        try:
            with self._in_our_words(), lease(self._tmp, "dvc", "hacpo", wait_seconds=wait_seconds, busy=busy):
                if self._claim is not None:
                    self._claim.take()
                yield
        finally:
            self._is_open = False
            _forget_listings()
            self.repo.lock.unlock()

    @contextmanager
    def _in_our_words(self) -> Iterator[None]:
        """Turn what DVC raises in the block into what `open` says."""
        from diskcache import Timeout
        from dvc.exceptions import DvcException

        try:
            yield
        except (FileNotFoundError, NotADirectoryError) as error:  # of what DVC hashes: a link that leads nowhere
            raise ArtifactError(
                f"cannot be read: {error.strerror}",
                where=error.filename,
                remedy="put it in its place, or remove the link",
            ) from None
        except (OSError, sqlite3.Error) as error:
            raise refused(_place(error, self.repo.root_dir), error) from None
        except DvcException as error:
            if refusal(error) is not None:
                raise refused(_place(error, self.repo.root_dir), error) from None
            raise ArtifactError(f"DVC refuses: {error}", where=self.repo.root_dir) from None
        except Timeout as error:
            if refusal(error) is not None:
                raise refused(_place(error, self.repo.root_dir), error) from None
            raise BusyError(
                "another DVC command holds its databases", where=self.repo.root_dir, remedy="wait for it, or stop it"
            ) from None

    def _lock(self, wait_seconds: float) -> None:
        from dvc.lock import LockError

        deadline = time.monotonic() + wait_seconds
        # DVC itself looks twice a second: runs side by side would wait far longer than the others work.
        try_once = getattr(self.repo.lock, "_do_lock", self.repo.lock.lock)
        while True:
            try:
                try_once()
                return
            except LockError as error:
                if refusal(error) is not None:  # it is not held: it cannot be
                    raise refused(self._tmp, error) from None
                time.sleep(_LOOK_SECONDS)
                if time.monotonic() > deadline:
                    raise BusyError(
                        "another DVC command holds this project",
                        where=self.repo.root_dir,
                        remedy="wait for it, or stop it",
                    ) from None

    @contextmanager
    def claimed(self, folder: Path, wait_seconds: float = 600.0) -> Iterator[None]:
        """Keep DVC's own commands from changing what is in a folder of the project, while the block runs.

        Raises:
            BusyError: a DVC command works there.
        """
        root = self.repo.root_dir
        claimed = os.path.join(root, os.path.relpath(folder.resolve(), root))
        claim = rwlock.Claim(str(self._tmp), claimed, self._hardlink)
        with self.open(wait_seconds):
            claim.take()
        self._claim = claim
        try:
            yield
        finally:
            self._claim = None
            with contextlib.suppress(HacpoError), self.open(_GIVE_BACK_SECONDS):
                claim.give_back()  # should that fail: DVC removes entries of processes that are gone

    def mend_rwlock(self) -> bool:
        """See `rwlock.mend`. The caller has the books `open`."""
        return rwlock.mend(str(self._tmp), self._hardlink)

    def stages(self, path: Path) -> list[Any]:
        """The stages of one dvc.yaml, in file order, matrix expanded."""
        stages = list(self.repo.stage.load_all(str(path)))
        self._order.update({(stage.path, stage.name): number for number, stage in enumerate(stages)})
        for stage in stages:
            self._note_checkpoints(stage)
        return stages

    def _note_checkpoints(self, stage: Any) -> None:
        """Have DVC leave checkpoints alone, also those in its cache, which it would fill by copying:
        `hacpo.pipeline.records.caching` does that by link."""
        for out in stage.outs:
            if is_checkpoint(out.fs_path):
                out.use_cache = False
                if out.hash_info:
                    self.checkpoints[Path(out.fs_path).resolve()] = out.hash_info.value

    def make_current(
        self, stage: Any, *, may_be_pruned: bool = False, before: Callable[[Any], None] = lambda _stage: None
    ) -> bool:
        """Make a stage current without running it: by recording again what is there, or by restoring its outputs from
        DVC's run cache. Returns whether it is current, as it may have been before; if not, it must run.

        Args:
            may_be_pruned: as `compare` has it.
            before: is called with a stage that is not current, before anything of it is removed; may refuse.
        """
        with self.open():
            if self.compare(stage, may_be_pruned=may_be_pruned):
                return True
            if self._lacks_only_objects(stage, may_be_pruned=may_be_pruned):
                self._record_again(stage)
                return True
            before(stage)
            restored = self._restored(stage)
            self.restored += restored
            return restored

    @property
    def replaces_outputs(self) -> bool:
        """Whether recording a stage takes its outputs away for a moment, to put links to the cache in their place."""
        return next(iter(self.repo.cache.local.cache_types), None) in ("hardlink", "symlink")

    def is_new(self, stage: Any) -> bool:
        """Whether the stage must run because DVC knows nothing of it: it was never recorded, and its run cache has
        nothing that was made of the same inputs. The caller has it `open`.

        False says nothing: `make_current` decides. Unlike that it writes no record, so the stages before this one need
        not be recorded yet.
        """
        if any(out.hash_info for out in stage.outs) or not all(dep.exists for dep in stage.deps):
            return False
        from dvc.stage.cache import _can_hash

        stage.save_deps()
        with _as_noted(stage.deps), distrusting(self.repo):
            return not _can_hash(stage) or self.repo.stage_cache._load(stage) is None

    def compare(self, stage: Any, *, may_be_pruned: bool = False) -> bool:
        """Compare a stage with its record; returns whether its lock agrees with everything that it reads and makes.
        The caller has it `open`.

        A pruned checkpoint counts as what the lock of the stage that made it says, which is remembered from there for
        the stages that read it. So compare in the order of the pipeline.

        Args:
            may_be_pruned: outputs that DVC does not cache may be missing.
        """
        current = not stage.changed() or (
            not stage.changed_stage()
            and all(self._as_recorded(dep) for dep in stage.deps)
            and all((may_be_pruned and _is_gone(out)) or not out.status() for out in stage.outs)
        )
        for out in stage.outs:
            if current and _is_gone(out):
                self._pruned[out.fs_path] = (out.hash_info, out.meta)
            else:
                self._pruned.pop(out.fs_path, None)
        return bool(current)

    def take_for_current(self, path: Path) -> None:
        """Take what the lock of one dvc.yaml says of outputs that are gone for what they were, as `compare` does
        with stages that are current."""
        for out in (out for stage in self.stages(path) for out in stage.outs if _is_gone(out)):
            self._pruned[out.fs_path] = (out.hash_info, out.meta)

    def _lacks_only_objects(self, stage: Any, *, may_be_pruned: bool) -> bool:
        """Whether all is there as the stage's lock says, but for copies in the cache, and for what may be pruned."""
        return (
            not stage.changed_stage()
            and all(self._as_recorded(dep) for dep in stage.deps)
            and all(
                (may_be_pruned and _is_gone(out)) or (out.hash_info and out.exists and not out.changed_checksum())
                for out in stage.outs
            )
        )

    def _record_again(self, stage: Any) -> None:
        """Record a stage all of whose files are there, but for what was pruned, which keeps its record."""
        gone = [out for out in stage.outs if _is_gone(out)]
        for out in gone:
            self._pruned[out.fs_path] = (out.hash_info, out.meta)
            out.save = out.commit = lambda *_, **__: None
        try:
            with self._assuming_pruned(stage):
                self._record(stage)
        finally:
            for out in gone:
                del out.save, out.commit

    def difference(self, stage: Any) -> str | None:
        """Why a stage would make something else than its record says, in words; None if it is not recorded, or only
        lacks outputs. The caller has it `open`."""
        if not any(out.hash_info for out in stage.outs):
            return None
        if stage.changed_stage():
            return f"the stage `{stage.cmd}` has changed"
        for dep in stage.deps:
            if dep.exists and dep.status():
                return f"{dep} has changed"
        for out in stage.outs:
            if not out.use_cache and out.exists and out.status():
                return f"{out} is not what this run has made"
        return None

    def _as_recorded(self, dep: Any) -> bool:
        if not self._is_pruned(dep):
            return not dep.status()
        return bool(dep.hash_info == self._pruned[dep.fs_path][0])

    def _is_pruned(self, dep: Any) -> bool:
        return dep.fs_path in self._pruned and not dep.exists

    def pruned_inputs(self, stage: Any) -> list[Path]:
        """What the stage reads and was pruned."""
        return [Path(dep.fs_path) for dep in stage.deps if self._is_pruned(dep)]

    def same_as_recorded(self, stage: Any, made: Path, copy: Path) -> bool:
        """Whether a folder has the files of `made`, an output of the stage, as its lock says."""
        from dvc.output import Output

        with self.open():
            recorded = next(out.hash_info for out in stage.outs if Path(out.fs_path).resolve() == made.resolve())
            return bool(Output(stage, str(copy.resolve()), cache=False).get_hash() == recorded)

    def _restored(self, stage: Any) -> bool:
        from dvc.exceptions import DvcException
        from dvc.stage.cache import RunCacheNotFoundError

        missing = [dep for dep in stage.deps if not dep.exists and not self._is_pruned(dep)]
        if missing:
            return False
        _remove_outs(stage)
        with self._assuming_pruned(stage):
            try:
                with distrusting(self.repo), self._flushing(restoring=True), linked_at_once():
                    self.repo.stage_cache.restore(stage)
            except (RunCacheNotFoundError, DvcException):
                return False
            if any(not out.exists for out in stage.outs):
                return False
            self._record(stage)
        return True

    @contextmanager
    def _flushing(self, *, restoring: bool = False) -> Iterator[None]:
        """Have on the disk what DVC writes in the block, names and all, before a lock says that it is there.

        Names in the run cache excepted: an entry that is not there is only not found.

        Args:
            restoring: outputs are among it, and so may be the folders that hold them.
        """
        with flushed_copies() as folders:
            yield
        root, cache = Path(self.repo.root_dir), Path(self.repo.cache.legacy.path)
        outside = {folder for folder in folders if not folder.is_relative_to(cache) and folder.is_dir()}
        objects = {folder for folder in folders - outside if not folder.is_relative_to(cache / "runs")}
        flush_names(objects, root if cache.is_relative_to(root) else cache.parent, self._flushed)
        flush_names(outside, root, set() if restoring else outside)

    @contextmanager
    def _assuming_pruned(self, stage: Any) -> Iterator[None]:
        """Let DVC take the recorded hashes of pruned checkpoints that the stage reads, where it would look at files."""
        pruned = [dep for dep in stage.deps if self._is_pruned(dep)]
        for dep in pruned:
            dep.hash_info, dep.meta = self._pruned[dep.fs_path]
        with _as_noted(pruned):
            yield

    def begin(self, stage: Any, *, noted: bool = False) -> None:
        """Remove what the stage will make, and note what it reads.

        Where something is missing the stage will fail, and what it once made may be all that is left of it.

        Args:
            noted: `is_new` has just noted what it reads.
        """
        with self.open():
            if all(dep.exists for dep in stage.deps):
                _remove_outs(stage)
            if not noted:
                stage.save_deps(allow_missing=True)  # the stage itself says best what is missing

    def finish(self, stage: Any) -> None:
        """Record a stage that has run: hash its outputs, put them in the cache, write its lock.

        Raises:
            SettingsError: what the stage read has changed while it ran.
        """
        with self.open():
            changed = [str(dep) for dep in stage.deps if dep.workspace_status()]
            if changed:
                raise SettingsError(
                    "changed while the stage ran, so its result was not recorded", where=changed[0], remedy="run again"
                )
            with _as_noted(stage.deps):
                self._record(stage)

    def _record(self, stage: Any) -> None:
        # As DVC does itself: outputs that are not to be cached keep the whole stage out of the run cache.
        with distrusting(self.repo), self._flushing(), linked_at_once(), _printing_quickly():
            stage.save(run_cache=all(out.use_cache for out in stage.outs))
            stage.commit()
        self._write_lock(stage)
        self._note_checkpoints(stage)

    def _write_lock(self, stage: Any) -> None:
        """What `stage.dump(update_pipeline=False)` writes, but by rename: a kill leaves the old lock or the new one.

        The stages stand as in the dvc.yaml, whichever ended first.
        """
        from dvc.stage.serialize import to_lockfile

        path = Path(stage.dvcfile._lockfile.path)
        ((name, entry),) = to_lockfile(stage).items()
        text = with_stage(
            path.read_text(encoding="utf-8") if path.is_file() else "",
            name,
            entry,
            lambda known: self._order.get((stage.path, known), len(self._order)),
            str(path),
        )
        with atomic(path) as scratch:
            scratch.write_text(text, encoding="utf-8")


def _place(error: BaseException, root: str) -> Path:
    """What the disk refused, if it is known, else DVC's folder."""
    found = refusal(error)
    return Path(os.path.relpath(found.path)) if found is not None and found.path else Path(root) / ".dvc"


def _forget_listings() -> None:
    """Remove the lists that DVC leaves of every folder it hashes in the process's file system in memory, for ever: it
    looks through all of them for each new one, longer in every step than in the one before."""
    from fsspec.implementations.memory import MemoryFileSystem

    store = MemoryFileSystem.store
    for name in [name for name in store if _LISTING.fullmatch(name)]:
        del store[name]


@contextmanager
def _as_noted(deps: Sequence[Any]) -> Iterator[None]:
    """Have DVC take dependencies for what was noted of them a moment ago, and not look at their files once more for
    every question."""
    for dep in deps:
        dep.get_hash = functools.partial(getattr, dep, "hash_info")
        dep.save = lambda: None
    try:
        yield
    finally:
        for dep in deps:
            del dep.get_hash, dep.save


@contextmanager
def _printing_quickly() -> Iterator[None]:
    """Have DVC print the entries of its run cache as we print those of locks."""
    from dvc.utils import serialize

    dump_yaml = serialize.dump_yaml

    def quick(path: str, data: Any, fs: Any = None, **how: Any) -> None:
        if fs is not None or how or (text := printed(data, 0)) is None:
            dump_yaml(path, data, fs=fs, **how)
        else:
            Path(path).write_text(text, encoding="utf-8")

    serialize.dump_yaml = quick
    try:
        yield
    finally:
        serialize.dump_yaml = dump_yaml


def _remove_outs(stage: Any) -> None:
    """Remove what a stage makes, folders under another name: neither a kill nor a power cut leaves a part of one."""
    for out in stage.outs:
        path = Path(out.fs_path)
        if path.is_dir() and not path.is_symlink() and not out.persist:
            aside = path.with_name(f".{path.name}.tmp-{os.getpid()}-removed")
            set_aside(path, aside)
            remove(aside)
    stage.remove_outs(ignore_remove=False, force=False)


def _is_gone(out: Any) -> bool:
    """Whether an output that DVC does not cache was recorded and is not there."""
    return bool(not out.use_cache and out.hash_info and not out.exists)
