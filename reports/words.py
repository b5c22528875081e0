"""An event in a few words: a row of a timeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from harness import events as ev
from harness.operations import from_data, in_words

LONG_LIST = 8
"""A list of more items than this is shown by its ends and its length."""


def event_in_words(event: ev.Event) -> str:
    """One line, without event number and time."""
    kind = event.__struct_config__.tag
    say = _WORDS.get(type(event))
    return f"{kind:<15} {say(event)}".rstrip() if say else str(kind)


def timeline_row(entry: ev.Entry, *, writer: bool = False) -> str:
    """Number, time and event; with `writer` also whose log it is from, for runs that have several."""
    whose = f"{entry.writer:<7} " if writer else ""
    return f"{entry.seq:>6}  {entry.t_ns / 1e6:>9.3f} ms  {whose}{event_in_words(entry.event)}"


def operation_in_words(data: dict[str, Any]) -> str:
    """A logged operation; one that this version does not know is shown as it is."""
    try:
        return in_words(from_data(data))
    except ValueError:
        return str(data)


def _some(items: Sequence[object]) -> str:
    shown = [str(item) for item in items]
    if len(shown) > LONG_LIST:
        shown = [*shown[:3], "...", *shown[-2:], f"({len(items)} in all)"]
    return " ".join(shown)


def _returned(event: ev.Returned) -> str:
    return f"#{event.op} {_outcome(event)}"


def _answered(event: ev.Answered) -> str:
    return f"#{event.call} {'' if event.status is None else f'{event.status} '}{_outcome(event)}"


def _outcome(event: ev.Returned | ev.Answered) -> str:
    if event.error is not None:
        return f"refused, {event.error.code}: {event.error.message}"
    return " ".join(f"{name}={value}" for name, value in (event.answer or {}).items())


def _delivered(event: ev.Delivered | ev.Heard) -> str:
    return _some(
        [f"{o.request}[{o.first}:{o.first + len(o.tokens)}]{'=' + o.finish_reason if o.finish_reason else ''}" for o in event.outputs]
    )


def _freed(event: ev.Freed) -> str:
    return f"{event.request}: to the head {_some(event.head) or '-'}, to the tail {_some(event.tail) or '-'}"


def _spans(event: ev.Finished) -> str:
    spans = " ".join(f"{version}[{start}:{end}]" for version, start, end in event.spans)
    return f"{event.request} {event.reason}: {event.output_tokens} tokens {spans}"


_WORDS: dict[type[ev.Event], Callable] = {
    ev.Opened: lambda e: f"{e.backend} level {e.level} schema {e.schema}",
    ev.Closed: lambda e: f"{e.why} after {e.count} events",
    ev.Called: lambda e: f"#{e.op} {operation_in_words(e.operation)}",
    ev.Received: lambda e: f"#{e.op}",
    ev.Returned: _returned,
    ev.Accepted: lambda e: f"{e.request}{' parked' if e.parked else ''}",
    ev.Blocked: lambda e: e.request,
    ev.Admitted: lambda e: f"{e.request} life {e.life}, {e.computed} tokens from the cache",
    ev.Preempted: lambda e: f"{e.request} " + (f"for {e.by}" if e.by is not None else "by a cache reset"),
    ev.Finished: _spans,
    ev.Delivered: _delivered,
    ev.Launched: lambda e: f"step {e.step}: " + _some([f"{r}[{first}:{first + count}]" for r, first, count in e.batch]),
    ev.Landed: lambda e: f"step {e.step}: " + _some([f"{r}={token}" for r, token in e.sampled]),
    ev.Dropped: lambda e: f"step {e.step}: {e.request}, {e.why}",
    ev.StepFailed: lambda e: f"step {e.step}: {e.why}",
    ev.Hit: lambda e: f"{e.request}: blocks {_some(e.blocks)}",
    ev.Allocated: lambda e: f"{e.request}: blocks {_some(e.blocks)}" + (f", evicted {_some(e.evicted)}" if e.evicted else ""),
    ev.Stored: lambda e: f"{e.request}: " + _some([f"{block}=digest{label}" for block, label in e.blocks]),
    ev.Freed: _freed,
    ev.Cleared: lambda e: f"{e.tier}: {'done' if e.success else 'refused'}, {'empty' if e.empty else 'not empty'}",
    ev.PausePending: lambda e: f"{e.mode}{' clear' if e.clear_cache else ''}",
    ev.PauseEffective: lambda e: f"{e.mode}{' clear' if e.clear_cache else ''}",
    ev.PartReceived: lambda e: f"{e.part} of {e.of}: {e.tensors} tensors, {e.bytes:,} bytes",
    ev.UpdateFailed: lambda e: f"{e.phase}{' after bytes were written' if e.wrote else ''}: {e.why}",
    ev.Committed: lambda e: e.version,
    ev.Relabelled: lambda e: e.version,
    ev.Asked: lambda e: f"#{e.call} {operation_in_words(e.operation)}",
    ev.Heard: _delivered,
    ev.Answered: _answered,
    ev.Asleep: lambda e: f"level {e.level}: {_some(e.tags) or 'nothing'}",
    ev.Awake: lambda e: f"still asleep: {_some(e.tags) or 'nothing'}",
    ev.Offloaded: lambda e: "blocks " + _some([f"{block} to slot {slot}" for block, slot in e.blocks]),
    ev.Loaded: lambda e: f"{e.request}: " + _some([f"slot {slot} to block {block}" for slot, block in e.blocks]),
    ev.Reference: lambda e: f"{e.request}[{e.first}:{e.first + len(e.tokens)}] {e.kind}",
}
