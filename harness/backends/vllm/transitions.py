"""What vLLM's scheduler and block manager do, as events.

Methods of the instances are wrapped from outside: each wrapper notes what went in and came out and
otherwise stays out of the way. A new scheduler gets new wrappers, so nothing of one case is left for
the next. A block is called by its place in the free queue at the beginning: block 0 is vLLM's own, so in a
new scheduler ids are shifted by one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import msgspec

from harness import events as ev
from harness.codec import Decode

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]
"""A method of vLLM's to what is called instead."""


class Batch(NamedTuple):
    """Requests of a step in scheduling order."""

    ids: list[str]
    requests: list[Any]
    """vLLM's; they may end meanwhile."""
    names: list[str]


class Flight(NamedTuple):
    """A step that was launched and has not landed."""

    step: int
    samplers: Batch
    """Those for which it samples a token."""


class Launch(NamedTuple):
    """A `launched` in columns: most steps are the last one moved on by a token, and end in a log without ever being rows."""

    step: int
    names: list[str]
    firsts: list[int]
    counts: list[int]

    def event(self) -> ev.Launched:
        return ev.Launched(step=self.step, batch=tuple(map(ev.Scheduled, self.names, self.firsts, self.counts)))


class Landing(NamedTuple):
    """A `landed` in columns: each of the batch sampled one token."""

    step: int
    batch: Batch
    tokens: list[int]

    def event(self) -> ev.Landed:
        return ev.Landed(step=self.step, sampled=tuple(map(ev.Sampled, self.batch.names, self.tokens)))


class Transitions:
    """Watches one scheduler from its beginning.

    Args:
        called: what one of vLLM's requests is called in events.
        guard: makes a wrapper safe for an engine that must not suffer from being watched.
    """

    def __init__(
        self,
        scheduler: Any,
        *,
        called: Callable[[Any], str] = attrgetter("request_id"),
        guard: Callable[[Wrapper], Wrapper] = lambda wrapper: wrapper,
    ) -> None:
        self._called = called
        self._needy: Any = None
        """The running request whose need for blocks is being met: whoever is preempted meanwhile is so for its sake."""
        self._request: Any = None
        """Whose blocks are being taken."""
        self._running: Any = None
        """vLLM's word for a running request, once seen."""
        self._batch = Batch([], [], [])
        """The last one that was launched: as a rule the next one, too."""
        self._hits = 0
        self._head: tuple[int, ...] = ()
        self._tail: tuple[int, ...] = ()
        self._block_size = scheduler.block_size
        pool = scheduler.kv_cache_manager.block_pool
        self._free = pool.free_block_queue
        self.begin()
        manager = scheduler.kv_cache_manager
        manager.allocate_slots = self._watch_allocations(manager.allocate_slots, guard)
        for target, name, wrapper in (
            (scheduler, "schedule", self._schedule),
            (scheduler, "update_from_output", self._update_from_output),
            (scheduler, "_preempt_request", self._preempt),
            (scheduler, "_free_request", self._free_request),
            (manager, "free", self._free_blocks_of),
            (manager, "reset_prefix_cache", self._reset_prefix_cache),
            (pool, "touch", self._touch),
            (pool, "get_new_blocks", self._get_new_blocks),
            (pool, "cache_full_blocks", self._cache_full_blocks),
            (self._free, "prepend_n", self._prepend),
            (self._free, "append_n", self._append),
        ):
            if hasattr(target, name):
                setattr(target, name, guard(wrapper)(getattr(target, name)))

    def begin(self) -> None:
        """Forget everything: from here on it is as if the scheduler were new. Nothing may be live, nothing cached."""
        self.steps = 0
        self.finished: dict[str, int] = {}
        """Where in `_events` each `finished` stands whose version spans are still to come."""
        self._events: list[ev.Event | Launch | Landing | Decode] = []
        self._flights: deque[Flight] = deque()
        self._labels: dict[Any, int] = {}
        self._names = {block.block_id: place for place, block in enumerate(self._free.get_all_free_blocks())}

    def add(self, event: ev.Event) -> None:
        self._events.append(event)

    def report_spans(self, request_id: str, spans: Iterable[Any]) -> None:
        """Fill in what the front end reported of a request that has finished since `take`."""
        place = self.finished.pop(request_id)
        reported = tuple(ev.VersionSpan(span.version, span.start, span.end) for span in spans)
        finished = self._events[place]
        assert isinstance(finished, ev.Finished), finished
        self._events[place] = msgspec.structs.replace(finished, spans=reported)

    def take(self) -> list[ev.Event]:
        """What has happened since, event by event."""
        events: list[ev.Event] = []
        for said in self.take_short():
            events += said.events() if isinstance(said, Decode) else (said,)
        return events

    def take_short(self) -> list[ev.Event | Decode]:
        """The same, with steps in columns where that was made of them."""
        said, self._events, self.finished = self._events, [], {}
        return [note.event() if type(note) in (Launch, Landing) else note for note in said]  # type: ignore[union-attr]

    def hand_out(self, ids: list[str], rows: list[Sequence[int]], firsts: list[int]) -> bool:
        """Take note that each request was handed a row of tokens, from output index `first` on, and goes on, if with what was
        noted last that makes a step in columns; returns whether it did."""
        launch, landing = self._events[-2:] if len(self._events) > 1 else (None, None)
        if type(launch) is not Launch or type(landing) is not Landing:
            return False
        batch, tokens = landing.batch, landing.tokens
        one_each = launch.counts.count(1) == len(launch.counts) and rows == [[token] for token in tokens]
        if not one_each or ids != batch.ids or launch.names != batch.names:
            return False
        self._events[-2:] = [Decode(launch.step, landing.step, launch.names, launch.firsts, tokens, firsts)]
        return True

    # ---- one wrapper for each method: original -> what is called instead ----

    def _schedule(self, schedule: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self._needy = None
            self.steps += 1
            ids, counts = list(output.num_scheduled_tokens), list(output.num_scheduled_tokens.values())
            if ids != self._batch.ids:
                self._batch = self._batch_of([requests[id] for id in ids])
            batch = self._batch
            firsts = [request.num_computed_tokens - count for request, count in zip(batch.requests, counts, strict=True)]
            partial = [request.is_prefill_chunk for request in batch.requests]
            samplers = batch if True not in partial else self._batch_of([r for r in batch.requests if not r.is_prefill_chunk])
            self._flights.append(Flight(self.steps, samplers))
            self._events.append(Launch(self.steps, batch.names, firsts, counts))
            return output

        requests = schedule.__self__.requests  # type: ignore[attr-defined]
        return watched

    def _batch_of(self, requests: list[Any]) -> Batch:
        return Batch([request.request_id for request in requests], requests, [self._called(request) for request in requests])

    def _update_from_output(self, update: Callable[..., Any]) -> Callable[..., Any]:
        def watched(scheduler_output: Any, model_runner_output: Any) -> Any:
            step, samplers = self._flights.popleft()
            sampled, place = model_runner_output.sampled_token_ids, model_runner_output.req_id_to_index
            rows = [sampled[place[id]] for id in samplers.ids if id in place]
            tokens = [row[0] for row in rows if len(row) == 1]
            statuses = [request.status for request in samplers.requests]
            if len(rows) == len(tokens) == len(statuses) == statuses.count(self._running):
                self._events.append(Landing(step, samplers, tokens))
            else:
                self._land(step, samplers, sampled, place)
            return update(scheduler_output, model_runner_output)

        return watched

    def _land(self, step: int, samplers: Batch, rows: Sequence[Sequence[int]], place: dict[str, int]) -> None:
        """A landing in which a request is missing, or samples more or less than a token. Of one that ended meanwhile no row is read."""
        named = list(zip(samplers.requests, samplers.names, strict=True))
        live = [(request, name) for request, name in named if not request.is_finished()]
        sampled = [ev.Sampled(name, token) for request, name in live for token in rows[place[request.request_id]]]
        self._events.append(ev.Landed(step=step, sampled=tuple(sampled)))
        for request, name in named:
            if request.is_finished():
                why: Literal["aborted", "finished"] = "aborted" if request.status.name == "FINISHED_ABORTED" else "finished"
                self._events.append(ev.Dropped(step=step, request=name, why=why))

    def _preempt(self, preempt: Callable[..., Any]) -> Callable[..., Any]:
        def watched(request: Any, *args: Any, **kwargs: Any) -> Any:
            needy = None if self._needy is None else self._called(self._needy)
            self._events.append(ev.Preempted(request=self._called(request), by=needy))
            return preempt(request, *args, **kwargs)

        return watched

    def _free_request(self, free: Callable[..., Any]) -> Callable[..., Any]:
        def watched(request: Any, *args: Any, **kwargs: Any) -> Any:
            self._batch = Batch([], [], [])  # its id may come again, for another one
            self.finished[self._called(request)] = len(self._events)
            self._events.append(
                ev.Finished(
                    request=self._called(request),
                    reason=str(request.get_finished_reason()),  # type: ignore[arg-type]
                    prompt_tokens=request.num_prompt_tokens,
                    output_tokens=request.num_output_tokens,
                    spans=(),
                )
            )
            return free(request, *args, **kwargs)

        return watched

    def _watch_allocations(self, allocate: Callable[..., Any], guard: Callable[[Wrapper], Wrapper]) -> Callable[..., Any]:
        """Called for each request in each step: the usual case does next to nothing, and nothing that could fail."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            self._request = args[0] if args else None
            if getattr(self._request, "status", None) is self._running is not None:
                self._needy = self._request
                return allocate(*args, **kwargs)
            return unusual(*args, **kwargs)

        unusual = guard(self._admit)(allocate)
        return watched

    def _admit(self, allocate: Callable[..., Any]) -> Callable[..., Any]:
        def watched(request: Any, *args: Any, **kwargs: Any) -> Any:
            if request.status.name == "RUNNING":
                self._running, self._needy = request.status, request
                return allocate(request, *args, **kwargs)
            self._needy, self._hits = None, 0
            blocks = allocate(request, *args, **kwargs)
            if blocks is not None:
                computed = self._hits * self._block_size
                self._events.append(ev.Admitted(request=self._called(request), life=request.num_preemptions + 1, computed=computed))
            return blocks

        return watched

    def _touch(self, touch: Callable[..., Any]) -> Callable[..., Any]:
        def watched(blocks: Sequence[Any]) -> Any:
            if blocks:
                self._hits = len(blocks)
                self._events.append(ev.Hit(request=self._called(self._request), blocks=self._ids(blocks)))
            return touch(blocks)

        return watched

    def _get_new_blocks(self, get: Callable[..., Any]) -> Callable[..., Any]:
        def watched(count: int) -> Any:
            hashed = self._hashed_at_head(count)
            blocks = get(count)
            if blocks:
                self._events.append(ev.Allocated(request=self._called(self._request), blocks=self._ids(blocks), evicted=hashed))
            return blocks

        return watched

    def _hashed_at_head(self, count: int) -> tuple[int, ...]:
        """Which of the first `count` free blocks have a hash, that they are about to lose."""
        hashed = []
        block = self._free.fake_free_list_head.next_free_block
        for _ in range(count):
            if block.block_hash is not None:
                hashed.append(self._names[block.block_id])
            block = block.next_free_block
        return tuple(hashed)

    def _cache_full_blocks(self, cache: Callable[..., Any]) -> Callable[..., Any]:
        def watched(request: Any, blocks: Sequence[Any], num_cached_blocks: int, num_full_blocks: int, *args: Any, **kwargs: Any) -> Any:
            result = cache(request, blocks, num_cached_blocks, num_full_blocks, *args, **kwargs)
            if stored := blocks[num_cached_blocks:num_full_blocks]:
                pairs = tuple((self._names[block.block_id], self._label(block.block_hash)) for block in stored)
                self._events.append(ev.Stored(request=self._called(request), blocks=pairs))
            return result

        return watched

    def _label(self, block_hash: Any) -> int:
        return self._labels.setdefault(block_hash, len(self._labels))

    def _free_blocks_of(self, free: Callable[..., Any]) -> Callable[..., Any]:
        def watched(request: Any) -> Any:
            held = any(manager.get_block_ids(request.request_id))
            self._head = self._tail = ()
            result = free(request)
            if held:
                self._events.append(ev.Freed(request=self._called(request), head=self._head, tail=self._tail))
            return result

        manager = free.__self__  # type: ignore[attr-defined]
        return watched

    def _prepend(self, prepend: Callable[..., Any]) -> Callable[..., Any]:
        def watched(blocks: Sequence[Any]) -> Any:
            self._head = self._ids(blocks)
            return prepend(blocks)

        return watched

    def _append(self, append: Callable[..., Any]) -> Callable[..., Any]:
        def watched(blocks: Sequence[Any]) -> Any:
            self._tail = self._ids(blocks)
            return append(blocks)

        return watched

    def _reset_prefix_cache(self, reset: Callable[..., Any]) -> Callable[..., Any]:
        def watched() -> Any:
            self._needy = None
            success = reset()
            empty = not pool.cached_block_hash_to_block._cache and pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
            self._events.append(ev.Cleared(tier="device", success=success, empty=empty))
            return success

        pool = reset.__self__.block_pool  # type: ignore[attr-defined]
        return watched

    def _ids(self, blocks: Iterable[Any]) -> tuple[int, ...]:
        return tuple([self._names[block.block_id] for block in blocks])


def name_of(request: Any) -> str:
    """What the client calls a request to whose id something was appended after a dash, so that an id used again is another's."""
    return request.request_id.rpartition("-")[0]
