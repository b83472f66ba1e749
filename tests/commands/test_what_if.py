"""`hacpo what-if`: a step under other settings, from its own files, against the stages that really run with them."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from conftest import PARAMS, Cli, train
from hacpo.settings.recipes import RECIPES
from hacpo.tools.inspect.comparison import changes, compare
from hacpo.tools.inspect.question import ask
from hacpo.tools.inspect.recompute import Numbers, Updates, recompute

RUN = Path("pipelines/small")
AGENTS = ("ada", "bo")
COLUMNS = ("baseline", "advantage", "omega", "effective_advantage")


@pytest.fixture
def there(finished: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In the finished project, to be read only."""
    monkeypatch.chdir(finished)
    return finished


def answer(cli: Cli, step: int, *settings: str, run: str = "small", options: tuple[str, ...] = ()) -> dict[str, Any]:
    words = [word for setting in settings for word in ("--set", setting)]
    result = cli("what-if", f"pipelines/{run}", "--step", step, *words, "--json", "--top", 100_000, *options)
    assert result.code == 0, result.err
    tree: dict[str, Any] = json.loads(result.out)
    return tree


def rows(base: Path, name: str, step: int, agent: str) -> dict[str, dict[str, Any]]:
    key = {"updates": "agent", "verdicts": "agent"}.get(name, "learner")
    frame = pl.read_parquet(base / name / f"step={step:04d}" / f"{key}={agent}" / "*.parquet", hive_partitioning=False)
    return {row["rollout_id"]: row for row in frame.to_dicts()}


# --- nothing is asked: nothing changes -------------------------------------------------------------------------------


def assert_nothing_changes(tree: dict[str, Any], kinds: set[str], run: str = "small") -> None:
    step = tree["step"]
    # Of what is shared a learner may have trained on nothing (`rollouts.select`).
    traced = {
        learner: {
            "own" if row["is_self"] else "cross"
            for row in rows(Path("artifacts") / run, "updates", step, learner).values()
        }
        for learner in AGENTS
    }
    assert any(kinds == found for found in traced.values())
    assert tree["capability"] == {}
    for learner in AGENTS:
        parts = tree["learners"][learner]
        assert parts.keys() == kinds | {"most_changed"}
        assert parts["most_changed"] == []
        for kind in kinds:
            assert (parts[kind]["differing"], parts[kind]["flips"], parts[kind]["dropped"]) == ({}, {}, 0)
            of_updates = {"ratio", "is_weight", "row_weight"} if kind in traced[learner] else set()
            assert {"effective_advantage", *of_updates} == parts[kind]["spreads"].keys()
            assert parts[kind]["responses"] > 0


@pytest.mark.parametrize("step", [1, 2])
def test_without_a_question_everything_equals_the_files(cli: Cli, there: Path, step: int) -> None:
    assert_nothing_changes(answer(cli, step), {"own", "cross"})
    out = cli("what-if", RUN, "--step", step).out
    assert "Nothing changes: every number recomputed equals the files." in out


BLOCK = """algorithm:
  recipe: hacpo
  importance: {alpha: 1.0}
  clip: {own_low: 0.03, own_high: 0.03}
"""


def trained(cli: Cli, run: str, algorithm: str) -> Path:
    """One step of a run with this `algorithm` block."""
    assert BLOCK in PARAMS
    folder = Path("pipelines") / run
    folder.mkdir()
    (folder / "params.yaml").write_text(
        PARAMS.replace(BLOCK, f"algorithm: {algorithm}\n").replace("steps: 2", "steps: 1")
    )
    return train(cli, run, AGENTS)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", list(RECIPES))
def test_without_a_question_every_recipe_equals_its_files(cli: Cli, project: Path, recipe: str) -> None:
    algorithm = f"{{recipe: {recipe}, clip: {{own_low: 0.01, own_high: 0.01}}}}"
    trained(cli, "one", algorithm)
    kinds = {"own", "cross"} if RECIPES[recipe]["rollouts"]["share"] else {"own"}
    assert_nothing_changes(answer(cli, 1, run="one"), kinds, run="one")


def test_a_changed_number_in_a_file_is_a_change(cli: Cli, finished_copy: Path) -> None:
    """The comparison can fail: one value of each kind of table, changed by hand."""
    base = Path("artifacts/small")
    for path, column in (
        ("advantages/step=0002/learner=ada/part-00000.parquet", "baseline"),
        ("updates/step=0002/agent=ada/trace.parquet", "objective"),
        ("updates/step=0002/agent=ada/trace.parquet", "lower"),
        ("capability/step=0002/capability.parquet", "accuracy"),
    ):
        original = (base / path).read_bytes()
        import pyarrow.parquet as pq

        content = pq.read_table(base / path)
        values = content[column].to_pylist()
        values[3 % len(values)] += 1e-6
        place = content.column_names.index(column)
        changed = content.set_column(place, content.schema.field(column), [values])
        pq.write_table(changed, base / path)
        tree = answer(cli, 2, options=("--learner", "ada"))
        found = [tree["learners"]["ada"][kind]["differing"].get(column, 0) for kind in ("own", "cross")]
        assert sum(found) == 1 or "ada" in tree["capability"] or "bo" in tree["capability"]
        (base / path).write_bytes(original)


# --- against the stages that really run with the settings ------------------------------------------------------------


QUESTIONS = [
    ("algorithm.advantage.cross_baseline=learner",),
    ("algorithm.advantage.baseline=joint",),
    ("algorithm.advantage.baseline=own",),
    ("algorithm.advantage.baseline=shrunk", "algorithm.advantage.kappa=1.5"),
    ("algorithm.advantage.discrepancy=false",),
    ("algorithm.advantage.baseline_guard=false",),
    ("algorithm.advantage.epsilon=0.1",),
    ("algorithm.capability.ratio_max=1.2", "algorithm.capability.ratio_min=0.9"),
    ("algorithm.capability.floor=0.5",),
    ("algorithm.capability.window=1",),
    ("algorithm.recipe=no_capability_baseline",),
    ("algorithm.recipe=gspo",),
    ("algorithm.recipe=naive", "algorithm.advantage.baseline=own"),
]


@pytest.mark.parametrize("settings", QUESTIONS, ids=" ".join)
@pytest.mark.parametrize("step", [1, 2])
def test_advantages_equal_those_of_the_stage(
    cli: Cli, there: Path, tmp_path: Path, step: int, settings: tuple[str, ...]
) -> None:
    words = [word for setting in settings for word in ("--set", setting)]
    ran = cli("advantage", RUN, "--step", step, "--out", tmp_path / "out", *words)
    assert ran.code == 0, ran.err
    tree = answer(cli, step, *settings)
    capability = {
        row["agent"]: row
        for row in pl.read_parquet(tmp_path / "out/capability" / f"step={step:04d}" / "capability.parquet").to_dicts()
    }
    was = {
        row["agent"]: row
        for row in pl.read_parquet(f"artifacts/small/capability/step={step:04d}/capability.parquet").to_dicts()
    }
    assert tree["capability"] == {
        agent: {"before": was[agent], "after": row} for agent, row in capability.items() if row != was[agent]
    }
    for learner in AGENTS:
        before = rows(Path("artifacts/small"), "advantages", step, learner)
        after = rows(tmp_path / "out", "advantages", step, learner)
        changed = {change["rollout_id"]: change for change in tree["learners"][learner]["most_changed"]}
        dropped = sum(part["dropped"] for kind, part in tree["learners"][learner].items() if kind != "most_changed")
        assert len(before) - dropped == len(after)
        for name, row in after.items():
            if name in changed:
                for column in COLUMNS:
                    assert changed[name]["before"][column] == before[name][column]
                    assert changed[name]["after"][column] == row[column]
            else:
                assert row["effective_advantage"] == pytest.approx(before[name]["effective_advantage"], abs=1e-12)


@pytest.mark.parametrize(
    "settings",
    [
        ("algorithm.importance.alpha=2.5",),
        ("algorithm.importance.alpha=0",),
        ("algorithm.importance.ratio_norm=bytes",),
        ("algorithm.importance.ratio_norm=own_tokens",),
        ("algorithm.clip.cross=none",),
        ("algorithm.clip.cross=own", "algorithm.clip.own_low=0.2"),
        ("algorithm.clip.cross_delta=0.5", "algorithm.clip.cross_step=0.1"),
    ],
    ids=" ".join,
)
def test_the_first_update_equals_that_of_the_stage(
    cli: Cli, there: Path, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    """Before the first update the model is the same under any settings, so ratios and terms must be those of a real
    update run with them. (Later updates are of another model then, as the output says.)"""
    words = [word for setting in settings for word in ("--set", setting)]
    learner = "bo"
    ran = cli("update", RUN, "--step", 2, "--agent", learner, "--out", tmp_path / "out", *words)
    assert ran.code == 0, ran.err
    real = rows(tmp_path / "out", "updates", 2, learner)
    as_run = rows(Path("artifacts/small"), "updates", 2, learner)
    before, after = recompute(ask(RUN, settings), 2, [learner]).learners[learner]
    assert before.updates is not None
    assert after.updates is not None
    differing = later = 0
    for index, number in enumerate(after.updates.response_u):
        row = real[after.rollout_id[number]]
        if row["update"] > 0:
            later += row["learner_logprob"] != as_run[row["rollout_id"]]["learner_logprob"]
            continue
        for name in ("ratio", "lower", "upper", "is_weight", "objective"):
            was, now = (getattr(side, f"{name}_u")[index] for side in (before.updates, after.updates))
            assert now == pytest.approx(row[name], rel=1e-12, abs=1e-12), name
            differing += now != pytest.approx(was, rel=1e-12, abs=1e-12)
        assert after.updates.clipped_u[index] == row["clipped"]
    assert differing > 0, "the question changes nothing here, so the test could not fail"
    assert later > 0


@pytest.mark.slow
def test_another_reference(cli: Cli, project: Path) -> None:
    """A run that divided by the learner's own old policy, asked about the source's: exp of the mean over the learner's
    tokens of the learner's sum minus the pool's source sum."""
    base = trained(cli, "selfish", "{recipe: hacpo, importance: {reference: self}}")
    assert_nothing_changes(answer(cli, 1, run="selfish"), {"own", "cross"}, run="selfish")
    tree = answer(cli, 1, "algorithm.importance.reference=source", run="selfish")
    for learner in AGENTS:
        pool, trace = rows(base, "pool", 1, learner), rows(base, "updates", 1, learner)
        changed = [change for change in tree["learners"][learner]["most_changed"] if not change["is_self"]]
        assert changed
        for change in changed:
            entry, row = pool[change["rollout_id"]], trace[change["rollout_id"]]
            gap = row["learner_logprob"] * entry["learner_tokens"] - entry["source_logprob"]
            wanted = math.exp(max(-10.0, min(10.0, gap / entry["learner_tokens"])))
            assert change["after"]["ratio"] == pytest.approx(wanted, rel=1e-12)
    refused = cli("what-if", "pipelines/selfish", "--step", 1, "--set", "algorithm.importance.reference=self")
    assert refused.code == 0, "asking for what the run has is no question"


@pytest.mark.slow
def test_token_level_ratios(cli: Cli, project: Path) -> None:
    """grpo: terms are proportional to the advantage while it keeps its sign, and unknown where it does not."""
    base = trained(cli, "tokens", "{recipe: grpo}")
    tree = answer(cli, 1, "algorithm.advantage.epsilon=0.5", run="tokens")
    changed = 0
    for learner in AGENTS:
        before, trace = rows(base, "advantages", 1, learner), rows(base, "updates", 1, learner)
        assert tree["learners"][learner]["own"]["unknown"] == 0
        for change in tree["learners"][learner]["most_changed"]:
            worth, row = before[change["rollout_id"]], trace[change["rollout_id"]]
            scale = (worth["sigma"] + 1e-6) / (worth["sigma"] + 0.5)
            assert change["after"]["objective"] == pytest.approx(row["objective"] * scale, rel=1e-9)
            assert (change["after"]["ratio"], change["after"]["clipped"]) == (row["ratio"], row["clipped"])
            assert change["after"]["gradient_weight"] is None
            changed += 1
    assert changed > 0
    for setting, words in (
        ("algorithm.clip.own_low=0.1", "clipped token by token"),
        ("algorithm.recipe=hacpo", "needs the other agents' responses"),
    ):
        assert words in cli("what-if", "pipelines/tokens", "--step", 1, "--set", setting).error
    # One ratio per sequence is known: exp of the difference of the means over the same tokens.
    tree = answer(cli, 1, "algorithm.recipe=gspo", run="tokens")
    for learner in AGENTS:
        trace = rows(base, "updates", 1, learner)
        for change in tree["learners"][learner]["most_changed"]:
            row = trace[change["rollout_id"]]
            wanted = math.exp(row["learner_logprob"] - row["source_logprob"])
            assert change["after"]["ratio"] == pytest.approx(wanted, rel=1e-12)


def test_a_longer_window_comes_from_the_verdicts(cli: Cli, finished_copy: Path) -> None:
    """A run with K = 1 keeps one accuracy per window; asked about K = 5, both steps' are taken from the verdicts."""
    params = RUN / "params.yaml"
    params.write_text(params.read_text().replace("  importance:", "  capability: {window: 1}\n  importance:"))
    for step in (1, 2):
        assert cli("resolve", RUN).code == 0
        assert cli("advantage", RUN, "--step", step).code == 0
    # The traces are of the run with K = 5, which what-if notices.
    assert "was made with other settings" not in (cli("what-if", RUN, "--step", 2).err)
    tree = answer(cli, 2, "algorithm.capability.window=5")
    accuracy = {
        agent: [
            float(np.mean([row["reward"] for row in rows(Path("artifacts/small"), "verdicts", step, agent).values()]))
            for step in (1, 2)
        ]
        for agent in AGENTS
    }
    for agent in AGENTS:
        assert len(tree["capability"][agent]["before"]["window"]) == 1
        assert tree["capability"][agent]["after"]["window"] == pytest.approx(accuracy[agent], abs=1e-15)
        assert tree["capability"][agent]["after"]["capability"] == pytest.approx(np.mean(accuracy[agent]), abs=1e-15)
    shutil.rmtree("artifacts/small/verdicts/step=0001/agent=bo")
    refused = cli("what-if", RUN, "--step", 2, "--set", "algorithm.capability.window=5")
    assert "`hacpo run pipelines/small` makes it" in refused.error


# --- what is counted -------------------------------------------------------------------------------------------------


def numbers(effective: list[float], *, reward: list[float], updates: Updates | None) -> Numbers:
    count = len(effective)
    return Numbers(
        rollout_id=[f"r{index}" for index in range(count)],
        source=["ada"] * 2 + ["bo"] * (count - 2),
        is_self=np.arange(count) < 2,
        reward=np.array(reward),
        baseline=np.zeros(count),
        sigma=np.ones(count),
        advantage=np.array(effective),
        omega=np.ones(count),
        effective_advantage=np.array(effective),
        uniform=np.zeros(count, dtype=bool),
        guarded=np.zeros(count, dtype=bool),
        updates=updates,
    )


def updates(ratio: list[float], clipped: list[bool], is_weight: list[float]) -> Updates:
    count = len(ratio)
    return Updates(
        response_u=np.arange(count),
        update_u=np.zeros(count, dtype=np.int64),
        ratio_u=np.array(ratio),
        lower_u=np.full(count, 0.8),
        upper_u=np.ones(count),
        clipped_u=np.array(clipped),
        is_weight_u=np.array(is_weight),
        objective_u=np.array(ratio) * np.array(is_weight),
        sampler_weight_u=np.ones(count),
        row_weight_u=np.full(count, 0.25),
        known_u=np.ones(count, dtype=bool),
        token_level_u=np.zeros(count, dtype=bool),
        likelihood_u=np.zeros(count, dtype=bool),
    )


def test_signs_shares_and_the_most_changed() -> None:
    reward = [1.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    old = updates([1.0, 1.0, 0.9, 0.5, 0.9, 0.9], [False, False, False, True, False, False], [1, 1, 0.9, 0.8, 0.9, 0.9])
    new = updates([1.0, 1.0, 0.9, 0.5, 0.9, 0.9], [False, False, False, False, False, True], [1, 1, 0.81, 0.25, 1, 1])
    before = numbers([1.0, -1.0, 2.0, -1.0, 0.0, -0.5], reward=reward, updates=old)
    after = numbers([1.0, -1.0, -1.0, -1.0, 1e-15, 0.5], reward=reward, updates=new)
    own, cross = compare(before, after)
    assert (own.kind, own.responses, own.flips, own.differing) == ("own", 2, {}, {})
    assert cross.flips == {"+ to -": 1, "- to +": 1}  # 1e-15 is a zero
    assert cross.shares["punished_correct"] == (0.5, 1.0)  # of r2 and r3: before r3, after both
    assert cross.shares["clipped"] == (0.25, 0.25)
    assert cross.spreads["effective_advantage"].before == pytest.approx((-1, -0.925, -0.625, -0.25, 0.5, 1.7, 2))
    # 25 %: a quarter of the way from -1 (rank 0) to rank 3: rank 0.75, -1 + 0.75 * 0.5 = -0.625.
    listed = changes(before, after, 10)
    # |2 - -1| = 3, |-0.5 - 0.5| = 1; then by gradient weight: r3 0 -> 0.25 * 0.5 * 0.25 * -1; r4 has no advantage, but
    # its objective differs.
    assert [change.rollout_id for change in listed] == ["r2", "r5", "r3", "r4"]
    assert listed[0].before.gradient_weight == pytest.approx(0.25 * 0.9 * 0.9 * 2.0)
    assert listed[1].before.gradient_weight == pytest.approx(0.25 * 0.9 * 0.9 * -0.5)
    assert listed[1].after.gradient_weight == 0.0  # clipped
    assert (listed[2].before.gradient_weight, listed[2].after.gradient_weight) == (0.0, -0.03125)
    assert [change.rollout_id for change in changes(before, after, 1)] == ["r2"]


def test_row_weights_by_hand(cli: Cli, there: Path) -> None:
    """8 prompts, 4 updates, G = 4, 2 agents: each update has 8 own and 8 cross responses. `sum`: each counts 1/8;
    `mean`: 1/16. Without sharing, `mean` is over the own ones alone: 1/8. Only what a learner can use has a weight."""

    def kept(learner: str, kind: str) -> int:
        rows = pl.read_parquet(f"artifacts/small/pool/step=0001/learner={learner}/*.parquet", hive_partitioning=False)
        return rows.filter(pl.col("status") == "kept", pl.col("is_self") == (kind == "own")).height

    assert kept("ada", "own") == 32
    tree = answer(cli, 1, "algorithm.loss.aggregation=mean")
    for learner in AGENTS:
        for kind in ("own", "cross"):
            part = tree["learners"][learner][kind]
            assert part["differing"] == {"row_weight": kept(learner, kind)}
            assert part["spreads"]["row_weight"] == {"before": [0.125] * 7, "after": [0.0625] * 7}
        for change in tree["learners"][learner]["most_changed"]:
            assert change["after"]["gradient_weight"] == pytest.approx(change["before"]["gradient_weight"] / 2)
    tree = answer(cli, 1, "algorithm.loss.aggregation=mean", "algorithm.recipe=gspo")
    assert tree["learners"]["ada"]["own"]["spreads"]["row_weight"]["after"] == [0.125] * 7
    assert tree["learners"]["ada"]["cross"]["dropped"] == kept("ada", "cross")


# --- what cannot be answered, and what is not there ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("optimizer.learning_rate=1e-5", "can answer for algorithm.recipe"),
        ("sampling.temperature=0.5", "can answer for"),
        ("sampling.group_size=8", "can answer for"),
        ("seed=2", "can answer for"),
        ("algorithm.loss.kl_coef=0.1", "can answer for"),
        ("algorithm.loss.minibatch_order=self_first", "can answer for"),
        ("algorithm.importance.score_eos=false", "can answer for"),
        (
            "algorithm.recipe=gspo_x2",
            "other rollouts: 8 responses per prompt and agent (found 4 in this run)",
        ),
        ("algorithm.recipe=grpo", "token log-probabilities"),
        ("algorithm.importance.reference=self", "before the step"),
        ("algorithm.advantage.baselin=own", "did you mean"),
        ("algorithm.recipe=hacpoo", "did you mean"),
        ("algorithm.importance.alpha=-1", "alpha"),
        ("algorithm.importance.alpha", "key=value"),
    ],
)
def test_what_no_file_can_tell_is_refused(cli: Cli, there: Path, setting: str, words: str) -> None:
    refused = cli("what-if", RUN, "--step", 1, "--set", setting)
    assert refused.code == 2
    assert words.lower() in refused.error.lower()
    assert refused.out == ""


@pytest.mark.slow
def test_a_run_without_sharing_has_no_cross_responses(cli: Cli, project: Path) -> None:
    trained(cli, "alone", "{recipe: gspo}")
    refused = cli("what-if", "pipelines/alone", "--step", 1, "--set", "algorithm.recipe=hacpo")
    assert "own responses only" in refused.error


def test_a_recipe_that_also_changes_what_no_file_can_tell(cli: Cli, there: Path) -> None:
    tree = answer(cli, 1, "algorithm.recipe=reference_code")
    assert "algorithm.loss.minibatch_order" in tree["kept"]
    assert tree["settings"]["algorithm.importance.ratio_norm"] == {"before": "learner_tokens", "after": "own_tokens"}
    out = cli("what-if", RUN, "--step", 1, "--set", "algorithm.recipe=reference_code").out
    assert "as in the run, for no file can tell: " in out


def test_a_step_that_has_not_updated_yet(cli: Cli, finished_copy: Path) -> None:
    shutil.rmtree("artifacts/small/updates/step=0002/agent=ada")
    tree = answer(cli, 2, "algorithm.advantage.baseline=own")
    assert [table["command"] for table in tree["missing"]] == ["hacpo update pipelines/small --step 2 --agent ada"]
    assert tree["learners"]["ada"]["own"]["spreads"].keys() == {"effective_advantage"}
    assert tree["learners"]["ada"]["most_changed"][0]["after"]["ratio"] is None
    assert "not there yet: trace of ada" in cli("what-if", RUN, "--step", 2).out
    shutil.rmtree("artifacts/small/advantages/step=0002")
    assert "`hacpo run pipelines/small` makes it" in cli("what-if", RUN, "--step", 2).error


def test_params_that_changed_after_the_run(cli: Cli, finished_copy: Path) -> None:
    params = RUN / "params.yaml"
    params.write_text(params.read_text().replace("alpha: 1.0", "alpha: 2.0"))
    refused = cli("what-if", RUN, "--step", 1)
    assert "updates/step=0001/agent=ada/trace.parquet" in refused.error
    assert "expected algorithm.importance.alpha 2.0, found 1.0" in refused.error


def test_the_page(cli: Cli, there: Path) -> None:
    result = cli("what-if", RUN, "--step", 2, "--set", "algorithm.advantage.cross_baseline=learner", "--top", 2)
    assert result.code == 0
    assert "algorithm.advantage.cross_baseline  source → learner" in result.out
    for words in (
        "ada learns",
        "bo learns",
        "share of responses",
        "quantiles",
        "most changed",
        "Log-probabilities are",
    ):
        assert words in result.out
    assert "\x1b" not in result.out
    assert "…" not in result.out
    tree = answer(cli, 2, "algorithm.advantage.cross_baseline=learner")
    for learner in AGENTS:
        for change in tree["learners"][learner]["most_changed"][:2]:
            assert f"{change['rollout_id']}  cross  reward {change['reward']:g}" in result.out
            assert " ".join(change["text"].split()) in result.out
            assert change["text"] == next(
                row["text"]
                for row in pl.read_parquet(
                    Path("artifacts/small/rollouts/step=0002") / f"agent={change['source']}" / "*.parquet",
                    hive_partitioning=False,
                ).to_dicts()
                if row["rollout_id"] == change["rollout_id"]
            )
