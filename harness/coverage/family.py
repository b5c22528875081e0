"""A family of situations: a watcher that counts them, and what several of them ask about."""

from __future__ import annotations

from collections.abc import Callable

from harness.events import Admitted, Finished, Launched, Preempted, Received, Returned
from harness.invariants.invariant import Watcher
from harness.operations import Operation
from harness.replay import NEVER, Replay, Request


class Facts(Watcher[Replay]):
    """What several families ask about."""

    def __init__(self, replay: Replay) -> None:
        super().__init__(replay)
        self.operation: Operation | None = None
        """Of the call that is being carried out; None between calls."""
        self.half_prefilled: set[Request] = set()
        """Those that hold a part of their prompt's KV, or after a preemption of their tokens', and no step samples for yet."""
        self._op = NEVER
        self._admitted: list[Request] = []

    def before_received(self, seq: int, event: Received) -> None:
        call = self.replay.calls.get(event.op)
        self._op, self.operation = event.op, call.operation if call is not None else None

    def after_returned(self, seq: int, event: Returned) -> None:
        if event.op == self._op:
            self.operation = None

    def after_admitted(self, seq: int, event: Admitted) -> None:
        self._admitted.append(self.replay.requests[event.request])

    def after_launched(self, seq: int, event: Launched) -> None:
        self.operation = None
        if self._admitted or self.half_prefilled:
            self.half_prefilled.update(self._admitted)
            self.half_prefilled.difference_update(self.replay.flights[event.step].requests)
            self._admitted.clear()

    def after_preempted(self, seq: int, event: Preempted) -> None:
        self.half_prefilled.discard(self.replay.requests[event.request])

    def after_finished(self, seq: int, event: Finished) -> None:
        if (request := self.replay.requests.get(event.request)) is not None:
            self.half_prefilled.discard(request)


class Family(Watcher[Replay]):
    """Base of the families."""

    def __init__(self, facts: Facts, reached: Callable[[str], None]) -> None:
        super().__init__(facts.replay)
        self.facts = facts
        self.reached = reached
        """Counts a situation, by name, at the event at hand."""

    def outcome(self, event: Returned) -> tuple[Operation | None, str]:
        """The operation that an answer is for, and the code that it was refused with; empty if it was not."""
        call = self.replay.calls.get(event.op)
        return call.operation if call is not None else None, event.error.code if event.error is not None else ""
