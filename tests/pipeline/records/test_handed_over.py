"""A run that a stranger has handed over as docs/sharing.md says, with more in it than a run has."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import Cli, environment

STEP = "pipelines/small --step 1"


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """A file that nobody else may read."""
    path = tmp_path / "id_rsa"
    path.write_text("a private key")
    path.chmod(0o600)
    return path


@pytest.mark.parametrize(
    "words",
    [
        ["update", "pipelines/small", "--step", "2", "--agent", "ada"],
        ["generate", "pipelines/small", "--step", "2", "--agent", "ada"],
        ["export", "pipelines/small", "exported", "--agent", "ada", "--step", "1"],
    ],
)
def test_a_link_in_a_checkpoint_is_refused(finished_copy: Path, cli: Cli, private: Path, words: list[str]) -> None:
    """Else the file would be in the next checkpoint, and in whatever is exported or shared of it."""
    checkpoints = finished_copy / "artifacts" / "small" / "checkpoints"
    (checkpoints / "step=0001" / "agent=ada" / "LICENSE.txt").symlink_to(private)
    newest = checkpoints / "step=0002" / "agent=ada"
    before = sorted(newest.iterdir())
    result = cli(*words)
    assert result.code == 6
    assert "LICENSE.txt: is no file of this checkpoint (found a link to" in result.error
    assert sorted(newest.iterdir()) == before
    assert not Path("exported").exists()


def test_a_link_in_a_start_is_not_copied_with_the_run(finished_copy: Path, cli: Cli, private: Path) -> None:
    start = finished_copy / "artifacts" / "small" / "checkpoints" / "step=0000" / "agent=ada"
    linked = start / "tokenizer.json"
    private.write_bytes(linked.read_bytes())  # else the start is not the recorded one, and not taken over
    linked.unlink()
    linked.symlink_to(private)
    result = cli("copy", "pipelines/small", "pipelines/next")
    assert "tokenizer.json: is no file of this checkpoint" in result.error
    assert not Path("artifacts/next/checkpoints/step=0000/agent=ada").exists()


def moved_behind_a_link(link: Path, home: Path) -> dict[str, bytes]:
    """Put what lies there into somebody's home, and a link in its place; returns what is in the home."""
    shutil.move(link, home)
    link.symlink_to(home, target_is_directory=home.is_dir())
    return everything(home)


def everything(top: Path) -> dict[str, bytes]:
    """Every file below a folder, or the file."""
    return {str(path): path.read_bytes() for path in sorted([top, *top.rglob("*")]) if path.is_file()}


@pytest.mark.parametrize(
    "linked",
    [
        "artifacts/small/checkpoints",
        "artifacts/small/checkpoints/step=0000",
        "artifacts/small/checkpoints/step=0001/agent=ada",
        "artifacts/small/rollouts/step=0002",
        "artifacts/small/pool/step=0001/learner=bo",
        "artifacts/small/metrics/update",
        "artifacts/small/report",
        "artifacts/small/.locks",
        "artifacts/small/.saved",
        "pipelines/small/steps",
        "pipelines/small/steps/0001",
        "pipelines/small/steps/0001/dvc.lock",
        "pipelines/small/.keys",
    ],
)
def test_no_file_of_a_run_is_written_through_a_link(finished_copy: Path, cli: Cli, tmp_path: Path, linked: str) -> None:
    """Or another run's checkpoints, and anybody's files, would be replaced, and what lies beside them removed."""
    link, home, params = finished_copy / linked, tmp_path / "home", Path("pipelines/small/params.yaml")
    if not link.exists():
        link.mkdir()
    before = moved_behind_a_link(link, home)
    params.write_text(params.read_text().replace("seed: 1", "seed: 2"))
    for words in (
        ["run", "pipelines/small", "--yes"],
        ["plan", "pipelines/small"],
        ["resolve", "pipelines/small"],
        ["warmup", "pipelines/small", "--agent", "ada"],
        ["copy", "pipelines/small", "pipelines/next"],
        ["export", "pipelines/small", "exported", "--agent", "ada", "--step", "1"],
        ["restore", "pipelines/small", "--agent", "ada", "--step", "1"],
        ["status", "pipelines/small"],
    ):
        result = cli(*words)
        assert result.code == 4, (words, result)
        assert f"{linked}: is a link, and no file of a run is written or read through one" in result.error
        assert f"(found a link to {home}). Remove it" in result.error
    assert everything(home) == before
    assert not Path("exported").exists()
    assert not Path("pipelines/next").exists()


def test_a_run_on_another_disk_and_the_users_own_links_are_worked_with(
    finished_copy: Path, cli: Cli, tmp_path: Path
) -> None:
    moved_behind_a_link(finished_copy / "artifacts", tmp_path / "large disk")
    moved_behind_a_link(finished_copy / "artifacts" / "small", tmp_path / "larger disk")
    (finished_copy / "artifacts" / "small" / "my notes").symlink_to(tmp_path)
    result = cli("run", "pipelines/small")
    assert result.code == 0, result.err
    report = tmp_path / "larger disk" / "report" / "index.html"
    report.unlink()
    assert cli("report", "pipelines/small").code == 0
    assert report.is_file()


def test_links_that_dvc_makes_are_replaced_and_their_objects_kept(finished_copy: Path, cli: Cli) -> None:
    """With `cache.type symlink` every file of an output is one."""
    config, objects = Path(".dvc/config"), Path(".dvc/cache/files/md5")
    config.write_text(f"{config.read_text()}[cache]\n    type = symlink\n")
    dvc = [sys.executable, "-m", "dvc", "checkout", "--relink", "pipelines/small/dvc.yaml"]
    subprocess.run(dvc, check=True, capture_output=True, env=environment())
    settings, schedule = Path("artifacts/small/settings.json"), Path("artifacts/small/schedule.parquet")
    assert settings.is_symlink()
    assert schedule.is_symlink()
    before = everything(objects)
    assert cli("resolve", "pipelines/small").code == 0
    assert not settings.is_symlink()
    result = cli("run", "pipelines/small")
    assert result.code == 0, result.err
    assert everything(objects).items() >= before.items()


def test_a_saved_checkpoint_takes_a_models_files_alone(models: Path, tmp_path: Path, private: Path) -> None:
    from hacpo.engines.models.checkpoint import load_model, save_model
    from hacpo.settings.engine import EngineSettings

    like, target = tmp_path / "like", tmp_path / "target"
    shutil.copytree(models / "ada", like)
    target.mkdir()
    (like / "LICENSE.txt").symlink_to(private)
    (like / "notes.txt").write_text("no model's file")
    (like / "NOTICE").write_text("free")
    save_model(load_model(like, EngineSettings(device="cpu")), target, like=like)
    names = {path.name for path in target.iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "NOTICE"} <= names
    assert not {"LICENSE.txt", "notes.txt"} & names


@pytest.mark.parametrize("way", ["console script", "module"])
def test_no_file_beside_the_pipelines_is_imported(finished_copy: Path, way: str) -> None:
    """Workers are `python -c`, which looks for modules in the working directory first."""
    for name in ("multiprocessing", "sympy", "tqdm"):
        (finished_copy / f"{name}.py").write_text("open('run_by_a_stranger', 'w').close()\n")
    words = ["run", "pipelines/small", "--jobs", "2"]
    hacpo = [str(Path(sys.executable).with_name("hacpo"))] if way == "console script" else [sys.executable, "-P"]
    hacpo += [] if way == "console script" else ["-m", "hacpo.cli"]
    done = subprocess.run([*hacpo, *words], capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 0, done.stderr
    assert not (finished_copy / "run_by_a_stranger").exists()


# --- what is no regular file -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words", [["run", "pipelines/small"], ["prune", "pipelines/small"]], ids=lambda words: words[0]
)
@pytest.mark.parametrize("made", ["pipe", "device"])
def test_what_dvc_would_wait_for_is_refused(finished_copy: Path, words: list[str], made: str) -> None:
    """DVC hashes what a stage reads and makes, and asks of no file whether it ends."""
    odd = Path("artifacts/small/checkpoints/step=0000/agent=ada/tokenizer.json")
    odd.unlink()
    os.mkfifo(odd) if made == "pipe" else odd.symlink_to("/dev/zero")
    _assert_refused(words, f"{odd}: is no regular file")


@pytest.mark.parametrize("name", [".dvc/config", ".dvcignore", ".dvc/tmp/lock"])
def test_a_pipe_in_the_place_of_a_file_of_dvc_is_refused(finished_copy: Path, name: str) -> None:
    Path(name).unlink(missing_ok=True)
    os.mkfifo(name)
    _assert_refused(["plan", "pipelines/small"], f"{name}: is no regular file")


def test_a_pipe_in_the_place_of_problems_is_refused(finished_copy: Path) -> None:
    params = Path("pipelines/small/params.yaml")
    made = "{task: arithmetic, split: train, problems: 64}"
    params.write_text(params.read_text().replace(made, "{path: problems.parquet}"))
    os.mkfifo("problems.parquet")
    said = "pipelines/small/params.yaml: data.sets.arithmetic/train: problems.parquet is no regular file"
    _assert_refused(["run", "pipelines/small", "--yes"], said, code=2)


def _assert_refused(words: list[str], what: str, code: int = 4) -> None:
    """In a process that can be killed: without the refusal it waits for ever."""
    command = [sys.executable, "-m", "hacpo.cli", *words]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    assert f"hacpo: error: {what}" in done.stderr


def test_an_output_that_git_tracks_is_said_in_one_line(finished_copy: Path, cli: Cli) -> None:
    """Inside a block that holds DVC's lock, too."""
    Path(".dvc/config").write_text("[core]\n    analytics = false\n    check_update = false\n")
    for words in (["init", "--quiet"], ["add", "--force", "artifacts/small/settings.json"]):
        subprocess.run(["git", *words], check=True)
    with Path("pipelines/small/params.yaml").open("a") as params:
        params.write("retention: {keep_last: 9}\n")
    result = cli("run", "pipelines/small", "--jobs", "1")
    assert result.code == 4
    assert "DVC refuses: output 'artifacts/small/settings.json' is already tracked by SCM" in result.error


def test_nothing_that_a_repository_names_is_run(finished_copy: Path, cli: Cli) -> None:
    """Filters, hooks, monitors and programs of a handed-over repository, where hacpo asks git for its commits."""
    Path(".dvc/config").write_text("[core]\n    analytics = false\n    check_update = false\n    autostage = true\n")
    Path(".gitignore").write_text("artifacts\nmodels\n")
    evil = Path("evil.sh").resolve()
    evil.write_text(f"#!/bin/sh\ntouch {evil.with_suffix('.ran')}\ncat\n")
    evil.chmod(0o755)
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    for words in (["init", "--quiet"], ["add", "--all"], [*who, "commit", "--quiet", "--message", "a"]):
        subprocess.run(["git", *words], check=True)
    keys = ("core.fsmonitor", "core.pager", "filter.evil.clean", "filter.evil.process", "gpg.program", "diff.external")
    for key in (*keys, "diff.evil.textconv"):
        subprocess.run(["git", "config", key, str(evil)], check=True)
    subprocess.run(["git", "config", "log.showSignature", "true"], check=True)
    for alias in ("log", "stash", "rev-list", "cat-file"):
        subprocess.run(["git", "config", f"alias.{alias}", f"!{evil}"], check=True)
    Path(".gitattributes").write_text("* filter=evil diff=evil\n")
    for hook in ("pre-commit", "post-index-change", "reference-transaction"):
        shutil.copy(evil, Path(".git/hooks", hook))
    params = Path("pipelines/small/params.yaml")
    params.write_text(params.read_text().replace("learning_rate: 3.0e-4", "learning_rate: 4.0e-4"))
    evil.with_suffix(".ran").unlink(missing_ok=True)
    assert cli("run", "pipelines/small", "--yes", "--jobs", "1").code == 0
    assert cli("prune", "pipelines/small").code == 0
    assert not evil.with_suffix(".ran").exists()
    subprocess.run(["git", "status"], check=False, capture_output=True)
    assert evil.with_suffix(".ran").exists(), "git itself runs it"


def put(cache: Path, content: bytes, kind: str = "") -> str:
    """An object of DVC's cache under its right name; returns that."""
    name = hashlib.md5(content, usedforsecurity=False).hexdigest() + kind
    path = cache / name[:2] / name[2:]
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    path.chmod(0o444)
    return name


@pytest.mark.parametrize("way", ["file that is there", "file that is not", "object that is a path", "hash in the lock"])
def test_no_name_in_dvcs_files_leads_out_of_a_folder(finished_copy: Path, cli: Cli, private: Path, way: str) -> None:
    """Or what is restored would be written anywhere, and what a hash leads to removed as damaged."""
    made = finished_copy / "artifacts/small/evaluations/step=0002/agent=ada"
    cache, lock = finished_copy / ".dvc/cache/files/md5", finished_copy / "pipelines/small/steps/0002/dvc.lock"
    text = lock.read_text()
    found = re.search(rf"{made.relative_to(finished_copy)}\n +hash: md5\n +md5: (\S+)", text)
    assert found is not None
    listed = json.loads((cache / found[1][:2] / found[1][2:]).read_text())
    target = private.with_name("there")
    if way == "hash in the lock":
        forged = (
            f"../{os.path.relpath(private, cache.parent)}"  # after its first two letters: a folder up, and down again
        )
    else:
        outside = {"file that is there": private, "file that is not": target}.get(way, made / "more")
        name = (
            f"../{os.path.relpath(private, cache.parent)}"
            if way == "object that is a path"
            else put(cache, b"a stranger's")
        )
        listed.append({"md5": name, "relpath": os.path.relpath(outside, made)})
        forged = put(cache, json.dumps(listed, sort_keys=True).encode(), ".dir")
    lock.write_text(text.replace(found[1], forged))
    shutil.rmtree(made)
    result = cli("run", "pipelines/small", "--yes")
    assert result.code == 4, result
    assert "one of DVC's files names" in result.error
    assert private.read_text() == "a private key"
    assert not target.exists()
    assert not (made / "more").exists()


@pytest.mark.parametrize("way", ["files of a folder", "an output more", "no more than that"])
def test_the_run_cache_has_no_outputs_but_a_stages_own(finished_copy: Path, cli: Cli, private: Path, way: str) -> None:
    """What DVC keeps of a stage is named by its own content, so a stranger can name outputs there, and their files."""
    from dvc.utils import dict_sha256
    from ruamel.yaml import YAML

    yaml, cache, report = YAML(typ="safe"), finished_copy / ".dvc/cache", finished_copy / "artifacts/small/report"
    (kept,) = (file for file in cache.glob("runs/*/*/*") if "cmd: hacpo report " in file.read_text())
    entry, before = yaml.load(kept.read_text()), sorted(os.listdir(report))
    name = put(cache / "files/md5", b"a stranger's")
    outside = {"relpath": os.path.relpath(private, report / "more"), "md5": name}
    listed = put(cache / "files/md5", json.dumps([dict(sorted(outside.items()))]).encode(), ".dir")
    assert listed.endswith(".dir")
    if way == "files of a folder":
        entry["outs"].append({"path": "artifacts/small/report/more", "hash": "md5", "files": [outside]})
    elif way == "an output more":
        entry["outs"].append({"path": "stranger.py", "hash": "md5", "md5": name, "size": 12})
    kept.unlink()
    with (kept.parent / dict_sha256(entry, exclude=["size", "nfiles"])).open("w") as file:
        yaml.dump(entry, file)
    lock = finished_copy / "pipelines/small/dvc.lock"
    locked = yaml.load(lock.read_text())
    del locked["stages"]["report"]
    with lock.open("w") as file:
        yaml.dump(locked, file)
    shutil.rmtree(report)
    result = cli("run", "pipelines/small")
    assert result.code == 0, result
    assert ("restored" in result.err) == (way == "no more than that")
    assert private.read_text() == "a private key"
    assert not Path("stranger.py").exists()
    assert sorted(os.listdir(report)) == before


def test_no_checkpoint_in_the_cache_has_a_path_for_an_object(finished_copy: Path, cli: Cli, private: Path) -> None:
    """Or a superseded one would be taken out of the cache, and what the path leads to."""
    cache, lock = finished_copy / ".dvc/cache/files/md5", finished_copy / "pipelines/small/steps/0001/dvc.lock"
    found = re.search(r"checkpoints/step=0001/agent=ada\n +hash: md5\n +md5: (\S+)", lock.read_text())
    assert found is not None
    path = cache / found[1][:2] / found[1][2:]
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps([{"md5": f"../{os.path.relpath(private, cache.parent)}", "relpath": "x.safetensors"}]))
    result = cli("run", "pipelines/small", "--yes")
    assert private.read_text() == "a private key"
    assert result.code == 4, result
    assert "one of DVC's files names a hash that is none" in result.error


@pytest.mark.parametrize(
    "stage",
    [
        {"cmd": f"hacpo verify {STEP} --agent ada --set verification.reward=evil:score --out artifacts/t"},
        {"cmd": "hacpo status pipelines/small --outcome", "outs": [{"OUT": {"cache": False}}]},
    ],
)
def test_stages_beside_the_pipelines_are_left_to_dvc(
    finished_copy: Path, cli: Cli, private: Path, stage: dict[str, Any]
) -> None:
    """`hacpo run` runs hacpo's own stages only, and removes none but their outputs."""
    (finished_copy / "evil.py").write_text(f"open({str(private)!r}, 'w').write('ran')\n")
    described = {"stages": {"q": {**stage, "deps": ["artifacts/small/report/index.html"]}}}
    (finished_copy / "dvc.yaml").write_text(json.dumps(described).replace("OUT", str(private)))
    assert cli("run", "pipelines/small").code == 0
    assert private.read_text() == "a private key"
    assert not (finished_copy / "artifacts/t").exists()
