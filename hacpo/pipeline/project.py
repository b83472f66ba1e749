"""A pipeline folder `pipelines/<run>` and the run it describes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hacpo import config
from hacpo import settings as settings_of
from hacpo.errors import SettingsError
from hacpo.layout import Layout


@dataclass(frozen=True)
class Pipeline:
    """One experiment: its folder, its settings and where its artifacts live."""

    folder: Path
    settings: config.Settings

    @classmethod
    def open(cls, folder: Path, overrides: Sequence[str] = ()) -> Pipeline:
        """Read and check `folder/params.yaml`.

        Raises:
            SettingsError: the folder is no `pipelines/<run>`, or its params.yaml is not usable.
        """
        folder = folder.parent if folder.name == "params.yaml" else folder
        resolved = folder.resolve()
        if resolved.parent.name != "pipelines":
            raise SettingsError("is no pipeline folder", where=folder, expected="<project>/pipelines/<run>")
        if not config.NAME.fullmatch(resolved.name):
            raise SettingsError("cannot be the name of a run", where=folder, expected="letters, digits, '-' and '_'")
        return cls(folder, settings_of.load(folder / "params.yaml", overrides))

    @property
    def run(self) -> str:
        """The run's name: the folder's."""
        return self.folder.resolve().name

    @property
    def root(self) -> Path:
        """The project's root, relative to the working directory where that is shorter to read."""
        root = self.folder.resolve().parent.parent
        return Path(os.path.relpath(root)) if root.is_relative_to(Path.cwd()) else root

    @property
    def layout(self) -> Layout:
        """Where the run's artifacts live."""
        return Layout(self.root / "artifacts" / self.run)

    def command(self, stage: str, step: int | None = None, **agent: str) -> str:
        """The command that makes a stage's output, as a user types it in the project's root."""
        words = ["hacpo", stage, f"pipelines/{self.run}"]
        if step is not None:
            words += ["--step", str(step)]
        for option, name in agent.items():
            words += [f"--{option}", name]
        return " ".join(words)

    def checkpoint_command(self, step: int, agent: str) -> str:
        """The command that makes an agent's checkpoint of a step."""
        return self.command("update", step, agent=agent) if step else self.command("warmup", agent=agent)
