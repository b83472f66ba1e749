"""The stages of a run, one after the other or side by side, each recorded when it has ended.

A stage begins when what it reads is in place. What was made is recorded while the workers go on, in the order in which
it was finished: no record names what has none itself. Only a stage that DVC knows something of waits for the records of
those before it, since to restore or to skip it is to record it.
"""

from __future__ import annotations

import functools
import shlex
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hacpo.phrases import mebibytes
from hacpo.pipeline.catalogue import EVALUATE
from hacpo.pipeline.execution.workers import Crew
from hacpo.pipeline.project import Pipeline
from hacpo.pipeline.records.bookkeeping import Books
from hacpo.pipeline.records.caching import CheckpointCache
from hacpo.pipeline.records.order import makes_checkpoint, may_be_pruned, of_run, spec_of
from hacpo.pipeline.records.seen import Seen
from hacpo.pipeline.retention.pruning import plan_pruning, prune
from hacpo.pipeline.running.remaking import Remaking
from hacpo.pipeline.running.restoring import needed_checkpoints, train_again
from hacpo.pipeline.running.task_graph import Task, TaskGraph
from hacpo.pipeline.views.live_view import RunView


class Runner:
    """One `hacpo run`, from what is there to its end.

    Args:
        remaking: asks before finished steps are made again.
    """

    def __init__(self, pipeline: Pipeline, books: Books, workers: Crew, remaking: Remaking, view: RunView) -> None:
        self._pipeline, self._books, self._workers = pipeline, books, workers
        self._remaking, self._view = remaking, view
        self._cache, self._seen = CheckpointCache(pipeline, books), Seen(pipeline, books)
        self._waiting: list[Task] = []
        """Stages that have to run, and whose inputs are there."""
        self._working: dict[int, Task] = {}
        """Worker -> what it is at."""
        self._unrecorded: deque[Task] = deque()
        """Stages that have run, the first that ended first."""
        self._failure: Exception | None = None
        self._ran: Counter[int] = Counter()
        """Step -> how many of its stages were run."""
        self._trained: set[int] = set()
        """Steps that a checkpoint was made in."""
        self._freed = 0

    def through(self, until: int | None) -> int:
        """Run every stage that is not done, up to a step; returns how many ran.

        Raises:
            HacpoError: a stage failed, or cannot be recorded; what was finished before is recorded.
        """
        graph = TaskGraph(self._pipeline, self._books, self._seen, until)
        if graph.tasks:
            self._view.passed(graph.passed)
        else:
            self._close(graph.last, [], is_last=True)
        while graph.tasks:
            with self._noting_failure():
                if self._failure is None:
                    self._judge(graph.tasks)
                    self._give(graph.tasks)
            if self._working and self._heard(wait=not self._unrecorded):
                continue  # what comes next for that worker goes before any record
            if self._unrecorded:
                self._record()
            elif self._failure is not None and not self._working:
                raise self._failure
            with self._noting_failure():
                for step, tasks in graph.closed():
                    self._close(step, tasks, is_last=not graph.tasks)
        if self._failure is not None:
            raise self._failure
        if graph.last == self._pipeline.settings.steps:
            self._remaking.done()
        if self._freed:
            self._view.note(f"retention: {mebibytes(self._freed)} of checkpoints pruned")
        return self._ran.total()

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        """Nothing begins after a failure, but what is at work ends, and is recorded."""
        try:
            yield
        except Exception as error:
            self._failure = self._failure or error

    # --- what has to run ---------------------------------------------------------------------------------------------

    def _judge(self, tasks: Sequence[Task]) -> None:
        """Find out which of the stages whose inputs are there have to run, and prepare these."""
        todo: dict[int, list[Task]] = {}
        for task in tasks:
            if task.ready:
                if self._judge_one(task):
                    todo.setdefault(task.step, []).append(task)
                if self._failure is not None:
                    return
        while self._remaking.told:
            self._view.note(self._remaking.told.pop())
        self._view.restored = self._books.restored
        for of_step in todo.values():
            self._train_again(of_step)
            if self._failure is not None:
                return
            with self._books.open():
                for task in of_step:
                    self._cache.release(task.step, task.stage)
                    self._books.begin(task.stage, noted=task.new)
            self._waiting += of_step

    def _judge_one(self, task: Task) -> bool:
        """Compare a stage with its record, after the records of those before it, and restore it if that is possible;
        returns whether it has to run."""
        with self._books.open():
            first = of_run(task.stage) or any(of_run(need.stage) and not need.recorded for need in task.needs)
            if not (first or self._books.replaces_outputs) or all(need.recorded for need in task.needs):
                task.new = self._books.is_new(task.stage)
            while not task.new and not all(need.recorded for need in task.needs):
                self._record()
                if self._failure is not None:
                    return False
            task.judged, task.looked_at = True, self._seen.now()
            task.recorded = task.made = not task.new and self._books.make_current(
                task.stage,
                may_be_pruned=may_be_pruned(self._pipeline, task.step, task.stage),
                before=functools.partial(self._remaking.check_stage, task.step),
            )
        if task.recorded and spec_of(task.stage) == EVALUATE:
            self._view.settled(task.step, [task.command])
        return not task.recorded

    def _train_again(self, tasks: Sequence[Task]) -> None:
        """Bring back pruned checkpoints that these stages of one step read."""
        needed = needed_checkpoints(self._pipeline, self._books, [task.stage for task in tasks])
        if not needed:
            return
        while self._working or self._unrecorded:  # it needs all workers
            if self._working:
                self._heard(wait=True)
            while self._unrecorded:
                self._record()
        if self._failure is None:
            train_again(self._pipeline, self._books, self._workers, needed, self._view.note)

    # --- running -----------------------------------------------------------------------------------------------------

    def _give(self, tasks: Sequence[Task]) -> None:
        """Give every idle worker the first of what waits for it."""
        order = {task: number for number, task in enumerate(tasks)}
        self._waiting.sort(key=order.__getitem__)
        for worker in self._workers.idle:
            mine = (task for task in self._waiting if task.slot is None or task.slot % len(self._workers) == worker)
            if (task := next(mine, None)) is not None:
                self._waiting.remove(task)
                self._working[worker] = task
                self._ran[task.step] += 1
                self._view.works(task.step, task.command)
                self._workers.give(worker, shlex.split(task.stage.cmd)[1:])

    def _heard(self, *, wait: bool) -> bool:
        """Take in which workers have ended; returns whether any has."""
        ended = self._workers.outcomes(wait_for_one=wait)
        for worker, failure in ended:
            task = self._working.pop(worker)
            if failure is None:
                task.made = True
                self._unrecorded.append(task)
            self._failure = self._failure or failure
        return bool(ended)

    # --- records -----------------------------------------------------------------------------------------------------

    def _record(self) -> None:
        """Record the stage that ended first of those that are not recorded yet."""
        task = self._unrecorded.popleft()
        if not all(need.recorded for need in task.needs):
            return  # one of these could not be recorded
        with self._noting_failure():
            task.looked_at = self._seen.now()
            self._books.finish(task.stage)
            task.recorded = True
            if makes_checkpoint(task.stage):
                self._trained.add(task.step)
            self._view.settled(task.step, [task.command])

    def _close(self, step: int, tasks: Sequence[Task], *, is_last: bool) -> None:
        """A step is recorded as a whole: do with the checkpoints up to it what the retention settings say."""
        ran = any(at <= step for at in self._ran)
        if step in self._ran:
            self._view.settled(step, [task.command for task in tasks])
        self._view.closed(step)
        self._note(f"{step:04d}", [task for task in tasks if of_run(task.stage) != "after"])
        self._note("after", [task for task in tasks if of_run(task.stage) == "after"])
        if not ran and not is_last:
            return
        newest = step in self._trained or (is_last and step == self._pipeline.settings.steps)
        plans = plan_pruning(self._pipeline, step)
        with self._books.open():
            self._cache.follow(plans, step, newest=newest)
        while self._cache.told:
            self._view.note(self._cache.told.pop())
        self._freed += prune(self._pipeline, plans)

    def _note(self, name: str, tasks: Sequence[Task]) -> None:
        """Note what is done now, so that the next run need not look at it stage by stage."""
        steps = {task.stage: task.step for task in tasks}

        def compare(stage: Any) -> bool:
            pruned = may_be_pruned(self._pipeline, steps[stage], stage)
            return self._books.compare(stage, may_be_pruned=pruned)

        if tasks:
            with self._books.open():
                self._seen.note(name, {task.stage: task.looked_at for task in tasks}, compare)
