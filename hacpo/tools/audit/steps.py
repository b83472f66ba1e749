"""One step of a run after another: which tables must be there, and every check of those that are."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hacpo.artifacts.tables import (
    ADVANTAGES,
    CAPABILITY,
    CHECKPOINT,
    EVALUATIONS,
    POOL,
    PROBLEMS,
    PROMPTS,
    ROLLOUTS,
    SCHEDULE,
    SIDE_ROLLOUTS,
    SIDE_VERDICTS,
    TRACE,
    VERDICTS,
    Table,
)
from hacpo.pipeline.catalogue import ADVANTAGE, PIPELINE, Use, maker_of, step_stages
from hacpo.pipeline.noted import POLICY, POLICY_CONFIG, stage_metrics
from hacpo.tools.audit.advantages import capability_metrics, check_advantages, check_capability
from hacpo.tools.audit.audit_run import AuditRun
from hacpo.tools.audit.checkpoints import check_checkpoint
from hacpo.tools.audit.evaluations import check_evaluation
from hacpo.tools.audit.inputs import Batch, check_prompts
from hacpo.tools.audit.metrics_files import check_metrics
from hacpo.tools.audit.pools import check_pool
from hacpo.tools.audit.responses import Drawn, Floats, Responses, check_rollouts, check_verdicts
from hacpo.tools.audit.rows import Rows
from hacpo.tools.audit.table_checks import read
from hacpo.tools.audit.traces import check_trace

_RECOMPUTED = (
    *(PROBLEMS, PROMPTS, SCHEDULE, EVALUATIONS),
    *(ROLLOUTS, VERDICTS, SIDE_ROLLOUTS, SIDE_VERDICTS, CAPABILITY, POOL, ADVANTAGES, TRACE),
)
"""Tables whose values a check works out again."""


@dataclass
class Presence:
    """Which outputs a run has, and which are missing although something was made from them.

    Attributes:
        here: paths that exist.
        holes: missing paths that a later output was made from, in the order of the run.
        waiting: step -> paths that are not there and nothing needed yet.
    """

    here: set[Path] = field(default_factory=set)
    holes: list[Path] = field(default_factory=list)
    waiting: dict[int, list[Path]] = field(default_factory=dict)

    @classmethod
    def of(cls, run: AuditRun) -> Presence:
        """Look at every step of a run, the last one first."""
        presence = cls()
        needed: set[Path] = set()
        for step in range(run.settings.steps, 0, -1):
            holes, waiting = [], []
            needed |= set(_results(run, step))
            for path, inputs in reversed(list(_made_from(run, step))):
                if path.exists():
                    presence.here.add(path)
                elif path in needed:
                    holes.append(path)
                else:
                    waiting.append(path)
                    continue
                needed |= set(inputs)
            presence.holes[:0] = reversed(holes)
            if waiting:
                presence.waiting[step] = waiting[::-1]
        return presence

    def reached(self, run: AuditRun) -> int:
        """The last step of which anything is there; 0 if none."""
        steps = [step for step in range(1, run.settings.steps + 1) if self.at(run, step)]
        return max(steps, default=0)

    def at(self, run: AuditRun, step: int) -> bool:
        """Whether anything of a step is there."""
        return any(path in self.here for path, _ in _made_from(run, step))


def _made_from(run: AuditRun, step: int) -> Iterator[tuple[Path, list[Path]]]:
    """A step's tables in the order in which they are made, each with those that it is made from."""
    for spec in step_stages(run.settings, step):
        if spec.at != "step":
            continue
        for mine in run.agents if spec.per != "run" else [""]:
            inputs = [path for use in spec.reads for path in _tables(run, use, step, mine)]
            for use in spec.writes:
                if isinstance(use.artifact, Table):
                    made = list(_tables(run, use, step, mine))
                    yield from ((path, list(inputs)) for path in made)
                    inputs += made  # what a stage writes first is there before the rest


def _tables(run: AuditRun, use: Use, step: int, mine: str) -> Iterator[Path]:
    """The tables of steps that a stage of an agent uses."""
    # A checkpoint may be pruned; the trace that its stage writes beside it is not.
    artifact = TRACE if use.artifact == CHECKPOINT else use.artifact
    if use.holds(run.settings, step) and isinstance(artifact, Table) and maker_of(artifact).at == "step":
        yield from (run.layout.path(artifact, *part) for part in use.parts(run.agents, mine, (step, step - 1, 0)))


def _results(run: AuditRun, step: int) -> Iterator[Path]:
    """Traces that must be there because the checkpoint or evaluation after them is."""
    layout = run.layout
    for agent in run.agents:
        if layout.checkpoint(step, agent).exists() or layout.evaluation(step, agent).exists():
            yield layout.trace(step, agent)


def check_step(run: AuditRun, batch: Batch, presence: Presence) -> None:
    """Every check of one step's tables."""
    step, layout = batch.step, run.layout
    check_prompts(run, batch)
    checked = [_check_responses(run, batch, drawn, presence) for drawn in Drawn.kinds(run)]
    responses, rewards = checked[0]
    side_rewards = checked[1][1] if len(checked) > 1 else None
    capabilities = None
    if layout.capability(step) in presence.here:
        capabilities = check_capability(run, step, rewards, side_rewards)
    metrics = capability_metrics(run, capabilities or {})
    for learner in run.agents:
        advantages: Rows | None = None
        if layout.advantages(step, learner) in presence.here:
            checked_rows = check_advantages(run, batch, learner, rewards, capabilities)
            if checked_rows is not None:
                advantages, summary = checked_rows
                metrics |= {f"{learner}.{key}": value for key, value in summary.items()}
        pool = None
        if layout.pool(step, learner) in presence.here:
            pool = check_pool(run, batch, learner, responses, rewards)
        if layout.trace(step, learner) in presence.here:
            if pool is None:
                run.skip(f"the trace of {learner}", "its pool cannot be read")
            else:
                check_trace(run, batch, learner, pool, advantages, responses)
    if capabilities is not None:
        check_metrics(run, ADVANTAGE, step, metrics)


def check_others(run: AuditRun, steps: Container[int]) -> None:
    """What can be checked of any table, of those of the catalogue whose values no check works out again."""
    for table in [use.artifact for spec in PIPELINE for use in spec.writes]:
        if not isinstance(table, Table) or table in _RECOMPUTED:
            continue
        for step, whose in run.run_files.parts(table):
            if (step is None or step in steps) and whose in ("", *run.agents):
                read(run, table, step, whose)
                run.skip(f"values of {table.title}", "no check works them out again")


def _check_responses(
    run: AuditRun, batch: Batch, drawn: Drawn, presence: Presence
) -> tuple[dict[str, Responses | None], dict[str, Floats | None]]:
    """Every agent's responses of one kind, and their rewards."""
    responses: dict[str, Responses | None] = {}
    rewards: dict[str, Floats | None] = {}
    for agent in run.agents:
        rollouts, verdicts = (
            run.run_files.path(table, batch.step, agent) in presence.here for table in (drawn.rollouts, drawn.verdicts)
        )
        responses[agent] = check_rollouts(run, batch, agent, drawn) if rollouts else None
        rewards[agent] = check_verdicts(run, batch, agent, responses[agent], drawn) if verdicts else None
    return responses, rewards


def check_models(run: AuditRun, step: int, presence: Presence, sets: Mapping[str, Sequence[Any] | None]) -> None:
    """Checkpoints and evaluations after a step."""
    for agent in run.agents:
        folder = run.layout.checkpoint(step, agent)
        trained = step == 0 or run.layout.trace(step, agent) in presence.here
        if folder.is_dir():
            check_checkpoint(run, step, agent)
        elif step in run.not_here:
            pass  # said once, of all of them
        elif trained and step in (0, run.settings.steps) and (step > 0 or presence.here):
            run.find("files", folder, expected="a checkpoint", found="no such folder")
        elif trained and step > 0:
            pruned = step in run.pruned.get(agent, {})
            why = "they were pruned" if pruned else "they are not there (they may be pruned)"
            run.skip("checkpoints between the first and the last step", why)
        _check_policy(run, step, agent)
        if run.layout.evaluation(step, agent).exists():
            if run.settings.evaluated(step):
                check_evaluation(run, step, agent, sets)
            else:
                every = run.settings.evaluation.every
                run.skip("evaluations of other steps", f"this run evaluates every {every} steps")
        elif run.settings.evaluated(step) and trained:
            _missing_evaluation(run, step, agent)


def _check_policy(run: AuditRun, step: int, agent: str) -> None:
    """Weights, and what is read beside them, have the hashes that the stage which made them noted in its metrics."""
    pruned = run.pruned.get(agent, {}).get(step)
    maker = maker_of(CHECKPOINT, step)
    path, metrics = run.layout.metrics(maker.name, step, agent), stage_metrics(run.layout, maker, step, agent)
    hashed = {
        POLICY: (run.policy(step, agent) if pruned is None else pruned.policy, "the weights"),
        POLICY_CONFIG: (run.policy_config(step, agent), "what is read beside the weights,"),
    }
    # What is no metrics file is a finding of other checks; runs made by earlier versions note less.
    for key, (policy, what) in hashed.items():
        if policy is not None and metrics.get(key, policy) != policy:
            note = f"SHA-256 of {what} after step {step}"
            run.find("policy", path, column=key, expected=policy, found=metrics[key], note=note)


def _missing_evaluation(run: AuditRun, step: int, agent: str) -> None:
    """A hole if a later one is there; a run need not be evaluated."""
    path = run.layout.evaluation(step, agent)
    later = [other for other in range(step + 1, run.settings.steps + 1) if run.settings.evaluated(other)]
    if any(run.layout.evaluation(other, agent).exists() for other in later):
        run.find("files", path, expected="an evaluation, as later steps have one", found="no such folder")
    else:
        run.skip(f"evaluation of {agent}", "not made (yet)")
