"""Counts what the families see."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from harness.client import ClientView
from harness.coverage.caches import Boundaries, Cache, HostTier
from harness.coverage.family import Facts, Family
from harness.coverage.pauses import Pauses, Sleeps
from harness.coverage.requests import Aborts, Ends, LateRequests, Scheduling
from harness.coverage.updates import Sessions
from harness.events import Answered, Entry
from harness.invariants.invariant import Watcher
from harness.invariants.judge import Hooks
from harness.operations import Submit
from harness.replay import Replay, Request
from harness.situations import SITUATIONS

FAMILIES: tuple[type[Family], ...] = (Pauses, Sleeps, LateRequests, Aborts, Scheduling, Cache, HostTier, Boundaries, Sessions, Ends)


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
        facts = Facts(self.replay)
        self._watchers: list[Watcher[Replay]] = [facts, *(family(facts, self._reached) for family in FAMILIES)]
        self._alone = Hooks(self.replay, [self]) if replay is None else None

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

    @property
    def parts(self) -> Sequence[Watcher[Replay]]:
        return self._watchers

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
