"""What a disk may hold after a power cut, from what was done to it: files and folders with what was flushed of them.

The weakest promise that POSIX makes: content that was not flushed may be gone, old, or zeros; a change of a folder's
names that was not followed by a flush of that folder may have happened or not, whatever happened before or after it.
"""

from __future__ import annotations

import enum
import os
import random
import time
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from pathlib import Path


class Way(enum.Enum):
    """Which of the disks that are possible."""

    LEAST = "nothing that was not flushed"
    NAMES = "every name, and no content that was not flushed"
    SOME = "some of it, by chance"


@dataclass(frozen=True)
class Record:
    """One line of a journal (`powercut.c`)."""

    kind: str
    inode: int
    path: str
    second: str
    content: bytes


@dataclass(eq=False)
class File:
    """Content as it is, and as it was flushed."""

    latest: bytes = b""
    flushed: bytes = b""

    def on_disk(self, way: Way, dice: random.Random) -> bytes:
        """What a cut leaves of it."""
        if way is Way.SOME and self.latest != self.flushed:
            return dice.choice([self.flushed, self.latest, bytes(len(self.latest))])
        return self.flushed


@dataclass(eq=False)
class Link:
    """A symbolic link."""

    target: str


@dataclass(eq=False)
class Folder:
    """Names as they are, and as they were flushed, with the changes between."""

    names: dict[str, Node] = field(default_factory=dict)
    flushed: dict[str, Node] = field(default_factory=dict)
    changes: list[tuple[str, Node | None]] = field(default_factory=list)

    def change(self, name: str, node: Node | None) -> None:
        """Give a name, or take it away."""
        if node is None:
            self.names.pop(name, None)
        else:
            self.names[name] = node
        self.changes.append((name, node))

    def flush(self) -> None:
        """Have the names on the disk."""
        self.flushed = dict(self.names)
        self.changes.clear()

    def on_disk(self, way: Way, dice: random.Random) -> dict[str, Node]:
        """The names that a cut leaves."""
        if way is not Way.SOME:
            return self.flushed if way is Way.LEAST else self.names
        left, share = dict(self.flushed), dice.choice([0.2, 0.5, 0.8])
        for name, node in self.changes:
            if dice.random() < share:
                if node is None:
                    left.pop(name, None)
                else:
                    left[name] = node
        return left


Node = File | Link | Folder


class Disk:
    """A tree, changed record by record."""

    def __init__(self) -> None:
        self.root = Folder()
        self._inodes: dict[int, Node] = {}

    @classmethod
    def of(cls, root: Path) -> Disk:
        """A tree that is on the disk as it is."""
        disk = cls()
        disk.root = disk._read(root)
        return disk

    def _read(self, at: Path) -> Folder:
        folder = Folder()
        for entry in sorted(os.scandir(at), key=lambda entry: entry.name):
            path, inode = Path(entry.path), entry.inode()
            if entry.is_symlink():
                folder.names[entry.name] = Link(os.readlink(path))
            elif entry.is_dir():
                folder.names[entry.name] = self._read(path)
            else:
                if inode not in self._inodes:
                    content = path.read_bytes()
                    self._inodes[inode] = File(content, content)
                folder.names[entry.name] = self._inodes[inode]
        self._inodes[at.stat().st_ino] = folder
        folder.flush()
        return folder

    def find(self, path: str) -> Node | None:
        """What is there as of the last record."""
        node: Node | None = self.root
        for name in path.split("/") if path else ():
            node = node.names.get(name) if isinstance(node, Folder) else None
        return node

    def _holder(self, path: str) -> tuple[Folder, str]:
        parent, _, name = path.rpartition("/")
        folder = self.find(parent)
        assert isinstance(folder, Folder), path
        return folder, name

    def apply(self, record: Record) -> None:
        """Do what was done."""
        kind = record.kind
        if kind in "WSD":
            node = self._inodes.get(record.inode)
            if isinstance(node, File):
                self._found_renamed(node, record.path)
                node.latest = record.content
                node.flushed = record.content if kind == "S" else node.flushed
            elif isinstance(node, Folder):
                node.flush()
            return
        folder, name = self._holder(record.path)
        if kind == "R":
            moved = folder.names[name]
            folder.change(name, None)
            target, new = self._holder(record.second)
            target.change(new, moved)
        elif kind in "UX":
            folder.change(name, None)
        elif kind == "L":
            folder.change(name, self._inodes[record.inode])
        else:
            made: Node = Link(record.second) if kind == "Y" else File() if kind == "C" else Folder()
            if record.inode:
                self._inodes[record.inode] = made
            folder.change(name, made)

    def names_of_changed(self, record: Record) -> list[str]:
        """All names of the file that a record gives other content, before it is applied."""
        node = self._inodes.get(record.inode)
        if not isinstance(node, File) or node.latest == record.content:
            return []

        def named(folder: Folder, above: str) -> Iterator[str]:
            for name, inner in folder.names.items():
                if inner is node:
                    yield f"{above}{name}"
                elif isinstance(inner, Folder):
                    yield from named(inner, f"{above}{name}/")

        return list(named(self.root, ""))

    def _found_renamed(self, node: File, path: str) -> None:
        """Take notice of a rename within a folder that the journal does not have."""
        if path and self.find(path) is not node and not path.endswith(" (deleted)"):
            folder, name = self._holder(path)
            for old in [old for old, other in folder.names.items() if other is node]:
                folder.change(old, None)
            folder.change(name, node)

    # --- after a cut -------------------------------------------------------------------------------------------------

    def after(self, way: Way, dice: random.Random) -> dict[str, Node | bytes]:
        """Path -> content (of a file), or what else is there, after a cut behind the last record."""
        contents: dict[int, bytes] = {}
        found: dict[str, Node | bytes] = {}

        def walk(folder: Folder, above: str) -> None:
            for name, node in folder.on_disk(way, dice).items():
                path = f"{above}{name}"
                if isinstance(node, File):
                    if id(node) not in contents:
                        contents[id(node)] = node.on_disk(way, dice)
                    found[path] = contents[id(node)]
                else:
                    found[path] = node
                    if isinstance(node, Folder):
                        walk(node, f"{path}/")

        walk(self.root, "")
        return found

    def write(self, root: Path, way: Way, dice: random.Random) -> None:
        """Make such a disk, an hour old, with its hard links. Objects of DVC's cache are write-protected, for which DVC
        trusts them most."""
        root.mkdir()
        made: dict[int, Path] = {}
        for name, node in self.after(way, dice).items():
            path = root / name
            if isinstance(node, Folder):
                path.mkdir()
            elif isinstance(node, Link):
                path.symlink_to(node.target)
            else:
                assert isinstance(node, bytes)
                if len(node) > 1 and id(node) in made:  # one object for all names of a file, and of no other's
                    path.hardlink_to(made[id(node)])
                else:
                    made[id(node)] = path
                    path.write_bytes(node)
                os.utime(path, (time.time() - 3600,) * 2)
                if name.startswith(".dvc/cache/files/"):
                    path.chmod(0o444)


def read_journal(path: Path, root: Path) -> list[Record]:
    """The records of a journal, with paths relative to its root."""
    data, at, records = path.read_bytes(), 0, []
    base = f"{root.resolve()}/"

    def inner(raw: bytes) -> str:
        return os.path.normpath(raw.decode()).removeprefix(base)

    while at < len(data):
        line = data.index(b"\n", at)
        kind, inode, *lengths = data[at:line].decode().split()
        parts, at = [], line + 1
        for length in map(int, lengths):
            parts.append(data[at : at + length])
            at += length
        second = parts[1].decode() if kind == "Y" else inner(parts[1]) if parts[1] else ""
        records.append(Record(kind, int(inode), inner(parts[0]) if parts[0] else "", second, parts[2]))
    return records


def contents_below(found: dict[str, Node | bytes], paths: Container[str]) -> dict[str, set[tuple[str, bytes]]]:
    """Of each of the paths that is there: path below it -> content; of a file, itself under the name ""."""
    below: dict[str, set[tuple[str, bytes]]] = {path: set() for path in found if path in paths}
    for path, content in found.items():
        if isinstance(content, bytes):
            at = len(path)
            while at > 0:
                if path[:at] in below:
                    below[path[:at]].add((path[at + 1 :], content))
                at = path.rfind("/", 0, at)
    return below


def latest_contents(node: Node | None, below: str = "") -> Iterator[tuple[str, bytes]]:
    """What a program would read there: path below it -> content."""
    if isinstance(node, File):
        yield below, node.latest
    elif isinstance(node, Folder):
        for name, inner in node.names.items():
            yield from latest_contents(inner, f"{below}/{name}" if below else name)


def _in_place(disk: Disk, record: Record, units: Callable[[str], bool]) -> Iterator[str]:
    """Names under which something begins, or changes, that a program may be looking at: a file is created, one that has
    names gets other content, a folder that is one output is made empty."""
    if record.kind == "C" or (record.kind == "M" and units(record.path)):
        yield record.path
    elif record.kind in "WS":
        yield from disk.names_of_changed(record)


def violations(
    disk: Disk,
    records: list[Record],
    dice: random.Random,
    promised: Callable[[str], bool],
    units: Callable[[str], bool],
    *,
    most: int = 400,
    random_disks: int = 3,
    seen: Callable[[], None] = lambda: None,
) -> Iterator[str]:
    """Names that are not given something whole at once, or that after some cut stand for something that never was
    given them whole.

    Args:
        disk: before the first record; changed.
        promised: whether a path is said to be whole whenever it exists.
        units: whether a folder that is there at the beginning is one output.
        most: cuts to look at, of all that there are, by chance.
        seen: is called for every disk that was looked at.
    """
    versions: dict[str, set[frozenset[tuple[str, bytes]]]] = {}

    def note(path: str) -> None:
        versions.setdefault(path, set()).add(frozenset(latest_contents(disk.find(path))))

    for path, node in disk.after(Way.NAMES, dice).items():
        if promised(path) and (isinstance(node, bytes) or (isinstance(node, Folder) and units(path))):
            note(path)
    moments = [number for number, record in enumerate(records) if record.kind in "RLUXM"]
    chosen = set(moments if len(moments) <= most else dice.sample(moments, most))
    for number, record in enumerate(records):
        for name in _in_place(disk, record, units):
            if promised(name):
                yield f"{name} is not whole when it gets its name: operation {number} of {len(records)} writes in place"
        disk.apply(record)
        path = record.second if record.kind == "R" else record.path
        if record.kind in "RL" and promised(path):
            note(path)
        if number not in chosen:
            continue
        for way in (Way.LEAST, Way.NAMES, *[Way.SOME] * random_disks):
            found = disk.after(way, dice)
            seen()
            for name, contents in contents_below(found, versions).items():
                if contents not in versions[name]:
                    yield f"{name} is not whole after a cut behind operation {number} of {len(records)}: {way.value}"
