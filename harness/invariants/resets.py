"""Cache resets: a reset that says it succeeded left nothing behind."""

from __future__ import annotations

from harness.events import Allocated, Cleared, Hit, Loaded, PauseEffective, Returned
from harness.invariants.invariant import Invariant, invariant, listed
from harness.replay import NEVER, Replay


@invariant("reset-truth", level=2)
class ResetTruth(Invariant):
    """A reset that reports success left every tier empty; one is refused only if live requests hold blocks, and never
    while a pause is effective."""

    def __init__(self, replay: Replay) -> None:
        super().__init__(replay)
        self._cleared = NEVER
        self._host_is_due = NEVER
        """Number of the last reset of the device, until the host was reset too."""

    def before_cleared(self, seq: int, event: Cleared) -> None:
        if not event.success:
            self._check_refusal(seq)
            return
        if event.tier == "host":
            self._clear_host(seq, event)
            return
        blocks = self.replay.blocks
        self._host_is_due = seq if blocks.host_count else NEVER
        held = [block for block, references in blocks.references.items() if references > 0]
        if held or not event.empty:
            self.violated(
                seq,
                "a reset reported success and the cache is not empty",
                expected="no block held and no digest left",
                got=f"blocks {listed(held)} held" if held else "the engine says itself that it is not",
            )
        self._cleared = seq

    def _clear_host(self, seq: int, event: Cleared) -> None:
        self._host_is_due = NEVER
        self._cleared = seq
        if not event.empty:
            self.violated(
                seq,
                "a reset reported success and the host tier is not empty",
                expected="no copy left",
                got="the engine says itself that it is not",
            )

    def before_pause_effective(self, seq: int, event: PauseEffective) -> None:
        self._expect_host_cleared(seq)

    def before_returned(self, seq: int, event: Returned) -> None:
        self._expect_host_cleared(seq)

    def _expect_host_cleared(self, seq: int) -> None:
        if self._host_is_due == NEVER:
            return
        self.violated(
            seq,
            "a reset cleared the device and left the host tier as it was",
            expected="`cleared` for the host after `cleared` for the device",
            got=f"{len(self.replay.blocks.host)} copies on the host",
            cause=[(self._host_is_due, "device cleared")],
        )
        self._host_is_due = NEVER

    def _check_refusal(self, seq: int) -> None:
        replay = self.replay
        paused = replay.pause_mode is not None and not replay.pause_pending
        holding = [request.id for request in replay.live() if request.blocks]
        if holding and not paused:
            return
        self.violated(
            seq,
            "a reset was refused that had to succeed",
            expected="success: the pause lets frozen requests give up their blocks" if paused else "success: no live request holds a block",
            got=f"refused, with {listed(holding)} holding blocks",
            cause=[(replay.last_effective, "pause effective")] if paused else [],
        )

    def before_hit(self, seq: int, event: Hit) -> None:
        self._check_gone(seq, event.request, "hit", event.blocks)

    def before_loaded(self, seq: int, event: Loaded) -> None:
        forgotten = self.replay.blocks.forgotten_slots
        if forgotten and (left := [slot for slot, _ in event.blocks if slot in forgotten]):
            self.violated(
                seq,
                f"{event.request} loaded slot {left[0]}, whose copy a reset had reported gone",
                expected="no copy that is older than the reset",
                got=f"slots {listed(left)} still have theirs",
                cause=[(self._cleared, "cleared, success reported")],
                once=self._cleared,
            )

    def before_allocated(self, seq: int, event: Allocated) -> None:
        self._check_gone(seq, event.request, "evicted", event.evicted)

    def _check_gone(self, seq: int, id: str, what: str, blocks: tuple[int, ...]) -> None:
        forgotten = self.replay.blocks.forgotten
        if forgotten and (left := [block for block in blocks if block in forgotten]):
            self.violated(
                seq,
                f"{id} {what} block {left[0]}, whose digest a reset had reported gone",
                expected="no digest that is older than the reset",
                got=f"blocks {listed(left)} still have theirs",
                cause=[(self._cleared, "cleared, success reported")],
                once=self._cleared,
            )
