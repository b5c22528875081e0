"""Situations of KV: hit, evicted, shared, copied to the host, or left from before an update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from harness.coverage.family import Facts, Family
from harness.events import (
    Admitted,
    Allocated,
    Cleared,
    Committed,
    Finished,
    Freed,
    Hit,
    Landed,
    Launched,
    Loaded,
    Offloaded,
    PartReceived,
    Preempted,
    Received,
    Relabelled,
    Stored,
    UpdateFailed,
)
from harness.operations import ResetPrefixCache
from harness.replay import NEVER, Request


class Cache(Family):
    def __init__(self, facts: Facts, reached: Callable[[str], None]) -> None:
        super().__init__(facts, reached)
        self._idle = True
        """The call at hand has taken nobody's blocks."""

    def before_received(self, seq: int, event: Received) -> None:
        self._idle = True

    def before_hit(self, seq: int, event: Hit) -> None:
        replay, blocks = self.replay, self.replay.blocks
        request = replay.requests.get(event.request)
        written = [blocks.written.get(block, []) for block in event.blocks]
        self.reached("prefix-hit")
        if any(blocks.references.get(block) for block in event.blocks):
            self.reached("prefix-shared-while-running")
        if any(NEVER in slots for slots in written):
            self.reached("prefix-shared-in-one-step")
        if any(NEVER < at < replay.epoch_starts[-1] for slots in written for at in slots):
            self.reached("prefix-hit-on-older-epoch")
        if request is not None and request.preemptions:
            self.reached("hit-after-preemption")
        writers = [blocks.owners.get(block) for block in event.blocks]
        if any(writer is not None and writer.finished is not None and writer.finished.reason == "abort" for writer in writers):
            self.reached("hit-on-block-of-aborted")

    def before_allocated(self, seq: int, event: Allocated) -> None:
        if event.evicted:
            self.reached("eviction")

    def before_stored(self, seq: int, event: Stored) -> None:
        if any(label in self.replay.blocks.groups for _, label in event.blocks):
            self.reached("equal-blocks")

    def before_freed(self, seq: int, event: Freed) -> None:
        if self._shares(event.request):
            self.reached("block-shared-at-free")

    def before_preempted(self, seq: int, event: Preempted) -> None:
        self._idle = False
        if event.by is None and self._shares(event.request):
            self.reached("clear-of-shared-blocks")

    def before_cleared(self, seq: int, event: Cleared) -> None:
        if not event.success:
            self.reached("reset-refused")
        elif self._idle and isinstance(self.facts.operation, ResetPrefixCache):
            self.reached("reset-of-idle")

    def _shares(self, id: str) -> bool:
        """Whether a request holds a block that another one holds too."""
        request, references = self.replay.requests.get(id), self.replay.blocks.references
        return request is not None and any(references.get(block, 0) > 1 for block in request.blocks)


class HostTier(Family):
    def before_allocated(self, seq: int, event: Allocated) -> None:
        blocks = self.replay.blocks
        if not event.evicted or not blocks.host_count:
            return
        kept = {copy.label for copy in blocks.host.values()}
        for block in event.evicted:
            label = blocks.labels.get(block)
            if label is not None and (label in kept or blocks.groups[label].keys() - set(event.evicted)):
                self.reached("evicted-with-copy")

    def before_offloaded(self, seq: int, event: Offloaded) -> None:
        self.reached("offloaded")
        if any(slot in self.replay.blocks.host for _, slot in event.blocks):
            self.reached("copy-replaced")

    def before_loaded(self, seq: int, event: Loaded) -> None:
        replay, copies = self.replay, self.replay.blocks.host
        request = replay.requests.get(event.request)
        self.reached("loaded")
        if request is not None and request.hits:
            self.reached("loaded-behind-hits")
        if request is not None and request.preemptions:
            self.reached("loaded-after-preemption")
        if any(at < replay.epoch_starts[-1] for slot, _ in event.blocks if slot in copies for at in copies[slot].written):
            self.reached("loaded-older-epoch")

    def before_cleared(self, seq: int, event: Cleared) -> None:
        if event.success and event.tier == "host" and self.replay.blocks.host:
            self.reached("clear-of-copies")


class _Unfilled(NamedTuple):
    """A block of a request that older weights had begun when the epoch rose."""

    block: int
    end: int
    """Its last position plus one."""


class Boundaries(Family):
    """When the epoch rises, notes whom that may concern; they are looked for in the steps after it, until each was seen."""

    def __init__(self, facts: Facts, reached: Callable[[str], None]) -> None:
        super().__init__(facts, reached)
        self._epoch = 0
        self._crossing: set[Request] = set()
        """Those with tokens of earlier weights or of an earlier label."""
        self._stale: set[Request] = set()
        """Those that hold KV of older weights."""
        self._unfilled: dict[Request, _Unfilled] = {}
        self._half_prefilled: set[Request] = set()

    def after_part_received(self, seq: int, event: PartReceived) -> None:
        self._look_for_boundary()

    def after_update_failed(self, seq: int, event: UpdateFailed) -> None:
        self._look_for_boundary()

    def _look_for_boundary(self) -> None:
        replay = self.replay
        if replay.epoch == self._epoch:
            return
        self._epoch = replay.epoch
        self._note_crossing()
        self._half_prefilled.update(self.facts.half_prefilled)
        size = replay.blocks.size
        for request in replay.running.values():
            if request.oldest_write != NEVER:
                self._stale.add(request)
            index, begun = divmod(request.computed, size)
            if begun and index < len(request.blocks):
                self._unfilled[request] = _Unfilled(request.blocks[index], (index + 1) * size)

    def after_committed(self, seq: int, event: Committed) -> None:
        self._note_crossing()

    def after_relabelled(self, seq: int, event: Relabelled) -> None:
        self._note_crossing()

    def _note_crossing(self) -> None:
        self._crossing.update(request for request in self.replay.live() if request.output)

    def after_hit(self, seq: int, event: Hit) -> None:
        if self._epoch:
            self._stale.add(self.replay.requests[event.request])

    def after_admitted(self, seq: int, event: Admitted) -> None:
        request = self.replay.requests[event.request]
        if not event.computed and request.weights is not None and request.weights.epoch < self._epoch:
            self.reached("recomputed-by-new-weights")

    def after_launched(self, seq: int, event: Launched) -> None:
        if self._stale:
            self._look_for_stale_kv(self.replay.flights[event.step].requests)
        if self._unfilled or self._half_prefilled:
            self._look_for_mixtures(event)

    def _look_for_stale_kv(self, samplers: Iterable[Request]) -> None:
        replay = self.replay
        for request in samplers:
            if request not in self._stale:
                continue
            self._stale.remove(request)
            if NEVER < request.oldest_write < replay.epoch_starts[-1]:
                self.reached("token-over-stale-kv")
                if len({epoch for block in request.blocks for epoch in replay.kv_epochs(block) if epoch is not None}) > 2:
                    self.reached("kv-of-three-epochs")

    def _look_for_mixtures(self, event: Launched) -> None:
        for id, _, _ in event.batch:
            if (request := self.replay.requests.get(id)) is None:
                continue
            if request in self._half_prefilled:
                self._half_prefilled.remove(request)
                self.reached("chunked-prefill-across-boundary")
            unfilled = self._unfilled.get(request)
            if unfilled is not None and request.computed >= unfilled.end:
                del self._unfilled[request]
                if unfilled.block in request.blocks:
                    self.reached("block-filled-across-boundary")

    def steady_for(self, requests: Sequence[Request]) -> int:
        looked_for = (self._crossing, self._stale, self._unfilled, self._half_prefilled)
        return super().steady_for(requests) if all(map(lambda some: some.isdisjoint(requests), map(set, looked_for))) else 0

    def after_landed(self, seq: int, event: Landed) -> None:
        if not self._crossing:
            return
        for id, _ in event.sampled:
            request = self.replay.requests.get(id)
            if request is not None and request in self._crossing and len(request.output) - 1 == request.sampled_by[-1][0] > 0:
                self._crossing.remove(request)
                self._crossed(request)

    def _crossed(self, request: Request) -> None:
        """Its last token is the first by other weights, or under another label."""
        (_, before), (_, after) = request.sampled_by[-2:]
        if before.epoch != after.epoch:
            self.reached("request-across-boundary")
        elif before.version != after.version:
            self.reached("request-under-two-labels")
        if before.epoch != after.epoch and len({weights.epoch for _, weights in request.sampled_by}) > 2:
            self.reached("request-across-two-boundaries")

    def before_preempted(self, seq: int, event: Preempted) -> None:
        self._forget_kv(event.request)

    def before_finished(self, seq: int, event: Finished) -> None:
        self._forget_kv(event.request)
        if (request := self.replay.requests.get(event.request)) is not None:
            self._crossing.discard(request)

    def _forget_kv(self, id: str) -> None:
        if (request := self.replay.requests.get(id)) is not None:
            self._stale.discard(request)
            self._half_prefilled.discard(request)
            self._unfilled.pop(request, None)
