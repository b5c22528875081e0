"""What a log costs: bytes a token, and events a second of CPU time written and read.

Runs without arguments, on synthetic events. Sizes count the part of a log that
begins with event 100,000: numbers have their usual width there and, with 16 requests, the pool is full.

    python benchmarks/log_size.py
"""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import NamedTuple

import msgspec

from harness.codec import Codec
from harness.events import (
    SCHEMA,
    Accepted,
    Admitted,
    Allocated,
    Delivered,
    Event,
    Finished,
    Freed,
    Landed,
    Launched,
    Opened,
    Output,
    Sampled,
    Scheduled,
    Stored,
    VersionSpan,
)
from harness.log import LogWriter, read_log

MEASURED_FROM = 100_000
"""Number of the event from which on bytes are counted."""
START_NS, STEP_NS = 400_000_000_000, 20_000_000
POOL_BLOCKS = 4096
WORKLOADS = (("16, steady decode", 16, None), ("1, steady decode", 1, None), ("16, replaced after 512 tokens", 16, 512))
"""Name, requests running at a time, output tokens after which each ends."""
BLOCK_SIZE = 16


@dataclass
class _Request:
    name: str
    prompt_tokens: int
    max_tokens: int | None
    computed: int = 0
    blocks: list[int] = field(default_factory=list)

    @property
    def output_tokens(self) -> int:
        return max(0, self.computed - self.prompt_tokens + 1)


def decode_stream(running: int, *, max_tokens: int | None = None) -> Iterator[tuple[int, list[Event]]]:
    """Endless (time in ns, events) of an engine that runs `running` requests at a time.

    Prompts have 100 to 115 tokens, so that the requests cross block boundaries one after another. With
    `max_tokens` each ends after so many (the first ones earlier, so that they do not all end at once)
    and another takes its place; without, none ends.
    """
    names, taken, labels = count(1), count(), count()
    batch: list[_Request] = []
    for step in count(1):
        events: list[Event] = [_opened()] if step == 1 else []
        for slot in range(len(batch), running):
            request = _Request(f"r{next(names)}", 100 + step % 16 + slot, max_tokens)
            if max_tokens and step == 1:
                request.max_tokens = 1 + slot * max_tokens // running
            batch.append(request)
            events.append(Accepted(request=request.name, parked=False))
        rows = [Scheduled(r.name, r.computed, 1 if r.computed else r.prompt_tokens) for r in batch]
        for request, row in zip(batch, rows, strict=True):
            events += _compute(request, row.count, taken, labels)
        events += _land(step, rows, batch)
        yield START_NS + step * STEP_NS, events
        batch = [request for request in batch if request.output_tokens != request.max_tokens]


def _compute(request: _Request, tokens: int, taken: Iterator[int], labels: Iterator[int]) -> list[Event]:
    """Take the blocks that `tokens` more tokens need, publish those that they fill."""
    events: list[Event] = []
    admitted, full = request.computed == 0, request.computed // BLOCK_SIZE
    request.computed += tokens
    if new := list(islice(taken, -(-request.computed // BLOCK_SIZE) - len(request.blocks))):
        blocks = tuple(number % POOL_BLOCKS for number in new)
        request.blocks += blocks
        events.append(Allocated(request=request.name, blocks=blocks, evicted=blocks if new[0] >= POOL_BLOCKS else ()))
    if filled := request.blocks[full : request.computed // BLOCK_SIZE]:
        events.append(Stored(request=request.name, blocks=tuple((block, next(labels)) for block in filled)))
    if admitted:
        events.append(Admitted(request=request.name, life=1, computed=0))
    return events


def _land(step: int, rows: list[Scheduled], batch: list[_Request]) -> list[Event]:
    """The step's forward pass; each request samples a token of five digits, those that reach max_tokens end."""
    sampled = [Sampled(row.request, 10_000 + (step * 7919 + slot * 104_729) % 90_000) for slot, row in enumerate(rows)]
    events: list[Event] = [Launched(step=step, batch=tuple(rows)), Landed(step=step, sampled=tuple(sampled))]
    outputs = []
    for request, (_, token) in zip(batch, sampled, strict=True):
        ends, n = request.output_tokens == request.max_tokens, request.output_tokens
        outputs.append(Output(request.name, n - 1, (token,), "length" if ends else None))
        if ends:
            spans = (VersionSpan("default", 0, n),)
            end = Finished(request=request.name, reason="length", prompt_tokens=request.prompt_tokens, output_tokens=n, spans=spans)
            events += [end, Freed(request=request.name, head=(), tail=tuple(reversed(request.blocks)))]
    return [*events, Delivered(outputs=tuple(outputs))]


def _opened() -> Opened:
    return Opened(
        schema=SCHEMA,
        caesura="0.1.0",
        backend="synthetic",
        versions={},
        level=2,
        device="cpu",
        engine={"block_size": BLOCK_SIZE, "num_blocks": POOL_BLOCKS},
        profile="caesura",
        eos_token_ids=(2,),
        scenario="",
        seed=0,
        clock_base_ns=0,
        rank=0,
    )


def bytes_per_token(running: int, *, max_tokens: int | None = None) -> float:
    """Bytes of log for each sampled token, over the 100,000 events from event 100,000 on."""
    codec = Codec()
    size = tokens = 0
    for t_ns, events in decode_stream(running, max_tokens=max_tokens):
        measured = codec.seq >= MEASURED_FROM
        line = codec.encode(t_ns, events)
        if measured:
            size += len(line)
            tokens += sum(len(event.sampled) for event in events if isinstance(event, Landed))
        if codec.seq >= 2 * MEASURED_FROM:
            return size / tokens
    raise AssertionError("the stream is endless")


class Speed(NamedTuple):
    append_us: float
    appended_per_s: float
    read_per_s: float


def speed(running: int, *, max_tokens: int | None = None, steps: int = 10_000) -> Speed:
    """Microseconds for one append (one step), events a second appended to a real file and read back.

    CPU time, user and system, of the fastest of three runs: the work is single-threaded and nothing is synced to
    disk, so that it is what a quiet machine's clock would show and repeats on a busy one.
    """
    transactions = list(islice(decode_stream(running, max_tokens=max_tokens), steps))
    append_s, read_s = [], []
    events = 0
    for _ in range(3):
        with tempfile.TemporaryDirectory() as name:
            with LogWriter(Path(name)) as log:
                began = time.process_time()
                for t_ns, together in transactions:
                    log.append(t_ns, together)
                append_s.append(time.process_time() - began)
            began = time.process_time()
            events = len(read_log(log.path).entries)
            read_s.append(time.process_time() - began)
    return Speed(min(append_s) / steps * 1e6, events / min(append_s), events / min(read_s))


def main() -> None:
    print(f"{platform.platform()}, {os.cpu_count()} cores; Python {platform.python_version()}, msgspec {msgspec.__version__}")
    print("command: python benchmarks/log_size.py")
    print(f"{'requests':>30} {'bytes/token':>12} {'us/append':>10} {'append events/s':>16} {'read events/s':>14}")
    for what, running, max_tokens in WORKLOADS:
        size, fast = bytes_per_token(running, max_tokens=max_tokens), speed(running, max_tokens=max_tokens)
        print(f"{what:>30} {size:12.1f} {fast.append_us:10.1f} {fast.appended_per_s:16,.0f} {fast.read_per_s:14,.0f}")


if __name__ == "__main__":
    main()
