"""The settings that stages depend on are looked up as DVC looks them up, in a file that is parsed once."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from dvc.dependency import param
from dvc.fs import LocalFileSystem

from hacpo.pipeline.records.parameters import parsed_once

READ = getattr(param.read_param_file, "__wrapped__", param.read_param_file)
CONTENT = {"seed": 1, "agents": {"ada": {"sampling": {"stop": ["x", {"y": None}]}}}, "odd": {"a.b": 1, "a": {"b": 2}}}
KEYS = ["seed", "agents", "agents.ada.sampling", "agents.ada.sampling.stop", "agents.bo", "seed.x", "none"]


@pytest.mark.parametrize(
    "keys", [[key] for key in [*KEYS, "odd.a.b", "agents.*", "agents.ada.sampling.stop.1"]] + [KEYS]
)
def test_every_key_finds_what_dvc_finds(tmp_path: Path, keys: list[str]) -> None:
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(CONTENT))
    fs = LocalFileSystem()
    assert parsed_once(READ)(fs, str(path), keys, flatten=True) == READ(fs, str(path), keys, flatten=True)


def test_a_file_is_parsed_again_when_it_has_changed_and_only_then(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    parsed = 0

    def read(*arguments: Any, **how: Any) -> Any:
        nonlocal parsed
        parsed += 1
        return READ(*arguments, **how)

    look_up, fs = parsed_once(read), LocalFileSystem()
    for value, times in ((1, 1), (2, 2)):
        scratch = tmp_path / "new"
        scratch.write_text(json.dumps({"a": {"b": value}}))
        os.utime(scratch, ns=(0, 0))  # by its time and size it is the same file
        scratch.replace(path)
        for _ in range(3):
            found = look_up(fs, str(path), ["a"], flatten=True)
            assert found == {"a": {"b": value}}
            found["a"]["b"] = 3  # nobody's but the caller's
        assert parsed == times
