"""Queues, token budget, chunked prefill, preemption: who computes what in a step.

Scheduler rules R3 and R8 to R25, on a `BlockPool` and, where there is one, a `HostTier`. The scheduler knows of pauses only
what concerns it: whether it may admit, how many tokens it may schedule, and which waiting
requests are parked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from harness.events import (
    Admitted,
    Allocated,
    Cleared,
    Delivered,
    Dropped,
    Event,
    Finished,
    FinishReason,
    Freed,
    Hit,
    Landed,
    Loaded,
    Offloaded,
    Output,
    Preempted,
    Sampled,
    Scheduled,
    Stored,
)
from harness.model.flight import Flight
from harness.model.host import Content, HostTier
from harness.model.labels import ContentLabels
from harness.model.pool import BlockPool
from harness.model.profile import Profile
from harness.model.request import Request
from harness.model.shape import Shape


class Draft:
    """A step that is being composed."""

    __slots__ = ("batch", "epoch", "events", "left", "limit", "samplers")

    def __init__(self, events: list[Event], *, epoch: int, limit: int, left: int) -> None:
        self.events = events
        self.epoch = epoch
        self.limit = limit
        """Tokens that one request may have."""
        self.left = left
        """Tokens that the step may still take."""
        self.batch: list[Scheduled] = []
        self.samplers: list[Request] = []
        """Those of the batch that sample a token, in the same order."""


class Scheduler:
    """Every method that changes something appends the events that tell of it to `events`."""

    __slots__ = (
        "_block_size",
        "_caching",
        "_eos",
        "_labels",
        "_lone_uncut",
        "_publishes_late",
        "_reports_spans",
        "_seats",
        "_step_tokens",
        "_threshold",
        "host",
        "pool",
        "running",
        "unreported",
        "waiting",
    )

    def __init__(self, shape: Shape, *, profile: Profile, eos_token_ids: tuple[int, ...]) -> None:
        self._block_size = shape.block_size
        self._seats = shape.max_num_seqs
        self._step_tokens = shape.max_num_batched_tokens
        self._threshold = shape.long_prefill_token_threshold
        self._caching = shape.prefix_caching
        self._publishes_late = shape.prefix_caching and shape.async_scheduling
        """A block is launched before the last of its tokens is known: it may be left to publish when that one lands."""
        self._lone_uncut = profile.lone_request_uncut
        self._reports_spans = profile.reports_spans
        self._eos = eos_token_ids
        self._labels = ContentLabels()
        unlabelled_to = "head" if shape.prefix_caching else profile.uncached_freed_to
        self.pool = BlockPool(shape.num_blocks, block_size=shape.block_size, unlabelled_to=unlabelled_to)
        self.host = HostTier(shape.host_blocks)
        self.running: list[Request] = []
        """In order of admission."""
        self.waiting: deque[Request] = deque()
        """Preempted ones first, parked ones last."""
        self.unreported = False
        """R4: a request ended since the last step was composed."""

    def has_runnable(self, *, admit: bool) -> bool:
        """Whether a step would schedule anything."""
        return bool(self.running) or (admit and bool(self.waiting) and not self.waiting[0].parked)

    def enqueue(self, request: Request) -> None:
        self.waiting.append(request)

    def unpark(self) -> None:
        """Whoever waits may be admitted."""
        for request in self.waiting:
            request.parked = False

    # A step: compose, then, when the forward pass has ended, record.

    def compose(self, events: list[Event], *, epoch: int, admit: bool, frozen: bool) -> Draft:
        """R12 to R18. The step's batch, empty if nothing can be computed before a step in flight has landed.

        Args:
            events: gets what happens to queues and blocks.
            epoch: of the weights that will compute the batch's KV entries.
            admit: whether waiting requests may be admitted.
            frozen: nothing may be scheduled; the step only tells that requests ended.
        """
        self.unreported = False
        draft = Draft(events, epoch=epoch, limit=self._request_limit(), left=0 if frozen else self._step_tokens)
        nobody_preempted = self._continue_running(draft)
        if admit and nobody_preempted:
            self._admit_waiting(draft)
        return draft

    def _request_limit(self) -> int:
        """R12: how many tokens of the step one request may have. A request alone is not cut."""
        alone = self._lone_uncut and len(self.running) + len(self.waiting) <= 1
        return self._step_tokens if alone or not self._threshold else self._threshold

    def _continue_running(self, draft: Draft) -> bool:
        """R13: running requests in turn, each with what it lacks. False if anyone was preempted.

        A token that a step in flight will sample is computed like a known one, unless it will be the request's last.
        """
        size = self._block_size
        seated = len(self.running)
        # Preemption takes requests from the end of the list that this loop walks: never the one at hand, unless it is the last.
        for request in self.running:
            if draft.left <= 0:
                break
            due = len(request.tokens)
            if request.placeholders:
                due += request.placeholders
                if due >= request.length_limit:
                    continue
            count = min(due - request.computed, draft.limit, draft.left)
            end = request.computed + count
            if end > len(request.blocks) * size and not self._grow(request, end, draft.events):
                break
            self._schedule(request, count, draft)
        return len(self.running) == seated

    def _grow(self, request: Request, end: int, events: list[Event]) -> bool:
        """R10 and R14: blocks up to token `end`, at the cost of the last running ones. False if it was the last itself."""
        wanted = -(-end // self._block_size) - len(request.blocks)
        while wanted > len(self.pool.free):
            victim = self.running[-1]
            self.preempt(victim, by=request.id, events=events)
            if victim is request:
                return False
        self._take(request, wanted, events)
        return True

    def _admit_waiting(self, draft: Draft) -> None:
        """R16: the first of waiting, until one does not fit, and nobody overtakes.

        None of them has a token in flight: a step that preempted admits nobody, and until the next
        one is composed the step that was in flight then has landed.
        """
        size = self._block_size
        while draft.left > 0 and self.waiting and not self.waiting[0].parked and len(self.running) < self._seats:
            request = self.waiting[0]
            hits, copies = self._cached_prefix(request)
            # R11 (a): the whole sequence must fit. (b), that this step's part of it fits, follows: the part is no longer.
            wanted = -(-len(request.tokens) // size) - len(hits)
            if wanted + self.pool.idle_among(hits) > len(self.pool.free):
                return
            self.waiting.popleft()
            self.running.append(request)
            request.status, request.computed = "running", (len(hits) + len(copies)) * size
            admitted = Admitted(request=request.id, life=request.num_preemptions + 1, computed=request.computed)
            count = min(len(request.tokens) - request.computed, draft.limit, draft.left)
            self._claim(request, hits, draft.events)
            self._take(request, -(-(request.computed + count) // size) - len(hits), draft.events, loading=copies)
            self._load(request, copies, request.blocks[len(hits) :], draft.events)
            self._schedule(request, count, draft)
            draft.events.append(admitted)

    def _schedule(self, request: Request, count: int, draft: Draft) -> None:
        """Its next `count` tokens, for which it has blocks, are computed in this step."""
        first = request.computed
        end = request.computed = first + count
        known = len(request.tokens)
        full = end if end < known else known
        if full // self._block_size > request.published:
            self._publish(request, full, draft.events)
        self.pool.write(request.blocks, first, count, draft.epoch)
        draft.left -= count
        draft.batch.append(Scheduled(request.id, first, count))
        if end == known + request.placeholders:
            request.placeholders += 1
            draft.samplers.append(request)

    def record(self, events: list[Event], sample: Callable[[str, int], int], flight: Flight) -> list[Request]:
        """R18 to R20: a step has landed, and its samplers get their tokens; returns the requests that it ended.

        A request preempted since the launch gets its token where it waits; of one that has ended the token is dropped.

        Args:
            events: gets `landed` before all others.
            sample: gives the token at a position of a request, the prompt's first being 0.
            flight: the step.
        """
        sampled: list[Sampled] = []
        outputs: list[Output] = []
        dropped: list[Dropped] = []
        unsettled: list[tuple[Request, FinishReason | None]] = []
        eos, size, version, late = self._eos, self._block_size, flight.version, self._publishes_late
        for request in flight.samplers:
            if request.ended is not None:
                why = "aborted" if request.ended == "abort" else "finished"
                dropped.append(Dropped(step=flight.step, request=request.id, why=why))
                continue
            tokens = request.tokens
            position = len(tokens)
            token = sample(request.id, position)
            tokens.append(token)
            index = position - request.num_prompt_tokens
            if request.version != version:
                request.version = version
                request.span_starts.append((version, index))
            reason: FinishReason | None = None
            if token in eos and not request.ignore_eos:
                reason = "stop"
            elif position + 1 >= request.length_limit:
                reason = "length"
            if request.placeholders:
                request.placeholders -= 1
            if reason is not None or (late and (request.computed - request.placeholders) // size > request.published):
                unsettled.append((request, reason))
            sampled.append(Sampled(request.id, token))
            outputs.append(Output(request.id, index, (token,), reason))
        events.append(Landed(step=flight.step, sampled=tuple(sampled)))
        events += dropped
        self._settle(unsettled, events)
        if outputs:
            events.append(Delivered(outputs=tuple(outputs)))
        return [request for request, reason in unsettled if reason is not None]

    def _settle(self, requests: list[tuple[Request, FinishReason | None]], events: list[Event]) -> None:
        """What new tokens bring about, request by request: blocks that they filled are published, and some end a request."""
        for request, reason in requests:
            self._publish(request, request.computed - request.placeholders, events)
            if reason is not None:
                self.finish(request, reason, events)

    # What operations and preemption do to a request.

    def finish(self, request: Request, reason: FinishReason, events: list[Event]) -> None:
        """R20 and R23: it leaves its queue, and what it computed stays findable."""
        if request.status == "running":
            self.running.remove(request)
        elif request.status != "blocked":
            self.waiting.remove(request)
        request.ended = reason
        self.unreported = True
        events.append(
            Finished(
                request=request.id,
                reason=reason,
                prompt_tokens=request.num_prompt_tokens,
                output_tokens=request.num_output_tokens,
                spans=request.spans() if self._reports_spans else (),
            )
        )
        if request.blocks:
            self._release(request, events)

    def preempt(self, request: Request, *, by: str | None, events: list[Event]) -> None:
        """R15: the last running request gives its blocks back and waits before all others; its tokens are kept,
        and so is one that a step in flight will sample for it."""
        assert request is self.running[-1], f"{request.id} is preempted, but {self.running[-1].id} is the last running"
        self.running.pop()
        request.status, request.computed, request.placeholders, request.published = "preempted", 0, 0, 0
        request.num_preemptions += 1
        self.waiting.appendleft(request)
        events.append(Preempted(request=request.id, by=by))
        self._release(request, events)

    def clear_cache(self, events: list[Event]) -> None:
        """R25: preempt from the last running to the first, then forget every label."""
        while self.running:
            self.preempt(self.running[-1], by=None, events=events)
        self.pool.clear()
        events.append(Cleared(tier="device", success=True, empty=True))
        if self.host.num_slots:
            self.host.clear()
            events.append(Cleared(tier="host", success=True, empty=True))

    # Blocks.

    def _cached_prefix(self, request: Request) -> tuple[list[int], list[int]]:
        """R9: the longest run of cached blocks from its first, then that of host slots with copies of those that follow;
        at least one token is left to compute."""
        hits: list[int] = []
        copies: list[int] = []
        if not self._caching:
            return hits, copies
        for index in range((len(request.tokens) - 1) // self._block_size):
            if index == len(request.labels):
                label = self._labels.find(request.parent(index), request.block_tokens(index, self._block_size))
                if label is None:
                    break
                request.labels.append(label)
            label = request.labels[index]
            if not copies and (block := self.pool.find(label)) is not None:
                hits.append(block)
            elif (slot := self.host.find(label)) is not None:
                copies.append(slot)
            else:
                break
        return hits, copies

    def _claim(self, request: Request, hits: list[int], events: list[Event]) -> None:
        if not hits:
            return
        self.pool.claim(hits)
        request.blocks += hits
        request.published = len(hits)
        events.append(Hit(request=request.id, blocks=tuple(hits)))

    def _take(self, request: Request, count: int, events: list[Event], *, loading: Sequence[int] = ()) -> None:
        """R5: `count` blocks more; into the first of them the host slots `loading` will be read."""
        lost: dict[int, Content] = {}
        if self.host.num_slots:
            lost = {block: Content(label, tuple(self.pool.epochs[block])) for block, label in self.pool.next_evicted(count)}
        blocks, evicted = self.pool.take(count)
        request.blocks += blocks
        events.append(Allocated(request=request.id, blocks=blocks, evicted=evicted))
        if lost:
            self._offload(lost, loading, events)

    def _offload(self, lost: dict[int, Content], loading: Sequence[int], events: list[Event]) -> None:
        """Copy to the host what is neither there nor left on the device."""
        copied: list[tuple[int, int]] = []
        for block, content in lost.items():
            if self.pool.find(content.label) is not None or self.host.find(content.label) is not None:
                continue
            slot = self.host.keep(content, sparing=loading)
            if slot is not None:
                copied.append((block, slot))
        if copied:
            events.append(Offloaded(blocks=tuple(copied)))

    def _load(self, request: Request, copies: Sequence[int], blocks: Sequence[int], events: list[Event]) -> None:
        """Read host slots into the first of these blocks of the request."""
        if not copies:
            return
        loaded = tuple(zip(copies, blocks, strict=False))
        for slot, block in loaded:
            self.pool.epochs[block] = list(self.host.load(slot).epochs)
        events.append(Loaded(request=request.id, blocks=loaded))

    def _publish(self, request: Request, end: int, events: list[Event]) -> None:
        """R8: its blocks that are full once tokens up to `end`, all known, are computed by launched steps or the one at hand."""
        if not self._caching or end // self._block_size <= request.published:
            return
        stored: list[tuple[int, int]] = []
        for index in range(request.published, end // self._block_size):
            if index == len(request.labels):
                request.labels.append(self._labels.name(request.parent(index), request.block_tokens(index, self._block_size)))
            block, label = request.blocks[index], request.labels[index]
            self.pool.publish(block, label)
            stored.append((block, label))
        request.published += len(stored)
        events.append(Stored(request=request.id, blocks=tuple(stored)))

    def _release(self, request: Request, events: list[Event]) -> None:
        head, tail = self.pool.release(request.blocks)
        request.blocks = []
        events.append(Freed(request=request.id, head=head, tail=tail))
