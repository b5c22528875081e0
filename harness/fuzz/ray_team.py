"""The processes of a campaign on a cluster that Ray already runs: an actor on each slot, with a process of its own under it.

The process is what runs cases, so that an engine that hangs or takes its process down is noticed where it is, as on
one machine. An actor that is lost, with its node or without, costs its slice, which is handed out again.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import logging
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

try:
    import ray
    from ray.exceptions import RayActorError
except ModuleNotFoundError as error:
    from harness.errors import BadInput

    raise BadInput("--ray needs the package ray: install caesura-rl with the extra 'ray'") from error

from harness.errors import BadInput
from harness.fuzz.hunt import Settings
from harness.fuzz.team import Died, Process, Unplaced, Word
from harness.fuzz.worker import Task

LISTEN_S = 0.2
CONNECT_S = 5.0
"""How long a cluster may take to accept a connection."""
START_S = 60.0
"""How long it may take to start a worker. One for whom there is no CPU would be waited for without end, and its slice with it."""


class _Slot:
    """A CPU of the cluster, and the process that a campaign has there."""

    def __init__(self, engine: str, settings: Settings) -> None:
        self._process = Process(engine, settings, Path(tempfile.mkdtemp(prefix="caesura-")) / "stacks.txt")

    def carry_out(self, task: Task) -> Word:
        """The report of the task, or how its process came to its end."""
        self._process.give(task)
        while True:
            self._process.connection.poll(LISTEN_S)
            if (word := self._process.hear()) is not None:
                return word


_Actor: Any = ray.remote(num_cpus=1, max_restarts=0)(_Slot)


class RayWorker:
    """Someone on the cluster."""

    def __init__(self, slot: Any) -> None:
        self._slot = slot
        self._starting = [slot.__ray_ready__.remote()]
        """What it says once it has started, as Ray's reference; nothing when that was heard."""
        self._hired = time.monotonic()
        self.task: Task | None = None
        self.word: Any = None
        """What it will say, as Ray's reference."""

    def give(self, task: Task) -> None:
        self.task = task
        self.word = self._slot.carry_out.remote(task)

    def hear(self) -> Word:
        try:
            return ray.get(self.word)
        except RayActorError as error:
            return Died(None, f"was lost by the cluster: {str(error).splitlines()[0]}")

    @property
    def started(self) -> bool:
        if self._starting:
            _, self._starting = ray.wait(self._starting, timeout=0)
        return not self._starting

    @property
    def overdue(self) -> bool:
        """Whether the cluster has had no place for it."""
        return not self.started and time.monotonic() - self._hired > START_S

    def end(self) -> None:
        ray.kill(self._slot)


def _call(address: str) -> None:
    """Ray itself would wait for minutes at an address where nobody is."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host.removeprefix("ray://"), int(port)), timeout=CONNECT_S).close()


class RayTeam:
    """Workers on the cluster at `address`; `auto` is the one that this machine belongs to.

    Raises:
        BadInput: no cluster answers there.
    """

    def __init__(self, engine: str, settings: Settings, address: str) -> None:
        self._engine = engine
        self._settings = settings
        self._begun = False
        """Some worker has started."""
        try:
            _call(address)
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, ValueError, RuntimeError) as error:
            raise BadInput(
                f"--ray {address}: no cluster answers ({error}); start one with `ray start --head`, or give its address"
            ) from error

    def hire(self) -> RayWorker:
        return RayWorker(_Actor.remote(self._engine, self._settings))

    def listen(self, workers: list[RayWorker], seconds: float) -> Iterator[tuple[RayWorker, Word]]:
        """As everyone listens.

        Raises:
            BadInput: the cluster has had no CPU for any worker so far.
        """
        by_word = {worker.word: worker for worker in workers}
        ready, _ = ray.wait(list(by_word), num_returns=len(by_word), timeout=seconds)
        for word in ready:
            yield by_word[word], by_word[word].hear()
        self._begun = self._begun or any(worker.started for worker in workers)
        for worker in [worker for worker in workers if worker.overdue]:
            if not self._begun:
                free, cpus = (kind().get("CPU", 0) for kind in (ray.available_resources, ray.cluster_resources))
                raise BadInput(f"--ray: no worker started in {START_S:g} s; {free:g} of the cluster's {cpus:g} CPUs are free, each takes 1")
            yield worker, Unplaced()

    def close(self) -> None:
        ray.shutdown()
