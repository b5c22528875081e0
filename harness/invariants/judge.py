"""Judges a log: one pass, every invariant, whole or while it is being written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic

from harness.client import ClientView
from harness.events import Entry, Event, Opened
from harness.invariants.invariant import CLIENT_INVARIANTS, INVARIANTS, KINDS, Hook, Promise, State, Watcher
from harness.operations import Operation, from_data
from harness.replay import Replay, Request
from harness.stretch import Stretch
from harness.verdict import Judgement, Violation

UNOPENED = "the log does not begin with `opened`, so what it shows is unknown"
UNFINISHED = "no end was seen: what must hold at the end of a run was not judged"


class Bench(Generic[State]):
    """Feeds a log to what it adds up to and to promises that watch it; `replay` is the state so far."""

    def __init__(self, replay: State, promises: Sequence[Promise[State]]) -> None:
        self.replay = replay
        self._others: list[Watcher[State]] = []
        self._opened: Opened | None = None
        self._promises = promises
        self._watching: list[Promise[State]] = []
        self._hooks: dict[type[Event], tuple[Hook, ...]] = {}
        self._steady_hooks: list[Callable[[Stretch], None]] = []
        self._watch([])

    def feed(self, entries: Iterable[Entry]) -> list[Violation]:
        """Take in the next entries of the log; returns what they violate that is reported in full."""
        before = [len(watcher.violations) for watcher in self._watching]
        replay, hooks = self.replay, self._hooks
        for seq, _, _, event in entries:
            replay.seq = seq
            for hook in hooks[type(event)]:
                hook(seq, event)
            if replay.opened is not self._opened:
                before += [0] * self._open()
                hooks = self._hooks
        return [violation for watcher, count in zip(self._watching, before, strict=True) for violation in watcher.violations[count:]]

    def apply(self, seq: int, event: Event) -> None:
        """Take in one event, for a caller that looks at `found` for itself."""
        self.replay.seq = seq
        for hook in self._hooks[type(event)]:
            hook(seq, event)
        if self.replay.opened is not self._opened:
            self._open()

    @property
    def found(self) -> int:
        """How many violations there are so far."""
        return sum(len(watcher.violations) + watcher.more for watcher in self._watching)

    def finish(self) -> list[Judgement]:
        """The log is over. What must hold at the end is judged if the log says how it ended; call this once."""
        if (closed := self.replay.closed) is not None:
            for watcher in self._watching:
                watcher.at_end(self.replay.seq, closed)
        return [self._judgement(promise) for promise in self._promises]

    def _open(self) -> int:
        """Watch with those promises that the log shows enough for; returns how many are new."""
        opened = self._opened = self.replay.opened
        watching = self._watching
        new = [one for one in self._promises if one not in watching and opened is not None and one.unmet(opened) is None]
        self._watch([*watching, *new])
        return len(new)

    def add_watcher(self, watcher: Watcher[State]) -> None:
        """Have something that judges nothing watch the log too, beside the same replay: it must have been made on `replay`."""
        self._others.append(watcher)
        self._watch(self._watching)

    def _watch(self, watching: list[Promise[State]]) -> None:
        self._watching = watching
        self._hooks = interleave(self.replay, [*watching, *self._others])
        self._steady_hooks = [hook for watcher in watching if (hook := getattr(watcher, "steady_step", None)) is not None]

    def _judgement(self, invariant: Promise[State]) -> Judgement:
        found, more = invariant.violations, invariant.more
        if found:
            count = len(found) + more
            reason = f"at event {found[0].seq}" if count == 1 else f"{count} violations, the first at event {found[0].seq}"
            return Judgement(
                invariant=invariant.id, status="violated", reason=reason, violations=tuple(found), more=more, checked=invariant.checked
            )
        opened = self.replay.opened
        if (unmet := UNOPENED if opened is None else invariant.unmet(opened) or invariant.unseen()) is not None:
            return Judgement(invariant=invariant.id, status="not-checkable", reason=unmet)
        reason = "" if self.replay.closed is not None else UNFINISHED
        return Judgement(invariant=invariant.id, status="holds", reason=reason, checked=invariant.checked)


class Judge(Bench[Replay]):
    """Judges the log of one rank.

    Args:
        ids: The invariants to judge, all of them by default.
        decode: How a call's operation is read; who wrote the log need not decode it again.
    """

    def __init__(self, ids: Iterable[str] | None = None, *, decode: Callable[[dict[str, Any]], Operation] = from_data) -> None:
        replay = Replay(decode)
        super().__init__(replay, [INVARIANTS[id](replay) for id in (INVARIANTS if ids is None else ids)])

    def steady_for(self, requests: Sequence[Request]) -> int:
        """For how many more steps like the last one, of these requests, nobody has anything to see."""
        return min(watcher.steady_for(requests) for watcher in (*self._watching, *self._others))

    def steady(self, stretch: Stretch) -> None:
        """The stretch has gone on by a step."""
        for hook in self._steady_hooks:
            hook(stretch)


class ClientJudge(Bench[ClientView]):
    """Judges what the clients of a live engine saw, beside the logs of its ranks if there are any."""

    def __init__(self) -> None:
        view = ClientView()
        super().__init__(view, [kind(view) for kind in CLIENT_INVARIANTS.values()])


def interleave(replay: State, watchers: Sequence[Watcher[State]]) -> dict[type[Event], tuple[Hook, ...]]:
    """What to call for each kind of event: the watchers' before-hooks, the reducer, their after-hooks."""
    hooks: dict[type[Event], list[Hook]] = {kind: [] for kind in KINDS.values()}
    for when in ("before", "after"):
        for watcher in watchers:
            for kind, hook in watcher.hooks(when):
                hooks[kind].append(hook)
        if when == "before":
            for kind, reduce in replay.reducers.items():
                hooks[kind].append(reduce)
    return {kind: tuple(calls) for kind, calls in hooks.items()}


def judge(entries: Iterable[Entry], ids: Iterable[str] | None = None) -> list[Judgement]:
    """Judge a whole log: one `Judgement` for each invariant, in the order of the registry."""
    judge = Judge(ids)
    judge.feed(entries)
    return judge.finish()
