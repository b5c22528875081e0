"""One line of a log: events to bytes and back, the steady decode folded.

A run spends nearly all of its steps decoding the same requests, and such a step
says little that the reader could not work out: the batch is the last one moved
on by a token. Written out, its three events cost about 60 bytes a token; folded
into `["stepped", [token, ...]]` they cost 6 and a share of the line.

Folding is lossless by construction: the writer predicts the events from the
tokens with the same function by which the reader expands them, and folds only
if the prediction *equals* what happened. What the prediction rests on (last
batch, next output index of each request, last label) both sides derive from the
events of the file itself, in one place: `Codec._note`. That place also holds the
rules of where an event may stand, so a writer cannot write what a reader refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from harness.errors import BadInput
from harness.events import (
    SCHEMA,
    Accepted,
    Allocated,
    AnyEvent,
    Blocked,
    Closed,
    Delivered,
    Event,
    Finished,
    Freed,
    Landed,
    Launched,
    Opened,
    Output,
    Preempted,
    Sampled,
    Scheduled,
    Stored,
)


class LogError(BadInput):
    """A log that cannot be written or is not what it should be; the message names the file and, in reading, the line."""


class Fold(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=str.lower):
    """Base of the short forms. They exist in files only: no reader of a log ever sees one."""


class Stepped(Fold, frozen=True):
    """`launched`, `landed`, `delivered`: each request of the last batch sampled one token and goes on."""

    tokens: tuple[int, ...]


class Ended(Fold, frozen=True):
    """As `stepped`, with the `finished` and `freed` of requests that ended between `landed` and `delivered`."""

    tokens: tuple[int, ...]
    between: tuple[Finished | Freed, ...]


class Overlapped(Fold, frozen=True):
    """Under asynchronous scheduling: `launched` of the next step, `landed` of the one before it, `delivered`;
    each request of the last batch sampled one token and goes on."""

    tokens: tuple[int, ...]


class Took(Fold, frozen=True):
    """`allocated` of one block that had no digest to lose."""

    request: str
    block: int


class Retook(Fold, frozen=True):
    """`allocated` of one block that lost its digest: the usual case once the pool is full of cached blocks."""

    request: str
    block: int


class Filled(Fold, frozen=True):
    """`stored` of one block under a label never seen before: the largest so far plus one (0 at first)."""

    request: str
    block: int


EVENTS_OF_A_STEP = 3
"""`stepped` stands for so many."""

_BESIDE_STEPS: frozenset[type] = frozenset((Allocated, Stored, Took, Retook, Filled))
"""Items that say nothing about a batch and its outputs."""

Item = AnyEvent | Stepped | Overlapped | Ended | Took | Retook | Filled
"""What stands in a line's list."""

LINE = tuple[int, int, tuple[Item, ...]]
"""A line: number of its first event, time in ns of all of them, what happened."""

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(LINE)
_new_tuple = tuple.__new__
"""Makes a NamedTuple in half the time of a call of its class: there are three for each token."""


class Transaction(NamedTuple):
    """A line read back: its events are numbered `seq`, `seq + 1`, ..."""

    seq: int
    t_ns: int
    events: tuple[Event, ...]


class Decode(NamedTuple):
    """The events `launched`, `landed` and `delivered` of a step that took a token for each request of its batch, in columns.

    Every request was computed one token, sampled one, was handed it and goes on. A writer who has that of very many steps says it so:
    columns are made and compared in a fraction of the time that rows take. What is written is the same.
    """

    step: int
    landed: int
    """The step that landed: this one, or under asynchronous scheduling an earlier one."""
    requests: list[str]
    firsts: list[int]
    """Position of the token that each request was computed."""
    tokens: list[int]
    outputs: list[int]
    """Output index of the token that each request was handed."""

    def events(self) -> tuple[Launched, Landed, Delivered]:
        new = _new_tuple
        batch = [new(Scheduled, (request, first, 1)) for request, first in zip(self.requests, self.firsts, strict=True)]
        sampled = [new(Sampled, pair) for pair in zip(self.requests, self.tokens, strict=True)]
        handed = zip(self.requests, self.outputs, self.tokens, strict=True)
        outputs = [new(Output, (request, output, (token,), None)) for request, output, token in handed]
        return (
            Launched(step=self.step, batch=tuple(batch)),
            Landed(step=self.landed, sampled=tuple(sampled)),
            Delivered(outputs=tuple(outputs)),
        )


class Codec:
    """Encodes or decodes the lines of one file, first to last. Use a new one for each file.

    After a LogError the codec must not be used again: it may have taken note of half a line.
    """

    def __init__(self) -> None:
        self.seq = 0
        """Number of the next event."""
        self.closed = False
        """`closed` has been seen: nothing may follow."""
        self._t_ns: int | None = None
        self._step = 0
        self._batch: tuple[Scheduled, ...] = ()
        """The last launched batch, less those that have left the running set since."""
        self._next_output: dict[str, int] = {}
        """Index of each request's next output token; 0 if not here."""
        self.next_label = 0
        """Of the next block that is published under a label never seen before."""
        self._passed = 0
        """Steady steps passed over since the last batch and the next outputs were brought up to date."""
        self._columns: tuple[list[str], list[int], list[int]] = [], [], []
        """While steps are passed over: requests of the last batch, and for each the next position and the next output before them."""
        self._notes: dict[type[Event], Callable[[Any], None]] = {
            Opened: self._note_opened,
            Closed: self._note_closed,
            Accepted: self._note_new,
            Blocked: self._note_new,
            Preempted: self._note_left,
            Finished: self._note_left,
            Launched: self._note_launched,
            Delivered: self._note_delivered,
            Stored: self._note_stored,
        }

    def encode(self, t_ns: int, events: Sequence[Event | Decode]) -> bytes:
        """The line, newline included, of events that happened together.

        Raises:
            LogError: an event in a place where it cannot stand, or time running backwards.
            TypeError, ValueError: something that JSON cannot hold.
        """
        seq = self.seq
        self._note_time(t_ns)
        return _encoder.encode((seq, t_ns, self._fold(events))) + b"\n"

    def decode(self, line: bytes) -> Transaction:
        """The inverse of `encode`.

        Raises:
            LogError: says what was expected; the caller adds file and line number.
        """
        seq, t_ns, items = self.parse(line)
        return Transaction(seq, t_ns, tuple([event for item in items for event in self.expand(item)]))

    def parse(self, line: bytes) -> tuple[int, int, tuple[Item, ...]]:
        """The line as it stands in the file: the number of its first event, the time, and what `expand` or `pass_over` is to be
        called for, one after the other.

        Raises:
            LogError: as `decode`.
        """
        if self.seq == 0:
            _check_schema(line)
        try:
            seq, t_ns, items = _decoder.decode(line)
        except ValueError as error:
            raise LogError(f"expected [seq, t_ns, [event, ...]], got {_excerpt(line)} ({error})") from None
        if seq != self.seq:
            fault = f"{seq - self.seq} events are missing" if seq > self.seq else "it repeats earlier ones"
            raise LogError(f"expected a line that begins with event {self.seq}, got one that begins with {seq}: {fault}")
        if not items:
            raise LogError("expected at least one event, got an empty line")
        self._note_time(t_ns)
        return seq, t_ns, items

    def expand(self, item: Item) -> tuple[Event, ...]:
        """The events that an item stands for.

        Raises:
            LogError: one of them cannot stand here.
        """
        if self._passed and type(item) not in _BESIDE_STEPS:
            self._catch_up()
        events = self._unfold_one(item)
        for event in events:
            self._note(event)
        return events

    def pass_over(self, item: Stepped | Overlapped | Took | Filled) -> None:
        """Take note of an item, and of the events that it stands for, without making them.

        Raises:
            LogError: as `expand`.
        """
        if type(item) is Stepped or type(item) is Overlapped:
            if len(item.tokens) != len(self._batch) or self.closed:
                self.expand(item)  # which says what is wrong
            self._passed += 1
            self._step += 1
            self.seq += EVENTS_OF_A_STEP
            return
        self.seq += 1
        if type(item) is Filled:
            self.next_label += 1

    def _catch_up(self) -> None:
        passed, self._passed = self._passed, 0
        ahead = passed - 1
        self._batch = tuple([Scheduled(request, first + count + ahead, 1) for request, first, count in self._batch])
        for request in {row.request for row in self._batch}:  # once each, as if it were delivered, also where a batch has one twice
            self._next_output[request] = self._next_output.get(request, 0) + passed

    def _fold(self, said: Sequence[Event | Decode]) -> list[Any]:
        items: list[Any] = []
        events: list[Event] = []
        for event in said:
            if type(event) is not Decode:
                events.append(event)  # type: ignore[arg-type]
                continue
            if events:
                self._fold_events(events, items)
                events.clear()
            if self._foresees(event):
                items.append(step := (Stepped if event.landed == event.step else Overlapped)(tuple(event.tokens)))
                self.pass_over(step)
            else:
                self._fold_events(event.events(), items)
        self._fold_events(events, items)
        return items

    def _foresees(self, step: Decode) -> bool:
        """Whether the step is the last batch moved on by a token: as `_predict_step`, in columns."""
        if not self._passed:
            requests = [row.request for row in self._batch]
            self._columns = requests, [row.first + row.count for row in self._batch], [self._next_output.get(id, 0) for id in requests]
        requests, firsts, outputs = self._columns
        passed = self._passed
        return (
            bool(requests)
            and step.step == self._step + 1
            and step.landed in (self._step, self._step + 1)
            and step.requests == requests
            and step.firsts == [first + passed for first in firsts]
            and step.outputs == [output + passed for output in outputs]
        )

    def _fold_events(self, events: Sequence[Event], items: list[Any]) -> None:
        place = 0
        while place < len(events):
            if self._passed and type(events[place]) not in _BESIDE_STEPS:
                self._catch_up()
            fold, covered = self._fold_at(events, place)
            for event in events[place : place + covered]:
                self._note(event)
            items.append(fold)
            place += covered

    def _fold_at(self, events: Sequence[Event], place: int) -> tuple[Event | Fold, int]:
        """The shortest form of the event at `place`, and how many events it stands for."""
        event = events[place]
        match event:
            case Launched():
                return self._fold_step(event, events, place) or (event, 1)
            case Allocated(request=request, blocks=(block,), evicted=()):
                return Took(request, block), 1
            case Allocated(request=request, blocks=(block,), evicted=(lost,)) if lost == block:
                return Retook(request, block), 1
            case Stored(request=request, blocks=((block, label),)) if label == self.next_label:
                return Filled(request, block), 1
        return event, 1

    def _fold_step(self, launched: Launched, events: Sequence[Event], place: int) -> tuple[Fold, int] | None:
        """The whole step in short, or None if it is not the last one moved on by a token."""
        end = place + 2
        while end < len(events) and isinstance(events[end], Finished | Freed):
            end += 1
        step = tuple(events[place : end + 1])
        if len(step) < 3 or not isinstance(landed := step[1], Landed):
            return None
        tokens = tuple([token for _, token in landed.sampled])
        if not len(tokens) == len(self._batch) == len(launched.batch):
            return None
        between: Any = step[2:-1]
        overlaps = landed.step != launched.step
        if step != self._predict_step(tokens, between, overlaps=overlaps) or (overlaps and between):
            return None
        return (Overlapped(tokens) if overlaps else Ended(tokens, between) if between else Stepped(tokens)), len(step)

    def _predict_step(self, tokens: tuple[int, ...], between: tuple[Finished | Freed, ...], *, overlaps: bool = False) -> tuple[Event, ...]:
        """The events of a step in which each request of the last batch sampled one of `tokens`, in order;
        if it `overlaps`, it is the step before it that lands."""
        if len(tokens) != len(self._batch):
            raise LogError(f"expected {len(self._batch)} tokens, one for each request of the last batch that still runs, got {len(tokens)}")
        step, next_output, new = self._step + 1, self._next_output, _new_tuple
        reasons = {event.request: event.reason for event in between if isinstance(event, Finished)}
        batch = [new(Scheduled, (request, first + count, 1)) for request, first, count in self._batch]
        sampled = [new(Sampled, (row[0], token)) for row, token in zip(batch, tokens, strict=True)]
        outputs = [new(Output, (id, next_output.get(id, 0), (token,), reasons.get(id))) for id, token in sampled]
        return (
            Launched(step=step, batch=tuple(batch)),
            Landed(step=self._step if overlaps else step, sampled=tuple(sampled)),
            *between,
            Delivered(outputs=tuple(outputs)),
        )

    def _unfold_one(self, item: Item) -> tuple[Event, ...]:
        match item:
            case Stepped(tokens=tokens):
                return self._predict_step(tokens, ())
            case Overlapped(tokens=tokens):
                return self._predict_step(tokens, (), overlaps=True)
            case Ended(tokens=tokens, between=between):
                return self._predict_step(tokens, between)
            case Took(request=request, block=block):
                return (Allocated(request=request, blocks=(block,), evicted=()),)
            case Retook(request=request, block=block):
                return (Allocated(request=request, blocks=(block,), evicted=(block,)),)
            case Filled(request=request, block=block):
                return (Stored(request=request, blocks=((block, self.next_label),)),)
        return (item,)

    def _note_time(self, t_ns: int) -> None:
        if self._t_ns is not None and t_ns < self._t_ns:
            raise LogError(f"expected a time of {self._t_ns} ns or later, got {t_ns}: the clock of one writer never runs backwards")
        self._t_ns = t_ns

    def _note(self, event: Event) -> None:
        """Take an event into account, in the order of the file."""
        if self.closed:
            raise LogError(f"expected nothing after `closed`, got {_name(event)}")
        if self.seq == 0 and not isinstance(event, Opened):
            raise LogError(f"expected `opened` as the first event, got {_name(event)}")
        if (note := self._notes.get(type(event))) is not None:
            note(event)
        self.seq += 1

    def _note_opened(self, event: Opened) -> None:
        if self.seq > 0:
            raise LogError(f"expected `opened` once, as the first event, got another as event {self.seq}")

    def _note_closed(self, event: Closed) -> None:
        if event.count != self.seq:
            raise LogError(f"expected `closed` to count the {self.seq} events before it, got {event.count}")
        self.closed = True

    def _note_new(self, event: Accepted | Blocked) -> None:
        self._next_output.pop(event.request, None)

    def _note_left(self, event: Preempted | Finished) -> None:
        self._batch = tuple(row for row in self._batch if row.request != event.request)

    def _note_launched(self, event: Launched) -> None:
        self._step, self._batch = event.step, event.batch

    def _note_delivered(self, event: Delivered) -> None:
        outputs = self._next_output
        for request, first, tokens, finish_reason in event.outputs:
            if finish_reason is None:
                outputs[request] = first + len(tokens)
            else:
                outputs.pop(request, None)

    def _note_stored(self, event: Stored) -> None:
        for _, label in event.blocks:
            if label >= self.next_label:
                self.next_label = label + 1


def line_schema() -> str:
    """The JSON Schema of a line, as committed in docs/events.schema.json."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"A line of a Caesura event log, schema {SCHEMA}",
        **msgspec.json.schema(LINE),
    }
    return msgspec.json.format(msgspec.json.encode(schema), indent=2).decode() + "\n"


def _check_schema(line: bytes) -> None:
    """Refuse a foreign file or a newer schema before anything else of it is decoded."""
    try:
        match msgspec.json.decode(line):
            case [int(), int(), [["opened", int(schema), *_], *_]]:
                pass
            case _:
                raise ValueError("its shape is another")
    except ValueError as error:
        raise LogError(f'not a Caesura log: expected [0, t_ns, [["opened", schema, ...]]], got {_excerpt(line)} ({error})') from None
    if schema > SCHEMA:
        raise LogError(f"the log has schema {schema}, this Caesura reads up to {SCHEMA}: upgrade it to the version that wrote the log")
    if schema < 1:
        raise LogError(f"expected a schema of 1 to {SCHEMA}, got {schema}")


def _name(event: Event) -> str:
    return f"`{type(event).__struct_config__.tag}`"


def _excerpt(line: bytes) -> str:
    text = line.decode(errors="backslashreplace").strip()
    return repr(text if len(text) <= 60 else text[:57] + "...")
