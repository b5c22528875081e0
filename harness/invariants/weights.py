"""Weights in memory: what lies there after a commit is what was sent."""

from __future__ import annotations

from harness.events import Committed
from harness.invariants.invariant import Invariant, invariant, listed
from harness.replay import Replay


@invariant("weight-equality", level=1)
class WeightEquality(Invariant):
    """After a commit every tensor, on every rank, equals what the sender says it should be, by checksums over names, shapes,
    dtypes and bytes; and none has moved in memory, where a captured graph would read the old one."""

    def __init__(self, replay: Replay) -> None:
        super().__init__(replay)
        self._looked = False
        """A commit told what lies in memory. One wrong tensor is too many: these checks are not counted towards a pass rate."""

    def before_committed(self, seq: int, event: Committed) -> None:
        if not event.resident and not event.moved:
            return
        self._looked = True
        started = (self.replay.epoch_starts[-1], f"first byte of epoch {self.replay.epoch}")
        if wrong := [rank for rank, checksum in enumerate(event.resident) if checksum != event.sent]:
            named = f", of {listed(event.differing)}" if event.differing else ""
            self.violated(
                seq,
                f"the weights committed as {event.version} are not those that were sent{named}",
                expected=f"checksum {event.sent} on every rank",
                got=f"{listed(f'{event.resident[rank]} on rank {rank}' for rank in wrong)}",
                cause=[started],
            )
        if event.moved:
            self.violated(
                seq,
                f"tensors moved in memory by the update to {event.version}",
                expected="every tensor written in place, where graphs were captured",
                got=f"{listed(event.moved)} at other addresses",
                cause=[started],
            )

    def unseen(self) -> str | None:
        return None if self._looked else "no commit tells checksums: nobody compared the weights with those that were sent"
