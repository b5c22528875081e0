"""One process of a campaign: it runs seeds and shrinks failures as it is told, and may die or hang without harm.

The engine lives in here and nowhere else, so that one that takes its process down, or never comes back, is a finding
of the campaign and not its end.
"""

from __future__ import annotations

import faulthandler
import resource
import signal
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import SynchronizedArray
from pathlib import Path
from typing import NamedTuple

from harness.backends import Backend, CannotRun, LiveBackend, make_any_backend
from harness.errors import BadInput
from harness.fuzz.case import API_TRUTH, Case, Finding, Signature, run_case
from harness.fuzz.generate import case_of
from harness.fuzz.hunt import Failed, Settings, Tally, hunt
from harness.fuzz.known import Known
from harness.fuzz.recall import recall
from harness.fuzz.shrink import shrink

SLICE_S = 0.5
"""A worker reports at least so often: what it has not reported is what a kill costs."""
HANG_IN_SHRINK_S = 5.0
"""While a hang is shrunk, the engine gets no longer than this."""
SEED, SINCE = 0, 1
"""In the shared array: the seed at work, or one of those below, and since when, as `time.monotonic()`."""
NOBODY, FILE = -1.0, -2.0
"""In the place of a seed: nothing is at work; a scenario file is."""


class Hunt(NamedTuple):
    """Task: run the cases of these seeds, as far as a slice of time goes."""

    first: int
    count: int


class Shrink(NamedTuple):
    """Task: cut the case of this seed down to what shows the failure, or another of its id that is not known."""

    seed: int
    signature: Signature
    known: frozenset[Signature]


class Recall(NamedTuple):
    """Task: run this scenario file and tell what fails."""

    file: str


class Recalled(NamedTuple):
    """Report: what the file shows on this engine, hence known failures."""

    file: str
    known: tuple[Known, ...] = ()
    not_run: str = ""
    """Why that is not known: the file cannot be read, or the engine cannot be brought to run it."""


class Hunted(NamedTuple):
    """Report: the first so many seeds of a hunt were run."""

    first: int
    count: int
    tally: Tally
    failed: tuple[Failed, ...]


class Shrunk(NamedTuple):
    """Report: the smallest case, how it ended, and what it shows; `finding` is None if the seed does not show it again."""

    signature: Signature
    """What was to be shrunk."""
    case: Case
    ended: str
    finding: Finding | None
    operations: int


class Refusal(NamedTuple):
    """Report: the engine cannot be had; the campaign is over."""

    message: str


class Grown(NamedTuple):
    """Report: this process has grown by so many megabytes since its first slice, and ends to make room."""

    megabytes: int


Task = Hunt | Shrink | Recall
Report = Hunted | Shrunk | Recalled | Refusal | Grown

LEAK_MB = 1024
"""A worker that has grown by so much is replaced: an engine that keeps something of every case would fill the machine."""


def work(connection: Connection, engine: str, settings: Settings, at: SynchronizedArray, stacks: Path) -> None:
    """Carry out tasks until the connection closes. Ctrl-C is the parent's business."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with stacks.open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        try:
            _Worker(connection, make_any_backend(engine), settings, at).run()
        except BadInput as error:
            connection.send(Refusal(str(error)))
        except (EOFError, BrokenPipeError):
            pass  # the parent is gone


class _Worker:
    def __init__(self, connection: Connection, backend: Backend | LiveBackend, settings: Settings, at: SynchronizedArray) -> None:
        self._connection = connection
        self._at = at
        self._settings = settings
        self._backend = backend
        self._megabytes = 0

    def run(self) -> None:
        while True:
            task = self._connection.recv()
            match task:
                case Hunt():
                    report = self._hunt(task)
                case Shrink():
                    report = self._shrink(task)
                case Recall():
                    report = self._recall(task)
            self._connection.send(report)
            self._at[SEED] = NOBODY
            grown = _megabytes() - (self._megabytes or _megabytes())
            self._megabytes = self._megabytes or _megabytes()
            if grown > LEAK_MB:
                self._connection.send(Grown(grown))
                return

    def _begins(self) -> None:
        """A case begins: from now on the parent counts its time."""
        self._at[SINCE] = time.monotonic()

    def _seeds(self, task: Hunt) -> Iterator[int]:
        for seed in range(task.first, task.first + task.count):
            self._begins()
            self._at[SEED] = seed
            yield seed

    def _hunt(self, task: Hunt) -> Hunted:
        tally, failed = Tally(), []
        began = time.monotonic()
        for seed, outcome in hunt(self._backend, self._seeds(task), self._settings, until=began + SLICE_S):
            tally.add(outcome)
            if not outcome.clean:
                failed.append(Failed(seed=seed, findings=outcome.findings))
        tally.seconds = time.monotonic() - began
        return Hunted(task.first, tally.cases, tally, tuple(failed))

    def _recall(self, task: Recall) -> Recalled:
        self._begins()
        self._at[SEED] = FILE
        try:
            return Recalled(task.file, tuple(recall(task.file, self._backend, self._settings)))
        except CannotRun:
            return Recalled(task.file)  # nor can a case ask for it
        except BadInput as error:
            return Recalled(task.file, not_run=str(error))

    def _shrink(self, task: Shrink) -> Shrunk:
        self._begins()
        self._at[SEED] = task.seed
        settings, id = self._settings, task.signature.id
        case = case_of(task.seed, engine=settings.overrides, verbs=getattr(self._backend, "verbs", None))
        outcome = run_case(case, self._backend, explain=settings.explain, hang_s=settings.hang_s)
        if outcome.finding(id, task.known) is not None:
            hang_s = min(settings.hang_s, HANG_IN_SHRINK_S) if id == API_TRUTH else settings.hang_s
            outcome = shrink(outcome, id, self._backend, known=task.known, explain=settings.explain, hang_s=hang_s, trying=self._begins)
        return Shrunk(task.signature, outcome.case, outcome.ended, outcome.finding(id, task.known), outcome.operations)


def _megabytes() -> int:
    """The most memory that this process ever held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak // (1024 * 1024 if sys.platform == "darwin" else 1024)
