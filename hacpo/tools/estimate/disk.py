"""Bytes on disk: tables by step, and checkpoints as written and after retention.

A table's size is a sum of what a file costs (footer and metadata), a row, a prompt token and a response token. The
bytes are those of real files in zstd (docs/estimate.md says which); two sets of them, because a tiny agent's tokens and
log-probabilities compress far better than real ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from hacpo.pipeline.retention.rule import kept_steps
from hacpo.settings.agents import AgentSampling
from hacpo.settings.root import RetentionSettings, Settings
from hacpo.tools.estimate.lengths import SMALL_VOCABULARY
from hacpo.tools.estimate.shapes import ModelShape
from hacpo.tools.estimate.workload import AgentWork


@dataclass(frozen=True)
class Cost:
    """Bytes of one file, and of each row, prompt token and response token in it."""

    file: float
    row: float = 0.0
    prompt_token: float = 0.0
    token: float = 0.0

    def __call__(self, files: int, rows: int, prompt_tokens: float, tokens: float) -> float:
        """Bytes of a table."""
        return files * self.file + rows * self.row + prompt_tokens * self.prompt_token + tokens * self.token


_REAL = {
    "rollouts": Cost(3_600, 2, 0.12, 8.4),
    "verdicts": Cost(1_450, 5),
    "pool": Cost(3_000, 13, 0.12, 0.9),
    "advantages": Cost(1_950, 4),
    "updates": Cost(2_600, 26),
    "evaluations": Cost(2_350, 7, 0.0, 0.8),
    "prompts": Cost(900, 120),
}
_SMALL = {
    "rollouts": Cost(3_200, 3.4, 0.14, 1.84),
    "verdicts": Cost(1_450, 4.8),
    "pool": Cost(2_850, 5.6, 0.09, 0.165),
    "advantages": Cost(1_950, 4.9),
    "updates": Cost(2_600, 9.1),
    "evaluations": Cost(2_300, 2.8, 0.0, 0.22),
    "prompts": Cost(900, 20),
}

KEPT_BEYOND = 1.2
"""Ids that `top_p` keeps at a position on average, times the mass 1 - top_p that it leaves out: docs/sampling.md has
what was measured from .8 to .99 at temperature 1."""

_KEPT_ID = {True: 1.4, False: 2.0}
"""Bytes of a kept id where `top_k` alone decides how many there are, and where `top_p` does (docs/sampling.md)."""

_KEPT_MASS = 4.3
"""Bytes of a position's `support_logprob`."""

METRICS = 350
"""Bytes of one stage's metrics file."""

SMALL_FILES = 20_000
"""Bytes of a checkpoint's files beside weights and optimizer, without the tokenizer."""

TOKENIZER_BYTES = 100
"""Bytes of tokenizer.json per token of a real vocabulary: 11 MB for Qwen3, 17 MB for Llama 3."""


@dataclass(frozen=True)
class Checkpoint:
    """One agent's checkpoints: bytes of the start, and of each later one by part."""

    start: float
    weights: float
    optimizer: float
    other: float

    @property
    def each(self) -> float:
        """Bytes of one checkpoint after the start."""
        return self.weights + self.optimizer + self.other


@dataclass(frozen=True)
class Disk:
    """All agents' bytes on disk.

    Attributes:
        step: table -> bytes of one step.
        evaluation: bytes of one evaluation.
        tables: of the whole run, without checkpoints.
        checkpoint: bytes of one step's checkpoints.
        written: tables and every checkpoint that is ever written.
        kept: what is there at the end, after retention.
        most: what is there at most while the run goes on: the newest checkpoints beside those that are kept.
        cached: bytes of DVC's cache, which holds every table a second time unless the file system can clone files.
    """

    step: dict[str, float]
    evaluation: float
    tables: float
    checkpoint: float
    written: float
    kept: float
    most: float
    cached: float


def tables_of(work: AgentWork, shape: ModelShape, rows_per_shard: int) -> tuple[dict[str, float], float]:
    """(table -> bytes of one step, bytes of one evaluation) of one agent."""
    costs = _costs(shape)

    def size(table: str, rows: int, prompt_tokens: float = 0.0, tokens: float = 0.0) -> float:
        return costs[table](max(1, -(-rows // rows_per_shard)), rows, prompt_tokens, tokens)

    own, pooled, asked = work.step, work.pooled, work.evaluation
    prompts = own.prompt_tokens * pooled / own.responses
    step = {
        "rollouts": size("rollouts", own.responses, own.prompt_tokens, own.tokens),
        "verdicts": size("verdicts", own.responses),
        "pool": size("pool", pooled, prompts, work.pooled_tokens - prompts),
        "advantages": size("advantages", pooled),
        "updates": costs["updates"](1, work.learned, 0.0, 0.0),
    }
    if (side := work.side).responses:
        step["side_rollouts"] = size("rollouts", side.responses, side.prompt_tokens, side.tokens)
        step["side_verdicts"] = size("verdicts", side.responses)
    return step, size("evaluations", asked.responses, 0.0, asked.tokens) if asked.responses else 0.0


def support_bytes(sampling: AgentSampling, shape: ModelShape) -> float:
    """Bytes of a sampled token's kept ids; 0 where sampling is not truncated."""
    if not sampling.truncates:
        return 0.0
    whole_mass = sampling.top_p == 1
    most = [sampling.top_k or shape.vocabulary, shape.vocabulary]
    return _KEPT_ID[whole_mass] * min(most if whole_mass else [*most, KEPT_BEYOND / (1 - sampling.top_p)])


def _supports(
    settings: Settings, work: dict[str, AgentWork], shapes: dict[str, ModelShape]
) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes that truncated sampling adds to one step's (rollouts, pool) of each agent.

    Pools repeat what others kept where the token ids are the same; vocabularies of one size stand for that here.
    """
    rollouts, pools = dict.fromkeys(work, 0.0), dict.fromkeys(work, 0.0)
    for source, agent in work.items():
        each = support_bytes(settings.agents[source].sampling, shapes[source])
        rollouts[source] = agent.step.tokens * (each + (_KEPT_MASS if each else 0.0))
        for learner in work if settings.algorithm.rollouts.share else ():
            if learner != source and shapes[learner].vocabulary == shapes[source].vocabulary:
                pools[learner] += agent.step.tokens * each
    return rollouts, pools


def _costs(shape: ModelShape) -> dict[str, Cost]:
    return _SMALL if shape.vocabulary < SMALL_VOCABULARY else _REAL


def checkpoint_of(shape: ModelShape, trained: int, dtype_bytes: int) -> Checkpoint:
    """Bytes of one agent's checkpoints.

    Args:
        trained: parameters that are trained; fewer than all with an adapter, whose checkpoints hold it alone.
        dtype_bytes: of a weight: 4 or 2. With 2 the optimizer's state holds float32 masters too.
    """
    real = shape.vocabulary >= SMALL_VOCABULARY
    other = SMALL_FILES + (TOKENIZER_BYTES * shape.vocabulary if real else 0)
    return Checkpoint(
        start=dtype_bytes * shape.parameters + other,
        weights=dtype_bytes * trained,
        optimizer=trained * (8 + (4 if dtype_bytes < 4 else 0)),
        other=other,
    )


def disk(
    settings: Settings,
    work: dict[str, AgentWork],
    shapes: dict[str, ModelShape],
    trained: dict[str, int],
    *,
    evaluations: int,
) -> Disk:
    """What a run writes, and what retention leaves of it."""
    step: dict[str, float] = {}
    evaluation = 0.0
    rollouts, pools = _supports(settings, work, shapes)
    for name, agent in work.items():
        tables, answers = tables_of(agent, shapes[name], settings.storage.rows_per_shard)
        tables["rollouts"] += rollouts[name]
        tables["pool"] += pools[name]
        if "side_rollouts" in tables:
            tables["side_rollouts"] += rollouts[name] * agent.side.tokens / agent.step.tokens
        step = {table: step.get(table, 0.0) + size for table, size in tables.items()}
        evaluation += answers
    # Two files that a step has once: its prompts, and the agents' capabilities.
    step["prompts"] = _costs(next(iter(shapes.values())))["prompts"](2, settings.batch.prompts, 0.0, 0.0)
    stages = 6 if settings.algorithm.capability.oracle_samples else 4
    step["metrics"] = METRICS * (stages * len(work) + 1)
    dtype_bytes = 4 if settings.engine.dtype == "float32" else 2
    checkpoints = [checkpoint_of(shapes[name], trained[name], dtype_bytes) for name in work]
    start, each = (sum(getattr(checkpoint, part) for checkpoint in checkpoints) for part in ("start", "each"))
    tables_size = settings.steps * sum(step.values()) + evaluations * evaluation
    kept = kept_after(settings.retention, settings.steps)
    return Disk(
        step=step,
        evaluation=evaluation,
        tables=tables_size,
        checkpoint=each,
        written=tables_size + start + settings.steps * each,
        kept=tables_size + start + kept * each,
        most=tables_size + start + min(settings.steps, kept + (0 if settings.retention.keeps_all else 1)) * each,
        cached=tables_size,
    )


def kept_after(retention: RetentionSettings, steps: int) -> int:
    """Checkpoints after the start that are left at the end; `keep_best` is taken to keep one that nothing else does."""
    kept = [step for step in kept_steps(retention, steps) if step > 0]
    extra = 1 if retention.keep_best is not None and len(kept) < steps else 0
    return len(kept) + extra
