"""What an invariant is: a promise with a name that watches a log go by, event by event.

An invariant is a class with methods named after events: `before_landed(seq, event)` sees the replay
as it was before the event, `after_landed(seq, event)` as it is then; `at_end(seq, closed)` is called
once the log is complete. What it does not name costs it nothing, which is what lets every invariant
watch every step. Its docstring is the statement that users read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar, get_args

from harness.client import ClientView
from harness.events import AnyEvent, Closed, Event, Opened
from harness.replay import NEVER, Replay, Request
from harness.verdict import Cause, Violation, wording

REPORTED = 5
"""Violations of one invariant that are told in full, beside the first of each other wording; the rest are counted."""


def told_in_full(words: str, told: int, wordings: set[str]) -> bool:
    """Whether a violation of these words is told in full, where `told` were, of these wordings; its own is added."""
    if told >= REPORTED and words in wordings:
        return False
    wordings.add(words)
    return True


LEVELS = {0: "client", 1: "schedule", 2: "blocks", 3: "numbers"}

KINDS: dict[str, type[Event]] = {str(kind.__struct_config__.tag): kind for kind in get_args(AnyEvent)}
"""Every kind of event by the name that hooks use."""

Hook = Callable[[int, Any], None]


State = TypeVar("State", Replay, ClientView)
"""What a log is added up to: a rank's to a replay, the clients' to a view."""


class Watcher(Generic[State]):
    """Sees a log go by, beside what it adds up to, through methods that are named after events."""

    def __init__(self, replay: State) -> None:
        self.replay = replay

    @property
    def parts(self) -> Sequence[Watcher[State]]:
        """Those with methods `before_...` and `after_...`, that are called before and after an event is applied."""
        return (self,)

    def steady_for(self, requests: Sequence[Request]) -> int:
        """For how many more steps like the last one, of these requests, there is nothing for it to see (see stretch.py).

        In none of them a call is open, and nothing is paused or being updated. Who wants to know of each all the same
        has a method `steady_step(stretch)`, and of each block that they fill `steady_publication(seq, request, index, label)`,
        called before the step that fills it: that of the request's blocks, under a label never seen before.
        """
        return sys.maxsize


class Promise(Watcher[State]):
    """Base of all invariants, of engines and of what their clients see."""

    id: ClassVar[str]
    level: ClassVar[int]
    """The lowest level of a log on which it can be checked."""

    def __init__(self, replay: State) -> None:
        super().__init__(replay)
        self.violations: list[Violation] = []
        self.more = 0
        self.checked = 0
        """How many checks it made, where it counts them."""
        self._causes: set[Hashable] = set()
        self._wordings: set[str] = set()

    @classmethod
    def statement(cls) -> str:
        """What it promises, in one line."""
        return " ".join((cls.__doc__ or "").split())

    @classmethod
    def unmet(cls, opened: Opened) -> str | None:
        """Why a log that was opened so cannot be checked, or None."""
        if opened.level >= cls.level:
            return None
        return f"needs a log of level {cls.level} ({LEVELS[cls.level]}), got level {opened.level} ({LEVELS.get(opened.level, 'unknown')})"

    def unseen(self) -> str | None:
        """Why what the log turned out to hold is not enough to judge by, or None."""
        return None

    def at_end(self, seq: int, closed: Closed) -> None:
        """The log is complete; `seq` is the number of its last event."""

    def violated(
        self, seq: int, sentence: str, *, expected: str, got: str, cause: Iterable[tuple[int, str]] = (), once: Hashable = None
    ) -> None:
        """Report a violation at event `seq`. Of several with one `once`, only the first is reported: they have one cause."""
        if once is not None:
            if once in self._causes:
                return
            self._causes.add(once)
        if not told_in_full(wording(sentence, expected), len(self.violations), self._wordings):
            self.more += 1
            return
        causes = tuple(Cause(number, what) for number, what in sorted(cause) if number != NEVER)
        self.violations.append(Violation(invariant=self.id, seq=seq, sentence=sentence, expected=expected, got=got, cause=causes))


class Invariant(Promise[Replay]):
    """Base of the invariants of an engine, judged on the log of one rank."""


class ClientInvariant(Promise[ClientView]):
    """Base of what the same promises mean to clients, judged on their log, with the logs of ranks if there are any."""


INVARIANTS: dict[str, type[Invariant]] = {}
"""Every invariant by its id."""

CLIENT_INVARIANTS: dict[str, type[ClientInvariant]] = {}
"""By the id of an invariant, what clients can see of it."""

Kind = TypeVar("Kind", bound=type[Invariant])
ClientKind = TypeVar("ClientKind", bound=type[ClientInvariant])


def invariant(id: str, *, level: int) -> Callable[[Kind], Kind]:
    """Register a class as the invariant `id`, checkable on logs of `level` or more.

    Raises:
        TypeError: a method is named after an event that does not exist, or there is no docstring.
        ValueError: the id is taken.
    """

    def register(cls: Kind) -> Kind:
        _check(id, cls, INVARIANTS)
        cls.id, cls.level = id, level
        INVARIANTS[id] = cls
        return cls

    return register


def client_invariant(id: str) -> Callable[[ClientKind], ClientKind]:
    """Register a class as what clients see of the invariant `id`, which ranks are judged by under the same name.

    Raises:
        TypeError, ValueError: as for `invariant`.
    """

    def register(cls: ClientKind) -> ClientKind:
        _check(id, cls, CLIENT_INVARIANTS)
        cls.id, cls.level = id, 0
        CLIENT_INVARIANTS[id] = cls
        return cls

    return register


def _check(id: str, cls: type[Promise[Any]], registered: Mapping[str, type[Promise[Any]]]) -> None:
    if id in registered:
        raise ValueError(f"two invariants are called {id}: {registered[id].__name__} and {cls.__name__}")
    if not cls.__doc__:
        raise TypeError(f"{cls.__name__} needs a docstring: the statement of {id} that users read")
    for name in vars(cls):
        when, _, kind = name.partition("_")
        if when in ("before", "after") and kind not in KINDS:
            raise TypeError(f"{cls.__name__}.{name}: there is no event `{kind}`; expected one of {', '.join(KINDS)}")


def listed(items: Iterable[object], limit: int = 8) -> str:
    """`[a, b, c]`, cut after `limit` items."""
    words = [str(item) for item in items]
    if len(words) > limit:
        words = [*words[:limit], f"... {len(words)} in all"]
    return f"[{', '.join(words)}]"
