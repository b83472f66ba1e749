"""A pipeline folder `pipelines/<run>` and the run it describes."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hacpo.artifacts.layout import Layout
from hacpo.artifacts.links import check_links
from hacpo.errors import SettingsError
from hacpo.pipeline.catalogue import StageSpec
from hacpo.settings import params
from hacpo.settings.base import NAME
from hacpo.settings.root import Settings

_PIPELINES, _STEPS = "pipelines", "steps"
COPYING = ".copying"
"""File in a pipeline's folder for as long as `hacpo copy` makes it: until it has gone, nothing else works there."""

_NAMED = 8
"""Runs that a message names where it could mean any."""


@dataclass(frozen=True)
class Pipeline:
    """One experiment: its folder, its settings and where its artifacts live.

    Runs may be grouped in folders: `pipelines/tiny/size/hacpo` is the run `tiny/size/hacpo`.
    """

    folder: Path
    settings: Settings

    @classmethod
    def open(cls, folder: Path, overrides: Sequence[str] = (), *, within: bool = False) -> Pipeline:
        """Read and check `folder/params.yaml`, and look for links among the run's files.

        Args:
            within: a command that has opened it is at work on it, and this is a part of that: not looked again.

        Raises:
            SettingsError: the folder is no `pipelines/<run>`, or not yet; or its params.yaml is not usable.
            ArtifactError: a link lies where the run's files do (`hacpo.artifacts.links`).
        """
        folder = folder.parent if folder.name == "params.yaml" else folder
        name = _checked_name(folder)
        if not within and (folder / COPYING).exists():
            raise SettingsError(
                "is a copy that is not finished",
                where=folder,
                remedy="wait for its `hacpo copy`; if that was killed, give it again",
            )
        if not (folder / "params.yaml").is_file():
            raise SettingsError("there is no params.yaml", where=folder, remedy=_nearest(folder, name))
        _check_not_inside(folder)
        pipeline = cls(folder, params.load(folder / "params.yaml", overrides))
        if not within:
            check_links(pipeline.layout, folder)
        return pipeline

    @classmethod
    def to_be(cls, folder: Path, settings: Settings) -> Pipeline:
        """A pipeline with these settings that is not there yet.

        Raises:
            SettingsError: the folder cannot be one.
        """
        _checked_name(folder)
        _check_not_inside(folder)
        return cls(folder, settings)

    @property
    def run(self) -> str:
        """The run's name: the folder's, below `pipelines`."""
        return "/".join(_names(self.folder.resolve()))

    @property
    def root(self) -> Path:
        """The project's root, relative to the working directory where that is shorter to read."""
        resolved = self.folder.resolve()
        root = resolved.parents[len(_names(resolved))]
        return Path(os.path.relpath(root)) if root.is_relative_to(Path.cwd()) else root

    @property
    def settings_files(self) -> tuple[str, ...]:
        """params.yaml and what it extends, relative to the project's root.

        Raises:
            SettingsError: one lies outside the project, where DVC cannot follow it.
        """
        root = self.folder.resolve().parents[len(_names(self.folder.resolve()))]
        files = []
        for path in params.files(self.folder / "params.yaml"):
            if not path.resolve().is_relative_to(root):
                raise SettingsError("extends a file outside the project", where=self.folder, found=path)
            files.append(path.resolve().relative_to(root).as_posix())
        return tuple(files)

    @property
    def layout(self) -> Layout:
        """Where the run's artifacts live."""
        return Layout(self.root / "artifacts" / self.run)

    def changed_settings(self) -> dict[str, tuple[Any, Any]]:
        """Dotted key -> (what the run's files were made with, what params.yaml says) where the two differ; none before
        settings are resolved.

        Raises:
            OSError, ValueError: see `params.recorded`.
        """
        path = self.layout.settings
        return params.changed(params.recorded(path), params.dump(self.settings)) if path.is_file() else {}

    def command(self, name: str, step: int | None = None, **agent: str) -> str:
        """A command for this run, as a user types it in the project's root."""
        words = ["hacpo", name, f"pipelines/{self.run}"]
        if step is not None:
            words += ["--step", str(step)]
        for option, whose in agent.items():
            words += [f"--{option}", whose]
        return " ".join(words)

    def command_for(self, spec: StageSpec, step: int = 0, agent: str = "") -> str:
        """The command that makes a stage's output of a step and an agent, as far as it has one for each."""
        words = self.command(
            spec.command,
            step if spec.at in ("step", "evaluation") else None,
            **({spec.per: agent} if spec.per != "run" else {}),
        )
        return f"{words} --side" if spec.side else words


def _checked_name(folder: Path) -> str:
    """The name of the run that a folder is for, if it can be for one."""
    parts = _names(folder.resolve())
    if not parts:
        named = Path(_PIPELINES) / folder
        raise SettingsError(
            "is no pipeline folder",
            where=folder,
            expected="<project>/pipelines/<run>",
            remedy=f"did you mean {named}?" if (named / "params.yaml").is_file() else "",
        )
    for part in parts:
        if not NAME.fullmatch(part) or part == _STEPS:
            raise SettingsError(
                f"{part!r} cannot be in the name of a run", where=folder, expected="letters, digits, '-' and '_'"
            )
    return "/".join(parts)


def _check_not_inside(folder: Path) -> None:
    whole = folder.resolve()
    for outer in list(whole.parents)[: len(_names(whole)) - 1]:
        if (outer / "params.yaml").is_file():
            raise SettingsError(
                "lies inside another run", where=folder, found=outer / "params.yaml", remedy="move one of the two"
            )


def _nearest(folder: Path, wanted: str) -> str:
    """What the user may have meant by a folder without params.yaml."""
    resolved = folder.resolve()
    pipelines = next(parent for parent in resolved.parents if parent.name == _PIPELINES)
    folders = (path.parent for path in pipelines.rglob("params.yaml") if path.is_file() and path.parent != resolved)
    runs = sorted(run.relative_to(pipelines).as_posix() for run in folders)
    inner = [run for run in runs if run.startswith(f"{wanted}/")]
    if inner:
        return f"it holds {len(inner)} runs; name one, for example {_PIPELINES}/{inner[0]}"
    near = difflib.get_close_matches(wanted, runs, n=1)
    if near:
        return f"did you mean {_PIPELINES}/{near[0]}?"
    more = f" and {len(runs) - _NAMED} more" if len(runs) > _NAMED else ""
    named = ", ".join(f"{_PIPELINES}/{run}" for run in runs[:_NAMED])
    return f"the runs here are {named}{more}" if runs else f"there is no run below {_PIPELINES}/"


def _names(resolved: Path) -> tuple[str, ...]:
    """The folder's path below the innermost `pipelines` folder; empty if it lies in none."""
    for depth, parent in enumerate(resolved.parents):
        if parent.name == _PIPELINES:
            return resolved.parts[-depth - 1 :]
    return ()
