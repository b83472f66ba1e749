"""What a stage's body can get at: what its entry in the catalogue names, and nothing of the run beside it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import ROOT
from hacpo.pipeline.catalogue import REPORT_STAGE, RESOLVE, UPDATE, StageSpec
from hacpo.pipeline.execution.opening import open_stage
from hacpo.pipeline.execution.stage import Stage

ROUND_THE_ENTRY = {
    "hacpo.pipeline.project": "opens a run",
    "hacpo.artifacts.layout": "knows where everything lies",
    "hacpo.artifacts.run_files": "reads any table",
    "hacpo.artifacts.parquet": "reads any table",
}
"""Modules by which a body could read what its entry does not name; `Stage` reads and writes for it."""


def ways_round(source: str) -> Iterator[str]:
    """What in a body goes round its entry: private parts of the stage, the run's root, modules that read anything."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id="stage"), attr=name) if name.startswith("_"):
                yield f"stage.{name}"
            case ast.Attribute(value=ast.Attribute(attr="inputs" | "outputs" as way), attr="root"):
                yield f"stage.{way}.root"
            case ast.ImportFrom(module=str(module), names=names):
                parts = [module, *(f"{module}.{alias.name}" for alias in names)]
                yield from (part for part in parts if part in ROUND_THE_ENTRY)
            case ast.Import(names=names):
                yield from (alias.name for alias in names if alias.name in ROUND_THE_ENTRY)


@pytest.mark.parametrize(
    ("source", "way"),
    [
        ("stage._pipeline.settings", "stage._pipeline"),
        ("(stage.inputs.root / 'rollouts')", "stage.inputs.root"),
        ("from hacpo.artifacts.layout import Layout", "hacpo.artifacts.layout"),
        ("from hacpo.artifacts import parquet, tables", "hacpo.artifacts.parquet"),
        ("import hacpo.pipeline.project", "hacpo.pipeline.project"),
    ],
)
def test_every_way_round_is_seen(source: str, way: str) -> None:
    assert list(ways_round(source)) == [way]


def test_no_body_goes_round_its_entry() -> None:
    bodies = [path for path in (ROOT / "stages").glob("*.py") if path.stem != "__init__"]
    assert len(bodies) == 10
    found = {(path.name, way) for path in bodies for way in ways_round(path.read_text("utf-8"))}
    assert not found, "Stage offers what a body needs"


def opened(spec: StageSpec, out: Path) -> Stage:
    """A stage of a finished project, as its body gets it."""
    part = {"step": 2, "agent": "bo"} if spec.at == "step" else {}
    with open_stage(spec, None, Path("pipelines/small"), out=out, **part) as stage:
        return stage


def test_a_body_has_no_run_and_no_settings_but_those_declared(finished_copy: Path) -> None:
    stage = opened(UPDATE, finished_copy / "out")
    public = {name for name in dir(stage) if not name.startswith("_")}
    assert not public & {"pipeline", "layout"}
    assert not [
        name for name in dir(stage.inputs) if not name.startswith("_") and "settings" in name and name != "settings"
    ]
    assert stage.settings.optimizer
    with pytest.raises(AttributeError):
        _ = stage.settings.evaluation


@pytest.mark.parametrize("spec", [RESOLVE, REPORT_STAGE], ids=lambda spec: spec.name)
def test_who_has_settings_json_as_a_whole_has_every_setting(finished_copy: Path, spec: StageSpec) -> None:
    stage = opened(spec, finished_copy / "out")
    assert stage.settings.evaluation.benchmarks
    assert stage.settings.agents["ada"].tiny or stage.settings.agents["ada"].model
