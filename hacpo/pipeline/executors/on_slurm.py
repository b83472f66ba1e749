"""Slurm, by submitit: the orders of one stage are one array job."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hacpo.errors import HacpoError, SettingsError, first_line
from hacpo.pipeline.execution.crashes import FaultElsewhereError
from hacpo.pipeline.execution.workers import StageFailedError
from hacpo.pipeline.executors.far_process import FarProcess, passed_on
from hacpo.pipeline.executors.orders import Order, Outcome
from hacpo.settings.executor import ExecutorSettings, StageResources

_LOOK_SECONDS = 0.5
_MINUTES = 24 * 60
"""Of a job, where `sbatch` does not say `time`."""


class SlurmExecutor:
    """See `orders.Executor`.

    Args:
        folder: where submitit keeps its scripts and logs; every machine must see it.
        cluster: `slurm`; `local` has submitit start processes here, for trying things out.

    Raises:
        SettingsError: submitit is not installed, or there is no Slurm.
    """

    def __init__(self, settings: ExecutorSettings, folder: Path, cluster: str = "slurm") -> None:
        try:
            import submitit
        except ImportError:
            raise SettingsError(
                "executor slurm: submitit is not installed", remedy="pip install 'hacpo[slurm]'"
            ) from None
        try:
            self._executor: Any = submitit.AutoExecutor(folder=folder, cluster=cluster)
        except Exception as error:  # RuntimeError, or what the cluster's plugin raises
            raise SettingsError(
                f"executor slurm: {first_line(error)}", remedy="run this on a machine that has sbatch"
            ) from None
        self._submitit: Any = submitit
        self._settings, self._cluster = settings, cluster
        self._version = version("hacpo")
        self._jobs: dict[int, Any] = {}

    def submit(self, orders: Sequence[Order]) -> None:
        """See `orders.Executor`."""
        alike: dict[StageResources, list[Order]] = defaultdict(list)
        for order in orders:
            alike[order.resources].append(order)
        for resources, some in alike.items():
            self._executor.update_parameters(**self._parameters(resources, some[0].arguments[0]))
            of = [
                (str(order.root), passed_on(), list(order.arguments), str(order.report), self._version)
                for order in some
            ]
            try:
                jobs = self._executor.map_array(_carry_out, *zip(*of, strict=True))
            except Exception as error:  # submitit's own, or sbatch's
                raise HacpoError(f"Slurm takes no job: {first_line(error, 300)}", where="executor.sbatch") from None
            self._jobs |= {order.number: job for order, job in zip(some, jobs, strict=True)}

    def _parameters(self, resources: StageResources, command: str) -> dict[str, Any]:
        sbatch = dict(self._settings.sbatch)
        wanted: dict[str, Any] = {
            "name": f"hacpo-{command}",
            "timeout_min": int(sbatch.pop("time", _MINUTES)),
            "cpus_per_task": max(1, round(resources.cpus)),
        }
        if resources.gpus:
            wanted["gpus_per_node"] = max(1, round(resources.gpus))
        if resources.memory_gib is not None:
            wanted["mem_gb"] = resources.memory_gib
        if self._cluster == "slurm":
            wanted["slurm_additional_parameters"] = sbatch
        return wanted

    def outcomes(self, seconds: float) -> list[Outcome]:
        """See `orders.Executor`."""
        until = time.monotonic() + seconds
        while self._jobs:
            ended = [number for number, job in self._jobs.items() if job.done()]
            if ended or time.monotonic() > until:
                return [self._outcome(number) for number in ended]
            time.sleep(min(_LOOK_SECONDS, max(0.0, until - time.monotonic())))
        return []

    def _outcome(self, number: int) -> Outcome:
        job = self._jobs.pop(number)
        try:
            kind, content = job.result()
        except self._submitit.core.utils.FailedJobError as error:  # an exception in the job's process
            return Outcome(number, FaultElsewhereError(first_line(error), str(error)))
        except Exception as error:  # UncompletedJobError, and what reading a half-written result raises
            return Outcome(number, lost=f"job {job.job_id}: {first_line(error)}")
        if kind == "failed":
            return Outcome(number, StageFailedError(*content))
        if kind == "crashed":
            return Outcome(number, FaultElsewhereError(*content))
        return Outcome(number, lost=str(content[0]) if kind == "lost" else "")

    def close(self) -> None:
        """See `orders.Executor`."""
        for job in self._jobs.values():
            job.cancel()
        self._jobs.clear()


def _carry_out(
    root: str, environment: dict[str, str], arguments: list[str], report: str, wanted: str
) -> tuple[str, tuple[object, ...]]:
    """An order in a job."""
    process = FarProcess(root, environment)
    try:
        return process.carry_out(arguments, report, wanted)
    finally:
        process.close()
