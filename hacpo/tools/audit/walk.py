"""A whole audit: settings and inputs, every step, what no stage makes, DVC's records, texts, and the repetition."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from hacpo.errors import SettingsError
from hacpo.pipeline.project import Pipeline
from hacpo.pipeline.records.elsewhere import described
from hacpo.tools.audit.audit_run import AuditRun
from hacpo.tools.audit.dvc_records import check_locks
from hacpo.tools.audit.findings import Finding
from hacpo.tools.audit.inputs import check_inputs, open_run
from hacpo.tools.audit.leftovers import check_leftovers
from hacpo.tools.audit.steps import Presence, check_models, check_others, check_step

if TYPE_CHECKING:
    from hacpo.tools.audit.deep import DeepReport
    from hacpo.tools.audit.texts import TextReport, Texts

ALL_TEXTS_UP_TO = 20_000
"""Rollouts of a run up to which all texts are read unless asked otherwise: a few minutes' work."""

_SEEDS = 1 << 32
"""Seeds that are drawn from."""

OnPart = Callable[[str, int, int], None]
"""Called with what is being done, the steps done, and all."""


@dataclass
class Audit:
    """What an audit found, and what it looked at.

    Attributes:
        first, last: the steps that were asked for.
        reached: the last step of which the run has anything.
        steps: the steps that were audited.
        rows, files: table -> what was read.
        skipped: (what was not checked, why) -> how many times.
        texts: how many texts were read.
        seed: which texts a sample is.
    """

    run: str
    first: int
    last: int
    reached: int
    texts: Texts
    seed: int
    findings: list[Finding]
    rows: Counter[str]
    files: Counter[str]
    skipped: Counter[tuple[str, str]]
    steps: list[int] = field(default_factory=list)
    text_report: TextReport | None = None
    deep_report: DeepReport | None = None


def audit(
    pipeline: Pipeline,
    *,
    texts: Texts | None = None,
    seed: int | None = None,
    deep: bool = False,
    first: int | None = None,
    last: int | None = None,
    on_progress: OnPart | None = None,
) -> Audit:
    """Check every invariant of a run on its files.

    Args:
        texts: which texts to read; None: all of a small run, else a sample.
        seed: which texts a sample is; None: drawn, so that nobody who altered a run knows which are not read.
        deep: repeat the run with its checkpoints.
        first, last: steps to audit, 0 (the start) to T; all if None.

    Raises:
        SettingsError: the steps are out of range, or nothing has been made yet.
    """
    first, last = _range(pipeline, first, last)
    tell = on_progress or _silent
    if not pipeline.layout.root.is_dir():
        raise SettingsError(
            "there is nothing to audit", where=pipeline.layout.root, remedy=f"run `{pipeline.command('run')}`"
        )
    run = open_run(pipeline)
    presence = Presence.of(run)
    inputs = check_inputs(run, begun=bool(presence.here or presence.holes))
    result = Audit(
        run=pipeline.run,
        first=first,
        last=last,
        reached=presence.reached(run),
        texts=texts or _default_texts(run, presence),
        seed=secrets.randbelow(_SEEDS) if seed is None else seed,
        findings=run.findings,
        rows=run.rows,
        files=run.files,
        skipped=run.skipped,
    )
    for path in presence.holes:
        run.find("files", path, expected="a table, as later ones were made from it", found="missing")
    steps = range(first, last + 1)
    for step in steps:
        tell("tables", step - first, len(steps))
        with np.errstate(all="ignore"):  # numbers that are not finite are findings, not warnings
            if step in inputs.batches and presence.at(run, step):
                check_step(run, inputs.batches[step], presence)
                result.steps.append(step)
            check_models(run, step, presence, inputs.sets)
    check_others(run, steps)
    if run.not_here:
        run.skip("what needs weights, tokenizers or optimizers", described(pipeline, run.not_here))
    check_leftovers(run, presence.holes)
    tell("records of DVC", len(steps), len(steps))
    check_locks(run)
    if result.texts != "none":
        from hacpo.tools.audit.texts import TextAudit

        with TextAudit(run, result.texts, result.seed) as reader:
            _each_step("texts", reader.check, result, tell)
            result.text_report = reader.report
    if deep:
        from hacpo.tools.audit.deep import DeepAudit

        with DeepAudit(run) as repeated:
            _each_step("repeating", repeated.check, result, tell)
            result.deep_report = repeated.report
    return result


def _silent(what: str, done: int, total: int) -> None:
    """Tell nobody."""


def _range(pipeline: Pipeline, first: int | None, last: int | None) -> tuple[int, int]:
    steps = pipeline.settings.steps
    for name, value in (("--from", first), ("--until", last)):
        if value is not None and not 0 <= value <= steps:
            raise SettingsError(f"{name} is out of range", where=pipeline.folder, expected=f"0 to {steps}", found=value)
    begin, end = first or 0, steps if last is None else last
    if begin > end:
        raise SettingsError("--from is after --until", expected=f"at most {end}", found=begin)
    return begin, end


def _default_texts(run: AuditRun, presence: Presence) -> Texts:
    settings = run.settings
    per_step = len(run.agents) * settings.batch.prompts * settings.responses_per_prompt
    return "all" if presence.reached(run) * per_step <= ALL_TEXTS_UP_TO else "sample"


def _each_step(what: str, check: Callable[[int], None], result: Audit, on_progress: OnPart) -> None:
    """Check every step, and say how far that is."""
    for step in range(result.first, result.last + 1):
        on_progress(what, step - result.first, result.last - result.first + 1)
        check(step)
