"""What a log tells of one call, one step, one request. Facts are added up by rebuild.py and read by invariants."""

from __future__ import annotations

from bisect import bisect_right
from typing import Literal, NamedTuple

from harness.events import DropReason, Finished, Mode, Scheduled, VersionSpan
from harness.operations import Operation, Pause, Sleep, Submit

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
