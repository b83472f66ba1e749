"""Checkpoints in DVC's cache: they follow `dvc checkout`, travel with `dvc push`, go with retention, cost no copy."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from conftest import Cli, contents, environment
from hacpo.artifacts.layout import Layout
from hacpo.artifacts.weights import policy_hash

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
    from hacpo.cli import app
    from hacpo.pipeline.execution.command_line import run_app

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
    import hacpo.pipeline.records.caching as caching

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


def test_a_kill_before_a_step_made_anew_is_in_the_cache(
    cli: Cli, finished_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hacpo.pipeline.running.runner import Runner

    retain(finished_copy, "{cache: last}")
    assert cli("prune", RUN).code == 0
    params = Path(RUN, "params.yaml")
    params.write_text(params.read_text().replace("learning_rate: 3.0e-4", "learning_rate: 6.0e-4"))

    def killed(walk: object, step: int, *_: object, **__: object) -> None:
        if step == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "_close", killed)
        assert cli("run", RUN, "--jobs", 1, "--yes").code != 0
    assert flagged(finished_copy) == [0]
    assert "not in cache" not in command(finished_copy, *DVC, "status", f"{RUN}/steps/0002/dvc.yaml")
    made = policies(finished_copy, 2)
    repeated = command(finished_copy, *DVC, "repro", f"{RUN}/steps/0002/dvc.yaml")
    assert "Running stage 'update" not in repeated
    command(finished_copy, *DVC, "checkout", "--force")
    assert policies(finished_copy, 2) == made
    assert cli("run", RUN, "--jobs", 1).code == 0
    assert flagged(finished_copy) == [0, 2]


def test_a_cut_off_dvc_file_says_nothing_of_the_cache(cli: Cli, finished_copy: Path) -> None:
    file = Path(RUN, "steps/0001/dvc.yaml")
    whole = file.read_text()
    for cut in (0, 200, whole.index("cache: false") - 12, whole.index("cache: false") - 11):
        file.write_text(whole[:cut])
        assert cli("plan", RUN).code == 0
        assert flagged(finished_copy) == [2]


def test_plan_beside_a_run_brings_no_flag_back(cli: Cli, finished_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import hacpo.pipeline.records.dvc_files as dvc_files
    from hacpo.errors import BusyError
    from hacpo.pipeline.project import Pipeline
    from hacpo.pipeline.records.bookkeeping import Books

    rendered, taken = dvc_files.rendered, []

    def meanwhile(pipeline: Pipeline) -> dict[Path, str]:
        files = rendered(pipeline)
        with contextlib.suppress(BusyError), Books(pipeline.root).open(0):  # as a run does, between two looks of plan
            dvc_files.set_cached(pipeline, 2, cached=False)
            taken.append(2)
        return files

    assert flagged(finished_copy) == [2]
    monkeypatch.setattr(dvc_files, "rendered", meanwhile)
    assert cli("plan", RUN).code == 0
    assert flagged(finished_copy) == [step for step in [2] if step not in taken]


def test_what_a_stage_of_the_users_has_made_stays_in_the_cache(cli: Cli, finished_copy: Path) -> None:
    retain(finished_copy, "{cache: last}")
    assert cli("run", RUN, "--jobs", 1).code == 0
    objects = {}
    for agent in ("ada", "bo"):
        weights = finished_copy / f"artifacts/small/checkpoints/step=0002/agent={agent}/model.safetensors"
        md5 = hashlib.md5(weights.read_bytes()).hexdigest()
        objects[agent] = finished_copy / ".dvc/cache/files/md5" / md5[:2] / md5[2:]
        assert objects[agent].is_file()
    Path("mine").mkdir()
    named = f"{objects['ada'].parent.name}{objects['ada'].name}"
    Path("mine/dvc.lock").write_text(f"stages:\n  make:\n    cmd: make\n    outs:\n    - {{path: w, md5: {named}}}\n")
    retain(finished_copy, "{cache: none}")
    assert cli("prune", RUN).code == 0
    assert {agent: path.is_file() for agent, path in objects.items()} == {"ada": True, "bo": False}


def test_what_a_commit_names_stays_in_the_cache(cli: Cli, finished_copy: Path) -> None:
    config = Path(".dvc/config")
    config.write_text(config.read_text().replace("    no_scm = true\n", ""))
    Path(".gitignore").write_text("/artifacts/\n/.dvc/cache\n/.dvc/tmp\n")
    root = finished_copy
    command(root, "git", "init", "-q", "-b", "main")
    commit(root, "two steps")
    committed = policies(root, 2)
    command(root, "git", "checkout", "-q", "-b", "longer")
    params = Path(RUN, "params.yaml")
    params.write_text(params.read_text().replace("steps: 2", "steps: 3"))
    assert cli("run", RUN, "--jobs", 1).code == 0
    commit(root, "three steps")
    retain(root, "{keep_last: 1, cache: none}")
    assert cli("prune", RUN).out.count("steps 0, 2-3 are still in DVC's cache, because a commit names them") == 1
    assert flagged(root) == []
    assert not Layout(ARTIFACTS).checkpoint(2, "ada").exists()
    command(root, "git", "checkout", "-q", "-f", "main")
    command(root, *DVC, "checkout", "--force")
    assert policies(root, 2) == committed


def test_all_that_git_names_is_found(tmp_path: Path) -> None:
    from hacpo.pipeline.records.history import History

    root = tmp_path / "project"
    lock = root / "pipelines/small/steps/0001/dvc.lock"
    lock.parent.mkdir(parents=True)
    history = History(root)
    assert history.named() == set()  # no repository
    command(root, "git", "init", "-q", "-b", "main")
    assert history.named() == set()  # no commit
    hashes = [f"{number:032x}" for number in range(1, 7)]
    lock.write_text(f"md5: {hashes[0]}.dir\n")
    commit(root, "first")
    assert history.named() == {hashes[0]}
    command(root, "git", "checkout", "-q", "-b", "side")
    lock.write_text(f"md5: {hashes[1]}.dir\n")
    commit(root, "side")
    command(root, "git", "checkout", "-q", "main")
    lock.write_text(f"md5: {hashes[2]}.dir\n")
    commit(root, "main")
    command(root, *GIT, "merge", "-q", "-s", "ours", "-m", "nothing of it", "side")
    command(root, "git", "branch", "-q", "-D", "side")
    (root / "own.dvc").write_text(f"outs:\n- md5: {hashes[3]}\n")
    command(root, "git", "add", "own.dvc")
    command(root, *GIT, "stash", "-q")
    (root / "own.dvc").write_text(f"outs:\n- md5: {hashes[4]}\n")
    command(root, "git", "add", "own.dvc")
    command(root, *GIT, "stash", "-q")
    assert history.named() == set(hashes[:5])
    assert History(root).named() == set(hashes[:5])
    beside = tmp_path / "beside"
    command(root, "git", "worktree", "add", "-q", "--detach", str(beside))
    (beside / "own.dvc").write_text(f"outs:\n- md5: {hashes[5]}\n")
    commit(beside, "on no branch, in another work tree")
    assert history.named() == set(hashes)
    shutil.rmtree(root / ".git/objects")
    assert History(root).named() is None


def test_nothing_is_taken_out_of_a_cache_outside_the_project(cli: Cli, finished_copy: Path, tmp_path: Path) -> None:
    kept = cached(finished_copy, 2)
    name = kept.relative_to(finished_copy / ".dvc/cache")
    Path(".dvc/cache").rename(tmp_path / "cache")
    config = Path(".dvc/config")
    config.write_text(f"{config.read_text()}[cache]\n    dir = {tmp_path / 'cache'}\n")
    retain(finished_copy, "{cache: none}")
    said = cli("prune", RUN).out
    assert "step 2 may still be in DVC's cache, which lies outside the project" in said
    assert flagged(finished_copy) == []
    assert (tmp_path / "cache" / name).exists()


def test_links_into_the_cache_become_files_before_it_lets_go(cli: Cli, finished_copy: Path) -> None:
    config = Path(".dvc/config")
    config.write_text(f"{config.read_text()}[cache]\n    type = symlink\n")
    before = policies(finished_copy, 2)
    weights, object_ = Layout(ARTIFACTS).checkpoint(2, "ada") / "model.safetensors", cached(finished_copy, 2)
    shutil.rmtree(ARTIFACTS / "checkpoints/step=0002")
    command(finished_copy, *DVC, "checkout", f"{RUN}/steps/0002/dvc.yaml")
    assert weights.is_symlink()
    assert cli("export", RUN, "model", "--agent", "ada", "--step", 2).code == 0
    assert policy_hash(Path("model")) == before[0]
    assert not any(path.is_symlink() for path in Path("model").iterdir())
    retain(finished_copy, "{cache: none}")
    assert cli("prune", RUN).code == 0
    assert not object_.exists()
    assert policies(finished_copy, 2) == before
    assert cli("run", RUN, "--jobs", 1).code == 0
    assert cli("audit", RUN).code == 0
    state = weights.with_name("trainer") / "optimizer.safetensors"
    state.unlink()
    state.symlink_to("gone")
    audit = cli("audit", RUN)
    assert audit.code == 1, audit.out + audit.err


def test_a_kill_among_the_files_of_a_checkpoint_leaves_nothing_for_good(
    cli: Cli, finished_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hacpo.pipeline.records.caching import CheckpointCache

    put = CheckpointCache._put

    def killed(self: CheckpointCache, path: Path, oid: str, *, linked_elsewhere: bool) -> None:
        put(self, path, oid, linked_elsewhere=linked_elsewhere)
        if "step=0001" in str(path) and path.name == "optimizer.safetensors":
            raise KeyboardInterrupt

    state = cached(finished_copy, 1, "trainer/optimizer.safetensors")
    retain(finished_copy, "{cache: kept}")
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointCache, "_put", killed)
        assert cli("prune", RUN).code != 0
    assert state.exists()
    retain(finished_copy, "{cache: last, keep_last: 1}")
    assert cli("prune", RUN).code == 0
    assert not state.exists()


def test_dvc_files_of_others_that_cannot_be_read(cli: Cli, finished_copy: Path) -> None:
    Path("old.dvc").symlink_to("gone.dvc")
    os.mkfifo("pipe.dvc")
    retain(finished_copy, "{cache: none}")
    assert cli("prune", RUN).code == 0
    assert flagged(finished_copy) == []


def test_disk_fsync_holds_for_what_is_done_by_hand(
    cli: Cli, finished_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HACPO_FSYNC", raising=False)
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", flushed.append)
    params = Path(RUN, "params.yaml")
    params.write_text(params.read_text() + "disk: {fsync: false}\n")
    retain(finished_copy, "{cache: kept}")
    for words in (("prune", RUN), ("plan", RUN), ("copy", RUN, "pipelines/variant")):
        assert cli(*words).code == 0
        assert flushed == [], words


def test_without_the_model_folders_a_run_says_which(cli: Cli, finished_copy: Path) -> None:
    retain(finished_copy, "{cache: last}")
    assert cli("prune", RUN).code == 0
    assert cli("run", RUN, "--jobs", 1).code == 0
    Path("models").unlink()
    assert "2 of 2 steps done" in cli("status", RUN).out
    audit = cli("audit", RUN)
    assert audit.code == 1
    assert "small: 2 findings" in audit.out
    assert "models/ada" in audit.out
    assert cli("export", RUN, "model", "--agent", "ada", "--step", 2).code == 0
    assert "models/ada" in cli("run", RUN, "--jobs", 1).error


def test_a_step_brought_back_without_its_objects_is_not_said_to_be_cached(cli: Cli, finished_copy: Path) -> None:
    from hacpo.pipeline.project import Pipeline
    from hacpo.pipeline.records.dvc_files import set_cached

    retain(finished_copy, "{keep_last: 1}")
    assert cli("run", RUN, "--jobs", 1).code == 0
    set_cached(Pipeline.open(Path(RUN)), 1, cached=True)  # as after `git checkout` of a state in which it was
    assert 1 in flagged(finished_copy)
    assert cli("restore", RUN, "--agent", "ada", "--step", 1).code == 0
    assert 1 not in flagged(finished_copy)
    assert "not in cache" not in command(finished_copy, *DVC, "status", f"{RUN}/steps/0001/dvc.yaml")


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
        "checkpoints are not here: steps 0-2; `dvc checkout` brings step 2, `hacpo run pipelines/small` trains the "
        "others again"
    )
    assert status.count("not here") == status.count(said) == 1
    audit = cli("audit", RUN)
    assert audit.code == 0, audit.out
    assert " ".join(audit.out.split()).count(said) == 1
    for words, remedy in (
        (("export", RUN, "model", "--agent", "ada", "--step", 2), "dvc checkout pipelines/small/steps/0002/dvc.yaml"),
        (("evaluate", RUN, "--agent", "ada", "--step", 0), "hacpo run pipelines/small"),
    ):
        assert f"Run `{remedy}`" in cli(*words).error
    command(finished_copy, *DVC, "checkout", f"{RUN}/steps/0002/dvc.yaml")
    assert cli("export", RUN, "model", "--agent", "ada", "--step", 2).code == 0
    # What the cache does not have comes from a remote.
    cached(finished_copy, 2).unlink()
    shutil.rmtree(ARTIFACTS / "checkpoints")
    assert "; `dvc pull` brings step 2 if pushed, " in cli("status", RUN).out
    assert cli("run", RUN, "--jobs", 1).code == 0
    assert "not here" not in cli("status", RUN).out
