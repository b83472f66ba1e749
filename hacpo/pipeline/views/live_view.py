"""What `hacpo run` shows while it works: a live view on a terminal, one line a step elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hacpo.evaluation.values import best_step, result
from hacpo.pipeline.catalogue import EVALUATE, GENERATE, PREPARE, REPORT_STAGE, STAGES, VERIFY, WARMUP
from hacpo.pipeline.noted import numbers
from hacpo.pipeline.project import Pipeline

_QUIET_SECONDS = 15.0
"""Without a terminal, slow stages say how far they are this often."""
_CLOSING_LINES = {stage.name for stage in (PREPARE, WARMUP, REPORT_STAGE)}
"""What belongs to no step: when it ends, that is said at once."""


class RunView:
    """Progress of a run. Also the sink that stages report to.

    Args:
        pipeline: the run.
        stamped: DVC files that had to be rewritten.
    """

    def __init__(self, pipeline: Pipeline, *, stamped: Sequence[Path] = ()) -> None:
        self._pipeline = pipeline
        self._agents = list(pipeline.settings.agents)
        self._console = Console(stderr=True)
        self._started = time.monotonic()
        self._step = 0
        self._stage = "looking at what is done"
        self._ran = 0
        self._step_seconds: list[float] = []
        self._closed = time.monotonic()
        self._under_way: set[int] = set()
        """Steps that something was run of, and that are not done."""
        self._working: dict[str, tuple[int, int, dict[str, float]]] = {}
        self._reward: dict[str, float] = {}
        self._held_out: dict[str, dict[int, float]] = {agent: {} for agent in self._agents}
        self._speed: dict[str, float] = {}
        self._said = time.monotonic()
        self.restored = 0
        self._live = Live(console=self._console, refresh_per_second=8, get_renderable=self._render, transient=True)
        if stamped:
            self._console.print(f"stamped {len(stamped)} DVC files below {pipeline.folder}")

    def __enter__(self) -> RunView:
        if self._console.is_terminal:
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.__exit__(kind, error, trace)
        if kind is None and not self._ran:
            again = f", {self.restored} restored from DVC's cache" if self.restored else ""
            self._console.print(
                f"{self._pipeline.run}: everything is done already{again} ({self._elapsed():.1f} s to see it)"
            )

    # --- called by the driver ----------------------------------------------------------------------------------------

    def passed(self, steps: int) -> None:
        """The first steps are done, and nobody looks at their stages."""
        for step in range(steps):
            if self._pipeline.settings.evaluated(step):
                self.settled(step, [EVALUATE.name])

    def works(self, step: int, stage: str) -> None:
        """A stage of a step begins."""
        self._step, self._stage = step, stage
        self._under_way.add(step)
        self._ran += 1

    def closed(self, step: int) -> None:
        """All of a step is done and recorded."""
        seconds, self._closed = time.monotonic() - self._closed, time.monotonic()
        if step not in self._under_way:
            return
        self._under_way.remove(step)
        if step > 0:
            self._step_seconds.append(seconds)
            if not self._console.is_terminal:
                lines = "  ".join(self._line(agent, step) for agent in self._agents)
                self._console.print(
                    f"step {step:>4}/{self._pipeline.settings.steps}  {lines}  {seconds:.1f} s",
                    highlight=False,
                    soft_wrap=True,
                )

    def note(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def settled(self, step: int, stages: Sequence[str]) -> None:
        """These stages are done and recorded."""
        for stage in (STAGES[name] for name in stages if name in STAGES):
            for agent in self._agents:
                metrics = numbers(self._pipeline.layout, stage, step, agent)
                if stage == VERIFY and "accuracy" in metrics:
                    self._reward[agent] = metrics["accuracy"]
                if stage == EVALUATE:
                    leading = self._pipeline.settings.evaluation.leading
                    pipeline = self._pipeline
                    value = (
                        result(pipeline.layout, pipeline.run, pipeline.settings.evaluation, leading, step, agent)
                        if leading is not None
                        else None
                    )
                    if value is not None:
                        self._held_out[agent][step] = value
                if stage == GENERATE and metrics.get("seconds"):
                    self._speed[agent] = metrics.get("tokens", 0) / metrics["seconds"]

    # --- called by stages --------------------------------------------------------------------------------------------

    def report(self, stage: str, done: int, total: int, facts: dict[str, float]) -> None:
        """See `ProgressSink`."""
        self._working[stage] = (done, total, facts)
        if not self._console.is_terminal and time.monotonic() - self._said > _QUIET_SECONDS:
            self._said = time.monotonic()
            self._console.print("  ".join(f"{name} {at}/{of}" for name, (at, of, _) in sorted(self._working.items())))

    def finished(self, stage: str, summary: str) -> None:
        """See `ProgressSink`; slow stages get a line of their own."""
        self._working.pop(stage, None)
        if stage.partition(" ")[0] in _CLOSING_LINES:
            self._console.print(f"{stage}: {summary}", highlight=False)

    def remark(self, text: str) -> None:
        """See `ProgressSink`."""
        self._console.print(Text(text, style="yellow"), soft_wrap=True)

    # --- drawing -----------------------------------------------------------------------------------------------------

    def _elapsed(self) -> float:
        return time.monotonic() - self._started

    def _line(self, agent: str, step: int) -> str:
        reward = numbers(self._pipeline.layout, VERIFY, step, agent).get("accuracy")
        mean = "  -  " if reward is None else f"{reward:.3f}"
        held_out = {at: value for at, value in self._held_out[agent].items() if at <= step}
        return f"{agent}: mean reward {mean}, held out {_course(held_out)}"

    def _remaining(self) -> str:
        if not self._step_seconds:
            return "estimating"
        recent = self._step_seconds[-5:]
        left = (self._pipeline.settings.steps - self._step) * sum(recent) / len(recent)
        return f"about {left / 60:.0f} min {left % 60:02.0f} s left" if left >= 60 else f"about {left:.0f} s left"

    def _render(self) -> RenderableType:
        settings = self._pipeline.settings
        head = Text.assemble(
            (f"{self._pipeline.run}", "bold"),
            f"  {settings.algorithm.recipe}, {len(self._agents)} agents   ",
            (f"step {self._step}/{settings.steps}", "bold cyan"),
            f"   {self._stage}   {self._elapsed():.0f} s, {self._remaining()}",
        )
        table = Table(box=None, padding=(0, 2), show_edge=False)
        for name in ("agent", "mean reward", "held out", "tokens/s", "", ""):
            table.add_column(name, justify="left")
        for agent in self._agents:
            now = next((state for title, state in self._working.items() if title.endswith(f" {agent}")), None)
            bar: RenderableType = ""
            text = ""
            if now is not None:
                done, total, facts = now
                bar = ProgressBar(total=max(total, 1), completed=done, width=24)
                text = " ".join([f"{done}/{total}", *(f"{name} {value:.3g}" for name, value in facts.items())])
            table.add_row(
                agent,
                f"{self._reward[agent]:.3f}" if agent in self._reward else "",
                _course(self._held_out[agent]),
                f"{self._speed[agent]:,.0f}" if agent in self._speed else "",
                bar,
                text,
            )
        overall = Table.grid()  # a bar alone does not end its line
        overall.add_row(ProgressBar(total=settings.steps, completed=max(self._step - 1, 0), width=60))
        return Group(head, overall, table)


def _course(results: Mapping[int, float]) -> str:
    """The first and the latest of an agent's evaluations, and the best where it is neither, with their steps."""
    if not results:
        return "-"
    first, last = min(results), max(results)
    if first == last:
        return f"{results[first]:.3f} (step {first})"
    best = best_step(results)
    also = f", best {results[best]:.3f} (step {best})" if best is not None and results[best] > results[last] else ""
    return f"{results[first]:.3f} -> {results[last]:.3f} (step {last}){also}"
