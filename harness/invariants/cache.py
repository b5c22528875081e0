"""The KV cache: no token attends to entries that should be gone, and every block has one owner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from harness.events import (
    Admitted,
    Allocated,
    Closed,
    Freed,
    Hit,
    Launched,
    Loaded,
    Offloaded,
    Opened,
    PartReceived,
    PauseEffective,
    Received,
    Returned,
    Stored,
    UpdateFailed,
)
from harness.invariants.invariant import Invariant, invariant, listed
from harness.operations import ResetPrefixCache
from harness.replay import NEVER, Replay, Request
from harness.stretch import Stretch


class _BlockInvariant(Invariant):
    """One that needs to know the shape of the KV pool."""

    @classmethod
    def unmet(cls, opened: Opened) -> str | None:
        missing = [name for name in ("num_blocks", "block_size") if not isinstance(opened.engine.get(name), int)]
        return super().unmet(opened) or (f"needs {' and '.join(missing)} of the engine in `opened`" if missing else None)


@invariant("cache-epoch", level=2)
class CacheEpoch(_BlockInvariant):
    """No token attends to a KV entry of an older epoch, on the device or come back from the host, unless every commit since
    that epoch was made under clear_cache=False, or unpaused as allow_unpaused asked for, and no reset was asked for since."""

    def __init__(self, replay: Replay) -> None:
        super().__init__(replay)
        self._promise = NEVER
        """Number of the last event that promised an empty cache, ..."""
        self._unallowed = NEVER
        """... and of the last first byte of an update that was neither made under a pause nor allowed without one."""
        self._horizon = NEVER
        """Entries written before this event are of an older epoch, and were to be gone."""

    def before_pause_effective(self, seq: int, event: PauseEffective) -> None:
        asked = any(call.clear_cache for call in self.replay.pauses.values())
        if event.clear_cache or asked:
            self._promise = seq

    def before_returned(self, seq: int, event: Returned) -> None:
        call = self.replay.calls.get(event.op)
        if call is not None and event.error is None and isinstance(call.operation, ResetPrefixCache):
            # Counted from when the core took the call up: a live client learns late, and entries written meanwhile are new.
            self._promise = max(self._promise, call.taken_up)
            self._move_horizon()

    def after_pause_effective(self, seq: int, event: PauseEffective) -> None:
        self._move_horizon()

    def after_part_received(self, seq: int, event: PartReceived) -> None:
        self._after_write(seq)

    def after_update_failed(self, seq: int, event: UpdateFailed) -> None:
        self._after_write(seq)

    def _after_write(self, seq: int) -> None:
        replay = self.replay
        if replay.epoch_starts[-1] == seq and replay.stopped_since == NEVER and not replay.update_unpaused:
            self._unallowed = seq
        self._move_horizon()

    def _move_horizon(self) -> None:
        # An entry is stale if it was written before both a promise and new weights: one event number tells. An update that
        # nobody allowed is both: no client has said that it wants old KV.
        self._horizon = min(max(self._promise, self._unallowed), self.replay.epoch_starts[-1])

    def after_hit(self, seq: int, event: Hit) -> None:
        if self._horizon == NEVER:
            return
        written = self.replay.blocks.written
        self._check_found(seq, event.request, [(f"hit block {block}", written.get(block, ())) for block in event.blocks], first=0)

    def after_loaded(self, seq: int, event: Loaded) -> None:
        if self._horizon == NEVER:
            return
        written = self.replay.blocks.written
        found = [(f"loaded the copy in slot {slot}", written.get(block, ())) for slot, block in event.blocks]
        self._check_found(seq, event.request, found, first=len(self.replay.requests[event.request].hits) - len(found))

    def _check_found(self, seq: int, id: str, found: Sequence[tuple[str, Sequence[int]]], *, first: int) -> None:
        """Blocks of KV that were there, from the request's block `first` on: what was done with each, and when it was written."""
        for index, (what, written) in enumerate(found, first):
            stale = [at for at in written if NEVER < at < self._horizon]
            if stale:
                request, position = self.replay.requests[id], index * self.replay.blocks.size
                self._stale(seq, request, f"{id} {what}, whose KV is stale", min(stale), position)
                return

    def after_launched(self, seq: int, event: Launched) -> None:
        if self._horizon == NEVER:
            return
        requests, horizon = self.replay.requests, self._horizon
        for id, _, _ in event.batch:
            request = requests.get(id)
            if request is not None and NEVER < request.oldest_write < horizon:
                self._stale(seq, request, f"step {event.step} of {id} attends to stale KV", request.oldest_write, self._position(request))

    def _position(self, request: Request) -> int:
        """Where the oldest entry that the request attends to stands."""
        blocks = self.replay.blocks
        for index, block in enumerate(request.blocks):
            if request.oldest_write in (slots := blocks.written.get(block, [])):
                return index * blocks.size + slots.index(request.oldest_write)
        return 0

    def _stale(self, seq: int, request: Request, sentence: str, written: int, position: int) -> None:
        replay = self.replay
        epoch, promised = replay.epoch_at(written), written < self._promise
        self.violated(
            seq,
            sentence,
            expected=f"entries of epoch {replay.epoch} only, as {'a clear was promised' if promised else 'no pause kept older ones'}",
            got=f"the entry at position {position} is of epoch {epoch}",
            cause=[
                (written, f"written in epoch {epoch}"),
                (self._promise, "an empty cache promised") if promised else (self._unallowed, "new weights without a pause"),
                (replay.epoch_starts[-1], f"first byte of epoch {replay.epoch}"),
            ],
            once=(request, request.preemptions),
        )


class Content(NamedTuple):
    """What a digest stands for: with the block before it, the whole prefix."""

    parent: int | None
    """Label of the block before it; None for a first block."""
    cache_salt: str | None
    """Of a first block; it reaches the others through their parents."""
    tokens: tuple[int, ...]

    def __str__(self) -> str:
        return f"tokens {listed(self.tokens)}, salt {self.cache_salt}, after label {self.parent}"


@invariant("block-lifetime", level=2)
class BlockLifetime(_BlockInvariant):
    """A block is held, cached or free, and only one; it can be hit only if the step that writes its KV is being
    composed or was launched; only the one that it was allocated to writes it, and nothing is written again once it can be
    hit; none leaks. A slot of the host tier holds the copy of a block that had just lost its digest, and a request loads the
    copies of its own contents only."""

    def __init__(self, replay: Replay) -> None:
        super().__init__(replay)
        self._contents: dict[int, Content] = {}
        """What each label stands for, ..."""
        self._steadily_filled: dict[int, tuple[Request, int, int | None]] = {}
        """... or where that is to be looked up: whose block has it, which of its blocks, and the label of the one before it."""
        self._readers: list[Request] = []
        """Requests with hits that no step has attended to yet."""
        self._unbacked: dict[int, tuple[int, Request]] = {}
        """Blocks published for the step that is being composed, which has to write them: since when, and for whom."""

    def before_allocated(self, seq: int, event: Allocated) -> None:
        blocks, id = self.replay.blocks, event.request
        references, labels = blocks.references, blocks.labels
        held: list[int] = []
        labelled: list[int] = []
        for block in event.blocks:
            if references.get(block):
                held.append(block)
            if block in labels:
                labelled.append(block)
        self._check_user(seq, id, "was given blocks")
        if held:
            holders = self.replay.holders(held[0])
            self.violated(
                seq,
                f"{id} was given block {held[0]} while it is held",
                expected="a free block",
                got=f"held by {listed(holders)}",
                once=held[0],
            )
        elif (head := tuple(islice(blocks.free, len(event.blocks)))) != event.blocks:
            self.violated(
                seq,
                f"{id} was given other blocks than the head of the free queue",
                expected=listed(head),
                got=listed(event.blocks),
            )
        if (labelled or event.evicted) and sorted(event.evicted) != sorted(labelled):
            self.violated(
                seq,
                f"blocks that {id} was given did not lose their digests",
                expected=f"evicted {listed(labelled)}",
                got=f"evicted {listed(event.evicted)}",
            )

    def _check_user(self, seq: int, id: str, what: str) -> None:
        request = self.replay.requests.get(id)
        if request is None or request.finished is not None or request.status == "blocked":
            state = "unknown" if request is None else request.status
            cause = [(request.ended, f"{id} finished")] if request is not None else []
            self.violated(seq, f"{id} {what} without being live", expected="a live request", got=f"{id}, {state}", cause=cause)

    def before_hit(self, seq: int, event: Hit) -> None:
        """A hit needs a digest, and the digest must stand for the request's own tokens."""
        replay, blocks = self.replay, self.replay.blocks
        request = replay.requests.get(event.request)
        self._check_user(seq, event.request, "hit blocks")
        if request is None:
            return
        parent = None
        for index, block in enumerate(event.blocks, start=len(request.blocks)):
            label = blocks.labels.get(block)
            if label is None:
                state = f"held by {listed(replay.holders(block))}" if blocks.references.get(block) else "free"
                self.violated(seq, f"{request.id} hit block {block}, which has no digest", expected="a cached or shared block", got=state)
                return
            if not self._check_found(seq, request, index, parent, label, f"hit block {block}"):
                return
            parent = label

    def _check_found(self, seq: int, request: Request, index: int, parent: int | None, label: int, what: str) -> bool:
        """Whether a digest that was found stands for block `index` of the request."""
        due = self._content(request, index, parent)
        if request.prompt is None or self._known(label, due) == due:
            return True
        self.violated(
            seq, f"{request.id} {what}, whose digest stands for other contents", expected=str(due), got=str(self._contents[label])
        )
        return False

    def _known(self, label: int, content: Content) -> Content:
        """What a label stands for: `content`, if it is a new one."""
        if (filled := self._steadily_filled.pop(label, None)) is not None:
            self._contents[label] = self._content(*filled)
        return self._contents.get(label, content)

    def before_offloaded(self, seq: int, event: Offloaded) -> None:
        blocks = self.replay.blocks
        for block, slot in event.blocks:
            if block not in blocks.evicted:
                self.violated(
                    seq,
                    f"block {block} was copied to the host without having just lost a digest",
                    expected=f"a block of {listed(blocks.evicted)}",
                    got=f"block {block}",
                )
            if slot not in range(blocks.host_count):
                self.violated(
                    seq,
                    f"block {block} was copied to a slot that the host tier does not have",
                    expected=f"a slot of 0 to {blocks.host_count - 1}",
                    got=str(slot),
                )

    def before_loaded(self, seq: int, event: Loaded) -> None:
        """A load needs a copy, of the contents that follow what the request has hit, and a block of the request to go to."""
        replay, blocks = self.replay, self.replay.blocks
        request = replay.requests.get(event.request)
        self._check_user(seq, event.request, "loaded blocks")
        if request is None:
            return
        first = len(request.hits)
        parent = blocks.labels.get(request.blocks[first - 1]) if first else None
        for index, (slot, block) in enumerate(event.blocks, first):
            copy = blocks.host.get(slot)
            if copy is None:
                self.violated(
                    seq, f"{request.id} loaded slot {slot}, which holds no copy", expected=f"a slot of {listed(blocks.host)}", got=str(slot)
                )
                return
            if request.blocks[index : index + 1] != [block]:
                self.violated(
                    seq,
                    f"{request.id} loaded slot {slot} into block {block}, where it does not belong",
                    expected=f"entry {index} of {listed(request.blocks)}",
                    got=f"block {block}",
                )
            if not self._check_found(seq, request, index, parent, copy.label, f"loaded slot {slot}"):
                return
            parent = copy.label

    def after_loaded(self, seq: int, event: Loaded) -> None:
        self._readers.append(self.replay.requests[event.request])

    def _content(self, request: Request, index: int, parent: int | None) -> Content:
        size = self.replay.blocks.size
        return Content(parent, None if index else request.cache_salt, request.tokens(index * size, (index + 1) * size))

    def after_hit(self, seq: int, event: Hit) -> None:
        self._readers.append(self.replay.requests[event.request])

    def before_stored(self, seq: int, event: Stored) -> None:
        replay, blocks = self.replay, self.replay.blocks
        request = replay.requests.get(event.request)
        self._check_user(seq, event.request, "published blocks")
        if request is None:
            return
        new: dict[int, int] = {}
        for block, label in event.blocks:
            if block not in request.blocks:
                self.violated(
                    seq,
                    f"{request.id} published block {block}, which it does not hold",
                    expected=f"a block of {listed(request.blocks)}",
                    got=f"block {block}, held by {listed(replay.holders(block))}",
                )
                continue
            known = new.get(block, blocks.labels.get(block))
            if known is not None:
                self.violated(
                    seq,
                    f"{request.id} published block {block}, which has a digest already",
                    expected=f"label {known} until it is evicted",
                    got=f"label {label}",
                )
            index = request.blocks.index(block)
            before = request.blocks[index - 1] if index else None
            parent = None if before is None else new.get(before, blocks.labels.get(before))
            self._check_content(seq, request, block, label, self._content(request, index, parent))
            new[block] = label

    def _check_content(self, seq: int, request: Request, block: int, label: int, content: Content) -> None:
        if request.prompt is None:
            return
        known = self._contents[label] = self._known(label, content)
        if known != content:
            self.violated(
                seq,
                f"{request.id} published block {block} under label {label}, which stands for other contents",
                expected=str(known),
                got=str(content),
            )
        elif len(content.tokens) < self.replay.blocks.size:
            self.violated(
                seq,
                f"{request.id} published block {block} before it has tokens for all of it",
                expected=f"{self.replay.blocks.size} tokens",
                got=f"{len(content.tokens)}",
            )

    def before_admitted(self, seq: int, event: Admitted) -> None:
        request = self.replay.requests.get(event.request)
        hits = request.hits if request is not None else ()
        if event.computed > len(hits) * self.replay.blocks.size:
            self.violated(
                seq,
                f"{event.request} was admitted with KV that it neither hit nor loaded",
                expected=f"at most {len(hits) * self.replay.blocks.size} tokens, from {len(hits)} blocks",
                got=f"{event.computed} tokens computed",
            )

    def before_launched(self, seq: int, event: Launched) -> None:
        """Who writes a block must hold it, and be the one it was allocated to; no position may be left out before it."""
        replay, blocks = self.replay, self.replay.blocks
        requests, owners, references, labels, size = replay.requests, blocks.owners, blocks.references, blocks.labels, blocks.size
        for id, first, count in event.batch:
            request = requests.get(id)
            if request is None:
                continue
            if first > request.computed:
                self._unwritten(seq, request, request.computed, f"step {event.step} of {id} starts at position {first}")
            table = request.blocks
            last = (first + count - 1) // size
            if last >= len(table):
                self._no_block(seq, event, request, max(first, len(table) * size))
                continue
            for index in range(first // size if first > 0 else 0, last + 1):
                block = table[index]
                if owners.get(block) is not request:
                    self._wrong_writer(seq, event, request, block)
                elif references.get(block) != 1 or block in labels:
                    self._check_first_write(seq, event, request, index, max(first, index * size))

    def _no_block(self, seq: int, event: Launched, request: Request, position: int) -> None:
        self.violated(
            seq,
            f"step {event.step} writes position {position} of {request.id} into a block that it does not hold",
            expected=f"a block for it among {listed(request.blocks)}",
            got=f"{len(request.blocks)} blocks of {self.replay.blocks.size} tokens",
            once=("no block", request, request.preemptions),
        )

    def _wrong_writer(self, seq: int, event: Launched, request: Request, block: int) -> None:
        owner = self.replay.blocks.owners.get(block)
        self.violated(
            seq,
            f"step {event.step} of {request.id} writes into block {block}, which was not allocated to it",
            expected=f"written by {owner.id if owner else 'nobody'} only",
            got=f"held by {listed(self.replay.holders(block))}",
            once=("writer", request, block),
        )

    def _check_first_write(self, seq: int, event: Launched, request: Request, index: int, position: int) -> None:
        """The first write into a shared or published block is right: others hit it in the step that writes it."""
        blocks = self.replay.blocks
        block = request.blocks[index]
        written, references = blocks.written[block][position - index * blocks.size], blocks.references.get(block)
        if written == NEVER:
            return
        if references == 1:
            sentence = f"step {event.step} of {request.id} writes position {position} again, in block {block}, which can be hit"
            expected, got = "each entry of a block with a digest written once", "written before"
        else:
            sentence = f"step {event.step} of {request.id} writes into block {block} while others hold it"
            expected, got = "one reference", f"{references} references, held by {listed(self.replay.holders(block))}"
        self.violated(
            seq, sentence, expected=expected, got=got, cause=[(written, "the entry was written")], once=("rewritten", request, block)
        )

    def after_stored(self, seq: int, event: Stored) -> None:
        request, written = self.replay.requests.get(event.request), self.replay.blocks.written
        for block, _ in event.blocks:
            if request is not None and NEVER in written.get(block, ()):
                self._unbacked[block] = seq, request

    def before_received(self, seq: int, event: Received) -> None:
        if self._unbacked:
            self._expect_backed(seq)

    def steady_publication(self, seq: int, request: Request, index: int, label: int) -> None:
        block = request.blocks[index]
        self._unbacked[block] = seq, request
        if request.prompt is not None:
            parent = self.replay.blocks.labels.get(request.blocks[index - 1]) if index else None
            self._steadily_filled[label] = request, index, parent

    def steady_step(self, stretch: Stretch) -> None:
        self._unbacked.clear()

    def _expect_backed(self, seq: int) -> None:
        """The step that was being composed has been launched, or never will be."""
        blocks = self.replay.blocks
        for block, (stored, request) in self._unbacked.items():
            if block in blocks.labels and NEVER in blocks.written[block]:
                self.violated(
                    seq,
                    f"block {block}, published by {request.id}, can be hit and the step that was to write it did not run",
                    expected="its digest withdrawn, or all its entries written",
                    got=f"label {blocks.labels[block]}, entry {blocks.written[block].index(NEVER)} of {blocks.size} never written",
                    cause=[
                        (stored, "published"),
                        (request.at_preemption, f"{request.id} preempted"),
                        (request.ended, f"{request.id} ended"),
                    ],
                )
        self._unbacked.clear()

    def after_launched(self, seq: int, event: Launched) -> None:
        if self._unbacked:
            self._expect_backed(seq)
        if not self._readers:
            return
        scheduled = {row.request for row in event.batch}
        for request in self._readers:
            if request.unwritten != NEVER:
                self._unwritten(seq, request, request.unwritten, f"step {event.step} of {request.id} attends to a hit")
        self._readers = [request for request in self._readers if request.hits and request.id not in scheduled]

    def _unwritten(self, seq: int, request: Request, position: int, what: str) -> None:
        index = position // self.replay.blocks.size
        block = f"block {request.blocks[index]}" if 0 <= index < len(request.blocks) else "no block"
        self.violated(
            seq,
            f"{what}, and no launched step wrote the KV before it",
            expected="every earlier position written by a launched step",
            got=f"position {position} ({block}) was never written",
            once=("unwritten", request, request.preemptions),
        )

    def before_freed(self, seq: int, event: Freed) -> None:
        """What nobody else holds goes to the free queue, once; all else stays where it is."""
        request, references = self.replay.requests.get(event.request), self.replay.blocks.references
        held = request.blocks if request is not None else []
        due = {block for block in held if (shared := references.get(block, 0)) <= 1 or shared <= held.count(block)}
        queued = [*event.head, *event.tail]
        if set(queued) != due or len(queued) != len(due):
            self._check_freed(seq, event.request, held, Counter(queued), due)

    def _check_freed(self, seq: int, id: str, held: Sequence[int], queued: Counter[int], due: set[int]) -> None:
        """Not what was `due` went to the free queue: say what is wrong with it."""
        free = self.replay.blocks.free
        for block, count in queued.items():
            if count > 1 or (block in free and block not in held):
                self._wrongly_freed(seq, f"{id} freed block {block} twice", block, "in the free queue once")
            elif block not in held:
                self._wrongly_freed(
                    seq, f"{id} freed block {block}, which it does not hold", block, f"a block of {listed(dict.fromkeys(held))}"
                )
            elif block not in due:
                sentence = f"block {block} went to the free queue while others hold it"
                self._wrongly_freed(seq, sentence, block, "held until its last sharer lets go")
        if lost := sorted(due - queued.keys()):
            self.violated(
                seq,
                f"{id} let go of blocks that nobody holds any more, and they did not go to the free queue",
                expected=listed(sorted(due)),
                got=f"without {listed(lost)}",
            )

    def _wrongly_freed(self, seq: int, sentence: str, block: int, expected: str) -> None:
        holders = self.replay.holders(block)
        self.violated(seq, sentence, expected=expected, got=f"held by {listed(holders)}" if holders else "held by nobody")

    def at_end(self, seq: int, closed: Closed) -> None:
        replay, blocks = self.replay, self.replay.blocks
        if closed.cut_short:
            return
        self._expect_backed(seq)
        held = {block for request in replay.live() for block in request.blocks}
        if leaked := [block for block in range(blocks.count) if block not in blocks.free and block not in held]:
            ended = [request for request in replay.requests.values() if request.finished is not None and leaked[0] in request.blocks]
            self.violated(
                seq,
                "blocks leaked: no live request holds them and they are not in the free queue",
                expected=f"{blocks.count - len(held)} blocks in the free queue",
                got=f"{len(blocks.free)}, without {listed(leaked)}",
                cause=[(request.ended, f"{request.id} finished") for request in ended],
            )
