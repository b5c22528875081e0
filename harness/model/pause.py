"""Pause calls and how they meet (contract, section 1).

A pause is *pending* from the moment that a call is taken up until the engine is quiet,
then *effective* until resume. Several calls may be pending together; the newest says the mode.
"""

from __future__ import annotations

from typing import NamedTuple

from harness.operations import Mode


class PauseCall(NamedTuple):
    """A pause call that has not returned."""

    op: int
    mode: Mode
    clear_cache: bool


class PauseState:
    """None of `mode`: not paused."""

    __slots__ = ("calls", "mode")

    def __init__(self) -> None:
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
        superseded = [pending for pending in self.calls if pending.mode == "wait"] if call.mode == "keep" else []
        self.calls = [pending for pending in self.calls if pending not in superseded]
        self.calls.append(call)
        self.mode = call.mode
        return superseded

    def complete(self) -> list[PauseCall]:
        """The engine is quiet: the pause is effective. Returns the calls that return now."""
        calls, self.calls = self.calls, []
        return calls

    def end(self) -> list[PauseCall]:
        """Resume. Returns the calls that it supersedes."""
        self.mode = None
        return self.complete()
