"""A log written by a thread of its own, for an engine that must wait for no disk and no encoding."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue

from harness.codec import Decode
from harness.events import Event
from harness.log import LogError, LogWriter

MOST_WAITING = 10_000
"""Transactions that may wait to be written: seconds of a busy engine."""

DRAIN_S = 10.0
"""How long whoever closes a log waits for what is still to be written."""


class BackgroundWriter:
    """As LogWriter, but that `append` returns before anything is written: a kill of the process loses the last moments.

    Args:
        writer: its file; from now on nobody else writes to it.
        failed: called in the writing thread, once, if something cannot be written; nothing is from then on.
    """

    def __init__(self, writer: LogWriter, failed: Callable[[Exception], None]) -> None:
        self._writer = writer
        self._failed = failed
        self._queue: SimpleQueue[tuple[int, Sequence[Event | Decode]] | None] = SimpleQueue()
        self._closing = False
        self._appended = self._written = 0
        self._thread = threading.Thread(target=self._write, name="caesura-log", daemon=True)
        self._thread.start()

    @property
    def path(self) -> Path:
        return self._writer.path

    @property
    def waiting(self) -> int:
        """How many transactions are still to be written; none are once something could not be."""
        return self._appended - self._written if self._thread.is_alive() else 0

    def append(self, t_ns: int, events: Sequence[Event | Decode]) -> None:
        """Have what happened together at `t_ns` written as one line.

        Raises:
            LogError: so much waits to be written that it would fill the memory.
        """
        if self.waiting >= MOST_WAITING:
            raise LogError(f"{self.path}: the disk does not keep up, {MOST_WAITING} transactions wait to be written")
        self._appended += 1
        self._queue.put((t_ns, events))

    def drained(self) -> LogWriter:
        """The writer, once everything is written, or a disk that hangs has been waited for: whoever asks goes on with it himself."""
        self._queue.put(None)
        self._thread.join(DRAIN_S)
        return self._writer

    def close(self) -> None:
        """Close the file behind what still waits to be written. Returns at once."""
        self._closing = True
        self._queue.put(None)

    def _write(self) -> None:
        while (said := self._queue.get()) is not None:
            try:
                self._writer.append(*said)
                self._written += 1
            except Exception as error:  # whatever it is, it must not end in the engine
                self._failed(error)
                return
        if self._closing:
            self._writer.close()
