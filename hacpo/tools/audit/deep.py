"""Doing a step's work over again with the run's own checkpoints, and comparing what comes out: `hacpo audit --deep`.

Without a model an audit cannot know that a log-probability is the one that the policy gave, or that the weights after a
step follow from its pool. Here generate, update and evaluate are repeated by the very commands of the run, into a
scratch folder, so every number that they wrote is checked, the learner's log-probabilities after the first update and
the new weights included. It costs as much as the run did.

Same machine type, library versions and threads give the same bytes. Where nearly all of a step's rollouts are rescored
to the same bits, so must everything else come out, and any other value is a finding. Elsewhere (another processor,
another version) sampled tokens may differ by rounding; then rollouts are not sampled again, and log-probabilities and
weights are compared within the tolerances below.
"""

from __future__ import annotations

import contextlib
import filecmp
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hacpo.algorithm.rollouts import supports
from hacpo.artifacts import storage, tables
from hacpo.artifacts.layout import Layout
from hacpo.artifacts.list_columns import Flags, Floats, Ints
from hacpo.artifacts.parquet import values
from hacpo.artifacts.run_files import RunFiles
from hacpo.errors import HacpoError, first_line
from hacpo.pipeline.catalogue import EVALUATE, GENERATE, SIDE_GENERATE, UPDATE, StageSpec
from hacpo.pipeline.execution.session import Session
from hacpo.pipeline.execution.worker_process import command_executor
from hacpo.tools.audit.audit_run import AuditRun
from hacpo.tools.audit.lists import same_values

_NAME = "#name"
"""Column added to what is read: what a row is called in findings."""

_ROWS_AT_ONCE = 4096
"""Rows that are compared at once."""

CHECK = "replay"
"""Name of the invariant in every finding of this module."""

SAME_SHARE = 0.9
"""Share of a step's rollouts that must be rescored bit for bit for the machine to count as the run's own. Rounding that
differs changes some bit of nearly every response; an edited value changes one."""

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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def check(self, step: int) -> None:
        """Repeat one step of every agent; step 0 has evaluations only."""
        for agent in self._run.agents:
            if step > 0:
                same = self._check_rollouts(step, agent)
                self._check_side_sample(step, agent, same=same)
                self._check_update(step, agent, same=same)
            if self._run.settings.evaluated(step):
                self._check_evaluation(step, agent)

    # --- the stages --------------------------------------------------------------------------------------------------

    def _check_rollouts(self, step: int, agent: str) -> bool:
        """Rescore the rollouts, and sample them again where that must give the same.

        Returns:
            Whether this machine computes the run's bits.
        """
        layout = self._run.layout
        path, before = layout.rollouts(step, agent), layout.checkpoint(step - 1, agent)
        recorded = self._recorded(tables.ROLLOUTS, step, agent)
        if not len(recorded) or not self._is_there(before, "rescoring and sampling again"):
            return False
        try:
            rescored = self._rescored(before, agent, recorded)
        except Exception as error:  # of damaged weights or tokens, torch and transformers say what they like
            self._find(path, expected=f"tokens that {before.parent.name}'s weights can score", found=_reason(error))
            return False
        beside = _Beside(recorded, rescored)
        same = bool(beside.same("logprobs").sum() >= SAME_SHARE * len(recorded))
        self._compare(path, beside, "policy")
        if not same:
            most = TOLERANCE[self._run.settings.engine.dtype]
            note = f"within {most:g} nats: another machine than the run's"
            for column in ("logprobs", "support_logprob"):
                self._compare(path, beside, column, most=most, note=note)
        elif self._samples_elsewhere("sampling again"):
            for column in ("logprobs", "support_logprob"):
                self._compare(path, beside, column)
        else:
            with self._repeated(GENERATE, step, agent, before) as done:
                fresh = self._fresh(tables.ROLLOUTS, step, agent)
                if done and len(fresh):
                    self.report.exact += 1
                    self._compare_all(path, _Beside(recorded, fresh))
        return same

    def _check_side_sample(self, step: int, agent: str, *, same: bool) -> None:
        """Sample the side sample again, where that must give the same."""
        path, before = self._run.layout.side_rollouts(step, agent), self._run.layout.checkpoint(step - 1, agent)
        recorded = self._recorded(tables.SIDE_ROLLOUTS, step, agent)
        if not len(recorded) or not same or self._samples_elsewhere("sampling the side sample again"):
            return
        with self._repeated(SIDE_GENERATE, step, agent, before) as done:
            fresh = self._fresh(tables.SIDE_ROLLOUTS, step, agent)
            if done and len(fresh):
                self.report.exact += 1
                self._compare_all(path, _Beside(recorded, fresh))

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
        return pa.table(columns, schema=schema).append_column(_NAME, recorded[_NAME])

    def _samples_elsewhere(self, what: str) -> bool:
        """Whether another engine than the training stack sampled: its tokens are not the same bits every time."""
        from hacpo.engines.from_checkpoint import samples_with_vllm

        elsewhere = samples_with_vllm(self._run.settings.engine)
        if elsewhere:
            self._run.skip(what, "vLLM does not repeat itself to the bit")
        return elsewhere

    def _check_update(self, step: int, agent: str, *, same: bool) -> None:
        layout = self._run.layout
        with self._repeated(UPDATE, step, agent, layout.checkpoint(step - 1, agent)) as done:
            if not done:
                return
            self.report.exact += same
            recorded = self._recorded(tables.TRACE, step, agent)
            fresh = self._fresh(tables.TRACE, step, agent)
            if len(recorded):
                self._check_trace(layout.trace(step, agent), _Beside(recorded, fresh), same=same)
            if self._is_there(layout.checkpoint(step, agent), "the weights after an update"):
                self._check_checkpoint(step, agent, same=same)

    def _check_trace(self, path: Path, beside: _Beside, *, same: bool) -> None:
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
            beside = _Beside(recorded, fresh)
            same = np.logical_and.reduce([beside.same(column) for column in tables.EVALUATIONS.schema.names])
            if done and same.sum() >= SAME_SHARE * len(recorded):
                self.report.exact += 1
                self._compare_all(path, beside)

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
        return _named(self._run.run_files, table, step, agent)

    def _fresh(self, table: tables.Table, step: int, agent: str) -> pa.Table:
        """The repetition's rows, named by their key."""
        return _named(RunFiles(self._run.pipeline.run, self._replay), table, step, agent)

    def _compare_all(self, path: Path, beside: _Beside) -> None:
        """Every column; and rows that only the repetition has."""
        for column in beside.recorded.column_names:
            self._compare(path, beside, column)
        missing = beside.only_fresh
        if len(missing):
            self._find(path, missing[0].as_py(), expected="a row", found="no such row", count=len(missing))

    def _compare(
        self, path: Path, beside: _Beside, column: str, *, most: float | Floats | None = None, note: str = ""
    ) -> None:
        """One finding for all rows of a column that are not as repeated; the first is named."""
        odd = np.flatnonzero(~beside.same(column, most))
        if len(odd):
            first = int(odd[0])
            wanted, recorded = (table[column][first].as_py() for table in (beside.fresh, beside.recorded))
            where, wanted, value = _first_difference(column, wanted, recorded)
            name = beside.recorded[_NAME][first].as_py()
            self._find(path, name, where, expected=wanted, found=value, count=len(odd), note=note)

    def _find(self, path: Path, row: str = "", column: str = "", **facts: Any) -> None:
        self._run.find(CHECK, path, row, column, **facts)


class _Beside:
    """Rows of a run beside their repetition, those that both have.

    Attributes:
        recorded, fresh: the rows of each, in the order of the run's.
        only_fresh: names of rows that only the repetition has.
    """

    def __init__(self, recorded: pa.Table, fresh: pa.Table) -> None:
        place = pc.index_in(recorded[_NAME], value_set=fresh[_NAME])
        ordered = np.array_equal(place.to_numpy(), np.arange(len(fresh)))  # as always, and then nothing is copied
        self.recorded = recorded if ordered else recorded.filter(pc.is_valid(place))
        self.fresh = fresh if ordered else fresh.take(place.drop_null())
        self.only_fresh = fresh[_NAME].filter(pc.is_null(pc.index_in(fresh[_NAME], value_set=recorded[_NAME])))

    def same(self, column: str, most: float | Floats | None = None) -> Flags:
        """Which rows have the same value in a column; see `same_values`."""
        flags = [np.empty(0, np.bool_)]
        for start in range(0, len(self.recorded), _ROWS_AT_ONCE):
            block = slice(start, start + _ROWS_AT_ONCE)
            left, right = (table[column][block].combine_chunks() for table in (self.recorded, self.fresh))
            flags.append(same_values(left, right, most[block] if isinstance(most, np.ndarray) else most))
        return np.concatenate(flags)


def _named(files: RunFiles, table: tables.Table, step: int, agent: str) -> pa.Table:
    """Rows with one more column, their key; none where the table cannot be read (the audit of the tables says so)."""
    try:
        content = files.read(table, step, agent)
    except HacpoError:
        content = table.schema.empty_table()
    # A pass of a step's updates sees each response once; which update that is may be what is wrong.
    keys = [pc.cast(content[name], pa.string()) for name in table.key if name != "update"]
    names = pc.binary_join_element_wise(*keys, "/")
    if len(pc.unique(names)) < len(names):
        times = [f" in pass {number}" for number in _times_before(names)]
        names = pc.binary_join_element_wise(names, pa.array(times, pa.string()), "")
    return content.append_column(_NAME, names)


def _times_before(names: pa.ChunkedArray) -> Ints:
    """How often each name was there before."""
    codes = np.asarray(pc.index_in(names, value_set=pc.unique(names)), dtype=np.int64)
    order = np.argsort(codes, kind="stable")
    starts = np.searchsorted(codes[order], codes[order])
    before = np.empty(len(codes), dtype=np.int64)
    before[order] = np.arange(len(codes)) - starts
    return before


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
