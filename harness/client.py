"""What the clients of a live engine know: their calls, what they heard, and whether the engine must be paused.

`ClientView` adds up `events.client.jsonl` as `Replay` adds up a rank's log: it decides nothing and accepts
everything. Beside the log of a rank it also takes note of what the engine handed out, so that both can be compared.
It calls certain only what is certain from outside. A client does not see in which order an engine takes calls up:
while a call that may start scheduling is on its way, nobody knows whether the engine is paused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from harness.events import (
    Answered,
    Asked,
    Called,
    Closed,
    Delivered,
    Event,
    Finished,
    FinishReason,
    Heard,
    Opened,
    Output,
    Returned,
)
from harness.operations import FinishWeightUpdate, Operation, Pause, Resume, Sleep, Submit, SwapWeights, WakeUp, from_data
from harness.replay import NEVER


class ClientCall:
    """A call that has not come back."""

    __slots__ = ("asked", "data", "number", "operation", "owed", "returned", "taken_up", "was_paused")

    def __init__(self, number: int, data: dict[str, Any], operation: Operation | None, asked: int, was_paused: int) -> None:
        self.number = number
        self.data = data
        self.operation = operation
        """None if this version knows no such operation."""
        self.asked = asked
        """Number of the `asked` event."""
        self.was_paused = was_paused
        """`ClientView.paused_since` when it was made."""
        self.taken_up = False
        """A rank's log has a like call that no other call of the client's stands for."""
        self.returned: Returned | None = None
        """What the core returned to that one."""
        self.owed: Counter[str] = Counter()
        """By id, tokens and ends that the engine had handed out before it returned that one, and that were not heard yet."""

    @property
    def verb(self) -> str:
        return next(iter(self.data), "call")

    @property
    def releases(self) -> bool:
        """It may start scheduling."""
        operation = self.operation
        return isinstance(operation, Resume | WakeUp | None) or (isinstance(operation, Pause | Sleep) and operation.mode == "wait")

    @property
    def pauses(self) -> bool:
        return isinstance(self.operation, Pause | Sleep | None)


class ClientRequest:
    """A submission, and what was heard of it."""

    __slots__ = ("asked", "call", "end_heard", "finish_reason", "heard_at", "not_before", "nth", "submit", "tokens")

    def __init__(self, submit: Submit, call: int, asked: int) -> None:
        self.submit = submit
        self.call = call
        self.asked = asked
        self.nth = NEVER
        """How many requests of its id were heard of before it; NEVER before anything was heard of it."""
        self.tokens: list[int] = []
        self.heard_at: list[tuple[int, int]] = []
        """For each token the numbers of two events: it was sampled after the first, and heard at the second."""
        self.not_before = asked
        """Number of the event after which its next token is sampled: it was asked for, or a certain pause was lifted."""
        self.finish_reason: FinishReason | None = None
        self.end_heard = NEVER


class Given:
    """What an engine handed out for one request, as its own log tells."""

    __slots__ = ("ended", "finished", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False
        """Its end was handed out."""
        self.finished: Finished | None = None


class ClientView:
    """The clients' side of a run after every event so far."""

    def __init__(self) -> None:
        self.seq = NEVER
        self.opened: Opened | None = None
        self.closed: Closed | None = None
        self.calls: dict[int, ClientCall] = {}
        """Calls that have not come back, by number."""
        self.live: dict[int, ClientRequest] = {}
        """Submissions that have not come back, by call."""
        self.requests: list[ClientRequest] = []
        """All submissions, in the order in which they were made."""
        self.paused_since = NEVER
        """Number of the event from which on the engine is certainly paused: the answer to a pause. NEVER if that is not certain."""
        self.running_since = NEVER
        """The same of running: the answer to a resume."""
        self.out_of_service = False
        """An update failed or a call was refused for that, and nothing shows yet that it was repaired."""
        self.ranks = 0
        """Logs of ranks beside the client's."""
        self.unclosed = 0
        """Logs, this one included, whose end has not been seen."""
        self.given: dict[str, list[Given]] = {}
        """By id, what the engine handed out for its requests, first to last; empty without the log of a rank."""
        self.owed: Counter[str] = Counter()
        """By id, tokens and ends that were handed out and not heard yet."""
        self._released = NEVER
        """Number of the last event that asked for what may start scheduling."""
        self._paused = NEVER
        """Number of the last event that asked for a pause."""
        self._heard_of: Counter[str] = Counter()
        self._finished: dict[str, Finished] = {}
        self._ops: dict[int, ClientCall] = {}
        """The client's calls by the core's numbers for them."""
        self.reducers: dict[type[Event], Callable[[int, Any], None]] = {
            Opened: self._note_opened,
            Closed: self._note_closed,
            Asked: self._note_asked,
            Heard: self._note_heard,
            Answered: self._note_answered,
            Called: self._note_called,
            Returned: self._note_returned,
            Finished: self._note_finished,
            Delivered: self._note_delivered,
        }
        """How a kind of event changes the view: called with its number and the event."""

    def apply(self, seq: int, event: Event) -> None:
        """Move on by one event."""
        self.seq = seq
        if (reduce := self.reducers.get(type(event))) is not None:
            reduce(seq, event)

    def request(self, id: str) -> ClientRequest | None:
        """The request that outputs of that id belong to: of several submissions on their way, the first that has not ended.

        One whose end was heard may come back a little later than its id is used again.
        """
        named = [request for request in self.live.values() if request.submit.id == id]
        return next((request for request in named if request.finish_reason is None), named[0] if named else None)

    def given_to(self, request: ClientRequest) -> Given | None:
        """What the engine handed out for it; None if no log tells of any."""
        streams = self.given.get(request.submit.id, ())
        return streams[request.nth] if 0 <= request.nth < len(streams) else None

    def _note_opened(self, seq: int, event: Opened) -> None:
        self.unclosed += 1
        if event.level > 0:
            self.ranks += 1
        else:
            self.opened = event

    def _note_closed(self, seq: int, event: Closed) -> None:
        """Each writer closes its file, the clients' last."""
        self.unclosed -= 1
        self.closed = event

    # The client's own calls.

    def _note_asked(self, seq: int, event: Asked) -> None:
        try:
            operation = from_data(event.operation)
        except ValueError:
            operation = None
        call = self.calls[event.call] = ClientCall(event.call, event.operation, operation, seq, self.paused_since)
        if isinstance(operation, Submit):
            request = self.live[event.call] = ClientRequest(operation, event.call, seq)
            self.requests.append(request)
        if call.releases:
            if self.paused_since != NEVER:
                for request in self.live.values():
                    request.not_before = seq
            self._released, self.paused_since = seq, NEVER
        if call.pauses:
            self._paused, self.running_since = seq, NEVER

    def _note_heard(self, seq: int, event: Heard) -> None:
        for id, _, tokens, reason in event.outputs:
            if (request := self.request(id)) is None:
                continue
            if request.nth == NEVER:
                request.nth = self._heard_of[id]
                self._heard_of[id] += 1
            request.tokens += tokens
            request.heard_at += [(request.not_before, seq)] * len(tokens)
            if reason is not None and request.finish_reason is None:
                request.finish_reason, request.end_heard = reason, seq
            self._settle(id, len(tokens) if reason is None else self.owed[id])

    def _settle(self, id: str, count: int) -> None:
        for owed in (self.owed, *(call.owed for call in self.calls.values())):
            if id in owed:
                owed[id] -= count
                if owed[id] <= 0:
                    del owed[id]

    def _note_answered(self, seq: int, event: Answered) -> None:
        call = self.calls.pop(event.call, None)
        self.live.pop(event.call, None)
        if call is None:
            return
        if event.error is None:
            self._note_success(seq, call)
            return
        if event.error.code in ("failed", "out-of-service"):
            self.out_of_service = True
        others = any(other.releases for other in self.calls.values())
        if call.releases and event.error.code != "superseded" and not others and self._released == call.asked:
            self.paused_since = call.was_paused  # A refused call changes nothing.

    def _note_success(self, seq: int, call: ClientCall) -> None:
        operation, others = call.operation, self.calls.values()
        if isinstance(operation, Pause | Sleep):
            if self._released <= call.asked and not any(other.releases for other in others) and self.paused_since == NEVER:
                self.paused_since = seq
        elif isinstance(operation, Resume):
            self.out_of_service = False
            if self._paused < call.asked and not any(other.pauses for other in others):
                self.running_since = seq
        elif isinstance(operation, FinishWeightUpdate | SwapWeights):
            self.out_of_service = False

    # What a rank's log adds. The numbers of calls of several ranks mean different calls, so they are matched with one alone.

    def _note_called(self, seq: int, event: Called) -> None:
        if self.ranks != 1:
            return
        like = (call for call in self.calls.values() if not call.taken_up and call.data == event.operation)
        if (call := next(like, None)) is not None:
            call.taken_up = True
            self._ops[event.op] = call

    def _note_returned(self, seq: int, event: Returned) -> None:
        if (call := self._ops.pop(event.op, None)) is not None:
            call.returned, call.owed = event, Counter(self.owed)

    def _note_finished(self, seq: int, event: Finished) -> None:
        self._finished[event.request] = event

    def _note_delivered(self, seq: int, event: Delivered) -> None:
        for output in event.outputs:
            given = self._given(output)
            given.tokens += output.tokens
            if output.finish_reason is not None:
                given.ended, given.finished = True, self._finished.pop(output.request, None)
            if not self._over(output.request):
                self.owed[output.request] += len(output.tokens) + (output.finish_reason is not None)

    def _over(self, id: str) -> bool:
        """The client has heard its end: of a request that it aborted, the front end may have said so before the core knew."""
        request = self.request(id)
        return request is None or request.end_heard != NEVER

    def _given(self, output: Output) -> Given:
        streams = self.given.setdefault(output.request, [])
        if not streams or streams[-1].ended:
            streams.append(Given())
        return streams[-1]
