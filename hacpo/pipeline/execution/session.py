"""What the stages run by one process share: how progress is shown, models and a verifier kept between stages."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from hacpo.engines.cache import ModelCache
    from hacpo.settings.verification import VerificationSettings
    from hacpo.verifying.verifier import Verifier


class ProgressSink(Protocol):
    """Receives how far a stage is."""

    def report(self, stage: str, done: int, total: int, facts: dict[str, float]) -> None:
        """`done` of `total` units; `facts` are numbers worth showing, such as tokens or loss."""

    def finished(self, stage: str, summary: str) -> None:
        """The stage is complete."""

    def remark(self, text: str) -> None:
        """A line that the user should not miss."""


class ConsoleProgress:
    """A bar on standard error where that is a terminal, and one closing line on standard output."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(stderr=True)
        self._bar: object | None = None

    @contextmanager
    def showing(self, title: str) -> Iterator[None]:
        """Show a bar while the block runs."""
        if not self._console.is_terminal:
            yield
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[facts]}"),
        )
        with Progress(*columns, console=self._console, transient=True) as bar:
            self._bar, self._task = bar, bar.add_task(title, total=None, facts="")
            yield
        self._bar = None

    def report(self, stage: str, done: int, total: int, facts: dict[str, float]) -> None:  # noqa: ARG002
        """Move the bar."""
        if self._bar is not None:
            shown = " ".join(f"{name} {value:,.4g}" for name, value in facts.items())
            self._bar.update(self._task, completed=done, total=total, facts=shown)  # type: ignore[attr-defined]

    def finished(self, stage: str, summary: str) -> None:
        """Print the closing line."""
        print(f"{stage}: {summary}", file=sys.stdout, flush=True)

    def remark(self, text: str) -> None:
        """Print it below the closing line."""
        print(text, file=sys.stdout, flush=True)


@dataclass
class Session:
    """One process's shared state. The driver and its workers keep one alive; a single command makes its own."""

    progress: ProgressSink = field(default_factory=ConsoleProgress)
    driver: bool = False
    """The driver already holds the pipeline's lock."""

    _verifiers: dict[str, Verifier] = field(default_factory=dict)
    """Settings -> the verifier whose processes are kept."""

    @functools.cached_property
    def models(self) -> ModelCache:
        """Models and tokenizers kept warm (imports torch on first use)."""
        from hacpo.engines.cache import ModelCache

        return ModelCache()

    @contextmanager
    def verifier(self, settings: VerificationSettings, root: Path) -> Iterator[Verifier]:
        """What rewards responses. Its processes stay for the next stage; only a function of the user's starts anew in
        each, so that what it makes of a response does not depend on which stages ran before in one process.

        Args:
            root: the project's root.
        """
        from hacpo.verifying.verifier import Verifier

        if settings.is_function:
            with Verifier(settings, root) as of_stage:
                yield of_stage
            return
        key = settings.model_dump_json()
        if key not in self._verifiers:
            self._verifiers[key] = Verifier(settings, root)
        self._verifiers[key].make_ready()
        yield self._verifiers[key]

    def close(self) -> None:
        """End the processes that are kept for the next stage."""
        while self._verifiers:
            self._verifiers.popitem()[1].close()

    def free_models(self) -> None:
        """Forget the models that are kept warm, if any: other processes need the memory."""
        if "models" in self.__dict__:
            self.models.discard_all()


def quiet_threads() -> None:
    """Set the environment that torch reads when it loads: idle OpenMP threads sleep (2-10x on small models)."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # products on a GPU that repeat themselves
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
