"""Texts against numbers: verdicts, decoded texts, rendered prompts and retokenised responses, done over again.

This is the slow part of an audit. Tokenizers come from the run's own checkpoints through transformers, which loads
torch where that is installed; no model is loaded and no weight is read.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from hacpo.algorithm.pooling import Limits, TextRoute
from hacpo.algorithm.rollouts import Rollouts
from hacpo.artifacts import tables
from hacpo.artifacts.parquet import values
from hacpo.artifacts.problem_rows import Asked, Problem, ScheduledProblem
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

_OF_ROLLOUTS = (
    "rollout_id",
    "problem_id",
    "sample",
    "prompt_token_ids",
    "token_ids",
    "text",
    "finish_reason",
    "stop_string",
    "logprobs",
)
_OF_POOL = (
    "rollout_id",
    "problem_id",
    "source",
    "prompt_token_ids",
    "token_ids",
    "status",
    "roundtrip",
    "learner_tokens",
    "as_sampled",
)
_JUDGED = ("verdict", "reward", "extracted")
"""Columns that are read, of tables that have others beside them."""

_Asked = TypeVar("_Asked", bound=Asked)

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

    def __init__(self, run: AuditRun, mode: Texts, seed: int) -> None:
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
            problems = {asked.problem_id: asked for asked in self._problems(ScheduledProblem, tables.PROMPTS, step)}
            self._prompts.clear()
            rollouts = {}
            for drawn in Drawn.kinds(self._run):
                for agent in agents:
                    table = self._read(drawn.rollouts, step, agent, _OF_ROLLOUTS)
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
        self, step: int, agent: str, drawn: Drawn, table: pa.Table, problems: Mapping[str, ScheduledProblem]
    ) -> None:
        chosen = _of_problems(self._chosen(table, drawn.rollouts.name, step, agent), problems)
        self.report.decoded += len(chosen)
        self.report.decoded_of += len(table)
        asked = [problems[name] for name in chosen["problem_id"].to_pylist()]
        tokenizer = self._tokenizer(agent)
        if tokenizer is not None:
            texts = [_decoded(tokenizer, token_ids) for token_ids in values(chosen["token_ids"])]
            note = "null: its tokens cannot be decoded" if None in texts else ""
            self._compare("text", chosen, ["text"], ((text,) for text in texts), note)
            self._check_ends(chosen, tokenizer, self._run.settings.agents[agent].sampling.stop)
            prompts = ((self._prompt(agent, tokenizer, problem),) for problem in asked)
            self._compare("prompt", chosen, ["prompt_token_ids"], prompts)
        self.report.verified_of += len(table)
        verdicts = self._read(drawn.verdicts, step, agent, ["rollout_id", *_JUDGED])
        if verdicts is None:
            return
        place = pc.index_in(chosen["rollout_id"], value_set=verdicts["rollout_id"])
        whole = self._whole_problems
        told = (chosen[name].to_pylist() for name in ("rollout_id", "text", "finish_reason"))
        requests = [
            Request(name, text, finish_reason, problem.answer, whole.get(problem.problem_id))
            for name, text, finish_reason, problem, judged in zip(*told, asked, pc.is_valid(place), strict=True)
            if judged.as_py()
        ]
        path = self._run.run_files.path(drawn.verdicts, step, agent)
        self._check_verdicts(path, requests, verdicts.take(place.drop_null()))

    def _check_ends(self, chosen: pa.Table, tokenizer: ChatTokenizer, stop: Sequence[str]) -> None:
        """A response ends where its tokens first say so, and says how."""
        reasons, strings, early, ends = [], [], [], tokenizer.stop_token_ids
        for row, (token_ids, text) in enumerate(zip(*map(values, (chosen["token_ids"], chosen["text"])), strict=True)):
            complete = _completed_at(tokenizer, token_ids, stop)
            by_eos = bool(token_ids) and token_ids[-1] in ends
            by_string = not by_eos and complete == len(token_ids)
            reasons.append(("stop" if by_eos or by_string else "length",))
            strings.append((first_stop(text, stop) if by_string else None,))
            if any(token in ends for token in token_ids[:-1]) or (complete or len(token_ids)) < len(token_ids):
                early.append(row)
        self._compare("end", chosen, ["finish_reason"], reasons, note="whether the last token ends a response")
        self._compare("end", chosen, ["stop_string"], strings, note="what ended it, if that was no EOS")
        none_after = [("no token after the one that ends it",)] * len(early)
        self._compare("end", chosen.take(pa.array(early, pa.int64())), ["token_ids"], none_after)

    @cached_property
    def _whole_problems(self) -> dict[str, Problem]:
        """The training problems: scorers and reward functions are given more than the answer. None with `math`."""
        settings = self._run.settings
        if settings.verification.is_math:
            return {}
        return {
            asked.problem_id: asked for asked in self._problems(Problem, tables.PROBLEMS, None, settings.data.train)
        }

    def _check_verdicts(self, path: Path, requests: Sequence[Request], recorded: pa.Table) -> None:
        try:
            fresh = self._verifier.verify(requests)
        except HacpoError as error:
            self._run.find("verdict", path, expected="responses that can be verified anew", found=str(error))
            return
        self.report.verified += len(recorded)
        doubtful = [
            number
            for number, (outcome, verdict) in enumerate(zip(recorded["verdict"].to_pylist(), fresh, strict=True))
            if outcome != verdict.verdict and "timeout" in (outcome, verdict.verdict)
        ]
        again = dict(zip(doubtful, self._hurried.verify([requests[number] for number in doubtful]), strict=True))
        undecided = {number for number, verdict in again.items() if verdict.verdict == "timeout"}
        self.report.undecided += len(undecided)
        compared = [number for number in range(len(recorded)) if number not in undecided]
        table = recorded.take(pa.array(compared, pa.int64()))
        verdicts = ([getattr(fresh[number], column) for column in _JUDGED] for number in compared)
        self._compare("verdict", table, _JUDGED, verdicts)

    # --- pools -------------------------------------------------------------------------------------------------------

    def _check_pool(
        self, step: int, learner: str, rollouts: Mapping[str, pa.Table], problems: Mapping[str, ScheduledProblem]
    ) -> None:
        table = self._read(tables.POOL, step, learner, _OF_POOL)
        tokenizer = None if table is None else self._tokenizer(learner)
        if table is None or tokenizer is None:
            return
        table = table.filter(pc.invert(table["as_sampled"]))  # those are compared without a tokenizer
        chosen = _of_problems(self._chosen(table, "pool", step, learner), problems)
        routes = self._routes(learner, tokenizer)
        every = pa.concat_tables(list(rollouts.values())[::-1]) if rollouts else chosen.slice(0, 0)
        place = pc.index_in(chosen["rollout_id"], value_set=every["rollout_id"])
        routed = pc.is_in(chosen["source"], value_set=pa.array(routes, pa.string()))
        known = pc.and_(pc.is_valid(place), routed)
        chosen, place = chosen.filter(known), place.filter(known)
        self.report.retokenised += len(chosen)
        self.report.retokenised_of += len(table)
        asked = [problems[name] for name in chosen["problem_id"].to_pylist()]
        prompts = [self._prompt(learner, tokenizer, problem) for problem in asked]
        self._compare("prompt", chosen, ["prompt_token_ids"], ((prompt,) for prompt in prompts))
        most = Limits.of(self._run.config(learner), self._run.settings.pool.max_tokens).tokens
        recorded = pc.list_value_length(chosen["prompt_token_ids"]).to_pylist()
        rooms = [
            most - (length if isinstance(prompt, str) else len(prompt))
            for prompt, length in zip(prompts, recorded, strict=True)
        ]
        responses = map(Rollouts(every).__getitem__, place.to_pylist())
        score_eos = self._run.settings.algorithm.importance.score_eos
        results = (
            routes[source].retokenised(rollout, room, score_eos=score_eos)
            for source, rollout, room in zip(chosen["source"].to_pylist(), responses, rooms, strict=True)
        )
        again = ((result.token_ids, result.status, result.roundtrip, len(result.token_ids)) for result in results)
        self._compare("retokenise", chosen, ["token_ids", "status", "roundtrip", "learner_tokens"], again)

    def _routes(self, learner: str, tokenizer: ChatTokenizer) -> dict[str, TextRoute]:
        """How the others' responses become the learner's tokens, for those whose tokenizer can be used."""
        others = {agent: self._tokenizer(agent) for agent in self._run.agents if agent != learner}
        return {agent: TextRoute(other, tokenizer) for agent, other in others.items() if other is not None}

    # --- evaluations -------------------------------------------------------------------------------------------------

    def _check_evaluation(self, step: int, agent: str) -> None:
        table = self._read(
            tables.EVALUATIONS, step, agent, [*tables.EVALUATIONS.key, "text", "finish_reason", *_JUDGED]
        )
        if table is None:
            return
        problems = {
            (name, asked.problem_id): asked
            for name, benchmark in self._run.settings.evaluation.benchmarks.items()
            for asked in self._problems(Problem, tables.PROBLEMS, None, benchmark.data)
        }
        chosen = self._chosen(table, "evaluations", step, agent)
        names = zip(*(chosen[name].to_pylist() for name in ("benchmark", "problem_id")), strict=True)
        asked = [problems.get(name) for name in names]
        told = (chosen[name].to_pylist() for name in (_NAME, "text", "finish_reason"))
        requests = [
            Request(name, text, finish_reason, problem.answer, problem)
            for name, text, finish_reason, problem in zip(*told, asked, strict=True)
            if problem is not None
        ]
        self.report.verified_of += len(table)
        known = chosen.filter(pa.array([problem is not None for problem in asked], pa.bool_()))
        self._check_verdicts(self._run.layout.evaluation(step, agent), requests, known)

    # --- reading and comparing ---------------------------------------------------------------------------------------

    def _read(
        self, table: tables.Table, step: int | None, whose: str = "", columns: Sequence[str] | None = None
    ) -> pa.Table | None:
        """A table with two more columns, each row's file and the name it has in findings; None where it cannot be
        read."""
        try:
            shards = list(self._run.run_files.shards(table, step, whose, columns=columns))
        except HacpoError:
            return None
        files = [pa.array([str(shard.path)] * len(shard.content), pa.string()) for shard in shards]
        content = pa.concat_tables([shard.content for shard in shards])
        keys = [pc.cast(content[name], pa.string()) for name in table.key]
        names = pc.binary_join_element_wise(*keys, "/")
        return content.append_column(_FILE, pa.chunked_array(files)).append_column(_NAME, names)

    def _problems(self, kind: type[_Asked], table: tables.Table, step: int | None, whose: str = "") -> list[_Asked]:
        """Problems of a set or of a step; none where they cannot be read."""
        content = self._read(table, step, whose)
        return [] if content is None else kind.of(content)

    def _chosen(self, table: pa.Table, name: str, step: int, agent: str) -> pa.Table:
        """All rows, or the sample."""
        if self._mode == "sample" and len(table) > SAMPLE_ROWS:
            stream = random.Random(derive_seed(self._seed, "audit", name, step, agent))
            table = table.take(sorted(stream.sample(range(len(table)), SAMPLE_ROWS)))
        return table

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

    def _prompt(self, agent: str, tokenizer: ChatTokenizer, problem: ScheduledProblem) -> list[int] | str:
        """A problem's prompt in an agent's tokens, or why its template refuses it."""
        key = (agent, problem.problem_id)
        if key not in self._prompts:
            try:
                asked = self._run.settings.agents[agent].prompt
                self._prompts[key] = prompt_token_ids(tokenizer, problem, asked)
            except HacpoError as error:
                self._prompts[key] = str(error)
        return self._prompts[key]

    def _compare(
        self, check: str, table: pa.Table, columns: Sequence[str], expected: Iterable[Sequence[Any]], note: str = ""
    ) -> None:
        """One finding for all rows of a column that are not as expected; the first is named.

        Args:
            expected: for each row, the value of every one of the columns.
        """
        first: dict[str, tuple[int, Any, Any]] = {}
        count = Counter[str]()
        for row, (recorded, wanted) in enumerate(
            zip(zip(*(values(table[column]) for column in columns), strict=True), expected, strict=True)
        ):
            for column, value, other in zip(columns, recorded, wanted, strict=True):
                if value != other:
                    first.setdefault(column, (row, value, other))
                    count[column] += 1
        for column in (column for column in columns if column in first):
            row, value, other = first[column]
            file, name = (table[key][row].as_py() for key in (_FILE, _NAME))
            facts = {"expected": other, "found": value, "count": count[column], "note": note}
            self._run.find(check, Path(file), name, column, **facts)


def _of_problems(table: pa.Table, problems: Mapping[str, ScheduledProblem]) -> pa.Table:
    """The rows of these problems."""
    return table.filter(pc.is_in(table["problem_id"], value_set=pa.array(problems, pa.string())))


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
