"""A rank of a live engine as its log tells, read while the engine writes it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness.codec import Codec
from harness.events import Entry, Event, StepFailed
from harness.replay import Replay


class Rank:
    """Follows `events.r<rank>.jsonl`.

    Raises:
        OSError: the file is not there.
        LogError: a line is no transaction.
    """

    def __init__(self, path: Path) -> None:
        self.replay = Replay()
        self.failed = False
        """A forward pass broke: the engine makes no step any more."""
        self._codec = Codec()
        self._file = path.open("rb")
        self._half = b""

    def news(self) -> Sequence[Event]:
        """The events of all lines that were completed since the last call."""
        if not (data := self._file.read()):
            return ()
        *lines, self._half = (self._half + data).split(b"\n")
        events: list[Event] = []
        for line in lines:
            seq, t_ns, transaction = self._codec.decode(line + b"\n")
            for place, event in enumerate(transaction, start=seq):
                self.replay.apply(Entry(place, t_ns, "rank", event))
                self.failed = self.failed or isinstance(event, StepFailed)
            events += transaction
        return events

    @property
    def at_rest(self) -> bool:
        """Nothing is in flight, and no step is due until somebody calls, as docs/semantics.md says."""
        replay = self.replay
        if replay.flights or replay.pause_pending:
            return False
        return self.held_back or not any(not request.parked for request in replay.live())

    @property
    def held_back(self) -> bool:
        """Whatever is live, nothing is scheduled."""
        return self.replay.out_of_service or self.replay.pause_mode is not None

    def holds(self, request: str) -> bool:
        """Whether a request of that id is live or blocked."""
        replay = self.replay
        return request in replay.running or request in replay.waiting or request in replay.blocked

    def close(self) -> None:
        self._file.close()
