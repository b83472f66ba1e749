"""What a step costs does not grow with the steps before it: counted, never timed."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from conftest import Cli
from hacpo.pipeline.records.bookkeeping import Books
from hacpo.pipeline.running.runner import Runner

RUN = "pipelines/small"
EARLY, LATE = 3, 12


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[int, Counter[str]]:
    """Step -> what had happened, and what is kept, when it was closed."""
    from dvc.stage import PipelineStage
    from dvc_data.hashfile import hash as hashing
    from fsspec.implementations.memory import MemoryFileSystem
    from ruamel.yaml import YAML

    happened: Counter[str] = Counter()
    steps: dict[int, Counter[str]] = {}

    def counting(owner: Any, name: str, what: str) -> None:
        real = getattr(owner, name)

        def count(*arguments: Any, **options: Any) -> Any:
            happened[what] += 1
            return real(*arguments, **options)

        monkeypatch.setattr(owner, name, count)

    for owner, name, what in (
        (YAML, "load", "YAML texts parsed"),
        (hashing, "_hash_file", "files hashed"),
        (os, "fsync", "flushes"),
        (Books, "compare", "stages compared with their records"),
        (Books, "_lock", "times that DVC's lock was taken"),
    ):
        counting(owner, name, what)
    close = Runner._close

    def closed(self: Runner, step: int, tasks: Sequence[Any], *, is_last: bool) -> None:
        close(self, step, tasks, is_last=is_last)
        gc.collect()
        kept = {
            "entries in the file system in memory": len(MemoryFileSystem.store),
            "open files": len(os.listdir("/proc/self/fd")),
            "stages in memory": sum(type(item) is PipelineStage for item in gc.get_objects()),
        }
        steps[step] = happened + Counter(kept)
        happened.clear()

    monkeypatch.setattr(Runner, "_close", closed)
    return steps


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts open files in /proc")
def test_a_late_step_costs_what_an_early_one_costs(project: Path, cli: Cli, counted: dict[int, Counter[str]]) -> None:
    params = Path(RUN, "params.yaml")
    text = params.read_text().replace("steps: 2\n", f"steps: {LATE + 2}\n", 1)
    text = text.replace("group_size: 4, max_new_tokens: 26", "group_size: 2, max_new_tokens: 2")
    text = text.replace("prompts: 8, minibatch_prompts: 4", "prompts: 2, minibatch_prompts: 2")
    params.write_text(
        text.replace("  every: 2\n", "  every: 100\n") + "retention: {keep_last: 1}\ndisk: {fsync: true}\n"
    )
    run = cli("run", RUN, "--jobs", "1", "--until", LATE + 1)
    assert run.code == 0, run.err
    assert not {
        what: (counted[EARLY][what], times) for what, times in counted[LATE].items() if times > counted[EARLY][what]
    }
    assert counted[LATE]["stages compared with their records"] == 0
