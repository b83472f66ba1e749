"""Whether the DVC files of a run are those that its params.yaml asks for."""

from __future__ import annotations

import itertools
from pathlib import Path

from hacpo.artifacts.text_files import read_bytes
from hacpo.errors import MissingInputError, SettingsError
from hacpo.pipeline.project import Pipeline
from hacpo.pipeline.records.dvc_files import rendered
from hacpo.pipeline.records.order import step_files

_RESOLVE = "    cmd: hacpo resolve "
"""How the line begins that holds the digest of all files: it differs with any of them, and says nothing of which."""


def check_stamped(pipeline: Pipeline) -> None:
    """Compare the run's DVC files with what `hacpo plan` would stamp.

    Raises:
        MissingInputError: there are none.
        SettingsError: they are of other settings (or of another version of hacpo).
    """
    remedy = f"run `{pipeline.command('plan')}`"
    run_file = pipeline.folder / "dvc.yaml"
    if not run_file.is_file():
        raise MissingInputError("there is no such file", where=run_file, remedy=remedy)
    # `dvc repro` removes a stage's outputs before it begins; `hacpo run` restores them from the cache.
    remedy += f"; or change params.yaml back and run `{pipeline.command('run')}`"
    steps, stamped = pipeline.settings.steps, max(len(step_files(pipeline)) - 1, 0)
    if steps != stamped:
        raise SettingsError(
            "its DVC files are stamped for another number of steps than params.yaml has",
            where=pipeline.folder,
            expected=f"{steps} steps",
            found=stamped,
            remedy=remedy,
        )
    different = [
        (path, *difference) for path, text in rendered(pipeline).items() if (difference := _difference(path, text))
    ]
    if different:
        path, expected, actual = min(different, key=lambda entry: entry[1].startswith(_RESOLVE))
        raise SettingsError(
            "is stamped from other settings than params.yaml has",
            where=path,
            expected=f"`{expected.strip()}`",
            found=f"`{actual.strip()}`",
            remedy=remedy,
        )


def _difference(path: Path, text: str) -> tuple[str, str] | None:
    """The first line that a file should have and the one that it has, the one with the digest last; None: the same."""
    found = read_bytes(path).decode(errors="replace") if path.is_file() else ""
    lines = itertools.zip_longest(text.splitlines(), found.splitlines(), fillvalue="")
    different = [(wanted, other) for wanted, other in lines if wanted != other]
    return min(different, key=lambda pair: pair[0].startswith(_RESOLVE), default=None)
