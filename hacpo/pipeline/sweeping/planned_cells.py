"""The cells of a sweep as pipeline folders: which are made, which are stale, and which are done.

A cell is done when its results are collected: a small file of their own, beside the runs, which says what settings they
are of. It is written whole and last, so a sweep that is killed anywhere goes on where it was.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hacpo.artifacts import storage
from hacpo.artifacts.links import check_way
from hacpo.artifacts.text_files import read_text
from hacpo.errors import SettingsError
from hacpo.pipeline.project import Pipeline
from hacpo.pipeline.sweeping.sweep_file import SWEEP, Cell, SweepFile
from hacpo.pipeline.views.made_otherwise import UNTRAINED
from hacpo.pipeline.views.result_files import settings_of
from hacpo.pipeline.views.run_results import difference
from hacpo.settings import params

_MADE = "# Made by `hacpo sweep {}` from sweep.yaml: change that, not this.\n"
RESULTS, LOGS = ".results", ".logs"
"""Folders among a sweep's artifacts; no run can have such a name."""
LOCK = ".sweep.lock"


@dataclass(frozen=True, eq=False)
class PlannedCell:
    """A cell with the run that it is.

    Attributes:
        pipeline: the run, with the settings that sweep.yaml gives it, whether its params.yaml is written or not.
        text: of its params.yaml.
        group: the sweep's own folder of artifacts.
    """

    cell: Cell
    pipeline: Pipeline
    text: str
    group: Path = field(repr=False)

    @property
    def params(self) -> Path:
        """Its params.yaml."""
        return self.pipeline.folder / "params.yaml"

    @property
    def results(self) -> Path:
        """Where its results are once it is done."""
        return self.group / RESULTS / f"{self.cell.name}.parquet"

    @property
    def log(self) -> Path:
        """What its processes said."""
        return self.group / LOGS / f"{self.cell.name}.log"

    @property
    def done(self) -> bool:
        """Whether its results are collected, and of these settings."""
        collected = settings_of(self.results)
        return collected is not None and difference(collected, self.pipeline.settings) is None

    @property
    def stale(self) -> str | None:
        """The first setting for which steps are made again in which what it was made with differs from what the sweep
        asks for; None: none does."""
        try:
            recorded = params.recorded(self.pipeline.layout.settings)
        except FileNotFoundError:
            recorded = settings_of(self.results) or {}
        except (OSError, ValueError):
            return None  # it is made anew
        return difference(recorded, self.pipeline.settings, UNTRAINED) if recorded else None

    def write(self) -> bool:
        """Make or renew its params.yaml; returns whether it had to be.

        Raises:
            SettingsError: there is one that no sweep has made.
            StorageError: the disk refuses.
        """
        try:
            written = read_text(self.params)
        except FileNotFoundError:
            written = ""
        except (OSError, ValueError):
            written = "?"
        if written == self.text:
            return False
        if written and not written.startswith(_MADE.partition("{")[0]):
            raise SettingsError(
                "is not one that a sweep has made", where=self.params, remedy="move it, or rename the cell"
            )
        with storage.atomic(self.params) as scratch:
            scratch.write_text(self.text, encoding="utf-8")
        return True


def planned(sweep: SweepFile) -> list[PlannedCell]:
    """Every cell with its settings, checked; nothing is written.

    Raises:
        SettingsError: a base, a variant or their combination cannot be used, or the folder is no place for runs.
        ArtifactError: a link, or something that is no file, lies in the place of something of the sweep.
    """
    read: dict[Path, dict[str, Any]] = {}
    result = []
    for cell in sweep.cells():
        if cell.extends not in read:
            read[cell.extends] = params.read_params(cell.extends)
        where = f"{sweep.folder / SWEEP}: {cell.name}"
        settings = params.resolve(params.laid_over(read[cell.extends], cell.changes), where=where)
        folder = sweep.folder / cell.name
        pipeline = Pipeline.to_be(folder, settings)
        group = pipeline.layout.root.joinpath(*[os.pardir] * len(Path(cell.name).parts))
        group = Path(os.path.normpath(group))
        planned_cell = PlannedCell(cell, pipeline, _params_text(cell, folder, pipeline), group)
        _check_links(sweep.folder, planned_cell)
        result.append(planned_cell)
    return result


def _check_links(folder: Path, cell: PlannedCell) -> None:
    """A study that was handed over may lead elsewhere: what is written, and removed, must be its own."""
    check_way(folder, cell.pipeline.folder)
    check_way(cell.group, cell.pipeline.layout.root)
    check_way(cell.group, cell.results, is_file=True)
    check_way(cell.group, cell.log, is_file=True)
    check_way(cell.group, cell.group / LOCK, is_file=True)


def _params_text(cell: Cell, folder: Path, pipeline: Pipeline) -> str:
    study = pipeline.run.removesuffix(f"/{cell.name}")
    extends = os.path.relpath(cell.extends.resolve(), folder.resolve())
    lines = [_MADE.format(f"pipelines/{study}").rstrip("\n"), f"extends: {json.dumps(extends, ensure_ascii=False)}"]
    return "\n".join([*lines, *_lines(cell.changes)]) + "\n"


def _lines(tree: Mapping[str, Any]) -> list[str]:
    """Settings as YAML, a line each; JSON is YAML."""
    return [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in tree.items()]


def strays(sweep: SweepFile, cells: Iterable[PlannedCell]) -> list[Path]:
    """Folders of runs below the sweep's that are none of its cells."""
    known = {cell.params.resolve() for cell in cells}
    found = sorted(path for path in sweep.folder.rglob("params.yaml") if path.resolve() not in known)
    return [path.parent for path in found]
