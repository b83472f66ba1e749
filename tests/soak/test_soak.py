"""The attack's own checks can fail: what is planted in a finished run is found (`tests/soak`)."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from soak import checks, faults, flips, kills, processes, report, shim, writers
from soak.forks import Done
from soak.frame import Bench, Part, SkippedError, Tally, Trial, run_parts
from soak.golden import Golden
from soak.sandbox import Ended, Sandbox, copy_tree
from soak.shim import Fault, Site
from soak.watching import Watch

TRACE = "artifacts/small/updates/step=0001/agent=ada/trace.parquet"


def flip(path: Path) -> None:
    """Another byte in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(content)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    changed = re.sub(old, new, text, count=1)
    assert changed != text
    path.chmod(0o644)
    path.write_text(changed)


PLANTED: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "a byte": (lambda root: flip(root / TRACE), "wrong bytes", f"{TRACE} differs"),
    "a file less": (lambda root: (root / TRACE).unlink(), "wrong bytes", f"{TRACE} is missing"),
    "a number": (
        lambda root: edit(root / "artifacts/small/metrics/update/step=0001/ada.json", '"loss": [^,]+', '"loss": 5.0'),
        "wrong bytes",
        "artifacts/small/metrics/update/step=0001/ada.json differs",
    ),
    "what is no JSON": (
        lambda root: (root / "artifacts/small/metrics/update/step=0001/ada.json").write_text("{"),
        "wrong bytes",
        "artifacts/small/metrics/update/step=0001/ada.json differs",
    ),
    "a record": (
        lambda root: edit(
            root / "pipelines/small/steps/0001/dvc.lock",
            r"rollouts/step=0001/agent=ada\n +hash: md5\n +md5: \w",
            r"\g<0>0",
        ),
        "wrong bytes",
        "pipelines/small/steps/0001/dvc.lock differs",
    ),
    "half a file": (
        lambda root: (root / f"{TRACE}/../.trace.parquet.tmp-12").resolve().write_text(""),
        "leftover",
        ".trace.parquet.tmp-12",
    ),
    "an empty folder": (lambda root: (root / "artifacts/small/.saved").mkdir(), "leftover", "artifacts/small/.saved"),
    "a lock's half file": (
        lambda root: (root / "artifacts/small/.locks/.driver.lease.9.tmp-12").write_text(""),
        "leftover",
        ".driver.lease.9.tmp-12",
    ),
    "an entry of the run cache": (
        lambda root: (root / ".dvc/cache/runs/ab/abcd").mkdir(parents=True),
        "leftover",
        "empty .dvc/cache/runs/ab/abcd",
    ),
    "a crash": (lambda root: (root / "artifacts/.crashes").mkdir(), "traceback", "artifacts/.crashes"),
    "an object": (
        lambda root: flip(next((root / ".dvc/cache/files/md5").glob("*/*.dir"))),
        "wrong bytes",
        "of the cache is damaged",
    ),
}


def problems(root: Path, golden: Golden) -> list[tuple[str, str]]:
    """What `checks.finished` finds without starting a command."""
    found = [*golden.differences(root, "small")]
    found += [(problem.kind, problem.what) for problem in checks.leftovers(root)]
    cache = root / ".dvc" / "cache" / "files" / "md5"
    return found + [(problem.kind, problem.what) for problem in checks.damaged_objects(cache)]


@pytest.mark.parametrize("what", PLANTED)
def test_what_is_planted_is_found(finished_copy: Path, what: str) -> None:
    golden = Golden.of(finished_copy, "small", "")
    assert problems(finished_copy, golden) == []
    plant, kind, named = PLANTED[what]
    plant(finished_copy)
    found = problems(finished_copy, golden)
    assert found
    assert all(one == kind and named in text for one, text in found), found


def test_times_are_no_difference(finished_copy: Path) -> None:
    golden = Golden.of(finished_copy, "small", "")
    edit(finished_copy / "artifacts/small/metrics/update/step=0001/ada.json", '"seconds": ', '"seconds": 1')
    assert problems(finished_copy, golden) == []


def test_a_process_that_was_left_is_found(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    sandbox = Sandbox(tmp_path, "kept", Golden())
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], cwd='/')"
    ended = sandbox.call([sys.executable, "-c", code])
    assert ended.code == 0, ended.output
    (orphan,) = processes.orphans(str(tmp_path), 0.0)
    try:
        assert "time.sleep(600)" in processes.describe(orphan)
    finally:
        orphan.kill()
    assert processes.orphans(str(tmp_path), 30.0) == []


def test_nothing_outlives_a_killed_attack(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from soak import processes\n"
        "folder, sleeping = Path(sys.argv[1]), [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        "processes.start(sleeping, folder, folder / 'log.txt', dict(os.environ), str(folder))\n"
        "print(*processes.marked(str(folder)))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    tests = Path(__file__).parents[1]
    command = [sys.executable, "-uc", code, str(tmp_path)]
    done = subprocess.run(command, cwd=tests, capture_output=True, text=True, check=False)
    assert "sleep" in done.stdout or "python" in done.stdout, done.stderr
    assert processes.orphans(str(tmp_path), 30.0) == []


def test_output_with_a_traceback_is_found(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    ended = Sandbox(tmp_path, "kept", Golden()).call([sys.executable, "-c", "raise ValueError('oh')"])
    (problem,) = checks.of_output(ended)
    assert problem.kind == "traceback"
    assert "ValueError: oh" in problem.what


def bench(tmp_path: Path, **options: object) -> Bench:
    return Bench("toy", 7, tmp_path, **options)  # type: ignore[arg-type]


def test_a_finding_has_all_that_repeats_it_and_its_sandbox_stays(tmp_path: Path) -> None:
    drawn: dict[int, float] = {}

    def trial(one: Trial) -> None:
        drawn[one.number] = one.dice.random()
        (one.folder / "log.txt").write_text("$ command\nits last words\n")
        one.count("half a thing", by=2)
        if one.number == 2:
            one.find("wrong bytes", "a table differs")
        if one.number == 3:
            raise ValueError("a fault of the attack")

    toy = bench(tmp_path / "work", parallel=2)
    toy.spread(trial, range(5))
    assert toy.tally.trials == 5
    found = {finding.kind: finding for finding in toy.tally.findings}
    assert found.keys() == {"wrong bytes", "tool"}
    assert "ValueError: a fault of the attack" in found["tool"].what
    wrong = found["wrong bytes"]
    assert (wrong.seed, wrong.trial, wrong.output) == (7, 2, "$ command\nits last words\n")
    assert wrong.again() == "python -m tests.soak toy --seed 7 --only 2"
    assert sorted(path.name for path in (tmp_path / "work").iterdir()) == ["toy-7-2", "toy-7-3"]
    report.write(tmp_path / "results.json", [toy.tally], 7, time.time())
    written = json.loads((tmp_path / "results.json").read_text())["parts"][0]
    assert (written["trials"], written["found"]["wrong bytes"], written["found"]["wedge"]) == (5, 1, 0)
    assert written["counts"] == {"half a thing": 10}

    first = dict(drawn)
    alone = bench(tmp_path / "again", only=2)
    alone.spread(trial, range(5))
    assert drawn == first
    assert first[2] == random.Random("7 toy 2").random()
    assert [finding.trial for finding in alone.tally.findings] == [2]


def test_each_part_has_its_share_of_the_time_and_may_be_skipped() -> None:
    deadlines: dict[str, float] = {}

    def refuses(_: Bench) -> None:
        raise SkippedError("no such kernel")

    def make(part: Part, deadline: float) -> Bench:
        deadlines[part.name] = deadline - time.monotonic()
        return bench(Path(), deadline=deadline)

    parts = [Part("long", "", lambda _: None, share=3.0), Part("short", "", refuses)]
    tallies = list(run_parts(parts, make, minutes=4))
    assert [tally.skipped for tally in tallies] == ["", "no such kernel"]
    # 3 of 4 shares of 4 minutes; what it did not use is left for the other
    assert deadlines["long"] == pytest.approx(180, abs=30)
    assert deadlines["short"] == pytest.approx(240, abs=30)


def test_findings_are_told_and_saved_at_once() -> None:
    console, saved = Console(record=True, width=100), []
    tally = Tally("toy")
    with report.Watch(console, lambda one: saved.append(len(one.findings))) as watch:
        watch.told(tally)
        assert saved == []
        toy = bench(Path())
        toy.tally.findings = tally.findings
        from soak.frame import Finding

        tally.findings.append(Finding("toy", "wedge", "it stands still", 7, 2, "/sandbox", ""))
        watch.told(tally)
    assert saved == [1]
    assert "it stands still" in console.export_text()


def toy_trial(tmp_path: Path) -> Trial:
    (tmp_path / "project").mkdir(parents=True)
    return Trial(0, random.Random(0), tmp_path, bench(tmp_path))


class Undisturbed:
    """A ground on which every command does well, and no call that is to fail is ever made."""

    bytes = {"three": {}}  # noqa: RUF012
    tries = 0

    @property
    def forks(self) -> Undisturbed:
        return self

    def copy(self, _: object, folder: Path) -> None:
        (folder / "project" / "artifacts" / "small").mkdir(parents=True)

    def run(self, *_: object, **__: object) -> Done:
        self.tries += 1
        return Done(0, "", "", 0.0)


def test_a_fault_that_did_not_come_up_is_found(tmp_path: Path) -> None:
    trial, ground = toy_trial(tmp_path), Undisturbed()
    planned = faults.Planned(faults.SCENARIOS[0], Fault(Site("write", "project/artifacts/small/x"), 28))
    faults.attack(ground, planned, trial)  # type: ignore[arg-type]
    assert [problem.kind for problem in trial.problems] == ["tool"]
    assert ground.tries == 2
    assert "absorbed" not in trial.bench.tally.counts


def test_a_call_has_one_site_whatever_the_number_of_its_process(tmp_path: Path) -> None:
    try:
        library = shim.library()
    except SkippedError as reason:
        pytest.skip(str(reason))
    sites = set()
    for number in (7, 123, 4567):  # `tmp-123-old` is as long as what Python's tempfile makes
        log = tmp_path / f"log-{number}"
        name = tmp_path / "project" / f".agent=ada.tmp-{number}-old"
        variables = {"LD_PRELOAD": str(library), **shim.environment(tmp_path / "project", names="ada", log=log)}
        code = "import os, sys; os.makedirs(sys.argv[1])"
        subprocess.run([sys.executable, "-Ic", code, str(name)], env={**os.environ, **variables}, check=True)
        sites |= {site for site in shim.recorded(log) if site.operation == "mkdir" and "agent" in site.path}
    assert sites == {Site("mkdir", ".agent=A.tmp-#-old")}


TABLE = "project/artifacts/small/rollouts/part-0.parquet"
OBJECT = "project/.dvc/cache/files/md5/ab/cdef"


@pytest.mark.parametrize(
    ("flipped", "differences", "wrong"),
    [
        (TABLE, ["artifacts/small/rollouts/part-0.parquet differs"], 0),  # it stays, for the audit to name
        (TABLE, ["artifacts/small/rollouts/part-0.parquet differs", "artifacts/small/pool/a differs"], 1),
        (OBJECT, [], 0),
        (OBJECT, ["artifacts/small/rollouts/part-0.parquet differs"], 1),  # restored as it was
    ],
)
def test_what_a_run_makes_of_a_flip_is_compared(flipped: str, differences: list[str], wrong: int) -> None:
    assert len(flips.wrongly_taken(flipped, differences)) == wrong


@pytest.mark.parametrize(
    ("ends", "kinds"),
    [
        ([("run", 0), ("run", 7)], []),
        ([("run", 7), ("run", 7)], ["refused"]),  # nobody works
        ([("run", 7), ("status", 0)], ["refused"]),  # nobody is at work
        ([("audit", 1), ("update", 0)], []),
        ([("audit", 1), ("status", 0)], ["refused"]),
        ([("copy", 2), ("copy", 0)], []),
        ([("copy", 2), ("copy", 2)], ["refused"]),  # each has removed the other's
        ([("copy", 0), ("copy", 0)], ["refused"]),
        ([("export", 4), ("audit", 0)], ["refused"]),
        ([("repro", None), ("plan", 0)], ["wedge"]),
    ],
)
def test_exit_codes_of_two_are_judged_together(ends: list[tuple[str, int | None]], kinds: list[str]) -> None:
    assert [problem.kind for problem in writers.judged(ends)] == kinds


def test_what_two_made_elsewhere_is_compared(tmp_path: Path) -> None:
    made, wanted = tmp_path / "made", tmp_path / "wanted"
    card = "- policy (SHA-256 of the weights): ab\n- held out: {}\n- settings.json (SHA-256): {}\n"
    for folder, known in ((made, 1), (wanted, 2)):
        (folder / "agent=ada").mkdir(parents=True)
        (folder / "agent=ada" / "model.safetensors").write_text("weights")
        (folder / "config.json").write_text("{}")
        (folder / "README.md").write_text(card.format(known, known))
    assert writers.differences(made, wanted, complete=True) == []
    (made / "README.md").write_text(card.format(1, 1).replace("ab", "cd"))
    (made / "config.json").unlink()
    flip(made / "agent=ada" / "model.safetensors")
    assert writers.differences(made, wanted, complete=False) == ["README.md", "agent=ada/model.safetensors"]
    assert "config.json" in writers.differences(made, wanted, complete=True)


def test_a_run_that_must_be_asked_twice_is_by_hand(tmp_path: Path) -> None:
    trial = toy_trial(tmp_path)
    life = object.__new__(kills._Life)
    life._trial, life._sandbox = trial, Sandbox(tmp_path, "kept", Golden())
    life._command = lambda _: [sys.executable, "-c", ""]  # type: ignore[method-assign]
    assert life._went_well("run", Ended(("run",), 4, "no"))
    assert [problem.kind for problem in trial.problems] == ["by hand"]


def test_copies_keep_hard_links_and_links_to_objects_are_their_content(tmp_path: Path) -> None:
    project = tmp_path / "one"
    table = project / "artifacts" / "small" / "table"
    thing = project / ".dvc" / "cache" / "files" / "md5" / "ab" / "cd"
    for path in (table, thing):
        path.parent.mkdir(parents=True)
    thing.write_text("content")
    table.hardlink_to(thing)
    copy_tree(project, tmp_path / "two")
    assert (tmp_path / "two" / "artifacts" / "small" / "table").stat().st_nlink == 2
    before = Golden.of(project, "small", "")
    table.unlink()
    table.symlink_to(thing)
    assert list(before.differences(project, "small")) == []
    thing.write_text("another")
    assert list(before.differences(project, "small")) == [("wrong bytes", "artifacts/small/table differs")]
    table.unlink()
    table.symlink_to("/etc/hostname")
    assert list(before.differences(project, "small")) == [("wrong bytes", "artifacts/small/table differs")]


@pytest.mark.skipif(sys.platform != "linux", reason="inotify")
def test_a_change_is_seen_in_a_folder_that_is_made_later(tmp_path: Path) -> None:
    code = "import os, time; time.sleep(0.2); os.makedirs('a/b'); open('a/b/.c.tmp-12', 'w'); time.sleep(600)"
    with Watch(tmp_path) as watch:
        process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path)
        try:
            assert watch.wait(re.compile(r"/a/b/\.c\.tmp-\d+"), 1, 60, lambda: False)
        finally:
            process.kill()
            process.wait()
