"""Who runs in the next step: queues, token budget, chunked prefill, prefix hits and preemption.

Follows vLLM V1's scheduler, first come first served; R12 to R25 name the
scheduler rules. Pausing shows here only as *parked* requests, which are not
admitted: whether a step is made at all is the core's decision.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from .blocks import BlockPool
from .config import EngineConfig
from .observer import Observer
from .outputs import FinishReason
from .request import Request, RequestStatus


class ScheduledTokens(NamedTuple):
    """A request's share of a step: `num_tokens` tokens from position `first` on."""

    request: Request
    first: int
    num_tokens: int

    @property
    def samples(self) -> bool:
        """Whether the share reaches the request's last token; a partial prefill samples nothing."""
        return self.first + self.num_tokens == self.request.num_tokens


class Scheduler:
    """The queues of one engine and the pool that its requests hold blocks of."""

    def __init__(self, config: EngineConfig, *, eos_token_ids: tuple[int, ...], observer: Observer) -> None:
        self.config = config
        self.eos_token_ids = eos_token_ids
        self.pool = BlockPool(config.num_blocks)
        self.requests: dict[str, Request] = {}
        """Every live or blocked request by id, in order of submission."""
        self.running: list[Request] = []
        """In order of admission."""
        self.waiting: deque[Request] = deque()
        """Head first. Preempted requests stand at the front and parked ones at the end."""
        self.blocked: list[Request] = []
        self._observer = observer

    @property
    def has_work(self) -> bool:
        """Whether a request is running or may be admitted."""
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
        request.status = RequestStatus.FINISHED
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
        run that pass over the whole batch, then call `land`.
        """
        several = len(self.running) + len(self.waiting) > 1
        limit = self.config.max_num_batched_tokens
        if several and self.config.long_prefill_token_threshold:
            limit = min(limit, self.config.long_prefill_token_threshold)
        num_waiting = len(self.waiting)
        batch = self._schedule_running(limit)
        if len(self.waiting) == num_waiting:  # otherwise a request was preempted: what it gave back is not for newcomers
            batch += self._admit(limit, budget=self.config.max_num_batched_tokens - sum(share.num_tokens for share in batch))
        for request, _, num_tokens in batch:
            request.num_computed_tokens += num_tokens
        return batch

    def land(self, batch: Sequence[ScheduledTokens], token_ids: Sequence[int], *, version: str) -> list[FinishReason | None]:
        """Record what a step sampled, in scheduling order, and end the requests that are through (R20).

        Args:
            batch: the shares that sampled.
            token_ids: one token for each.
            version: label of the weights that sampled them.

        Returns:
            The finish reason of each request, None where it goes on.
        """
        reasons = []
        for (request, _, _), token_id in zip(batch, token_ids, strict=True):
            request.append(token_id, version=version)
            reason = self._finish_reason(request)
            if reason is not None:
                self.finish(request, reason)
            reasons.append(reason)
        return reasons

    def preempt_all(self) -> None:
        """Take every running request's blocks back, last first, so that they wait in their running order (R25)."""
        while self.running:
            self._preempt(self.running.pop(), by=None)

    def _schedule_running(self, limit: int) -> list[ScheduledTokens]:
        batch: list[ScheduledTokens] = []
        budget = self.config.max_num_batched_tokens
        while budget and len(batch) < len(self.running):
            request = self.running[len(batch)]
            first = request.num_computed_tokens
            count = min(request.num_tokens - first, limit, budget)
            num_new = max(0, self._blocks_for(first + count) - len(request.blocks))
            if not self._make_room(request, num_new):
                break
            self._grow(request, num_new, covered=first + count)
            batch.append(ScheduledTokens(request, first, count))
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
            hits = self._lookup(request)
            needed = self._blocks_for(request.num_tokens) - len(hits) + self.pool.num_idle(hits)
            if needed > self.pool.num_free:
                break
            first = len(hits) * self.config.block_size
            count = min(request.num_tokens - first, limit, budget)
            self.waiting.popleft()
            self._start_life(request, hits, covered=first + count)
            batch.append(ScheduledTokens(request, first, count))
            budget -= count
        return batch

    def _lookup(self, request: Request) -> tuple[int, ...]:
        """Cached blocks of the request's prefix; at least its last token is left to compute (R9)."""
        if not self.config.prefix_caching:
            return ()
        most = (request.num_tokens - 1) // self.config.block_size
        return self.pool.find(request.digests.first(most, request.token_ids))

    def _start_life(self, request: Request, hits: tuple[int, ...], *, covered: int) -> None:
        assert not request.blocks and request.num_computed_tokens == 0, request
        if hits:
            self.pool.claim(hits)
            self._observer.hit(request.request_id, hits)
        request.blocks = list(hits)
        request.num_registered_blocks = len(hits)
        request.num_computed_tokens = len(hits) * self.config.block_size
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        self._grow(request, self._blocks_for(covered) - len(hits), covered=covered)
        self._observer.admitted(request.request_id, life=request.num_preemptions + 1, num_computed_tokens=request.num_computed_tokens)

    def _grow(self, request: Request, num_new: int, *, covered: int) -> None:
        """Give a request blocks and publish those that its first `covered` tokens fill (R5, R8)."""
        if num_new:
            taken = self.pool.take(num_new)
            request.blocks += taken.blocks
            self._observer.allocated(request.request_id, taken.blocks, evicted=taken.evicted)
        num_full = covered // self.config.block_size
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
        request.num_computed_tokens = 0
        request.num_preemptions += 1
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

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)
