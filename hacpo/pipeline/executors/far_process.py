"""What is done with an order where it is carried out: a process of hacpo's own, as on one machine, and a file that says
how far it is."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hacpo.artifacts import storage
from hacpo.errors import HacpoError
from hacpo.pipeline.execution.workers import WorkerLostError, Workers

_EVERY_SECONDS = 0.5


class Report:
    """Progress (`ProgressSink`) of an order, in a small JSON file: host, stage, done, total, facts, and what the
    closing lines are."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._content: dict[str, Any] = {"host": host(), "lines": []}
        self._written = 0.0
        self._write()

    def report(self, stage: str, done: int, total: int, facts: dict[str, float]) -> None:
        """How far it is; written twice a second at most."""
        self._content |= {"stage": stage, "done": done, "total": total, "facts": facts}
        if time.monotonic() - self._written > _EVERY_SECONDS:
            self._write()

    def finished(self, stage: str, summary: str) -> None:
        """Its closing line."""
        self._content |= {"stage": stage, "summary": summary}
        self._write()

    def remark(self, text: str) -> None:
        """A line that the user should not miss."""
        self._content["lines"].append(text)
        self._write()

    def _write(self) -> None:
        self._written = time.monotonic()
        scratch = self._path.with_name(f"{self._path.name}.new")
        with contextlib.suppress(OSError):  # nothing depends on it
            self._path.parent.mkdir(parents=True, exist_ok=True)
            scratch.write_text(json.dumps(self._content), encoding="utf-8")
            scratch.replace(self._path)


def host() -> str:
    """This machine's name, with that of the cluster's node where several are on one machine."""
    return os.environ.get("HACPO_NODE") or socket.gethostname()


class FarProcess:
    """A process of hacpo's that carries out one order after another, and keeps models in between."""

    def __init__(self, root: str, environment: dict[str, str]) -> None:
        os.chdir(root)
        for name in ("OMP_NUM_THREADS", "RAY_RUNTIME_ENV_HOOK"):
            os.environ.pop(name, None)  # Ray's own, which results would depend on
        os.environ.update(environment)
        self._workers: Workers | None = None
        self._relay = _Relay()

    def carry_out(self, arguments: list[str], report: str, wanted: str) -> tuple[str, tuple[object, ...]]:
        """Run one command; returns `done`, `failed` (line, exit code), `crashed` (error, traceback) or `lost` (why).

        Args:
            report: the file for its progress.
            wanted: the version of hacpo that gives the order.
        """
        if version("hacpo") != wanted:
            line = f"hacpo {version('hacpo')} is installed on {host()}, and {wanted} gives the orders"
            return "failed", (line, HacpoError.exit_code)
        self._relay.to = Report(Path(report))
        if self._workers is None:
            self._workers = Workers(1, self._relay)
        _, failure = self._workers.run([(0, arguments)])
        if failure is None:
            return "done", ()
        if isinstance(failure, WorkerLostError):
            self.close()
            return "lost", (str(failure),)
        if isinstance(failure, HacpoError):
            return "failed", (f"{failure} [on {host()}]", failure.exit_code)
        notes = getattr(failure, "__notes__", [])
        return "crashed", (str(failure), "\n".join([*notes]))

    def close(self) -> None:
        """End the process."""
        if self._workers is not None:
            self._workers.__exit__(None, None, None)
            self._workers = None


class _Relay:
    """The progress of whichever order is being carried out."""

    to: Report | None = None

    def report(self, stage: str, done: int, total: int, facts: dict[str, float]) -> None:
        if self.to is not None:
            self.to.report(stage, done, total, facts)

    def finished(self, stage: str, summary: str) -> None:
        if self.to is not None:
            self.to.finished(stage, summary)

    def remark(self, text: str) -> None:
        if self.to is not None:
            self.to.remark(text)


def passed_on() -> dict[str, str]:
    """What of this process's environment holds for those that carry out its orders."""
    names = ("OMP_NUM_THREADS", "HACPO_FSYNC")
    return {name: os.environ[name] for name in names if name in os.environ}


def remove_reports(folder: Path) -> None:
    """Forget how far orders were."""
    storage.remove(folder)
