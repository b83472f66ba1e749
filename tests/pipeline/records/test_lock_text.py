"""A stage is recorded in a dvc.lock as DVC would do it, without the other stages being parsed and printed."""

from __future__ import annotations

from typing import Any

import pytest
from dvc.utils.serialize import dumps_yaml, parse_yaml

from hacpo.pipeline.records.lock_text import with_stage

ORDER = ["warmup-ada", "generate@ada", "generate@bo", "verify@ada"]


def place(name: str) -> int:
    return ORDER.index(name) if name in ORDER else len(ORDER)


def entry(name: str, size: int) -> dict[str, Any]:
    return {
        "cmd": f"hacpo {name} pipelines/small --agent ada --a-long-option {'and its long value ' * 6}",
        "deps": [{"path": "artifacts/small/prompts", "hash": "md5", "md5": "0e" * 16, "size": size}],
        "params": {"artifacts/small/settings.json": {"agents.ada": {"tiny": None, "text": "a: 'b' # c\n\n  d\n"}}},
    }


def lock(*names: str, size: int = 1) -> str:
    return dumps_yaml({"schema": "2.0", "stages": {name: entry(name, size) for name in names}})


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((), ("generate@bo",)),
        (("warmup-ada", "verify@ada"), ("warmup-ada", "generate@bo", "verify@ada")),
        (("of-the-user", "verify@ada"), ("generate@bo", "verify@ada", "of-the-user")),
        (("generate@bo",), ("generate@bo",)),
    ],
)
def test_a_stage_comes_to_its_place_and_the_rest_stays(before: tuple[str, ...], after: tuple[str, ...]) -> None:
    text = lock(*before, size=1) if before else ""
    new = with_stage(text, "generate@bo", entry("generate@bo", 2), place, "dvc.lock")
    stages = {name: entry(name, 2 if name == "generate@bo" else 1) for name in after}
    assert new == dumps_yaml({"schema": "2.0", "stages": stages})


@pytest.mark.parametrize(
    "text",
    [
        "stages:\n  verify@ada:\n    cmd: x\nschema: '2.0'\n",
        "schema: '2.0'\nstages:\n  'verify@ada': {cmd: x}\n",
        "schema: '2.0'\nstages:\n# mine\n  verify@ada:\n    cmd: x\n",
        "schema: '2.0'\n",
        "schema: '2.0'\nstages:\n  verify@ada:\n    cmd: x\n\tdeps: y\n"[:-9],
    ],
)
def test_a_lock_of_another_form_keeps_what_it_says(text: str) -> None:
    said = parse_yaml(text, "dvc.lock").get("stages", {})
    new = parse_yaml(with_stage(text, "generate@bo", entry("generate@bo", 2), place, "dvc.lock"), "dvc.lock")
    assert new == {"schema": "2.0", "stages": {**said, "generate@bo": entry("generate@bo", 2)}}
