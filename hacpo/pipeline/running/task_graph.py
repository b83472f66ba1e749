"""Which stages of a run may begin: those whose inputs are there, whoever else is still at work.

A stage needs the stages whose outputs lie where its dependencies do, as DVC's files say. Those before all steps are
needed by all, and those after need all. Two steps are looked at side by side: an agent samples for the next one while
others still train.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hacpo.pipeline.project import Pipeline
from hacpo.pipeline.records.bookkeeping import Books
from hacpo.pipeline.records.order import agent_of, command_of, of_run, stage_groups, step_file
from hacpo.pipeline.records.seen import Seen


@dataclass(eq=False)
class Task:
    """A stage on its way.

    Attributes:
        slot: the number of the agent whose part it is; None: any worker may run it.
        needs: stages under way that it waits for: those that make what it reads, and those before all steps.
        judged: it is known whether it has to run.
        new: DVC knew nothing of it then, and its inputs are noted.
        looked_at: the time before it was last compared with its record (`Seen.now`); None: it was not.
        made: its outputs are there.
        recorded: DVC knows them too.
    """

    step: int
    stage: Any
    slot: int | None
    needs: list[Task] = field(default_factory=list)
    judged: bool = False
    new: bool = False
    looked_at: int | None = None
    made: bool = False
    recorded: bool = False

    @property
    def command(self) -> str:
        """The command's name."""
        return command_of(self.stage)

    @property
    def ready(self) -> bool:
        """Whether it can be judged: nothing that it waits for is still to be made."""
        return not self.judged and all(need.made for need in self.needs)


class TaskGraph:
    """The stages of a run and what each waits for, two steps at a time.

    Args:
        seen: what is noted of steps that were done; those that look as they did then are passed over.

    Attributes:
        tasks: of the steps that are under way, in the order of the pipeline.
        passed: how many steps are passed over, from the start on.
        last: the last step that is to be done.
    """

    def __init__(self, pipeline: Pipeline, books: Books, seen: Seen, until: int | None = None) -> None:
        self.last = pipeline.settings.steps if until is None else min(until, pipeline.settings.steps)
        names = [f"{step:04d}" for step in range(self.last + 1)]
        names += ["after"] if self.last == pipeline.settings.steps else []
        same = len([*itertools.takewhile(seen.is_unchanged, names)])
        self.passed = min(same, self.last + 1)
        self.tasks: list[Task] = []
        if same == len(names):
            self._steps: Iterator[tuple[int, list[Any]]] = iter(())
            return
        if self.passed:
            books.take_for_current(step_file(pipeline, self.passed - 1))
        groups = stage_groups(pipeline, books, until, first=self.passed)
        self._steps = (
            (step, [stage for _, stages in of_step for stage in stages])
            for step, of_step in itertools.groupby(groups, key=lambda group: group[0])
        )
        self._slots = {agent: number for number, agent in enumerate(pipeline.settings.agents)}
        self._first: list[Task] = []
        self._look_at_next()
        self._look_at_next()

    def _look_at_next(self) -> None:
        """Take in the stages of one step more, if there is one."""
        for step, stages in itertools.islice(self._steps, 1):
            for stage in stages:
                at = of_run(stage)
                needs = [task for task in self.tasks if at or _reads(stage, task.stage)]
                needs += [task for task in self._first if task not in needs]
                self.tasks.append(Task(step, stage, self._slots.get(agent_of(stage)), needs))
                if at == "before":
                    self._first.append(self.tasks[-1])

    def closed(self) -> Iterator[tuple[int, list[Task]]]:
        """Steps all of whose stages are recorded, with these; they are under way no more."""
        while self.tasks:
            step = self.tasks[0].step
            tasks = [task for task in self.tasks if task.step == step]
            if not all(task.recorded for task in tasks):
                return
            del self.tasks[: len(tasks)]
            for task in tasks:
                task.needs.clear()  # else every step would hold the one before, for ever
            self._look_at_next()
            yield step, tasks


def _reads(stage: Any, other: Any) -> bool:
    """Whether a stage reads something that another one makes: the same path, one below it or one that it is below."""
    made = [f"{out.fs_path}{os.sep}" for out in other.outs]
    read = [f"{dep.fs_path}{os.sep}" for dep in stage.deps]
    return any(of.startswith(into) or into.startswith(of) for of in made for into in read)
