"""No link on the way to a file of a run: what is written there would be written where the link leads.

hacpo makes none. DVC links single files to objects of its cache (`cache.type symlink`), which are replaced, not written
through. A link further up, be it in a run that was handed over, leads to another run's files, or anywhere.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path

from hacpo.artifacts.layout import BESIDE, Layout
from hacpo.artifacts.storage import meant_for
from hacpo.artifacts.tables import ARTIFACTS, OWNERS, owner_dir
from hacpo.errors import ArtifactError

OURS = {artifact.path().partition("/")[0] for artifact in ARTIFACTS} | {*BESIDE}
"""What a run has in its folder; anything else there is the user's own, and nobody's to look at."""
OF_DVC = {".keys", "dvc.lock", "dvc.yaml", "steps"}
"""What hacpo writes in a pipeline's folder."""
_OBJECT = re.compile(r"/files/md5/[0-9a-f]{2}/[0-9a-f]{30}$")
_PARTS = tuple(owner_dir(kind, "") for kind in OWNERS)


def is_ours(name: str, ours: Collection[str]) -> bool:
    """Whether a name is one of some files' that hacpo writes, or of what is on its way to be one or to be removed."""
    return name in ours or meant_for(name) in ours


def leads_to_object(path: Path) -> bool:
    """Whether a link leads to a file of DVC's cache, or to where one was, by the name that DVC gives one."""
    return _OBJECT.search(os.path.realpath(path)) is not None and not path.is_dir()


def check_links(layout: Layout, pipeline: Path) -> None:
    """Refuse a run with a link where hacpo writes or reads: among its artifacts, down to the folders of agents and
    learners, and among its DVC files.

    `artifacts/<run>` as a whole may be a link, which is how a run is put on another disk. What lies in a checkpoint is
    looked at by whoever reads it (`model_folder.check_checkpoint`).

    Args:
        pipeline: the pipeline's folder.

    Raises:
        ArtifactError: there is one.
    """
    for folder, ours in ((layout.root, OURS), (pipeline, OF_DVC)):
        for link in _links(folder, ours):
            raise ArtifactError(
                "is a link, and no file of a run is written or read through one",
                where=link,
                found=f"a link to {os.readlink(link)}",
                remedy=f"remove it, or put what it leads to in its place; {layout.root} as a whole may be a link",
            )


def check_way(start: Path, end: Path, *, is_file: bool = False) -> None:
    """Refuse a link on the way from one folder down to a file or folder below it, both included.

    Args:
        is_file: what is at the end, if it is there, must be a regular file.

    Raises:
        ArtifactError: there is one, or something else than a file.
    """
    for place in reversed([end, *end.parents[: len(end.relative_to(start).parts)]]):
        if place.is_symlink():
            raise ArtifactError(
                "is a link, and nothing of a sweep is written or read through one",
                where=place,
                found=f"a link to {os.readlink(place)}",
                remedy="remove it, or put what it leads to in its place",
            )
    if is_file and os.path.lexists(end) and not end.is_file():
        raise ArtifactError("is no regular file", where=end, remedy="remove it")


def check_dvc_links(dvc: Path) -> None:
    """Refuse a project where what DVC and hacpo write below `.dvc/tmp` (locks, lists, leases), or DVC into
    `.dvc/.gitignore`, would go through a link.

    Here a link to an object of DVC's cache is refused as well: DVC makes none, and would write into the object.
    `.dvc/cache` may be a link, which is how a cache is put on another disk. A file below `.dvc/tmp` that has another
    name elsewhere (a hard link) is refused too: what is written into it is written into the other.

    Args:
        dvc: the project's `.dvc`.

    Raises:
        ArtifactError: `.dvc`, `.dvc/tmp` or something in it is one, or a hard link of a file elsewhere.
    """
    temporary = dvc / "tmp"
    links = [path for path in (dvc, temporary, dvc / ".gitignore") if path.is_symlink()]
    if not links:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(temporary) as entries:
            links = sorted(Path(entry.path) for entry in entries if entry.is_symlink())
    for link in links:
        raise ArtifactError(
            "is a link, and nothing of DVC's is written through one",
            where=os.path.relpath(link),
            found=f"a link to {os.readlink(link)}",
            remedy="remove the link",
        )
    # Locks may be hard links of each other, and come and go between two looks.
    for path in sorted(_known_elsewhere(temporary) & _known_elsewhere(temporary)):
        raise ArtifactError(
            "is the same file as one elsewhere (a hard link), and nothing of DVC's is written into another's",
            where=os.path.relpath(path),
            remedy="remove it here; the other stays",
        )


def _known_elsewhere(folder: Path) -> set[Path]:
    """Files right in a folder that have more names than those in it."""
    names: dict[tuple[int, int], list[Path]] = defaultdict(list)
    links: dict[tuple[int, int], int] = {}
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                status = os.lstat(entry.path)
                if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
                    names[status.st_dev, status.st_ino].append(Path(entry.path))
                    links[status.st_dev, status.st_ino] = status.st_nlink
    return {path for file, paths in names.items() if links[file] > len(paths) for path in paths}


def _links(folder: Path | str, names: set[str] | None = None) -> Iterator[Path]:
    """Links below a folder, of these names in it, that do not lead to DVC's objects."""
    try:
        with os.scandir(folder) as entries:
            looked_at = sorted(
                (entry for entry in entries if names is None or entry.name in names), key=lambda entry: entry.name
            )
    except (FileNotFoundError, NotADirectoryError):  # not made yet, or just removed by a stage that ends
        return
    for entry in looked_at:
        if entry.is_symlink():
            if not leads_to_object(Path(entry.path)):
                yield Path(entry.path)
        elif entry.is_dir(follow_symlinks=False) and not entry.name.startswith(_PARTS):
            yield from _links(entry.path)
