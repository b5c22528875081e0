"""Weight versions: which weights sampled a token, and whether the engine says so."""

from __future__ import annotations

from harness.events import Finished, Landed, Relabelled, VersionSpan
from harness.invariants.invariant import Invariant, invariant, listed
from harness.operations import UpdateWeightVersion
from harness.replay import NEVER


@invariant("version-attribution", level=1)
class VersionAttribution(Invariant):
    """A token's version is the one resident when it was sampled; its epoch never falls within a request and was
    committed, unless the update was allowed beside steps; a request's version spans partition its output; a label is set as
    its call says, and under an effective pause unless allow_unpaused was."""

    def before_relabelled(self, seq: int, event: Relabelled) -> None:
        replay = self.replay
        asked = [one for call in replay.calls.values() if isinstance(one := call.operation, UpdateWeightVersion) and call.received != NEVER]
        if asked and all(event.version != one.version for one in asked):
            self.violated(seq, "the version was set to another label than was asked for", expected=asked[-1].version, got=event.version)
        if (replay.pause_mode is None or replay.pause_pending) and not any(one.allow_unpaused for one in asked):
            self.violated(
                seq,
                f"the version was set to {event.version} without an effective pause",
                expected="the call refused, as allow_unpaused was not asked for",
                got=f"a {replay.pause_mode} pause that is pending" if replay.pause_pending else "a running engine",
                cause=[(replay.pending_since, "pause taken up")] if replay.pause_pending else [],
            )

    def before_landed(self, seq: int, event: Landed) -> None:
        flight = self.replay.flights.get(event.step)
        if flight is None or not event.sampled:
            return
        if not flight.committed:
            self.violated(
                seq,
                f"step {event.step} sampled from weights that were never committed",
                expected="no token before a commit",
                got=f"tokens of epoch {flight.weights.epoch} for {listed(id for id, _ in event.sampled)}",
                cause=[
                    (self.replay.epoch_starts[flight.weights.epoch], f"first byte of epoch {flight.weights.epoch}"),
                    (flight.launched, f"launched step {event.step}"),
                ],
                once=("uncommitted", flight.weights.epoch),
            )
        last = self.replay.last_landed
        if last is not None and last.weights.epoch > flight.weights.epoch:
            self._check_order(seq, event, flight.weights.epoch)

    def _check_order(self, seq: int, event: Landed, epoch: int) -> None:
        for id, _ in event.sampled:
            request = self.replay.requests.get(id)
            if request is not None and request.weights is not None and request.weights.epoch > epoch:
                self.violated(
                    seq,
                    f"the epoch of {id}'s tokens falls",
                    expected=f"epoch {request.weights.epoch} or later",
                    got=f"epoch {epoch}, from step {event.step}",
                    once=request,
                )

    def before_finished(self, seq: int, event: Finished) -> None:
        request = self.replay.requests.get(event.request)
        if request is None or request.finished is not None:
            return
        expected = request.spans()
        if event.spans == expected:
            return
        if (flaw := not_a_partition(event.spans, len(request.output))) is not None:
            self.violated(
                seq,
                f"{event.request}'s version spans do not partition its output: {flaw}",
                expected=spans_in_words(expected),
                got=spans_in_words(event.spans),
            )
        elif joined(event.spans) != expected:
            index = next(i for i in range(len(request.output)) if _version_at(event.spans, i) != _version_at(expected, i))
            self.violated(
                seq,
                f"{event.request}'s token {index} is labelled with weights that did not sample it",
                expected=spans_in_words(expected),
                got=spans_in_words(event.spans),
            )


def not_a_partition(spans: tuple[VersionSpan, ...], length: int) -> str | None:
    """What keeps the spans from partitioning `length` tokens, in words; None if they do."""
    at = 0
    for version, start, end in spans:
        if start != at or end <= start:
            return f"[{start}, {end}) of {version} follows token {at}"
        at = end
    return None if at == length else f"they end at {at} of {length} tokens"


def joined(spans: tuple[VersionSpan, ...]) -> tuple[VersionSpan, ...]:
    """The spans with neighbours of equal label made one."""
    found: list[VersionSpan] = []
    for span in spans:
        if found and found[-1].version == span.version:
            span = VersionSpan(span.version, found.pop().start, span.end)
        found.append(span)
    return tuple(found)


def _version_at(spans: tuple[VersionSpan, ...], index: int) -> str:
    return next(version for version, start, end in spans if start <= index < end)


def spans_in_words(spans: tuple[VersionSpan, ...]) -> str:
    """As `[v1 [0, 4), v2 [4, 9)]`."""
    return listed(f"{version} [{start}, {end})" for version, start, end in spans)
