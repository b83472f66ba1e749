"""Which other settings a run's own files can answer for, and which would need another run."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hacpo.artifacts import parquet
from hacpo.errors import SettingsError
from hacpo.pipeline.project import Pipeline
from hacpo.settings.algorithm import AlgorithmSettings
from hacpo.settings.base import merged
from hacpo.settings.params import changed, leaves, spoken_out
from hacpo.settings.root import Settings

ANSWERABLE = (
    "algorithm.recipe",
    "algorithm.rollouts.share",
    "algorithm.rollouts.share_rewards",
    "algorithm.capability",
    "algorithm.advantage",
    "algorithm.importance.alpha",
    "algorithm.importance.ratio_norm",
    "algorithm.importance.level",
    "algorithm.importance.reference",
    "algorithm.clip",
    "algorithm.loss.aggregation",
    "algorithm.loss.cross_weight",
)
"""Settings, or whole blocks, whose effect follows from a run's files."""


@dataclass(frozen=True)
class Question:
    """The settings of the run and those asked about.

    Attributes:
        changed: key -> (as run, as asked), of everything that differs and is answered for.
        kept: keys that the asked recipe would change as well, and that stay as in the run.
    """

    pipeline: Pipeline
    settings: Settings
    changed: dict[str, tuple[object, object]]
    kept: tuple[str, ...]

    @property
    def as_run(self) -> Settings:
        """What the files were made with."""
        return self.pipeline.settings

    @property
    def same_ratio(self) -> bool:
        """Whether ratios stay what they are."""
        return not any(f"algorithm.importance.{key}" in self.changed for key in ("ratio_norm", "level", "reference"))


def ask(folder: Path, overrides: Sequence[str]) -> Question:
    """The question that `--set` puts to a run.

    Raises:
        SettingsError: params.yaml or an override is not usable, or the files cannot answer for it.
    """
    known = leaves(Pipeline.open(folder).settings.model_dump())
    for override in overrides:
        key = override.partition("=")[0].strip()
        if not any(name == key or name.startswith(f"{key}.") or key.startswith(f"{name}.") for name in known):
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            raise SettingsError(
                "no such setting", where=f"--set {key}", remedy=f"did you mean {near[0]}?" if near else ""
            )
        if not _answerable(key):
            raise SettingsError(
                "no file of this run can tell: it would have led to other rollouts, updates or weights",
                where=f"--set {key}",
                remedy=f"what-if can answer for {', '.join(ANSWERABLE)}",
            )
    pipeline = Pipeline.open(folder)
    as_run, asked = _algorithm(pipeline.settings), _algorithm(Pipeline.open(folder, overrides).settings)
    differing = changed(as_run, asked)
    _check(pipeline.settings, differing)
    kept = tuple(key for key in differing if not _answerable(key))
    for key in kept:
        asked = merged(asked, _nested(key, differing[key][0]))
    algorithm = AlgorithmSettings.model_validate(asked["algorithm"])
    return Question(
        pipeline=pipeline,
        settings=pipeline.settings.model_copy(update={"algorithm": algorithm}),
        changed={key: values for key, values in differing.items() if key not in kept},
        kept=kept,
    )


def check_made_with(path: Path, settings: Settings) -> None:
    """Refuse a table that was made with other settings than params.yaml has now.

    Raises:
        SettingsError: the `algorithm` block of its `hacpo.settings` says something else.
    """
    recorded = {"algorithm": spoken_out(parquet.read_metadata(path)["settings"]).get("algorithm", {})}
    for key, (value, current) in changed(recorded, _algorithm(settings), in_both=True).items():
        raise SettingsError(
            "was made with other settings than params.yaml has now",
            where=path,
            expected=f"{key} {current}",
            found=value,
            remedy="`hacpo run` repeats what depends on it, or set params.yaml back",
        )


def _algorithm(settings: Settings) -> dict[str, Any]:
    return {"algorithm": settings.algorithm.model_dump()}


def _answerable(key: str) -> bool:
    return any(key == known or key.startswith(f"{known}.") for known in ANSWERABLE)


def _nested(key: str, value: Any) -> dict[str, Any]:
    head, _, rest = key.partition(".")
    return {head: _nested(rest, value) if rest else value}


def _check(as_run: Settings, differing: Mapping[str, tuple[Any, Any]]) -> None:
    """One line for what would need rollouts, pools or log-probabilities that the run does not have."""
    multiplier = differing.get("algorithm.rollouts.group_multiplier")
    if multiplier:
        group = as_run.sampling.group_size
        raise SettingsError(
            f"this needs other rollouts: {group * multiplier[1]} responses per prompt and agent",
            where="--set",
            found=f"{group * multiplier[0]} in this run",
            remedy="make a run with that recipe",
        )
    if differing.get("algorithm.rollouts.share", (True, False))[1]:
        raise SettingsError(
            "this needs the other agents' responses in the pools",
            where="--set",
            found="own responses only (algorithm.rollouts.share false)",
            remedy="for advantages alone, `hacpo advantage ... --out DIR --set ...` works",
        )
    if differing.get("algorithm.importance.level", ("", ""))[1] == "token":
        raise SettingsError(
            "token-level ratios (grpo) need token log-probabilities after each update, which no file keeps",
            where="--set",
            remedy="for advantages alone, `hacpo advantage ... --out DIR --set ...` works",
        )
    if differing.get("algorithm.importance.reference", ("", ""))[1] == "self":
        raise SettingsError(
            "ratios to the learner's own old policy need its log-probabilities of cross responses before the step, "
            "which no file of this run keeps",
            where="--set",
        )
    drawn, asked = differing.get("algorithm.capability.oracle_samples", (None, None))
    if asked is not None and asked > (drawn or 0):
        raise SettingsError(
            f"this needs a side sample of {asked} responses per problem and agent",
            where="--set algorithm.capability.oracle_samples",
            found=f"{drawn or 'none'} in this run",
            remedy="make a run with it, or give algorithm.capability.oracle_table",
        )
    token_clip = {"algorithm.clip.own_low", "algorithm.clip.own_high"} & differing.keys()
    if token_clip and as_run.algorithm.importance.level == "token" and "algorithm.importance.level" not in differing:
        raise SettingsError(
            "token-level ratios are clipped token by token, and no file keeps them",
            where=f"--set {min(token_clip)}",
            remedy="together with algorithm.importance.level=sequence it can be answered",
        )
