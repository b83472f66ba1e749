"""What `pipelines/<study>/sweep.yaml` says: base runs, variants laid over each, seeds; and the cells that this makes.

A cell is one run. Its params.yaml extends the base's with the settings of the whole sweep, then the variant's, then one
value of every key of the grid, then its seeds.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from hacpo.artifacts.text_files import YamlError, load_yaml
from hacpo.errors import SettingsError
from hacpo.settings.base import NAME, Section, knob, merged
from hacpo.settings.params import refusal

SWEEP = "sweep.yaml"
_MOST_CELLS = 10_000
_NOT_A_VARIANTS = ("extends", "seed", "start_seed")
_COMPACT: Mapping[str, Any] = {
    "retention": {"keep_last": 1, "keep_every": None, "keep_best": None, "cache": "none"},
    "report": {"problems_per_step": 0},
}
"""Settings that no stage trains by, and that leave little on disk."""


class SweepSettings(Section):
    """A sweep.yaml."""

    bases: dict[str, str] = knob(
        doc="Name -> a pipeline folder, or a YAML file of settings, relative to this file.", min_length=1
    )
    variants: dict[str, dict[str, Any] | None] = knob(
        doc="Name -> settings laid over every base; null: none.", min_length=1
    )
    grid: dict[str, list[Any]] = knob({}, doc="Dotted key -> values: every variant with every combination of them.")
    seeds: list[int] = knob(doc="Seeds of the runs.", min_length=1)
    start_seeds: list[int] = knob(
        [], doc="Seeds of the warm starts: every seed with every one of them. Empty: as the base has it, or its seed."
    )
    settings: dict[str, Any] = knob({}, doc="Settings laid over all bases, below the variants'.")
    retention: Literal["compact", "base"] = knob(
        "compact",
        doc="`compact`: of checkpoints the start and the last stay, out of DVC's cache, and the report shows no "
        "rollouts. `base`: as the bases have it.",
    )
    keep: Literal["runs", "results"] = knob(
        "runs", doc="`results`: a run that has ended and whose results are collected is removed from the disk."
    )
    audit: bool = knob(False, doc="Audit every run that has ended; one with findings is not collected.")


@dataclass(frozen=True)
class Cell:
    """One run of a sweep.

    Attributes:
        base, variant: what they are called in sweep.yaml; a variant with its values of the grid.
        seed: the run's; start_seed: its warm starts', None where sweep.yaml says nothing of it.
        extends: the base's settings, a file.
        changes: what is laid over them.
    """

    base: str
    variant: str
    seed: int
    start_seed: int | None
    extends: Path
    changes: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Its place below the sweep's folder."""
        start = "" if self.start_seed is None else f"start-{self.start_seed}-"
        return f"{self.base}/{self.variant}/{start}seed-{self.seed}"


@dataclass(frozen=True)
class SweepFile:
    """A sweep.yaml and its folder."""

    folder: Path
    settings: SweepSettings

    @classmethod
    def read(cls, folder: Path) -> SweepFile:
        """Read and check `folder/sweep.yaml`.

        Raises:
            SettingsError: it is missing or not usable.
        """
        folder = folder.parent if folder.name == SWEEP else folder
        path = folder / SWEEP
        try:
            content = load_yaml(path)
        except FileNotFoundError:
            raise SettingsError(f"there is no {SWEEP}", where=folder, remedy="docs/sweep.md shows one") from None
        except OSError as error:
            raise SettingsError(f"cannot be read: {error.strerror}", where=path) from None
        except YamlError as error:
            where = f"{path}:{error.line}" if error.line else path
            raise SettingsError(f"not valid YAML: {error}", where=where) from None
        try:
            settings = SweepSettings.model_validate(content)
        except ValidationError as error:
            raise refusal(error, path, SweepSettings) from None
        sweep = cls(folder, settings)
        sweep._check()
        return sweep

    def _check(self) -> None:
        where, settings = self.folder / SWEEP, self.settings
        for kind, names in (("bases", settings.bases), ("variants", settings.variants)):
            wrong = next((name for name in names if not NAME.fullmatch(name)), None)
            if wrong is not None:
                raise SettingsError(
                    f"{kind}: {wrong!r} cannot be a name", where=where, expected="letters, digits, '-' and '_'"
                )
        for kind, seeds in (("seeds", settings.seeds), ("start_seeds", settings.start_seeds)):
            if len({*seeds}) < len(seeds) or min(seeds, default=0) < 0:
                raise SettingsError(f"{kind}: expected whole numbers from 0, each once", where=where, found=seeds)
        runs = len(settings.bases) * len(settings.variants) * len(settings.seeds) * max(len(settings.start_seeds), 1)
        if (count := runs * math.prod(map(len, settings.grid.values()))) > _MOST_CELLS:
            raise SettingsError("describes too many runs", where=where, expected=f"at most {_MOST_CELLS}", found=count)
        for key, values in settings.grid.items():
            if not values:
                raise SettingsError(f"grid: {key} has no value", where=where, remedy="name some, or leave it out")
        for kind, tree in (
            ("settings", settings.settings),
            *((f"variants.{n}", t or {}) for n, t in settings.variants.items()),
            ("grid", {key.partition(".")[0]: values for key, values in settings.grid.items()}),
        ):
            taken = next((key for key in _NOT_A_VARIANTS if key in tree), None)
            if taken is not None:
                raise SettingsError(
                    f"{kind}: {taken} is not a variant's to set",
                    where=where,
                    remedy="see `bases`, `seeds`, `start_seeds`",
                )
        for name, base in settings.bases.items():
            if not self._base(base).is_file():
                raise SettingsError(f"bases.{name}: there is no such file", where=where, found=self._base(base))
        made = Counter(cell.name for cell in self.cells())
        twice = next((name for name, count in made.items() if count > 1), None)
        if twice is not None:
            raise SettingsError("grid: two combinations have one name", where=where, found=twice)

    def _base(self, given: str) -> Path:
        path = self.folder / given
        return path / "params.yaml" if path.is_dir() else path

    def cells(self) -> list[Cell]:
        """Every run of the sweep: seed by seed, so that whoever stops early has all variants of some seeds."""
        settings = self.settings
        starts: list[int | None] = [*settings.start_seeds] or [None]
        common = merged(_COMPACT if settings.retention == "compact" else {}, settings.settings)
        return [
            Cell(base, variant, seed, start, self._base(path), _with_seeds(merged(common, changes), seed, start))
            for seed, start in itertools.product(settings.seeds, starts)
            for base, path in settings.bases.items()
            for variant, changes in self._variants()
        ]

    def _variants(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Every variant with every combination of the grid's values."""
        for (name, changes), *chosen in itertools.product(
            self.settings.variants.items(),
            *([(key, value) for value in values] for key, values in self.settings.grid.items()),
        ):
            tree: Mapping[str, Any] = changes or {}
            for key, value in chosen:
                inner: Any = value
                for part in reversed(key.split(".")):
                    inner = {part: inner}
                tree = merged(tree, inner)
            yield "-".join([name, *(f"{key.rpartition('.')[2]}-{_spelled(value)}" for key, value in chosen)]), tree


def _with_seeds(changes: Mapping[str, Any], seed: int, start: int | None) -> dict[str, Any]:
    return {"seed": seed, **({} if start is None else {"start_seed": start}), **changes}


def _spelled(value: Any) -> str:
    """A value as a part of a name."""
    return re.sub(r"[^A-Za-z0-9]+", "_", f"{value:g}" if isinstance(value, float) else str(value)).strip("_") or "none"
