"""Coverage: which situations a log reaches, how often, and at which event first.

A few watchers, one for each family of situations.py, see the log go by in the way that invariants
do, beside the same replay. They judge nothing, so they take any log; what happens in every step
costs them next to nothing, because most of them only look where something was about to change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from harness.client import ClientView
from harness.events import (
    Accepted,
    Admitted,
    Allocated,
    Answered,
    Asleep,
    Awake,
    Blocked,
    Cleared,
    Closed,
    Committed,
    Dropped,
    Entry,
    Event,
    Finished,
    Freed,
    Hit,
    Landed,
    Launched,
    Loaded,
    Mode,
    Offloaded,
    PartReceived,
    PauseEffective,
    PausePending,
    Preempted,
    Received,
    Relabelled,
    Resumed,
    Returned,
    StepFailed,
    Stored,
    UpdateFailed,
    UpdateStarted,
)
from harness.invariants.invariant import Hook, Watcher
from harness.invariants.judge import interleave
from harness.operations import (
    Abort,
    FinishWeightUpdate,
    IsPaused,
    Operation,
    Pause,
    ResetPrefixCache,
    Resume,
    Sleep,
    Spoil,
    StartWeightUpdate,
    Submit,
    SwapWeights,
    UpdateWeights,
    UpdateWeightVersion,
    WakeUp,
    WeightSource,
)
from harness.replay import DROPPED, NEVER, Replay, Request
from harness.situations import SITUATIONS


class Sighting(NamedTuple):
    """That a situation came about: how often, and the number of the first event that showed it."""

    count: int
    first: int


Coverage = Mapping[str, Sighting]
"""The situations that were reached, in the order of `SITUATIONS`."""


def merged(coverages: Iterable[Coverage]) -> Coverage:
    """What several logs of one run reached together."""
    found: dict[str, Sighting] = {}
    for coverage in coverages:
        for name, (count, first) in coverage.items():
            before = found.get(name, Sighting(0, first))
            found[name] = Sighting(before.count + count, min(before.first, first))
    return {name: found[name] for name in SITUATIONS if name in found}


class Situations(Watcher[Replay]):
    """Counts the situations that a log reaches.

    Alone it replays the log that it is fed: `Situations().feed(entries)`. Beside a judge it watches that
    one's replay, which saves a second one: `judge.add_watcher(situations)`, made as `Situations(judge.replay)`.
    """

    def __init__(self, replay: Replay | None = None) -> None:
        super().__init__(Replay() if replay is None else replay)
        self._counts = dict.fromkeys(SITUATIONS, 0)
        self._first: dict[str, int] = {}
        facts = _Facts(self.replay)
        self._watchers: list[Watcher[Replay]] = [facts, *(family(facts, self._reached) for family in _FAMILIES)]
        self._alone = interleave(self.replay, [self]) if replay is None else None

    @property
    def counts(self) -> dict[str, int]:
        """How often each situation was reached that was, in the order of `SITUATIONS`."""
        return {name: count for name, count in self._counts.items() if count}

    @property
    def coverage(self) -> Coverage:
        """A copy of what was found so far."""
        return {name: Sighting(count, self._first[name]) for name, count in self._counts.items() if count}

    def feed(self, entries: Iterable[Entry]) -> None:
        """Take in the next entries of the log.

        Raises:
            RuntimeError: it was made beside another's replay.
        """
        if self._alone is None:
            raise RuntimeError("these situations watch the replay of a judge: feed that judge")
        replay, hooks = self.replay, self._alone
        for seq, _, _, event in entries:
            replay.seq = seq
            for hook in hooks[type(event)]:
                hook(seq, event)

    def hooks(self, when: str) -> Iterator[tuple[type[Event], Hook]]:
        for watcher in self._watchers:
            yield from watcher.hooks(when)

    def steady_for(self, requests: Sequence[Request]) -> int:
        return min(watcher.steady_for(requests) for watcher in self._watchers)

    def _reached(self, name: str) -> None:
        self._counts[name] += 1
        self._first.setdefault(name, self.replay.seq)


class ClientSituations(Watcher[ClientView]):
    """Counts the situations that come about in front of an engine's core, which never hears of them.

    It watches the view of a judge: `judge.add_watcher(ClientSituations(judge.replay))`.
    """

    def __init__(self, replay: ClientView) -> None:
        super().__init__(replay)
        self.coverage: dict[str, Sighting] = {}
        """What was found so far."""

    def before_answered(self, seq: int, event: Answered) -> None:
        call = self.replay.calls.get(event.call)
        if call is None or call.taken_up or event.error is None or event.error.code != "invalid" or not isinstance(call.operation, Submit):
            return
        twin = any(request.submit.id == call.operation.id and request.call != call.number for request in self.replay.live.values())
        name = "live-id-refused" if twin else "request-refused"
        count, first = self.coverage.get(name, (0, seq))
        self.coverage[name] = Sighting(count + 1, first)


class _Facts(Watcher[Replay]):
    """What several families ask about."""

    def __init__(self, replay: Replay) -> None:
        super().__init__(replay)
        self.operation: Operation | None = None
        """Of the call that is being carried out; None between calls."""
        self.half_prefilled: set[Request] = set()
        """Those that hold a part of their prompt's KV, or after a preemption of their tokens', and no step samples for yet."""
        self._op = NEVER
        self._admitted: list[Request] = []

    def before_received(self, seq: int, event: Received) -> None:
        call = self.replay.calls.get(event.op)
        self._op, self.operation = event.op, call.operation if call is not None else None

    def after_returned(self, seq: int, event: Returned) -> None:
        if event.op == self._op:
            self.operation = None

    def after_admitted(self, seq: int, event: Admitted) -> None:
        self._admitted.append(self.replay.requests[event.request])

    def after_launched(self, seq: int, event: Launched) -> None:
        self.operation = None
        if self._admitted or self.half_prefilled:
            self.half_prefilled.update(self._admitted)
            self.half_prefilled.difference_update(self.replay.flights[event.step].requests)
            self._admitted.clear()

    def after_preempted(self, seq: int, event: Preempted) -> None:
        self.half_prefilled.discard(self.replay.requests[event.request])

    def after_finished(self, seq: int, event: Finished) -> None:
        if (request := self.replay.requests.get(event.request)) is not None:
            self.half_prefilled.discard(request)


class _Family(Watcher[Replay]):
    """Base of the families."""

    def __init__(self, facts: _Facts, reached: Callable[[str], None]) -> None:
        super().__init__(facts.replay)
        self.facts = facts
        self.reached = reached
        """Counts a situation, by name, at the event at hand."""

    def outcome(self, event: Returned) -> tuple[Operation | None, str]:
        """The operation that an answer is for, and the code that it was refused with; empty if it was not."""
        call = self.replay.calls.get(event.op)
        return call.operation if call is not None else None, event.error.code if event.error is not None else ""


class _Pauses(_Family):
    def __init__(self, facts: _Facts, reached: Callable[[str], None]) -> None:
        super().__init__(facts, reached)
        self._met_live = False
        """The pending calls met a live request."""
        self._kept = False
        """The pause that is effective kept the cache."""
        self._was_paused = False

    def before_received(self, seq: int, event: Received) -> None:
        self._was_paused = self.replay.pause_mode is not None
        if isinstance(self.facts.operation, IsPaused) and self.replay.pause_pending:
            self.reached("is-paused-while-pending")

    def before_pause_pending(self, seq: int, event: PausePending) -> None:
        replay = self.replay
        if replay.pause_mode is not None:
            self.reached(f"{event.mode}-over-{'pending' if replay.pause_pending else 'paused'}-{replay.pause_mode}")
        if replay.flights:
            self.reached("pause-over-step-in-flight")
        if event.mode == "wait":
            self._wait_for()
        self._met_live = (self._met_live and replay.pause_pending) or bool(replay.running or replay.waiting)

    def _wait_for(self) -> None:
        for request in self.replay.waiting.values():
            state = "parked" if request.parked else "preempted" if request.status == "preempted" else "waiting"
            self.reached(f"wait-for-{state}")
        if self.replay.running and self.replay.stopped_since != NEVER:
            self.reached("wait-for-frozen")
        if self.facts.half_prefilled:
            self.reached("wait-for-half-prefilled")

    def before_pause_effective(self, seq: int, event: PauseEffective) -> None:
        replay = self.replay
        self.reached(f"{event.mode}-pause-{'cleared' if event.clear_cache else 'kept'}" if self._met_live else "empty-pause")
        if len(replay.pauses) > 1:
            self.reached("pause-joined")
            if len({call.clear_cache for call in replay.pauses.values()}) > 1:
                self.reached("clear-asked-by-one")
        if event.clear_cache and self._kept:
            self.reached("clear-after-kept")
        if any(request.status == "preempted" and request.at_preemption != request.at_reset for request in replay.waiting.values()):
            self.reached("preempted-while-paused")
        self._kept = not event.clear_cache

    def before_resumed(self, seq: int, event: Resumed) -> None:
        if self.replay.pause_pending:
            self.reached(f"resume-over-pending-{self.replay.pause_mode}")
        self._kept = False

    def before_returned(self, seq: int, event: Returned) -> None:
        match self.outcome(event):
            case Pause(), "superseded" if isinstance(self.facts.operation, Pause | Sleep):
                self.reached("pause-superseded")
            case Pause(mode="wait"), "conflict" if self.replay.update_open:
                self.reached("wait-in-session")
            case Pause(mode="wait"), "out-of-service":
                self.reached("wait-out-of-service")
            case Resume(), "conflict" if self.replay.update_open:
                self.reached("resume-in-session")
            case Resume(), "out-of-service":
                self.reached("resume-out-of-service")
            case Resume(), "" if not self._was_paused:
                self.reached("resume-while-running")
            case _:
                pass

    def before_closed(self, seq: int, event: Closed) -> None:
        if event.why == "paused":
            self.reached("left-paused")


class _Sleeps(_Family):
    def __init__(self, facts: _Facts, reached: Callable[[str], None]) -> None:
        super().__init__(facts, reached)
        self._met_live: dict[int, Mode] = {}
        """Sleep calls that met live requests, with the mode that they asked for themselves."""

    def after_received(self, seq: int, event: Received) -> None:
        replay, operation = self.replay, self.facts.operation
        asleep = replay.sleep_level is not None
        match operation:
            case Sleep(mode=None) if replay.pause_mode is not None:
                self.reached("sleep-joins-pending" if replay.pause_pending else "sleep-joins-pause")
            case Sleep() if replay.running or replay.waiting:
                self._met_live[event.op] = replay.calls[event.op].mode or "abort"
            case Pause() if asleep:
                self.reached("pause-asleep")
            case Submit() if asleep:
                self.reached("late-request-asleep")
            case _:
                pass

    def before_finished(self, seq: int, event: Finished) -> None:
        if self.replay.sleep_level is not None:
            self.reached("abort-asleep")

    def before_cleared(self, seq: int, event: Cleared) -> None:
        if "kv_cache" in self.replay.asleep and event.tier == "device" and isinstance(self.facts.operation, ResetPrefixCache):
            self.reached("reset-asleep")

    def before_asleep(self, seq: int, event: Asleep) -> None:
        replay, level = self.replay, self.replay.sleep_level
        self.reached(f"asleep-at-level-{event.level}")
        if level is not None:
            self.reached("sleep-deeper" if event.level > level else "sleep-again")
        if replay.waiting or replay.running:
            self.reached("sleep-over-frozen")
        for op in replay.pauses:
            if op in self._met_live:
                self.reached(f"sleep-by-{self._met_live[op]}")

    def before_awake(self, seq: int, event: Awake) -> None:
        replay = self.replay
        if event.tags:
            self.reached("partial-wake")
        elif replay.pause_asked:
            self.reached("wake-keeps-pause")
        if replay.sleep_level == DROPPED and "weights" in replay.asleep and "weights" not in event.tags:
            self.reached("woke-without-weights")

    def before_resumed(self, seq: int, event: Resumed) -> None:
        match self.facts.operation:
            case WakeUp():
                self.reached("wake-ends-pause")
            case FinishWeightUpdate() | SwapWeights():
                self.reached("update-ends-pause")
            case _:
                pass

    def before_committed(self, seq: int, event: Committed) -> None:
        if "kv_cache" in self.replay.asleep:
            self.reached("update-while-cache-sleeps")

    def before_returned(self, seq: int, event: Returned) -> None:
        replay = self.replay
        match self.outcome(event):
            case Sleep(), "superseded":
                self.reached("sleep-superseded")
            case Sleep(), "conflict" if replay.update_open:
                self.reached("sleep-in-session")
            case WakeUp(), "" if not self._woke(event):
                self.reached("wake-of-awake")
            case ((StartWeightUpdate() | SwapWeights()), "conflict") if "weights" in replay.asleep:
                self.reached("start-asleep")
            case Resume(), "conflict" if replay.sleep_level is not None and not replay.update_open:
                self.reached("resume-asleep")
            case Pause(mode="wait"), "conflict" if replay.sleep_level is not None and not replay.update_open:
                self.reached("wait-asleep")
            case _:
                pass

    def _woke(self, event: Returned) -> bool:
        call = self.replay.calls[event.op]
        return self.replay.awake_since > call.taken_up


class _HostTier(_Family):
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


class _LateRequests(_Family):
    def before_accepted(self, seq: int, event: Accepted) -> None:
        if event.parked:
            self._came("queued")

    def before_blocked(self, seq: int, event: Blocked) -> None:
        self._came("blocked")

    def before_returned(self, seq: int, event: Returned) -> None:
        match self.outcome(event):
            case Submit(), "rejected":
                self._came("rejected")
            case _:
                pass

    def _came(self, became: str) -> None:
        replay = self.replay
        if replay.out_of_service:
            self.reached(f"late-request-{became}-out-of-service")
        elif replay.pause_mode is not None:
            self.reached(f"late-request-{became}-under-{replay.pause_mode}")
        if replay.pause_pending:
            self.reached("late-request-while-pending")


class _Aborts(_Family):
    def before_received(self, seq: int, event: Received) -> None:
        operation, requests = self.facts.operation, self.replay.requests
        if not isinstance(operation, Abort) or operation.ids == "all":
            return
        if any((request := requests.get(id)) is None or request.finished is not None for id in operation.ids):
            self.reached("abort-of-nobody")

    def before_finished(self, seq: int, event: Finished) -> None:
        replay = self.replay
        request = replay.requests.get(event.request)
        if event.reason != "abort" or request is None or request.finished is not None:
            return
        for where in self._where(request):
            self.reached(where)
        if replay.pause_pending and isinstance(self.facts.operation, Abort):
            self.reached("abort-while-pending")
        if replay.update_open:
            self.reached("abort-in-session")
        if replay.out_of_service:
            self.reached("abort-out-of-service")

    def _where(self, request: Request) -> Iterator[str]:
        half_prefilled = request in self.facts.half_prefilled
        if request.status != "running":
            yield f"abort-of-{'parked' if request.parked else request.status}"
        elif self.replay.stopped_since != NEVER or self.replay.out_of_service:
            yield "abort-of-frozen"
        elif not half_prefilled:
            yield "abort-of-running"
        if half_prefilled:
            yield "abort-mid-prefill"


class _Scheduling(_Family):
    def __init__(self, facts: _Facts, reached: Callable[[str], None]) -> None:
        super().__init__(facts, reached)
        self._victims: set[Request] = set()
        """Those that lost their blocks to pressure."""
        self._counted: set[Request] = set()
        """Those half-prefilled that were counted."""

    def after_launched(self, seq: int, event: Launched) -> None:
        half_prefilled = self.facts.half_prefilled
        if not (half_prefilled or self._counted):
            return
        for _ in half_prefilled - self._counted:
            self.reached("chunked-prefill")
        self._counted = half_prefilled.copy()

    def after_pause_effective(self, seq: int, event: PauseEffective) -> None:
        if self.facts.half_prefilled:
            self.reached("chunked-prefill-across-pause")

    def before_preempted(self, seq: int, event: Preempted) -> None:
        request = self.replay.requests.get(event.request)
        if request is None:
            return
        if event.by is not None:
            self._lost_to_pressure(request, event.by)
        elif isinstance(self.facts.operation, ResetPrefixCache):
            self.reached("reset-with-frozen")
        else:
            self.reached("clear-with-frozen")
            if request in self.facts.half_prefilled:
                self.reached("chunked-prefill-across-pause")

    def _lost_to_pressure(self, request: Request, by: str) -> None:
        self.reached("preempted-by-itself" if by == request.id else "preempted-by-pressure")
        if request in self._victims:
            self.reached("preempted-twice")
        self._victims.add(request)
        if request in self.facts.half_prefilled:
            self.reached("preempted-mid-prefill")
        if request.placeholders:
            self.reached("preempted-in-flight")
        if self.replay.pause_pending:
            self.reached("preempted-while-pending")


class _Cache(_Family):
    def __init__(self, facts: _Facts, reached: Callable[[str], None]) -> None:
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


class _Unfilled(NamedTuple):
    """A block of a request that older weights had begun when the epoch rose."""

    block: int
    end: int
    """Its last position plus one."""


class _Boundaries(_Family):
    """When the epoch rises, notes whom that may concern; they are looked for in the steps after it, until each was seen."""

    def __init__(self, facts: _Facts, reached: Callable[[str], None]) -> None:
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


class _Sessions(_Family):
    def __init__(self, facts: _Facts, reached: Callable[[str], None]) -> None:
        super().__init__(facts, reached)
        self._parts: set[int] = set()
        """Of the open session."""
        self._of = 0
        self._sources: list[WeightSource] = []
        """Where the open session's parts came from."""
        self._resident: WeightSource | None = WeightSource(original=True)
        """Where the resident weights came from; None if from several places, or if that is not known."""
        self._earlier: list[WeightSource] = []
        self._labels: set[str] = set()
        """Labels that were resident, the one that is now left out."""

    def before_update_started(self, seq: int, event: UpdateStarted) -> None:
        self._parts, self._of, self._sources = set(), 0, []

    def before_part_received(self, seq: int, event: PartReceived) -> None:
        self._parts.add(event.part)
        self._of = event.of
        if isinstance(self.facts.operation, UpdateWeights | SwapWeights) and self.facts.operation.source not in self._sources:
            self._sources.append(self.facts.operation.source)
        if self._beside_steps:
            self.reached("update-beside-steps")

    @property
    def _beside_steps(self) -> bool:
        return self.replay.update_unpaused and self.replay.pause_mode is None

    def before_launched(self, seq: int, event: Launched) -> None:
        if self.replay.update_open and self.replay.update_wrote:
            self.reached("step-during-update")

    def before_update_failed(self, seq: int, event: UpdateFailed) -> None:
        if event.phase == "update":
            self._refused(event)
        if event.phase == "finish" and not event.wrote:
            self.reached("empty-finish-failed")
        elif event.phase != "update" or event.wrote:
            self.reached(f"update-failed-in-{event.phase}")
        if event.wrote:
            self._now_resident(None)
            if self._beside_steps:
                self.reached("update-failed-beside-steps")

    def _refused(self, event: UpdateFailed) -> None:
        match self.facts.operation:
            case UpdateWeights(source=WeightSource(spoil=Spoil() as spoil)) | SwapWeights(source=WeightSource(spoil=Spoil() as spoil)):
                self.reached(f"refused-for-{spoil.how}")
                self.reached("tensor-refused-half-way" if event.wrote else "tensor-refused")
            case _:
                pass

    def before_committed(self, seq: int, event: Committed) -> None:
        if self.replay.out_of_service:
            self.reached("back-in-service")
        if len(self._parts) > 1:
            self.reached("update-in-parts")
        self._note_label(event.version, again="same-version-again", returned="version-returned")
        if not self._parts:
            self.reached("commit-without-weights")
            return
        source = self._sources[0] if len(self._parts) == self._of and len(self._sources) == 1 else None
        if source is not None and source == self._resident:
            self.reached("same-weights-again")
        elif source in self._earlier:
            self.reached("weights-returned")
        self._now_resident(source)

    def _now_resident(self, source: WeightSource | None) -> None:
        if self._resident is not None and self._resident != source and self._resident not in self._earlier:
            self._earlier.append(self._resident)
        self._resident = source

    def _note_label(self, label: str, *, again: str | None = None, returned: str | None = None) -> None:
        resident = self.replay.weights.version
        if (name := again if label == resident else returned if label in self._labels else None) is not None:
            self.reached(name)
        self._labels.add(resident)

    def before_relabelled(self, seq: int, event: Relabelled) -> None:
        self.reached("version-without-weights")
        self._note_label(event.version)

    def before_returned(self, seq: int, event: Returned) -> None:
        replay = self.replay
        match self.outcome(event):
            case StartWeightUpdate() | SwapWeights(), "conflict" if replay.pause_pending:
                self.reached("start-while-pending")
            case StartWeightUpdate() | SwapWeights(), "conflict" if replay.update_open:
                self.reached("start-in-session")
            case StartWeightUpdate() | SwapWeights(), "conflict" if replay.pause_mode is None:
                self.reached("start-while-running")
            case UpdateWeights(), "conflict":
                self.reached("update-without-session")
            case UpdateWeights(), "invalid":
                self.reached("update-cut-otherwise")
            case FinishWeightUpdate(), "conflict":
                self.reached("partial-update-refused" if replay.update_open else "finish-without-session")
            case UpdateWeightVersion(), "conflict":
                self.reached("version-refused")
            case _:
                pass

    def before_closed(self, seq: int, event: Closed) -> None:
        if event.why == "out-of-service":
            self.reached("stays-out-of-service")


class _Ends(_Family):
    def __init__(self, facts: _Facts, reached: Callable[[str], None]) -> None:
        super().__init__(facts, reached)
        self._max_tokens: dict[str, int] = {}

    def before_accepted(self, seq: int, event: Accepted) -> None:
        self._taken_on(event.request)

    def before_blocked(self, seq: int, event: Blocked) -> None:
        self._taken_on(event.request)

    def _taken_on(self, id: str) -> None:
        if isinstance(self.facts.operation, Submit):
            self._max_tokens[id] = self.facts.operation.max_tokens
        if (former := self.replay.requests.get(id)) is not None and former.finished is not None:
            self.reached("id-used-again")

    def before_finished(self, seq: int, event: Finished) -> None:
        if event.reason == "stop":
            self.reached("finished-by-stop")
        elif event.reason == "length":
            short = event.output_tokens < self._max_tokens.get(event.request, 0)
            self.reached("finished-by-max-model-len" if short else "finished-by-length")

    def before_returned(self, seq: int, event: Returned) -> None:
        match self.outcome(event):
            case Submit(id=id), "invalid":
                request = self.replay.requests.get(id)
                self.reached("live-id-refused" if request is not None and request.finished is None else "request-refused")
            case _:
                pass

    def before_step_failed(self, seq: int, event: StepFailed) -> None:
        self.reached("step-failed")

    def before_dropped(self, seq: int, event: Dropped) -> None:
        self.reached(f"token-dropped-{event.why}")


_FAMILIES: tuple[type[_Family], ...] = (
    _Pauses,
    _Sleeps,
    _LateRequests,
    _Aborts,
    _Scheduling,
    _Cache,
    _HostTier,
    _Boundaries,
    _Sessions,
    _Ends,
)
