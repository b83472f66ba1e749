"""Warm starts shared between the cells of a sweep, so that none is made twice.

What decides a start is the agent's name and what `warmup` reads of the settings (`copying.start_of`): not the recipe,
not the run's seed where `start_seed` is given. The first cell that needs a start makes it, as any run does; the others
take it by hard link, and wait for it while it is being made.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from hacpo.pipeline.running.copying import share_start, start_of
from hacpo.pipeline.sweeping.planned_cells import PlannedCell


class Starts:
    """Which cells have which starts."""

    def __init__(self, cells: Iterable[PlannedCell]) -> None:
        self._of: dict[str, dict[str, str]] = {}
        """Name of a cell -> agent -> what decides its start."""
        self._holders: dict[str, list[PlannedCell]] = {}
        for cell in cells:
            agents = cell.pipeline.settings.agents
            self._of[cell.cell.name] = {agent: start_of(cell.pipeline, agent) for agent in agents}
            for start in self._of[cell.cell.name].values():
                self._holders.setdefault(start, []).append(cell)
        self._useless: set[tuple[str, str]] = set()
        """(cell, agent) whose start is there and not recorded, not as it was made, or about to go."""

    def give(self, cell: PlannedCell, running: Collection[PlannedCell]) -> bool:
        """Give a cell the starts that there are; returns whether it may begin: no other is making one that it lacks.

        Raises:
            HacpoError: its settings cannot be used, or somebody works on it.
        """
        wanted: dict[str, list[str]] = {}
        sources: dict[str, PlannedCell] = {}
        for agent, start in self._of[cell.cell.name].items():
            if _has(cell, agent):
                continue
            others = [other for other in self._holders[start] if other is not cell]
            source = next((other for other in others if self._may_give(other, agent)), None)
            if source is not None:
                wanted.setdefault(source.cell.name, []).append(agent)
                sources[source.cell.name] = source
            elif any(other in running for other in others):
                return False
        for name, agents in wanted.items():
            shared = share_start(sources[name].pipeline, cell.pipeline, agents)
            lacking = [agent for agent in agents if agent not in shared and not _has(cell, agent)]
            if lacking and sources[name] in running:
                return False  # made, and about to be recorded
            self._useless |= {(name, agent) for agent in lacking}
        return True

    def _may_give(self, cell: PlannedCell, agent: str) -> bool:
        return _has(cell, agent) and (cell.cell.name, agent) not in self._useless

    def without(self, cell: PlannedCell) -> None:
        """Let no other cell have its starts from this one any more: some of its files may have gone."""
        self._useless |= {(cell.cell.name, agent) for agent in self._of[cell.cell.name]}

    def needed_from(self, cell: PlannedCell, waiting: Collection[PlannedCell]) -> bool:
        """Whether a cell that waits lacks a start that no other than this cell has."""
        return any(
            not _has(other, agent)
            and start == self._of[cell.cell.name].get(agent)
            and not any(self._may_give(holder, agent) for holder in self._holders[start] if holder is not cell)
            for other in waiting
            for agent, start in self._of[other.cell.name].items()
        )


def _has(cell: PlannedCell, agent: str) -> bool:
    """Whether an agent's start is there; checkpoints are there whole or not at all."""
    return cell.pipeline.layout.checkpoint(0, agent).is_dir()
