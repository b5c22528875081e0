"""What a check is: a promise with an id, and a coroutine that puts a server to it.

The coroutine returns the evidence that the promise holds, or raises what says otherwise. It may leave
requests running, the server paused or other weights in it: what runs it clears up after each.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from harness.check.stage import Stage

Verdict = Literal["holds", "violated", "not-checkable"]


class Broken(Exception):
    """The promise is broken; the message is the evidence."""


class NotCheckable(Exception):
    """The promise cannot be judged on this server; the message says why."""


class Check(NamedTuple):
    """A promise and what judges it."""

    id: str
    promise: str
    """What always holds, as a sentence for a table."""
    judge: Callable[[Stage], Awaitable[str]]


class Row(NamedTuple):
    """What came of a check."""

    id: str
    promise: str
    verdict: Verdict
    evidence: str
    """What was seen; for one that is not checkable, why."""


Judge = Callable[["Stage"], Awaitable[str]]

CHECKS: dict[str, Check] = {}
"""Every check by its id; those of one module are made in this order."""


def check(id: str, promise: str) -> Callable[[Judge], Judge]:
    """Register a coroutine as the judge of a promise. Raises ValueError if the id is taken."""

    def register(judge: Judge) -> Judge:
        if id in CHECKS:
            raise ValueError(f"two checks are called {id}")
        CHECKS[id] = Check(id, promise, judge)
        return judge

    return register


def expect(condition: object, evidence: str) -> None:
    """Raises: Broken, with the evidence, unless the condition holds."""
    if not condition:
        raise Broken(evidence)
