"""Which rollouts ended, how old they are, and which of them a trainer takes: a function of the log.

The trainer decides by it while the simulation runs, and the report counts by it afterwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from harness.events import Committed, Entry, Finished
from harness.scenario import ROLLOUT_ID, Workload

TRAINER = "trainer"
"""What a trainer's calls are signed with."""


class Trajectory(NamedTuple):
    """A rollout that ended."""

    oldest: int
    """Number of the weight version that sampled its oldest token."""
    ended: int
    """Number of the version at its end."""
    tokens: int


class Ledger:
    """Versions are numbered by their updates: 0 is what the engine began with."""

    def __init__(self, workload: Workload) -> None:
        self.version = 0
        self.ended: list[Trajectory] = []
        """Every rollout that ended, in that order."""
        self.dropped = 0
        """How many of them were too old for the batch that they would have been in."""
        self._restarts = workload.aborted == "restart"
        self._batch = workload.trainer.batch if workload.trainer else None
        self._staleness = workload.trainer.staleness if workload.trainer else None
        self._numbers = {"default": 0}
        self._so_far: dict[str, tuple[int, int]] = {}
        """Oldest version and tokens of rollouts that were aborted, by name."""
        self._ready: deque[Trajectory] = deque()

    def hear(self, entries: Sequence[Entry]) -> None:
        """A listener: takes note of a transaction."""
        for entry in entries:
            match entry.event:
                case Committed(version=label):
                    self.version += 1
                    self._numbers[label] = self.version
                case Finished() as finished if ROLLOUT_ID.match(finished.request):
                    self._note_end(finished)

    def _note_end(self, finished: Finished) -> None:
        """An attempt ended: the rollout with it, unless it was aborted."""
        name = rollout_of(finished.request)
        oldest, tokens = self._so_far.pop(name, (self.version, 0))
        oldest = min([oldest, *(self._numbers.get(span.version, self.version) for span in finished.spans)])
        tokens += finished.output_tokens
        if finished.reason != "abort":
            self.ended.append(Trajectory(oldest, self.version, tokens))
            self._ready.append(self.ended[-1])
        elif tokens and not self._restarts:
            self._so_far[name] = (oldest, tokens)

    def take(self) -> tuple[Trajectory, ...] | None:
        """The next batch, in the order in which rollouts ended, None if there are too few; those that are too old are dropped."""
        if self._batch is None or len(self._ready) < self._batch:
            return None
        batch: list[Trajectory] = []
        while self._ready and len(batch) < self._batch:
            trajectory = self._ready.popleft()
            if self._too_old(trajectory):
                self.dropped += 1
            else:
                batch.append(trajectory)
        if len(batch) < self._batch:
            self._ready.extend(batch)
            return None
        return tuple(batch)

    def admits(self, handed_in: int) -> bool:
        """Whether one more rollout may be handed in: (bound + version + 1) batches in all under `hold` (AReaL, arXiv:2505.24298)."""
        if self._staleness is None or self._staleness.beyond != "hold" or self._batch is None:
            return True
        return handed_in < (self._staleness.bound + self.version + 1) * self._batch

    def _too_old(self, trajectory: Trajectory) -> bool:
        staleness = self._staleness
        return staleness is not None and staleness.beyond == "drop" and self.version - trajectory.oldest > staleness.bound


def rollout_of(request: str) -> str:
    """The name of the rollout that a request is an attempt at."""
    return request.rpartition(".")[0]
