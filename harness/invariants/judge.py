"""Judges a log: one pass, every invariant, whole or while it is being written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, Generic

from harness.client import ClientView
from harness.events import Entry, Event, Opened
from harness.invariants.invariant import CLIENT_INVARIANTS, INVARIANTS, Hook, Promise, State, Watcher
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
        self._step_hooks: list[Callable[[Stretch], None]] = []
        self._publication_hooks: list[Callable[[int, Request, int, int], None]] = []
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
        self._hooks = Hooks(self.replay, [*watching, *self._others])
        self._step_hooks = [hook for watcher in watching if (hook := getattr(watcher, "steady_step", None)) is not None]
        self._publication_hooks = [hook for watcher in watching if (hook := getattr(watcher, "steady_publication", None)) is not None]

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

    def stepped(self, stretch: Stretch) -> None:
        """The stretch has gone on by a step."""
        for hook in self._step_hooks:
            hook(stretch)

    def published(self, seq: int, request: Request, index: int, label: int) -> None:
        """In a stretch, at event `seq`, a request published its block number `index`, which its next step fills."""
        for hook in self._publication_hooks:
            hook(seq, request, index, label)


class ClientJudge(Bench[ClientView]):
    """Judges what the clients of a live engine saw, beside the logs of its ranks if there are any."""

    def __init__(self) -> None:
        view = ClientView()
        super().__init__(view, [kind(view) for kind in CLIENT_INVARIANTS.values()])


class Hooks(dict[type[Event], tuple[Hook, ...]]):
    """What to call for each kind of event: the watchers' before-hooks, the reducer, their after-hooks.

    They are looked for when the first event of a kind comes: a fuzzer watches hundreds of logs a second, each with few kinds.
    """

    def __init__(self, replay: Replay | ClientView, watchers: Iterable[Watcher[Any]]) -> None:
        super().__init__()
        self._reducers = replay.reducers
        self._watchers = [part for watcher in watchers for part in watcher.parts]
        self._classes = tuple(map(type, self._watchers))

    def __missing__(self, kind: type[Event]) -> tuple[Hook, ...]:
        before, after = _hook_names(kind, self._classes)
        reduce = self._reducers.get(kind)
        calls = [getattr(self._watchers[index], name) for index, name in before]
        calls += [] if reduce is None else [reduce]
        self[kind] = hooks = (*calls, *[getattr(self._watchers[index], name) for index, name in after])
        return hooks


@cache
def _hook_names(kind: type[Event], watchers: tuple[type[Watcher[Any]], ...]) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    """Which of the watchers, by place, have a method for before such an event, and for after it, and its name."""
    before, after = (f"{when}_{kind.__struct_config__.tag}" for when in ("before", "after"))
    return (
        [(place, before) for place, watcher in enumerate(watchers) if hasattr(watcher, before)],
        [(place, after) for place, watcher in enumerate(watchers) if hasattr(watcher, after)],
    )


def judge(entries: Iterable[Entry], ids: Iterable[str] | None = None) -> list[Judgement]:
    """Judge a whole log: one `Judgement` for each invariant, in the order of the registry."""
    judge = Judge(ids)
    judge.feed(entries)
    return judge.finish()
