"""Control calls: what is answered is what was done, asking twice is not doing twice, and flags say what is."""

from __future__ import annotations

from itertools import chain
from types import NoneType
from typing import Any

from harness.events import (
    Accepted,
    Asleep,
    Awake,
    Blocked,
    Cleared,
    Closed,
    Committed,
    ErrorCode,
    Event,
    Finished,
    Launched,
    PartReceived,
    PauseEffective,
    PausePending,
    Preempted,
    Received,
    Relabelled,
    Resumed,
    Returned,
    UpdateFailed,
    UpdateStarted,
)
from harness.invariants.invariant import Invariant, invariant, listed
from harness.operations import (
    Abort,
    FinishWeightUpdate,
    IsPaused,
    IsSleeping,
    Operation,
    Pause,
    ResetPrefixCache,
    Resume,
    Sleep,
    StartWeightUpdate,
    Submit,
    SwapWeights,
    UpdateWeights,
    UpdateWeightVersion,
    WakeUp,
)
from harness.replay import BLOCKS_SEEN, NEVER, Call, Replay, Request

EFFECTS: dict[type[Operation], type[Event]] = {
    StartWeightUpdate: UpdateStarted,
    UpdateWeights: PartReceived,
    FinishWeightUpdate: Committed,
    SwapWeights: Committed,
    UpdateWeightVersion: Relabelled,
    Sleep: Asleep,
}
"""The event by which a call shows that succeeded; the others are judged each in its own way."""

ASKED_BY: dict[type[Event], tuple[type[Operation], ...]] = {
    PausePending: (Pause, Sleep),
    Resumed: (Resume, WakeUp, FinishWeightUpdate, SwapWeights),
    Asleep: (Sleep,),
    Awake: (WakeUp,),
    UpdateStarted: (StartWeightUpdate, SwapWeights),
    PartReceived: (UpdateWeights, SwapWeights),
    Committed: (FinishWeightUpdate, SwapWeights),
    Relabelled: (UpdateWeightVersion,),
}
"""What happens only while a call that asks for it is being carried out: taken up and not answered."""

NOT_CARRIED_OUT: tuple[ErrorCode, ...] = ("invalid", "conflict", "busy", "rejected", "out-of-service")
"""Codes of calls that were refused before they changed anything."""


@invariant("api-truth", level=1)
class ApiTruth(Invariant):
    """Success is answered after the effect, a refused call changes nothing, nothing is done that nobody asked for, and
    every call returns."""

    def __init__(self, replay: Replay) -> None:
        super().__init__(replay)
        self._last: dict[type[Event], int] = {}
        """Number of the last event of each kind that shows an effect."""
        self._op = NEVER
        """The call being carried out; NEVER between calls."""
        self._done: list[str] = []
        """What it did so far, in words."""
        self._paused_by: set[int] = set()
        """Calls that were taken up as a pause and have not returned."""
        self._doomed: dict[int, tuple[Request, ...]] = {}
        """By abort call: whom it has to end."""
        self._asked: set[Request] = set()
        """Requests whose abort was asked for, by an abort call or an abort pause."""
        self._came: dict[str, tuple[int, str]] = {}
        """When a request was taken on, and how, in the word of a submission's answer."""
        self._tensors = 0
        """Tensors that the open weight session has written."""

    # What happens.

    def before_received(self, seq: int, event: Received) -> None:
        replay = self.replay
        self._op, self._done = event.op, []
        operation = call.operation if (call := replay.calls.get(event.op)) else None
        if isinstance(operation, Abort):
            ids = [*replay.running, *replay.waiting, *replay.blocked] if operation.ids == "all" else operation.ids
            found = (replay.requests.get(id) for id in dict.fromkeys(ids))
            doomed = self._doomed[event.op] = tuple(one for one in found if one is not None and one.finished is None)
            self._asked.update(doomed)

    def after_received(self, seq: int, event: Received) -> None:
        call = self.replay.calls.get(event.op)
        if call is not None and call.mode == "abort" and not call.joins:
            self._asked.update(self.replay.live())

    def before_launched(self, seq: int, event: Launched) -> None:
        self._op = NEVER

    def _shows(self, seq: int, event: Event, what: str) -> None:
        self._last[type(event)] = seq
        if self._op != NEVER:
            self._done.append(what)
        if (askers := ASKED_BY.get(type(event))) is not None and not self._carrying_out(askers):
            self.violated(
                seq,
                f"the engine {what}, and nobody asked for that",
                expected=f"a call of {' or '.join(asker.verb for asker in askers)} that is taken up and not answered",
                got="none",
            )

    def _carrying_out(self, askers: tuple[type[Operation], ...]) -> bool:
        """Whether such a call is open; one of a kind that this version does not know may be anything."""
        return any(call.received != NEVER and isinstance(call.operation, (*askers, NoneType)) for call in self.replay.calls.values())

    def before_accepted(self, seq: int, event: Accepted) -> None:
        if event.request not in self.replay.blocked:
            self._came[event.request] = (seq, "parked" if event.parked else "queued")

    def before_blocked(self, seq: int, event: Blocked) -> None:
        self._came[event.request] = (seq, "blocked")

    def before_finished(self, seq: int, event: Finished) -> None:
        request = self.replay.requests.get(event.request)
        self._shows(seq, event, f"ended {event.request}")
        if event.reason == "abort" and request is not None and request not in self._asked:
            self.violated(
                seq,
                f"{event.request} was aborted, and nobody asked for that",
                expected="an abort call that names it, or a pause(abort), since it came",
                got="finish reason abort",
                cause=[(request.seen, f"{event.request} came")],
                once=request,
            )
        if request is not None:
            self._asked.discard(request)

    def before_cleared(self, seq: int, event: Cleared) -> None:
        if event.success:
            self._shows(seq, event, "cleared the cache")

    def before_pause_pending(self, seq: int, event: PausePending) -> None:
        self._shows(seq, event, "paused")
        self._paused_by.add(self._op)

    def before_pause_effective(self, seq: int, event: PauseEffective) -> None:
        if not self.replay.pause_pending:
            self.violated(
                seq, "a pause took effect, and none was pending", expected="`pause_pending` before", got=f"a pause of mode {event.mode}"
            )

    def before_resumed(self, seq: int, event: Resumed) -> None:
        self._shows(seq, event, "resumed")
        self._asked.intersection_update(chain.from_iterable(self._doomed.values()))  # what a pause(abort) did not end goes on

    def before_asleep(self, seq: int, event: Asleep) -> None:
        self._shows(seq, event, "fell asleep")
        replay = self.replay
        asked = [call.operation.level for call in replay.pauses.values() if isinstance(call.operation, Sleep)]
        if not asked:
            return
        level = max(*asked, replay.sleep_level or 0)
        tags = ("kv_cache", "weights") if level else ()
        if (event.level, event.tags) != (level, tags):
            self.violated(
                seq,
                "the engine does not sleep as its calls asked for",
                expected=f"level {level}, {listed(tags)} asleep",
                got=f"level {event.level}, {listed(event.tags)} asleep",
                cause=[(call.taken_up, "sleep taken up") for call in replay.pauses.values() if isinstance(call.operation, Sleep)],
            )

    def before_awake(self, seq: int, event: Awake) -> None:
        self._shows(seq, event, "woke up")

    def before_update_started(self, seq: int, event: UpdateStarted) -> None:
        self._shows(seq, event, "opened a weight session")
        self._tensors = 0

    def before_part_received(self, seq: int, event: PartReceived) -> None:
        self._shows(seq, event, "wrote weights")
        self._tensors += event.tensors

    def before_update_failed(self, seq: int, event: UpdateFailed) -> None:
        self._last[UpdateFailed] = seq

    def before_relabelled(self, seq: int, event: Relabelled) -> None:
        self._shows(seq, event, f"set the version {event.version}")

    def before_committed(self, seq: int, event: Committed) -> None:
        self._shows(seq, event, f"committed {event.version}")
        opened, part = self.replay.opened, self._last.get(PartReceived, NEVER)
        weightless = opened is None or opened.device == "none"
        if not weightless and not self._tensors and part > self._last.get(UpdateStarted, NEVER):
            self.violated(
                seq,
                "a weight update succeeded that wrote nothing",
                expected="at least one tensor written by its parts",
                got="0 tensors",
                cause=[(part, "part received")],
            )

    # What is answered.

    def before_returned(self, seq: int, event: Returned) -> None:
        call = self.replay.calls.get(event.op)
        doomed = self._doomed.pop(event.op, ())
        paused = event.op in self._paused_by
        self._paused_by.discard(event.op)
        if call is None:
            self.violated(seq, f"call {event.op} was answered and was not open", expected="one answer to each call", got="another")
            return
        if call.operation is None:
            return
        if event.error is not None:
            self._check_refusal(seq, call, call.operation, event.error.code, paused=paused)
        elif event.answer is not None:
            self._check_success(seq, call, call.operation, event.answer, doomed)
        if event.op == self._op:
            self._op = NEVER

    def _check_refusal(self, seq: int, call: Call, operation: Operation, code: ErrorCode, *, paused: bool) -> None:
        if paused and code != "superseded":
            self._untrue(seq, call, f"was refused ({code}), and did something", "no effect", "paused")
        elif code in NOT_CARRIED_OUT and call.op == self._op and self._done:
            self._untrue(seq, call, f"was refused ({code}), and did something", "no effect", ", ".join(self._done))
        elif code == "failed" and type(operation) in EFFECTS and not self._since(call, UpdateFailed):
            self._untrue(seq, call, "failed, and no failure of an update was seen", "`update_failed`", "none")

    def _check_success(self, seq: int, call: Call, operation: Operation, answer: dict[str, Any], doomed: tuple[Request, ...]) -> None:
        effect = EFFECTS.get(type(operation))
        if effect is not None and not self._since(call, effect):
            self._untrue(seq, call, "succeeded without its effect", f"`{effect.__struct_config__.tag}` before the answer", "none")
        match operation:
            case Submit():
                self._check_submission(seq, call, operation, answer)
            case Abort():
                self._check_abort(seq, call, doomed, answer)
            case Resume() if self.replay.pause_mode is not None and not self._since(call, PausePending):
                self._untrue(seq, call, "succeeded and the engine is paused", "`resumed` before the answer", "none since the pause")
            case WakeUp():
                self._check_wake(seq, call, operation)
            case ResetPrefixCache() if (self.replay.level or 0) >= BLOCKS_SEEN and not self._since(call, Cleared):
                self._untrue(seq, call, "succeeded and nothing was reset", "`cleared` with success before the answer", "none")
            case FinishWeightUpdate(version=str(version)) | SwapWeights(version=str(version)) | UpdateWeightVersion(version=version):
                if answer.get("weight_version", version) != version:
                    self._untrue(seq, call, "succeeded under another version", version, str(answer["weight_version"]))
            case _:
                pass

    def _check_submission(self, seq: int, call: Call, submit: Submit, answer: dict[str, Any]) -> None:
        came, how = self._came.get(submit.id, (NEVER, ""))
        if came > call.taken_up and answer.get("state", how) != how:
            self._untrue(seq, call, f"answered another state than {submit.id} was taken on in", how, str(answer["state"]))

    def _check_wake(self, seq: int, call: Call, wake: WakeUp) -> None:
        replay = self.replay
        left = [tag for tag in replay.asleep if wake.tags is None or tag in wake.tags]
        may_run = replay.sleep_level is None and not replay.update_open and not replay.out_of_service
        if left or (wake.tags is None and replay.sleep_level is not None):
            expected = "all awake" if wake.tags is None else f"{listed(wake.tags)} awake"
            got = f"{listed(left) if left else 'scheduling'} asleep"
            self._untrue(seq, call, "succeeded and did not wake what it names", expected, got)
        elif may_run and self._since(call, Awake) and replay.pause_mode is not None and not replay.pause_asked:
            self._untrue(seq, call, "left the engine in the pause that sleep alone had made", "`resumed` before the answer", "paused")

    def _check_abort(self, seq: int, call: Call, doomed: tuple[Request, ...], answer: dict[str, Any]) -> None:
        left = [request.id for request in doomed if request.finished is None]
        ended = [request.id for request in doomed if request.finished is not None and request.finished.reason == "abort"]
        said = answer.get("aborted", len(ended))
        if left:
            self._untrue(seq, call, "did not end everyone", f"{listed(request.id for request in doomed)} ended", f"{listed(left)} live")
        elif said != len(ended):
            self._untrue(seq, call, "counted others than it ended", f"aborted {len(ended)}: {listed(ended)}", f"aborted {said}")

    def _since(self, call: Call, kind: type[Event]) -> bool:
        return self._last.get(kind, NEVER) > call.taken_up

    def _untrue(self, seq: int, call: Call, what: str, expected: str, got: str) -> None:
        verb = "call" if call.operation is None else call.operation.verb
        cause = [(call.taken_up, f"{verb} taken up")]
        self.violated(seq, f"{verb} (call {call.op}) {what}", expected=expected, got=got, cause=cause)

    def at_end(self, seq: int, closed: Closed) -> None:
        if closed.cut_short:
            return
        for call in self.replay.calls.values():
            if call.mode is None:  # quiet-after-pause knows what a pause may wait for
                self._untrue(seq, call, "never returned", "an answer or an error", "no `returned`")


@invariant("idempotent-control", level=1)
class IdempotentControl(Invariant):
    """Repeating a control call does nothing or is refused: a resume while running, a pause(keep) while paused and a wake-up
    while awake change nothing, a second weight session is not opened, and pause and sleep calls that meet all return."""

    def __init__(self, replay: Replay) -> None:
        super().__init__(replay)
        self._repeated = NEVER
        """The call being carried out that pauses by keep and has nothing left to do; NEVER if there is none."""
        self._met: list[tuple[int, ...]] = []
        """Pause calls that took effect together."""
        self._started = NEVER

    def after_received(self, seq: int, event: Received) -> None:
        replay = self.replay
        call = replay.calls.get(event.op)
        keeps = call is not None and call.mode is not None and (call.mode == "keep" or call.joins) and not call.clear_cache
        self._repeated = event.op if keeps and replay.stopped_since != NEVER and not replay.pause_pending else NEVER

    def before_launched(self, seq: int, event: Launched) -> None:
        self._repeated = NEVER

    def before_returned(self, seq: int, event: Returned) -> None:
        if event.op == self._repeated:
            self._repeated = NEVER

    def before_finished(self, seq: int, event: Finished) -> None:
        self._check_repeated(seq, f"ended {event.request}")

    def before_preempted(self, seq: int, event: Preempted) -> None:
        self._check_repeated(seq, f"preempted {event.request}")

    def before_cleared(self, seq: int, event: Cleared) -> None:
        self._check_repeated(seq, "reset the cache")

    def _check_repeated(self, seq: int, what: str) -> None:
        if self._repeated == NEVER:
            return
        self.violated(
            seq,
            f"a pause by keep of a paused engine {what}",
            expected="nothing changed but the mode",
            got=what,
            cause=[(self.replay.stopped_since, "pause effective")],
            once=("repeated", self._repeated),
        )

    def before_resumed(self, seq: int, event: Resumed) -> None:
        if self.replay.pause_mode is None:
            self.violated(seq, "a running engine was resumed", expected="a resume while running does nothing", got="`resumed`")

    def before_awake(self, seq: int, event: Awake) -> None:
        if self.replay.sleep_level is None:
            self.violated(seq, "an engine that was awake woke up", expected="a wake-up while awake does nothing", got="`awake`")

    def before_update_started(self, seq: int, event: UpdateStarted) -> None:
        if self.replay.update_open:
            self.violated(
                seq,
                "a weight session was opened while one is open",
                expected="the second start refused",
                got="`update_started` twice",
                cause=[(self._started, "first session opened")],
            )
        self._started = seq

    def before_pause_effective(self, seq: int, event: PauseEffective) -> None:
        if len(self.replay.pauses) > 1:
            self._met.append(tuple(self.replay.pauses))

    def at_end(self, seq: int, closed: Closed) -> None:
        if closed.cut_short:
            return
        pauses = self.replay.pauses
        for calls in self._met:
            for op in calls:
                if op in pauses:
                    self.violated(
                        seq,
                        f"pause call {op} met others, took effect with them, and never returned",
                        expected=f"all of calls {listed(calls)} answered",
                        got=f"{listed(other for other in calls if other not in pauses)} answered",
                        cause=[(pauses[op].taken_up, f"pause call {op} taken up")],
                        once=op,
                    )


@invariant("flags-converge", level=1)
class FlagsConverge(Invariant):
    """`is_paused` and `is_sleeping` equal what is observed: true from the moment that a pause is taken up until the next
    resume, and from the moment that anything falls asleep until all is awake."""

    def __init__(self, replay: Replay) -> None:
        super().__init__(replay)
        self._asked: dict[int, bool] = {}
        """By call: what was so when it was taken up."""

    def after_received(self, seq: int, event: Received) -> None:
        call = self.replay.calls.get(event.op)
        if call is not None and isinstance(call.operation, IsPaused | IsSleeping):
            self._asked[event.op] = self._observed(call.operation)

    def _observed(self, operation: IsPaused | IsSleeping) -> bool:
        return self.replay.pause_mode is not None if isinstance(operation, IsPaused) else self.replay.sleep_level is not None

    def before_returned(self, seq: int, event: Returned) -> None:
        call = self.replay.calls.get(event.op)
        if call is None or not isinstance(call.operation, IsPaused | IsSleeping) or event.answer is None:
            return
        flag, now = call.operation.verb, self._observed(call.operation)
        said = event.answer.get(flag)
        # A live client's answer may be overtaken by a pause or a resume on its way.
        if said not in (self._asked.pop(event.op, now), now):
            replay = self.replay
            pending = f"last pause taken up{', pending' if replay.pause_pending else ''}"
            state = ("paused", "running") if flag == IsPaused.verb else ("asleep", "awake")
            self.violated(
                seq,
                f"{flag} answered {said} while the engine is {state[0] if now else state[1]}",
                expected=str(now),
                got=str(said),
                cause=[(replay.pending_since, pending) if flag == IsPaused.verb else (replay.asleep_since, "last asleep")],
            )
