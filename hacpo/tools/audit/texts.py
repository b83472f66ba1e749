"""Texts against numbers: verdicts, decoded texts, rendered prompts and retokenised responses, done over again.

This is the slow part of an audit. Tokenizers come from the run's own checkpoints through transformers, which loads
torch where that is installed; no model is loaded and no weight is read.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import pyarrow as pa

from hacpo.algorithm.pooling import Limits, TextRoute
from hacpo.algorithm.rollouts import Rollout, Rollouts
from hacpo.artifacts import tables
from hacpo.artifacts.tables import Row
from hacpo.errors import HacpoError
from hacpo.seeds import derive_seed
from hacpo.tokens.prompts import prompt_token_ids
from hacpo.tokens.stopping import completed_at, first_stop
from hacpo.tools.audit.audit_run import AuditRun
from hacpo.tools.audit.responses import Drawn
from hacpo.verifying.verifier import Request, Verifier

if TYPE_CHECKING:
    from hacpo.tokens.tokenizers import ChatTokenizer

Texts = Literal["all", "sample", "none"]
"""How many responses an audit reads as text."""

SAMPLE_ROWS = 64
"""Responses of each table and step that `sample` looks at."""

_FILE, _NAME = "#file", "#name"
"""Columns added to what is read: where a row is, and what it is called in findings."""

_HURRIED = 0.1
"""Share of its time limit that a response gets once `verification.patience_seconds` are spent. A verdict `timeout` is
doubted only if the answer is decided within this share; one that takes longer may well have run out of time."""


@dataclass
class TextReport:
    """How much was read as text.

    Attributes:
        verified: responses and held-out answers whose verdict was found anew, of so many.
        decoded: rollouts whose text, end and prompt were compared with their tokens, of so many.
        retokenised: pool rows of other agents that were encoded again, of so many.
        undecided: responses whose recorded or new verdict is `timeout`, so that neither proves the other wrong.
    """

    verified: int = 0
    verified_of: int = 0
    decoded: int = 0
    decoded_of: int = 0
    retokenised: int = 0
    retokenised_of: int = 0
    undecided: int = 0


class TextAudit:
    """Checks the texts of a run step by step; a context manager that ends its verification processes.

    Tables that cannot be read are left out: the audit of the tables says so.

    Args:
        run: the audit that the findings are part of.
        mode: every response, or a sample.
        seed: which sample; the same seed, run and step give the same.

    Attributes:
        report: how much was read so far.
    """

    def __init__(self, run: AuditRun, mode: Texts, seed: int = 0) -> None:
        self.report = TextReport()
        self._run = run
        self._mode = mode
        self._seed = seed
        verification = run.settings.verification
        hurried = verification.model_copy(update={"timeout_seconds": verification.timeout_seconds * _HURRIED})
        self._verifier = Verifier(verification, run.pipeline.root)
        self._hurried = Verifier(hurried, run.pipeline.root)
        self._tokenizers: dict[str, ChatTokenizer | None] = {}
        self._prompts: dict[tuple[str, str], list[int] | str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._verifier.close()
        self._hurried.close()

    def check(self, step: int) -> None:
        """Check one step; step 0 has evaluations only."""
        if self._mode == "none":
            return
        agents = self._run.agents
        if step > 0:
            problems = {row["problem_id"]: row for row in self._rows(tables.PROMPTS, step)}
            self._prompts.clear()
            rollouts = {}
            for drawn in Drawn.kinds(self._run):
                for agent in agents:
                    table = self._read(drawn.rollouts, step, agent)
                    if table is not None:
                        self._check_rollouts(step, agent, drawn, table, problems)
                    if not drawn.side:
                        rollouts[agent] = table
            for learner in agents:
                self._check_pool(step, learner, rollouts, problems)
        if self._run.settings.evaluated(step):
            for agent in agents:
                self._check_evaluation(step, agent)

    # --- rollouts ----------------------------------------------------------------------------------------------------

    def _check_rollouts(
        self, step: int, agent: str, drawn: Drawn, table: pa.Table, problems: Mapping[str, Row]
    ) -> None:
        rows = [row for row in self._chosen(table, drawn.rollouts.name, step, agent) if row["problem_id"] in problems]
        self.report.decoded += len(rows)
        self.report.decoded_of += len(table)
        tokenizer = self._tokenizer(agent)
        if tokenizer is not None:
            expected = [_decoded(tokenizer, row["token_ids"]) for row in rows]
            note = "null: its tokens cannot be decoded" if None in expected else ""
            self._compare("text", rows, "text", expected, note)
            self._check_ends(rows, tokenizer, self._run.settings.agents[agent].sampling.stop)
            prompts = [self._prompt(agent, tokenizer, problems[row["problem_id"]]) for row in rows]
            self._compare("prompt", rows, "prompt_token_ids", prompts)
        verdicts = {row["rollout_id"]: row for row in self._rows(drawn.verdicts, step, agent)}
        judged = [row for row in rows if row["rollout_id"] in verdicts]
        whole = self._whole_problems
        requests = [
            Request(
                row["rollout_id"],
                row["text"],
                row["finish_reason"],
                problems[row["problem_id"]]["answer"],
                whole.get(row["problem_id"]),
            )
            for row in judged
        ]
        self.report.verified_of += len(table)
        path = self._run.run_files.path(drawn.verdicts, step, agent)
        self._check_verdicts(path, requests, [verdicts[row["rollout_id"]] for row in judged])

    def _check_ends(self, rows: Sequence[Row], tokenizer: ChatTokenizer, stop: Sequence[str]) -> None:
        """A response ends where its tokens first say so, and says how."""
        reasons, strings, early = [], [], []
        for row in rows:
            token_ids, ends = row["token_ids"], tokenizer.stop_token_ids
            complete = _completed_at(tokenizer, token_ids, stop)
            by_eos = bool(token_ids) and token_ids[-1] in ends
            by_string = not by_eos and complete == len(token_ids)
            reasons.append("stop" if by_eos or by_string else "length")
            strings.append(first_stop(row["text"], stop) if by_string else None)
            if any(token in ends for token in token_ids[:-1]) or (complete or len(token_ids)) < len(token_ids):
                early.append(row)
        self._compare("end", rows, "finish_reason", reasons, note="whether the last token ends a response")
        self._compare("end", rows, "stop_string", strings, note="what ended it, if that was no EOS")
        self._compare("end", early, "token_ids", ["no token after the one that ends it"] * len(early))

    @cached_property
    def _whole_problems(self) -> dict[str, Row]:
        """The training problems, which a reward function is given; none where answers alone are compared."""
        settings = self._run.settings
        if settings.verification.is_math:
            return {}
        return {row["problem_id"]: row for row in self._rows(tables.PROBLEMS, None, settings.data.train)}

    def _check_verdicts(self, path: Path, requests: Sequence[Request], rows: Sequence[Row]) -> None:
        try:
            fresh = self._verifier.verify(requests)
        except HacpoError as error:
            self._run.find("verdict", path, expected="responses that can be verified anew", found=str(error))
            return
        self.report.verified += len(rows)
        doubtful = [
            number
            for number, (row, verdict) in enumerate(zip(rows, fresh, strict=True))
            if row["verdict"] != verdict.verdict and "timeout" in (row["verdict"], verdict.verdict)
        ]
        again = dict(zip(doubtful, self._hurried.verify([requests[number] for number in doubtful]), strict=True))
        undecided = {number for number, verdict in again.items() if verdict.verdict == "timeout"}
        self.report.undecided += len(undecided)
        compared = [number for number in range(len(rows)) if number not in undecided]
        for column in ("verdict", "reward", "extracted"):
            self._compare(
                "verdict",
                [rows[number] for number in compared],
                column,
                [getattr(fresh[number], column) for number in compared],
            )

    # --- pools -------------------------------------------------------------------------------------------------------

    def _check_pool(
        self, step: int, learner: str, rollouts: Mapping[str, pa.Table | None], problems: Mapping[str, Row]
    ) -> None:
        table = self._read(tables.POOL, step, learner)
        tokenizer = None if table is None else self._tokenizer(learner)
        if table is None or tokenizer is None:
            return
        table = table.filter(pa.compute.invert(table["as_sampled"]))  # those are compared without a tokenizer
        rows = [row for row in self._chosen(table, "pool", step, learner) if row["problem_id"] in problems]
        sources = self._sources(rows, rollouts)
        routes = self._routes(learner, tokenizer)
        rows = [row for row in rows if row["rollout_id"] in sources and row["source"] in routes]
        self.report.retokenised += len(rows)
        self.report.retokenised_of += len(table)
        prompts = [self._prompt(learner, tokenizer, problems[row["problem_id"]]) for row in rows]
        self._compare("prompt", rows, "prompt_token_ids", prompts)
        most = Limits.of(self._run.config(learner), self._run.settings.pool.max_tokens).tokens
        results = [
            routes[row["source"]].retokenised(
                sources[row["rollout_id"]],
                most - len(row["prompt_token_ids"] if isinstance(prompt, str) else prompt),
                score_eos=self._run.settings.algorithm.importance.score_eos,
            )
            for row, prompt in zip(rows, prompts, strict=True)
        ]
        for column in ("token_ids", "status", "roundtrip"):
            self._compare("retokenise", rows, column, [getattr(result, column) for result in results])
        self._compare("retokenise", rows, "learner_tokens", [len(result.token_ids) for result in results])

    def _routes(self, learner: str, tokenizer: ChatTokenizer) -> dict[str, TextRoute]:
        """How the others' responses become the learner's tokens, for those whose tokenizer can be used."""
        others = {agent: self._tokenizer(agent) for agent in self._run.agents if agent != learner}
        return {agent: TextRoute(other, tokenizer) for agent, other in others.items() if other is not None}

    def _sources(self, rows: Sequence[Row], rollouts: Mapping[str, pa.Table | None]) -> dict[str, Rollout]:
        """The rollouts behind pool rows, by rollout_id."""
        wanted = pa.array([row["rollout_id"] for row in rows], pa.string())
        sources: dict[str, Rollout] = {}
        for table in rollouts.values():
            if table is not None:
                every = Rollouts(table)
                places = pa.compute.index_in(wanted, value_set=table["rollout_id"]).drop_null().to_pylist()
                sources |= {rollout.rollout_id: rollout for rollout in map(every.__getitem__, places)}
        return sources

    # --- evaluations -------------------------------------------------------------------------------------------------

    def _check_evaluation(self, step: int, agent: str) -> None:
        settings = self._run.settings
        table = self._read(tables.EVALUATIONS, step, agent)
        if table is None:
            return
        problems = {
            (name, row["problem_id"]): row
            for name, benchmark in settings.evaluation.benchmarks.items()
            for row in self._rows(tables.PROBLEMS, None, benchmark.data)
        }
        rows = [
            row
            for row in self._chosen(table, "evaluations", step, agent)
            if (row["benchmark"], row["problem_id"]) in problems
        ]
        requests = [
            Request(
                row[_NAME],
                row["text"],
                row["finish_reason"],
                problems[row["benchmark"], row["problem_id"]]["answer"],
                problems[row["benchmark"], row["problem_id"]],
            )
            for row in rows
        ]
        self.report.verified_of += len(table)
        self._check_verdicts(self._run.layout.evaluation(step, agent), requests, rows)

    # --- reading and comparing ---------------------------------------------------------------------------------------

    def _read(self, table: tables.Table, step: int | None, whose: str = "") -> pa.Table | None:
        """A table with two more columns, each row's file and the name it has in findings; None where it cannot be
        read."""
        try:
            shards = list(self._run.run_files.shards(table, step, whose))
        except HacpoError:
            return None
        files = [pa.array([str(shard.path)] * len(shard.content), pa.string()) for shard in shards]
        content = pa.concat_tables([shard.content for shard in shards])
        keys = [pa.compute.cast(content[name], pa.string()) for name in table.key]
        names = pa.compute.binary_join_element_wise(*keys, "/")
        return content.append_column(_FILE, pa.chunked_array(files)).append_column(_NAME, names)

    def _rows(self, table: tables.Table, step: int | None, whose: str = "") -> list[Row]:
        content = self._read(table, step, whose)
        rows: list[Row] = [] if content is None else content.to_pylist()
        return rows

    def _chosen(self, table: pa.Table, name: str, step: int, agent: str) -> list[Row]:
        """All rows, or the sample."""
        if self._mode == "sample" and len(table) > SAMPLE_ROWS:
            stream = random.Random(derive_seed(self._seed, "audit", name, step, agent))
            table = table.take(sorted(stream.sample(range(len(table)), SAMPLE_ROWS)))
        rows: list[Row] = table.to_pylist()
        return rows

    def _tokenizer(self, agent: str) -> ChatTokenizer | None:
        """An agent's tokenizer, the same at every step; None, with a finding, where it cannot be used."""
        if agent not in self._tokenizers:
            from hacpo.tokens.tokenizers import ChatTokenizer

            folder = self._run.layout.checkpoint(0, agent)
            try:
                self._tokenizers[agent] = ChatTokenizer(folder)
            except HacpoError as error:
                self._tokenizers[agent] = None
                if 0 in self._run.not_here:
                    self._run.skip(f"what needs {agent}'s tokenizer", "its first checkpoint is not here")
                    return None
                self._run.find("text", folder, expected="a usable tokenizer", found=str(error))
        return self._tokenizers[agent]

    def _prompt(self, agent: str, tokenizer: ChatTokenizer, problem: Row) -> list[int] | str:
        """A problem's prompt in an agent's tokens, or why its template refuses it."""
        key = (agent, problem["problem_id"])
        if key not in self._prompts:
            try:
                asked = self._run.settings.agents[agent].prompt
                self._prompts[key] = prompt_token_ids(tokenizer, problem, asked)
            except HacpoError as error:
                self._prompts[key] = str(error)
        return self._prompts[key]

    def _compare(self, check: str, rows: Sequence[Row], column: str, expected: Sequence[Any], note: str = "") -> None:
        """One finding for all rows of a column that are not as expected; the first is named."""
        odd = [(row, wanted) for row, wanted in zip(rows, expected, strict=True) if row[column] != wanted]
        if odd:
            row, wanted = odd[0]
            facts = {"expected": wanted, "found": row[column], "count": len(odd), "note": note}
            self._run.find(check, Path(row[_FILE]), row[_NAME], column, **facts)


def _decoded(tokenizer: ChatTokenizer, token_ids: list[int]) -> str | None:
    """The text of tokens; None where they are such that the tokenizer gives none."""
    try:
        return tokenizer.decode(token_ids)
    except Exception:
        # Tokenizers are third-party code, and in a file that was edited there may be any number.
        return None


def _completed_at(tokenizer: ChatTokenizer, token_ids: list[int], stop: Sequence[str]) -> int | None:
    """As `completed_at`; None where the tokenizer gives no text."""
    try:
        return completed_at(token_ids, stop, tokenizer.decode) if stop else None
    except Exception:  # as for `_decoded`
        return None
