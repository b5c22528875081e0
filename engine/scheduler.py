"""Who runs in the next step: queues, token budget, chunked prefill, prefix hits and preemption.

Follows vLLM V1's scheduler, first come first served; R12 to R25 name the
scheduler rules. Pausing shows here only as *parked* requests, which are not
admitted: whether a step is made at all is the core's decision.

A step may be scheduled while the one before it is in flight. A token in flight is
scheduled like one that is known: it has a placeholder, and its position is counted.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from .blocks import BlockPool, Taken
from .config import EngineConfig
from .host_tier import BlockCopy, HostTier
from .observer import Observer
from .outputs import FinishReason
from .request import Request, RequestStatus


class ScheduledTokens(NamedTuple):
    """A request's share of a step: `num_tokens` tokens from position `first` on."""

    request: Request
    first: int
    num_tokens: int
    samples: bool
    """Whether the share reaches the request's last token; a partial prefill samples nothing."""
    life: int
    """The request's life at that time: 1, 2 after its first preemption, ..."""

    @property
    def end(self) -> int:
        """Position after its last token: that of the token that it samples."""
        return self.first + self.num_tokens


class Scheduler:
    """The queues of one engine and the pool that its requests hold blocks of."""

    def __init__(self, config: EngineConfig, *, eos_token_ids: tuple[int, ...], observer: Observer) -> None:
        self.config = config
        self.eos_token_ids = eos_token_ids
        self.pool = BlockPool(config.num_blocks)
        self.host = HostTier(config.host_blocks)
        self.requests: dict[str, Request] = {}
        """Every live or blocked request by id, in order of submission."""
        self.running: list[Request] = []
        """In order of admission."""
        self.waiting: deque[Request] = deque()
        """Head first. Preempted requests stand at the front and parked ones at the end."""
        self.blocked: list[Request] = []
        self.num_preemptions = 0
        """Of all requests since the engine began."""
        self.num_looked_up_tokens = 0
        """Of all requests, when first admitted with prefix caching on, since the engine began."""
        self.num_hit_tokens = 0
        """Those of them whose KV was in a tier of the cache."""
        self._copies: list[BlockCopy] = []
        self._observer = observer

    @property
    def has_work(self) -> bool:
        """Whether a request is running or may be admitted; with a step in flight, all may have to wait for it."""
        return bool(self.running) or (bool(self.waiting) and not self.waiting[0].parked)

    @property
    def has_live_requests(self) -> bool:
        return bool(self.running or self.waiting)

    # ---- requests come and go ----

    def add(self, request: Request, *, parked: bool) -> None:
        """Accept a request at the end of the queue (R3)."""
        self.requests[request.request_id] = request
        request.status, request.parked = RequestStatus.WAITING, parked
        self.waiting.append(request)
        self._observer.accepted(request.request_id, parked=parked)

    def block(self, request: Request) -> None:
        """Hold a request in front of the queue, not accepted, until `accept_blocked`."""
        self.requests[request.request_id] = request
        request.status = RequestStatus.BLOCKED
        self.blocked.append(request)
        self._observer.blocked(request.request_id)

    def accept_blocked(self) -> None:
        blocked, self.blocked = self.blocked, []
        for request in blocked:
            self.add(request, parked=False)

    def unpark(self) -> None:
        for request in self.waiting:
            request.parked = False

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request in whatever state it is, and let go of its blocks; their digests stay findable (R20, R23)."""
        match request.status:
            case RequestStatus.RUNNING:
                self.running.remove(request)
            case RequestStatus.WAITING | RequestStatus.PREEMPTED:
                self.waiting.remove(request)
            case RequestStatus.BLOCKED:
                self.blocked.remove(request)
            case RequestStatus.FINISHED:
                raise AssertionError(f"{request} ended twice")
        del self.requests[request.request_id]
        request.status, request.finish_reason = RequestStatus.FINISHED, reason
        self._observer.finished(
            request.request_id,
            reason=reason,
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=request.num_output_tokens,
            spans=request.weight_versions,
        )
        self._free(request)

    # ---- one step ----

    def schedule(self) -> list[ScheduledTokens]:
        """Compose the next step: running requests first, then admissions in order (R12 to R18).

        Blocks are taken and digests published here, before the forward pass that fills them; the caller must
        carry out `take_copies`, launch that pass over the whole batch, then call `land` for each share that samples.

        Returns:
            Nothing if all wait for tokens in flight, or had to give way.
        """
        several = len(self.running) + len(self.waiting) > 1
        limit = self.config.max_num_batched_tokens
        if several and self.config.long_prefill_token_threshold:
            limit = min(limit, self.config.long_prefill_token_threshold)
        num_waiting = len(self.waiting)
        batch = self._schedule_running(limit)
        if len(self.waiting) == num_waiting:  # otherwise a request was preempted: what it gave back is not for newcomers
            batch += self._admit(limit, budget=self.config.max_num_batched_tokens - sum(share.num_tokens for share in batch))
        for share in batch:
            share.request.num_computed_tokens += share.num_tokens
            share.request.num_output_placeholders += share.samples
        return batch

    def take_copies(self) -> list[BlockCopy]:
        """What the step that was scheduled last needs copied between the tiers before it runs, in this order."""
        copies, self._copies = self._copies, []
        return copies

    def land(self, share: ScheduledTokens, token_id: int, *, version: str) -> FinishReason | None:
        """Record what a share sampled for a request that is live, and end the request if it is through (R20).

        A request that was preempted since the launch gets its token where it waits.

        Args:
            version: label of the weights that sampled the token.

        Returns:
            The finish reason, None where the request goes on.
        """
        request = share.request
        if share.life == _life(request):
            request.num_output_placeholders -= 1
            assert request.num_output_placeholders >= 0, request
        request.append(token_id, version=version)
        if request.status is RequestStatus.RUNNING:
            self._publish(request, covered=request.num_computed_tokens - request.num_output_placeholders)
        reason = self._finish_reason(request)
        if reason is not None:
            self.finish(request, reason)
        return reason

    def preempt_all(self) -> None:
        """Take every running request's blocks back, last first, so that they wait in their running order (R25)."""
        while self.running:
            self._preempt(self.running.pop(), by=None)

    def _schedule_running(self, limit: int) -> list[ScheduledTokens]:
        batch: list[ScheduledTokens] = []
        budget = self.config.max_num_batched_tokens
        index = 0
        while budget and index < len(self.running):
            request = self.running[index]
            index += 1
            if request.num_output_placeholders and self._ends_in_flight(request):
                continue
            first = request.num_computed_tokens
            count = min(request.num_expected_tokens - first, limit, budget)
            num_new = max(0, self._blocks_for(first + count) - len(request.blocks))
            if not self._make_room(request, num_new):
                break
            self._grow(request, num_new, covered=first + count)
            batch.append(_share(request, first, count))
            budget -= count
        return batch

    def _make_room(self, request: Request, num_new: int) -> bool:
        """Preempt from the end of running until there are blocks for `request`; False if it had to give way itself (R14)."""
        while num_new > self.pool.num_free:
            victim = self.running.pop()
            self._preempt(victim, by=request)
            if victim is request:
                return False
        return True

    def _admit(self, limit: int, *, budget: int) -> list[ScheduledTokens]:
        """Move requests from waiting to running; the first that does not fit whole ends it: nobody overtakes (R11, R16)."""
        batch: list[ScheduledTokens] = []
        while budget and self.waiting and not self.waiting[0].parked and len(self.running) < self.config.max_num_seqs:
            request = self.waiting[0]
            hits, copies = self._lookup(request)
            needed = self._blocks_for(request.num_tokens) - len(hits) + self.pool.num_idle(hits)
            if needed > self.pool.num_free:
                break
            first = (len(hits) + len(copies)) * self.config.block_size
            count = min(request.num_tokens - first, limit, budget)
            self.waiting.popleft()
            self._start_life(request, hits, copies, covered=first + count)
            batch.append(_share(request, first, count))
            budget -= count
        return batch

    def _lookup(self, request: Request) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Cached blocks of the request's prefix, and slots of the host tier that go on from there.

        At least the request's last token is left to compute (R9).
        """
        if not self.config.prefix_caching:
            return (), ()
        most = (request.num_tokens - 1) // self.config.block_size
        digests = request.digests.first(most, request.token_ids)
        hits = self.pool.find(digests)
        return hits, self.host.find(digests[len(hits) :])

    def _start_life(self, request: Request, hits: tuple[int, ...], copies: tuple[int, ...], *, covered: int) -> None:
        """Admit a request that has a prefix in the blocks `hits`, and more of it in the host's slots `copies`."""
        assert not request.blocks and not request.num_computed_tokens and not request.num_output_placeholders, request
        if hits:
            self.pool.claim(hits)
            self._observer.hit(request.request_id, hits)
        request.blocks = list(hits)
        request.num_registered_blocks = len(hits)
        request.num_computed_tokens = (len(hits) + len(copies)) * self.config.block_size
        if self.config.prefix_caching and not request.num_preemptions:
            self.num_looked_up_tokens += request.num_tokens
            self.num_hit_tokens += request.num_computed_tokens
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        self._grow(request, self._blocks_for(covered) - len(hits), covered=covered, copies=copies)
        self._observer.admitted(request.request_id, life=_life(request), num_computed_tokens=request.num_computed_tokens)

    def _grow(self, request: Request, num_new: int, *, covered: int, copies: tuple[int, ...] = ()) -> None:
        """Give a request blocks, the first of them with what the host's slots `copies` hold, and publish those that its
        first `covered` tokens fill (R5, R8)."""
        if num_new:
            taken = self.pool.take(num_new)
            request.blocks += taken.blocks
            self._observer.allocated(request.request_id, taken.blocks, evicted=taken.evicted)
            self._offload(taken, keep=copies)
            self._load(request, copies, taken.blocks)
        self._publish(request, covered=covered)

    def _offload(self, taken: Taken, *, keep: tuple[int, ...]) -> None:
        """Copy evicted blocks to the host, unless their contents are still to be had from another block or a copy."""
        offloaded = []
        for block, digest in taken.withdrawn if self.config.host_blocks else ():
            if digest not in self.pool and digest not in self.host and (slot := self.host.offload(digest, keep=keep)) is not None:
                offloaded.append((block, slot))
        if offloaded:
            self._copies += [BlockCopy("host", block, slot) for block, slot in offloaded]
            self._observer.offloaded(tuple(offloaded))

    def _load(self, request: Request, copies: tuple[int, ...], blocks: tuple[int, ...]) -> None:
        """Copy the host's slots `copies` into the first of `blocks`."""
        if copies:
            loaded = tuple(zip(copies, blocks, strict=False))
            self._copies += [BlockCopy("device", block, slot) for slot, block in loaded]
            self.host.use(copies)
            self._observer.loaded(request.request_id, loaded)

    def _publish(self, request: Request, *, covered: int) -> None:
        """Publish the blocks that the first `covered` tokens fill, as far as these are known (R8)."""
        num_full = min(covered, request.num_tokens) // self.config.block_size
        if not self.config.prefix_caching or num_full <= request.num_registered_blocks:
            return
        new = slice(request.num_registered_blocks, num_full)
        stored = tuple(zip(request.blocks[new], request.digests.first(num_full, request.token_ids)[new], strict=True))
        for block, digest in stored:
            self.pool.register(block, digest)
        request.num_registered_blocks = num_full
        self._observer.stored(request.request_id, stored)

    def _preempt(self, request: Request, *, by: Request | None) -> None:
        """Send a request, already taken off running, to the front of waiting (R15)."""
        assert request.status is RequestStatus.RUNNING, request
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = request.num_output_placeholders = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(request)
        self._observer.preempted(request.request_id, by=by.request_id if by else None)
        self._free(request)

    def _free(self, request: Request) -> None:
        if not request.blocks:
            return
        released = self.pool.release(request.blocks)
        request.blocks = []
        request.num_registered_blocks = 0
        self._observer.freed(request.request_id, head=released.head, tail=released.tail)

    def _finish_reason(self, request: Request) -> FinishReason | None:
        if request.token_ids[-1] in self.eos_token_ids and not request.params.ignore_eos:
            return "stop"
        if request.num_tokens >= self.config.max_model_len or request.num_output_tokens >= request.params.max_tokens:
            return "length"
        return None

    def _ends_in_flight(self, request: Request) -> bool:
        """Whether a token in flight is the request's last one, whatever it is."""
        num_output_tokens = request.num_output_tokens + request.num_output_placeholders
        return request.num_expected_tokens >= self.config.max_model_len or num_output_tokens >= request.params.max_tokens

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)


def _life(request: Request) -> int:
    return request.num_preemptions + 1


def _share(request: Request, first: int, num_tokens: int) -> ScheduledTokens:
    return ScheduledTokens(request, first, num_tokens, first + num_tokens == request.num_expected_tokens, _life(request))
