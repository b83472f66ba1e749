"""Reading a run's tables with Polars: `python examples/read_tables.py artifacts/quickstart`.

`hacpo.read_run` gives each table as a frame; docs/artifacts.md has their columns.
"""

from __future__ import annotations

import sys

import polars as pl

import hacpo


def rewards(run: hacpo.RunTables) -> pl.DataFrame:
    """Mean reward of each agent in each step, and its capability then."""
    means = run["verdicts"].group_by("step", "agent").agg(pl.col("reward").mean(), responses=pl.len())
    able = run["capability"].select("step", "agent", "capability")
    return means.join(able, on=["step", "agent"]).sort("step", "agent")


def teaching(run: hacpo.RunTables) -> pl.DataFrame:
    """What each agent learned from, by source: responses, the clipped share of them, mean ratio and weight."""
    return (
        run["trace"]
        .group_by("agent", "source")
        .agg(pl.len().alias("responses"), pl.col("clipped", "ratio", "is_weight").mean())
        .sort("agent", "source")
    )


def lengths(run: hacpo.RunTables) -> pl.DataFrame:
    """Tokens of the same text to its source and to each other learner."""
    cross = run["pool"].filter(~pl.col("is_self"), pl.col("status") == "kept")
    return (
        cross.group_by("source", "learner")
        .agg(pl.col("source_tokens", "learner_tokens").sum())
        .with_columns(learner_per_source=pl.col("learner_tokens") / pl.col("source_tokens"))
        .sort("source", "learner")
    )


def strongest(run: hacpo.RunTables, count: int = 5) -> pl.DataFrame:
    """The cross responses with the largest objectives, clipped ones left out."""
    taught = run["trace"].filter(~pl.col("is_self"), ~pl.col("clipped"))
    texts = taught.join(run["rollouts"].select("rollout_id", "text"), on="rollout_id")
    top = texts.sort(pl.col("objective").abs(), descending=True).head(count)
    return top.select("agent", "source", "objective", "ratio", "text")


def main(path: str) -> None:
    """Print them all."""
    run = hacpo.read_run(path)
    for view in (rewards, teaching, lengths, strongest):
        print(f"\n{(view.__doc__ or '').splitlines()[0]}\n{view(run)}")


if __name__ == "__main__":
    main(sys.argv[1])
