"""A Ray cluster: a plain task for each order, and long-lived actors only to keep models.

`ray.init` joins the cluster that is there; every node needs hacpo in its environment and the project under the same
path. What a node needs to carry out an order are the arguments of one command.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from hacpo.errors import HacpoError, SettingsError, first_line
from hacpo.pipeline.execution.crashes import FaultElsewhereError
from hacpo.pipeline.execution.workers import StageFailedError
from hacpo.pipeline.executors.far_process import FarProcess, passed_on
from hacpo.pipeline.executors.orders import Order, Outcome
from hacpo.settings.executor import ExecutorSettings, StageResources

_CONNECT_SECONDS = 10.0
_PATIENCE_SECONDS = 3.0
"""How long an order waits for room before a kept process gives up its own."""


class ClusterGoneError(HacpoError):
    """The cluster does not answer any more."""


@dataclass
class _Given:
    order: Order
    since: float
    actor: str = ""


class RayExecutor:
    """See `orders.Executor`.

    Raises:
        SettingsError: Ray is not installed, or there is no cluster.
    """

    def __init__(self, settings: ExecutorSettings) -> None:
        try:
            import ray
        except ImportError:
            raise SettingsError("executor ray: Ray is not installed", remedy="pip install 'hacpo[ray]'") from None
        self._ray: Any = ray
        self._ours = not ray.is_initialized()
        if self._ours:
            try:
                _check_answers(settings.address)
                ray.init(
                    address=settings.address or "auto", namespace="hacpo", log_to_driver=False, logging_level="ERROR"
                )
            except (OSError, RuntimeError, ValueError) as error:
                where = settings.address or "this machine"
                raise SettingsError(
                    f"no Ray cluster answers: {first_line(error)}",
                    where=f"executor.address: {where}",
                    remedy="start one with `ray start --head`, and `ray start --address=...` on the other machines",
                ) from None
        self._version = version("hacpo")
        self._task = ray.remote(_carry_out)
        self._keeper = ray.remote(FarProcess)
        self._given: dict[Any, _Given] = {}
        self._actors: dict[str, Any] = {}
        """What is kept by name; the one that was used last is the last."""
        self._keeps = settings.keep_models

    def submit(self, orders: Sequence[Order]) -> None:
        """See `orders.Executor`."""
        for order in orders:
            given = _Given(order, time.monotonic(), order.keep if self._keeps else "")
            arguments = (list(order.arguments), str(order.report), self._version)
            if given.actor:
                actor = self._actors.pop(given.actor, None) or self._new_keeper(order)
                self._actors[given.actor] = actor
                reference = actor.carry_out.remote(*arguments)
            else:
                options = {**_options(order.resources), "max_retries": 0}
                reference = self._task.options(**options).remote(str(order.root), passed_on(), *arguments)
            self._given[reference] = given

    def _new_keeper(self, order: Order) -> Any:
        options = {**_options(order.resources), "max_restarts": 0, "max_task_retries": 0}
        return self._keeper.options(**options).remote(str(order.root), passed_on())

    def outcomes(self, seconds: float) -> list[Outcome]:
        """See `orders.Executor`."""
        if not self._given:
            return []
        try:
            ready, _ = self._ray.wait(list(self._given), num_returns=1, timeout=seconds)
            ended = [self._outcome(reference) for reference in ready]
        except self._ray.exceptions.RaySystemError as error:
            raise ClusterGoneError(
                f"the Ray cluster is gone: {first_line(error)}", remedy="start it, and repeat the command"
            ) from None
        if not ended:
            self._make_room()
        return ended

    def _outcome(self, reference: Any) -> Outcome:
        given = self._given.pop(reference)
        number = given.order.number
        try:
            kind, content = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:  # ours, in a process of Ray's
            return Outcome(number, FaultElsewhereError(first_line(error), str(error)))
        except self._ray.exceptions.RayError as error:
            self._actors.pop(given.actor, None)
            return Outcome(number, lost=f"{type(error).__name__}: {first_line(error)}")
        if kind == "failed":
            return Outcome(number, StageFailedError(*content))
        if kind == "crashed":
            return Outcome(number, FaultElsewhereError(*content))
        return Outcome(number, lost=str(content[0]) if kind == "lost" else "")

    def _make_room(self) -> None:
        """End a process that is kept and has nothing to do, where an order has waited for long: it may be for its
        room."""
        busy = {given.actor for given in self._given.values()}
        idle = next((name for name in self._actors if name not in busy), None)
        if idle is not None and any(self._waits(given) for given in self._given.values()):
            self._ray.kill(self._actors.pop(idle))

    def _waits(self, given: _Given) -> bool:
        """Whether an order has not begun because the cluster has no room."""
        if time.monotonic() - given.since < _PATIENCE_SECONDS or given.order.report.exists():
            return False
        free, needs = self._ray.available_resources(), given.order.resources
        return bool(free.get("CPU", 0) < needs.cpus or free.get("GPU", 0) < needs.gpus)

    def close(self) -> None:
        """See `orders.Executor`."""
        for actor in self._actors.values():
            self._ray.kill(actor)
        for reference, given in self._given.items():
            if not given.actor:
                self._ray.cancel(reference, force=True)
        self._actors.clear()
        self._given.clear()
        if self._ours:
            self._ray.shutdown()


def _check_answers(address: str | None) -> None:
    """Refuse at once an address where nobody listens, which Ray asks again and again.

    Raises:
        OSError: nobody does.
    """
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()


def _options(resources: StageResources) -> dict[str, Any]:
    memory = {} if resources.memory_gib is None else {"memory": int(resources.memory_gib * 2**30)}
    return {"num_cpus": resources.cpus, "num_gpus": resources.gpus, **memory}


def _carry_out(
    root: str, environment: dict[str, str], arguments: list[str], report: str, wanted: str
) -> tuple[str, tuple[object, ...]]:
    """An order on a node, by a process that ends with it."""
    process = FarProcess(root, environment)
    try:
        return process.carry_out(arguments, report, wanted)
    finally:
        process.close()
