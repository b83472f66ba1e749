"""SIGKILL at random and at targeted moments, over `hacpo run` and `dvc repro` in alternation.

A trial is the life of one run: killed some times on its way, then finished by either driver, and compared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
import subprocess
import time
from dataclasses import dataclass

import psutil

from . import checks, processes
from .frame import Bench, Part, Trial
from .sandbox import PIPELINE, STEPS, Ended, Sandbox, Template, drivers, hacpo
from .watching import IS_AVAILABLE, Watch
from .zygote import FORKED_STAGES

TARGETS = {
    "anything": ("", 400),
    "hacpo's temporaries": (r"/\.[^/]*\.tmp-\d+", 12),
    "a checkpoint": (r"/checkpoints/step=\d+/", 20),
    "saved responses": (r"/\.saved/", 6),
    "dvc.lock": (r"/\.?dvc\.lock", 12),
    "DVC's lock": (r"/\.dvc/tmp/lock$", 20),
    "rwlock": (r"/\.dvc/tmp/\.?rwlock[^/]*$", 40),
    "run cache": (r"/\.dvc/cache/runs/", 30),
    "cache": (r"/\.dvc/cache/files/", 60),
    "DVC's temporaries": (r"\.[\w-]{22}\.tmp", 30),
    "DVC's lease": (r"/\.dvc/tmp/\.?dvc\.lease", 20),
    "leases": (r"/\.locks/", 12),
    "metrics": (r"/metrics/", 6),
    "pruning": (r"pruned", 8),
    "report": (r"/report/", 4),
}
"""What to kill at: name -> a pattern of the changed path, and the most such changes to let pass."""
MODES = {"group": 5, "driver alone": 3, "one below": 2, "all at once": 1}
"""What to kill, and how often: the session as a terminal's end does, the parent as a short memory does, one process
that it started, everything as a power cut does."""
_DELAYS = (0.0, 0.0, 0.0, 0.0005, 0.005, 0.05, 0.5)
"""Seconds between what was seen and the kill."""
_CACHE_TYPES = ("", "", "hardlink,copy", "symlink", "reflink,copy")
"""How DVC is told to put what is in its cache in place; not at all mostly."""
_RANDOM_SECONDS, _TARGET_SECONDS, _ORPHAN_SECONDS = 8.0, 20.0, 10.0


@dataclass(frozen=True)
class Kill:
    """When to kill what."""

    target: str
    """Of TARGETS, or `a random moment`."""
    passes: int
    delay: float
    mode: str


def run(bench: Bench) -> None:
    """Lives of runs, until there were enough kills."""
    bench.tally.planned = bench.kills
    enough = itertools.takewhile(lambda _: bench.tally.counts["kills"] < bench.kills, itertools.count())
    with Template.of(bench.work) as template:
        bench.spread(lambda trial: _Life(trial, template).live(), enough)


class _Life:
    def __init__(self, trial: Trial, template: Template) -> None:
        self._trial, self._dice = trial, trial.dice
        kind = self._dice.choice(["kept", "kept", "pruned", "pruned", "remade"])
        steps = self._dice.randrange(STEPS) + (kind == "remade")  # something is to be trained again
        self._sandbox: Sandbox = template.copy(trial.folder, kind, steps)
        self._kind = kind
        self._links, self._is_in_git = self._dice.choice(_CACHE_TYPES), self._dice.random() < 0.25
        self._furnish()

    def _furnish(self) -> None:
        """Say how DVC links what is in its cache, and have some projects in git."""
        root = self._sandbox.root
        config = root / ".dvc" / "config"
        text = config.read_text() + (f"[cache]\n    type = {self._links}\n" if self._links else "")
        config.write_text(text.replace("    no_scm = true\n", "") if self._is_in_git else text)
        if self._is_in_git:
            (root / ".gitignore").write_text("/artifacts/*\n/models/\n/.dvc/cache\n/.dvc/tmp\n")
            self._git("init", "--quiet")
            self._commit()

    def _git(self, *words: str) -> None:
        variables = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull, **os.environ}
        who = ("-c", "user.name=soak", "-c", "user.email=soak@example.invalid")
        subprocess.run(["git", *who, *words], cwd=self._sandbox.root, env=variables, check=True, capture_output=True)

    def _commit(self) -> None:
        """What DVC's records say at this moment: a commit keeps what they name in the cache."""
        self._git("add", "--all")
        self._git("commit", "--quiet", "--allow-empty", "--message", "so far")
        self._trial.count("commits")

    def live(self) -> None:
        """Be killed some times, come to the end, and be compared."""
        trial, first = self._trial, self._dice.choice([0, 1])
        for turn in range(first, first + self._dice.randint(10, 30)):
            if self._enough() or self._attack(("run", "repro")[turn % 2], self._kill()) or trial.problems:
                break
        if not trial.problems:
            self._finish(self._dice.choice(["run", "run", "repro"]))

    def _start(self, command: list[str]) -> processes.Started:
        """As a new interpreter that starts new ones now and then; forks mostly, which are at work at once."""
        if self._dice.random() < 0.05:
            return dataclasses.replace(self._sandbox, zygote=None).start(command)
        return self._sandbox.start(command, **{FORKED_STAGES: "1"})

    def _command(self, way: str) -> list[str]:
        """Agents side by side in processes of their own now and then; alone they need no new interpreter."""
        return drivers(self._kind, jobs=1 + (self._dice.random() < 0.08))[way]

    def _enough(self) -> bool:
        """Not before the first kill, however long the template took: where nothing was killed, nothing was shown."""
        bench = self._trial.bench
        done = bench.tally.counts["kills"]
        return done >= bench.kills or (bench.is_over() and done > 0)

    def _kill(self) -> Kill:
        dice = self._dice
        mode = dice.choices(list(MODES), list(MODES.values()))[0]
        if not IS_AVAILABLE or dice.random() < 0.3:
            return Kill("a random moment", 0, dice.uniform(0.1, _RANDOM_SECONDS), mode)
        target = dice.choice(list(TARGETS))
        passes = int(TARGETS[target][1] ** dice.random())  # mostly early, so that most of them come about
        return Kill(target, passes, dice.choice(_DELAYS), mode)

    # --- one kill ----------------------------------------------------------------------------------------------------

    def _attack(self, way: str, kill: Kill) -> bool:
        """Start a driver, and kill; returns whether the run came to its end before."""
        command = self._command(way)
        with Watch(self._sandbox.root) as watch, self._start(command) as started:
            hit = self._wait(kill, watch, started)
            struck = started.process.poll() is None and self._strike(kill.mode, started)
            if struck:
                self._note(way, kill, hit)
        ended = Ended(tuple(command), started.process.returncode, started.output())
        self._problems_of(ended)
        if self._dice.random() < 0.3 and struck:
            self._no_orphans()
        if self._dice.random() < 0.1:
            self._look()
        if self._is_in_git and self._dice.random() < 0.5:
            self._commit()
        return not struck and self._went_well(way, ended)

    def _wait(self, kill: Kill, watch: Watch, started: processes.Started) -> bool:
        """Until the moment has come, or will not come."""

        def is_over() -> bool:
            return started.process.poll() is not None

        if kill.target == "a random moment":
            end = time.monotonic() + kill.delay
            while time.monotonic() < end and not is_over():
                time.sleep(0.005)
            return True
        pattern = re.compile(TARGETS[kill.target][0])
        hit = watch.wait(pattern, kill.passes, _TARGET_SECONDS, is_over)
        if kill.delay:
            time.sleep(kill.delay)
        return hit

    def _strike(self, mode: str, started: processes.Started) -> bool:
        """Kill; returns whether there was anything to kill."""
        if mode == "one below":
            below = started.below()
            if below:
                with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since
                    self._dice.choice(below).kill()
                self._let_go(started)
                return True
        elif mode == "driver alone":
            started.kill_alone()
            return True
        elif mode == "all at once":
            for process in list(processes.marked(str(self._sandbox.folder))):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        started.kill_group()
        return True

    def _let_go(self, started: processes.Started) -> None:
        """A driver that lost a process may end, or work on; it is killed if it does."""
        end = time.monotonic() + self._dice.uniform(0.0, 4.0)
        while time.monotonic() < end and started.process.poll() is None:
            time.sleep(0.01)
        started.kill_group()

    def _note(self, way: str, kill: Kill, hit: bool) -> None:
        target = kill.target if hit else "a random moment"
        for what in ("kills", f"driver: {way}", f"killed: {kill.mode}", f"at: {target}"):
            self._trial.count(what)

    # --- what must hold between --------------------------------------------------------------------------------------

    def _problems_of(self, ended: Ended) -> None:
        for problem in checks.of_output(ended):
            self._trial.find(problem.kind, problem.what)

    def _no_orphans(self) -> None:
        for process in processes.orphans(str(self._sandbox.folder), _ORPHAN_SECONDS):
            self._trial.find("orphan", processes.describe(process))

    def _look(self) -> None:
        """Commands that read a run must do with whatever there is."""
        ended = self._sandbox.call(hacpo("status", PIPELINE))
        self._problems_of(ended)
        if ended.code != 0:
            self._trial.find("refused", f"status: exit code {ended.code}: {ended.output[-500:]}")

    def _went_well(self, way: str, ended: Ended) -> bool:
        """Whether a driver that nobody killed came to its end; what it may do otherwise is in docs/reliability.md."""
        if ended.code == 0:
            return True
        if way == "repro":  # where DVC itself stumbles, `hacpo repair` is the whole cure
            self._trial.count("repairs before dvc repro")
            mended = self._sandbox.call(hacpo("repair", PIPELINE))
            self._problems_of(mended)
            if mended.code != 0:
                self._trial.find("refused", f"repair: exit code {mended.code}: {mended.output[-500:]}")
        again = self._sandbox.call(self._command(way), **{FORKED_STAGES: "1"})
        self._problems_of(again)
        if again.code != 0:
            self._trial.find("wedge", f"{way}: exit code {again.code}, on the second try: {again.output[-1500:]}")
        elif way == "run":
            self._trial.find("by hand", f"run: exit code {ended.code}, on the first try: {ended.output[-1500:]}")
        return again.code == 0

    # --- the end -----------------------------------------------------------------------------------------------------

    def _finish(self, way: str) -> None:
        """Go to the end, and compare."""
        checks.age(self._sandbox.root)
        ended = self._sandbox.call(self._command(way), **{FORKED_STAGES: "1"})
        self._problems_of(ended)
        if not self._went_well(way, ended):
            return
        self._trial.count("finished")
        for what in (way, self._kind, f"cache.type {self._links}", *(["in git"] if self._is_in_git else [])):
            self._trial.count(f"finished: {what}")
        for problem in checks.finished(self._sandbox, last=way):
            self._trial.find(problem.kind, problem.what)


PART = Part("kills", "SIGKILL at random and targeted moments, over both drivers in alternation", run, share=4.0)
