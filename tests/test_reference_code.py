"""What the authors' code does where it differs from the paper: no scored EOS, and the `reference_code` preset."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from conftest import Cli, train
from hacpo.config import PromptSettings
from hacpo.pooling import NO_LIMIT, Limits, TextRoute, build_pool
from hacpo.settings import load, reads
from hacpo.terminals import Terminals

# --- the pool without EOS


class Letters:
    """A tokenizer of single letters; the learner's EOS is 9, the source's is 1."""

    unk_token_id = None

    def __init__(self, eos_token_id: int) -> None:
        self.terminals = Terminals.of(eos_token_id, {eos_token_id: "<eos>"}, eos_token_id)

    def holds_control(self, token_ids: Sequence[int]) -> bool:
        return 2 in token_ids

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))

    def render(self, problem_id: str, messages: list[dict[str, str]], thinking: bool | None = None) -> list[int]:
        return [50, 51]


def response(sample: int, text: str, token_ids: list[int], finish_reason: str = "stop") -> dict[str, Any]:
    return {
        "rollout_id": f"{text}/{sample}",
        "problem_id": "p",
        "sample": sample,
        "prompt_token_ids": [50, 51],
        "token_ids": token_ids,
        "text": text,
        "finish_reason": finish_reason,
        "stop_string": None,
        # -1, -2, -4, ...: every sum of the first tokens is another number
        "logprobs": [-(2.0**place) for place in range(len(token_ids))],
        "reward": 1.0,
    }


SOURCE = [
    response(0, "ab", [70, 71, 1]),  # two tokens and EOS
    response(1, "ab", [70, 71], "length"),  # cut off: no EOS
    response(2, "", [1]),  # nothing but EOS
    response(3, "", [2, 1]),  # a control token and EOS: no text
]


def pool_of(source: list[dict[str, Any]], *, score_eos: bool, max_tokens: int | None = None) -> list[dict[str, Any]]:
    own = [response(sample, "cc", [99, 99, 9]) for sample in range(len(source) - 1)]
    own.append(response(len(source) - 1, "", [9]))
    return build_pool(
        [{"problem_id": "p", "problem": "?"}],
        {"learner": own, "source": source},
        learner="learner",
        group_size=len(source),
        routes={"source": TextRoute(Letters(1), Letters(9))},
        prompt_settings=PromptSettings(),
        limits=Limits(NO_LIMIT if max_tokens is None else max_tokens),
        score_eos=score_eos,
    )


def told(rows: list[dict[str, Any]], is_self: bool) -> list[tuple[Any, ...]]:
    names = ("token_ids", "source_logprob", "source_tokens", "learner_tokens", "status")
    return [tuple(row[name] for name in names) for row in rows if row["is_self"] == is_self]


def test_a_scored_eos_is_part_of_both_sides() -> None:
    rows = pool_of(SOURCE, score_eos=True)
    assert told(rows, is_self=True) == [*[([99, 99, 9], -7.0, 3, 3, "kept")] * 3, ([9], -1.0, 1, 1, "kept")]
    assert told(rows, is_self=False) == [
        ([97, 98, 9], -7.0, 3, 3, "kept"),
        ([97, 98], -3.0, 2, 2, "kept"),
        ([], -1.0, 1, 0, "empty"),
        ([], -3.0, 2, 0, "empty"),
    ]


def test_without_it_the_pool_holds_neither_its_id_nor_its_log_probability() -> None:
    rows = pool_of(SOURCE, score_eos=False)
    # -1 - 2 without the EOS's -4. A response that is nothing but EOS keeps it, own and cross.
    assert told(rows, is_self=True) == [*[([99, 99], -3.0, 2, 2, "kept")] * 3, ([9], -1.0, 1, 1, "kept")]
    assert told(rows, is_self=False) == [
        ([97, 98], -3.0, 2, 2, "kept"),
        ([97, 98], -3.0, 2, 2, "kept"),  # cut off: nothing to leave out
        ([9], -1.0, 1, 1, "kept"),  # the learner's EOS for the source's
        ([], -1.0, 1, 0, "empty"),
    ]
    assert [row["text_bytes"] for row in rows if not row["is_self"]] == [2, 2, 0, 0]


def test_an_eos_that_is_not_scored_needs_no_room() -> None:
    # The prompt has two tokens, the response two and its EOS.
    status = {
        (score, limit): told(pool_of(SOURCE, score_eos=score, max_tokens=limit), is_self=False)[0][-1]
        for score in (True, False)
        for limit in (4, 5)
    }
    assert status == {(True, 4): "too_long", (True, 5): "kept", (False, 4): "kept", (False, 5): "kept"}
    # A learner without any room cannot take even a lone EOS.
    assert told(pool_of(SOURCE, score_eos=False, max_tokens=2), is_self=False)[2][-1] == "too_long"


def test_the_pool_reads_nothing_else_of_the_importance_block(project: Path, cli: Cli, tmp_path: Path) -> None:
    path = project / "pipelines" / "small" / "params.yaml"
    one = reads(load(path, ["algorithm.importance.alpha=1.0"]), "pool", "ada")
    assert one["algorithm"]["importance"] == {"score_eos": True}
    assert reads(load(path, ["algorithm.importance.alpha=3.0"]), "pool", "ada") == one
    assert reads(load(path, ["algorithm.importance.score_eos=false"]), "pool", "ada") != one
    refused = cli(
        "pool", "pipelines/small", "--step", 1, "--learner", "ada", "--out", tmp_path / "out",
        "--set", "algorithm.importance.alpha=3.0",
    )  # fmt: skip
    assert "pool does not read this setting" in refused.error


# --- the preset, recomputed from files


def table(base: Path, name: str, agent: str, key: str = "agent") -> dict[str, dict[str, Any]]:
    rows = pl.read_parquet(base / name / "step=0001" / f"{key}={agent}" / "*.parquet", hive_partitioning=False)
    return {row["rollout_id"]: row for row in rows.to_dicts()}


def test_the_preset_from_rollouts_to_the_trace(project: Path, cli: Cli) -> None:
    params = project / "pipelines" / "small" / "params.yaml"
    params.write_text(params.read_text().replace("recipe: hacpo", "recipe: reference_code"))
    base = train(cli, "small", ("ada", "bo"))
    ends = {}
    for learner, partner in (("ada", "bo"), ("bo", "ada")):
        texts = table(base, "rollouts", learner) | table(base, "rollouts", partner)
        pool = table(base, "pool", learner, "learner")
        advantages = table(base, "advantages", learner, "learner")
        eos = {
            row["token_ids"][-1] for row in table(base, "rollouts", learner).values() if row["finish_reason"] == "stop"
        }
        assert len(eos) == 1
        ends[learner] = eos.pop()
        # One mu per prompt, whoever wrote the answer.
        baselines: dict[str, set[float]] = {}
        for row in advantages.values():
            baselines.setdefault(row["problem_id"], set()).add(row["baseline"])
        assert {len(values) for values in baselines.values()} == {1}
        stopped = 0
        for name, row in pool.items():
            rollout = texts[name]
            scored = len(rollout["token_ids"]) - (rollout["finish_reason"] == "stop" and len(rollout["token_ids"]) > 1)
            assert row["source_tokens"] == scored
            assert row["source_logprob"] == math.fsum(rollout["logprobs"][:scored])
            assert row["learner_tokens"] == len(row["token_ids"])
            if row["is_self"]:
                assert row["token_ids"] == rollout["token_ids"][:scored]
            if row["status"] == "kept" and len(row["token_ids"]) > 1:
                assert ends[learner] not in row["token_ids"]
            stopped += scored < len(rollout["token_ids"])
        assert stopped > len(pool) / 2
        for name, row in table(base, "updates", learner).items():
            entry = pool[name]
            # Each side by its own tokens.
            assert row["source_logprob"] == pytest.approx(entry["source_logprob"] / entry["source_tokens"], rel=1e-12)
            log_ratio = row["learner_logprob"] - row["source_logprob"]
            assert row["ratio"] == pytest.approx(math.exp(max(-10.0, min(10.0, log_ratio))), rel=1e-9)
            # Own responses in the first two of four updates.
            assert row["is_self"] == (row["update"] < 2)
        first = [row for row in table(base, "updates", learner).values() if row["update"] == 0]
        # The EOS is left out of the old log-probabilities too: before the first step every own ratio is 1.
        assert max(abs(row["ratio"] - 1) for row in first) < 1e-5
