"""Steady steps taken at once, for whoever reads a log that is mostly decoding.

In a *stretch* the same requests decode one token each, step after step; nothing else happens but that they take blocks and
publish full ones. A step like the one before it shows no invariant anything new, as long as each row stays within the block that it
wrote last or took since, and within its limits: so from the second on, a stretch keeps only the steps' tokens. Nor does a block
that is taken when its turn comes, for a token that has no place yet, or one that is published by who holds it alone, when its last
token is about to be computed. The replay takes the tokens in when the stretch ends. Where a step may show something, it is
taken in full: the one before a stretch, one that follows a violation, one for which a watcher asks (`Watcher.steady_for`).
"""

from __future__ import annotations

from collections import defaultdict

from harness.events import Scheduled
from harness.replay import NEVER, Replay, Request


class Stretch:
    """Steady steps that follow the last step of a replay, of which it has taken in only the blocks.

    Args:
        replay: its last events were those of a step in which each of its requests sampled a token and went on.
        most: end after so many steps.
    """

    def __init__(self, replay: Replay, most: int) -> None:
        flight = replay.last_landed
        assert flight is not None
        self._replay = replay
        self._flight = flight
        self._most = most
        self._requests = dict(zip(flight.samplers, flight.requests, strict=True))
        self._rows: list[tuple[int, ...]] = []
        """The tokens of each step, in scheduling order."""
        self._launches: list[int] = []
        """Numbers of the `launched` events."""
        self._due: defaultdict[int, int] = defaultdict(int)
        """For each step to come, how many requests leave the block that they wrote last and took none since."""
        for request in flight.requests:
            if request.blocks:
                self._due[-request.computed % replay.blocks.size] += 1

    @property
    def launched(self) -> int:
        """Number of the last step's `launched`; its `landed` follows."""
        return self._launches[-1]

    @property
    def ids(self) -> list[str]:
        """Of the requests, in scheduling order."""
        return self._flight.samplers

    @property
    def steady(self) -> bool:
        """The next step is like the last one, if it has the same rows."""
        return len(self._rows) < self._most and not self._due[len(self._rows)]

    def add(self, launched: int, tokens: tuple[int, ...]) -> None:
        """The next step, launched at event `launched`, sampled these."""
        self._launches.append(launched)
        self._rows.append(tokens)

    def may_take(self, id: str, block: int, *, evicts: bool) -> bool:
        """Whether it is one of the requests that is given the block, and has no place for its next token; and the block is the
        first in the free queue, free, and has a digest to lose if the event says so."""
        blocks, request = self._replay.blocks, self._requests.get(id)
        if request is None or len(request.blocks) * blocks.size != request.computed + len(self._rows):
            return False
        return next(iter(blocks.free), None) == block and not blocks.references.get(block) and (block in blocks.labels) is evicts

    def take(self, id: str, block: int) -> None:
        """A block that it may take, and that has no digest."""
        self._replay.blocks.take(self._requests[id], (block,), ())
        self.took()

    def took(self) -> None:
        """A request has taken a block that it may take, for the next step."""
        self._due[len(self._rows)] -= 1
        self._due[len(self._rows) + self._replay.blocks.size] += 1

    def may_publish(self, id: str, block: int) -> bool:
        """Whether it is one of the requests that publishes the block, as nobody has, and the only one to hold it; and the next step
        computes a known token into its last slot, and all others were computed."""
        blocks, request = self._replay.blocks, self._requests.get(id)
        if request is None or blocks.references.get(block) != 1 or block in blocks.labels:
            return False
        size, steps = blocks.size, len(self._rows)
        index, place = divmod(request.computed + steps, size)
        if place != size - 1 or request.blocks[index : index + 1] != [block] or request.computed >= request.num_tokens:
            return False
        slots = blocks.written.get(block)
        return slots is not None and slots[-1] == NEVER and NEVER not in slots[: max(place - steps, 0)]

    def publish(self, id: str, block: int, label: int) -> tuple[Request, int]:
        """A block that it may publish, under a label never seen before. Returns the request, and which of its blocks it is."""
        request = self._requests[id]
        self._replay.blocks.publish(((block, label),))
        return request, (request.computed + len(self._rows)) // self._replay.blocks.size

    def end(self) -> None:
        """The replay is where it would be if it had stepped."""
        replay, last, steps = self._replay, self._flight, len(self._rows)
        if not steps:
            return
        for request, tokens in zip(last.requests, zip(*self._rows, strict=True), strict=True):
            if request.blocks:
                replay.blocks.write_each(request, request.computed, self._launches)
            request.output += tokens
            request.delivered += tokens
            request.num_tokens += steps
            request.computed += steps
        rows = tuple(Scheduled(id, first + count + steps - 1, 1) for id, first, count in last.batch)
        replay.last_launched = self._launches[-1]
        replay.last_landed = last._replace(launched=replay.last_launched, step=last.step + steps, batch=rows)
