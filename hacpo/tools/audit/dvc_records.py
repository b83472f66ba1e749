"""DVC's records against the files: what every dvc.lock says of a run, hashed anew.

`dvc status` trusts its own notes of modification times and sizes; an audit must not, so every dependency and output is
read again, once. Not by DVC: its `Repo` writes into .dvc/tmp as soon as it is made and takes seconds to start, its hash
waits for ever for whoever should write into a pipe, and a copy of a run need not be a DVC project.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hacpo.artifacts.layout import Layout
from hacpo.artifacts.tables import CHECKPOINT
from hacpo.artifacts.text_files import YamlError, load_json, load_yaml, parse_yaml, read_text
from hacpo.pipeline.catalogue import REPORT_STAGE
from hacpo.pipeline.records.dvc_files import rendered
from hacpo.tools.audit.audit_run import AuditRun

CHECK = "lock"
"""Name of the invariant in every finding of this module."""

_MD5 = re.compile(r"[0-9a-f]{32}(?:\.dir)?")
"""As DVC spells it."""

_ALWAYS_IGNORED = (".git", ".git/", ".hg/", ".dvc/")
"""What DVC leaves out of every folder, whatever .dvcignore says."""


@dataclass(frozen=True)
class Digest:
    """What DVC records of a path: `md5` (of a folder: of its manifest, with `.dir` behind), bytes, and number of files
    (folders only)."""

    md5: str
    size: int
    nfiles: int | None = None


@dataclass(frozen=True)
class _Record:
    """One dependency or output in a dvc.lock."""

    lock: Path
    stage: str
    path: str
    digest: Digest
    is_output: bool


@dataclass(frozen=True)
class _Declared:
    """One stage of a dvc.yaml, its templates filled in."""

    cmd: str
    deps: frozenset[str]
    outs: frozenset[str]
    params: frozenset[str]
    settings: frozenset[str]
    """Files that the parameters are of."""

    def names(self, record: _Record) -> bool:
        """Whether it is one of the stage's dependencies or outputs."""
        return record.path in (self.outs if record.is_output else self.deps)


class Hasher:
    """Hashes files and folders as DVC 3 does; each file is read once, whatever folders it is a part of.

    Args:
        root: the project's; paths are relative to it, and its .dvcignore applies.
    """

    def __init__(self, root: Path) -> None:
        import pathspec

        ignore = root / ".dvcignore"
        lines = ignore.read_text(encoding="utf-8").splitlines() if ignore.is_file() else []
        self._ignored = pathspec.GitIgnoreSpec.from_lines([*_ALWAYS_IGNORED, *lines])
        self._root = root
        self._known: dict[str, Digest] = {}

    @property
    def files(self) -> int:
        """Files hashed so far."""
        return len(self._known)

    def digest(self, path: str) -> Digest | None:
        """A file's or folder's digest; None where nothing is."""
        full = self._root / path
        if full.is_file():
            return self._file(path)
        if not full.is_dir():
            return None
        parts = {name: self._file(f"{path}/{name}") for name in self.names(path)}
        md5 = _manifest_md5({name: part.md5 for name, part in parts.items()})
        return Digest(md5, sum(part.size for part in parts.values()), len(parts))

    def parts(self, path: str) -> dict[str, str]:
        """MD5 of every file below a folder, by its path in it."""
        return {name: self._file(f"{path}/{name}").md5 for name in self.names(path)}

    def names(self, path: str) -> Iterator[str]:
        """Files below a folder that DVC would see, relative to it; links to folders are not followed."""
        full = self._root / path
        for folder, folders, files in os.walk(full):
            inner = Path(folder).relative_to(full).as_posix()
            prefix = "" if inner == "." else f"{inner}/"
            folders[:] = [name for name in folders if not self._ignored.match_file(f"{path}/{prefix}{name}/")]
            yield from (f"{prefix}{name}" for name in files if not self._ignored.match_file(f"{path}/{prefix}{name}"))

    def _file(self, path: str) -> Digest:
        if path not in self._known and not (self._root / path).is_file():
            self._known[path] = Digest("no regular file", 0)  # a pipe, which nobody waits for, or a link to nowhere
        if path not in self._known:
            with (self._root / path).open("rb") as stream:
                md5 = hashlib.file_digest(stream, functools.partial(hashlib.md5, usedforsecurity=False)).hexdigest()
                self._known[path] = Digest(md5, stream.tell())
        return self._known[path]


def _manifest_md5(parts: Mapping[str, str]) -> str:
    """What DVC calls a folder: the hash of the list of its files and theirs, with `.dir` behind."""
    manifest = [{"md5": parts[name], "relpath": name} for name in sorted(parts)]
    return f"{hashlib.md5(json.dumps(manifest, sort_keys=True).encode(), usedforsecurity=False).hexdigest()}.dir"


def check_locks(run: AuditRun) -> None:
    """Compare every dvc.lock of a run with the files, the settings and the dvc.yaml files, and those with the plan.

    Checked: MD5, size and number of files of every dependency and output; the parameters against `settings.json`;
    commands and the lists of dependencies, outputs and parameters against dvc.yaml; dvc.yaml against what `hacpo plan`
    stamps from params.yaml. Of a checkpoint between the first and the last step that is gone, only the records are
    compared with each other, because checkpoints are not cached and may be pruned. Stages without a record (run by
    hand, or not yet) are skipped, and so are entries of stages that the run no longer has, and steps beyond the last.

    No path is looked at that the plan does not name: whoever wrote a lock may have named any folder of this machine.
    """
    hasher = Hasher(run.pipeline.root)
    records: list[_Record] = []
    parameters: dict[str, list[tuple[Path, str, Any]]] = {}
    stages = 0
    last = run.settings.steps
    finished = all(run.layout.trace(last, agent).is_file() for agent in run.settings.agents)
    plan = rendered(run.pipeline)
    planned = any(path.exists() or path.with_name("dvc.lock").exists() for path in plan)
    for stamped, text in plan.items():
        path = run.pipeline.root / os.path.relpath(stamped, run.pipeline.root)  # the folder may be given in another way
        if planned:
            _compare_plan(run, path, text)
        else:
            run.skip("dvc.yaml", "there is none: every stage was run by hand")
        lock = path.with_name("dvc.lock")
        declared = _declared(text)
        entries, problem = _read_lock(lock)
        if problem:
            run.find(CHECK, lock, expected="a lock that DVC wrote", found=problem)
        for name in declared:
            if name not in entries:
                run.skip("the lock of a stage", "there is none: the stage was run by hand, or not yet")
                continue
            if name == REPORT_STAGE.name and not finished:
                run.skip("the report's lock", "the run has not come to its end, where the report is made anew")
                continue
            stages += 1
            try:
                recorded, params = _entry(lock, name, entries[name])
            except (KeyError, TypeError, ValueError, AttributeError):
                run.find(CHECK, lock, name, expected="an entry that DVC wrote", found="damaged")
                continue
            _compare_entry(run, lock, name, entries[name], declared[name], recorded, params)
            records += [record for record in recorded if declared[name].names(record)]
            for key, value in params.items():
                parameters.setdefault(key, []).append((lock, name, value))
    _compare_parameters(run, parameters)
    _compare_files(run, hasher, records)
    run.looked_at("locks", stages, hasher.files)


# --- reading ---------------------------------------------------------------------------------------------------------


def _read_lock(path: Path) -> tuple[dict[str, Any], str]:
    """Stage -> entry of a dvc.lock (empty where there is none), and what is wrong with it."""
    if not path.is_file():
        return {}, ""
    try:
        stages = load_yaml(path)["stages"]
    except OSError as error:
        return {}, f"no readable file: {error.strerror}"
    except YamlError as error:
        return {}, f"no YAML: {str(error)[:80]}"
    except (KeyError, TypeError):
        return {}, "no `stages`"
    return (stages, "") if isinstance(stages, dict) else ({}, "no `stages`")


def _entry(lock: Path, name: str, entry: Mapping[str, Any]) -> tuple[list[_Record], dict[str, Any]]:
    """Records and parameters of one stage in a lock.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: it is no entry that DVC wrote.
    """
    records = [
        _Record(lock, name, item["path"], _digest(item), is_output=kind == "outs")
        for kind in ("deps", "outs")
        for item in entry.get(kind, ())
    ]
    params = entry.get("params", {})
    _check_keys(params)
    return records, {key: value for values in params.values() for key, value in values.items()}


def _digest(item: Mapping[str, Any]) -> Digest:
    """What a lock says of a path, which it names too."""
    path, md5, size, nfiles = item["path"], item["md5"], item["size"], item.get("nfiles")
    counts = (size,) if nfiles is None else (size, nfiles)
    if not (isinstance(path, str) and _MD5.fullmatch(md5) and all(type(count) is int for count in counts)):
        raise ValueError("no record of DVC's")
    return Digest(md5, size, nfiles)


def _check_keys(value: Any) -> None:
    """Every key is a text, as in the settings that parameters are compared with."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
        raise ValueError("a key that is no text")
    for item in inner:
        _check_keys(item)


def _declared(text: str) -> dict[str, _Declared]:
    """Stage -> what a stamped dvc.yaml declares of it; its only templates are `${step}`, `${prev}`, `${item.agent}`."""
    content = parse_yaml(text)
    variables = {key: str(value) for item in content.get("vars", ()) for key, value in item.items()}
    stages = {}
    for name, entry in content["stages"].items():
        for agent in entry.get("matrix", {}).get("agent", [""]):
            tree = json.dumps(entry)
            for key, value in {**variables, "item.agent": agent}.items():
                tree = tree.replace(f"${{{key}}}", value)  # numbers and agents' names: JSON spells them as they are
            filled = json.loads(tree)
            params = {path: keys for item in filled.get("params", ()) for path, keys in item.items()}
            stages[f"{name}@{agent}" if agent else name] = _Declared(
                cmd=filled["cmd"],
                deps=frozenset(filled.get("deps", ())),
                outs=frozenset(out if isinstance(out, str) else next(iter(out)) for out in filled.get("outs", ())),
                params=frozenset(key for keys in params.values() for key in keys),
                settings=frozenset(params),
            )
    return stages


# --- comparing -------------------------------------------------------------------------------------------------------


def _compare_plan(run: AuditRun, path: Path, text: str) -> None:
    """A dvc.yaml against what params.yaml gives."""
    note = "`hacpo plan` stamps it from params.yaml"
    try:
        lines = read_text(path).splitlines()
    except (OSError, UnicodeDecodeError):
        run.find(CHECK, path, expected="a stamped dvc.yaml", found="no readable file", note=note)
        return
    for number, (wanted, present) in enumerate(itertools.zip_longest(text.splitlines(), lines), start=1):
        if wanted != present:
            ends = [line.strip() if line is not None else "end of file" for line in (wanted, present)]
            run.find(CHECK, path, f"line {number}", expected=ends[0], found=ends[1], note=note)
            return


def _compare_entry(
    run: AuditRun,
    lock: Path,
    name: str,
    entry: Mapping[str, Any],
    declared: _Declared,
    records: Sequence[_Record],
    params: Mapping[str, Any],
) -> None:
    """A lock's entry against the stage that dvc.yaml declares: command, and which paths and parameters."""
    if entry.get("cmd") != declared.cmd:
        run.find(CHECK, lock, name, "cmd", expected=declared.cmd, found=entry.get("cmd"))
    for kind, wanted, recorded in (
        ("deps", declared.deps, {record.path for record in records if not record.is_output}),
        ("outs", declared.outs, {record.path for record in records if record.is_output}),
        ("params", declared.params, set(params)),
    ):
        for path in sorted(wanted - recorded):
            run.find(CHECK, lock, name, kind, expected=path, found="not recorded")
        for path in sorted(recorded - wanted):
            run.find(CHECK, lock, name, kind, expected="not in dvc.yaml", found=path)
    files = set(entry.get("params", {}))
    if files != declared.settings:
        expected, found_in = (", ".join(sorted(names)) or "none" for names in (declared.settings, files))
        run.find(CHECK, lock, name, "params of", expected=expected, found=found_in)


def _compare_parameters(run: AuditRun, recorded: Mapping[str, list[tuple[Path, str, Any]]]) -> None:
    """Parameters in the locks against settings.json: the odd one out is the one that is named."""
    try:
        settings = load_json(run.layout.settings)
    except (OSError, ValueError, RecursionError):
        return  # the check of the settings says so
    for key, entries in recorded.items():
        now = _canonical(_lookup(settings, key))
        values = {_canonical(value) for _, _, value in entries}
        if len(values) == 1 and now not in values:
            run.find(
                CHECK,
                run.layout.settings,
                key,
                expected=values.pop(),
                found=now,
                count=len(entries),
                note=_recorded_by(run, [(name, lock) for lock, name, _ in entries]),
            )
            continue
        for lock, name, value in entries:
            if _canonical(value) != now:
                run.find(CHECK, lock, name, f"params {key}", expected=now, found=_canonical(value))


def _lookup(settings: Any, key: str) -> Any:
    for part in key.split("."):
        settings = settings.get(part) if isinstance(settings, dict) else None
    return settings


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)


def _compare_files(run: AuditRun, hasher: Hasher, records: Iterable[_Record]) -> None:
    """Every recorded path against the disk: where some records agree with it the others are wrong, else the file is."""
    by_path: dict[str, list[_Record]] = {}
    for record in records:
        by_path.setdefault(record.path, []).append(record)
    wrong: list[str] = []
    # Deepest first: a folder that differs because of what it holds is named by that.
    for path in sorted(by_path, key=lambda path: (-path.count("/"), path)):
        entries = sorted(by_path[path], key=lambda record: not record.is_output)  # the stage that made it comes first
        actual = hasher.digest(path)
        if actual is None and (step := _step_of_checkpoint(run, path)) is not None and _may_be_gone(run, step):
            if step not in run.not_here:
                run.skip("the files of a checkpoint", "it was pruned")
            actual = entries[0].digest
        odd = [record for record in entries if record.digest != actual]
        if actual is not None and len(odd) < len(entries):
            for record in odd:
                _find_odd_record(run, record, actual)
        elif not any(inner.startswith(f"{path}/") for inner in wrong):
            wrong.append(path)
            _find_changed(run, hasher, entries, actual, _manifest(run.pipeline.root, by_path, path))


def _find_odd_record(run: AuditRun, record: _Record, actual: Digest) -> None:
    column = _difference(record.digest, actual)
    run.find(
        CHECK,
        record.lock,
        record.stage,
        f"{record.path} {column}",
        expected=getattr(actual, column),
        found=getattr(record.digest, column),
        note=f"{'output' if record.is_output else 'dependency'} on disk",
    )


def _difference(record: Digest, actual: Digest) -> str:
    return next(name for name in ("md5", "size", "nfiles") if getattr(record, name) != getattr(actual, name))


def _find_changed(
    run: AuditRun,
    hasher: Hasher,
    entries: Sequence[_Record],
    actual: Digest | None,
    manifest: Mapping[str, str] | None,
) -> None:
    """The findings for a path that is not what any lock says; of a folder, its files where DVC's cache lists them."""
    first = entries[0]
    note = _recorded_by(run, [(record.stage, record.lock) for record in entries])
    path = run.pipeline.root / first.path
    if actual is None:
        run.find(CHECK, path, expected=first.digest.md5, found="missing", note=note)
        return
    column = _difference(first.digest, actual)
    if column != "md5" or manifest is None or actual.nfiles is None:
        wanted, here = getattr(first.digest, column), getattr(actual, column)
        run.find(CHECK, path, column=column, expected=wanted, found=here, note=note)
        return
    parts = hasher.parts(first.path)
    for name in sorted(manifest.keys() | parts.keys()):
        if manifest.get(name) != parts.get(name):
            wanted, here = manifest.get(name, "no such file"), parts.get(name, "missing")
            run.find(CHECK, path / name, column="md5", expected=wanted, found=here, note=note)


def _manifest(root: Path, by_path: Mapping[str, Sequence[_Record]], path: str) -> dict[str, str] | None:
    """The files that a recorded folder held and their MD5, as DVC's cache lists them for it, or for a folder around it
    that was recorded as a whole; None where it does not (any more)."""
    wanted = by_path[path][0].digest.md5
    for outer in (path, *(parent.as_posix() for parent in Path(path).parents)):
        for record in by_path.get(outer, ()):
            held = _cached_manifest(root, record.digest.md5)
            inner = {} if held is None else _below(held, "" if outer == path else f"{path[len(outer) + 1 :]}/")
            if inner and _manifest_md5(inner) == wanted:
                return inner
    return None


def _below(manifest: Mapping[str, str], prefix: str) -> dict[str, str]:
    return {name.removeprefix(prefix): md5 for name, md5 in manifest.items() if name.startswith(prefix)}


def _cached_manifest(root: Path, md5: str) -> dict[str, str] | None:
    path = root / ".dvc" / "cache" / "files" / "md5" / md5[:2] / md5[2:]
    if not md5.endswith(".dir") or not path.is_file():
        return None
    try:
        return {item["relpath"]: item["md5"] for item in load_json(path)}
    except (ValueError, TypeError, KeyError):
        return None  # what it says would be checked anyway


def _step_of_checkpoint(run: AuditRun, path: str) -> int | None:
    """The step of a path that is a whole checkpoint, or the folder of a step's checkpoints."""
    place = CHECKPOINT.place_of(path)
    if place is None or Path(path) != Layout(Path("artifacts") / run.pipeline.run).checkpoint(*place):
        return None
    step, agent = place
    return step if step <= run.settings.steps and agent in ("", *run.agents) else None


def _may_be_gone(run: AuditRun, step: int) -> bool:
    """Whether a step's checkpoints may be missing: pruned, or not in this copy of the run."""
    return 0 < step < run.settings.steps or step in run.not_here


def _recorded_by(run: AuditRun, records: Sequence[tuple[str, Path]]) -> str:
    """`generate@ada in pipelines/small/steps/0001/dvc.lock and 3 more`."""
    stage, lock = records[0]
    more = f" and {len(records) - 1} more" if len(records) > 1 else ""
    return f"recorded by {stage} in {os.path.relpath(lock, run.pipeline.root)}{more}"
