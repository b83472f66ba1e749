"""Checkpoints in DVC's cache: they follow `dvc checkout`, travel with `dvc push`, go with retention, cost no copy."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from conftest import Cli, contents, environment
from hacpo.layout import Layout
from hacpo.weights import policy_hash

RUN = "pipelines/small"
ARTIFACTS = Path("artifacts/small")
DVC = [sys.executable, "-m", "dvc"]
GIT = ["git", "-c", "user.name=test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false"]


def command(root: Path, *words: str, code: int = 0) -> str:
    done = subprocess.run(words, cwd=root, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def hacpo(root: Path, *words: object) -> None:
    """In this process, which has torch loaded already."""
    from hacpo.pipeline.command_line import run_app
    from stages.cli import app

    before = Path.cwd()
    os.chdir(root)
    try:
        assert run_app(app, [str(word) for word in words]) == 0
    finally:
        os.chdir(before)


def retain(root: Path, rules: str) -> None:
    path = root / RUN / "params.yaml"
    path.write_text(f"{path.read_text().split('retention:')[0]}retention: {rules}\n")


def commit(root: Path, message: str) -> None:
    command(root, *GIT, "add", "-A")
    command(root, *GIT, "commit", "-q", "-m", message)


def policies(root: Path, *steps: int) -> list[str]:
    layout = Layout(root / ARTIFACTS)
    return [policy_hash(layout.checkpoint(step, agent)) for step in steps for agent in ("ada", "bo")]


def cached(root: Path, step: int, name: str = "model.safetensors", agent: str = "ada") -> Path:
    """Where DVC's cache has a file of a checkpoint, or would have it."""
    content = (Layout(root / ARTIFACTS).checkpoint(step, agent) / name).read_bytes()
    md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
    return root / ".dvc/cache/files/md5" / md5[:2] / md5[2:]


def flagged(root: Path) -> list[int]:
    files = sorted((root / RUN / "steps").glob("*/dvc.yaml"))
    return [int(path.parent.name) for path in files if "cache: false" not in path.read_text()]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, finished: Path) -> Path:
    """A project in git with a remote of DVC: one run, with `retention.cache: last`, committed; then made with another
    learning rate, committed; then the first one taken back with git and DVC."""
    root = tmp_path_factory.mktemp("shared") / "project"
    shutil.copytree(finished, root, symlinks=True)
    config = root / ".dvc/config"
    config.write_text(config.read_text().replace("    no_scm = true\n", ""))
    (root / ".gitignore").write_text("/artifacts/\n/.dvc/cache\n/.dvc/tmp\n")
    command(root, "git", "init", "-q", "-b", "main")
    retain(root, "{cache: last}")
    hacpo(root, "prune", RUN)
    hacpo(root, "run", RUN)
    assert flagged(root) == [0, 2]
    command(root, *DVC, "remote", "add", "-q", "-d", "colleagues", str(root.parent / "remote"))
    commit(root, "first")
    params = root / RUN / "params.yaml"
    params.write_text(params.read_text().replace("learning_rate: 3.0e-4", "learning_rate: 6.0e-4"))
    hacpo(root, "run", RUN, "--jobs", 1, "--yes")
    commit(root, "second")
    return root


@pytest.fixture
def both(shared: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    root = tmp_path / "project"
    shutil.copytree(shared, root, symlinks=True)
    return root


def test_checkpoints_follow_git_and_dvc_checkout(
    both: Path, finished: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(both)
    second = policies(both, 2)
    assert set(second).isdisjoint(policies(finished, 2))
    command(both, "git", "checkout", "-q", "main~1")
    command(both, *DVC, "checkout")
    assert policies(both, 0, 2) == policies(finished, 0, 2)
    assert cli("export", RUN, "first", "--agent", "ada", "--step", 2).code == 0
    assert policy_hash(both / "first") == policies(finished, 2)[0]
    refused = cli("export", RUN, "between", "--agent", "ada", "--step", 1)  # not in the cache, so still the other's
    assert "its weights are not those that the files of this run were made with" in refused.error
    command(both, "git", "checkout", "-q", "main")
    command(both, *DVC, "checkout")
    assert policies(both, 2) == second


def test_a_clone_with_dvc_pull_is_whole(both: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    command(both, *DVC, "push")
    clone = tmp_path / "clone"
    command(tmp_path, "git", "clone", "-q", str(both), str(clone))
    monkeypatch.chdir(clone)
    command(clone, *DVC, "pull")
    assert policies(clone, 0, 2) == policies(both, 0, 2)
    status = cli("status", RUN).out
    assert "small: 2 of 2 steps done" in status
    assert "next: nothing, all outputs are there" in status
    assert "not here" not in status
    audit = cli("audit", RUN, "--deep")
    assert audit.code == 0, audit.out
    assert "everything is done" in cli("run", RUN).err
    committed = policies(both, 2)
    for root in (both, clone):
        params = root / RUN / "params.yaml"
        params.write_text(params.read_text().replace("steps: 2", "steps: 3"))
        hacpo(root, "run", RUN, "--jobs", 1)
        assert flagged(root) == [0, 3]
    mine, theirs = (
        {name: content for name, content in contents(root).items() if not name.startswith("checkpoints/step=0001")}
        for root in (both, clone)
    )
    assert mine == theirs
    # Step 2 is superseded, but the last commit names it.
    command(clone, "git", "checkout", "-q", "--", "pipelines")
    command(clone, *DVC, "checkout")
    assert policies(clone, 2) == committed


def test_the_cache_has_links_of_what_the_setting_names(cli: Cli, finished_copy: Path) -> None:
    assert flagged(finished_copy) == [2]
    os.link(Layout(ARTIFACTS).checkpoint(0, "ada") / "model.safetensors", "own.safetensors")
    assert "in DVC's cache: step 2" in cli("prune", RUN).out  # the start is linked elsewhere, and is not copied unasked
    first, middle, last = (cached(finished_copy, step) for step in (0, 1, 2))
    assert [path.exists() for path in (first, middle, last)] == [False, False, True]
    retain(finished_copy, "{cache: kept}")
    assert "in DVC's cache: steps 0-2" in cli("prune", RUN).out
    assert flagged(finished_copy) == [0, 1, 2]
    made = Layout(ARTIFACTS).checkpoint(1, "ada") / "model.safetensors"
    assert middle.stat().st_ino == made.stat().st_ino or middle.stat().st_nlink == 1  # a hard link, or a reflink
    assert first.stat().st_nlink == 1  # a copy: what the user calls it stays writable
    assert Path("own.safetensors").stat().st_mode & 0o200
    assert "checkpoints" not in command(finished_copy, *DVC, "status")
    retain(finished_copy, "{cache: none}")
    assert "in DVC's cache: none" in cli("prune", RUN).out
    assert not any(path.exists() for path in (first, middle, last))
    assert flagged(finished_copy) == []
    assert cli("run", RUN).code == 0
    assert cli("audit", RUN).code == 0


def test_what_is_pruned_leaves_the_cache_and_what_others_need_stays(cli: Cli, finished_copy: Path) -> None:
    retain(finished_copy, "{cache: kept}")
    assert cli("prune", RUN).code == 0
    mine, tokenizer = cached(finished_copy, 1), cached(finished_copy, 1, "tokenizer.json")
    theirs, tracked = (cached(finished_copy, 1, agent="bo"), cached(finished_copy, 1, "trainer/optimizer.safetensors"))
    listed = tracked.parent / tracked.name
    Path("mine.dvc").write_text(f"outs:\n- md5: {listed.parent.name}{listed.name}\n  path: optimizer.safetensors\n")
    retain(finished_copy, "{keep_last: 1, cache: last}")
    assert cli("prune", RUN).code == 0
    assert not mine.exists()
    assert not theirs.exists()
    assert tokenizer.exists()
    assert tracked.exists()
    assert flagged(finished_copy) == [0, 2]


def test_an_equal_run_keeps_its_checkpoints(cli: Cli, finished_copy: Path) -> None:
    shutil.copytree(RUN, "pipelines/twin")
    kept = cached(finished_copy, 2)
    retain(finished_copy, "{cache: none}")
    assert cli("prune", RUN).code == 0
    assert kept.exists()
    shutil.rmtree("pipelines/twin")
    assert cli("prune", RUN).code == 0
    assert not kept.exists()


def test_nothing_private_becomes_readable_unasked(cli: Cli, finished_copy: Path) -> None:
    retain(finished_copy, "{cache: none}")
    assert cli("prune", RUN).code == 0
    weights = Layout(ARTIFACTS).checkpoint(2, "ada") / "model.safetensors"
    weights.chmod(0o600)
    retain(finished_copy, "{}")
    said = cli("run", RUN)
    assert said.code == 0
    assert said.err.count("checkpoints are not in DVC's cache: model.safetensors is not readable to all") == 1
    assert flagged(finished_copy) == [0]
    assert weights.stat().st_mode & 0o777 == 0o600
    retain(finished_copy, "{cache: last}")
    assert "in DVC's cache: steps 0, 2" in cli("prune", RUN).out


def test_a_cache_on_another_filesystem_is_filled_only_where_asked(cli: Cli, finished_copy: Path) -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == finished_copy.stat().st_dev:
        pytest.skip("there is no other filesystem here")
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        retain(finished_copy, "{cache: none}")
        assert cli("run", RUN).code == 0  # takes the newest out of the cache here
        shutil.copytree(".dvc/cache", folder, dirs_exist_ok=True)
        retain(finished_copy, "{}")
        config = Path(".dvc/config")
        config.write_text(f"{config.read_text()}[cache]\n    dir = {folder}\n")
        said = cli("prune", RUN).out
        assert "the cache is where neither reflinks nor hard links reach" in said
        assert flagged(finished_copy) == []
        retain(finished_copy, "{cache: last}")
        assert "in DVC's cache: steps 0, 2" in cli("prune", RUN).out
        assert list(Path(folder).rglob(cached(finished_copy, 2).name))


def test_a_kill_while_the_cache_is_filled(cli: Cli, finished_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import hacpo.pipeline.caching as caching

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    retain(finished_copy, "{cache: kept}")
    with monkeypatch.context() as patch:
        patch.setattr(caching, "set_cached", killed)
        assert cli("prune", RUN).code != 0
    assert flagged(finished_copy) == [2]
    assert cli("prune", RUN).code == 0
    assert flagged(finished_copy) == [0, 1, 2]
    retain(finished_copy, "{cache: last}")
    with monkeypatch.context() as patch:
        patch.setattr(caching.CheckpointCache, "_drop", killed)
        assert cli("prune", RUN).code != 0
    assert cached(finished_copy, 1).exists()
    assert cli("prune", RUN).code == 0
    assert not cached(finished_copy, 1).exists()


def test_an_export_is_its_owners(cli: Cli, finished_copy: Path) -> None:
    before = cached(finished_copy, 2).read_bytes()
    assert cli("export", RUN, "model", "--agent", "ada", "--step", 2).code == 0
    exported = finished_copy / "model" / "model.safetensors"
    assert exported.stat().st_mode & 0o200
    assert exported.stat().st_nlink == 1
    assert cached(finished_copy, 2).read_bytes() == before


def test_checkpoints_that_are_not_here_are_said_once(cli: Cli, finished_copy: Path) -> None:
    shutil.rmtree(ARTIFACTS / "checkpoints")
    status = cli("status", RUN).out
    assert "small: 2 of 2 steps done" in status
    said = (
        "checkpoints are not here: steps 0-2; `dvc pull` brings step 2 if pushed, `hacpo run pipelines/small` trains "
        "the others again"
    )
    assert status.count("not here") == status.count(said) == 1
    audit = cli("audit", RUN)
    assert audit.code == 0, audit.out
    assert " ".join(audit.out.split()).count(said) == 1
    for words, remedy in (
        (("export", RUN, "model", "--agent", "ada", "--step", 2), "dvc pull pipelines/small/steps/0002/dvc.yaml"),
        (("evaluate", RUN, "--agent", "ada", "--step", 0), "hacpo run pipelines/small"),
    ):
        assert f"Run `{remedy}`" in cli(*words).error
    assert cli("run", RUN, "--jobs", 1).code == 0
    assert "not here" not in cli("status", RUN).out
