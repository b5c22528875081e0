"""Rebuilds an engine's state from its event log: time travel, and the facts that invariants judge.

This is a third, independent reading of docs/semantics.md beside the engine and the model: it only
adds up what the log says happened, and decides nothing. So it is total: a log that no right engine
could have written still replays, each event having its most plausible effect, and complaining is
left to the invariants. Events are numbered by `seq`, which also serves as the clock: a KV entry is
stamped with the number of the `launched` that wrote it, from which its epoch follows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, Literal, NamedTuple

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
    DropReason,
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
    Scheduled,
    StepFailed,
    Stored,
    Tag,
    UpdateFailed,
    UpdateStarted,
    VersionSpan,
)
from harness.operations import Operation, Pause, Sleep, StartWeightUpdate, Submit, SwapWeights, from_data
from harness.state import EngineState, RequestState

NEVER = -1
"""In place of an event number: it has not happened."""

BLOCKS_SEEN = 2
"""The lowest level of a log that tells about blocks."""

DROPPED = 2
"""The level of sleep at which weights are dropped, and have to come anew."""


class Weights(NamedTuple):
    """Which weights a forward ran on: the label that was resident, and the number of updates that had written a byte."""

    version: str
    epoch: int


class Call:
    """A client's call that has not returned yet."""

    __slots__ = ("by", "called", "clear_cache", "joins", "mode", "op", "operation", "received")

    def __init__(self, op: int, operation: Operation | None, by: str, called: int) -> None:
        self.op = op
        self.operation = operation
        """None if this version knows no such operation."""
        self.by = by
        self.called = called
        self.received = NEVER
        self.mode: Mode | None = None
        """Of a call that pauses, once it is taken up: the mode that it asks for. A sleep without one takes that in force, or `abort`."""
        self.clear_cache = False
        """It asks for a pause that clears."""
        self.joins = False
        """A sleep without a mode over a pause: it does nothing to requests."""

    def take_up(self, seq: int, pause_mode: Mode | None) -> None:
        """The core takes it up under a pause of that mode, or under none."""
        self.received = seq
        match self.operation:
            case Pause(mode=mode, clear_cache=clear_cache):
                self.mode, self.clear_cache = mode, clear_cache
            case Sleep(mode=asked, level=level):
                self.mode, self.clear_cache = asked or pause_mode or "abort", level >= 1
                self.joins = asked is None and pause_mode is not None
            case _:
                pass

    @property
    def taken_up(self) -> int:
        """Number of the event at which the core took the call up; of the call itself if the log does not tell."""
        return self.called if self.received == NEVER else self.received


class Flight(NamedTuple):
    """A step: launched, perhaps landed."""

    launched: int
    """Number of its `launched` event."""
    step: int
    batch: tuple[Scheduled, ...]
    samplers: list[str]
    """Requests whose rows reach their last token, known or in flight, in scheduling order: these sample one token each."""
    requests: list[Request]
    """The same requests; an id may be another's when the step lands."""
    weights: Weights
    committed: bool
    """False if its weights may not be sampled from: half-written, or left by a failed update."""

    def fate(self, request: Request) -> DropReason | Literal["preempted"] | None:
        """What has become of one of `requests` since the launch; None if it goes on as it was."""
        if request.finished is not None:
            return "aborted" if request.finished.reason == "abort" else "finished"
        if request.at_reset > self.launched:
            return "reset"
        return "preempted" if request.at_preemption > self.launched else None


class Request:
    """What the log tells about one request, from the moment that the core saw it. Live until `finished` is set."""

    __slots__ = (
        "accepted",
        "at_preemption",
        "at_reset",
        "blocks",
        "cache_salt",
        "computed",
        "delivered",
        "end_delivered",
        "ended",
        "finished",
        "hits",
        "id",
        "lives",
        "num_tokens",
        "oldest_write",
        "output",
        "parked",
        "placeholders",
        "preemptions",
        "prompt",
        "sampled_by",
        "seen",
        "status",
        "unwritten",
        "weights",
    )

    def __init__(self, id: str, submission: Submit | None, seq: int) -> None:
        self.id = id
        self.prompt = submission.prompt.token_ids if submission else None
        """Token ids; None if the log does not tell."""
        self.cache_salt = submission.cache_salt if submission else None
        self.seen = seq
        """Number of the event at which the core took it on or blocked it."""
        self.accepted = NEVER
        self.status: Literal["blocked", "waiting", "running", "preempted", "finished"] = "waiting"
        self.parked = False
        self.lives = 0
        self.preemptions = 0
        self.at_preemption = NEVER
        """Number of its last `preempted` event."""
        self.at_reset = NEVER
        """Number of its last `preempted` event that a cache reset caused."""
        self.computed = 0
        """Tokens whose KV is computed or being computed by a launched step."""
        self.num_tokens = len(self.prompt or ())
        """Prompt and output."""
        self.placeholders = 0
        """Tokens that steps in flight owe to this life of it."""
        self.output: list[int] = []
        """Every token sampled for it."""
        self.sampled_by: list[tuple[int, Weights]] = []
        """(i, weights): from output token i on, until the next pair, these weights sampled."""
        self.weights: Weights | None = None
        """The last of `sampled_by`."""
        self.delivered: list[int] = []
        self.blocks: list[int] = []
        """Block table: entry i holds the KV of positions from i * block size on."""
        self.hits: tuple[int, ...] = ()
        """Blocks claimed or loaded at admission that no step of this life has attended to yet."""
        self.oldest_write = NEVER
        """Number of the `launched` that wrote the oldest KV entry its steps attend to in this life."""
        self.unwritten = NEVER
        """First position that a step of this life attended to although no step had written it."""
        self.finished: Finished | None = None
        self.ended = NEVER
        """Number of the `finished` event."""
        self.end_delivered = NEVER
        """Number of the `delivered` that handed out the finish reason."""

    def __repr__(self) -> str:
        return f"<Request {self.id} {self.status}, {len(self.output)} sampled, {len(self.delivered)} delivered>"

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Tokens at positions [start, end), prompt first; fewer if not all are known."""
        prompt = self.prompt or ()
        return (*prompt[start:end], *self.output[max(start - len(prompt), 0) : max(end - len(prompt), 0)])

    def spans(self) -> tuple[VersionSpan, ...]:
        """The version that was resident when each output token was sampled, neighbours of equal label joined."""
        spans: list[VersionSpan] = []
        end = len(self.output)
        for start, weights in reversed(self.sampled_by):
            if spans and spans[-1].version == weights.version:
                end = spans.pop().end
            spans.append(VersionSpan(weights.version, start, end))
            end = start
        return tuple(reversed(spans))

    def sampling_weights(self, index: int) -> Weights:
        """The weights that sampled output token `index`."""
        if not 0 <= index < len(self.output):
            raise IndexError(f"{self.id} has {len(self.output)} output tokens, got index {index}")
        return self.sampled_by[bisect_right(self.sampled_by, index, key=lambda pair: pair[0]) - 1][1]


class Copy(NamedTuple):
    """A block's KV in the host tier."""

    label: int
    written: list[int]
    """As `Blocks.written` had it."""


class Blocks:
    """The KV pool: who holds which block, which can be hit, in what order they will be taken, what is written in them; and
    the copies of evicted blocks in the host tier, if there is one."""

    __slots__ = ("count", "evicted", "free", "groups", "host", "host_count", "labels", "owners", "references", "size", "written")

    def __init__(self, count: int, size: int, host_count: int = 0) -> None:
        self.count = count
        self.host_count = host_count
        self.host: OrderedDict[int, Copy] = OrderedDict()
        """By slot, the least recently used first."""
        self.evicted: dict[int, Copy] = {}
        """With a host tier: what the blocks that were allocated last held before."""
        self.size = size
        """Tokens in a block."""
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(count))
        """The free queue, head first."""
        self.references: dict[int, int] = dict.fromkeys(range(count), 0)
        self.owners: dict[int, Request] = {}
        """To whom a block was last allocated: the only one to write into it."""
        self.labels: dict[int, int] = {}
        self.groups: dict[int, dict[int, None]] = {}
        """Blocks of each label, in order of registration."""
        self.written: dict[int, list[int]] = {}
        """For each slot of a block, the number of the `launched` that wrote it since the block was allocated, or NEVER."""

    def take(self, request: Request, blocks: tuple[int, ...], evicted: tuple[int, ...]) -> None:
        if self.host_count:
            labels, written = self.labels, self.written
            self.evicted = {block: Copy(labels[block], written.get(block, [])) for block in evicted if block in labels}
        for block in evicted:
            self._unlabel(block)
        for block in blocks:
            self.free.pop(block, None)
            self.references[block] = self.references.get(block, 0) + 1
            self.owners[block] = request
            self.written[block] = [NEVER] * self.size
        request.blocks += blocks

    def claim(self, request: Request, blocks: tuple[int, ...]) -> None:
        for block in blocks:
            self.free.pop(block, None)
            self.references[block] = self.references.get(block, 0) + 1
        request.blocks += blocks
        request.hits += blocks

    def offload(self, pairs: tuple[tuple[int, int], ...]) -> None:
        for block, slot in pairs:
            self.host.pop(slot, None)
            if block in self.evicted:
                self.host[slot] = self.evicted[block]

    def load(self, request: Request, pairs: tuple[tuple[int, int], ...]) -> None:
        for slot, block in pairs:
            if (copy := self.host.get(slot)) is not None:
                self.host.move_to_end(slot)
                self.written[block] = list(copy.written)
            request.hits += (block,)

    def publish(self, pairs: tuple[tuple[int, int], ...]) -> None:
        for block, label in pairs:
            self._unlabel(block)
            self.labels[block] = label
            self.groups.setdefault(label, {})[block] = None

    def release(self, request: Request, head: tuple[int, ...], tail: tuple[int, ...]) -> None:
        for block in request.blocks:
            self.references[block] = max(self.references.get(block, 0) - 1, 0)
        request.blocks, request.hits = [], ()
        request.oldest_write = request.unwritten = NEVER
        for block in reversed(head):
            self.free[block] = None
            self.free.move_to_end(block, last=False)
        for block in tail:
            self.free[block] = None
            self.free.move_to_end(block)

    def forget_labels(self) -> None:
        self.labels.clear()
        self.groups.clear()

    def forget_copies(self) -> None:
        self.host.clear()

    def write(self, request: Request, first: int, count: int, seq: int) -> None:
        """A step launched at `seq` computes positions [first, first + count), attending to all before them."""
        if request.hits:
            self._attend(request)
        if request.oldest_write == NEVER:
            request.oldest_write = seq
        table, size = request.blocks, self.size
        position, end = first, min(first + count, len(table) * size)
        while position < end:
            index, offset = divmod(position, size)
            length = min(size - offset, end - position)
            slots = self.written.setdefault(table[index], [NEVER] * size)
            if length == 1:
                slots[offset] = seq
            else:
                slots[offset : offset + length] = [seq] * length
            position += length

    def write_each(self, request: Request, first: int, launches: list[int]) -> None:
        """Steps launched at these events compute a position each, from `first` on; the request has attended to its hits before."""
        table, size, done = request.blocks, self.size, 0
        while done < len(launches) and (position := first + done) < len(table) * size:
            index, offset = divmod(position, size)
            slots = self.written.setdefault(table[index], [NEVER] * size)
            written = launches[done : done + size - offset]
            slots[offset : offset + len(written)] = written
            done += len(written)

    def _attend(self, request: Request) -> None:
        for index, block in enumerate(request.hits):
            slots = self.written.get(block, [NEVER] * self.size)
            written = [seq for seq in slots if seq != NEVER]
            if len(written) < self.size and request.unwritten == NEVER:
                request.unwritten = index * self.size + slots.index(NEVER)
            if written and not NEVER < request.oldest_write < min(written):
                request.oldest_write = min(written)
        request.hits = ()

    def _unlabel(self, block: int) -> None:
        if (label := self.labels.pop(block, None)) is not None:
            group = self.groups[label]
            del group[block]
            if not group:
                del self.groups[label]


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
        self.reducers: dict[type[Event], Callable[[int, Any], None]] = {
            Opened: self._opened,
            Closed: self._closed,
            Called: self._called,
            Received: self._took_up,
            Returned: self._returned,
            Accepted: self._accepted,
            Blocked: self._blocked,
            Admitted: self._admitted,
            Preempted: self._preempted,
            Finished: self._finished,
            Delivered: self._delivered,
            Launched: self._launched,
            Landed: self._landed,
            Dropped: self._dropped,
            StepFailed: self._step_failed,
            Hit: self._hit,
            Allocated: self._allocated,
            Stored: self._stored,
            Freed: self._freed,
            Offloaded: self._offloaded,
            Loaded: self._loaded,
            Cleared: self._cleared,
            PausePending: self._pause_pending,
            PauseEffective: self._pause_effective,
            Resumed: self._resumed,
            Asleep: self._fell_asleep,
            Awake: self._woke,
            UpdateStarted: self._update_started,
            PartReceived: self._part_received,
            UpdateFailed: self._update_failed,
            Committed: self._committed,
            Relabelled: self._relabelled,
            Reference: self._check,
            Differed: self._check,
            Asked: self._outside,
            Heard: self._outside,
            Answered: self._outside,
        }
        """How each kind of event changes the state: called with its number and the event."""

    def apply(self, entry: Entry) -> None:
        """Move on by one event. Every event is accepted, in any order."""
        self.seq = entry.seq
        if (reduce := self.reducers.get(type(entry.event))) is not None:
            reduce(entry.seq, entry.event)

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
