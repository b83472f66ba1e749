"""One agent's held-out answers after a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hacpo.artifacts import tables
from hacpo.artifacts.problem_rows import Problem
from hacpo.evaluation.metrics import summary
from hacpo.evaluation.values import Response
from hacpo.pipeline.catalogue import EVALUATE
from hacpo.tools.audit.audit_run import AuditRun
from hacpo.tools.audit.metrics_files import check_metrics
from hacpo.tools.audit.responses import FINISH_REASONS, check_rewards
from hacpo.tools.audit.rows import Rows
from hacpo.tools.audit.table_checks import Content, read

IDENTITY = "benchmark/problem_id/sample"
"""How findings name a row of an evaluation."""


def check_evaluation(run: AuditRun, step: int, agent: str, sets: Mapping[str, Sequence[Problem] | None]) -> None:
    """Every problem of every benchmark answered as often as asked, rewarded as its verdict says, and counted right."""
    content = read(run, tables.EVALUATIONS, step, agent)
    if content is None:
        return
    benchmarks = sorted(run.settings.evaluation.benchmarks.items())
    expected: list[str] = []
    limits: list[int] = []
    for name, benchmark in benchmarks:
        problems = sets.get(benchmark.data)
        if problems is None:
            run.skip(f"evaluations on {name}", f"{benchmark.data} cannot be read")
            return
        ids = [f"{name}/{asked.problem_id}/{sample}" for asked in problems for sample in range(benchmark.samples)]
        expected += ids
        limits += [benchmark.max_new_tokens or run.settings.agents[agent].sampling.max_new_tokens] * len(ids)
    rows = Rows(run, _identified(content), IDENTITY, pa.array(expected, pa.string()))
    finish, most, counts = rows.arrow("finish_reason"), np.array(limits), rows.ints("token_count")
    known = np.asarray(pc.is_in(finish, value_set=pa.array(FINISH_REASONS)))
    rows.require("evaluations", "finish_reason", known, "stop or length")
    good = (counts >= 0) & (counts <= most)
    rows.require("evaluations", "token_count", good, "from 0 to the longest response", shown=counts)
    stopped = np.asarray(pc.equal(finish, "stop"))
    rows.require("evaluations", "token_count", ~stopped | (counts > 0), "the EOS that ended it", shown=counts)
    rewards = check_rewards(run, rows, "evaluations", stopped)
    if rows.complete and np.isfinite(rewards).all():
        metrics: dict[str, float | None] = {}
        of = np.asarray(rows.arrow("benchmark").to_pylist())
        answers = [rewards.tolist(), rows.arrow("verdict").to_pylist(), rows.arrow("extracted").to_pylist()]
        responses = list(map(Response, *answers))
        for name, benchmark in benchmarks:
            mine = np.flatnonzero(of == name).tolist()
            if mine:
                each = [
                    [responses[row] for row in mine[start : start + benchmark.samples]]
                    for start in range(0, len(mine), benchmark.samples)
                ]
                numbers = summary(each, votes=not run.settings.verification.is_function)
                metrics |= {f"{name}.{key}": value for key, value in numbers.items()}
                metrics[f"{name}.tokens"] = int(counts[mine].sum())
        check_metrics(run, EVALUATE, step, metrics, agent)


def _identified(content: Content) -> Content:
    """The table with a column that identifies its rows."""
    columns = [content.arrow[name].cast(pa.string()) for name in ("benchmark", "problem_id", "sample")]
    ids = pc.binary_join_element_wise(*columns, "/")
    return Content(content.path, content.table, content.arrow.append_column(IDENTITY, ids), content.shards)
