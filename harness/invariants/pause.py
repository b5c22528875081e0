"""Pausing and sleeping: nothing runs meanwhile, pause means quiet, and the mode asked for is the mode carried out."""

from __future__ import annotations

from collections.abc import Iterable
from types import NoneType
from typing import NamedTuple

from harness.events import (
    Asleep,
    Cleared,
    Closed,
    Finished,
    Launched,
    Mode,
    PauseEffective,
    PausePending,
    Preempted,
    Received,
    Resumed,
    Returned,
)
from harness.invariants.invariant import Invariant, invariant, listed
from harness.operations import Abort, Pause, ResetPrefixCache, Resume
from harness.replay import NEVER, Call, Replay, Request


@invariant("no-step-while-paused", level=1)
class NoStepWhilePaused(Invariant):
    """No forward, real or dummy, runs between a pause taking effect and the next resume, or a later `wait` call
    that runs frozen requests to their end; none runs while out of service, and none while anything is asleep: memory is
    given back under an effective pause, and a sleeping engine does not resume."""

    def before_launched(self, seq: int, event: Launched) -> None:
        if not event.batch:  # vLLM's way of telling its workers who has ended: no forward runs
            return
        replay = self.replay
        if replay.sleep_level is not None:
            self.violated(
                seq,
                f"step {event.step} was launched while {self._sleepers()}",
                expected="no forward before all is awake",
                got=f"a step of {listed(row.request for row in event.batch)}",
                cause=[(replay.asleep_since, "fell asleep"), (replay.awake_since, "last wake-up")],
                once=("asleep", replay.asleep_since),
            )
        elif replay.stopped_since != NEVER:
            self.violated(
                seq,
                f"step {event.step} was launched while paused by {replay.pause_mode}",
                expected="no forward before `resumed` or a later `wait`",
                got=f"a step of {listed(row.request for row in event.batch)}",
                cause=[(replay.stopped_since, "pause effective")],
                once=("paused", replay.stopped_since),
            )
        elif replay.out_of_service:
            self.violated(
                seq,
                f"step {event.step} was launched while out of service",
                expected="no forward before a full update succeeds",
                got=f"a step of {listed(row.request for row in event.batch)}",
                cause=[replay.out_of_service_since],
                once=("out-of-service", replay.out_of_service_since),
            )

    def before_asleep(self, seq: int, event: Asleep) -> None:
        replay = self.replay
        if replay.stopped_since != NEVER and not replay.flights:
            return
        self.violated(
            seq,
            f"the engine fell asleep at level {event.level} under {'a step in flight' if replay.flights else 'no effective pause'}",
            expected="memory given back once a pause is effective and every launched step has landed",
            got=f"steps {listed(replay.flights)} in flight" if replay.flights else "an engine that may run",
            cause=[(flight.launched, f"launched step {flight.step}") for flight in replay.flights.values()],
        )

    def before_resumed(self, seq: int, event: Resumed) -> None:
        if self.replay.sleep_level is not None:
            self.violated(
                seq,
                f"the engine resumed while {self._sleepers()}",
                expected="resume refused, and no wake-up's resume, until all is awake",
                got="`resumed`",
                cause=[(self.replay.asleep_since, "fell asleep"), (self.replay.awake_since, "last wake-up")],
            )

    def _sleepers(self) -> str:
        """What is asleep, in words."""
        tags = self.replay.asleep
        return f"{' and '.join(tags)} {'sleep' if len(tags) > 1 else 'sleeps'}" if tags else "scheduling sleeps"


@invariant("quiet-after-pause", level=1)
class QuietAfterPause(Invariant):
    """When pause returns nothing is queued, in flight or running, and nothing was resumed since; it returns at most one
    step after the last forward that it waits for, or as superseded within the call that overrides it."""

    def __init__(self, replay: Replay) -> None:
        super().__init__(replay)
        self._overdue = 0
        """Steps launched under the pending pause after all that it waits for was done."""
        self._awaited: tuple[Request, ...] = ()
        """Whom the last `wait` call waits for: those that were live when it was taken up."""
        self._untold = False
        """A request ended since the last step was launched."""
        self._aborted: set[int] = set()
        """Pause calls over which an abort came: they wait for what it waits for."""
        self._resumed = NEVER
        self._superseded: dict[int, int] = {}
        """Pause calls that were overridden and have not returned, with the number of the event that did it, ..."""
        self._due: list[int] = []
        """... and those of them that have to return before anything else happens."""

    def before_pause_pending(self, seq: int, event: PausePending) -> None:
        self._overdue = 0
        if event.mode == "wait" and not any(call.joins for call in list(self.replay.pauses.values())[-1:]):
            self._awaited = tuple(self.replay.live())
        elif event.mode == "keep":
            self._override(seq, [op for op, call in self.replay.pauses.items() if call.mode == "wait" and op not in self._aborted])
        elif event.mode == "abort":
            self._aborted.update(self.replay.pauses)

    def before_resumed(self, seq: int, event: Resumed) -> None:
        self._resumed = seq
        if self.replay.pause_pending:
            self._override(seq, self.replay.pauses)

    def _override(self, seq: int, ops: Iterable[int]) -> None:
        if self.replay.writers <= 1:
            self._superseded.update(dict.fromkeys(ops, seq))
            self._due = list(self._superseded)

    def before_received(self, seq: int, event: Received) -> None:
        if self._due:
            self._expect_superseded_returned(seq)

    def after_finished(self, seq: int, event: Finished) -> None:
        self._untold = True

    def before_launched(self, seq: int, event: Launched) -> None:
        replay = self.replay
        if self._due:
            self._expect_superseded_returned(seq)
        untold, self._untold = self._untold, False
        if not replay.pause_pending or self._waited_for():
            return
        if not event.batch and any(flight.batch for flight in replay.flights.values()):
            return  # No forward, and what the pause waits for has not landed yet.
        # vLLM owes its workers a step, empty if need be, after an end; an abort under the pending pause makes it owe another.
        self._overdue = 1 if untold and not event.batch else self._overdue + 1
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
        return [request.id for request in self._awaited if request.finished is None]

    def _expect_superseded_returned(self, seq: int) -> None:
        for op in self._due:
            if op in self._superseded:
                self.violated(
                    seq,
                    f"{_called(op, self.replay.calls.get(op))} was superseded and did not return",
                    expected="an error (superseded) within the call that overrides it",
                    got="no `returned`",
                    cause=[(self._superseded[op], "superseded")],
                    once=("superseded", op),
                )
        self._due.clear()

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
        if call is None or call.mode is None:
            return
        by = self._superseded.pop(event.op, NEVER)
        if event.error is None:
            self._check_success(seq, call, by)
        elif event.error.code == "superseded" and by == NEVER and self.replay.writers <= 1 and not self._overridden(call):
            self.violated(
                seq,
                f"{_called(event.op, call)} failed as superseded, and no call overrides it",
                expected="a later resume, or a later pause(keep) over a wait, being carried out",
                got="neither",
                cause=[(call.taken_up, f"{_called(event.op, call)} taken up")],
            )

    def _overridden(self, call: Call) -> bool:
        later = [other for other in self.replay.calls.values() if other.received > call.received]
        waits = call.mode == "wait" and call.op not in self._aborted
        return any(isinstance(other.operation, Resume) or (waits and other.mode == "keep") for other in later)

    def _check_success(self, seq: int, call: Call, superseded: int) -> None:
        replay, named = self.replay, _called(call.op, call)
        taken_up = (call.taken_up, f"{named} taken up")
        effective = replay.last_effective
        undone = max(self._resumed, replay.last_launched)
        if effective < call.taken_up:
            self.violated(
                seq,
                f"{named} returned although no pause has taken effect since",
                expected="`pause_effective` between the call and its return",
                got="none" if effective == NEVER else f"the last one is event {effective}",
                cause=[taken_up],
            )
        elif superseded != NEVER:
            self.violated(
                seq,
                f"{named} was superseded and returned as if it had been carried out",
                expected="an error: superseded",
                got="success",
                cause=[taken_up, (superseded, "superseded")],
                once=("superseded", call.op),
            )
        elif undone > effective and replay.writers <= 1:
            what = "resumed" if undone == self._resumed else "launched a step"
            self.violated(
                seq,
                f"{named} returned as paused after the engine had {what}",
                expected="the return as soon as the pause takes effect",
                got=f"event {undone} between `pause_effective` and the return",
                cause=[taken_up, (effective, "pause effective"), (undone, what)],
            )

    def at_end(self, seq: int, closed: Closed) -> None:
        replay = self.replay
        if closed.cut_short:
            return
        self._expect_superseded_returned(seq)
        if replay.flights or (replay.pause_pending and self._waited_for()):
            return
        for call in replay.pauses.values():
            if call.op in self._superseded:
                continue
            self.violated(
                seq,
                f"{_called(call.op, call)} never returned",
                expected="an answer or an error, as nothing is left to wait for",
                got="no `returned`",
                cause=[(call.taken_up, f"{_called(call.op, call)} taken up")],
            )


def _called(op: int, call: Call | None) -> str:
    """A call that pauses, in words."""
    return f"{'pause' if call is None or call.operation is None else call.operation.verb} call {op}"


class _Asked(NamedTuple):
    """A call that pauses as the core took it up."""

    op: int
    seq: int
    verb: str
    mode: Mode
    clear_cache: bool
    joins: bool
    """It is a sleep without a mode over a pause, and does nothing to requests."""
    live: tuple[Request, ...]
    """Requests accepted before it."""

    def __str__(self) -> str:
        return f"{self.verb}({self.mode})"


@invariant("mode-fidelity", level=1)
class ModeFidelity(Invariant):
    """The mode and flags asked for are those carried out: of the requests accepted before the call, abort leaves none
    alive and wait none unfinished, and runs no others; keep ends none, except by a token of a step launched before it, by a client's abort,
    or by a later pause call; a sleep without a mode keeps that of the pause in force; a pause that a pause call asked for
    ends by resume only; the cache is cleared, in every tier, if and only if a call asked for it."""

    def __init__(self, replay: Replay) -> None:
        super().__init__(replay)
        self._open: dict[int, _Asked] = {}
        """Calls taken up and not returned, in that order."""
        self._standing: list[_Asked] = []
        """Calls since the last resume that were not refused, returned ones included."""
        self._frozen_since = NEVER
        """Number of the `pause_pending` from which on only `keep` was asked for; it counts while the mode is `keep`."""
        self._aborted: set[Request] = set()
        """Requests that a client asked to abort."""
        self._cleared = {"device": NEVER, "host": NEVER}
        """Number of the last `cleared` of each tier that said it was empty."""
        self._awaited: frozenset[Request] = frozenset()
        """Whom the last `wait` call is to run to their end."""

    def after_received(self, seq: int, event: Received) -> None:
        replay = self.replay
        if (call := replay.calls.get(event.op)) is None or (operation := call.operation) is None:
            return
        if call.mode is not None:
            live = tuple(replay.live())
            asked = _Asked(event.op, seq, operation.verb, call.mode, call.clear_cache, call.joins, live)
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
        elif asked.mode != "keep" and not asked.joins and (left := [request.id for request in asked.live if request.finished is None]):
            self.violated(
                seq,
                f"{asked} returned with requests {'alive' if asked.mode == 'abort' else 'unfinished'}",
                expected=f"all {len(asked.live)} requests accepted before the call finished",
                got=f"{listed(left)} live",
                cause=[(asked.seq, f"{asked} taken up")],
            )

    def before_pause_pending(self, seq: int, event: PausePending) -> None:
        if self.replay.pause_mode != "keep":
            self._frozen_since = seq
        if event.mode == "wait" and not (self._standing and self._standing[-1].joins):
            self._awaited = frozenset(self.replay.live())

    def before_launched(self, seq: int, event: Launched) -> None:
        replay = self.replay
        if replay.pause_mode != "wait" or not replay.pause_pending:
            return
        for id, _, _ in event.batch:
            request = replay.requests.get(id)
            if request is not None and request.finished is None and request not in self._awaited:
                self.violated(
                    seq,
                    f"step {event.step} runs {id} under a pending pause(wait) that it came after",
                    expected=f"only those accepted before the call: {listed(one.id for one in self._awaited if one.finished is None)}",
                    got=f"a step of {listed(row.request for row in event.batch)}",
                    cause=[(replay.pending_since, "pause(wait) taken up"), (request.seen, f"{id} came")],
                    once=("late", request),
                )

    def before_resumed(self, seq: int, event: Resumed) -> None:
        replay = self.replay
        if not replay.pause_asked or any(
            isinstance(call.operation, Resume | NoneType) for call in replay.calls.values() if call.received != NEVER
        ):
            return
        asked = [(one.seq, f"{one} taken up") for one in self._standing if one.verb == Pause.verb]
        self.violated(
            seq,
            f"a {replay.pause_mode} pause that was asked for ended without a resume",
            expected="paused until somebody resumes: sleep and its wake-up end only what sleep alone has paused",
            got="`resumed`",
            cause=[*asked, (replay.awake_since, "last wake-up")],
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
        if any(asked.mode == "abort" and asked.seq > request.seen and not asked.joins for asked in self._standing):
            return
        last = self._standing[-1]
        self.violated(
            seq,
            f"{request.id} was aborted under {last}, and nobody asked for that",
            expected="an end by a client's abort or a pause(abort) after the request came",
            got="finish reason abort",
            cause=[(request.seen, f"{request.id} came"), (last.seq, f"{last} taken up")],
            once=("abort", last.op),
        )

    def _check_end_under_keep(self, seq: int, event: Finished) -> None:
        landed = self.replay.last_landed
        if landed is not None and landed.launched < self._frozen_since:
            return
        self.violated(
            seq,
            f"{event.request} ended under pause(keep) by a token of a step launched after the call",
            expected="frozen where it was",
            got=f"finish reason {event.reason}",
            cause=[(self._frozen_since, "pause(keep) taken up"), *([(landed.launched, f"launched step {landed.step}")] if landed else [])],
            once=("keep", self._frozen_since),
        )

    def before_preempted(self, seq: int, event: Preempted) -> None:
        if event.by is None and not self._clear_asked():
            self._unasked_clear(seq, f"{event.request} was preempted by a cache reset")

    def before_cleared(self, seq: int, event: Cleared) -> None:
        if event.success and event.empty:
            self._cleared[event.tier] = seq
        if event.success and not self._clear_asked():
            self._unasked_clear(seq, "the cache was cleared")

    def _clear_asked(self) -> bool:
        """By a pending pause or by a reset."""
        return any(asked.clear_cache for asked in self._open.values()) or any(
            isinstance(call.operation, ResetPrefixCache) and call.received != NEVER for call in self.replay.calls.values()
        )

    def _unasked_clear(self, seq: int, what: str) -> None:
        last = self._standing[-1] if self._standing else None
        self.violated(
            seq,
            f"{what}{f' under {last}' if last else ''}, and no call asked for that",
            expected="the cache kept: clear_cache=False" if last else "the cache kept until a pause or a reset clears it",
            got="a clear",
            cause=[_in_full(last)] if last else [],
            once=("clear", last and last.op),
        )

    def before_pause_effective(self, seq: int, event: PauseEffective) -> None:
        if not self._open:
            return
        calls = list(self._open.values())
        last, clearing = calls[-1], [asked for asked in calls if asked.clear_cache]
        cause = [_in_full(asked) for asked in calls]
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
        if clearing:
            self._check_emptied(seq, clearing[-1].seq, cause)

    def _check_emptied(self, seq: int, asked: int, cause: list[tuple[int, str]]) -> None:
        """The cache was cleared since event `asked`, and what the log tells of its blocks agrees."""
        blocks = self.replay.blocks
        tiers = ("device", "host") if blocks.host_count else ("device",)
        tier = min(tiers, key=self._cleared.__getitem__)
        cleared = self._cleared[tier]
        if cleared < max(asked, self.replay.last_launched):
            self.violated(
                seq,
                f"a pause with clear_cache=True took effect and the cache had not been emptied{' on the host' if tier == 'host' else ''}",
                expected="a `cleared` with success and empty, after the call and the last step",
                got="none" if cleared < asked else f"the last one is event {cleared}, before a step",
                cause=[*cause, (self.replay.last_launched, "last step launched")],
            )
        elif left := [block for block in range(blocks.count) if blocks.references.get(block) or block in blocks.labels]:
            self.violated(
                seq,
                "a pause with clear_cache=True took effect and the cache is not empty, although its reset said so",
                expected="no block held and no digest left",
                got=f"blocks {listed(left)}",
                cause=[*cause, (cleared, "cleared, said to be empty")],
            )


def _in_full(asked: _Asked) -> tuple[int, str]:
    """A call that pauses, as a cause."""
    return asked.seq, f"{asked.verb}({asked.mode}, clear_cache={asked.clear_cache}) taken up"
