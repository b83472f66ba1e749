"""Doing a step's work over again with the run's own checkpoints, and comparing what comes out: `hacpo audit --deep`.

Without a model an audit cannot know that a log-probability is the one that the policy gave, or that the weights after a
step follow from its pool. Here generate, update and evaluate are repeated by the very commands of the run, into a
scratch folder, so every number that they wrote is checked, the learner's log-probabilities after the first update and
the new weights included. It costs as much as the run did.

Same machine type, library versions and threads give the same bytes. Which machine this is, is decided once for the run,
and not by the rows under test: where nearly all rollouts of one step and agent, whichever, are rescored to the same
bits, so must everything of every step come out, and any other value is a finding. Elsewhere (another processor, another
version) sampled tokens may differ by rounding; then rollouts are not sampled again, log-probabilities and weights are
compared within the tolerances below, held-out answers by their rewards, and what differs is counted as not checked.
"""

from __future__ import annotations

import contextlib
import filecmp
import math
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa

from hacpo.algorithm.rollouts import supports
from hacpo.artifacts import storage, tables
from hacpo.artifacts.layout import Layout
from hacpo.artifacts.list_columns import Floats
from hacpo.artifacts.parquet import values
from hacpo.artifacts.run_files import RunFiles
from hacpo.errors import HacpoError, first_line
from hacpo.pipeline.catalogue import EVALUATE, GENERATE, SIDE_GENERATE, UPDATE, StageSpec
from hacpo.pipeline.execution.session import Session
from hacpo.pipeline.execution.worker_process import command_executor
from hacpo.tools.audit.audit_run import AuditRun
from hacpo.tools.audit.beside import NAME, Beside, named

CHECK = "replay"
"""Name of the invariant in every finding of this module."""

SAME_SHARE = 0.9
"""Share of some step's rollouts that must be rescored bit for bit for the machine to count as the run's own. Rounding
that differs changes some bit of nearly every response; an edited value changes one."""

MOST_SIGMA = 5.0
"""How far from an even split, in standard deviations of a fair coin, rewards may differ to one side where the machine
differs. Rounding takes a held-out answer elsewhere without a preference for right or wrong ones."""

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest difference, in nats, between a recorded log-probability (of a token, or a response's mean) and its rescoring
where the machine differs. Implementations differ by 4e-6 a token in float32 and up to 6e-2 in bfloat16."""

LATER_UPDATES = 10.0
"""How many times `TOLERANCE` the learner's log-probabilities may differ once updates of this step are behind them."""


@dataclass
class DeepReport:
    """How much was done over again.

    Attributes:
        replayed: stages repeated; of them `exact` to the bit, the others within tolerances.
    """

    replayed: int = 0
    exact: int = 0


class _Silent:
    """Shows nothing."""

    def report(self, stage: str, done: int, total: int, facts: dict[str, float]) -> None:
        """See `ProgressSink`."""

    def finished(self, stage: str, summary: str) -> None:
        """See `ProgressSink`."""

    def remark(self, text: str) -> None:
        """See `ProgressSink`."""


class DeepAudit:
    """Repeats a run step by step; a context manager that removes its scratch folder.

    Args:
        run: the audit that the findings are part of.

    Attributes:
        report: how much was done so far.
    """

    def __init__(self, run: AuditRun) -> None:
        self.report = DeepReport()
        self._run = run
        self._execute = command_executor()
        self._session = Session(progress=_Silent(), driver=True)
        self._scratch = Path(tempfile.mkdtemp(prefix="hacpo-audit-"))
        self._replay = Layout(self._scratch)
        self._rescored_rows: dict[tuple[int, str], tuple[int, int]] = {}
        self._answers = Counter[str]()
        self._same: tuple[int, str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tell_differing()
        self._session.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def check(self, step: int) -> None:
        """Repeat one step of every agent; step 0 has evaluations only."""
        for agent in self._run.agents:
            if step > 0:
                self._check_rollouts(step, agent)
                self._check_side_sample(step, agent)
                self._check_update(step, agent)
            if self._run.settings.evaluated(step):
                self._check_evaluation(step, agent)

    # --- the machine -------------------------------------------------------------------------------------------------

    def _on_same_machine(self) -> bool:
        """Whether this machine computes the run's bits: the rollouts of any step and agent tell, audited or not."""
        for step in range(1, self._run.settings.steps + 1):
            for agent in self._run.agents:
                if self._same is None and (step, agent) not in self._rescored_rows:
                    with contextlib.suppress(Exception):  # a finding where this step is audited
                        self._rescore(step, agent, self._recorded(tables.ROLLOUTS, step, agent))
        return self._same is not None

    def _rescore(self, step: int, agent: str, recorded: pa.Table) -> Beside | None:
        """Rollouts beside their rescoring, which is noted as evidence; None where there is nothing to rescore."""
        before = self._run.layout.checkpoint(step - 1, agent)
        self._rescored_rows[step, agent] = (0, 0)
        if not len(recorded) or not before.is_dir():
            return None
        beside = Beside(recorded, self._rescored(before, agent, recorded))
        equal = int(beside.same("logprobs").sum())
        self._rescored_rows[step, agent] = (len(recorded), len(recorded) - equal)
        if equal >= SAME_SHARE * len(recorded):
            self._same = self._same or (step, agent)
        return beside

    def _evidence(self, step: int, agent: str) -> str:
        """A note on findings of a step whose own rollouts do not come out to the bit, though others do."""
        rows, differing = self._rescored_rows.get((step, agent), (0, 0))
        if self._same is None or not rows or rows - differing >= SAME_SHARE * rows:
            return ""
        known_step, known = self._same
        return f"this is the run's machine type: {known}'s rollouts of step {known_step} come out to the bit"

    def _tell_differing(self) -> None:
        """Note what another machine than the run's could not compare."""
        if self._same is not None:
            return
        rows = sum(rows for rows, _ in self._rescored_rows.values())
        differing = sum(differing for _, differing in self._rescored_rows.values())
        why = "no rollouts here tell whether this is the run's machine"
        if rows:
            why = "another machine type than the run's"
            reason = f"{why}: {differing:,} of {rows:,} differ in some bit"
            self._run.skip("rollouts by sampling them again, and any number to the bit", reason)
        if self._answers["differing"]:
            reason = f"{why}: {self._answers['differing']:,} of {self._answers['rows']:,}"
            self._run.skip("held-out answers that come out otherwise", reason)

    # --- the stages --------------------------------------------------------------------------------------------------

    def _check_rollouts(self, step: int, agent: str) -> None:
        """Rescore the rollouts, and sample them again where that must give the same."""
        layout = self._run.layout
        path, before = layout.rollouts(step, agent), layout.checkpoint(step - 1, agent)
        recorded = self._recorded(tables.ROLLOUTS, step, agent)
        if not len(recorded) or not self._is_there(before, "rescoring and sampling again"):
            return
        try:
            beside = self._rescore(step, agent, recorded)
        except Exception as error:  # of damaged weights or tokens, torch and transformers say what they like
            self._find(path, expected=f"tokens that {before.parent.name}'s weights can score", found=_reason(error))
            return
        assert beside is not None  # there are rows, and the checkpoint
        self._compare(path, beside, "policy")
        if not self._on_same_machine():
            most = TOLERANCE[self._run.settings.engine.dtype]
            note = f"within {most:g} nats: another machine than the run's"
            for column in ("logprobs", "support_logprob"):
                self._compare(path, beside, column, most=most, note=note)
        elif self._samples_elsewhere("sampling again"):
            for column in ("logprobs", "support_logprob"):
                self._compare(path, beside, column, note=self._evidence(step, agent))
        else:
            with self._repeated(GENERATE, step, agent, before) as done:
                fresh = self._fresh(tables.ROLLOUTS, step, agent)
                if done and len(fresh):
                    self.report.exact += 1
                    self._compare_all(path, Beside(recorded, fresh), note=self._evidence(step, agent))

    def _check_side_sample(self, step: int, agent: str) -> None:
        """Sample the side sample again, where that must give the same."""
        path, before = self._run.layout.side_rollouts(step, agent), self._run.layout.checkpoint(step - 1, agent)
        recorded = self._recorded(tables.SIDE_ROLLOUTS, step, agent)
        what = "sampling the side sample again"
        if not len(recorded) or not self._on_same_machine() or self._samples_elsewhere(what):
            return
        with self._repeated(SIDE_GENERATE, step, agent, before) as done:
            fresh = self._fresh(tables.SIDE_ROLLOUTS, step, agent)
            if done and len(fresh):
                self.report.exact += 1
                self._compare_all(path, Beside(recorded, fresh), note=self._evidence(step, agent))

    def _rescored(self, checkpoint: Path, agent: str, recorded: pa.Table) -> pa.Table:
        """`policy`, `logprobs` and `support_logprob` of recorded tokens within their support under a checkpoint, in the
        order and batches of `generate`."""
        from hacpo.engines.from_checkpoint import open_model
        from hacpo.engines.interface import SamplingParameters, rescored
        from hacpo.engines.transformers import TransformersEngine

        settings = self._run.settings
        tokenizer, model, policy = open_model(self._session.models, agent, checkpoint, settings.engine, "hacpo run")
        scorer = TransformersEngine(
            model,
            eos_token_ids=tokenizer.stop_token_ids,
            pad_token_id=tokenizer.pad_token_id,
            batch_size=settings.engine.batch_size,
            batch_tokens=settings.engine.batch_tokens,
        )
        sampling = settings.agents[agent].sampling
        fresh = rescored(
            scorer,
            list(zip(*(values(recorded[name]) for name in ("prompt_token_ids", "token_ids")), strict=True)),
            SamplingParameters(sampling.temperature, sampling.max_new_tokens, sampling.top_p, sampling.top_k),
            supports(recorded),
        )
        columns = {
            "policy": [policy] * len(fresh),
            "logprobs": [scores.logprobs for scores in fresh],
            "support_logprob": [scores.support_logprob for scores in fresh],
        }
        schema = pa.schema([tables.ROLLOUTS.schema.field(name) for name in columns])
        return pa.table(columns, schema=schema).append_column(NAME, recorded[NAME])

    def _samples_elsewhere(self, what: str) -> bool:
        """Whether another engine than the training stack sampled: its tokens are not the same bits every time."""
        from hacpo.engines.from_checkpoint import samples_with_vllm

        elsewhere = samples_with_vllm(self._run.settings.engine)
        if elsewhere:
            self._run.skip(what, "vLLM does not repeat itself to the bit")
        return elsewhere

    def _check_update(self, step: int, agent: str) -> None:
        layout = self._run.layout
        recorded = self._recorded(tables.TRACE, step, agent)
        if not len(recorded) and not layout.checkpoint(step, agent).is_dir():
            return  # a run that has not come to this update; tables that should be there are findings of their own
        same = self._on_same_machine()
        with self._repeated(UPDATE, step, agent, layout.checkpoint(step - 1, agent)) as done:
            if not done:
                return
            self.report.exact += same
            fresh = self._fresh(tables.TRACE, step, agent)
            if len(recorded):
                self._check_trace(layout.trace(step, agent), Beside(recorded, fresh), same=same)
            if self._is_there(layout.checkpoint(step, agent), "the weights after an update"):
                self._check_checkpoint(step, agent, same=same)

    def _check_trace(self, path: Path, beside: Beside, *, same: bool) -> None:
        if same:
            self._compare_all(path, beside)
            return
        most = TOLERANCE[self._run.settings.engine.dtype]
        of_rows = most * np.where(np.asarray(beside.recorded["update"]) > 0, LATER_UPDATES, 1.0)
        note = f"within {most:g} nats ({LATER_UPDATES:g} times that after the first update): another machine"
        self._compare(path, beside, "learner_logprob", most=of_rows, note=note)

    def _check_checkpoint(self, step: int, agent: str, *, same: bool) -> None:
        """Every file of the new checkpoint; tensors one by one where bytes differ."""
        before, after = self._run.layout.checkpoint(step, agent), self._replay.checkpoint(step, agent)
        for name in sorted(_files(before) | _files(after)):
            recorded, fresh = before / name, after / name
            if not recorded.is_file() or not fresh.is_file():
                known = {True: "a file", False: "no such file"}
                self._find(recorded, expected=known[fresh.is_file()], found=known[recorded.is_file()])
            elif not filecmp.cmp(recorded, fresh, shallow=False):
                if recorded.suffix == ".safetensors":
                    # Adam moves no weight by more than the step size in one update, so twice that parts two runs.
                    optimizer = self._run.settings.optimizer
                    most = 0.0 if same else 2 * optimizer.learning_rate * self._run.settings.updates_per_step
                    if same or recorded.parent.name != "trainer":
                        self._check_tensors(recorded, fresh, most)
                else:
                    self._find(recorded, expected="the same bytes as the repeated update's", found="other bytes")

    def _check_tensors(self, recorded: Path, fresh: Path, most: float) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            tensors, wanted = load_file(recorded), load_file(fresh)
        except SafetensorError as error:
            self._find(recorded, expected="whole weights", found=str(error))
            return
        differing = False
        for name in sorted(tensors.keys() | wanted.keys()):
            if name not in tensors or name not in wanted or tensors[name].shape != wanted[name].shape:
                shapes = [tuple(part[name].shape) if name in part else "no such tensor" for part in (wanted, tensors)]
                self._find(recorded, name, expected=shapes[0], found=shapes[1])
                differing = True
                continue
            value, other = tensors[name].double().flatten(), wanted[name].double().flatten()
            odd = ((value - other).abs() > most).logical_or(value.isnan()).nonzero().flatten().tolist()
            if odd:
                values = {"expected": float(other[odd[0]]), "found": float(value[odd[0]])}
                self._find(recorded, name, f"element[{odd[0]}]", **values, count=len(odd))
                differing = True
        if not differing and most == 0.0:
            self._find(
                recorded, expected="the same bytes as the repeated update's", found="the same tensors, other bytes"
            )

    def _check_evaluation(self, step: int, agent: str) -> None:
        layout = self._run.layout
        path = layout.evaluation(step, agent)
        recorded = self._recorded(tables.EVALUATIONS, step, agent)
        if not len(recorded) or self._samples_elsewhere("evaluating again"):
            return
        with self._repeated(EVALUATE, step, agent, layout.checkpoint(step, agent)) as done:
            fresh = self._fresh(tables.EVALUATIONS, step, agent)
            beside = Beside(recorded, fresh)
            if not done:
                return
            if self._on_same_machine():
                self.report.exact += 1
                self._compare_all(path, beside, note=self._evidence(step, agent))
            else:
                self._check_answers_elsewhere(path, beside)

    def _check_answers_elsewhere(self, path: Path, beside: Beside) -> None:
        """Answers of another machine: what differs by rounding is as often better as it is worse (a sign test)."""
        same = np.logical_and.reduce([beside.same(column) for column in tables.EVALUATIONS.schema.names])
        self._answers.update(rows=len(same), differing=int((~same).sum()))
        self.report.exact += bool(same.all())
        recorded, fresh = (np.asarray(table["reward"]) for table in (beside.recorded, beside.fresh))
        above, below = int((recorded > fresh).sum()), int((recorded < fresh).sum())
        if abs(above - below) > MOST_SIGMA * math.sqrt(above + below):
            row = beside.recorded[NAME][int(np.flatnonzero(recorded != fresh)[0])].as_py()
            wanted = "as many rewards above those of the repeated evaluation as below"
            split = f"{above:,} above, {below:,} below"
            note = f"within {MOST_SIGMA:g} standard deviations: another machine than the run's"
            self._find(path, row, "reward", expected=wanted, found=split, count=above + below, note=note)

    # --- repeating and comparing -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _repeated(self, stage: StageSpec, step: int, agent: str, checkpoint: Path) -> Iterator[bool]:
        """Repeat a stage into the scratch folder, which is emptied afterwards; yields whether that worked."""
        done = self._is_there(checkpoint, f"repeating {stage.name}")
        if done:
            options = ["--step", str(step), "--agent", agent, "--out", str(self._scratch)]
            options += ["--side"] if stage.side else []
            try:
                self._execute([stage.command, str(self._run.pipeline.folder), *options], self._session)
            except Exception as error:  # a stage trusts its inputs, which here may be anything
                self._find(checkpoint, expected=f"inputs that {stage.name} can be repeated from", found=_reason(error))
                done = False
        self.report.replayed += done
        try:
            yield done
        finally:
            for path in self._scratch.iterdir():
                storage.remove(path)

    def _is_there(self, checkpoint: Path, what: str) -> bool:
        if not checkpoint.is_dir():
            self._run.skip(what, "the checkpoint is not there")
        return checkpoint.is_dir()

    def _recorded(self, table: tables.Table, step: int, agent: str) -> pa.Table:
        """The run's rows, named by their key."""
        return named(self._run.run_files, table, step, agent)

    def _fresh(self, table: tables.Table, step: int, agent: str) -> pa.Table:
        """The repetition's rows, named by their key."""
        return named(RunFiles(self._run.pipeline.run, self._replay), table, step, agent)

    def _compare_all(self, path: Path, beside: Beside, *, note: str = "") -> None:
        """Every column; and rows that only the repetition has."""
        for column in beside.recorded.column_names:
            self._compare(path, beside, column, note=note)
        missing = beside.only_fresh
        if len(missing):
            self._find(path, missing[0].as_py(), expected="a row", found="no such row", count=len(missing), note=note)

    def _compare(
        self, path: Path, beside: Beside, column: str, *, most: float | Floats | None = None, note: str = ""
    ) -> None:
        """One finding for all rows of a column that are not as repeated; the first is named."""
        odd = np.flatnonzero(~beside.same(column, most))
        if len(odd):
            first = int(odd[0])
            wanted, recorded = (table[column][first].as_py() for table in (beside.fresh, beside.recorded))
            where, wanted, value = _first_difference(column, wanted, recorded)
            name = beside.recorded[NAME][first].as_py()
            self._find(path, name, where, expected=wanted, found=value, count=len(odd), note=note)

    def _find(self, path: Path, row: str = "", column: str = "", **facts: Any) -> None:
        self._run.find(CHECK, path, row, column, **facts)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, HacpoError) else f"{type(error).__name__}: {first_line(error)}"


def _first_difference(column: str, wanted: Any, recorded: Any) -> tuple[str, Any, Any]:
    """Where in a list value the first difference is; other values as they are."""
    if not isinstance(wanted, list) or not isinstance(recorded, list):
        return column, wanted, recorded
    for index, (value, other) in enumerate(zip(wanted, recorded, strict=False)):
        if value != other:
            return f"{column}[{index}]", value, other
    return column, f"{len(wanted)} values", f"{len(recorded)} values"


def _files(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
