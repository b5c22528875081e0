"""Pause calls and how they meet (contract, section 1).

A pause is *pending* from the moment that a call is taken up until the engine is quiet,
then *effective* until resume. Several calls may be pending together; the newest says the mode.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from harness.operations import Mode


class PauseCall(NamedTuple):
    """A pause call that has not returned."""

    op: int
    mode: Mode
    clear_cache: bool


class Completion(NamedTuple):
    """Calls that return together, and whether the cache is cleared for them."""

    clear_cache: bool
    calls: list[PauseCall]


class PauseState:
    """None of `mode`: not paused."""

    __slots__ = ("_apart", "calls", "mode")

    def __init__(self, *, meet: Literal["merged", "apart"] = "merged") -> None:
        self._apart = meet == "apart"
        self.mode: Mode | None = None
        self.calls: list[PauseCall] = []

    @property
    def effective(self) -> bool:
        return self.mode is not None and not self.calls

    @property
    def clear_cache(self) -> bool:
        """What all pending calls together ask for."""
        return any(call.clear_cache for call in self.calls)

    def take_up(self, call: PauseCall) -> list[PauseCall]:
        """A call comes in, over pending ones or not. Returns those that it supersedes: `keep` freezes what a `wait` waits for."""
        freezes = call.mode == "keep" and not self._apart
        superseded = [pending for pending in self.calls if pending.mode == "wait"] if freezes else []
        self.calls = [pending for pending in self.calls if pending not in superseded]
        self.calls.append(call)
        self.mode = call.mode
        return superseded

    def complete(self) -> list[Completion]:
        """The engine is quiet: the pause is effective. Returns the calls that return now, those first that return first."""
        calls, clear_cache = self.calls, self.clear_cache
        self.calls = []
        if self._apart:
            return [Completion(call.clear_cache, [call]) for call in reversed(calls)]
        return [Completion(clear_cache, calls)]

    def end(self) -> list[PauseCall]:
        """Resume. Returns the calls that it supersedes; calls that meet apart stay pending."""
        self.mode = None
        superseded: list[PauseCall] = []
        if not self._apart:
            superseded, self.calls = self.calls, []
        return superseded
