"""A rank's log as its engine writes it, from inside its loop."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from harness.events import Closed, Event, Opened
from harness.log import LogError, LogWriter

_logger = logging.getLogger(__name__)


class RankLog:
    """Appends transactions to `events.r<rank>.jsonl`, on the clock CLOCK_MONOTONIC less the base that `opened` names.

    A log that cannot be written any more, as on a full disk, ends there with a warning; its engine goes on.

    Raises:
        LogError: the folder cannot be written, or holds a log of this rank.
    """

    def __init__(self, folder: Path, opened: Opened) -> None:
        self._base_ns = opened.clock_base_ns
        self._last_ns = 0
        self._writer: LogWriter | None = LogWriter(folder, f"r{opened.rank}")
        self.append(time.monotonic_ns(), [opened])

    @property
    def recording(self) -> bool:
        return self._writer is not None

    def append(self, began_ns: int, events: Sequence[Event]) -> None:
        """What happened together, beginning at `began_ns` of CLOCK_MONOTONIC.

        The beginning, since clients may hear of it before the engine comes round to recording it.
        """
        if self._writer is None:
            return
        self._last_ns = max(self._last_ns, began_ns - self._base_ns)
        try:
            self._writer.append(self._last_ns, events)
        except LogError as error:
            self._writer = None
            _logger.warning("recording stops, the engine goes on: %s", error)

    def close(self, why: str, error: str = "") -> None:
        """Nothing is recorded any more; may be called twice."""
        if self._writer is not None:
            self.append(time.monotonic_ns(), [Closed(why=why, count=self._writer.seq, error=error)])
        if self._writer is not None:
            self._writer.close()
            self._writer = None
