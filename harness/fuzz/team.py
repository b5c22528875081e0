"""The processes of a campaign on this machine: hired, given tasks, listened to, and noticed when they die or never come back."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from harness.fuzz.hunt import Settings
from harness.fuzz.worker import FILE, NOBODY, SEED, SINCE, Report, Task, work

GRACE_S = 5.0
"""How much longer than the engine's own limit a worker gets before it is taken for one that never comes back."""


class Died(NamedTuple):
    """In place of a report: the worker is gone."""

    seed: int | None
    """The case that it was at; None: at none."""
    how: str
    """In words: `was ended by signal 9 (SIGKILL)`."""


class Hung(NamedTuple):
    """In place of a report: the worker has not come back from a case, nor let itself be interrupted. It is to be ended."""

    seed: int | None
    """The case; None: that of a scenario file."""
    limit_s: float
    """How long it was given."""
    stack: str
    """What it is doing, as faulthandler tells; empty if it cannot tell any more."""


class Unplaced(NamedTuple):
    """In place of a report: there is no room for the worker. It has not begun, and is to be ended."""


Word = Report | Died | Hung | Unplaced


class Worker(Protocol):
    """Someone who carries out a task at a time."""

    task: Task | None
    """What it is at; the campaign sets it to None when the report is in."""

    def give(self, task: Task) -> None: ...

    def end(self) -> None:
        """Kill it."""
        ...


Hired = TypeVar("Hired", bound=Worker)


class Team(Protocol[Hired]):
    """Where workers come from."""

    def hire(self) -> Hired: ...

    def listen(self, workers: list[Hired], seconds: float) -> Iterator[tuple[Hired, Word]]:
        """What those who are at a task have to say, waiting so long for the first to speak."""
        ...

    def close(self) -> None:
        """Let go of what the team itself holds, once its workers have been ended."""
        ...


class Process:
    """A worker in a process of its own on this machine.

    Args:
        stacks: file that its stack is written to when it hangs.
    """

    def __init__(self, engine: str, settings: Settings, stacks: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._at = context.Array("d", [NOBODY, time.monotonic()])
        self._limit_s = settings.hang_s + GRACE_S
        self._stacks = stacks
        self.task: Task | None = None
        self.connection, theirs = context.Pipe()
        arguments = (theirs, engine, settings, self._at, stacks)
        self._process = context.Process(target=work, args=arguments, name="caesura-fuzz", daemon=True)
        self._process.start()
        theirs.close()

    def give(self, task: Task) -> None:
        self.task = task
        with suppress(ConnectionError):  # it died without work, as `hear` is about to tell
            self.connection.send(task)

    def hear(self) -> Word | None:
        """What it has to say; None if nothing yet."""
        if self.connection.poll():
            try:
                return self.connection.recv()
            except (EOFError, ConnectionResetError):
                self._process.join()
                return Died(self._seed, _how_it_ended(self._process.exitcode or 0))
        if self._at[SEED] != NOBODY and time.monotonic() - self._at[SINCE] > self._limit_s:
            return Hung(self._seed, self._limit_s, self._stack())
        return None

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self.connection.close()
        self._stacks.unlink(missing_ok=True)

    @property
    def _seed(self) -> int | None:
        """The seed that it is at."""
        seed = self._at[SEED]
        return None if seed in (NOBODY, FILE) else int(seed)

    def _stack(self) -> str:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        return self._stacks.read_text(encoding="utf-8", errors="replace")


class LocalTeam:
    """Processes on this machine.

    Args:
        folder: where their stacks are written.
    """

    def __init__(self, engine: str, settings: Settings, folder: Path) -> None:
        self._engine = engine
        self._settings = settings
        self._folder = folder
        self._hired = 0

    def hire(self) -> Process:
        stacks = self._folder / f"stacks-{self._hired}.txt"
        self._hired += 1
        return Process(self._engine, self._settings, stacks)

    def listen(self, workers: list[Process], seconds: float) -> Iterator[tuple[Process, Word]]:
        wait([worker.connection for worker in workers], timeout=seconds)
        for worker in workers:
            if (word := worker.hear()) is not None:
                yield worker, word

    def close(self) -> None:
        """Nothing is held."""


def _how_it_ended(code: int) -> str:
    return f"was ended by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"
