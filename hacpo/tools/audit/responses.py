"""Rollouts and verdicts of one agent in one step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from hacpo.algorithm.rollouts import rollout_ids
from hacpo.algorithm.sampler_correction import effective_sample_size
from hacpo.artifacts import tables
from hacpo.artifacts.list_columns import Flags, Ints, ListColumn
from hacpo.engines.interface import VLLM_SECONDS, FinishReason
from hacpo.pipeline.catalogue import StageSpec, maker_of
from hacpo.pipeline.noted import stage_metrics
from hacpo.settings.engine import sampling_engine
from hacpo.tokens.stopping import first_stop
from hacpo.tools.audit.audit_run import AuditRun
from hacpo.tools.audit.inputs import Batch
from hacpo.tools.audit.metrics_files import check_metrics
from hacpo.tools.audit.rows import Rows
from hacpo.tools.audit.supports import check_support
from hacpo.tools.audit.table_checks import read
from hacpo.verifying.judgement import GAVE_UP, Outcome

Floats = NDArray[np.float64]

SAMPLER_TOLERANCE = 1e-3
"""Nats that a token's log-probability may differ between sampling and rescoring with transformers in float32, where
both come from the same weights and differ by rounding only (a cache while sampling, other batches): below 1e-5."""

VERDICTS = get_args(Outcome)
FINISH_REASONS = get_args(FinishReason)


@dataclass(frozen=True)
class Drawn:
    """Which of a step's responses: those that are learned from, or the side sample of `capability.oracle_samples`.

    Attributes:
        side: whether it is the side sample, whose tables and stages are named after the others.
        group: responses per problem and agent.
    """

    side: bool
    group: int

    @classmethod
    def kinds(cls, run: AuditRun) -> list[Drawn]:
        """Those that a run has."""
        samples = run.settings.algorithm.capability.oracle_samples
        side = [] if samples is None else [cls(True, samples)]
        return [cls(False, run.settings.responses_per_prompt), *side]

    @property
    def rollouts(self) -> tables.Table:
        """Their table."""
        return tables.SIDE_ROLLOUTS if self.side else tables.ROLLOUTS

    @property
    def verdicts(self) -> tables.Table:
        """Their rewards'."""
        return tables.SIDE_VERDICTS if self.side else tables.VERDICTS

    def ids(self, step: int, agent: str, problem_ids: Any) -> Any:
        """The rollout_id of every response, in order."""
        return rollout_ids(step, agent, problem_ids, self.group, side=self.side)


@dataclass(frozen=True)
class Responses:
    """What other tables must repeat of an agent's rollouts, by problem and sample, [R] with R = P * G.

    Attributes:
        ids: rollout_id.
        present: which rows are there; values of others mean nothing.
        tokens, logprobs, sampler_logprobs, prompts: of each response.
        support: what truncated sampling kept; an Arrow column, null where nothing was cut.
        support_logprob: per token, log of the mass that truncated sampling kept; 0 where nothing was cut.
        scored: how many of a response's sampled tokens are scored.
        terminal: the token that ended it, if that is scored: Arrow int32, null where there is none.
        text_bytes: UTF-8 bytes of the text.
        stopped: it ended by itself, or with a stop string.
    """

    ids: Any
    present: Flags
    tokens: ListColumn
    logprobs: ListColumn
    sampler_logprobs: ListColumn
    support: Any
    support_logprob: ListColumn
    prompts: ListColumn
    scored: Ints
    terminal: Any
    text_bytes: Ints
    stopped: Flags

    @cached_property
    def comparable(self) -> Flags:
        """Rows whose log-probabilities are as many as their tokens."""
        lengths = self.tokens.lengths
        alike = (lengths == self.logprobs.lengths) & (lengths == self.sampler_logprobs.lengths)
        return np.asarray(self.present & alike)

    @cached_property
    def source_logprob(self) -> Floats:
        """Sum of the scored tokens' log-probabilities; NaN where it cannot be told."""
        sums = self.logprobs.heads(np.minimum(self.scored, self.logprobs.lengths)).sums()
        return np.where(self.comparable & np.isfinite(sums), sums, np.nan)

    @cached_property
    def whole_logprob(self) -> Floats:
        """The same over the whole vocabulary: with the mass that truncated sampling kept."""
        sums = self.support_logprob.heads(np.minimum(self.scored, self.support_logprob.lengths)).sums()
        return np.where(np.isfinite(sums), self.source_logprob + sums, np.nan)

    @cached_property
    def sampler_log_weight(self) -> Floats:
        """Sum over scored tokens of log p - log q (`sampler_correction`); NaN where it cannot be told."""
        ends = np.minimum(self.scored, self.sampler_logprobs.lengths)
        sums = self.source_logprob - self.sampler_logprobs.heads(ends).sums()
        return np.where(np.isfinite(sums), sums, np.nan)


def check_rollouts(run: AuditRun, batch: Batch, agent: str, drawn: Drawn) -> Responses | None:
    """Check an agent's rollouts of a step; returns what the other tables must repeat of them."""
    step = batch.step
    content = read(run, drawn.rollouts, step, agent)
    if content is None:
        run.skip(f"what follows from rollouts of {agent}", "they cannot be read")
        return None
    group = drawn.group
    rows = Rows(run, content, "rollout_id", drawn.ids(step, agent, batch.problem_ids))
    rows.equal("rollouts", "step", step)
    rows.equal("rollouts", "agent", agent)
    rows.equal("rollouts", "problem_id", batch.problem_ids.take(pa.array(np.repeat(np.arange(len(batch)), group))))
    rows.equal("rollouts", "sample", np.tile(np.arange(group), len(batch)))
    finish = rows.arrow("finish_reason")
    responses = _responses(run, rows, finish)
    _check_tokens(run, rows, responses, finish, agent, group)
    _check_stop_strings(run, rows, responses, agent)
    _check_logprobs(run, rows, responses, _sampled_with(run, maker_of(drawn.rollouts), step, agent))
    check_support(run, rows, responses.tokens, responses.support_logprob, agent)
    policy = run.policy(step - 1, agent)
    if policy is None and (pruned := run.pruned.get(agent, {}).get(step - 1)) is not None:
        run.skip(f"policy of {agent}'s rollouts against the weights", "the checkpoint was pruned, its hash was noted")
        rows.equal("policy", "policy", pruned.policy, note=f"noted when the checkpoint of step {step - 1} was pruned")
    elif policy is None:
        run.skip(f"policy of {agent}'s rollouts", "the previous step's checkpoint is not there (pruned)")
        first = rows.arrow("policy")[int(np.argmax(rows.present))]
        rows.equal("policy", "policy", first, note="all rollouts of a step come from one policy")
    else:
        rows.equal("policy", "policy", policy, note=f"SHA-256 of the weights after step {step - 1}")
    if rows.complete:
        check_metrics(run, maker_of(drawn.rollouts), step, _generate_metrics(responses), agent)
    return responses


def _responses(run: AuditRun, rows: Rows, finish: Any) -> Responses:
    tokens = rows.lists("token_ids")
    stopped = np.asarray(pc.equal(finish, "stop"))
    score_eos = run.settings.algorithm.importance.score_eos
    by_eos = stopped & np.asarray(pc.is_null(rows.arrow("stop_string")))
    drop = by_eos & (tokens.lengths > 1) & (not score_eos)
    scored = tokens.lengths - drop
    return Responses(
        ids=rows.ids,
        present=rows.present,
        tokens=tokens,
        logprobs=rows.lists("logprobs"),
        sampler_logprobs=rows.lists("sampler_logprobs"),
        support=rows.arrow("support"),
        support_logprob=rows.lists("support_logprob"),
        prompts=rows.lists("prompt_token_ids"),
        scored=scored,
        terminal=tokens.last(by_eos & (scored == tokens.lengths)),
        text_bytes=np.asarray(pc.binary_length(rows.arrow("text")), dtype=np.int64),
        stopped=stopped,
    )


def _check_tokens(run: AuditRun, rows: Rows, responses: Responses, finish: Any, agent: str, group: int) -> None:
    """Lengths, ends, and one prompt per problem."""
    tokens, prompts = responses.tokens, responses.prompts
    most = run.settings.agents[agent].sampling.max_new_tokens
    known = np.asarray(pc.is_in(finish, value_set=pa.array(FINISH_REASONS)))
    rows.require("rollouts", "finish_reason", known, "stop or length")
    rows.require("rollouts", "token_ids", tokens.lengths <= most, f"at most {most} tokens", shown=tokens.lengths)
    rows.require(
        "rollouts", "token_ids", (tokens.lengths > 0) | ~responses.stopped, "the token that ended it", shown="no token"
    )
    contexts = [limit for limit in (run.context_length(agent), run.settings.engine.vllm.max_model_len) if limit]
    full = tokens.lengths == most
    if contexts:
        full |= prompts.lengths + tokens.lengths >= min(contexts)
    rows.require(
        "rollouts",
        "finish_reason",
        responses.stopped | full | ~known,
        f"stop: it has fewer than {most} tokens and fits the context",
    )
    first_rows = np.arange(len(prompts)) // group * group
    rows.require(
        "rollouts",
        "prompt_token_ids",
        prompts.same_as(prompts, first_rows) | ~rows.present[first_rows],
        "the same prompt for all responses to a problem",
        shown=prompts,
    )
    rows.require("rollouts", "prompt_token_ids", prompts.lengths > 0, "a prompt", shown="no token")


def _check_stop_strings(run: AuditRun, rows: Rows, responses: Responses, agent: str) -> None:
    """What ended a response by a stop string is in its text; EOS and the length limit leave none."""
    stop, eos = run.settings.agents[agent].sampling.stop, run.eos_token_ids(agent)
    recorded = rows.arrow("stop_string")
    tokens, expected = responses.tokens, np.full(len(rows), None, dtype=object)
    if stop:
        some = tokens.lengths > 0
        by_eos = ~some
        by_eos[some] = np.isin(tokens.values[(tokens.starts + tokens.lengths - 1)[some]], eos)
        if not eos:
            run.skip(f"which responses of {agent} end in EOS", "its first checkpoint does not say its EOS")
            by_eos = np.asarray(pc.is_null(recorded))
        texts = rows.arrow("text")
        for row in np.flatnonzero(responses.stopped & ~by_eos & rows.present):
            expected[row] = first_stop(texts[int(row)].as_py(), stop) or "a stop string, or EOS as the last token"
    wanted = pa.array(expected.tolist(), pa.string())
    same = np.asarray(pc.fill_null(pc.equal(recorded, wanted), False)) | np.asarray(
        pc.and_(pc.is_null(recorded), pc.is_null(wanted))
    )
    rows.require("rollouts", "stop_string", same, wanted, note="what ended the text, if that was no EOS")


def _sampled_with(run: AuditRun, stage: StageSpec, step: int, agent: str) -> str:
    """What sampled a stage's responses. Under `auto` its metrics tell, as the run's machine need not be this one; where
    they cannot be read it may have been vLLM."""
    metrics = stage_metrics(run.layout, stage, step, agent)
    return sampling_engine(run.settings.engine, on_gpu=not metrics or VLLM_SECONDS in metrics, vllm="gpu")


def _check_logprobs(run: AuditRun, rows: Rows, responses: Responses, sampled_with: str) -> None:
    """As many as tokens, finite, not positive, and alike on both sides where only rounding parts them."""
    lengths = responses.tokens.lengths
    for column, logprobs in (("logprobs", responses.logprobs), ("sampler_logprobs", responses.sampler_logprobs)):
        rows.require(
            "rollouts", column, logprobs.lengths == lengths, "as many as token_ids", shown=_counted(logprobs.lengths)
        )
        good = np.isfinite(logprobs.values) & (logprobs.values <= 0)
        if not good.all():
            fine = ListColumn(logprobs.lengths, good).all_true()
            rows.require("rollouts", column, fine, "finite numbers not above 0", shown=logprobs)
    if sampled_with != "transformers" or run.settings.engine.dtype != "float32":
        run.skip(
            "sampler_logprobs against logprobs", "only transformers in float32 must give the same but for rounding"
        )
    elif responses.comparable.all():
        far = np.abs(responses.logprobs.values - responses.sampler_logprobs.values) > SAMPLER_TOLERANCE
        if far.any():
            rows.require(
                "rollouts",
                "sampler_logprobs",
                ListColumn(lengths, ~far).all_true(),
                responses.logprobs,
                shown=responses.sampler_logprobs,
                note=f"logprobs of the same weights, within {SAMPLER_TOLERANCE:g} nats",
            )


def _counted(lengths: Ints) -> Any:
    return pa.array([f"{length} values" for length in lengths.tolist()])


def _generate_metrics(responses: Responses) -> dict[str, float | None]:
    tokens = responses.tokens
    metrics: dict[str, float | None] = {
        "rollouts": len(tokens),
        "tokens": len(tokens.values),
        "prompt_tokens": len(responses.prompts.values),
        "truncated": float((~responses.stopped).mean()),
    }
    if responses.comparable.all() and len(tokens.values):
        difference = responses.logprobs.values.astype(np.float64) - responses.sampler_logprobs.values
        if np.isfinite(difference).all():
            sizes = np.abs(difference)
            metrics |= {
                "sampler_difference_mean": float(sizes.mean()),
                "sampler_difference_p99": float(np.quantile(sizes, 0.99)),
                "sampler_difference_max": float(sizes.max()),
                "sampler_ess": effective_sample_size(ListColumn(tokens.lengths, difference).sums().tolist()),
            }
    return metrics


# --- verdicts --------------------------------------------------------------------------------------------------------


def check_verdicts(run: AuditRun, batch: Batch, agent: str, responses: Responses | None, drawn: Drawn) -> Floats | None:
    """Check an agent's verdicts of a step; returns the rewards, [P * G], NaN where there is none."""
    step = batch.step
    content = read(run, drawn.verdicts, step, agent)
    if content is None:
        run.skip(f"what follows from verdicts on {agent}", "they cannot be read")
        return None
    group = drawn.group
    repeated = pa.array(np.repeat(np.arange(len(batch)), group))
    rows = Rows(run, content, "rollout_id", drawn.ids(step, agent, batch.problem_ids))
    rows.equal("verdicts", "problem_id", batch.problem_ids.take(repeated))
    rows.equal("verdicts", "sample", np.tile(np.arange(group), len(batch)))
    rows.equal("verdicts", "answer", batch.answers.take(repeated), note="the problem's answer")
    stopped = None if responses is None else responses.stopped | ~responses.present
    rewards = check_rewards(run, rows, "verdicts", stopped)
    if rows.complete and np.isfinite(rewards).all():
        counts = {item["values"]: item["counts"] for item in pc.value_counts(rows.arrow("verdict")).to_pylist()}
        check_metrics(
            run,
            maker_of(drawn.verdicts),
            step,
            {
                **{f"verdict.{verdict}": count for verdict, count in counts.items()},
                "accuracy": math.fsum(rewards.tolist()) / len(rewards),
            },
            agent,
            absent=[f"verdict.{verdict}" for verdict in VERDICTS if verdict not in counts],
        )
    return np.where(rows.present, rewards, np.nan)


def check_rewards(run: AuditRun, rows: Rows, check: str, stopped: Flags | None) -> Floats:
    """Rewards against verdicts, and `truncated` against how responses ended (if that is known), but for a reward
    function's, which says both itself; returns the rewards."""
    rewards, verdict = rows.floats("reward"), rows.arrow("verdict")
    rows.require(check, "reward", np.isfinite(rewards), "a finite number")
    known = np.asarray(pc.is_in(verdict, value_set=pa.array(VERDICTS)))
    rows.require(check, "verdict", known, " or ".join(VERDICTS))
    failed = np.asarray(pc.is_in(verdict, value_set=pa.array(GAVE_UP)))
    silent = np.asarray(pc.is_null(rows.arrow("message")))
    rows.require(check, "message", silent | failed, "none: nothing failed")
    if run.settings.verification.is_function:
        run.skip("rewards against verdicts", "they are a function's of the user's own")
        return rewards
    correct = np.asarray(pc.equal(verdict, "correct"))
    if run.settings.verification.is_binary:
        note = "1 for `correct`, 0 for any other verdict"
        rows.close(check, "reward", correct.astype(np.float64), where=known, note=note)
    else:
        wrong = np.asarray(pc.equal(verdict, "wrong"))
        fits = np.where(wrong, (rewards >= 0) & (rewards < 1), rewards == correct)
        rows.require(check, "reward", fits | ~known, "1 for `correct`, below 1 for `wrong`, else 0", shown=rewards)
    if stopped is not None:
        truncated = np.asarray(pc.equal(verdict, "truncated"))
        # Under `boxed` a cut response has any verdict but the one of a whole text without an answer.
        boxed = run.settings.verification.truncated == "boxed"
        unlike = np.asarray(pc.equal(verdict, "no_answer")) if boxed else ~truncated
        rows.require(
            check,
            "verdict",
            np.where(stopped, ~truncated, ~unlike),
            np.where(stopped, "another than truncated: it stopped by itself", "truncated: the limit cut it"),
        )
    return rewards
