"""Several benchmarks with their own metrics, from `evaluate` to files, report, status, audit and export; and a kill."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from conftest import PARAMS, Cli, make_finished
from hacpo.engines.transformers import TransformersEngine
from hacpo.verifying.answers.spelling import normal_form
from tests.tampering import Sandbox

RUN = "pipelines/small"
SEVERAL = PARAMS.replace(
    "    arithmetic/heldout:",
    "    arithmetic/more: {task: arithmetic, split: heldout, problems: 6, seed: 7}\n    arithmetic/heldout:",
).replace(
    "    heldout: {data: arithmetic/heldout, samples: 2, temperature: 1.0}",
    "    heldout: {data: arithmetic/heldout, samples: 4, temperature: 1.0}\n"
    "    more: {data: arithmetic/more, samples: 5, temperature: 1.0}\n"
    "  metrics: {heldout: [avg, maj@4, pass@2], more: [best@5, pass@3]}",
)


@pytest.fixture(scope="module")
def run_once(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Path:
    """The root of a project whose run `small` has two benchmarks and is complete; only to be read."""
    return make_finished(tmp_path_factory.mktemp("several"), models, SEVERAL)


@pytest.fixture
def several(run_once: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In its root."""
    monkeypatch.chdir(run_once)
    return run_once


@pytest.fixture(scope="module")
def damaged(run_once: Path) -> Path:
    """What `sandbox` is a copy of."""
    return run_once


def table(agent: str, step: int) -> pl.DataFrame:
    return pl.read_parquet(f"artifacts/small/evaluations/step={step:04d}/agent={agent}/*.parquet")


def right(frame: pl.DataFrame) -> pl.DataFrame:
    """One row per problem: n and c."""
    correct = (pl.col("verdict") == "correct").sum().alias("c")
    return frame.group_by("problem_id").agg(correct, pl.len().alias("n"))


def majority(frame: pl.DataFrame) -> float:
    """By another road: a problem's votes as a table, most first, then the earliest."""
    wins = 0
    for _, problem in frame.group_by("problem_id"):
        votes = (
            problem.drop_nulls("extracted")
            .with_columns(pl.col("extracted").map_elements(normal_form, pl.String).alias("form"))
            .sort("sample")
            .group_by("form")
            .agg(pl.len().alias("votes"), pl.col("sample").min(), pl.col("verdict").first())
            .sort(["votes", "sample"], descending=[True, False])
        )
        wins += votes.height > 0 and votes["verdict"][0] == "correct"
    return wins / frame["problem_id"].n_unique()


def by_hand(agent: str, step: int) -> dict[str, float]:
    """Every series of one evaluation, from the tables alone."""
    held, more = (table(agent, step).filter(pl.col("benchmark") == name) for name in ("heldout", "more"))
    n, c = pl.col("n"), pl.col("c")
    pairs = right(held).select((1 - (n - c) * (n - c - 1) / (n * (n - 1))).mean()).item()
    wrong = (n - c) * (n - c - 1) * (n - c - 2) / (n * (n - 1) * (n - 2))
    numbers = {
        "heldout": held["reward"].cast(pl.Float64).mean(),
        "heldout.maj@4": majority(held),
        "heldout.pass@2": pairs,
        "more": right(more).select((c > 0).mean()).item(),
        "more.pass@3": right(more).select((1 - wrong).mean()).item(),
    }
    return numbers | {"average": (numbers["heldout"] + numbers["more"]) / 2}


def test_files_say_what_follows_from_the_tables(several: Path) -> None:
    report = json.loads(Path("artifacts/small/report/metrics.json").read_text())
    curves = pl.read_csv("artifacts/small/report/curves.csv")
    assert curves["step"].to_list() == [0, 2]
    for agent in ("ada", "bo"):
        for step in (0, 2):
            expected = by_hand(agent, step)
            (row,) = curves.filter(step=step).iter_rows(named=True)
            for name, value in expected.items():
                assert row[f"{agent}.{name}"] == pytest.approx(value, abs=5.1e-5), name
            file = json.loads(Path(f"artifacts/small/metrics/evaluate/step={step:04d}/{agent}.json").read_text())
            assert file["heldout.accuracy"] == pytest.approx(expected["heldout"], abs=1e-12)
            assert file["heldout.maj@4"] == expected["heldout.maj@4"]
            assert file["heldout.pass@2"] == pytest.approx(expected["heldout.pass@2"], abs=1e-12)
            assert file["more.best@5"] == pytest.approx(expected["more"], abs=1e-12)
            # Whatever is reported, every file has the same numbers.
            numbers = {key for key in file if key.startswith("more.")}
            assert numbers == {f"more.{key}" for key in ("accuracy", "pass@2", "pass@4", "best@5", "maj@5", "tokens")}
        assert report["average"][agent] == pytest.approx(by_hand(agent, 2)["average"], abs=5.1e-5)
    assert 0 < report["more"]["(mean)"] < 1  # else nothing above could tell


def test_the_page_has_agents_by_benchmarks_and_their_average(several: Path) -> None:
    page = " ".join(Path("artifacts/small/report/index.html").read_text().split())
    assert "Held-out accuracy, <strong>average of 2 benchmarks</strong>, after step 2" in page
    columns = ["agent", "", "heldout avg@4", "more best@5", "average"]
    assert "".join(f'<th scope="col">{name}</th>' for name in columns) in page
    for agent in ("ada", "bo"):
        value = f"{100 * by_hand(agent, 2)['average'] + 1e-9:.1f}"
        assert f"<strong>{value} %" in page
    assert "more best@5 (sampled at temperature 1)" in page
    assert '<th scope="row">heldout maj@4</th>' in page
    assert "the share of problems that at least one of all n answers solves" in page


def test_status_speaks_of_the_same_numbers(several: Path, cli: Cli) -> None:
    said = cli("status", RUN, "--outcome").out
    lines = [line.split() for line in said.splitlines()]
    for name, title in (("heldout", "heldout"), ("more", "more best@5"), ("average", "average of 2 benchmarks")):
        at = next(number for number, line in enumerate(said.splitlines()) if line.strip().startswith(title))
        start, now = by_hand("ada", 0)[name], by_hand("ada", 2)[name]
        assert lines[at + 2][:3] == ["ada", f"{start:.3f}", f"{now:.3f}"]


def test_another_headline_samples_nothing_again(sandbox: Sandbox, cli: Cli) -> None:
    params = Path(RUN, "params.yaml")
    params.write_text(params.read_text().replace("more: [best@5, pass@3]", "more: [maj, pass@5]"))
    kept = ("evaluations", "metrics", "checkpoints", "rollouts")
    before = {path: path.stat().st_mtime_ns for name in kept for path in Path("artifacts/small", name).rglob("*")}
    done = cli("run", RUN, "--jobs", "1")
    assert done.code == 0, done.err
    assert before == {path: path.stat().st_mtime_ns for path in before}
    report = json.loads(Path("artifacts/small/report/metrics.json").read_text())
    more = table("bo", 2).filter(pl.col("benchmark") == "more")
    assert report["more"]["bo"] == pytest.approx(majority(more), abs=5.1e-5)
    assert report["more.pass@5"]["bo"] == pytest.approx(by_hand("bo", 2)["more"], abs=5.1e-5)


def test_an_evaluation_drawn_under_other_settings_is_not_called_by_their_name(sandbox: Sandbox, cli: Cli) -> None:
    params = Path(RUN, "params.yaml")
    params.write_text(params.read_text().replace("samples: 5", "samples: 6").replace("best@5", "best@6"))
    said = cli("status", RUN, "--outcome").out
    lines = said.splitlines()
    titles = [above.split(" (")[0] for above, line in pairwise(lines) if line.split()[:1] == ["start"]]
    assert titles == ["heldout", "heldout maj@4", "heldout pass@2", "more pass@3"]  # best@6 and the average: not of 5


def test_audit_recomputes_every_metric(sandbox: Sandbox, cli: Cli) -> None:
    report = json.loads(cli("audit", RUN, "--json").out)
    assert [one for one in report["findings"] if one["check"] in ("metrics", "evaluations")] == []
    path = Path("artifacts/small/metrics/evaluate/step=0002/bo.json")
    numbers = json.loads(path.read_text())
    numbers["heldout.maj@4"] += 1 / 16
    del numbers["more.best@5"]
    path.write_text(json.dumps(numbers))
    found = json.loads(cli("audit", RUN, "--json").out)["findings"]
    named = {(one["check"], one["column"]) for one in found if one["check"] == "metrics"}
    assert named == {("metrics", "heldout.maj@4"), ("metrics", "more.best@5")}


def test_the_best_step_is_best_by_a_headline_or_the_average(several: Path, cli: Cli, tmp_path: Path) -> None:
    refused = cli("export", RUN, tmp_path / "model", "--agent", "ada", "--step", "best")
    assert "--step best by which benchmark? (expected --by one of heldout, more, average)" in refused.error
    for by in ("more", "average"):
        results = {step: by_hand("ada", step)[by] for step in (0, 2)}
        best = min(results, key=lambda step: (-results[step], step))
        done = cli("export", RUN, tmp_path / by, "--agent", "ada", "--step", "best", "--by", by)
        assert done.out.startswith(f"ada at step {best} (the best of 2 by {by})"), done.err
    card = (tmp_path / "average" / "README.md").read_text()
    assert "| more best@5 (`arithmetic/more`) | 6 | 5 at temperature 1 |" in card
    assert f"| average of 2 benchmarks | 22 |  | {by_hand('ada', 0)['average']:.3f} ± " in card


class Killed(BaseException):
    """Stands for a kill: nothing catches it on its way out."""


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The requests of each block that is drawn; with a negative number in it, dies when so many are through."""
    blocks: list[int] = []
    sample = TransformersEngine.sample

    def counting(self: TransformersEngine, requests: Any, *options: Any, **more: Any) -> Any:
        if blocks and blocks[0] < 0 and len(blocks) - 1 == -blocks[0]:
            raise Killed
        blocks.append(len(requests))
        return sample(self, requests, *options, **more)

    monkeypatch.setattr(TransformersEngine, "sample", counting)
    return blocks


def test_finished_benchmarks_are_not_sampled_again_after_a_kill(
    several: Path, cli: Cli, tmp_path: Path, drawn: list[int]
) -> None:
    command = ["evaluate", RUN, "--step", 2, "--agent", "ada", "--set", "engine.save_every=24", "--out", tmp_path]
    drawn[:] = [-4]
    with pytest.raises(Killed):
        cli(*command)
    # heldout: 16 problems x 4 = 64 = 24 + 24 + 16; of more: 6 x 5 = 30 = 24 + 6 the first block.
    assert drawn[1:] == [24, 24, 16, 24]
    assert not (tmp_path / "evaluations").exists()
    drawn[:] = []
    assert cli(*command).code == 0
    assert drawn == [6]
    recorded = Path("artifacts/small/evaluations/step=0002/agent=ada")
    for shard in sorted(recorded.glob("*.parquet")):
        again = pl.read_parquet(tmp_path / "evaluations/step=0002/agent=ada" / shard.name)
        assert again.equals(pl.read_parquet(shard))
    assert json.loads((tmp_path / "metrics/evaluate/step=0002/ada.json").read_text())["more.best@5"] == pytest.approx(
        by_hand("ada", 2)["more"], abs=1e-12
    )
