"""Weight sessions, versions and epochs (contract, section 2).

The *version* is the label that callers see. The *epoch* counts sessions that wrote at least
one byte: it says whether two KV entries come from the same weights.
"""

from __future__ import annotations

from typing import Literal

from harness.events import Committed, Event, PartReceived, UpdateFailed, UpdateStarted
from harness.model.refusal import Refused

_BROKEN = "the source broke (`fails: true`)"
_REFUSED = "a tensor was refused (`spoil`)"


class Session:
    """An open session: what was written so far."""

    __slots__ = ("of", "parts")

    def __init__(self) -> None:
        self.of: int | None = None
        """Into how many parts it is cut, as its first part said."""
        self.parts = 0
        """Bit k - 1 stands for part k."""

    @property
    def wrote(self) -> bool:
        return self.parts > 0

    @property
    def wrote_all(self) -> bool:
        """Whether every tensor was sent."""
        return self.of is not None and self.parts == (1 << self.of) - 1


class Weights:
    """The resident weights, by version and epoch, and the session that may be changing them."""

    __slots__ = ("_counts_parts", "_failure_stops", "epoch", "failure", "session", "version")

    def __init__(self, *, counts_parts: bool = True, failure_stops: bool = True) -> None:
        self._counts_parts = counts_parts
        self._failure_stops = failure_stops
        self.version = "default"
        self.epoch = 0
        self.session: Session | None = None
        self.failure: str | None = None
        """Why the engine is out of service; None while it is in service."""

    def start(self, *, fails: bool, events: list[Event]) -> None:
        if self.session is not None:
            raise Refused("conflict", "a weight session is open: finish it before starting another")
        if fails:
            events.append(UpdateFailed(phase="start", wrote=False, why=_BROKEN))
            raise Refused("failed", f"start_weight_update: {_BROKEN}; nothing was written, nothing has changed")
        self.session = Session()
        events.append(UpdateStarted())

    def receive(self, part: int, of: int, *, spoilt: int | None, fails: bool, events: list[Event]) -> None:
        """A part comes in, tensor by tensor: `spoilt` says which of them, counted from 0, is bad; if it `fails`, the source
        breaks after the first."""
        session = self._open_session("update_weights")
        if self._counts_parts and session.of not in (None, of):
            raise Refused("invalid", f"got part {part} of {of}, expected a part of {session.of} as before in this session")
        if spoilt == 0 and not session.wrote:
            events.append(UpdateFailed(phase="update", wrote=False, why=_REFUSED))
            raise Refused("failed", f"update_weights: {_REFUSED}; nothing was written, the session stays open")
        if not session.wrote:
            self.epoch += 1
        if fails or spoilt is not None:
            self._break("update", _REFUSED if spoilt == 0 or not fails else _BROKEN, events)
        session.of = of
        session.parts |= 1 << (part - 1)
        events.append(PartReceived(part=part, of=of, tensors=0, bytes=0))

    def finish(self, version: str | None, *, fails: bool, events: list[Event]) -> None:
        session = self._open_session("finish_weight_update")
        if self.failure is not None and not session.wrote_all:
            raise Refused("conflict", f"{self.failure}, so every tensor must be sent before finish: send the parts that are missing")
        if self._counts_parts and session.of is not None and not session.wrote_all:
            raise Refused("conflict", f"not all {session.of} parts were sent: send the others before finish")
        if fails and session.wrote and self._failure_stops:
            self._break("finish", _BROKEN, events)
        if fails:
            events.append(UpdateFailed(phase="finish", wrote=session.wrote, why=_BROKEN))
            raise Refused("failed", f"finish_weight_update: {_BROKEN}; the session stays open")
        self.session = None
        self.failure = None
        self.version = self.version if version is None else version
        events.append(Committed(version=self.version))

    def abandon(self) -> None:
        """The session is over, nothing was written."""
        self.session = None

    def drop(self) -> None:
        """What lies in memory is not weights any more: nothing may be sampled until a full update succeeds."""
        self.failure = "sleep at level 2 dropped the weights"

    def _open_session(self, verb: str) -> Session:
        if self.session is None:
            raise Refused("conflict", f"{verb} without a weight session: call start_weight_update first")
        return self.session

    def _break(self, phase: Literal["update", "finish"], why: str, events: list[Event]) -> None:
        """A failure after the first byte: nothing may be sampled until a full update succeeds."""
        self.session = None
        events.append(UpdateFailed(phase=phase, wrote=True, why=why))
        if not self._failure_stops:
            raise Refused("failed", f"a weight update failed half-way, in {phase}: {why}; what was written is served")
        self.failure = f"a weight update failed half-way, in {phase}"
        raise Refused("failed", f"{self.failure}: {why}; the engine is out of service until a full update succeeds")
