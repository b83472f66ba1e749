"""The catalogue alone spells the names of stages; everybody else names its entries."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from conftest import ROOT
from hacpo.artifacts.tables import WHOLE_STEP
from hacpo.pipeline.catalogue import PIPELINE, STAGES
from hacpo.stages import ORDER as ORDER_OF_HELP

CATALOGUE = "hacpo/pipeline/catalogue.py"
ORDER = "stages/__init__.py"
"""The order of their help."""
ALSO_OTHERS = {"advantage", "pool", "report", "update"}
"""Names that columns, tables and blocks of settings have too: stages where metrics, a command or a comparison is asked
for one."""
TAKES_A_NAME = {"command", "metric", "metrics", "metrics_file", "total"}
"""Functions that a stage's name could be given to, or that of the metrics of all agents."""
SIDE = "side_"
"""What the entries of side samples begin with: `StageSpec.side` says it."""

NO_STAGES = {
    ("hacpo/engines/vllm/connection.py", "verify"): "an option of requests",
    ("hacpo/pipeline/execution/workers.py", "report"): "a kind of message between processes",
    ("hacpo/settings/params.py", "warmup"): "a block of an agent's settings",
    ("hacpo/tools/audit/beside.py", "update"): "a column of the trace",
    ("hacpo/tools/check/starts.py", "warmup"): "a block of an agent's settings",
}


def spelled(source: str) -> Iterator[str]:
    """Names of stages that a source spells."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Constant(value=str(word)) if (word in STAGES and word not in ALSO_OTHERS) or word == SIDE:
                yield word
            case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)) if name in TAKES_A_NAME:
                yield from words(node.args, {*ALSO_OTHERS, WHOLE_STEP})
            case ast.Compare():
                yield from words([node.left, *node.comparators], ALSO_OTHERS)


def words(nodes: list[ast.expr], wanted: set[str]) -> Iterator[str]:
    """Those of them that stand among these expressions, or in a tuple, list or set of them."""
    for node in nodes:
        inner = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
        yield from (part.value for part in inner if isinstance(part, ast.Constant) and part.value in wanted)


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ('metric("generate", agent, key)', ["generate"]),
        ('layout.metrics("update", 1, agent)', ["update"]),
        ('layout.metrics(VERIFY.name, 1, "all")', ["all"]),
        ('pipeline.command("resolve")', ["resolve"]),
        ('name == "report"', ["report"]),
        ('stage in ("pool", "side_verify")', ["pool", "side_verify"]),
        ('name.startswith("side_")', ["side_"]),
        ('f"side_{name}"', ["side_"]),
        ('row["update"] + table.equal("pool", "advantage")', []),
        ('layout.side_rollouts(step, agent) == "side_rollouts"', []),
    ],
)
def test_every_way_to_spell_one_is_seen(source: str, names: list[str]) -> None:
    assert sorted(spelled(source)) == names


def test_nobody_else_spells_a_stage() -> None:
    files = [path.relative_to(ROOT).as_posix() for top in ("hacpo", "stages") for path in (ROOT / top).rglob("*.py")]
    assert CATALOGUE in files
    found = {
        (file, word)
        for file in files
        if file not in (CATALOGUE, ORDER)
        for word in spelled((ROOT / file).read_text("utf-8"))
    }
    assert found == NO_STAGES.keys(), "name the entry of the catalogue: GENERATE.name, or a function that takes it"


def test_help_lists_the_stages_in_the_order_of_the_pipeline() -> None:
    assert list(ORDER_OF_HELP) == list(dict.fromkeys(spec.command for spec in PIPELINE))
