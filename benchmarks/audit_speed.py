"""Time and memory of `hacpo audit --texts none` on a run of many rollouts.

Makes a run of two agents whose numbers fit together, with hacpo's own functions and random tokens instead of models,
and audits it in a process of its own. The audit must find nothing.

    python benchmarks/audit_speed.py --steps 100 --rollouts 5000
    python benchmarks/audit_speed.py --steps 50 --rollouts 10000

`--rollouts` are per step and agent.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hacpo.algorithm.advantage_table import CapabilityRow, capability_rows
from hacpo.algorithm.group_advantage import step_advantages
from hacpo.algorithm.rollouts import rollout_ids
from hacpo.algorithm.trace import trace_columns
from hacpo.algorithm.updates import shuffle_seeds, update_slots
from hacpo.artifacts import parquet, storage, tables
from hacpo.artifacts.list_columns import ListColumn
from hacpo.artifacts.tables import step_dir
from hacpo.artifacts.weights import policy_hash
from hacpo.data import problems
from hacpo.pipeline.catalogue import STAGES
from hacpo.pipeline.project import Pipeline
from hacpo.pipeline.records.dvc_files import stamp
from hacpo.settings import params as settings_of
from hacpo.tools.audit.pools import PoolOrder

AGENTS = ("ada", "bo")
GROUP = 8
LONGEST = 56
"""Tokens of a response: 4 to 56, 30 on average."""

PARAMS = """
seed: 1
steps: {steps}
agents: {{ada: {{model: models/ada}}, bo: {{model: models/bo}}}}
algorithm: {{recipe: hacpo}}
data: {{train: made/train, sets: {{made/train: {{path: problems.parquet}}}}}}
sampling: {{group_size: 8, max_new_tokens: 56}}
batch: {{prompts: {prompts}, minibatch_prompts: {minibatch}}}
engine: {{device: cpu}}
optimizer: {{learning_rate: 1.0e-6}}
evaluation: {{every: {steps}, benchmarks: {{heldout: {{data: made/train}}}}}}
"""

Columns = dict[str, Any]


class Maker:
    """Writes the run, step by step."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.settings = pipeline.settings
        self.layout = pipeline.layout
        self.random = np.random.default_rng(0)
        self.texts = pa.array(["so " * int(count) for count in self.random.integers(1, 60, 997)], pa.string())
        self.stage_settings: dict[tuple[str, str], dict[str, Any]] = {}
        self.capabilities: dict[str, CapabilityRow] = {}

    def write(
        self, path: Path, table: tables.Table, columns: Columns, stage: str, without: tuple[str, ...] = (), **where: Any
    ) -> None:
        step = where.pop("step", None)
        agent = next(iter(where.values()), "")
        if (stage, agent) not in self.stage_settings:
            self.stage_settings[stage, agent] = settings_of.reads(self.settings, STAGES[stage].settings, agent)
        settings = self.stage_settings[stage, agent]
        single = path.suffix == ".parquet" or stage == "prepare"
        parquet.write_table(
            path,
            table,
            parquet.to_arrow(table, columns),
            run=self.pipeline.run,
            partition=table.partition(step, *where.values()),
            settings={key: value for key, value in settings.items() if key not in without},
            rows_per_shard=None if single else self.settings.storage.rows_per_shard,
        )

    def metrics(self, stage: str, step: int, name: str) -> None:
        storage.write_json(self.layout.metrics(stage, step, name), {"seconds": 0.0})

    def lists(self, lengths: Any, values: Any, kind: Any) -> Any:
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
        return pa.ListArray.from_arrays(offsets, pa.array(values, kind.value_type), type=kind)

    def inputs(self) -> list[list[dict[str, Any]]]:
        """Data, schedule and prompts; returns every step's rows."""
        name = self.settings.data.train
        rows = problems.load(name, self.settings.data.sets[name], self.pipeline.root)
        columns = parquet.to_arrow(tables.PROBLEMS, [vars(row) for row in rows])
        self.write(
            self.layout.problems(name), tables.PROBLEMS, _columns(columns), "prepare", ("seed", "steps", "batch")
        )
        prompts = self.settings.batch.prompts
        scheduled = problems.schedule(rows, steps=self.settings.steps, prompts=prompts, seed=self.settings.seed)
        schedule = [vars(row) for row in scheduled]
        self.write(
            self.layout.schedule, tables.SCHEDULE, _columns(parquet.to_arrow(tables.SCHEDULE, schedule)), "prepare"
        )
        self.metrics("prepare", 0, "all")
        steps = [schedule[start : start + prompts] for start in range(0, len(schedule), prompts)]
        for step, content in enumerate(steps, start=1):
            table = _columns(parquet.to_arrow(tables.SCHEDULE, content))
            self.write(self.layout.prompts(step), tables.PROMPTS, table, "prepare", ("steps", "data"), step=step)
        return steps

    def checkpoint(self, step: int, agent: str) -> None:
        """One tensor of one number, and the optimizer's."""
        folder = self.layout.checkpoint(step, agent)
        (folder / "trainer").mkdir(parents=True)
        (folder / "config.json").write_text('{"model_type": "made"}')
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "made"}')
        for path, value in ((folder / "model.safetensors", step), (folder / "trainer" / "optimizer.safetensors", 0)):
            header = json.dumps({"w": {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}}).encode()
            path.write_bytes(len(header).to_bytes(8, "little") + header + np.float64(value).tobytes())
        state = {"updates_done": step * self.settings.updates_per_step}
        (folder / "trainer" / "state.json").write_text(json.dumps(state))
        if step == 0:
            shutil.rmtree(folder / "trainer")

    def step(self, step: int, batch: list[dict[str, Any]]) -> None:
        """Every table of one step."""
        ids = pa.array([row["problem_id"] for row in batch], pa.string())
        answers = pa.array([row["answer"] for row in batch], pa.string())
        repeated = pa.array(np.repeat(np.arange(len(batch)), GROUP))
        rewards: dict[str, Any] = {}
        made: dict[str, Columns] = {}
        for agent in AGENTS:
            made[agent], rewards[agent] = self.responses(step, agent, ids.take(repeated), answers.take(repeated), ids)
        rows = capability_rows(
            {agent: values.reshape(-1, GROUP) for agent, values in rewards.items()},
            self.capabilities,
            self.settings.algorithm.capability,
        )
        self.capabilities = {row.agent: row for row in rows}
        table = _columns(parquet.to_arrow(tables.CAPABILITY, [vars(row) for row in rows]))
        self.write(self.layout.capability(step), tables.CAPABILITY, table, "advantage", step=step)
        self.metrics("advantage", step, "all")
        for learner in AGENTS:
            capability = [row.capability for row in rows]
            self.learner(step, learner, ids, made, rewards, capability)

    def responses(self, step: int, agent: str, problem_ids: Any, answers: Any, ids: Any) -> tuple[Columns, Any]:
        count = len(problem_ids)
        lengths = self.random.integers(4, LONGEST + 1, count)
        prompt_lengths = np.repeat(self.random.integers(15, 40, len(ids)), GROUP)
        stopped = lengths < LONGEST
        logprobs = -self.random.exponential(0.7, int(lengths.sum())).astype(np.float32)
        tokens = self.random.integers(5, 4000, len(logprobs), dtype=np.int32)
        columns = {
            "rollout_id": rollout_ids(step, agent, ids, GROUP),
            "step": pa.array(np.full(count, step), pa.int32()),
            "agent": pa.repeat(agent, count),
            "problem_id": problem_ids,
            "sample": pa.array(np.tile(np.arange(GROUP), len(ids)), pa.int16()),
            # The same tokens for one problem: as many, and each the same.
            "prompt_token_ids": self.lists(
                prompt_lengths,
                np.full(int(prompt_lengths.sum()), 7, np.int32),
                tables.ROLLOUTS.schema.field("prompt_token_ids").type,
            ),
            "token_ids": self.lists(lengths, tokens, tables.ROLLOUTS.schema.field("token_ids").type),
            "text": self.texts.take(pa.array(self.random.integers(0, len(self.texts), count))),
            "finish_reason": pa.array(np.where(stopped, "stop", "length").tolist()),
            "sampler_logprobs": self.lists(
                lengths, logprobs * np.float32(1 + 1e-6), tables.ROLLOUTS.schema.field("logprobs").type
            ),
            "logprobs": self.lists(lengths, logprobs, tables.ROLLOUTS.schema.field("logprobs").type),
            "policy": pa.repeat(policy_hash(self.layout.checkpoint(step - 1, agent)), count),
            **{
                name: pa.nulls(count, tables.ROLLOUTS.schema.field(name).type)
                for name in ("stop_string", "support", "support_logprob")
            },
        }
        self.write(self.layout.rollouts(step, agent), tables.ROLLOUTS, columns, "generate", step=step, agent=agent)
        self.metrics("generate", step, agent)
        rewards = (stopped & (self.random.random(count) < 0.4)).astype(np.float32)
        verdict = np.where(rewards > 0, "correct", np.where(stopped, "wrong", "truncated"))
        verdicts = {
            **{name: columns[name] for name in ("rollout_id", "problem_id", "sample")},
            "reward": pa.array(rewards),
            "verdict": pa.array(verdict.tolist()),
            "extracted": pa.nulls(count, pa.string()),
            "answer": answers,
            "message": pa.nulls(count, pa.string()),
        }
        self.write(self.layout.verdicts(step, agent), tables.VERDICTS, verdicts, "verify", step=step, agent=agent)
        self.metrics("verify", step, agent)
        return columns, rewards

    def learner(
        self,
        step: int,
        learner: str,
        ids: Any,
        made: dict[str, Columns],
        rewards: dict[str, Any],
        capability: list[float],
    ) -> None:
        """Pool, advantages and trace."""
        settings, number = self.settings, AGENTS.index(learner)
        order = PoolOrder.of(step, ids, AGENTS, GROUP)
        own = order.source == number
        every = pa.array(order.source * (len(ids) * GROUP) + order.response)

        def gathered(name: str) -> Any:
            return pa.concat_arrays([made[agent][name] for agent in AGENTS]).take(every)

        stopped = np.asarray(pc.equal(gathered("finish_reason"), "stop"))
        terminals = ListColumn.of(gathered("token_ids")).last(stopped)
        logprobs, own_prompts = ListColumn.of(gathered("logprobs")), made[learner]["prompt_token_ids"]
        pool = {
            "rollout_id": order.ids,
            "problem_id": gathered("problem_id"),
            "sample": gathered("sample"),
            "source": pa.array(AGENTS).take(pa.array(order.source)),
            "is_self": pa.array(own),
            "reward": pa.array(np.stack([rewards[agent] for agent in AGENTS])[order.source, order.response]),
            "prompt_token_ids": own_prompts.take(pa.array(order.problem * GROUP)),
            "token_ids": gathered("token_ids"),
            "source_logprob": pa.array(logprobs.sums()),
            "source_tokens": pa.array(logprobs.lengths, pa.int32()),
            "learner_tokens": pa.array(logprobs.lengths, pa.int32()),
            "text_bytes": pc.binary_length(gathered("text")),
            "status": pa.repeat("kept", len(own)),
            "roundtrip": pa.array(np.ones(len(own), bool)),
            "as_sampled": pa.array(np.ones(len(own), bool)),
            "source_terminal": terminals,
            "learner_terminal": terminals,
            "support": pa.nulls(len(terminals), tables.POOL.schema.field("support").type),
        }
        self.write(self.layout.pool(step, learner), tables.POOL, pool, "pool", step=step, learner=learner)
        self.metrics("pool", step, learner)
        values = step_advantages(
            np.stack([rewards[agent].reshape(-1, GROUP) for agent in AGENTS], 1),
            learner=number,
            capability_n=capability,
            settings=settings.algorithm.advantage,
            capability_settings=settings.algorithm.capability,
        )
        advantages = {
            **{name: pool[name] for name in ("rollout_id", "problem_id", "source", "is_self", "reward")},
            **{name: pa.array(value.ravel()) for name, value in vars(values).items()},
        }
        self.write(
            self.layout.advantages(step, learner),
            tables.ADVANTAGES,
            advantages,
            "advantage",
            step=step,
            learner=learner,
        )
        update = update_slots(
            order.problem,
            order.source,
            logprobs.lengths,
            learner=AGENTS.index(learner),
            updates=settings.updates_per_pass,
            order="mixed",
            seed=shuffle_seeds(settings, step, learner)[0],
        )
        mean = logprobs.sums() / logprobs.lengths
        learner_logprob = mean * np.where(own & (update == 0), 1.0, self.random.normal(1.0, 0.05, len(own)))
        known = {"learner_logprob": learner_logprob, "source_logprob": mean, "update": update}
        numbers = trace_columns(
            **known,
            learner_tokens=logprobs.lengths,
            source_tokens=logprobs.lengths,
            text_bytes=pool["text_bytes"],
            is_self=own,
            effective_advantage=advantages["effective_advantage"],
            importance=settings.algorithm.importance,
            clip=settings.algorithm.clip,
        )
        trace = {
            **{name: pool[name] for name in ("rollout_id", "source", "is_self")},
            **known,
            **vars(numbers),
            "update": pa.array(update, pa.int32()),
            "sampler_weight": np.ones(len(own)),
        }
        self.write(self.layout.trace(step, learner), tables.TRACE, trace, "update", step=step, agent=learner)
        self.metrics("update", step, learner)
        self.checkpoint(step, learner)


def _columns(table: Any) -> Columns:
    return {name: table[name] for name in table.column_names}


def make(root: Path, steps: int, rollouts: int) -> Pipeline:
    """A whole run below `root`."""
    prompts = rollouts // GROUP
    folder = root / "pipelines" / "speed"
    folder.mkdir(parents=True)
    (folder / "params.yaml").write_text(PARAMS.format(steps=steps, prompts=prompts, minibatch=max(prompts // 2, 1)))
    content = {"problem_id": [f"p{number:06d}" for number in range(4 * prompts)]}
    content["problem"] = [f"What is {number} + {number}?" for number in range(4 * prompts)]
    content["answer"] = [str(2 * number) for number in range(4 * prompts)]
    pq.write_table(pa.table(content), root / "problems.parquet")
    pipeline = Pipeline.open(folder)
    storage.write_json(pipeline.layout.settings, settings_of.dump(pipeline.settings))
    maker = Maker(pipeline)
    for agent in AGENTS:
        maker.checkpoint(0, agent)
    for step, batch in enumerate(maker.inputs(), start=1):
        maker.step(step, batch)
        print(f"\rmade {step_dir(step)} of {steps}", end="", file=sys.stderr)
    print(file=sys.stderr)
    stamp(pipeline)
    return pipeline


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rollouts", type=int, default=5000, help="per step and agent")
    parser.add_argument("--keep", type=Path, help="make the run here, and leave it there")
    options = parser.parse_args()
    root = options.keep or Path(tempfile.mkdtemp(prefix="hacpo-audit-speed-"))
    try:
        started = time.perf_counter()
        if not (root / "pipelines").is_dir():
            make(root, options.steps, options.rollouts)
        made = time.perf_counter()
        size = sum(path.stat().st_size for path in root.rglob("*") if path.is_file()) / 2**20
        command = [sys.executable, "-m", "hacpo.cli", "audit", str(root / "pipelines" / "speed"), "--texts", "none"]
        result = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - made
        if result.returncode not in (0, 1):
            sys.exit(result.stderr)
        report = json.loads(result.stdout)
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        rows = report["coverage"]["rows"]
        print(f"made in {made - started:.0f} s, {size:.0f} MiB")
        print(f"{rows['rollouts']:,} rollouts, {sum(rows.values()):,} rows: {seconds:.1f} s, peak {peak:.0f} MiB")
        # The metrics files here hold seconds alone, so every other number of theirs is missed.
        findings = [finding for finding in report["findings"] if finding["check"] != "metrics"]
        print(f"findings: {len(findings)}")
        for finding in findings[:5]:
            print(finding)
        sys.exit(bool(findings))
    finally:
        if options.keep is None:
            shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
