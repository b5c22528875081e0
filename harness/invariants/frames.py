"""Steps in flight: what a step gives when its requests are not what they were at its launch."""

from __future__ import annotations

from typing import NamedTuple

from harness.events import Admitted, Closed, Dropped, DropReason, Finished, Landed, Launched, PauseEffective, Preempted
from harness.invariants.invariant import Invariant, invariant, listed
from harness.replay import NEVER, Flight, Replay, Request

_SINCE = {"aborted": "was aborted", "finished": "ended", "reset": "was preempted by a cache reset", "preempted": "was preempted"}
"""What may have become of a request since a step of it was launched, in words."""


class _Late(NamedTuple):
    """A row of a step whose request has no life left that the step belongs to."""

    flight: Flight
    request: Request
    fate: DropReason


@invariant("stale-frame", level=1)
class StaleFrame(Invariant):
    """A step launched before a preemption, a reset or an end changes nothing of what comes after: its token reaches the
    preempted request before that is admitted again, or is dropped because of the reset or the end; either way once."""

    def __init__(self, replay: Replay) -> None:
        super().__init__(replay)
        self._last_break = NEVER
        """Number of the last event that ended or preempted a request."""
        self._to_drop: dict[str, _Late] = {}
        """By id, those whose token the step that landed last has to drop."""

    def after_finished(self, seq: int, event: Finished) -> None:
        self._last_break = seq

    def after_preempted(self, seq: int, event: Preempted) -> None:
        self._last_break = seq

    def before_launched(self, seq: int, event: Launched) -> None:
        if self._to_drop:
            self._expect_all_dropped(seq)

    def before_pause_effective(self, seq: int, event: PauseEffective) -> None:
        self._expect_all_dropped(seq)

    def before_landed(self, seq: int, event: Landed) -> None:
        if self._to_drop:
            self._expect_all_dropped(seq)
        flight = self.replay.flights.get(event.step)
        if flight is None or self._last_break < flight.launched:
            return
        given = dict(event.sampled)
        for id, request in zip(flight.samplers, flight.requests, strict=True):
            if request.prompt is None:
                continue  # Nobody knows whether this row reached its last token.
            fate = flight.fate(request)
            if fate == "preempted" and id not in given:
                self._lost(seq, flight, request, given)
            elif fate is not None and fate != "preempted":
                if id in given:
                    self._given_to_the_next_life(seq, flight, request, fate, given[id])
                else:
                    self._to_drop[id] = _Late(flight, request, fate)

    def before_dropped(self, seq: int, event: Dropped) -> None:
        flight = self.replay.last_landed
        if flight is None or flight.step != event.step or (late := self._to_drop.pop(event.request, None)) is None:
            self._wrongly_dropped(seq, event)
        elif event.why != late.fate:
            self.violated(
                seq,
                f"the token of step {event.step} for {event.request} was dropped for a reason that is not so",
                expected=f"{late.fate}: since the launch {event.request} {_SINCE[late.fate]}",
                got=event.why,
                cause=_since(flight, late.request),
            )

    def before_admitted(self, seq: int, event: Admitted) -> None:
        """Admitted before its token arrived, it would compute and sample that position again."""
        request = self.replay.requests.get(event.request)
        if request is None or request.prompt is None:
            return
        for flight in self.replay.flights.values():
            if request in flight.requests and flight.fate(request) == "preempted":
                self.violated(
                    seq,
                    f"{request.id} was admitted again while step {flight.step} still has a token for it",
                    expected=f"step {flight.step} landed before",
                    got=f"life {event.life} begins at {request.num_tokens} tokens, and one of them will be sampled twice",
                    cause=_since(flight, request),
                )

    def at_end(self, seq: int, closed: Closed) -> None:
        if not closed.cut_short:
            self._expect_all_dropped(seq)

    def _lost(self, seq: int, flight: Flight, request: Request, given: dict[str, int]) -> None:
        self.violated(
            seq,
            f"the token of step {flight.step} for {request.id} was lost when {request.id} was preempted",
            expected=f"a token for {request.id}: whoever is preempted under pressure keeps what is in flight",
            got=f"tokens for {listed(given)}",
            cause=_since(flight, request),
            once=(request, flight.step),
        )

    def _given_to_the_next_life(self, seq: int, flight: Flight, request: Request, fate: DropReason, token: int) -> None:
        if fate == "reset":
            got = f"{token}, when none is outstanding: {request.id} is {request.status}, in its life {request.lives}"
        else:
            got = f"{token}, for a request that is over"
        self.violated(
            seq,
            f"step {flight.step} gave {request.id} a token, although {request.id} {_SINCE[fate]} since the launch",
            expected=f"`dropped` ({fate}): nothing is left of the life that the step belongs to",
            got=got,
            cause=_since(flight, request),
            once=(request, flight.step),
        )

    def _wrongly_dropped(self, seq: int, event: Dropped) -> None:
        id, flight = event.request, self.replay.last_landed
        rows = dict(zip(flight.samplers, flight.requests, strict=True)) if flight is not None and flight.step == event.step else {}
        if flight is None or (request := rows.get(id)) is None or flight.fate(request) not in (None, "preempted"):
            self.violated(
                seq,
                f"a token of step {event.step} for {id} was dropped, and none was left to drop",
                expected="`dropped` right after the landing of a step that samples for it, once",
                got=f"dropped ({event.why})",
            )
            return
        self.violated(
            seq,
            f"the token of step {event.step} for {id} was dropped, and neither an end nor a reset of {id} came since the launch",
            expected=f"the token is {id}'s output {len(request.output)}",
            got=f"dropped ({event.why})",
            cause=_since(flight, request),
            once=(request, flight.step),
        )

    def _expect_all_dropped(self, seq: int) -> None:
        for id, (flight, request, fate) in self._to_drop.items():
            self.violated(
                seq,
                f"the token of step {flight.step} for {id} vanished",
                expected=f"`dropped` ({fate}) right after the landing, as {id} {_SINCE[fate]} since the launch",
                got="neither landed nor dropped",
                cause=_since(flight, request),
            )
        self._to_drop.clear()


def _since(flight: Flight, request: Request) -> list[tuple[int, str]]:
    """What explains a late row: its launch, and what came since."""
    cause = [(flight.launched, f"launched step {flight.step}")]
    if request.finished is not None:
        cause.append((request.ended, f"{request.id} ended: {request.finished.reason}"))
    if request.at_preemption > flight.launched:
        by = "a cache reset" if request.at_reset == request.at_preemption else "another's need"
        cause.append((request.at_preemption, f"{request.id} preempted by {by}"))
    return cause
