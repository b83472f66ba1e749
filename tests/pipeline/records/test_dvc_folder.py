"""A project that a stranger has handed over with links and settings in its `.dvc` that a project does not have."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from conftest import Cli
from hacpo.pipeline.project import Pipeline
from hacpo.pipeline.records.bookkeeping import Books

RUN = "pipelines/small"
WRITERS = (["run", RUN], ["plan", RUN], ["repair", RUN])


@pytest.mark.parametrize("name", ["lock", "rwlock", "rwlock.lock", "btime", "flock", "dvc.lease.1"])
def test_no_file_outside_is_written_through_dvcs_own(project: Path, cli: Cli, tmp_path: Path, name: str) -> None:
    """DVC writes its process number into the first of these, and whatever it held is gone."""
    victim, link = tmp_path / "victim", Path(".dvc/tmp", name)
    victim.write_text("dear to somebody")
    looks = victim.stat()
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(victim)
    for words in WRITERS:
        result = cli(*words)
        assert result.code == 4, (words, result)
        assert f"{link}: is a link, and nothing of DVC's is written through one" in result.error
        assert f"(found a link to {victim}). Remove the link" in result.error
    for words in (["status", RUN], ["audit", RUN]):
        cli(*words)
    assert victim.read_text() == "dear to somebody"
    assert victim.stat().st_mtime_ns == looks.st_mtime_ns
    assert os.listdir(link.parent) == [name]


def test_dvc_adds_no_lines_to_a_file_that_its_gitignore_leads_to(project: Path, cli: Cli, tmp_path: Path) -> None:
    """It takes any folder for the repository's that git's settings name."""
    victim = tmp_path / "settings.json"
    victim.write_text("{}")
    subprocess.run(["git", "init", "-q", "."], check=True)
    subprocess.run(["git", "config", "core.worktree", str(tmp_path)], check=True)
    Path(".dvc/config").write_text("")
    Path(".dvc/.gitignore").unlink(missing_ok=True)
    Path(".dvc/.gitignore").symlink_to(victim)
    for words in WRITERS:
        result = cli(*words)
        assert result.code == 4, (words, result)
        assert ".dvc/.gitignore: is a link, and nothing of DVC's is written through one" in result.error
    for words in (["status", RUN], ["audit", RUN]):
        cli(*words)
    assert victim.read_text() == "{}"


@pytest.mark.parametrize("name", ["lock", "rwlock.lock"])
def test_no_file_outside_is_written_under_another_name(project: Path, cli: Cli, tmp_path: Path, name: str) -> None:
    victim, here = tmp_path / "victim", Path(".dvc/tmp", name)
    victim.write_text("dear to somebody")
    here.parent.mkdir(exist_ok=True)
    here.unlink(missing_ok=True)
    here.hardlink_to(victim)
    for words in WRITERS:
        result = cli(*words)
        assert result.code == 4, (words, result)
        assert f"{here}: is the same file as one elsewhere (a hard link)" in result.error
        assert result.error.endswith("Remove it here; the other stays")
    for words in (["status", RUN], ["audit", RUN]):
        cli(*words)
    assert victim.read_text() == "dear to somebody"


def test_locks_may_be_hard_links_of_each_other(project: Path, cli: Cli) -> None:
    """So DVC locks where `core.hardlink_lock` is set."""
    Path(".dvc/tmp").mkdir(exist_ok=True)
    Path(".dvc/tmp/of one").write_text("")
    Path(".dvc/tmp/of another").hardlink_to(".dvc/tmp/of one")
    assert cli("plan", RUN).code == 0


@pytest.mark.parametrize(
    "setting", ["[extensions]\n\tpartialClone = origin\n", "[core]\n\trepositoryformatversion = 7\n"]
)
def test_a_git_repository_that_dvc_cannot_read_is_one_line(project: Path, cli: Cli, setting: str) -> None:
    """`git clone --filter=blob:none` makes the first."""
    assert cli("plan", RUN).code == 0
    subprocess.run(["git", "init", "-q", "."], check=True)
    Path(".dvc/config").write_text("")
    config = Path(".git/config")
    version = "[core]\n\trepositoryformatversion = 1\n" if "partial" in setting else ""
    config.write_text(config.read_text() + version + setting)
    for words in (["plan", RUN], ["prune", RUN]):
        result = cli(*words)
        assert result.code == 2, result
        assert "is a git repository that DVC cannot read" in result.error
        assert "lone it whole (without --filter), or run `dvc config core.no_scm true`" in result.error


@pytest.mark.parametrize("name", [".dvc", ".dvc/tmp"])
def test_nothing_is_written_where_a_linked_folder_leads(project: Path, cli: Cli, tmp_path: Path, name: str) -> None:
    home = tmp_path / "home"
    Path(name).mkdir(exist_ok=True)
    shutil.move(name, home)
    Path(name).symlink_to(home)
    before = sorted(home.rglob("*"))
    for words in WRITERS:
        result = cli(*words)
        assert result.code == 4, (words, result)
        assert f"{name}: is a link, and nothing of DVC's is written through one" in result.error
    assert sorted(home.rglob("*")) == before


def test_the_cache_may_be_a_link(project: Path, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "large disk").mkdir()
    Path(".dvc/cache").symlink_to(tmp_path / "large disk")
    for words in WRITERS[1:]:
        assert cli(*words).code == 0


@pytest.mark.parametrize("name", [".dvcignore", ".dvc/config", ".dvc/config.local"])
def test_links_in_a_circle_are_one_line(project: Path, cli: Cli, name: str) -> None:
    Path(name).unlink(missing_ok=True)
    Path(name).symlink_to(Path(name).name)
    result = cli("plan", RUN)
    assert result.code == 4, result
    assert f"{name}: is a link that leads in a circle. Remove the link" in result.error


@pytest.mark.parametrize("name", ["config", "config.local"])
def test_notes_that_may_have_come_with_the_project_are_not_believed(
    finished_copy: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """`core.site_cache_dir` of the project says where DVC's notes lie, and hacpo's would lie beside them."""
    monkeypatch.delenv("DVC_SITE_CACHE_DIR", raising=False)
    path = Path(".dvc", name)
    text = path.read_text() if path.is_file() else "[core]\n"
    path.write_text(text.replace("[core]\n", f"[core]\n    site_cache_dir = {finished_copy}/notes\n"))
    assert cli("run", RUN).code == 0
    assert list(Path("notes/repo").iterdir())  # DVC's own are there
    assert not list(Path("notes").glob("repo/*/hacpo"))
    compared = []
    compare = Books.compare

    def noted(self: Books, stage: object, *, may_be_pruned: bool = False) -> bool:
        compared.append(stage)
        return compare(self, stage, may_be_pruned=may_be_pruned)

    monkeypatch.setattr(Books, "compare", noted)
    assert cli("run", RUN).code == 0
    assert compared


@pytest.mark.parametrize("link", ["artifacts", "artifacts/.crashes"])
def test_what_went_wrong_is_not_written_where_a_link_leads(
    project: Path, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: str
) -> None:
    elsewhere, temporary = tmp_path / "elsewhere", tmp_path / "temporary"
    for folder in (elsewhere, temporary):
        folder.mkdir()
    Path(link).parent.mkdir(exist_ok=True)
    Path(link).symlink_to(elsewhere)
    monkeypatch.setattr("tempfile.tempdir", str(temporary))

    def broken(*_: object) -> None:
        raise RuntimeError("no way on")

    monkeypatch.setattr(Pipeline, "open", broken)
    result = cli("status", RUN)
    assert result.code == 70
    assert not list(elsewhere.iterdir())
    (path,) = temporary.iterdir()
    assert f"RuntimeError: no way on. What was going on is in {path}" in result.error
