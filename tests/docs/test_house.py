"""docs/house.md: the entry that it shows is what is stamped."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from conftest import ROOT
from hacpo.pipeline.project import Pipeline
from hacpo.pipeline.records.dvc_files import rendered

SHOWN = re.compile(r"What `hacpo plan` writes of it:\n\n```yaml\n(.*?)```\n", re.DOTALL)
LEFT_OUT = re.compile(r" *# \.\.\.\n")
"""A line that stands for any number of lines."""


def test_the_entry_of_a_stage_is_the_one_that_is_stamped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    shown = SHOWN.search((ROOT / "docs/house.md").read_text("utf-8"))
    assert shown is not None
    stamped = rendered(Pipeline.open(Path("pipelines/smoke")))[Path("pipelines/smoke/steps/0001/dvc.yaml")]
    start = stamped.index("  pool:\n")
    entry = stamped[start : stamped.index("  advantage:\n", start)]
    wanted = r"(?:.*\n)+".join(map(re.escape, LEFT_OUT.split(shown[1])))
    assert re.fullmatch(wanted, entry), f"docs/house.md, beside what is stamped:\n{entry}"
