"""Situations in the life of requests: late, aborted, scheduled, ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from harness.coverage.family import Facts, Family
from harness.events import Accepted, Blocked, Dropped, Finished, Launched, PauseEffective, Preempted, Received, Returned, StepFailed
from harness.operations import Abort, ResetPrefixCache, Submit
from harness.replay import NEVER, Request


class LateRequests(Family):
    def before_accepted(self, seq: int, event: Accepted) -> None:
        if event.parked:
            self._came("queued")

    def before_blocked(self, seq: int, event: Blocked) -> None:
        self._came("blocked")

    def before_returned(self, seq: int, event: Returned) -> None:
        match self.outcome(event):
            case Submit(), "rejected":
                self._came("rejected")
            case _:
                pass

    def _came(self, became: str) -> None:
        replay = self.replay
        if replay.out_of_service:
            self.reached(f"late-request-{became}-out-of-service")
        elif replay.pause_mode is not None:
            self.reached(f"late-request-{became}-under-{replay.pause_mode}")
        if replay.pause_pending:
            self.reached("late-request-while-pending")


class Aborts(Family):
    def before_received(self, seq: int, event: Received) -> None:
        operation, requests = self.facts.operation, self.replay.requests
        if not isinstance(operation, Abort) or operation.ids == "all":
            return
        if any((request := requests.get(id)) is None or request.finished is not None for id in operation.ids):
            self.reached("abort-of-nobody")

    def before_finished(self, seq: int, event: Finished) -> None:
        replay = self.replay
        request = replay.requests.get(event.request)
        if event.reason != "abort" or request is None or request.finished is not None:
            return
        for where in self._where(request):
            self.reached(where)
        if replay.pause_pending and isinstance(self.facts.operation, Abort):
            self.reached("abort-while-pending")
        if replay.update_open:
            self.reached("abort-in-session")
        if replay.out_of_service:
            self.reached("abort-out-of-service")

    def _where(self, request: Request) -> Iterator[str]:
        half_prefilled = request in self.facts.half_prefilled
        if request.status != "running":
            yield f"abort-of-{'parked' if request.parked else request.status}"
        elif self.replay.stopped_since != NEVER or self.replay.out_of_service:
            yield "abort-of-frozen"
        elif not half_prefilled:
            yield "abort-of-running"
        if half_prefilled:
            yield "abort-mid-prefill"


class Scheduling(Family):
    def __init__(self, facts: Facts, reached: Callable[[str], None]) -> None:
        super().__init__(facts, reached)
        self._victims: set[Request] = set()
        """Those that lost their blocks to pressure."""
        self._counted: set[Request] = set()
        """Those half-prefilled that were counted."""

    def after_launched(self, seq: int, event: Launched) -> None:
        half_prefilled = self.facts.half_prefilled
        if not (half_prefilled or self._counted):
            return
        for _ in half_prefilled - self._counted:
            self.reached("chunked-prefill")
        self._counted = half_prefilled.copy()

    def after_pause_effective(self, seq: int, event: PauseEffective) -> None:
        if self.facts.half_prefilled:
            self.reached("chunked-prefill-across-pause")

    def before_preempted(self, seq: int, event: Preempted) -> None:
        request = self.replay.requests.get(event.request)
        if request is None:
            return
        if event.by is not None:
            self._lost_to_pressure(request, event.by)
        elif isinstance(self.facts.operation, ResetPrefixCache):
            self.reached("reset-with-frozen")
        else:
            self.reached("clear-with-frozen")
            if request in self.facts.half_prefilled:
                self.reached("chunked-prefill-across-pause")

    def _lost_to_pressure(self, request: Request, by: str) -> None:
        self.reached("preempted-by-itself" if by == request.id else "preempted-by-pressure")
        if request in self._victims:
            self.reached("preempted-twice")
        self._victims.add(request)
        if request in self.facts.half_prefilled:
            self.reached("preempted-mid-prefill")
        if request.placeholders:
            self.reached("preempted-in-flight")
        if self.replay.pause_pending:
            self.reached("preempted-while-pending")


class Ends(Family):
    def __init__(self, facts: Facts, reached: Callable[[str], None]) -> None:
        super().__init__(facts, reached)
        self._max_tokens: dict[str, int] = {}

    def before_accepted(self, seq: int, event: Accepted) -> None:
        self._taken_on(event.request)

    def before_blocked(self, seq: int, event: Blocked) -> None:
        self._taken_on(event.request)

    def _taken_on(self, id: str) -> None:
        if isinstance(self.facts.operation, Submit):
            self._max_tokens[id] = self.facts.operation.max_tokens
        if (former := self.replay.requests.get(id)) is not None and former.finished is not None:
            self.reached("id-used-again")

    def before_finished(self, seq: int, event: Finished) -> None:
        if event.reason == "stop":
            self.reached("finished-by-stop")
        elif event.reason == "length":
            short = event.output_tokens < self._max_tokens.get(event.request, 0)
            self.reached("finished-by-max-model-len" if short else "finished-by-length")

    def before_returned(self, seq: int, event: Returned) -> None:
        match self.outcome(event):
            case Submit(id=id), "invalid":
                request = self.replay.requests.get(id)
                self.reached("live-id-refused" if request is not None and request.finished is None else "request-refused")
            case _:
                pass

    def before_step_failed(self, seq: int, event: StepFailed) -> None:
        self.reached("step-failed")

    def before_dropped(self, seq: int, event: Dropped) -> None:
        self.reached(f"token-dropped-{event.why}")
