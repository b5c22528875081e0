"""What a judgement of a log says, as data; reports/ turns it into words on a page."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

Status = Literal["holds", "violated", "not-checkable"]


class Cause(msgspec.Struct, frozen=True):
    """An earlier event that led to a violation: its number and a few words."""

    seq: int
    what: str


class Violation(msgspec.Struct, frozen=True, kw_only=True):
    """One promise broken at one event."""

    invariant: str
    seq: int
    """Number of the event at which it showed."""
    sentence: str
    expected: str
    got: str
    cause: tuple[Cause, ...] = ()
    """Earliest first."""

    @property
    def wording(self) -> str:
        """What tells it from other violations of its invariant."""
        return wording(self.sentence, self.expected)


def wording(sentence: str, expected: str = "") -> str:
    """A sentence and what was expected, without the values: two failures with one wording are taken for one.

    Numbers and names of requests and versions in the sentence are replaced. Of what was expected, lists in brackets and words that
    hold a digit are left out: `entries of epoch 2 only, as a clear was promised` keeps its promise and loses its epoch.
    """
    words = re.sub(r"(?<![\w.])\d+(?![\w.])", "N", sentence)
    words = re.sub(r"\bv\d+\b", "V", re.sub(r"\br\d+\b", "R", words))
    promise = " ".join(word for word in re.sub(r"\[[^]]*]", "", expected).split() if not re.search(r"\d", word))
    return f"{words}; expected {promise}" if promise else words


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """What one invariant says about one log."""

    invariant: str
    status: Status
    reason: str
    """Why it is not checkable, how much was violated, or what of a log without an end was left unjudged."""
    violations: tuple[Violation, ...] = ()
    """The first few, and the first of each other wording; `more` counts the rest."""
    more: int = 0
    checked: int = 0
    """How many checks were made, where they are counted: each fails with one violation."""

    def tolerating(self, min_pass_rate: float) -> Judgement:
        """The same, if checks are counted, with `holds` for as many passed as `min_pass_rate` asks for, and the rate in its reason."""
        if not self.checked:
            return self
        passed = self.checked - len(self.violations) - self.more
        counted = f"{passed} of {self.checked} checks pass, asked for {100 * min_pass_rate:g} %"
        if passed >= min_pass_rate * self.checked:
            return msgspec.structs.replace(self, status="holds", reason=counted, violations=(), more=0)
        return msgspec.structs.replace(self, reason=f"{counted}; the first violation is at event {self.violations[0].seq}")
