"""DVC's locks against the files: digests are those of DVC, and every kind of disagreement is found and named."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from conftest import environment
from hacpo.pipeline.project import Pipeline
from hacpo.tools.audit.audit_run import AuditRun
from hacpo.tools.audit.dvc_records import Hasher, check_locks
from hacpo.tools.audit.findings import Finding
from tests.tampering import Sandbox


def audit() -> AuditRun:
    run = AuditRun(Pipeline.open(Path("pipelines/small")))
    check_locks(run)
    return run


def only(run: AuditRun) -> Finding:
    assert len(run.findings) == 1, run.findings
    return run.findings[0]


def recorded(lock: Path, stage: str, path: str, kind: str = "outs") -> dict[str, Any]:
    stages = YAML(typ="safe", pure=True).load(lock.read_text())["stages"]
    return next(item for item in stages[stage][kind] if item["path"] == path)


def test_a_clean_run_has_no_finding_and_every_stage_is_recorded(sandbox: Sandbox) -> None:
    run = audit()
    assert run.findings == []
    assert not run.skipped
    # resolve, prepare, report; warmup x2; evaluate x2 at steps 0 and 2; per step generate, verify, pool, update x2 and
    # one advantage: 3 + 2 + 4 + 2 x 9
    assert run.rows["locks"] == 27


def test_every_file_is_read_once(sandbox: Sandbox) -> None:
    everything = [
        path
        for path in [
            *Path("artifacts/small").rglob("*"),
            *Path("models").rglob("*"),
            Path("pipelines/small/params.yaml"),
        ]
        if path.is_file() and ".locks" not in path.parts
    ]
    assert audit().files["locks"] == len(everything)


def test_neither_torch_nor_dvc_is_loaded(sandbox: Sandbox) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom hacpo.pipeline.project import Pipeline\n"
        "from hacpo.tools.audit.dvc_records import check_locks\nfrom hacpo.tools.audit.audit_run import AuditRun\n"
        "run = AuditRun(Pipeline.open(Path('pipelines/small')))\ncheck_locks(run)\nassert not run.findings\n"
        "print([name for name in ('torch', 'transformers', 'dvc') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True)
    assert done.stdout.strip() == "[]"


def test_a_folder_hashes_as_dvc_hashes_it(tmp_path: Path) -> None:
    """Order of names ('a-b' < 'a.b' < 'a/b'), non-ASCII names, and what .dvcignore leaves out."""
    folder = tmp_path / "data"
    for name in ("a/b", "a.b", "a-b", "ä/ö", "deep/er/file", "__pycache__/x.pyc", "deep/.x.tmp-1"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    for words in (["init", "--no-scm", "-q"], ["config", "core.analytics", "false"]):
        subprocess.run([sys.executable, "-m", "dvc", *words], cwd=tmp_path, check=True)
    (tmp_path / ".dvcignore").write_text("# comment\n.*.tmp-*\n__pycache__\n")
    subprocess.run([sys.executable, "-m", "dvc", "add", "-q", "data"], cwd=tmp_path, check=True)
    out = YAML(typ="safe", pure=True).load((tmp_path / "data.dvc").read_text())["outs"][0]
    digest = Hasher(tmp_path).digest("data")
    assert digest is not None
    assert (digest.md5, digest.size, digest.nfiles) == (out["md5"], out["size"], out["nfiles"])
    assert digest.nfiles == 5


# --- files that changed ----------------------------------------------------------------------------------------------


def test_one_bit_of_a_shard_with_size_and_times_kept(sandbox: Sandbox) -> None:
    """What DVC's own notes of modification times would not see; the cache's manifest names the file in the folder."""
    path = Path("artifacts/small/rollouts/step=0001/agent=ada/part-00001.parquet")
    before = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
    sandbox.flip(path, 100)
    found = only(audit())
    assert (found.check, found.file, found.column) == ("lock", path, "md5")
    assert found.expected == before
    assert found.found == hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
    assert "generate@ada in pipelines/small/steps/0001/dvc.lock" in found.note


def test_the_file_is_named_also_where_a_folder_around_it_was_recorded(sandbox: Sandbox) -> None:
    """advantage's output is the step's folder, update's dependency the learner's."""
    path = Path("artifacts/small/advantages/step=0001/learner=bo/part-00003.parquet")
    sandbox.flip(path, 50)
    assert (only(audit()).file, only(audit()).column) == (path, "md5")


def test_without_the_cache_the_folder_is_named(sandbox: Sandbox) -> None:
    shutil.rmtree(".dvc/cache")
    sandbox.flip(Path("artifacts/small/rollouts/step=0001/agent=ada/part-00001.parquet"), 100)
    found = only(audit())
    assert found.file == Path("artifacts/small/rollouts/step=0001/agent=ada")
    lock = recorded(sandbox.lock(1), "generate@ada", str(found.file))
    assert found.expected == lock["md5"]
    assert str(found.found).endswith(".dir")


def test_a_leftover_and_a_missing_file_in_a_folder(sandbox: Sandbox) -> None:
    folder = Path("artifacts/small/verdicts/step=0002/agent=bo")
    (folder / "part-00001.parquet").rename(folder / "part-00002.parquet")
    findings = {finding.file.name: finding for finding in audit().findings}
    assert findings["part-00001.parquet"].found == "missing"
    assert findings["part-00002.parquet"].expected == "no such file"


def test_a_leftover_beside_the_recorded_folders(sandbox: Sandbox) -> None:
    """Only the report's dependency on all rollouts holds it."""
    (sandbox.artifacts / "rollouts" / "notes.txt").write_text("x")
    found = only(audit())
    assert (found.file, found.column) == (Path("artifacts/small/rollouts"), "md5")
    assert "report in pipelines/small/dvc.lock" in found.note


@pytest.mark.parametrize(
    "path",
    [
        "artifacts/small/settings.json",
        "artifacts/small/metrics/update/step=0002/bo.json",
        "artifacts/small/schedule.parquet",
        "artifacts/small/report/index.html",
        "artifacts/small/data/arithmetic/heldout.parquet",
        "artifacts/small/capability/step=0001/capability.parquet",
        "artifacts/small/evaluations/step=0000/agent=bo/part-00000.parquet",
    ],
)
def test_any_recorded_file(sandbox: Sandbox, path: str) -> None:
    sandbox.flip(Path(path), 60)
    assert Path(path) in [finding.file for finding in audit().findings]


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "trainer/state.json", "trainer/optimizer.safetensors"]
)
def test_any_file_of_a_checkpoint(sandbox: Sandbox, name: str) -> None:
    """Checkpoints are not cached, so the folder is named; update made it, generate read it."""
    folder = Path("artifacts/small/checkpoints/step=0001/agent=ada")
    sandbox.flip(folder / name, 12)
    found = only(audit())
    assert (found.file, found.column) == (folder, "md5")
    assert "update@ada in pipelines/small/steps/0001/dvc.lock and 2 more" in found.note


def test_a_missing_output(sandbox: Sandbox) -> None:
    shutil.rmtree(sandbox.artifacts / "pool" / "step=0002" / "learner=ada")
    found = only(audit())
    assert (found.file, found.found) == (Path("artifacts/small/pool/step=0002/learner=ada"), "missing")
    assert found.expected == recorded(sandbox.lock(2), "pool@ada", str(found.file))["md5"]


def test_a_model_folder_changed_after_the_start(sandbox: Sandbox, models: Path) -> None:
    Path("models").unlink()
    shutil.copytree(models, "models")
    try:
        Path("models/ada/config.json").write_text("{}")
        assert [finding.file for finding in audit().findings] == [Path("models/ada")]
    finally:
        shutil.rmtree("models")
        Path("models").symlink_to(models)


# --- checkpoints may be pruned ---------------------------------------------------------------------------------------


def test_a_pruned_checkpoint_is_no_finding(sandbox: Sandbox) -> None:
    shutil.rmtree(sandbox.artifacts / "checkpoints" / "step=0001" / "agent=ada")
    run = audit()
    assert run.findings == []
    assert run.skipped == {("the files of a checkpoint", "it was pruned"): 1}


def test_records_of_a_pruned_checkpoint_must_agree(sandbox: Sandbox) -> None:
    path = "artifacts/small/checkpoints/step=0001/agent=ada"
    shutil.rmtree(path)
    made = recorded(sandbox.lock(1), "update@ada", path)["md5"]
    sandbox.lock(2).write_text(
        sandbox.lock(2).read_text().replace(made, made.replace(made[0], "f" if made[0] != "f" else "0"))
    )
    findings = audit().findings
    assert {(finding.file, finding.row) for finding in findings} == {
        (Path("pipelines/small/steps/0002/dvc.lock"), "generate@ada"),
        (Path("pipelines/small/steps/0002/dvc.lock"), "update@ada"),
    }


@pytest.mark.parametrize("step", ["0000", "0002"])
def test_the_first_and_the_last_checkpoint_must_be_there(sandbox: Sandbox, step: str) -> None:
    path = Path(f"artifacts/small/checkpoints/step={step}/agent=bo")
    shutil.rmtree(path)
    assert (path, "missing") in [(finding.file, finding.found) for finding in audit().findings]


def test_half_a_checkpoint_is_not_a_pruned_one(sandbox: Sandbox) -> None:
    path = Path("artifacts/small/checkpoints/step=0001/agent=bo")
    shutil.rmtree(path / "trainer")
    assert only(audit()).file == path


# --- locks and dvc.yaml that changed ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("column", "new"), [("md5", "f" * 32), ("size", 7), ("nfiles", 9)])
def test_an_edited_record(sandbox: Sandbox, column: str, new: object) -> None:
    """Other stages recorded the same folder as it is, so the lock is the odd one."""
    path = "artifacts/small/rollouts/step=0001/agent=ada"
    lock = sandbox.lock(1)
    old = recorded(lock, "verify@ada", path, "deps")
    text = lock.read_text()
    start = text.index(f"path: {path}", text.index("verify@ada:"))
    lock.write_text(text[:start] + text[start:].replace(f"{column}: {old[column]}", f"{column}: {new}", 1))
    found = only(audit())
    assert (found.file, found.row) == (Path("pipelines/small/steps/0001/dvc.lock"), "verify@ada")
    assert (found.column, str(found.expected), str(found.found)) == (f"{path} {column}", str(old[column]), str(new))


def test_an_edited_command(sandbox: Sandbox) -> None:
    command = "hacpo generate pipelines/small --step 0001 --agent ada"
    sandbox.replace(sandbox.lock(1), f"cmd: {command}\n", f"cmd: {command} --limit 1\n")
    found = only(audit())
    assert (found.row, found.column) == ("generate@ada", "cmd")
    assert (found.expected, found.found) == (command, f"{command} --limit 1")


def test_an_edited_parameter_of_one_lock(sandbox: Sandbox) -> None:
    sandbox.replace(sandbox.lock(2), "epsilon: 1e-06", "epsilon: 1e-05")
    found = only(audit())
    assert (found.file, found.row) == (Path("pipelines/small/steps/0002/dvc.lock"), "advantage")
    assert found.column == "params algorithm.advantage"
    assert '"epsilon": 1e-06' in str(found.expected)
    assert '"epsilon": 1e-05' in str(found.found)


def test_parameters_recorded_of_another_file(sandbox: Sandbox) -> None:
    settings, other = "artifacts/small/settings.json", "artifacts/other/settings.json"
    lock = sandbox.lock(1)
    text = lock.read_text()
    start = text.index("advantage:")
    lock.write_text(text[:start] + text[start:].replace(f"      {settings}:", f"      {other}:", 1))
    found = only(audit())
    assert (found.file, found.row) == (Path("pipelines/small/steps/0001/dvc.lock"), "advantage")
    assert (found.column, found.expected, found.found) == ("params of", settings, other)


def test_edited_settings_are_the_odd_ones(sandbox: Sandbox) -> None:
    path = sandbox.artifacts / "settings.json"
    settings = json.loads(path.read_text())
    settings["algorithm"]["advantage"]["epsilon"] = 1e-5
    path.write_text(json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
    found = next(finding for finding in audit().findings if finding.row == "algorithm.advantage")
    assert found.file == Path("artifacts/small/settings.json")
    assert found.count == 2  # both steps' advantage
    assert '"epsilon": 1e-06' in str(found.expected)
    assert '"epsilon": 1e-05' in str(found.found)


@pytest.mark.parametrize("kind", ["deps", "outs", "params"])
def test_a_record_that_was_taken_out(sandbox: Sandbox, kind: str) -> None:
    yaml = YAML(pure=True)
    content = yaml.load(sandbox.lock(1).read_text())
    entry = content["stages"]["advantage"]
    if kind == "params":
        removed = "sampling.group_size"
        del entry["params"]["artifacts/small/settings.json"][removed]
    else:
        removed = entry[kind].pop(0)["path"]
    with sandbox.lock(1).open("w") as file:
        yaml.dump(content, file)
    found = only(audit())
    assert (found.row, found.column, found.expected, found.found) == ("advantage", kind, removed, "not recorded")


@pytest.mark.parametrize(
    ("text", "reason"), [("stages: [", "no YAML"), ("schema: '2.0'\n", "no `stages`"), ("[]\n", "no `stages`")]
)
def test_a_lock_that_is_no_lock(sandbox: Sandbox, text: str, reason: str) -> None:
    sandbox.lock(1).write_text(text)
    found = only(audit())
    assert found.file == Path("pipelines/small/steps/0001/dvc.lock")
    assert reason in str(found.found)


def test_a_damaged_entry(sandbox: Sandbox) -> None:
    sandbox.replace(sandbox.lock(1), "size: ", "sise: ")
    found = only(audit())
    assert (found.row, found.found) == ("generate@ada", "damaged")


def test_an_edited_dvc_yaml(sandbox: Sandbox) -> None:
    sandbox.replace(sandbox.pipeline / "steps" / "0002" / "dvc.yaml", "prev: '0001'", "prev: '0000'")
    found = only(audit())
    assert (found.file, found.row) == (Path("pipelines/small/steps/0002/dvc.yaml"), "line 3")
    assert (found.expected, found.found) == ("- {step: '0002', prev: '0001'}", "- {step: '0002', prev: '0000'}")


def test_a_missing_dvc_yaml(sandbox: Sandbox) -> None:
    (sandbox.pipeline / "steps" / "0002" / "dvc.yaml").unlink()
    assert only(audit()).file == Path("pipelines/small/steps/0002/dvc.yaml")


def test_a_run_that_was_never_planned_has_no_records_to_check(sandbox: Sandbox) -> None:
    for path in [*sandbox.pipeline.rglob("dvc.yaml"), *sandbox.pipeline.rglob("dvc.lock")]:
        path.unlink()
    run = audit()
    assert run.findings == []
    assert run.skipped["dvc.yaml", "there is none: every stage was run by hand"] == 4
    # One that is left says that there were others.
    sandbox.lock().write_text("stages: {}\n")
    assert {found.file.name for found in audit().findings} == {"dvc.yaml"}


def test_places_are_relative_to_the_project_however_the_pipeline_is_named(sandbox: Sandbox) -> None:
    sandbox.lock(2).write_text("[]")
    sandbox.replace(sandbox.pipeline / "steps" / "0001" / "dvc.yaml", "hacpo", "hacpö")
    for folder in (Path("pipelines/small"), sandbox.pipeline, Path("../project/pipelines/small")):
        run = AuditRun(Pipeline.open(folder))
        check_locks(run)
        steps = Path("pipelines/small/steps")
        assert {found.file for found in run.findings} == {steps / "0001" / "dvc.yaml", steps / "0002" / "dvc.lock"}


def test_stages_run_by_hand_are_coverage_and_no_finding(sandbox: Sandbox) -> None:
    sandbox.lock(2).unlink()
    run = audit()
    assert run.findings == []
    # Step 2's nine, and two evaluations.
    assert run.skipped == {("the lock of a stage", "there is none: the stage was run by hand, or not yet"): 11}
    assert run.rows["locks"] == 27 - 11


def test_a_run_made_shorter_leaves_its_later_locks_alone(sandbox: Sandbox) -> None:
    """Their stages are not part of the run any more; what depends on the number of steps is."""
    sandbox.replace(sandbox.pipeline / "params.yaml", "steps: 2", "steps: 1")
    files = {finding.file for finding in audit().findings}
    assert Path("pipelines/small/steps/0002/dvc.lock") not in files
    assert Path("pipelines/small/params.yaml") in files
