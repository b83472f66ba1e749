"""One bit of one file of a finished run: the audit names it, or a reader does, or the run makes it again.

Every kind of file is hit in turn, at random places, those first of which a flip must be noticed. What is flipped keeps
its size; half of the flips keep the file's times too, as a disk does.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from pathlib import Path

from ruamel.yaml import YAML

from . import golden as whole
from . import starved
from .forks import Done, Forks
from .frame import Bench, Part, Trial
from .sandbox import copy_tree
from .starved import PIPELINE, RUN, Golden

_YAML = YAML(typ="safe", pure=True)
_RUN = ("run", PIPELINE, "--jobs", "1", "--yes")
UNNOTICED = {
    r"project/artifacts/small/\.locks/.*": "who held a lock, and what weights hashed to: made anew by the next holder",
    r"project/\.dvc/tmp/.*": "DVC's notes about processes, which are gone",
    r"(site|home|tmp)/.*": "DVC's notes about what it has hashed, made anew",
    r"project/\.dvc/cache/runs/.*": "what DVC made once; looked at when an output is gone, and then hashed",
    r"project/\.dvc/cache/files/.*": "copies; hashed before they are restored",
    r"project/\.dvc/config|project/\.dvcignore|project/models/.*": "the user's own files; a change is a change",
    r"project/pipelines/.*(params|dvc)\.yaml": "the user's settings, or stamped from them: a change is a change",
}
"""Files of which a flip alone need not be noticed, and why; what is then made must be right all the same."""
_CACHE = "project/.dvc/cache/"
_START_CACHED = f"{PIPELINE}/steps/0000/dvc.yaml differs"
"""Whether the start is in DVC's cache: it is where a later step has its weights there, which a flip may take away."""


def _flip(trial: Trial, path: Path) -> str:
    content, status = bytearray(path.read_bytes()), path.stat()
    at, bit = trial.dice.randrange(len(content)), trial.dice.randrange(8)
    content[at] ^= 1 << bit
    path.chmod(0o644)
    path.write_bytes(content)
    path.chmod(status.st_mode & 0o777)
    if trial.dice.random() < 0.5:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    return f"bit {bit} of byte {at} of {len(content)}"


def _kind(name: str) -> str:
    return re.sub(r"\b(ada|bo|cy)\b", "A", re.sub(r"\d+", "#", re.sub(r"\b([0-9a-f]{2}/)?[0-9a-f]{16,}", "H", name)))


def _excused(name: str) -> str | None:
    return next((reason for pattern, reason in UNNOTICED.items() if re.fullmatch(pattern, name)), None)


def _clean(trial: Trial, what: str, done: Done) -> None:
    if done.timed_out or done.code < 0:
        trial.find("wedge", f"{what}: killed, or did not end: {done.code}")
    elif "Traceback" in done.err or done.code == 70:
        trial.find("traceback", f"{what}: {done.err.strip()[-1500:]}")


def _attack(forks: Forks, golden: Golden, wanted: whole.Golden, name: str, trial: Trial) -> None:
    folder = trial.folder / "it"
    copy_tree(golden.finished, folder)
    what = f"{name}: {_flip(trial, folder / name)}"
    excused, cached = _excused(name), name.startswith(_CACHE)
    audit = starved.hacpo(forks, folder, "audit", PIPELINE)
    _clean(trial, f"audit of {what}", audit)
    trial.count(f"flip: {_kind(name)}")
    if audit.code == 0 and excused is None:
        audit = starved.hacpo(forks, folder, "audit", PIPELINE, "--deep")
        _clean(trial, f"deep audit of {what}", audit)
        trial.count("named by a deep audit alone" if audit.code else "not named by an audit")
    elif audit.code:
        trial.count("named by the audit")
    if cached:
        _without_outputs(folder)
    done = starved.hacpo(forks, folder, *_RUN)
    _clean(trial, f"run after {what}", done)
    trial.log.write_text(f"{what}\naudit {audit.code}\n{audit.out}\nrun {done.code}\n{done.out}\n{done.err}\n")
    taken = done.code == 0 and not _is_the_users(golden.finished, name)
    for wrong in wrongly_taken(name, [one for _, one in wanted.differences(folder / "project", RUN)]) if taken else ():
        trial.find("wrong bytes", f"{what}: the run takes it: {wrong} (audit: exit code {audit.code})")
    stays = cached and (folder / name).is_file() and not _is_whole(folder / name, golden.finished / name)
    if stays and done.code == 0:
        trial.find("wrong bytes", f"{what}: stays in the cache, though everything was to be restored")
    if excused is not None or audit.code or done.code:
        trial.count("may go unnoticed" if excused is not None else "noticed")
    elif (folder / name).read_bytes() == (golden.finished / name).read_bytes():
        trial.count("made again without a word")
    elif name.endswith("dvc.lock") and _records(golden.finished / name).items() <= _records(folder / name).items():
        trial.count("recorded again, beside an entry that nobody reads")
    else:
        trial.find("wrong bytes", f"{what}: stays, and nothing names it")


def _is_the_users(root: Path, name: str) -> bool:
    """Whether a change of a file is a change of what is asked for: a start is the user's model folder by hard link."""
    inode = (root / name).stat().st_ino
    if any(path.stat().st_ino == inode for path in (root / "project" / "models").rglob("*")):
        return True
    return name.startswith(("project/models/", "project/pipelines/", "project/.dvc/config", "project/.dvcignore"))


def wrongly_taken(name: str, differences: list[str]) -> list[str]:
    """What a run has made of a flip in a file: nothing but that file itself may differ after it, which the audit or a
    reader names, and nothing at all where it was to be left alone or restored."""
    inner = name.removeprefix("project/")
    allowed = () if _excused(name) is not None else (f"{inner} differs", f"{inner} is missing")
    return [one for one in differences if one not in (*allowed, _START_CACHED)]


def _is_whole(path: Path, before: Path) -> bool:
    return path.read_bytes() == before.read_bytes()


def _without_outputs(folder: Path) -> None:
    """All that a run has made is to come back from the cache, in which something is flipped."""
    for path in (folder / "project" / "artifacts" / RUN).iterdir():
        if path.name != ".locks":
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _records(lock: Path) -> dict[str, str]:
    """Stage -> what a lock says of it."""
    return {name: json.dumps(entry, sort_keys=True) for name, entry in _YAML.load(lock.read_bytes())["stages"].items()}


def run(bench: Bench) -> None:
    """See the module."""
    work = Path(tempfile.mkdtemp(prefix="hacpo-soak-"))
    forks = Forks(work / "out")
    try:
        golden = Golden.make(work / "golden", forks, starved.TWO)
        wanted = whole.Golden.of(golden.finished / "project", RUN, "")
        kinds: dict[str, list[str]] = {}
        for path in sorted(golden.finished.rglob("*")):
            if path.is_file() and not path.is_symlink() and path.stat().st_size:
                name = str(path.relative_to(golden.finished))
                kinds.setdefault(_kind(name), []).append(name)
        bench.count("kinds of files", len(kinds))
        names = [kinds[kind] for kind in sorted(kinds, key=lambda kind: (_excused(kinds[kind][0]) is not None, kind))]
        bench.tally.planned = 4 * len(names)
        parallel, bench.parallel = bench.parallel, 1  # one process that forks

        def trial(one: Trial) -> None:
            _attack(forks, golden, wanted, one.dice.choice(names[one.number % len(names)]), one)

        bench.spread(trial, range(bench.tally.planned))
        bench.parallel = parallel
    finally:
        forks.close()
        shutil.rmtree(work, ignore_errors=True)


PART = Part("flips", "one bit of every kind of file", run)
