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

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]
"""A method of vLLM's to what is called instead."""


class Flight(NamedTuple):
    """A step that was launched and has not landed."""

    step: int
    samplers: list[Any]
    """vLLM's requests for which it samples a token, in scheduling order; they may end meanwhile."""


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
        self._need: str | None = None
        """The running request whose need for blocks is being met: whoever is preempted meanwhile is so for its sake."""
        self._request: str = ""
        """Whose blocks are being taken, published or released."""
        self._hits = 0
        self._head: tuple[int, ...] = ()
        self._tail: tuple[int, ...] = ()
        self._block_size = scheduler.block_size
        pool = scheduler.kv_cache_manager.block_pool
        self._free = pool.free_block_queue
        self.begin()
        for target, name, wrapper in (
            (scheduler, "schedule", self._schedule),
            (scheduler, "update_from_output", self._update_from_output),
            (scheduler, "_preempt_request", self._preempt),
            (scheduler, "_free_request", self._free_request),
            (scheduler.kv_cache_manager, "allocate_slots", self._allocate_slots),
            (scheduler.kv_cache_manager, "free", self._free_blocks_of),
            (scheduler.kv_cache_manager, "reset_prefix_cache", self._reset_prefix_cache),
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
        self._events: list[ev.Event] = []
        self._flights: deque[Flight] = deque()
        self._labels: dict[Any, int] = {}
        self._names = {block.block_id: place for place, block in enumerate(self._free.get_all_free_blocks())}

    def add(self, event: ev.Event) -> None:
        self._events.append(event)

    def report_spans(self, request_id: str, spans: Iterable[Any]) -> None:
        """Fill in what the front end reported of a request that has finished since `take`."""
        place = self.finished.pop(request_id)
        reported = tuple(ev.VersionSpan(span.version, span.start, span.end) for span in spans)
        self._events[place] = msgspec.structs.replace(self._events[place], spans=reported)

    def take(self) -> list[ev.Event]:
        events, self._events, self.finished = self._events, [], {}
        return events

    # ---- one wrapper for each method: original -> what is called instead ----

    def _schedule(self, schedule: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self._need = None
            self.steps += 1
            scheduled = [(requests[id], count) for id, count in output.num_scheduled_tokens.items()]
            batch = tuple(ev.Scheduled(self._called(request), request.num_computed_tokens - count, count) for request, count in scheduled)
            self._flights.append(Flight(self.steps, [request for request, _ in scheduled if not request.is_prefill_chunk]))
            self._events.append(ev.Launched(step=self.steps, batch=batch))
            return output

        requests = schedule.__self__.requests  # type: ignore[attr-defined]
        return watched

    def _update_from_output(self, update: Callable[..., Any]) -> Callable[..., Any]:
        def watched(scheduler_output: Any, model_runner_output: Any) -> Any:
            step, samplers = self._flights.popleft()
            tokens, row = model_runner_output.sampled_token_ids, model_runner_output.req_id_to_index
            sampled = [
                ev.Sampled(self._called(request), token)
                for request in samplers
                if not request.is_finished()
                for token in tokens[row[request.request_id]]
            ]
            self._events.append(ev.Landed(step=step, sampled=tuple(sampled)))
            for request in samplers:
                if request.is_finished():
                    why: Literal["aborted", "finished"] = "aborted" if request.status.name == "FINISHED_ABORTED" else "finished"
                    self._events.append(ev.Dropped(step=step, request=self._called(request), why=why))
            return update(scheduler_output, model_runner_output)

        return watched

    def _preempt(self, preempt: Callable[..., Any]) -> Callable[..., Any]:
        def watched(request: Any, *args: Any, **kwargs: Any) -> Any:
            self._events.append(ev.Preempted(request=self._called(request), by=self._need))
            return preempt(request, *args, **kwargs)

        return watched

    def _free_request(self, free: Callable[..., Any]) -> Callable[..., Any]:
        def watched(request: Any, *args: Any, **kwargs: Any) -> Any:
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

    def _allocate_slots(self, allocate: Callable[..., Any]) -> Callable[..., Any]:
        def watched(request: Any, *args: Any, **kwargs: Any) -> Any:
            self._request = self._called(request)
            if request.status.name == "RUNNING":
                self._need = self._request
                return allocate(request, *args, **kwargs)
            self._need, self._hits = None, 0
            blocks = allocate(request, *args, **kwargs)
            if blocks is not None:
                computed = self._hits * self._block_size
                self._events.append(ev.Admitted(request=self._request, life=request.num_preemptions + 1, computed=computed))
            return blocks

        return watched

    def _touch(self, touch: Callable[..., Any]) -> Callable[..., Any]:
        def watched(blocks: Sequence[Any]) -> Any:
            if blocks:
                self._hits = len(blocks)
                self._events.append(ev.Hit(request=self._request, blocks=self._ids(blocks)))
            return touch(blocks)

        return watched

    def _get_new_blocks(self, get: Callable[..., Any]) -> Callable[..., Any]:
        def watched(count: int) -> Any:
            hashed = self._hashed_at_head(count)
            blocks = get(count)
            if blocks:
                self._events.append(ev.Allocated(request=self._request, blocks=self._ids(blocks), evicted=hashed))
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
            self._need = None
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
