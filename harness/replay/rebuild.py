"""Adds a log up, event by event."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from types import MethodType
from typing import Any

from harness.events import (
    Accepted,
    Admitted,
    Allocated,
    Answered,
    Asked,
    Asleep,
    Awake,
    Blocked,
    Called,
    Cleared,
    Closed,
    Committed,
    Delivered,
    Differed,
    Dropped,
    Entry,
    Event,
    Finished,
    Freed,
    Heard,
    Hit,
    Landed,
    Launched,
    Loaded,
    Mode,
    Offloaded,
    Opened,
    PartReceived,
    PauseEffective,
    PausePending,
    Preempted,
    Received,
    Reference,
    Relabelled,
    Resumed,
    Returned,
    StepFailed,
    Stored,
    Tag,
    UpdateFailed,
    UpdateStarted,
)
from harness.operations import Operation, Sleep, StartWeightUpdate, Submit, SwapWeights, from_data
from harness.replay.blocks import Blocks
from harness.replay.facts import BLOCKS_SEEN, DROPPED, NEVER, Call, Flight, Request, Weights
from harness.state import EngineState, RequestState


class Replay:
    """Engine state as a function of the log so far; `apply` moves one event on.

    Public attributes are the derived facts; treat them as read-only.

    Args:
        decode: how a call's operation is read; it raises ValueError for one that it does not know.
    """

    def __init__(self, decode: Callable[[dict[str, Any]], Operation] = from_data) -> None:
        self._decode = decode
        self.seq = NEVER
        """Number of the last event applied."""
        self.opened: Opened | None = None
        self.writers = 0
        """Files that the log was merged from. With one, everything is in its true order; with more, a client hears of things late."""
        self.closed: Closed | None = None
        self.calls: dict[int, Call] = {}
        """Calls that have not returned, by operation id."""
        self.pauses: dict[int, Call] = {}
        """Pause and sleep calls taken up and not returned, in that order."""
        self.requests: dict[str, Request] = {}
        """By id, the last of that id; finished ones included."""
        self.running: OrderedDict[str, Request] = OrderedDict()
        self.waiting: OrderedDict[str, Request] = OrderedDict()
        self.blocked: OrderedDict[str, Request] = OrderedDict()
        self.ending: dict[Request, None] = {}
        """Finished requests whose finish reason was not delivered yet; their ids may be in use again."""
        self.blocks = Blocks(0, 1)
        self.flights: dict[int, Flight] = {}
        """Steps launched and not landed."""
        self.last_launched = NEVER
        self.last_landed: Flight | None = None
        self.pause_mode: Mode | None = None
        self.pause_pending = False
        self.pending_since = NEVER
        """Number of the last `pause_pending`."""
        self.last_effective = NEVER
        """Number of the last `pause_effective`."""
        self.stopped_since = NEVER
        """Number of the `pause_effective` under which nothing may run; NEVER if something may."""
        self.weights = Weights("default", 0)
        """What a forward launched now runs on."""
        self.epoch_starts = [NEVER]
        """For each epoch, the number of the event at which its first byte was written."""
        self.update_open = False
        self.update_wrote = False
        """The last session has written at least one byte."""
        self.update_unpaused = False
        """The last session was opened with allow_unpaused."""
        self.out_of_service = False
        self.out_of_service_since = (NEVER, "")
        """Number of the event that took the engine out of service, and what it was."""
        self.pause_asked = False
        """Some pause call asked for the pause that is in force or pending, not sleep calls alone."""
        self.sleep_level: int | None = None
        """None while awake."""
        self.asleep: tuple[Tag, ...] = ()
        """Whose memory is given back."""
        self.asleep_since = NEVER
        """Number of the last `asleep`."""
        self.awake_since = NEVER
        """Number of the last `awake`."""
        self._update_op = NEVER
        self._received: Call | None = None
        self._submitting: dict[str, Submit] = {}

    @property
    def reducers(self) -> dict[type[Event], Callable[[int, Any], None]]:
        """How each kind of event changes the state: called with its number and the event. They are not kept here, for a replay
        without cycles is gone as soon as nobody needs it."""
        return {kind: MethodType(reduce, self) for kind, reduce in _REDUCERS.items()}

    def apply(self, entry: Entry) -> None:
        """Move on by one event. Every event is accepted, in any order."""
        self.seq = entry.seq
        if (reduce := _REDUCERS.get(type(entry.event))) is not None:
            reduce(self, entry.seq, entry.event)

    @property
    def level(self) -> int | None:
        """What the log shows (0 client, 1 schedule, 2 blocks, 3 numbers); None before it was opened."""
        return self.opened.level if self.opened else None

    @property
    def epoch(self) -> int:
        return self.weights.epoch

    @property
    def uncommitted(self) -> bool:
        """Nothing may be sampled from the weights as they are: an update failed, or is half-way and was not allowed beside steps."""
        return self.out_of_service or (self.update_open and self.update_wrote and not self.update_unpaused)

    @property
    def steady(self) -> bool:
        """Nothing is going on but decoding: no call, step in flight, pause or weight session is open, each request of the last
        batch sampled a token in it, and has been handed all that it has."""
        if self.calls or self.flights or self.pause_mode or self.update_open or self.out_of_service or self.last_landed is None:
            return False
        requests = self.last_batch
        return len(requests) == len(self.last_landed.batch) and all(len(one.output) == len(one.delivered) for one in requests)

    @property
    def last_batch(self) -> list[Request]:
        """Those for which the last step sampled a token."""
        return self.last_landed.requests if self.last_landed else []

    def live(self) -> Iterator[Request]:
        """Requests accepted and not finished, running ones first."""
        return chain(self.running.values(), self.waiting.values())

    def epoch_at(self, seq: int) -> int:
        """The epoch at event `seq`: of a KV entry, given the number of the `launched` that wrote it."""
        return bisect_right(self.epoch_starts, seq) - 1

    def kv_epochs(self, block: int) -> tuple[int | None, ...]:
        """For each slot of a block, the epoch that wrote it since the block was allocated; None where nothing did."""
        return tuple(None if seq == NEVER else self.epoch_at(seq) for seq in self.blocks.written.get(block, ()))

    def holders(self, block: int) -> list[str]:
        """Ids of the requests in whose block table a block stands."""
        return [request.id for request in self.requests.values() if block in request.blocks]

    def state(self) -> EngineState:
        """The visible state, as the engine itself would give it. Of a log without blocks, the fields about them are empty."""
        blocks = self.blocks
        return EngineState(
            running=tuple(_visible(request) for request in self.running.values()),
            waiting=tuple(_visible(request) for request in self.waiting.values()),
            blocked=tuple(self.blocked),
            references=tuple(blocks.references.get(block, 0) for block in range(blocks.count)),
            digests=tuple(sorted((tuple(group) for group in blocks.groups.values()), key=min)),
            free=tuple(blocks.free),
            pause_mode=self.pause_mode,
            pause_pending=self.pause_pending,
            weight_version=self.weights.version,
            update_open=self.update_open,
            out_of_service=self.out_of_service,
            asleep=self.asleep,
            sleep_level=self.sleep_level,
            host=tuple(blocks.host),
        )

    # The log and its calls.

    def _opened(self, seq: int, event: Opened) -> None:
        """Each writer opens its file; the one that shows most tells what the merged log shows."""
        self.writers += 1
        if self.opened is not None and event.level <= self.opened.level:
            return
        self.opened = event
        count, size, host_count = (event.engine.get(name, 0) for name in ("num_blocks", "block_size", "host_blocks"))
        if event.level >= BLOCKS_SEEN and isinstance(count, int) and isinstance(size, int) and size > 0:
            self.blocks = Blocks(count, size, host_count if isinstance(host_count, int) else 0)

    def _closed(self, seq: int, event: Closed) -> None:
        self.closed = event

    def _called(self, seq: int, event: Called) -> None:
        try:
            operation = self._decode(event.operation)
        except ValueError:
            operation = None
        self.calls[event.op] = Call(event.op, operation, event.by, seq)

    def _took_up(self, seq: int, event: Received) -> None:
        call = self._received = self.calls.get(event.op)
        if call is None:
            return
        call.take_up(seq, self.pause_mode)
        if call.mode is not None:
            self.pauses[call.op] = call
        elif isinstance(call.operation, Submit):
            self._submitting[call.operation.id] = call.operation

    def _returned(self, seq: int, event: Returned) -> None:
        self.pauses.pop(event.op, None)
        call = self.calls.pop(event.op, None)
        if call is None:
            return
        if isinstance(call.operation, Submit):
            self._submitting.pop(call.operation.id, None)
        elif event.error is not None and isinstance(call.operation, SwapWeights) and self._update_op == event.op:
            self.update_open = False

    # Requests.

    def _accepted(self, seq: int, event: Accepted) -> None:
        request = self.blocked.pop(event.request, None) or self._new(event.request, seq)
        request.accepted = seq
        request.status = "waiting"
        request.parked = event.parked
        self.running.pop(request.id, None)
        self.waiting[request.id] = request
        self.waiting.move_to_end(request.id)

    def _blocked(self, seq: int, event: Blocked) -> None:
        request = self._new(event.request, seq)
        request.status = "blocked"
        self.blocked[request.id] = request

    def _new(self, id: str, seq: int) -> Request:
        request = self.requests[id] = Request(id, self._submitting.get(id), seq)
        return request

    def _known(self, id: str, seq: int) -> Request:
        """The request that the scheduler speaks of; one that was never accepted counts as waiting from now on."""
        if (request := self.requests.get(id)) is None:
            request = self.waiting[id] = self._new(id, seq)
        return request

    def _admitted(self, seq: int, event: Admitted) -> None:
        request = self._known(event.request, seq)
        self.waiting.pop(request.id, None)
        self.running[request.id] = request
        request.status = "running"
        request.lives = event.life
        request.computed = event.computed

    def _preempted(self, seq: int, event: Preempted) -> None:
        request = self._known(event.request, seq)
        self.running.pop(request.id, None)
        self.waiting[request.id] = request
        self.waiting.move_to_end(request.id, last=False)
        request.status = "preempted"
        request.computed = request.placeholders = 0
        request.preemptions += 1
        request.at_preemption = seq
        if event.by is None:
            request.at_reset = seq

    def _finished(self, seq: int, event: Finished) -> None:
        request = self.requests.get(event.request)
        if request is None:
            return
        for queue in (self.running, self.waiting, self.blocked):
            queue.pop(request.id, None)
        request.status = "finished"
        if request.finished is None:
            request.finished, request.ended = event, seq
            self.ending[request] = None

    def _delivered(self, seq: int, event: Delivered) -> None:
        requests = self.requests
        for id, _, tokens, reason in event.outputs:
            if (request := requests.get(id)) is not None:
                request.delivered += tokens
                if reason is not None:
                    request.end_delivered = seq
                    self.ending.pop(request, None)

    # Steps.

    def _launched(self, seq: int, event: Launched) -> None:
        requests, blocks, samplers, sampling = self.requests, self.blocks, [], []
        for id, first, count in event.batch:
            if (request := requests.get(id)) is None:
                continue
            end = request.computed = first + count
            if end >= request.num_tokens + request.placeholders:
                request.placeholders += 1
                samplers.append(id)
                sampling.append(request)
            if request.blocks:
                blocks.write(request, first, count, seq)
        self.flights[event.step] = Flight(seq, event.step, event.batch, samplers, sampling, self.weights, not self.uncommitted)
        self.last_launched = seq

    def _landed(self, seq: int, event: Landed) -> None:
        """A token belongs to the weights that its step was launched on, and to the request that it was launched for."""
        flight = self.last_landed = self.flights.pop(event.step, None)
        weights = flight.weights if flight else self.weights
        rows: dict[str, Request] = {}
        if flight is not None:
            rows = dict(zip(flight.samplers, flight.requests, strict=True))
            for request in flight.requests:
                if request.placeholders and request.at_preemption < flight.launched:
                    request.placeholders -= 1
        for id, token in event.sampled:
            request = rows.get(id) or self.requests.get(id)
            if request is None or request.finished is not None:
                continue
            if request.weights is not weights:
                request.weights = weights
                request.sampled_by.append((len(request.output), weights))
            request.output.append(token)
            request.num_tokens += 1

    def _dropped(self, seq: int, event: Dropped) -> None:
        """Its landing has counted it off already, and no output holds it."""

    def _step_failed(self, seq: int, event: StepFailed) -> None:
        self.flights.pop(event.step, None)

    # Blocks.

    def _hit(self, seq: int, event: Hit) -> None:
        self.blocks.claim(self._known(event.request, seq), event.blocks)

    def _allocated(self, seq: int, event: Allocated) -> None:
        self.blocks.take(self._known(event.request, seq), event.blocks, event.evicted)

    def _stored(self, seq: int, event: Stored) -> None:
        self.blocks.publish(event.blocks)

    def _freed(self, seq: int, event: Freed) -> None:
        request = self.requests.get(event.request) or Request(event.request, None, seq)
        self.blocks.release(request, event.head, event.tail)

    def _offloaded(self, seq: int, event: Offloaded) -> None:
        self.blocks.offload(event.blocks)

    def _loaded(self, seq: int, event: Loaded) -> None:
        self.blocks.load(self._known(event.request, seq), event.blocks)

    def _cleared(self, seq: int, event: Cleared) -> None:
        if event.success and event.tier == "device":
            self.blocks.forget_labels()
        elif event.success:
            self.blocks.forget_copies()

    # Pausing.

    def _pause_pending(self, seq: int, event: PausePending) -> None:
        self.pause_mode, self.pause_pending = event.mode, True
        self.pending_since = seq
        call = self._received
        self.pause_asked = self.pause_asked or call is None or not isinstance(call.operation, Sleep)
        if event.mode == "wait" and not (call is not None and call.joins):
            if self.running or self.waiting:
                self.stopped_since = NEVER
            self._unpark()

    def _pause_effective(self, seq: int, event: PauseEffective) -> None:
        self.pause_mode, self.pause_pending = event.mode, False
        self.last_effective = self.stopped_since = seq

    def _resumed(self, seq: int, event: Resumed) -> None:
        self.pause_mode, self.pause_pending, self.pause_asked = None, False, False
        self.stopped_since = NEVER
        self._unpark()

    def _unpark(self) -> None:
        for request in self.waiting.values():
            request.parked = False

    # Sleeping.

    def _fell_asleep(self, seq: int, event: Asleep) -> None:
        self.sleep_level, self.asleep, self.asleep_since = event.level, event.tags, seq

    def _woke(self, seq: int, event: Awake) -> None:
        if "weights" in self.asleep and "weights" not in event.tags and self.sleep_level == DROPPED:
            self.out_of_service, self.out_of_service_since = True, (seq, "woke without weights: sleep at level 2 dropped them")
        self.asleep, self.awake_since = event.tags, seq
        if not event.tags:
            self.sleep_level = None

    # Weights.

    def _update_started(self, seq: int, event: UpdateStarted) -> None:
        self.update_open, self.update_wrote = True, False
        operation = self._received.operation if self._received else None
        self.update_unpaused = isinstance(operation, StartWeightUpdate) and operation.allow_unpaused
        self._update_op = self._received.op if self._received else NEVER

    def _part_received(self, seq: int, event: PartReceived) -> None:
        self._first_byte(seq)

    def _update_failed(self, seq: int, event: UpdateFailed) -> None:
        if not event.wrote:
            return
        self._first_byte(seq)
        self.update_open = self.update_wrote = False
        self.out_of_service, self.out_of_service_since = True, (seq, "update failed")

    def _first_byte(self, seq: int) -> None:
        if not self.update_wrote:
            self.update_wrote = True
            self.weights = Weights(self.weights.version, self.weights.epoch + 1)
            self.epoch_starts.append(seq)

    def _committed(self, seq: int, event: Committed) -> None:
        self.update_open = self.update_wrote = self.out_of_service = False
        self.weights = Weights(event.version, self.weights.epoch)
        if self.pause_mode is None:
            self._unpark()

    def _relabelled(self, seq: int, event: Relabelled) -> None:
        self.weights = Weights(event.version, self.weights.epoch)

    # Checks.

    def _check(self, seq: int, event: Reference | Differed) -> None:
        """Says what should have been, and changes nothing."""

    # Clients of a live engine.

    def _outside(self, seq: int, event: Asked | Heard | Answered) -> None:
        """What clients saw is no part of the engine's state."""


_REDUCERS: dict[type[Event], Callable[[Replay, int, Any], None]] = {
    Opened: Replay._opened,
    Closed: Replay._closed,
    Called: Replay._called,
    Received: Replay._took_up,
    Returned: Replay._returned,
    Accepted: Replay._accepted,
    Blocked: Replay._blocked,
    Admitted: Replay._admitted,
    Preempted: Replay._preempted,
    Finished: Replay._finished,
    Delivered: Replay._delivered,
    Launched: Replay._launched,
    Landed: Replay._landed,
    Dropped: Replay._dropped,
    StepFailed: Replay._step_failed,
    Hit: Replay._hit,
    Allocated: Replay._allocated,
    Stored: Replay._stored,
    Freed: Replay._freed,
    Offloaded: Replay._offloaded,
    Loaded: Replay._loaded,
    Cleared: Replay._cleared,
    PausePending: Replay._pause_pending,
    PauseEffective: Replay._pause_effective,
    Resumed: Replay._resumed,
    Asleep: Replay._fell_asleep,
    Awake: Replay._woke,
    UpdateStarted: Replay._update_started,
    PartReceived: Replay._part_received,
    UpdateFailed: Replay._update_failed,
    Committed: Replay._committed,
    Relabelled: Replay._relabelled,
    Reference: Replay._check,
    Differed: Replay._check,
    Asked: Replay._outside,
    Heard: Replay._outside,
    Answered: Replay._outside,
}


def _visible(request: Request) -> RequestState:
    return RequestState(
        id=request.id,
        status="running" if request.status == "running" else "preempted" if request.status == "preempted" else "waiting",
        num_prompt_tokens=len(request.prompt or ()),
        output=tuple(request.output),
        num_computed_tokens=request.computed,
        num_preemptions=request.preemptions,
        num_output_placeholders=request.placeholders,
        blocks=tuple(request.blocks),
        parked=request.parked,
    )


def replay(entries: Iterable[Entry], until: int | None = None) -> Replay:
    """The state right after event number `until` (after the last one if None)."""
    state = Replay()
    for entry in entries:
        if until is not None and entry.seq > until:
            break
        state.apply(entry)
    return state
