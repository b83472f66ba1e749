"""Every recipe through the command line: rollouts, pools and updates as docs/recipes.md's table of recipes says.

8 prompts, minibatches of 4 prompts: U = 2 updates per step when an agent learns from its own G = 4 responses.
"""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from polars.testing import assert_frame_equal

from conftest import PARAMS, Cli, train
from hacpo.settings.recipes import RECIPES

PROMPTS, GROUP, UPDATES = 8, 4, 2
AGENTS = ("ada", "bo", "cy")
BLOCK = """algorithm:
  recipe: hacpo
  importance: {alpha: 1.0}
  clip: {own_low: 0.03, own_high: 0.03}
"""


def new_run(run: str, *, agents: int, algorithm: str, name: dict[str, str] | None = None, rest: str = "") -> list[str]:
    """Write pipelines/<run>/params.yaml; returns the agents' names. The third agent starts as `bo` does."""
    folders = {"ada": "models/ada", "bo": "models/bo", "cy": "models/bo"}
    names = [(name or {}).get(agent, agent) for agent in AGENTS[:agents]]
    assert BLOCK in PARAMS
    text = PARAMS.replace(BLOCK, f"algorithm: {algorithm}\n").replace("steps: 2", "steps: 1")
    for agent in ("ada", "bo"):
        text = text.replace(f"  {agent}: {{model: models/{agent}}}\n", "")
    entries = "".join(
        f"  {called}: {{model: {folders[agent]}}}\n" for agent, called in zip(AGENTS, names, strict=False)
    )
    path = Path("pipelines") / run / "params.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(text.replace("agents:\n", f"agents:\n{entries}") + rest)
    return names


def table(base: Path, name: str, agent: str, key: str = "agent") -> pl.DataFrame:
    return pl.read_parquet(base / name / "step=0001" / f"{key}={agent}" / "*.parquet", hive_partitioning=False)


# recipe: learns from everybody, times the rollouts, times the updates of `gspo` (n: once per agent), besides passes
PASSES = {"gspo_two_passes": 2}
CHOSEN = {"sgt", "sapo"}  # of what is shared only some is trained on, in as many updates as alone
EXPECTED: dict[str, tuple[bool, int]] = {
    "gspo_two_passes": (False, 1),
    "xgrpo": (False, 1),
    "sgt": (True, 1),
    "sapo": (True, 1),
    "grpo": (False, 1),
    "gspo": (False, 1),
    "gspo_x2": (False, 2),
    "naive": (True, 1),
    "hacpo": (True, 1),
    "no_capability_baseline": (True, 1),
    "no_discrepancy": (True, 1),
    "no_clip": (True, 1),
    "no_stepwise": (True, 1),
    "reference_code": (True, 1),
    "reference_code_main": (True, 1),
}


def check_counts(base: Path, names: list[str], recipe: str) -> None:
    (share, multiplier), passes = EXPECTED[recipe], PASSES.get(recipe, 1)
    n = len(names)
    for agent in names:
        rollouts = table(base, "rollouts", agent)
        # GSPO and HACPO sample G responses per agent and prompt, GSPO x2 samples 2G.
        assert len(rollouts) == PROMPTS * GROUP * multiplier
        assert rollouts.group_by("problem_id").len()["len"].to_list() == [GROUP * multiplier] * PROMPTS
        sources = set(names) if share else {agent}
        pool = table(base, "pool", agent, "learner")
        assert set(pool["source"]) == sources
        assert len(pool) == PROMPTS * GROUP * multiplier * len(sources)
        assert pool["rollout_id"].to_list() == table(base, "advantages", agent, "learner")["rollout_id"].to_list()
        trace = table(base, "updates", agent)
        kept = pool.filter(pl.col("status") == "kept")
        if recipe in CHOSEN:
            selected = table(base, "advantages", agent, "learner").filter(pl.col("selected"))
            kept = kept.filter(pl.col("rollout_id").is_in(selected["rollout_id"].to_list()))
        assert sorted(trace["rollout_id"]) == sorted([*kept["rollout_id"]] * passes)  # each once in a pass
        # U, GSPO x2 2U, sharing n U.
        updates = UPDATES * multiplier * (n if share and recipe not in CHOSEN else 1) * passes
        assert sorted(set(trace["update"])) == list(range(updates))
        metrics = json.loads((base / "metrics" / "update" / "step=0001" / f"{agent}.json").read_text())
        assert metrics["updates"] == updates
        assert trace["objective"].is_finite().all()


@pytest.mark.slow
@pytest.mark.parametrize("agents", [1, 2, 3])
@pytest.mark.parametrize("recipe", list(RECIPES))
def test_rollouts_and_updates_of_every_recipe(project: Path, cli: Cli, recipe: str, agents: int) -> None:
    names = new_run("one", agents=agents, algorithm=f"{{recipe: {recipe}}}")
    base = train(cli, "one", names)
    check_counts(base, names, recipe)


# --- one agent -------------------------------------------------------------------------------------------------------


def numbers(path: Path) -> pa.Table:
    """A table without its metadata, which names the settings."""
    return pq.read_table(path).replace_schema_metadata(None)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["hacpo", "naive", "no_capability_baseline", "no_clip", "xgrpo", "sgt"])
def test_one_agent_alone_trains_as_gspo_to_the_last_bit(project: Path, cli: Cli, recipe: str) -> None:
    """Two steps, so that the optimizer's state and the capability window count too."""
    bases = []
    for run, name in (("one", "gspo"), ("other", recipe)):
        names = new_run(run, agents=1, algorithm=f"{{recipe: {name}}}")
        path = Path("pipelines") / run / "params.yaml"
        path.write_text(path.read_text().replace("steps: 1", "steps: 2"))
        bases.append(train(cli, run, names, steps=2))
    for step in (1, 2):
        traces, checkpoints = (
            [base / kind / f"step={step:04d}" / "agent=ada" for base in bases] for kind in ("updates", "checkpoints")
        )
        one, other = (numbers(folder / "trace.parquet") for folder in traces)
        assert one.equals(other)
        moved = pl.from_arrow(one).filter(pl.col("update") > 0)
        assert (moved["ratio"] - 1).abs().max() > 1e-4  # the first update did something
        files = sorted(path.relative_to(checkpoints[0]) for path in checkpoints[0].rglob("*") if path.is_file())
        assert Path("trainer/optimizer.safetensors") in files
        for file in files:
            assert (checkpoints[0] / file).read_bytes() == (checkpoints[1] / file).read_bytes(), file


# --- order of the agents ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_order_of_agents_does_not_matter(project: Path, cli: Cli) -> None:
    """What a name does is drawn from the seed and the name, never from its place in params.yaml.

    Exactly the same: responses, verdicts, capability, what is in each pool, and which update sees which response.
    Advantages: to the rounding of sums over agents. Updates: to the rounding of forward passes that are batched in
    another order (float32, and AdamW on top of it).
    """
    folders = dict(zip(AGENTS, ("models/ada", "models/bo", "models/bo"), strict=True))
    bases = []
    for run, names in (("straight", AGENTS), ("turned", AGENTS[::-1])):
        new_run(run, agents=3, algorithm="{recipe: hacpo}")
        path = Path("pipelines") / run / "params.yaml"
        text = path.read_text()
        block = text[text.index("agents:\n") : text.index("algorithm:")]
        entries = "".join(f"  {name}: {{model: {folders[name]}}}\n" for name in names)
        path.write_text(text.replace(block, f"agents:\n{entries}"))
        bases.append(train(cli, run, names))
    capability = [pl.read_parquet(base / "capability/step=0001/capability.parquet").sort("agent") for base in bases]
    assert capability[0].equals(capability[1])
    for agent in AGENTS:
        for name in ("rollouts", "verdicts"):
            assert table(bases[0], name, agent).equals(table(bases[1], name, agent)), name
        pools, advantages = (
            [table(base, name, agent, "learner").sort("rollout_id") for base in bases]
            for name in ("pool", "advantages")
        )
        assert pools[0].equals(pools[1])
        assert_frame_equal(*advantages, abs_tol=1e-12, rel_tol=0)
        assert (advantages[0]["effective_advantage"] != 0).any()
        traces = [table(base, "updates", agent).sort("rollout_id") for base in bases]
        exact = ["rollout_id", "source", "is_self", "update", "source_logprob", "lower", "upper", "sampler_weight"]
        assert traces[0].select(exact).equals(traces[1].select(exact))
        first = [trace.filter(pl.col("update") == 0)["learner_logprob"] for trace in traces]
        assert (first[0] - first[1]).abs().max() < 1e-5
        assert (traces[0]["ratio"] - traces[1]["ratio"]).abs().max() < 1e-3


# --- one switch at a time, from the same pool ------------------------------------------------------------------------


def updated(cli: Cli, out: Path, *settings: str, step: int = 1) -> tuple[pl.DataFrame, dict[str, float]]:
    """Trace and metrics of ada's update in the finished run, under other settings."""
    words = [word for setting in settings for word in ("--set", setting)]
    result = cli("update", "pipelines/small", "--step", step, "--agent", "ada", "--out", out, *words)
    assert result.code == 0, result.err
    metrics = json.loads((out / "metrics" / "update" / f"step={step:04d}" / "ada.json").read_text())
    return pl.read_parquet(out / "updates" / f"step={step:04d}" / "agent=ada" / "trace.parquet"), metrics


@pytest.fixture
def small(finished: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The artifacts of the finished run, in its project's root."""
    monkeypatch.chdir(finished)
    return finished / "artifacts" / "small"


@pytest.mark.parametrize("alpha", [0.0, 1.0, 2.0, 3.0])
def test_alpha_is_the_exponent_of_the_clipped_ratio(small: Path, cli: Cli, tmp_path: Path, alpha: float) -> None:
    trace, _ = updated(cli, tmp_path, f"algorithm.importance.alpha={alpha}")
    cross = trace.filter(~pl.col("is_self"))
    clipped = cross["ratio"].clip(cross["lower"], cross["upper"])
    assert (cross["is_weight"] / clipped**alpha - 1).abs().max() < 1e-12
    assert (trace.filter("is_self")["is_weight"] == 1.0).all()
    assert clipped.n_unique() > 10


def test_without_a_clip_responses_likelier_to_the_learner_are_not_amplified(
    small: Path, cli: Cli, tmp_path: Path
) -> None:
    trace, _ = updated(cli, tmp_path, "algorithm.importance.alpha=3.0", "algorithm.clip.cross=none")
    cross = trace.filter(~pl.col("is_self"))
    assert 0 < (cross["ratio"] > 1).sum() < len(cross)
    assert (cross["is_weight"] - cross["ratio"].clip(upper_bound=1.0) ** 3).abs().max() < 1e-12


@pytest.mark.parametrize("reference", ["source", "self"])
def test_naive_divides_by_the_policy_that_it_is_told(small: Path, cli: Cli, tmp_path: Path, reference: str) -> None:
    naive = [
        "algorithm.importance.alpha=0.0",
        "algorithm.clip.cross=own",
        f"algorithm.importance.reference={reference}",
    ]
    trace, _ = updated(cli, tmp_path, *naive)
    pool = table(small, "pool", "ada", "learner").select(
        "rollout_id", pl.col("source_logprob") / pl.col("source_tokens")
    )
    cross = trace.filter(~pl.col("is_self")).join(pool, on="rollout_id", suffix="_pool")
    # The same interval and the same outer min as for own responses.
    assert set(trace["lower"]) == {0.97}
    assert set(trace["upper"]) == {1.03}
    assert (trace["is_weight"] == 1.0).all()
    pessimistic = pl.min_horizontal(
        pl.col("ratio") * pl.col("effective_advantage"),
        pl.col("ratio").clip(0.97, 1.03) * pl.col("effective_advantage"),
    )
    worth = table(small, "advantages", "ada", "learner").select("rollout_id", "effective_advantage")
    terms = trace.join(worth, on="rollout_id").select("objective", wanted=pessimistic)
    assert (terms["objective"] - terms["wanted"]).abs().max() < 1e-12
    if reference == "source":
        assert (cross["source_logprob"] - cross["source_logprob_pool"]).abs().max() < 1e-12
        assert (cross.filter(pl.col("update") == 0)["ratio"] - 1).abs().max() > 0.01
    else:
        # Nobody has moved before the first update: the learner's ratio to itself is 1.
        assert (cross.filter(pl.col("update") == 0)["ratio"] - 1).abs().max() < 1e-5
        assert (cross["source_logprob"] - cross["source_logprob_pool"]).abs().max() > 0.01


def loss_of(trace: pl.DataFrame, pool: pl.DataFrame, aggregation: str) -> float:
    """The mean over updates of the negative objective, from the files alone."""
    losses = []
    problem = pool.select("rollout_id", "problem_id", "source")
    for _, rows in trace.join(problem.drop("source"), on="rollout_id").group_by("update"):
        # Everything scheduled counts in the denominator, the unusable responses too.
        scheduled = problem.filter(pl.col("problem_id").is_in(rows["problem_id"].implode()))
        counts = dict(scheduled.group_by("source").len().iter_rows())
        if aggregation == "mean":
            counts = dict.fromkeys(counts, len(scheduled))
        losses.append(-sum(row["sampler_weight"] * row["objective"] / counts[row["source"]] for row in rows.to_dicts()))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("aggregation", ["sum", "mean"])
def test_the_loss_is_the_sum_of_the_trace(small: Path, cli: Cli, tmp_path: Path, aggregation: str) -> None:
    trace, metrics = updated(cli, tmp_path, f"algorithm.loss.aggregation={aggregation}")
    assert metrics["loss"] == pytest.approx(
        loss_of(trace, table(small, "pool", "ada", "learner"), aggregation), abs=1e-9
    )
    assert abs(metrics["loss"]) > 1e-3


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("order", ["mixed", "self_first"])
def test_which_update_sees_which_response(small: Path, cli: Cli, tmp_path: Path, order: str, shuffle: bool) -> None:
    """8 prompts, 2 agents, 4 updates. Mixed: two prompts each, with everybody's responses. Own first: two updates with
    own responses of four prompts each, then two with the partner's."""
    trace, _ = updated(
        cli, tmp_path, f"algorithm.loss.minibatch_order={order}", f"algorithm.loss.shuffle={str(shuffle).lower()}"
    )
    pool = table(small, "pool", "ada", "learner")
    problems = pool["problem_id"].unique(maintain_order=True).to_list()
    seen = trace.join(pool.select("rollout_id", "problem_id"), on="rollout_id")
    cut = 4 if order == "self_first" else 2
    parts = [set(seen.filter(pl.col("update") == update)["problem_id"]) for update in range(4)]
    assert [len(part) for part in parts] == [cut] * 4
    sources = [set(seen.filter(pl.col("update") == update)["source"]) for update in range(4)]
    both = {"ada", "bo"}
    assert sources == ([{"ada"}, {"ada"}, {"bo"}, {"bo"}] if order == "self_first" else [both] * 4)
    in_order = [set(problems[start : start + cut]) for start in range(0, 8, cut)] * (cut // 2)
    assert (parts == in_order) == (not shuffle)


def test_the_penalty_starts_at_zero_and_counts_where_it_is_told(small: Path, cli: Cli, tmp_path: Path) -> None:
    """At step 1 the learner starts as the initial policy: the first update sees no penalty, later ones do."""
    pool = table(small, "pool", "ada", "learner")
    penalties = {}
    for responses in ("all", "own"):
        trace, metrics = updated(
            cli, tmp_path / responses, "algorithm.loss.kl_coef=5.0", f"algorithm.loss.kl_responses={responses}"
        )
        plain = pl.read_parquet(small / "updates/step=0001/agent=ada/trace.parquet")
        first = pl.col("update") == 0
        assert trace.filter(first).equals(plain.filter(first))
        assert not trace.equals(plain)
        penalties[responses] = metrics["loss"] - loss_of(trace, pool, "sum")
    assert penalties["all"] > penalties["own"] > 1e-6
    # At step 2 the learner is away from its initial policy before the first update.
    trace, metrics = updated(cli, tmp_path / "later", "algorithm.loss.kl_coef=5.0", step=2)
    later = pl.read_parquet(small / "pool/step=0002/learner=ada/*.parquet", hive_partitioning=False)
    assert metrics["loss"] - loss_of(trace, later, "sum") > penalties["own"]
