"""Every case of docs/edge_cases.md through the commands on real files, and finite numbers in every one of them.

A finished run's rollouts or verdicts are rewritten, or a small run is made under unusual settings; then the stages that
follow are repeated. Two agents, eight problems, G = 4 unless a test says otherwise.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

from conftest import PARAMS, Cli, make_project
from hacpo.artifacts import parquet, tables
from hacpo.artifacts.layout import Layout
from hacpo.engines.models.checkpoint import policy_hash

Row = dict[str, Any]
Rewards = Callable[[int, str, int], float]
"""(problem's position in the step, agent, sample) -> reward."""

AGENTS = ("ada", "bo")
FLOOR = 1e-8


class Run:
    """A run on disk whose tables can be rewritten and whose stages can be repeated."""

    def __init__(self, root: Path, cli: Cli) -> None:
        self.root, self.cli = root, cli
        self.layout = Layout(root / "artifacts" / "small")

    def stage(self, name: str, *options: object) -> None:
        result = self.cli(name, "pipelines/small", *options)
        assert result.code == 0, result.err

    def set(self, old: str, new: str) -> None:
        """Change params.yaml, and resolve it."""
        path = self.root / "pipelines" / "small" / "params.yaml"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
        self.stage("resolve")

    def problems(self, step: int) -> list[str]:
        ids: list[str] = parquet.read_table(self.layout.prompts(step), tables.SCHEDULE)["problem_id"].to_pylist()
        return ids

    def rewrite(self, table: tables.Table, step: int, agent: str, change: Callable[[Row], Row]) -> None:
        path = {"rollouts": self.layout.rollouts, "verdicts": self.layout.verdicts}[table.name](step, agent)
        rows = [{**row, **change(row)} for row in parquet.read_table(path, table).to_pylist()]
        content = parquet.to_arrow(table, rows)
        parquet.write_table(
            path, table, content, run="small", partition=table.partition(step, agent), rows_per_shard=20
        )

    def reward(self, step: int, rewards: Rewards) -> None:
        """Give every response of a step its reward."""
        position = {name: index for index, name in enumerate(self.problems(step))}
        for agent in AGENTS:

            def change(row: Row, agent: str = agent) -> Row:
                return {"reward": rewards(position[row["problem_id"]], agent, row["sample"])}

            self.rewrite(tables.VERDICTS, step, agent, change)

    def learn(self, step: int, agents: Iterable[str] = AGENTS) -> None:
        """Everything after the verdicts of a step."""
        self.stage("advantage", "--step", step)
        for agent in agents:
            self.stage("pool", "--step", step, "--learner", agent)
            self.stage("update", "--step", step, "--agent", agent)

    def whole_step(self, step: int, agents: Iterable[str] = AGENTS) -> None:
        """A step from its rollouts on."""
        for agent in agents:
            self.stage("generate", "--step", step, "--agent", agent)
            self.stage("verify", "--step", step, "--agent", agent)
        self.learn(step, agents)

    def advantages(self, step: int, learner: str) -> list[Row]:
        rows: list[Row] = parquet.read_table(self.layout.advantages(step, learner), tables.ADVANTAGES).to_pylist()
        return rows

    def pool(self, step: int, learner: str) -> list[Row]:
        rows: list[Row] = parquet.read_table(self.layout.pool(step, learner), tables.POOL).to_pylist()
        return rows

    def trace(self, step: int, agent: str) -> list[Row]:
        rows: list[Row] = parquet.read_table(self.layout.trace(step, agent), tables.TRACE).to_pylist()
        return rows

    def capability(self, step: int) -> dict[str, Row]:
        return {
            row["agent"]: row for row in parquet.read_table(self.layout.capability(step), tables.CAPABILITY).to_pylist()
        }

    def metrics(self, stage: str, step: int, name: str) -> dict[str, float]:
        found: dict[str, float] = json.loads(self.layout.metrics(stage, step, name).read_text())
        return found

    def weights(self, step: int, agent: str) -> dict[str, Any]:
        return dict(load_file(self.layout.checkpoint(step, agent) / "model.safetensors"))

    def report(self) -> str:
        self.stage("report")
        return (self.layout.report / "index.html").read_text()

    def check_finite(self) -> None:
        """No number of the run is NaN or infinite, in tables (where it may be absent), metrics, weights, optimizers."""
        tables = sorted(self.layout.root.rglob("*.parquet"))
        assert tables
        for path in tables:
            content = pq.read_table(path, partitioning=None)
            for name, column in zip(content.column_names, content.columns, strict=True):
                values = pc.list_flatten(column) if pa.types.is_list(column.type) else column
                if pa.types.is_floating(values.type):
                    assert np.isfinite(values.drop_null().to_numpy()).all(), f"{path}: {name}"
        for path in sorted(self.layout.root.rglob("*.json")):
            if "checkpoints" not in path.parts:
                json.loads(path.read_text(), parse_constant=lambda word, path=path: pytest.fail(f"{path}: {word}"))
        for path in sorted(self.layout.root.rglob("*.safetensors")):
            assert all(np.isfinite(tensor).all() for tensor in load_file(path).values()), path


@pytest.fixture
def run(finished_copy: Path, cli: Cli) -> Run:
    """A finished run of two steps, to be rewritten."""
    return Run(finished_copy, cli)


@pytest.fixture
def made(tmp_path: Path, models: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """Makes a whole run with replaced settings."""

    def make(*changes: tuple[str, str]) -> Run:
        params = PARAMS
        for old, new in changes:
            assert old in params
            params = params.replace(old, new)
        root = make_project(tmp_path / "project", models, params)
        monkeypatch.chdir(root)
        run = Run(root, cli)
        run.stage("run", "--jobs", "1")
        return run

    return make


def some_right(position: int, agent: str, sample: int) -> float:
    """Half of every group."""
    return float(sample % 2)


# --- rewards ---------------------------------------------------------------------------------------------------------


def test_groups_without_variance(run: Run) -> None:
    # The first problem is all right, the second all wrong; of the others ada solves everything and bo nothing:
    # accuracies 28/32 and 4/32, omega^(ada,bo) = 7. mu^(ada) of the first is (4 + 7 * 4) / 8 = 4, guarded to 1.
    run.reward(1, lambda position, agent, sample: float(position == 0 or (position > 1 and agent == "ada")))
    run.learn(1)
    run.check_finite()
    dead = set(run.problems(1)[:2])
    for learner in AGENTS:
        rows = run.advantages(1, learner)
        assert {row["problem_id"] for row in rows if row["uniform"]} == dead
        for row in rows:
            zero = row["problem_id"] in dead
            assert (row["advantage"] == row["effective_advantage"] == 0.0) == zero
            assert (row["sigma"] == 0.0) == zero
        factor = 7.0 if learner == "bo" else 1 / 7
        assert [row["omega"] for row in rows if not row["is_self"]] == pytest.approx([factor] * 32, rel=1e-12)
        names = {row["rollout_id"] for row in rows if row["uniform"]}
        trace = [row for row in run.trace(1, learner) if row["rollout_id"] in names]
        assert len(trace) == 16
        assert all(row["objective"] == 0.0 for row in trace)
        assert run.metrics("advantage", 1, "all")[f"{learner}.uniform"] == 2 / 8


def test_a_partner_that_is_never_right_puts_omega_at_its_bounds(run: Run) -> None:
    for step in (1, 2):
        run.reward(step, lambda position, agent, sample: some_right(position, agent, sample) * (agent == "ada"))
        run.learn(step)
        row = run.capability(step)["bo"]
        estimate = {key: row[key] for key in ("accuracy", "window", "capability", "standard_error")}
        assert estimate == {"accuracy": 0.0, "window": [0.0] * step, "capability": FLOOR, "standard_error": 0.0}
        for learner, factor in (("ada", 0.1), ("bo", 10.0)):
            assert {row["omega"] for row in run.advantages(step, learner) if not row["is_self"]} == {factor}
            assert run.metrics("advantage", step, "all")[f"{learner}.omega_cross"] == pytest.approx(factor, rel=1e-12)
        # mu^(ada) = (2 + 10 * 0) / 8, mu^(bo) = (0.1 * 2 + 0) / 8
        baselines = sorted({row["baseline"] for row in run.advantages(step, "ada")})
        assert baselines == pytest.approx([0.025, 0.25], rel=1e-12)
    run.check_finite()


def test_nobody_is_ever_right(run: Run) -> None:
    run.reward(1, lambda position, agent, sample: 0.0)
    run.learn(1)
    run.check_finite()
    for agent in AGENTS:
        assert run.capability(1)[agent]["capability"] == FLOOR
        assert {row["omega"] for row in run.advantages(1, agent)} == {1.0}
        found = run.metrics("advantage", 1, "all")
        assert (found[f"{agent}.uniform"], found[f"{agent}.live_groups"]) == (1.0, 0.0)


@pytest.mark.parametrize("guard", [True, False])
def test_a_baseline_above_one(run: Run, guard: bool) -> None:
    # ada solves 3 of 4 everywhere; bo all of the first problem and 1 of 4 elsewhere: 24/32 and 11/32.
    run.set("  recipe: hacpo", f"  recipe: hacpo\n  advantage: {{baseline_guard: {str(guard).lower()}}}")
    run.reward(1, lambda position, agent, sample: float(sample < (3 if agent == "ada" else 4 if position == 0 else 1)))
    run.learn(1)
    run.check_finite()
    mu = (3 + 24 / 11 * 4) / 8  # 1.466 in the first problem; (3 + 24 / 11) / 8 = 0.648 elsewhere
    for row in run.advantages(1, "ada"):
        if row["is_self"]:
            first = row["problem_id"] == run.problems(1)[0]
            assert row["guarded"] == (guard and first)
            assert row["baseline"] == pytest.approx((0.75 if guard else mu) if first else (3 + 24 / 11) / 8, rel=1e-12)
            if row["reward"] == 1.0:
                assert (row["effective_advantage"] < 0) == (first and not guard)
    found = run.metrics("advantage", 1, "all")
    assert (found["ada.baseline_above_one"], found["ada.guarded"]) == (1 / 8, guard / 8)
    # 3 of ada's 24 right answers.
    assert found["ada.punished_correct_own"] == (0.0 if guard else 3 / 24)


def test_rewards_that_differ_by_rounding_are_equal(run: Run) -> None:
    near = (np.float32(0.7), np.nextafter(np.float32(0.7), np.float32(1)), np.float32(0.7) + np.float32(4e-7))
    assert len(set(near)) == 3

    # Every second problem: rounding only. The others are graded: 0.7 and 0.71 are different.
    def graded(position: int, agent: str, sample: int) -> float:
        if position % 2:
            return float(near[sample % 3]) if agent == "ada" else 0.7
        return (0.7 if sample else 0.71) if agent == "ada" else 0.25 * sample

    run.reward(1, graded)
    run.learn(1)
    run.check_finite()
    dead = set(run.problems(1)[1::2])
    for learner in AGENTS:
        rows = run.advantages(1, learner)
        assert {row["problem_id"] for row in rows if row["uniform"]} == dead
        assert all(row["effective_advantage"] == 0.0 for row in rows if row["uniform"])
        assert not any(row["guarded"] for row in rows)
        assert run.metrics("advantage", 1, "all")[f"{learner}.uniform"] == 0.5
        # nG = 8 rewards between 0 and 0.75, sigma of at least 0.2, mu at most 2: nowhere near an explosion.
        assert run.metrics("advantage", 1, "all")[f"{learner}.advantage_max"] < 30


@pytest.mark.parametrize(("baseline", "most"), [("capability", math.inf), ("joint", 4.0), ("own", 4.0)])
def test_a_small_spread_beside_a_high_level(run: Run, baseline: str, most: float) -> None:
    run.set("  recipe: hacpo", f"  recipe: hacpo\n  advantage: {{baseline: {baseline}}}")

    # The first problem: 0.701 once, else 0.7; sigma = 0.001 / sqrt(8). Elsewhere ada 1, bo 1/21: 0.96 and 0.13 on
    # average, omega^(ada,bo) = 7.5, and mu^(ada) of the first problem about 0.7 * 8.5 / 2 = 3.
    def close(position: int, agent: str, sample: int) -> float:
        level = 1.0 if agent == "ada" else 1 / 21
        return level if position else 0.701 if agent == "ada" and sample == 0 else 0.7

    run.reward(1, close)
    run.learn(1)
    run.check_finite()
    largest = max(abs(row["advantage"]) for row in run.advantages(1, "ada"))
    assert largest < most
    assert (largest > 1000) == (baseline == "capability")
    assert run.metrics("advantage", 1, "all")["ada.advantage_max"] >= largest


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_reward_that_is_no_number(run: Run, value: float) -> None:
    run.rewrite(tables.VERDICTS, 1, "bo", lambda row: {"reward": value} if row["sample"] == 3 else {})
    before = run.advantages(1, "ada")
    result = run.cli("advantage", "pipelines/small", "--step", 1)
    assert result.code == 4
    assert (
        "verdicts/step=0001/agent=bo/part-00000.parquet: column 'reward' holds a number that is not finite"
        in result.error
    )
    assert run.advantages(1, "ada") == before


@pytest.mark.parametrize(
    ("metric", "ada", "bo", "omega"),
    [
        ("reward_mean", FLOOR, FLOOR, 1.0),  # means -0.75 and 0: both at the floor
        ("positive_rate", 0.25, 0.25, 1.0),
    ],
)
def test_negative_rewards(run: Run, metric: str, ada: float, bo: float, omega: float) -> None:
    run.set("  recipe: hacpo", f"  recipe: hacpo\n  capability: {{metric: {metric}}}")
    # ada: 1, -1, -1, -2; bo: 3, -1, -1, -1.
    table = {"ada": (1.0, -1.0, -1.0, -2.0), "bo": (3.0, -1.0, -1.0, -1.0)}
    run.reward(1, lambda position, agent, sample: table[agent][sample])
    run.learn(1)
    run.check_finite()
    assert {name: row["capability"] for name, row in run.capability(1).items()} == {"ada": ada, "bo": bo}
    assert {name: row["accuracy"] for name, row in run.capability(1).items()} == (
        {"ada": -0.75, "bo": 0.0} if metric == "reward_mean" else {"ada": 0.25, "bo": 0.25}
    )
    for learner in AGENTS:
        assert {row["omega"] for row in run.advantages(1, learner)} == {omega}
        # Joint mean (-3 + 0) / 8: two rewards are above it.
        assert {row["baseline"] for row in run.advantages(1, learner)} == {-0.375}
        assert sum(row["advantage"] > 0 for row in run.advantages(1, learner)) == 2 * 8


def test_a_negative_capability_beside_a_positive_one(run: Run) -> None:
    run.reward(1, lambda position, agent, sample: (1.0 if sample else 0.0) if agent == "ada" else -1.0 - sample)
    run.learn(1)
    run.check_finite()
    assert run.capability(1)["bo"]["capability"] == FLOOR
    assert {row["omega"] for row in run.advantages(1, "ada") if not row["is_self"]} == {0.1}
    # mu^(ada) = (3 + 10 * (-1 - 2 - 3 - 4)) / 8: below every reward, so that all of ada's answers look good.
    assert {row["baseline"] for row in run.advantages(1, "ada") if row["is_self"]} == {-97 / 8}
    assert run.metrics("advantage", 1, "all")["ada.punished_correct"] == 0.0


# --- a step without signal -------------------------------------------------------------------------------------------


def test_a_first_step_without_signal_leaves_the_weights_alone_and_the_next_one_learns(run: Run) -> None:
    run.reward(1, lambda position, agent, sample: 1.0)
    run.learn(1)
    for agent in AGENTS:
        assert all(row["objective"] == 0.0 for row in run.trace(1, agent))
        found = run.metrics("update", 1, agent)
        assert (found["loss"], found["grad_norm"], found["updates"]) == (0.0, 0.0, 4)
        assert policy_hash(run.layout.checkpoint(1, agent)) == policy_hash(run.layout.checkpoint(0, agent))
        state = json.loads((run.layout.checkpoint(1, agent) / "trainer" / "state.json").read_text())
        assert state == {"updates_done": 4}
    run.whole_step(2)
    for agent in AGENTS:
        assert run.metrics("update", 2, agent)["grad_norm"] > 0
        assert policy_hash(run.layout.checkpoint(2, agent)) != policy_hash(run.layout.checkpoint(1, agent))
    run.check_finite()
    assert "complete: 2 of 2 steps" in run.report()


def test_a_later_step_without_signal_still_moves_by_momentum(run: Run) -> None:
    run.reward(2, lambda position, agent, sample: 0.0)
    run.learn(2)
    run.check_finite()
    for agent in AGENTS:
        assert run.metrics("update", 2, agent)["grad_norm"] == 0.0
        before, after = (
            load_file(run.layout.checkpoint(step, agent) / "trainer" / "optimizer.safetensors") for step in (1, 2)
        )
        for name, momentum in before.items():
            # Four updates with a gradient of zero: the averages decay and nothing is added.
            decay = 0.9 if name.startswith("exp_avg.") else 0.95
            np.testing.assert_allclose(after[name], momentum * decay**4, rtol=1e-5, atol=1e-30)
        assert policy_hash(run.layout.checkpoint(2, agent)) != policy_hash(run.layout.checkpoint(1, agent))


def test_a_kl_penalty_acts_without_signal(run: Run) -> None:
    run.set("  recipe: hacpo", "  recipe: hacpo\n  loss: {kl_coef: 0.1}")
    run.reward(2, lambda position, agent, sample: 0.0)
    run.learn(2)
    run.check_finite()
    # In step 2 the policy has left the initial one.
    assert all(run.metrics("update", 2, agent)["grad_norm"] > 0 for agent in AGENTS)


def test_weight_decay_acts_without_signal(run: Run) -> None:
    run.set("optimizer: {learning_rate: 3.0e-4,", "optimizer: {learning_rate: 3.0e-4, weight_decay: 0.5,")
    run.reward(1, lambda position, agent, sample: 0.0)
    run.learn(1)
    # AdamW decays every weight by 1 - lr * weight_decay in each of four updates, whatever the gradient.
    before, after = run.weights(0, "ada"), run.weights(1, "ada")
    for name, tensor in before.items():
        np.testing.assert_allclose(after[name], tensor * (1 - 3e-4 * 0.5) ** 4, rtol=1e-5)


# --- responses -------------------------------------------------------------------------------------------------------


def eos_of(run: Run, agent: str) -> int:
    """The agent's EOS: what its stopped responses end in."""
    rows = parquet.read_table(run.layout.rollouts(1, agent), tables.ROLLOUTS).to_pylist()
    return int(next(row["token_ids"][-1] for row in rows if row["finish_reason"] == "stop"))


def relearn(run: Run) -> None:
    for agent in AGENTS:
        run.stage("verify", "--step", 1, "--agent", agent)
    run.reward(1, some_right)
    run.learn(1)
    run.check_finite()


def test_responses_that_stop_at_once(run: Run) -> None:
    eos = eos_of(run, "ada")
    silent = {"text": "", "token_ids": [eos], "finish_reason": "stop", "logprobs": [-9.0], "sampler_logprobs": [-9.0]}
    run.rewrite(tables.ROLLOUTS, 1, "ada", lambda row: silent)
    run.stage("verify", "--step", 1, "--agent", "ada")
    verdicts = parquet.read_table(run.layout.verdicts(1, "ada"), tables.VERDICTS).to_pylist()
    assert {(row["verdict"], row["reward"]) for row in verdicts} == {("no_answer", 0.0)}
    relearn(run)
    # The author learns from its EOS; for the others there is no text to learn from.
    own = [row for row in run.pool(1, "ada") if row["is_self"]]
    assert {(row["status"], row["learner_tokens"], row["text_bytes"]) for row in own} == {("kept", 1, 0)}
    cross = [row for row in run.pool(1, "bo") if not row["is_self"]]
    assert {(row["status"], row["learner_tokens"], row["source_tokens"]) for row in cross} == {("empty", 0, 1)}
    assert {row["source"] for row in run.trace(1, "ada")} == {"ada", "bo"}
    assert {row["source"] for row in run.trace(1, "bo")} == {"bo"}
    assert run.metrics("pool", 1, "bo") | {"status.empty": 32} == run.metrics("pool", 1, "bo")


@pytest.mark.parametrize(
    "importance", ["ratio_norm: own_tokens, score_eos: false", "ratio_norm: bytes", "level: token"]
)
def test_responses_without_a_single_token(run: Run, importance: str) -> None:
    run.set(
        "importance: {alpha: 1.0}",
        f"importance: {{alpha: 1.0, {importance}}}\n  loss: {{sampler_correction: truncated}}",
    )
    nothing: Row = {"text": "", "token_ids": [], "finish_reason": "stop", "logprobs": [], "sampler_logprobs": []}
    run.rewrite(tables.ROLLOUTS, 1, "ada", lambda row: nothing if row["sample"] == 0 else {})
    relearn(run)
    for learner in AGENTS:
        rows = [row for row in run.pool(1, learner) if row["source"] == "ada" and row["sample"] == 0]
        assert {(row["status"], row["source_tokens"], row["source_logprob"]) for row in rows} == {("empty", 0, 0.0)}
        assert not {row["rollout_id"] for row in rows} & {row["rollout_id"] for row in run.trace(1, learner)}
        # Neither are those in which a control token was sampled.
        foreign = [row for row in run.pool(1, learner) if row["status"] == "not_representable"]
        assert len(run.trace(1, learner)) == 64 - 8 - len(foreign)


def cut_off(run: Run, agent: str) -> None:
    """Make every response of an agent in step 1 one that the length limit ended, and verify it."""
    eos = eos_of(run, agent)

    def cut(row: Row) -> Row:
        keep = max(len(row["token_ids"]) - (row["token_ids"][-1] == eos), 1)
        lists = {key: row[key][:keep] for key in ("token_ids", "logprobs", "sampler_logprobs")}
        return {"finish_reason": "length", "text": row["text"] or "1", **lists}

    run.rewrite(tables.ROLLOUTS, 1, agent, cut)
    run.stage("verify", "--step", 1, "--agent", agent)
    verdicts = parquet.read_table(run.layout.verdicts(1, agent), tables.VERDICTS).to_pylist()
    assert {(row["verdict"], row["reward"]) for row in verdicts} == {("truncated", 0.0)}


def test_cut_off_responses_with_a_box_are_judged_where_it_is_asked(run: Run) -> None:
    path = run.layout.verdicts(1, "bo")
    before = {row["rollout_id"]: row for row in parquet.read_table(path, tables.VERDICTS).to_pylist()}
    cut_off(run, "bo")
    run.set("storage:", "verification: {truncated: boxed}\nstorage:")
    run.stage("verify", "--step", 1, "--agent", "bo")
    after = {row["rollout_id"]: row for row in parquet.read_table(path, tables.VERDICTS).to_pylist()}
    judged = {name for name, row in before.items() if row["verdict"] in ("correct", "wrong")}
    assert judged
    for name, row in after.items():
        wanted = (before[name]["verdict"], before[name]["reward"]) if name in judged else ("truncated", 0.0)
        assert (row["verdict"], row["reward"]) == wanted


def test_one_agent_whose_responses_are_all_cut_off(run: Run) -> None:
    cut_off(run, "bo")
    run.learn(1)
    run.check_finite()
    assert run.capability(1)["bo"]["capability"] == FLOOR
    # They are learned from as wrong answers, without an EOS on either side.
    ada = eos_of(run, "ada")
    cross = [row for row in run.pool(1, "ada") if row["source"] == "bo"]
    assert {row["status"] for row in cross} == {"kept"}
    assert not any(row["token_ids"][-1] == ada for row in cross)
    assert {row["source"] for row in run.trace(1, "ada")} == {"ada", "bo"}


def test_every_response_is_cut_off(run: Run) -> None:
    for agent in AGENTS:
        cut_off(run, agent)
    run.learn(1)
    for agent in AGENTS:
        assert run.metrics("advantage", 1, "all")[f"{agent}.live_groups"] == 0
        assert policy_hash(run.layout.checkpoint(1, agent)) == policy_hash(run.layout.checkpoint(0, agent))
    run.whole_step(2)
    run.check_finite()


# --- responses that a learner cannot use -----------------------------------------------------------------------------


def test_nothing_of_the_others_fits(run: Run) -> None:
    run.set("storage:", "pool: {max_tokens: 1}\nstorage:")
    run.learn(1)
    run.check_finite()
    for learner in AGENTS:
        statuses = {(row["is_self"], row["status"]) for row in run.pool(1, learner)}
        assert statuses - {(False, "not_representable")} == {(True, "kept"), (False, "too_long")}
        assert all(row["is_self"] for row in run.trace(1, learner))
        assert not any(key.startswith("cross") for key in run.metrics("update", 1, learner))
        # Advantages do not depend on what a learner can use.
        assert len(run.advantages(1, learner)) == 64
    # All 32 cross responses of the first step, and those of the second that were empty anyway.
    later = [row["status"] == "kept" for row in run.pool(2, "ada") if not row["is_self"]]
    other = [row["status"] == "kept" for row in run.pool(2, "bo") if not row["is_self"]]
    unused = 1 - min(sum(later), sum(other)) / 64
    assert f"answers of others left out, worst learner: {100 * unused:.1f}\u00a0%" in run.report()


def test_one_agent_writes_what_nobody_else_can_spell(run: Run) -> None:
    run.rewrite(tables.ROLLOUTS, 1, "ada", lambda row: {"text": "答えは" + row["text"]})
    relearn(run)
    assert {row["status"] for row in run.pool(1, "bo") if row["source"] == "ada"} == {"not_representable"}
    assert {row["status"] for row in run.pool(1, "ada")} == {"kept"}
    assert {row["source"] for row in run.trace(1, "bo")} == {"bo"}


def test_updates_without_a_usable_response(run: Run) -> None:
    run.set("  recipe: hacpo", "  recipe: hacpo\n  loss: {minibatch_order: self_first}")
    run.set("storage:", "pool: {max_tokens: 1}\nstorage:")
    run.learn(1)
    run.check_finite()
    for agent in AGENTS:
        # Updates 0 and 1 see own responses, 2 and 3 only cross ones, all too long: they count and pass.
        assert {row["update"] for row in run.trace(1, agent)} == {0, 1}
        assert run.metrics("update", 1, agent)["updates"] == 4
        state = json.loads((run.layout.checkpoint(1, agent) / "trainer" / "state.json").read_text())
        assert state == {"updates_done": 4}


def test_a_step_without_any_usable_response(run: Run) -> None:
    nothing: Row = {"text": "", "token_ids": [], "finish_reason": "stop", "logprobs": [], "sampler_logprobs": []}
    for agent in AGENTS:
        run.rewrite(tables.ROLLOUTS, 1, agent, lambda row: nothing)
    relearn(run)
    for agent in AGENTS:
        assert {row["status"] for row in run.pool(1, agent)} == {"empty"}
        assert run.trace(1, agent) == []
        assert run.metrics("update", 1, agent)["loss"] == 0.0
        assert policy_hash(run.layout.checkpoint(1, agent)) == policy_hash(run.layout.checkpoint(0, agent))
    run.whole_step(2)
    run.check_finite()
    assert "complete: 2 of 2 steps" in run.report()


# --- numbers of agents and samples -----------------------------------------------------------------------------------


def with_agents(count: int) -> tuple[str, str]:
    names = ("ada", "bo", "cy", "di", "ed")[:count]
    agents = "\n".join(f"  {name}: {{model: models/{AGENTS[index % 2]}}}" for index, name in enumerate(names))
    return "  ada: {model: models/ada}\n  bo: {model: models/bo}", agents


@pytest.mark.slow
def test_one_sample_per_agent(made: Callable[..., Run]) -> None:
    run = made(("group_size: 4", "group_size: 1"), ("steps: 2", "steps: 1"))
    run.set("  recipe: hacpo", "  recipe: hacpo\n  advantage: {baseline: capability}")
    for old, baseline in (("capability", "joint"), ("joint", "shrunk"), ("shrunk", "capability")):
        run.set(f"{{baseline: {old}}}", f"{{baseline: {baseline}}}")
        # ada is right in the first four problems, bo in the second and third: 1/2 and 1/4, omega^(ada,bo) = 2.
        run.reward(1, lambda position, agent, sample: float(position < 4 if agent == "ada" else position in (1, 2)))
        run.learn(1)
        run.check_finite()
        rows = run.advantages(1, "ada")
        assert [row["uniform"] for row in rows[::2]] == [False, True, True, False, True, True, True, True]
        # First problem, rewards 1 and 0: sigma = 1 / sqrt(2). mu^(ada) = 1/2; shrunk (1 + 4 * (1 + 0) / 2) / 5.
        assert rows[0]["sigma"] == pytest.approx(1 / math.sqrt(2), rel=1e-12)
        assert rows[0]["baseline"] == pytest.approx(0.6 if baseline == "shrunk" else 0.5, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["hacpo", "naive", "grpo"])
def test_one_agent_alone(made: Callable[..., Run], recipe: str) -> None:
    run = made(with_agents(1), ("recipe: hacpo", f"recipe: {recipe}"), ("steps: 2", "steps: 1"))
    run.check_finite()
    for row in run.advantages(1, "ada"):
        assert row["is_self"]
        assert row["omega"] == 1.0
        assert row["effective_advantage"] == row["advantage"]
    assert {row["update"] for row in run.trace(1, "ada")} == {0, 1}
    assert not any("cross" in key for key in run.metrics("advantage", 1, "all"))
    assert "nobody learns from the answers of others" in run.report()


@pytest.mark.slow
def test_twice_the_group(made: Callable[..., Run]) -> None:
    run = made(("recipe: hacpo", "recipe: gspo_x2"), ("steps: 2", "steps: 1"))
    run.check_finite()
    for agent in AGENTS:
        assert len(run.advantages(1, agent)) == len(run.trace(1, agent)) == 8 * 8
        assert {row["update"] for row in run.trace(1, agent)} == {0, 1, 2, 3}
        assert run.metrics("advantage", 1, "all")[f"{agent}.groups"] == 8


@pytest.mark.slow
def test_five_agents(made: Callable[..., Run]) -> None:
    run = made(
        with_agents(5),
        ("prompts: 8, minibatch_prompts: 4", "prompts: 10, minibatch_prompts: 5"),
        ("group_size: 4", "group_size: 2"),
        ("steps: 2", "steps: 1"),
    )
    run.check_finite()
    for learner in ("ada", "bo", "cy", "di", "ed"):
        rows = run.advantages(1, learner)
        assert len(rows) == 10 * 5 * 2
        assert {row["source"] for row in rows} == {"ada", "bo", "cy", "di", "ed"}
        assert {row["update"] for row in run.trace(1, learner)} == set(range(10))
        # The lower bound rises by 0.025 from 0.8 with each of n U = 5 * 2 updates, and stops at 1: [1, 1] in the last.
        lower = {row["update"]: row["lower"] for row in run.trace(1, learner) if not row["is_self"]}
        assert lower == {index: pytest.approx(min(1.0, 0.8 + 0.025 * index), abs=1e-12) for index in range(10)}
    assert run.report().count("omega for ") >= 5


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            ("sampling: {group_size: 4", "sampling: {group_size: 1", "recipe: hacpo", "recipe: gspo"),
            "at least 2, found 1",
        ),
        (
            (
                "sampling: {group_size: 4",
                "sampling: {group_size: 1",
                "recipe: hacpo",
                "recipe: hacpo\n  advantage: {baseline: own}",
            ),
            "baseline 'own' compares",
        ),
        (("minibatch_prompts: 4", "minibatch_prompts: 1"), "8 prompts cannot be split over 16 updates"),
    ],
)
def test_what_cannot_be_compared_or_split_is_refused(run: Run, changes: tuple[str, ...], says: str) -> None:
    path = run.root / "pipelines" / "small" / "params.yaml"
    text = path.read_text()
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    result = run.cli("resolve", "pipelines/small")
    assert (result.code, says in result.error) == (2, True), result.error


def test_fewer_problems_than_a_step_needs(run: Run) -> None:
    path = run.root / "pipelines" / "small" / "params.yaml"
    path.write_text(path.read_text().replace("split: train, problems: 64", "split: train, problems: 7"))
    result = run.cli("prepare", "pipelines/small", "--out", "elsewhere")
    assert (result.code, "too few problems for one step" in result.error) == (5, True)
    assert "expected at least 8, found 7" in result.error
