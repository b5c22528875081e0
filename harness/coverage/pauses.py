"""Situations of pausing and of sleeping."""

from __future__ import annotations

from collections.abc import Callable

from harness.coverage.family import Facts, Family
from harness.events import (
    Asleep,
    Awake,
    Cleared,
    Closed,
    Committed,
    Finished,
    Mode,
    PauseEffective,
    PausePending,
    Received,
    Resumed,
    Returned,
)
from harness.operations import (
    FinishWeightUpdate,
    IsPaused,
    Pause,
    ResetPrefixCache,
    Resume,
    Sleep,
    StartWeightUpdate,
    Submit,
    SwapWeights,
    WakeUp,
)
from harness.replay import DROPPED, NEVER


class Pauses(Family):
    def __init__(self, facts: Facts, reached: Callable[[str], None]) -> None:
        super().__init__(facts, reached)
        self._met_live = False
        """The pending calls met a live request."""
        self._kept = False
        """The pause that is effective kept the cache."""
        self._was_paused = False

    def before_received(self, seq: int, event: Received) -> None:
        self._was_paused = self.replay.pause_mode is not None
        if isinstance(self.facts.operation, IsPaused) and self.replay.pause_pending:
            self.reached("is-paused-while-pending")

    def before_pause_pending(self, seq: int, event: PausePending) -> None:
        replay = self.replay
        if replay.pause_mode is not None:
            self.reached(f"{event.mode}-over-{'pending' if replay.pause_pending else 'paused'}-{replay.pause_mode}")
        if replay.flights:
            self.reached("pause-over-step-in-flight")
        if event.mode == "wait":
            self._wait_for()
        self._met_live = (self._met_live and replay.pause_pending) or bool(replay.running or replay.waiting)

    def _wait_for(self) -> None:
        for request in self.replay.waiting.values():
            state = "parked" if request.parked else "preempted" if request.status == "preempted" else "waiting"
            self.reached(f"wait-for-{state}")
        if self.replay.running and self.replay.stopped_since != NEVER:
            self.reached("wait-for-frozen")
        if self.facts.half_prefilled:
            self.reached("wait-for-half-prefilled")

    def before_pause_effective(self, seq: int, event: PauseEffective) -> None:
        replay = self.replay
        self.reached(f"{event.mode}-pause-{'cleared' if event.clear_cache else 'kept'}" if self._met_live else "empty-pause")
        if len(replay.pauses) > 1:
            self.reached("pause-joined")
            if len({call.clear_cache for call in replay.pauses.values()}) > 1:
                self.reached("clear-asked-by-one")
        if event.clear_cache and self._kept:
            self.reached("clear-after-kept")
        if any(request.status == "preempted" and request.at_preemption != request.at_reset for request in replay.waiting.values()):
            self.reached("preempted-while-paused")
        self._kept = not event.clear_cache

    def before_resumed(self, seq: int, event: Resumed) -> None:
        if self.replay.pause_pending:
            self.reached(f"resume-over-pending-{self.replay.pause_mode}")
        self._kept = False

    def before_returned(self, seq: int, event: Returned) -> None:
        match self.outcome(event):
            case Pause(), "superseded" if isinstance(self.facts.operation, Pause | Sleep):
                self.reached("pause-superseded")
            case Pause(mode="wait"), "conflict" if self.replay.update_open:
                self.reached("wait-in-session")
            case Pause(mode="wait"), "out-of-service":
                self.reached("wait-out-of-service")
            case Resume(), "conflict" if self.replay.update_open:
                self.reached("resume-in-session")
            case Resume(), "out-of-service":
                self.reached("resume-out-of-service")
            case Resume(), "" if not self._was_paused:
                self.reached("resume-while-running")
            case _:
                pass

    def before_closed(self, seq: int, event: Closed) -> None:
        if event.why == "paused":
            self.reached("left-paused")


class Sleeps(Family):
    def __init__(self, facts: Facts, reached: Callable[[str], None]) -> None:
        super().__init__(facts, reached)
        self._met_live: dict[int, Mode] = {}
        """Sleep calls that met live requests, with the mode that they asked for themselves."""

    def after_received(self, seq: int, event: Received) -> None:
        replay, operation = self.replay, self.facts.operation
        asleep = replay.sleep_level is not None
        match operation:
            case Sleep(mode=None) if replay.pause_mode is not None:
                self.reached("sleep-joins-pending" if replay.pause_pending else "sleep-joins-pause")
            case Sleep() if replay.running or replay.waiting:
                self._met_live[event.op] = replay.calls[event.op].mode or "abort"
            case Pause() if asleep:
                self.reached("pause-asleep")
            case Submit() if asleep:
                self.reached("late-request-asleep")
            case _:
                pass

    def before_finished(self, seq: int, event: Finished) -> None:
        if self.replay.sleep_level is not None:
            self.reached("abort-asleep")

    def before_cleared(self, seq: int, event: Cleared) -> None:
        if "kv_cache" in self.replay.asleep and event.tier == "device" and isinstance(self.facts.operation, ResetPrefixCache):
            self.reached("reset-asleep")

    def before_asleep(self, seq: int, event: Asleep) -> None:
        replay, level = self.replay, self.replay.sleep_level
        self.reached(f"asleep-at-level-{event.level}")
        if level is not None:
            self.reached("sleep-deeper" if event.level > level else "sleep-again")
        if replay.waiting or replay.running:
            self.reached("sleep-over-frozen")
        for op in replay.pauses:
            if op in self._met_live:
                self.reached(f"sleep-by-{self._met_live[op]}")

    def before_awake(self, seq: int, event: Awake) -> None:
        replay = self.replay
        if event.tags:
            self.reached("partial-wake")
        elif replay.pause_asked:
            self.reached("wake-keeps-pause")
        if replay.sleep_level == DROPPED and "weights" in replay.asleep and "weights" not in event.tags:
            self.reached("woke-without-weights")

    def before_resumed(self, seq: int, event: Resumed) -> None:
        match self.facts.operation:
            case WakeUp():
                self.reached("wake-ends-pause")
            case FinishWeightUpdate() | SwapWeights():
                self.reached("update-ends-pause")
            case _:
                pass

    def before_committed(self, seq: int, event: Committed) -> None:
        if "kv_cache" in self.replay.asleep:
            self.reached("update-while-cache-sleeps")

    def before_returned(self, seq: int, event: Returned) -> None:
        replay = self.replay
        match self.outcome(event):
            case Sleep(), "superseded":
                self.reached("sleep-superseded")
            case Sleep(), "conflict" if replay.update_open:
                self.reached("sleep-in-session")
            case WakeUp(), "" if not self._woke(event):
                self.reached("wake-of-awake")
            case ((StartWeightUpdate() | SwapWeights()), "conflict") if "weights" in replay.asleep:
                self.reached("start-asleep")
            case Resume(), "conflict" if replay.sleep_level is not None and not replay.update_open:
                self.reached("resume-asleep")
            case Pause(mode="wait"), "conflict" if replay.sleep_level is not None and not replay.update_open:
                self.reached("wait-asleep")
            case _:
                pass

    def _woke(self, event: Returned) -> bool:
        call = self.replay.calls[event.op]
        return self.replay.awake_since > call.taken_up
