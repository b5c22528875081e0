"""The life of a request: whatever happens around it, it ends, and once."""

from __future__ import annotations

from harness.events import Accepted, Admitted, Blocked, Closed, Finished, Launched, Received, Returned
from harness.invariants.invariant import Invariant, invariant, listed
from harness.operations import Submit
from harness.replay import NEVER, Replay


@invariant("one-ending", level=1)
class OneEnding(Invariant):
    """Each accepted request ends exactly once, once the engine is left running; none hangs, none vanishes."""

    def __init__(self, replay: Replay) -> None:
        super().__init__(replay)
        self._handed_in: set[str] = set()
        """Ids of submissions that were taken up and have come to nothing yet."""

    def before_received(self, seq: int, event: Received) -> None:
        call = self.replay.calls.get(event.op)
        if call is not None and isinstance(call.operation, Submit):
            self._handed_in.add(call.operation.id)

    def before_blocked(self, seq: int, event: Blocked) -> None:
        self._handed_in.discard(event.request)

    def before_accepted(self, seq: int, event: Accepted) -> None:
        request = self.replay.requests.get(event.request)
        if request is not None and request.accepted != NEVER and request.finished is None:
            self.violated(
                seq,
                f"{event.request} was accepted while a request of that id is live",
                expected="an error: ids of live requests may not be used again",
                got="two requests, of which the first can no longer end",
                cause=[(request.accepted, f"{event.request} accepted")],
            )
        elif event.request not in self._handed_in and event.request not in self.replay.blocked:
            self.violated(
                seq,
                f"{event.request} was accepted, and nobody had handed it in",
                expected="a submission that was taken up, or a blocked request",
                got="neither" if request is None or request.finished is None else f"one that ended by {request.finished.reason}",
                cause=[(request.ended, f"{event.request} finished")] if request is not None else [],
            )
        self._handed_in.discard(event.request)

    def before_finished(self, seq: int, event: Finished) -> None:
        request = self.replay.requests.get(event.request)
        if request is None:
            self.violated(
                seq, f"{event.request} finished, which was never accepted", expected="an accepted request", got=f"an end by {event.reason}"
            )
        elif request.finished is not None:
            self.violated(
                seq,
                f"{event.request} finished twice",
                expected=f"one end, by {request.finished.reason}",
                got=f"another, by {event.reason}",
                cause=[(request.ended, f"{event.request} finished")],
            )

    def before_admitted(self, seq: int, event: Admitted) -> None:
        self._check_live(seq, event.request, "admitted")

    def before_launched(self, seq: int, event: Launched) -> None:
        running = self.replay.running
        for id, _, _ in event.batch:
            if id not in running:
                self._check_live(seq, id, f"scheduled in step {event.step}")

    def _check_live(self, seq: int, id: str, what: str) -> None:
        request = self.replay.requests.get(id)
        if request is None:
            self.violated(
                seq, f"{id} was {what}, and never accepted", expected="live requests only", got=f"{id}, unknown", once=("unknown", id)
            )
        elif request.finished is not None:
            self.violated(
                seq,
                f"{id} was {what} after its end",
                expected="live requests only",
                got=f"{id}, which ended by {request.finished.reason}",
                cause=[(request.ended, f"{id} finished")],
                once=request,
            )

    def before_returned(self, seq: int, event: Returned) -> None:
        """A submission's answer says what became of the request."""
        call = self.replay.calls.get(event.op)
        if call is None or not isinstance(call.operation, Submit):
            return
        self._handed_in.discard(call.operation.id)
        request = self.replay.requests.get(call.operation.id)
        taken_on = request is not None and request.seen > call.taken_up
        if taken_on != (event.error is None):
            self.violated(
                seq,
                f"the answer to {call.operation.id}'s submission is not what became of it",
                expected="taken on, as the call succeeded" if event.error is None else f"not taken on: {event.error.code}",
                got="taken on" if taken_on else "neither accepted nor blocked: it vanished",
                cause=[(call.taken_up, f"submission of {call.operation.id} taken up")],
            )

    def at_end(self, seq: int, closed: Closed) -> None:
        if closed.cut_short:
            return
        replay = self.replay
        running = replay.stopped_since == NEVER and not replay.out_of_service
        live = [request for request in replay.live() if closed.why == "drained" or (running and not request.parked)]
        for request in live:
            self.violated(
                seq,
                f"{request.id} was accepted and never ended",
                expected=f"an end: the run closed as {closed.why}",
                got=f"{request.status}{', parked' if request.parked else ''}, with {len(request.output)} tokens",
                cause=[(request.accepted, f"{request.id} accepted")],
            )
        if running and replay.pause_mode is None and replay.blocked:
            self.violated(
                seq,
                "blocked requests were left in front of a running engine",
                expected="accepted when it resumed",
                got=f"{listed(replay.blocked)} blocked",
                cause=[(request.seen, f"{request.id} blocked") for request in replay.blocked.values()],
            )
