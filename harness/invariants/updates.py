"""Weight updates: all or nothing, and nothing looks at the half of one."""

from __future__ import annotations

from harness.events import Committed, Launched, PartReceived, Received, Resumed, UpdateFailed, UpdateStarted
from harness.invariants.invariant import Invariant, invariant, listed
from harness.operations import FinishWeightUpdate, Operation, StartWeightUpdate, SwapWeights
from harness.replay import NEVER, Replay


@invariant("atomic-commit", level=1)
class AtomicCommit(Invariant):
    """A forward sees all old or all new weights, unless the update was allowed beside steps; a session is opened under an
    effective pause and over awake weights only, nothing is written outside one, and a failed update commits nothing."""

    def __init__(self, replay: Replay) -> None:
        super().__init__(replay)
        self._operation: Operation | None = None
        """Of the call taken up last."""
        self._parts: set[int] = set()
        """Parts that the open session has received ..."""
        self._of = 0
        """... of so many."""

    def after_received(self, seq: int, event: Received) -> None:
        call = self.replay.calls.get(event.op)
        self._operation = call.operation if call is not None else None

    def before_update_started(self, seq: int, event: UpdateStarted) -> None:
        replay, operation = self.replay, self._operation
        self._parts, self._of = set(), 0
        asked = isinstance(operation, StartWeightUpdate | SwapWeights)
        allowed = isinstance(operation, StartWeightUpdate) and operation.allow_unpaused
        effective = replay.pause_mode is not None and not replay.pause_pending
        if asked and not allowed and not effective:
            self.violated(
                seq,
                "a weight session was opened without an effective pause",
                expected="the start refused, as allow_unpaused was not asked for",
                got=f"a {replay.pause_mode} pause that is pending" if replay.pause_pending else "a running engine",
                cause=[(replay.pending_since, "pause taken up")] if replay.pause_pending else [],
            )
        self._check_awake(seq, "a weight session was opened")

    def _check_awake(self, seq: int, what: str) -> None:
        replay = self.replay
        if "weights" in replay.asleep:
            self.violated(
                seq,
                f"{what} while the weights sleep",
                expected="the call refused until they are awake",
                got=f"{listed(replay.asleep)} asleep",
                cause=[(replay.asleep_since, "fell asleep")],
                once=("asleep", replay.asleep_since),
            )

    def before_part_received(self, seq: int, event: PartReceived) -> None:
        replay = self.replay
        if not replay.update_open:
            self.violated(
                seq,
                "weights were written outside a session",
                expected="an update without a start refused",
                got=f"part {event.part} of {event.of}",
            )
        elif replay.flights and not replay.update_unpaused:
            self.violated(
                seq,
                "weights were written while a step that reads them is in flight",
                expected="every launched step has landed",
                got=f"steps {listed(replay.flights)} in flight",
                cause=[(flight.launched, f"launched step {flight.step}") for flight in replay.flights.values()],
            )
        else:
            self._check_paused(seq, "weights were written")
            self._check_awake(seq, "weights were written")
        self._parts.add(event.part)
        self._of = event.of

    def _check_paused(self, seq: int, what: str) -> None:
        """A session that was opened under a pause stays under one; a pause that is pending lets steps run."""
        replay = self.replay
        if not replay.update_open or replay.update_unpaused or replay.stopped_since != NEVER:
            return
        self.violated(
            seq,
            f"{what} without an effective pause",
            expected="an effective pause from start to finish, as allow_unpaused was not asked for",
            got=f"a {replay.pause_mode} pause that is pending" if replay.pause_pending else "a running engine",
            once=("unpaused", replay.epoch),
        )

    def before_launched(self, seq: int, event: Launched) -> None:
        replay = self.replay
        if not event.batch or not replay.uncommitted:  # an empty step runs no forward
            return
        lost = replay.out_of_service
        self.violated(
            seq,
            f"step {event.step} runs on weights that {'nothing may be sampled from' if lost else 'are half-written'}",
            expected=f"no forward {'before a full update succeeds' if lost else 'between the first byte of an update and its commit'}",
            got=f"a step of {listed(row.request for row in event.batch)}",
            cause=[(replay.epoch_starts[-1], f"first byte of epoch {replay.epoch}"), replay.out_of_service_since],
            once=("uncommitted", replay.epoch),
        )

    def before_update_failed(self, seq: int, event: UpdateFailed) -> None:
        replay = self.replay
        if not event.wrote and event.phase != "start" and replay.update_open and replay.update_wrote:
            self.violated(
                seq,
                f"an update failed in {event.phase} after it had written weights, and says that it had not",
                expected="wrote: the engine is out of service",
                got="wrote false",
                cause=[(replay.epoch_starts[-1], "first byte written")],
            )

    def before_resumed(self, seq: int, event: Resumed) -> None:
        replay = self.replay
        if replay.out_of_service or replay.update_open:
            self.violated(
                seq,
                f"the engine resumed {'out of service' if replay.out_of_service else 'with a weight session open'}",
                expected="resume refused until a full update succeeds" if replay.out_of_service else "resume refused until it is finished",
                got="`resumed`",
                cause=[replay.out_of_service_since] if replay.out_of_service else [],
            )

    def before_committed(self, seq: int, event: Committed) -> None:
        replay, operation = self.replay, self._operation
        if not replay.update_open:
            self.violated(seq, "an update was committed without a session", expected="a finish without a start refused", got=event.version)
        elif replay.out_of_service and not 0 < self._of == len(self._parts):
            self.violated(
                seq,
                "a partial update ended being out of service",
                expected="finish refused until every part was received",
                got=f"parts {listed(sorted(self._parts))} of {self._of} received",
                cause=[replay.out_of_service_since],
            )
        elif isinstance(operation, SwapWeights) and not self._parts:
            self.violated(
                seq,
                "a swap was committed without its weights",
                expected="`part_received` before `committed`",
                got=f"{event.version} committed",
            )
        else:
            self._check_paused(seq, "an update was committed")
        named = isinstance(operation, FinishWeightUpdate | SwapWeights)
        due = (operation.version or replay.weights.version) if named else event.version
        if event.version != due:
            self.violated(seq, "an update was committed under another version than its call named", expected=due, got=event.version)
