"""What happened: the schema of the event log.

Each class is one kind of event; its docstring says when an engine's adapter
emits it. On disk an event is a JSON array, its kind first and its fields in the
order below (see log.py). The kinds are written for exact comparison: model and
engine, given the same operations and the same sampled tokens, must produce the
same events in the same order, except for fields named in `UNCOMPARED`.

Positions count a request's tokens from 0, prompt first. A *life* of a request
begins each time it is admitted (1, 2 after its first preemption, ...). A *label*
is a small integer for a block's digest, dense in the order of first appearance
in one log: two blocks have one label exactly when the engine says that their
contents, with everything before them, are the same.
"""

from __future__ import annotations

import re
from typing import Any, Literal, NamedTuple

import msgspec

SCHEMA = 1
"""Version of this schema. A reader refuses a log with a newer one."""

FinishReason = Literal["length", "stop", "abort"]
Mode = Literal["abort", "wait", "keep"]
DropReason = Literal["aborted", "finished", "reset"]
"""Why a token that a step in flight sampled is no part of the output: since the launch its request
was aborted, ended by an earlier token, or was preempted by a cache reset."""

ErrorCode = Literal["invalid", "conflict", "busy", "failed", "superseded", "rejected", "out-of-service"]
"""What a refused call was refused for.

invalid: a bad argument. conflict: the wrong state for this call. busy: a reset while blocks are
held. failed: broke after the first weight byte. superseded: a later call overrode this pause.
rejected: the late-request policy. out-of-service: an earlier update failed half-way.
"""


class Scheduled(NamedTuple):
    """A request's share of a step: `count` tokens from position `first` on."""

    request: str
    first: int
    count: int


class Sampled(NamedTuple):
    request: str
    token: int


class Output(NamedTuple):
    """What a caller was handed: generated tokens from output index `first` on (0 = the first generated token)."""

    request: str
    first: int
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None


class VersionSpan(NamedTuple):
    """Output tokens [start, end) were sampled by the weights labelled `version`."""

    version: str
    start: int
    end: int


class Failure(NamedTuple):
    code: ErrorCode
    message: str


def _kind(class_name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", class_name).lower()


class Event(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True, tag=_kind):
    """Base of all events."""


class Opened(Event, frozen=True, kw_only=True):
    """First event of a log: who wrote it, about what."""

    schema: int
    caesura: str
    backend: str
    versions: dict[str, str]
    level: int
    device: str
    engine: dict[str, Any]
    """The engine's shape as the scenario's `engine:` section, defaults filled in."""
    profile: str
    eos_token_ids: tuple[int, ...]
    scenario: str
    """SHA-256 of the scenario file, hexadecimal; empty if there was none."""
    seed: int
    clock_base_ns: int
    rank: int


class Closed(Event, frozen=True, kw_only=True):
    """Last event: how many events came before, and why the run ended: drained, paused (with live requests), out-of-service,
    stalled, failed (a forward pass broke), crashed (the engine raised) or interrupted."""

    why: str
    count: int
    unfired: tuple[str, ...] = ()
    """Timeline entries that never fired, in words."""
    error: str = ""
    """What the engine raised, and where, if it crashed."""

    @property
    def cut_short(self) -> bool:
        """The run did not come to its own end, so what must hold at the end is not known."""
        return self.why in ("interrupted", "failed", "crashed")


class Called(Event, frozen=True, kw_only=True):
    """A client called. `operation` is as operations.to_data gives it, prompts resolved to token ids."""

    op: int
    operation: dict[str, Any]
    by: str


class Received(Event, frozen=True, kw_only=True):
    """The core took the operation up."""

    op: int


class Returned(Event, frozen=True, kw_only=True):
    """The call returned: `answer` on success, `error` otherwise."""

    op: int
    answer: dict[str, Any] | None
    error: Failure | None


class Accepted(Event, frozen=True, kw_only=True):
    """The core took a request on. `parked`: it came while paused or out of service, and waits in the queue."""

    request: str
    parked: bool


class Blocked(Event, frozen=True, kw_only=True):
    """Policy `block`: held in front of the core until resume, when `accepted` follows."""

    request: str


class Admitted(Event, frozen=True, kw_only=True):
    """Moved from waiting to running; `computed` tokens came from prefix hits."""

    request: str
    life: int
    computed: int


class Preempted(Event, frozen=True, kw_only=True):
    """Moved from running to the front of waiting. `by`: the request whose need caused it; None: a cache reset."""

    request: str
    by: str | None


class Finished(Event, frozen=True, kw_only=True):
    """Ended, in whatever state it was. `spans` partition its output by weight version, as the engine reports it."""

    request: str
    reason: FinishReason
    prompt_tokens: int
    output_tokens: int
    spans: tuple[VersionSpan, ...]


class Delivered(Event, frozen=True, kw_only=True):
    """Handed to callers, in this order: what one step or one call gave out."""

    outputs: tuple[Output, ...]


class Launched(Event, frozen=True, kw_only=True):
    """A forward pass began. `batch` is in scheduling order: running requests, then admissions."""

    step: int
    batch: tuple[Scheduled, ...]


class Landed(Event, frozen=True, kw_only=True):
    """The forward pass ended, and these tokens were appended, in scheduling order; a partial prefill samples none.
    Tokens that were thrown away are not among them: a `dropped` for each follows."""

    step: int
    sampled: tuple[Sampled, ...]


class StepFailed(Event, frozen=True, kw_only=True):
    """The forward pass broke and sampled nothing; the engine makes no further step."""

    step: int
    why: str


class Dropped(Event, frozen=True, kw_only=True):
    """The step that has just landed sampled a token for this request too, and it was thrown away."""

    step: int
    request: str
    why: DropReason


class Hit(Event, frozen=True, kw_only=True):
    """Admission claimed these cached blocks, first to last."""

    request: str
    blocks: tuple[int, ...]


class Allocated(Event, frozen=True, kw_only=True):
    """Took these blocks from the head of the free queue, in this order; `evicted` lists those that lost a digest."""

    request: str
    blocks: tuple[int, ...]
    evicted: tuple[int, ...]


class Stored(Event, frozen=True, kw_only=True):
    """Published (block, label) pairs, first to last: these blocks can be hit from now on."""

    request: str
    blocks: tuple[tuple[int, int], ...]


class Freed(Event, frozen=True, kw_only=True):
    """A request let go of all its blocks. Those that no one holds any more went to the free queue:
    afterwards it begins with `head` and ends with `tail`; the others remain held by their sharers."""

    request: str
    head: tuple[int, ...]
    tail: tuple[int, ...]


class Offloaded(Event, frozen=True, kw_only=True):
    """Blocks that were just evicted were copied to the host tier, as (device block, host slot), in this order;
    a slot that held another copy holds it no longer."""

    blocks: tuple[tuple[int, int], ...]


class Loaded(Event, frozen=True, kw_only=True):
    """Admission copied these back, as (host slot, device block), first to last, before the step was launched; the copies
    on the host remain."""

    request: str
    blocks: tuple[tuple[int, int], ...]


class Cleared(Event, frozen=True, kw_only=True):
    """A cache reset was carried out or refused. `empty`: whether the tier holds no block and no digest afterwards."""

    tier: Literal["device", "host"]
    success: bool
    empty: bool


class PausePending(Event, frozen=True, kw_only=True):
    """A pause was taken up; `mode` and `clear_cache` are what all pending calls together ask for."""

    mode: Mode
    clear_cache: bool


class PauseEffective(Event, frozen=True, kw_only=True):
    """Quiet: nothing queued, in flight or running; every pending pause call returns now."""

    mode: Mode
    clear_cache: bool


class Resumed(Event, frozen=True, kw_only=True):
    """Scheduling goes on."""


Tag = Literal["kv_cache", "weights"]
"""What can be asleep by itself: the memory of the KV pool, that of the weights."""


class Asleep(Event, frozen=True, kw_only=True):
    """The engine went to sleep; every pending sleep call returns now. Level 0 gives no memory back, 1 moves the weights to
    the host and drops the KV, 2 drops both. `tags`: what is asleep now, in alphabetical order."""

    level: int
    tags: tuple[Tag, ...]


class Awake(Event, frozen=True, kw_only=True):
    """Memory was mapped again. `tags`: what is still asleep; none when the engine is awake."""

    tags: tuple[Tag, ...]


class UpdateStarted(Event, frozen=True, kw_only=True):
    """A weight session is open."""


class PartReceived(Event, frozen=True, kw_only=True):
    """Part `part` of `of` was written into the weights."""

    part: int
    of: int
    tensors: int
    bytes: int


class UpdateFailed(Event, frozen=True, kw_only=True):
    """A phase broke. `wrote`: at least one byte of this session had been written, so the engine is out of service."""

    phase: Literal["start", "update", "finish"]
    wrote: bool
    why: str


class Committed(Event, frozen=True, kw_only=True):
    """The session finished; tokens sampled from now on belong to `version`.

    The rest is empty where nobody looked. `sent` and `resident` are checksums over all tensors (name, shape, dtype, bytes):
    of what the sender says they should be now, and of what lies in the engine's memory. They are in the order of ranks.
    """

    version: str
    sent: str = ""
    resident: tuple[str, ...] = ()
    differing: tuple[str, ...] = ()
    """Names of tensors that are not as sent, the first ten."""
    moved: tuple[str, ...] = ()
    """Names of tensors whose storage address changed, the first ten: a captured graph would read the old one."""


class Relabelled(Event, frozen=True, kw_only=True):
    """The version label was set without touching weights."""

    version: str


class Differed(Event, frozen=True, kw_only=True):
    """In lockstep, an engine's whole visible state differed from the model's after event number `event`."""

    event: int
    places: tuple[tuple[str, str, str], ...]
    """(field, what the model has, what the engine has)"""


class Reference(Event, frozen=True, kw_only=True):
    """What an oracle says a stretch of a request's output should have been, each token given the logged ones before it.

    The `nth` request of that id, from 1. From output index `first` on, `tokens` are those of: fresh, a fresh engine on the
    weights that sampled the stretch; unpaused, the same, before any weight boundary; mixed, the mixed replay, in which every
    KV entry is recomputed from the weights and the entries that the log tells.
    """

    request: str
    nth: int
    kind: Literal["fresh", "mixed", "unpaused"]
    first: int
    tokens: tuple[int, ...]


class Asked(Event, frozen=True, kw_only=True):
    """A client of a live engine made a call: what it asked for, and its own number for it."""

    call: int
    operation: dict[str, Any]


class Heard(Event, frozen=True, kw_only=True):
    """Outputs reached the client."""

    outputs: tuple[Output, ...]


class Answered(Event, frozen=True, kw_only=True):
    """A client's call came back. That of `submit` does when the request ended: its answer has `finish_reason`, `prompt_tokens`,
    `output_tokens` and, if the engine reports them, `weight_versions` as [version, start, end]. Over HTTP, `status` says with what code."""

    call: int
    answer: dict[str, Any] | None
    error: Failure | None
    status: int | None = None


UNCOMPARED: dict[type[Event], dict[str, Any]] = {
    PartReceived: {"tensors": 0, "bytes": 0},
    UpdateFailed: {"why": ""},
    Closed: {"count": 0},
    Committed: {"sent": "", "resident": (), "differing": (), "moved": ()},
    StepFailed: {"why": ""},
}
"""Fields that say something about one engine alone, with the value they get before comparison."""

AnyEvent = (
    Opened
    | Closed
    | Called
    | Received
    | Returned
    | Accepted
    | Blocked
    | Admitted
    | Preempted
    | Finished
    | Delivered
    | Launched
    | Landed
    | StepFailed
    | Dropped
    | Hit
    | Allocated
    | Stored
    | Freed
    | Offloaded
    | Loaded
    | Cleared
    | PausePending
    | PauseEffective
    | Resumed
    | Asleep
    | Awake
    | UpdateStarted
    | PartReceived
    | UpdateFailed
    | Committed
    | Relabelled
    | Differed
    | Reference
    | Asked
    | Heard
    | Answered
)
"""Every kind of event: what a log line may hold."""


class Entry(NamedTuple):
    """An event in its place: `seq` is its number in the merged log, `t_ns` its time, `writer` who wrote it."""

    seq: int
    t_ns: int
    writer: str
    event: Event


def comparable(event: Event) -> Event:
    """The event with what may differ between two engines taken out; the message of an error is for people."""
    if (fields := UNCOMPARED.get(type(event))) is not None:
        return msgspec.structs.replace(event, **fields)
    if isinstance(event, Returned) and event.error is not None:
        return msgspec.structs.replace(event, error=Failure(event.error.code, ""))
    return event
