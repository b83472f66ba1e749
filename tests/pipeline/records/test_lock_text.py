"""A stage is recorded in a dvc.lock as DVC would do it, without the other stages being parsed and printed."""

from __future__ import annotations

from typing import Any

import pytest
from dvc.utils.serialize import dumps_yaml, parse_yaml

from hacpo.pipeline.records.lock_text import output_md5, printed, says, with_stage

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


def plain(**changed: Any) -> dict[str, Any]:
    """What DVC records of a stage of ours."""
    path = changed.pop("path", "artifacts/small/prompts/step=0001")
    return {
        "cmd": "hacpo generate pipelines/small --step 0001 --agent ada",
        "deps": [{"path": path, "hash": "md5", "md5": "0e1a" * 8 + ".dir", "size": 12, "nfiles": 3}],
        "params": {
            "artifacts/small/settings.json": {"agents.ada": {"tiny": None, "text": "a: 'b' # c\n\n  d\n"}, "x": 0.1}
        },
        "outs": [
            {"path": "artifacts/small/metrics/generate/step=0001/ada.json", "hash": "md5", "md5": "f0" * 16, "size": 1}
        ],
        **changed,
    }


@pytest.mark.parametrize("indent", [0, 4])
def test_an_entry_is_printed_as_dvc_prints_it(indent: int) -> None:
    library = dumps_yaml({"a": {"b": plain()}} if indent else plain())
    text = printed(plain(), indent)
    assert text == (library.removeprefix("a:\n  b:\n") if indent else library)


@pytest.mark.parametrize(
    "path", ["12", "1e5", "true", "null", "a b", "a: b", "a #b", "[a", "x" * 90, "äöü/x", "~", "-/x"]
)
@pytest.mark.parametrize("md5", ["1234" * 8, "1e12" * 8, "f0" * 16])
def test_what_yaml_would_read_otherwise_is_left_to_dvc(path: str, md5: str) -> None:
    odd = plain(path=path)
    odd["outs"][0]["md5"] = md5
    assert printed(odd, 4) is None
    text = with_stage("", "generate@ada", odd, place, "dvc.lock")
    assert text == dumps_yaml({"schema": "2.0", "stages": {"generate@ada": odd}})
    assert says(text, "generate@ada", odd)  # else its step would be compared in every run
    assert not says(text, "generate@ada", plain())


def test_a_command_beyond_the_width_is_folded_as_dvc_folds_it() -> None:
    long = plain(cmd="hacpo generate pipelines/small --step 0001 --agent a-name-that-is-rather-long-for-an-agent")
    text = with_stage("", "generate@ada", long, place, "dvc.lock")
    assert text == dumps_yaml({"schema": "2.0", "stages": {"generate@ada": long}})


def test_the_hash_of_an_output_is_read_from_the_text() -> None:
    def item(path: str, letter: str) -> dict[str, str]:
        return {"path": path, "hash": "md5", "md5": f"{letter * 32}.dir"}

    start, made = "artifacts/small/checkpoints/step=0000/agent=ada", "artifacts/small/checkpoints/step=0001/agent=ada"
    entry = {
        "cmd": "hacpo update",
        "deps": [item(start, "a")],
        "outs": [item("artifacts/small/x", "b"), item(made, "c")],
    }
    text = with_stage("", "update@ada", entry, lambda _: 0, "dvc.lock")
    assert output_md5(text, made) == f"{'c' * 32}.dir"
    assert output_md5(text, start) == ""  # read, and not made
    assert output_md5(text, made.replace("=", ".")) == ""
