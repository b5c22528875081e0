"""Judges a log: one pass, every invariant, whole or while it is being written."""

from __future__ import annotations

from collections.abc import Iterable

from harness.events import Entry, Event, Opened
from harness.invariants.invariant import INVARIANTS, Hook, Invariant
from harness.replay import Replay
from harness.verdict import Judgement, Violation

UNOPENED = "the log does not begin with `opened`, so what it shows is unknown"
UNFINISHED = "no end was seen: what must hold at the end of a run was not judged"


class Judge:
    """Feeds a log to a replay and to the invariants; `replay` is the state so far.

    Args:
        ids: The invariants to judge, all of them by default.
    """

    def __init__(self, ids: Iterable[str] | None = None) -> None:
        self.replay = Replay()
        self._opened: Opened | None = None
        self._invariants: list[Invariant] = [INVARIANTS[id](self.replay) for id in (INVARIANTS if ids is None else ids)]
        self._watching: list[Invariant] = []
        self._hooks: dict[type[Event], tuple[Hook, ...]] = {}
        self._watch([])

    def feed(self, entries: Iterable[Entry]) -> list[Violation]:
        """Take in the next entries of the log; returns what they violate that is reported in full."""
        before = [len(watcher.violations) for watcher in self._watching]
        for seq, _, _, event in entries:
            self.replay.seq = seq
            for hook in self._hooks[type(event)]:
                hook(seq, event)
            if self.replay.opened is not self._opened:
                before += [0] * self._open()
        return [violation for watcher, count in zip(self._watching, before, strict=True) for violation in watcher.violations[count:]]

    def finish(self) -> list[Judgement]:
        """The log is over. What must hold at the end is judged if the log says how it ended; call this once."""
        if (closed := self.replay.closed) is not None:
            for watcher in self._watching:
                watcher.at_end(self.replay.seq, closed)
        return [self._judgement(invariant) for invariant in self._invariants]

    def _open(self) -> int:
        """Watch with those invariants that the log shows enough for; returns how many are new."""
        opened = self._opened = self.replay.opened
        watching = self._watching
        new = [one for one in self._invariants if one not in watching and opened is not None and one.unmet(opened) is None]
        self._watch([*watching, *new])
        return len(new)

    def _watch(self, watching: list[Invariant]) -> None:
        """What to call for each kind of event: the invariants' before-hooks, the reducer, their after-hooks."""
        self._watching = watching
        hooks: dict[type[Event], list[Hook]] = {kind: [] for kind in self.replay.reducers}
        for when in ("before", "after"):
            for watcher in watching:
                for kind, hook in watcher.hooks(when):
                    hooks[kind].append(hook)
            if when == "before":
                for kind, reduce in self.replay.reducers.items():
                    hooks[kind].append(reduce)
        self._hooks = {kind: tuple(calls) for kind, calls in hooks.items()}

    def _judgement(self, invariant: Invariant) -> Judgement:
        found, more = invariant.violations, invariant.more
        if found:
            reason = f"{len(found) + more} violations, the first at event {found[0].seq}"
            return Judgement(invariant=invariant.id, status="violated", reason=reason, violations=tuple(found), more=more)
        opened = self.replay.opened
        if (unmet := UNOPENED if opened is None else invariant.unmet(opened)) is not None:
            return Judgement(invariant=invariant.id, status="not-checkable", reason=unmet)
        return Judgement(invariant=invariant.id, status="holds", reason="" if self.replay.closed is not None else UNFINISHED)


def judge(entries: Iterable[Entry], ids: Iterable[str] | None = None) -> list[Judgement]:
    """Judge a whole log: one `Judgement` for each invariant, in the order of the registry."""
    judge = Judge(ids)
    judge.feed(entries)
    return judge.finish()
