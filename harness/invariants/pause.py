"""Pausing: nothing runs while paused, pause means quiet, and the mode asked for is the mode carried out."""

from __future__ import annotations

from typing import NamedTuple

from harness.events import (
    Cleared,
    Closed,
    Finished,
    Launched,
    Mode,
    PauseEffective,
    Preempted,
    Received,
    Resumed,
    Returned,
)
from harness.invariants.invariant import Invariant, invariant, listed
from harness.operations import Abort, Pause, ResetPrefixCache
from harness.replay import NEVER, Replay, Request


@invariant("no-step-while-paused", level=1)
class NoStepWhilePaused(Invariant):
    """No forward, real or dummy, runs between a pause taking effect and the next resume, or a later `wait` call
    that runs frozen requests to their end; none runs while out of service."""

    def before_launched(self, seq: int, event: Launched) -> None:
        replay = self.replay
        if replay.stopped_since != NEVER:
            self.violated(
                seq,
                f"step {event.step} was launched while paused by {replay.pause_mode}",
                expected="no forward before `resumed` or a later `wait`",
                got=f"a step of {listed(row.request for row in event.batch)}",
                cause=[(replay.stopped_since, "pause effective")],
                once=("paused", replay.stopped_since),
            )
        elif replay.out_of_service:
            failed = replay.epoch_starts[-1]
            self.violated(
                seq,
                f"step {event.step} was launched while out of service",
                expected="no forward before a full update succeeds",
                got=f"a step of {listed(row.request for row in event.batch)}",
                cause=[(failed, "first byte of the update that failed")],
                once=("out-of-service", failed),
            )


@invariant("quiet-after-pause", level=1)
class QuietAfterPause(Invariant):
    """When pause returns nothing is queued, in flight or running; and it returns at most one step after the last
    forward that it waits for."""

    def __init__(self, replay: Replay) -> None:
        super().__init__(replay)
        self._overdue = 0
        """Steps launched under the pending pause after all that it waits for was done."""

    def after_pause_pending(self, seq: int, event: object) -> None:
        self._overdue = 0

    def before_launched(self, seq: int, event: Launched) -> None:
        replay = self.replay
        if not replay.pause_pending or self._waited_for():
            return
        self._overdue += 1
        if self._overdue > 1:
            self.violated(
                seq,
                f"the {replay.pause_mode} pause is pending beyond the last forward that it waits for",
                expected="at most one step after it",
                got=f"step {event.step} is the second",
                cause=[(replay.pending_since, "pause pending")],
                once=replay.pending_since,
            )

    def _waited_for(self) -> list[str]:
        """Requests that still have to run before the pending pause can take effect."""
        if self.replay.pause_mode != "wait":
            return []
        return [request.id for request in self.replay.live() if not request.parked]

    def before_pause_effective(self, seq: int, event: PauseEffective) -> None:
        replay = self.replay
        cause = [(replay.pending_since, "pause pending")]
        if replay.flights:
            self.violated(
                seq,
                "the pause took effect with a step in flight",
                expected="every launched step has landed",
                got=f"steps {listed(replay.flights)} in flight",
                cause=[*cause, *((flight.launched, f"launched step {flight.step}") for flight in replay.flights.values())],
            )
        if lost := [r.id for r in [*replay.live(), *replay.ending] if len(r.delivered) < len(r.output)]:
            self.violated(
                seq,
                "the pause took effect before sampled tokens were handed out",
                expected="every sampled token delivered",
                got=f"tokens of {listed(lost)} undelivered",
                cause=cause,
            )
        if untold := list(replay.ending):
            self.violated(
                seq,
                "the pause took effect before finished requests were handed out",
                expected="every finish reason delivered",
                got=f"{listed(request.id for request in untold)} finished and undelivered",
                cause=[*cause, *((request.ended, f"{request.id} finished") for request in untold)],
            )

    def before_returned(self, seq: int, event: Returned) -> None:
        call = self.replay.calls.get(event.op)
        if call is None or event.error is not None or not isinstance(call.operation, Pause):
            return
        if self.replay.last_effective < call.taken_up:
            self.violated(
                seq,
                f"pause call {event.op} returned although no pause has taken effect since",
                expected="`pause_effective` between the call and its return",
                got="none" if self.replay.last_effective == NEVER else f"the last one is event {self.replay.last_effective}",
                cause=[(call.taken_up, f"pause call {event.op} taken up")],
            )

    def at_end(self, seq: int, closed: Closed) -> None:
        replay = self.replay
        if closed.why == "interrupted" or replay.flights or (replay.pause_pending and self._waited_for()):
            return
        for call in replay.pauses.values():
            self.violated(
                seq,
                f"pause call {call.op} never returned",
                expected="an answer or an error, as nothing is left to wait for",
                got="no `returned`",
                cause=[(call.taken_up, f"pause call {call.op} taken up")],
            )


class _Asked(NamedTuple):
    """A pause call as the core took it up."""

    op: int
    seq: int
    mode: Mode
    clear_cache: bool
    live: tuple[Request, ...]
    """Requests accepted before it."""


@invariant("mode-fidelity", level=1)
class ModeFidelity(Invariant):
    """The mode and flags asked for are those carried out: of the requests accepted before the call, abort leaves none
    alive and wait none unfinished; keep ends none, except by a token of a step launched before it, by a client's abort,
    or by a later pause call; the cache is cleared if and only if a call asked for it."""

    def __init__(self, replay: Replay) -> None:
        super().__init__(replay)
        self._open: dict[int, _Asked] = {}
        """Calls taken up and not returned, in that order."""
        self._standing: list[_Asked] = []
        """Calls since the last resume that were not refused, returned ones included."""
        self._aborted: set[Request] = set()
        """Requests that a client asked to abort."""
        self._cleared = NEVER

    def before_received(self, seq: int, event: Received) -> None:
        replay = self.replay
        operation = call.operation if (call := replay.calls.get(event.op)) else None
        if isinstance(operation, Pause):
            asked = _Asked(event.op, seq, operation.mode, operation.clear_cache, tuple(replay.live()))
            self._open[event.op] = asked
            self._standing.append(asked)
        elif isinstance(operation, Abort):
            if operation.ids == "all":
                self._aborted.update(replay.live(), replay.blocked.values())
            else:
                self._aborted.update(replay.requests[id] for id in operation.ids if id in replay.requests)

    def before_returned(self, seq: int, event: Returned) -> None:
        asked = self._open.pop(event.op, None)
        if asked is None:
            return
        if event.error is not None:
            self._standing = [other for other in self._standing if other is not asked]
        elif asked.mode != "keep" and (left := [request.id for request in asked.live if request.finished is None]):
            self.violated(
                seq,
                f"pause({asked.mode}) returned with requests {'alive' if asked.mode == 'abort' else 'unfinished'}",
                expected=f"all {len(asked.live)} requests accepted before the call finished",
                got=f"{listed(left)} live",
                cause=[(asked.seq, f"pause({asked.mode}) taken up")],
            )

    def after_resumed(self, seq: int, event: Resumed) -> None:
        self._standing.clear()

    def before_finished(self, seq: int, event: Finished) -> None:
        request = self.replay.requests.get(event.request)
        if request is None or request.finished is not None or request in self._aborted or not self._standing:
            return
        if event.reason == "abort":
            self._check_abort(seq, request)
        elif self._standing[-1].mode == "keep":
            self._check_end_under_keep(seq, event)

    def _check_abort(self, seq: int, request: Request) -> None:
        """Only an abort pause after the request came may have aborted it, as no client did."""
        if any(asked.mode == "abort" and asked.seq > request.seen for asked in self._standing):
            return
        last = self._standing[-1]
        self.violated(
            seq,
            f"{request.id} was aborted under pause({last.mode}), and nobody asked for that",
            expected="an end by a client's abort or a pause(abort) after the request came",
            got="finish reason abort",
            cause=[(request.seen, f"{request.id} came"), (last.seq, f"pause({last.mode}) taken up")],
            once=("abort", last.op),
        )

    def _check_end_under_keep(self, seq: int, event: Finished) -> None:
        keep = self._standing[-1]
        for asked in reversed(self._standing):
            if asked.mode != "keep":
                break
            keep = asked
        landed = self.replay.last_landed
        if landed is not None and landed.launched < keep.seq:
            return
        self.violated(
            seq,
            f"{event.request} ended under pause(keep) by a token of a step launched after the call",
            expected="frozen where it was",
            got=f"finish reason {event.reason}",
            cause=[(keep.seq, "pause(keep) taken up"), *([(landed.launched, f"launched step {landed.step}")] if landed else [])],
            once=("keep", keep.op),
        )

    def before_preempted(self, seq: int, event: Preempted) -> None:
        if event.by is None and not self._clear_asked():
            self._unasked_clear(seq, f"{event.request} was preempted by a cache reset")

    def before_cleared(self, seq: int, event: Cleared) -> None:
        if event.success and event.empty:
            self._cleared = seq
        if event.success and not self._clear_asked():
            self._unasked_clear(seq, "the cache was cleared")

    def _clear_asked(self) -> bool:
        """By a pending pause or by a reset; while nothing is paused, there is no pause to be unfaithful to."""
        if not self._standing or any(asked.clear_cache for asked in self._open.values()):
            return True
        return any(isinstance(call.operation, ResetPrefixCache) and call.received != NEVER for call in self.replay.calls.values())

    def _unasked_clear(self, seq: int, what: str) -> None:
        last = self._standing[-1]
        self.violated(
            seq,
            f"{what} under pause({last.mode}), and no call asked for that",
            expected="the cache kept: clear_cache=False",
            got="a clear",
            cause=[(last.seq, f"pause({last.mode}, clear_cache={last.clear_cache}) taken up")],
            once=("clear", last.op),
        )

    def before_pause_effective(self, seq: int, event: PauseEffective) -> None:
        if not self._open:
            return
        calls = list(self._open.values())
        last, clearing = calls[-1], [asked for asked in calls if asked.clear_cache]
        cause = [(asked.seq, f"pause({asked.mode}, clear_cache={asked.clear_cache}) taken up") for asked in calls]
        if event.mode != last.mode:
            self.violated(seq, "a pause took effect in a mode that was not asked for", expected=last.mode, got=event.mode, cause=cause)
        if event.clear_cache != bool(clearing):
            self.violated(
                seq,
                "a pause took effect with another cache policy than its calls asked for",
                expected=f"clear_cache={bool(clearing)}",
                got=f"clear_cache={event.clear_cache}",
                cause=cause,
            )
        if clearing and self._cleared < max(clearing[-1].seq, self.replay.last_launched):
            self.violated(
                seq,
                "a pause with clear_cache=True took effect and the cache had not been emptied",
                expected="a `cleared` with success and empty, after the call and the last step",
                got="none" if self._cleared < clearing[-1].seq else f"the last one is event {self._cleared}, before a step",
                cause=[*cause, (self.replay.last_launched, "last step launched")],
            )
