"""A step that looks as it did when it was found done is not loaded and compared again; whatever else is."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import Cli, contents
from hacpo.pipeline.project import Pipeline
from hacpo.pipeline.records.bookkeeping import Books
from hacpo.pipeline.records.seen import Seen

RUN = "pipelines/small"
ARTIFACTS = Path("artifacts/small")


@pytest.fixture
def noted(finished_copy: Path, cli: Cli) -> Path:
    """A finished project whose steps have been found done."""
    assert cli("run", RUN).code == 0
    return finished_copy


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The stages that DVC compares with their records from here on."""
    seen: list[str] = []
    compare = Books.compare

    def noted_one(self: Books, stage: object, *, may_be_pruned: bool = False) -> bool:
        seen.append(stage.addressing.partition("/steps/")[2])  # type: ignore[attr-defined]
        return compare(self, stage, may_be_pruned=may_be_pruned)

    monkeypatch.setattr(Books, "compare", noted_one)
    return seen


def test_what_was_found_done_is_not_looked_at_again(noted: Path, cli: Cli, looked_at: list[str]) -> None:
    done = cli("run", RUN)
    assert done.code == 0
    assert "everything is done already" in done.err
    assert looked_at == []


def test_what_a_run_has_made_is_noted_by_it(project: Path, cli: Cli, looked_at: list[str], finished: Path) -> None:
    assert cli("run", RUN).code == 0
    looked_at.clear()
    assert cli("run", RUN).code == 0
    assert looked_at == []
    assert contents(project) == contents(finished)


def flipped(path: Path) -> None:
    """Another content of the same size."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(content)


CHANGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "another content": ("rollouts/step=0002/agent=ada/part-00000.parquet", flipped),
    "gone": ("verdicts/step=0001/agent=bo", shutil.rmtree),
    "a file more": ("pool/step=0002/learner=ada", lambda path: (path / "x").write_text("y")),
    "a checkpoint": ("checkpoints/step=0002/agent=ada/model.safetensors", flipped),
    "metrics": ("metrics/update/step=0001/ada.json", Path.unlink),
    "the report": ("report/index.html", Path.unlink),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_whatever_has_changed_is_made_again(
    change: str, noted: Path, finished: Path, cli: Cli, looked_at: list[str]
) -> None:
    place, done_to = CHANGES[change]
    done_to(next(ARTIFACTS.glob(place.replace("part-00000", "*"))))
    run = cli("run", RUN, "--yes")
    assert run.code == 0, run.err
    assert looked_at
    assert contents(noted) == contents(finished)


def test_an_object_that_is_gone_from_the_cache_comes_back(noted: Path, cli: Cli) -> None:
    lock = Path(RUN, "steps/0002/dvc.lock").read_text()
    listed = lock.partition("artifacts/small/metrics/update/step=0002/ada.json")[2].partition("md5: ")[2][:32]
    path = Path(".dvc/cache/files/md5", listed[:2], listed[2:])
    path.unlink()
    assert cli("run", RUN).code == 0
    assert path.is_file()


def test_a_lock_that_says_something_else_is_read(noted: Path, cli: Cli, looked_at: list[str]) -> None:
    lock = Path(RUN, "steps/0001/dvc.lock")
    lock.write_text(lock.read_text().replace("seed: 1", "seed: 2"))
    run = cli("run", RUN)
    assert run.code in (0, 10)
    assert any(stage.startswith("0001/") for stage in looked_at)


def test_a_pruned_checkpoint_stays_pruned_when_the_next_step_is_made(project: Path, cli: Cli) -> None:
    params = Path(RUN, "params.yaml")
    params.write_text(params.read_text() + "retention: {keep_last: 1}\n")
    assert cli("run", RUN, "--until", 2).code == 0
    assert not (ARTIFACTS / "checkpoints/step=0001/agent=ada").exists()
    shutil.rmtree(ARTIFACTS / "report")
    run = cli("run", RUN)
    assert run.code == 0
    assert "pruned and is needed" not in run.err
    params.write_text(params.read_text().replace("steps: 2", "steps: 3"))
    longer = cli("run", RUN)
    assert longer.code == 0, longer.err
    assert "pruned and is needed" not in longer.err
    assert (ARTIFACTS / "checkpoints/step=0003/agent=ada").is_dir()


def test_what_is_pruned_later_leaves_a_step_as_it_was(project: Path, cli: Cli, looked_at: list[str]) -> None:
    params = Path(RUN, "params.yaml")
    params.write_text(params.read_text().replace("steps: 2", "steps: 3") + "retention: {keep_last: 1}\n")
    assert cli("run", RUN).code == 0
    assert not (ARTIFACTS / "checkpoints/step=0002/agent=ada").exists()
    looked_at.clear()
    assert cli("run", RUN).code == 0
    assert looked_at == []
    shutil.rmtree(ARTIFACTS / "checkpoints/step=0003/agent=ada")  # the result is made again
    assert cli("run", RUN, "--yes").code == 0
    assert looked_at
    assert (ARTIFACTS / "checkpoints/step=0003/agent=ada").is_dir()


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"texts": 1}', '{"texts": ["a"], "lock": []}'])
def test_a_note_that_is_none_is_not_believed(noted: Path, cli: Cli, looked_at: list[str], text: str) -> None:
    pipeline = Pipeline.open(Path(RUN))
    (Seen(pipeline, Books(pipeline.root))._folder / "0001.json").write_text(text)
    assert cli("run", RUN).code == 0
    assert any(stage.startswith("0001/") for stage in looked_at)
    assert not [path for path in (ARTIFACTS / ".locks").iterdir() if path.name.startswith(".clock")]
