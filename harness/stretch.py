"""Steady steps taken at once, for whoever reads a log that is mostly decoding.

In a *stretch* the same requests decode one token each, step after step; nothing else happens but that they take blocks and
publish full ones. A step like the one before it shows no invariant anything new, as long as each row stays within the block that it
wrote last or took since, and within its limits: so from the second on, a stretch keeps only the steps' tokens. A request takes
its tokens in when something else names it, the replay when the stretch ends. Where a step may show something, it is
taken in full: the one before a stretch, one that follows a violation, one for which a watcher asks (`Watcher.steady_for`).
"""

from __future__ import annotations

from collections import Counter

from harness.events import Scheduled
from harness.replay import Replay, Request


class Stretch:
    """Steady steps that follow the last step of a replay, of which it has taken in only what was asked for.

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
        self._columns = {request: column for column, request in enumerate(flight.requests)}
        self._ids = {request.id: request for request in flight.requests}
        self._rows: list[tuple[int, ...]] = []
        """The tokens of each step, in scheduling order."""
        self._launches: list[int] = []
        """Numbers of the `launched` events."""
        self._taken = [0] * len(flight.requests)
        """How many of the rows each request has taken in."""
        size = replay.blocks.size
        self._due = Counter(-request.computed % size for request in flight.requests if request.blocks)
        """For each step to come, how many requests leave the block that they wrote last and took none since."""

    @property
    def launched(self) -> int:
        """Number of the last step's `launched`; its `landed` follows."""
        return self._launches[-1]

    @property
    def tokens(self) -> tuple[int, ...]:
        """What the last step sampled, in the order of `ids`."""
        return self._rows[-1]

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

    def member(self, id: str) -> Request | None:
        """The request of that id, up to date, if it is one of the stretch."""
        if (request := self._ids.get(id)) is not None:
            self._catch_up(request)
        return request

    def took_block(self, request: Request) -> None:
        """It was allocated a block, and was up to date then."""
        blocks, computed = self._replay.blocks, request.computed
        if computed == (len(request.blocks) - 1) * blocks.size:
            self._due[len(self._rows)] -= 1
            self._due[len(self._rows) + blocks.size] += 1

    def end(self) -> None:
        """The replay is where it would be if it had stepped."""
        if not self._rows:
            return
        for request in self._columns:
            self._catch_up(request)
        replay, last, steps = self._replay, self._flight, len(self._rows)
        rows = tuple(Scheduled(id, first + count + steps - 1, 1) for id, first, count in last.batch)
        replay.last_launched = self._launches[-1]
        replay.last_landed = last._replace(launched=replay.last_launched, step=last.step + steps, batch=rows)

    def _catch_up(self, request: Request) -> None:
        column = self._columns[request]
        begin, end = self._taken[column], len(self._rows)
        if begin == end:
            return
        tokens = [row[column] for row in self._rows[begin:end]]
        if request.blocks:
            self._replay.blocks.write_each(request, request.computed, self._launches[begin:end])
        request.output += tokens
        request.delivered += tokens
        request.num_tokens += len(tokens)
        request.computed += len(tokens)
        self._taken[column] = end
