"""Pause calls and how they meet (contract, section 1). A sleep call is a pause call that has more to do once it is effective.

A pause is *pending* from the moment that a call is taken up until the engine is quiet,
then *effective* until resume. Several calls may be pending together; the newest says the mode.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from harness.operations import Mode


class PauseCall(NamedTuple):
    """A pause or sleep call that has not returned."""

    op: int
    mode: Mode
    clear_cache: bool
    level: int | None = None
    """How deep to sleep; None: it is a pause call."""

    def __str__(self) -> str:
        return f"pause({self.mode})" if self.level is None else f"sleep({self.level}, {self.mode})"


class Completion(NamedTuple):
    """Calls that return together, and whether the cache is cleared for them."""

    clear_cache: bool
    calls: list[PauseCall]


class PauseState:
    """None of `mode`: not paused."""

    __slots__ = ("_apart", "asked", "calls", "effective", "mode")

    def __init__(self, *, meet: Literal["merged", "apart"] = "merged") -> None:
        self._apart = meet == "apart"
        self.mode: Mode | None = None
        self.effective = False
        """Calls that meet apart may be pending all the same."""
        self.calls: list[PauseCall] = []
        self.asked = False
        """Some pause call asked for this pause; otherwise only sleep did, and it ends when all is awake."""

    @property
    def clear_cache(self) -> bool:
        """What all pending calls together ask for."""
        return any(call.clear_cache for call in self.calls)

    def take_up(self, call: PauseCall) -> list[PauseCall]:
        """A call comes in, over pending ones or not. Returns those that it supersedes: `keep` freezes what a `wait` waits for.

        A `wait` over which an `abort` came has nobody left to wait for: it is a part of the abort, and a `keep` joins that.
        """
        freezes = call.mode == "keep" and not self._apart
        superseded = [pending for pending in self.calls if pending.mode == "wait"] if freezes else []
        self.calls = [pending for pending in self.calls if pending not in superseded]
        if call.mode == "abort" and not self._apart:
            self.calls = [pending._replace(mode="abort") for pending in self.calls]
        self.calls.append(call)
        self.mode, self.effective = call.mode, False
        self.asked = self.asked or call.level is None
        return superseded

    def complete(self, op: int | None = None) -> list[Completion]:
        """The engine is quiet: the pause is effective. Returns the calls that return now, those first that return first.

        Args:
            op: the operation that was taken up while it was quiet. Of calls that meet apart only its own completes
                then, the others when the loop looks for work (None) and finds none.
        """
        calls = [call for call in self.calls if call.op == op] if self._apart and op is not None else self.calls
        if not calls:
            return []
        clear_cache = self.clear_cache
        self.calls = [call for call in self.calls if call not in calls]
        self.effective = self.mode is not None
        if self._apart:
            return [Completion(call.clear_cache, [call]) for call in reversed(calls)]
        return [Completion(clear_cache, calls)]

    def end(self) -> list[PauseCall]:
        """Resume. Returns the calls that it supersedes; calls that meet apart stay pending."""
        self.mode, self.effective, self.asked = None, False, False
        superseded: list[PauseCall] = []
        if not self._apart:
            superseded, self.calls = self.calls, []
        return superseded
