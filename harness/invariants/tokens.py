"""Tokens on their way from the sampler to the client: none lost, doubled or shifted."""

from __future__ import annotations

from harness.events import Closed, Delivered, Finished, Landed, Launched, Output
from harness.invariants.invariant import Invariant, invariant, listed
from harness.replay import NEVER, Flight, Request


@invariant("token-conservation", level=1)
class TokenConservation(Invariant):
    """Tokens delivered to the client are the sampled sequence: none lost, doubled or shifted, across pause, preemption and
    resume; a step computes a request once, and no token that is neither known nor in flight."""

    def before_launched(self, seq: int, event: Launched) -> None:
        if (flight := self.replay.flights.get(event.step)) is not None:
            self.violated(
                seq,
                f"step {event.step} was launched twice",
                expected="landed before another of its number",
                got="two in flight, of which one's tokens are lost",
                cause=[(flight.launched, f"launched step {event.step}")],
            )
        requests, ids = self.replay.requests, set()
        for id, first, count in event.batch:
            if id in ids:
                self.violated(seq, f"step {event.step} computes {id} twice", expected="one row", got=f"another, from position {first}")
            ids.add(id)
            request = requests.get(id)
            if request is not None and request.prompt is not None and first + count > request.num_tokens + request.placeholders:
                self._beyond(seq, event, request, first + count - 1)

    def _beyond(self, seq: int, event: Launched, request: Request, position: int) -> None:
        self.violated(
            seq,
            f"step {event.step} computes tokens of {request.id} that do not exist",
            expected=f"positions below {request.num_tokens + request.placeholders}: {request.num_tokens} tokens are known"
            + (f", {request.placeholders} in flight" if request.placeholders else ""),
            got=f"position {position}",
            once=("beyond", request),
        )

    def before_landed(self, seq: int, event: Landed) -> None:
        """Every row that reached its request's last token samples one, in scheduling order; a partial prefill samples none."""
        flight = self.replay.flights.get(event.step)
        if flight is None:
            self.violated(
                seq,
                f"step {event.step} landed without having been launched",
                expected=f"a step in flight: {listed(self.replay.flights)}",
                got=f"tokens of step {event.step}",
            )
        elif [request for request, _ in event.sampled] != flight.samplers:
            self._compare_samplers(seq, event, flight)

    def _compare_samplers(self, seq: int, event: Landed, flight: Flight) -> None:
        rows = dict(zip(flight.samplers, flight.requests, strict=True))

        def judged(id: str) -> bool:
            """Rows of requests that ended or were preempted since the launch are judged by stale-frame;
            without a prompt nobody knows which row is a request's last."""
            request = rows.get(id) or self.replay.requests.get(id)
            return request is None or (request.prompt is not None and (id not in rows or flight.fate(request) is None))

        due = [id for id in flight.samplers if judged(id)]
        got = [id for id, _ in event.sampled if judged(id)]
        if due != got:
            self.violated(
                seq,
                f"step {flight.step} did not sample one token for each row that reached its request's last token",
                expected=f"tokens for {listed(due)}",
                got=f"tokens for {listed(got)}",
                cause=[(flight.launched, f"launched step {flight.step}")],
            )

    def before_finished(self, seq: int, event: Finished) -> None:
        request = self.replay.requests.get(event.request)
        if request is not None and event.output_tokens != len(request.output):
            self.violated(
                seq,
                f"{request.id} ended with another number of tokens than were sampled for it",
                expected=f"output_tokens {len(request.output)}",
                got=f"output_tokens {event.output_tokens}",
            )

    def before_delivered(self, seq: int, event: Delivered) -> None:
        requests = self.replay.requests
        given: dict[str, int] = {}
        for output in event.outputs:
            id, first, tokens, reason = output
            request = requests.get(id)
            if request is None:
                self._unknown(seq, output)
                continue
            # The replay takes in the whole event at once: outputs of one request before this one are not in `delivered` yet.
            at = len(request.delivered) + given.get(id, 0)
            if first != at or request.end_delivered != NEVER or request.output[first : first + len(tokens)] != [*tokens]:
                self._wrong_tokens(seq, output, request, at)
            if reason is not None:
                self._check_end(seq, output, request, at + len(tokens))
            given[id] = given.get(id, 0) + len(tokens)

    def _unknown(self, seq: int, output: Output) -> None:
        self.violated(
            seq,
            f"tokens were delivered for {output.request}, which the engine never took on",
            expected="outputs of accepted requests only",
            got=f"{len(output.tokens)} tokens, finish reason {output.finish_reason}",
            once=("unknown", output.request),
        )

    def _wrong_tokens(self, seq: int, output: Output, request: Request, at: int) -> None:
        """Say what is wrong with the first bad output of a request; what follows it is shifted by the same cause."""
        id, first, tokens, _ = output
        due = request.output[at : at + max(len(tokens), 1)]
        expected, got = f"from token {at}: {listed(due)}", f"from token {first}: {listed(tokens)}"
        if request.end_delivered != NEVER:
            what, expected = "was delivered more after its finish reason", f"nothing after event {request.end_delivered}"
        elif first < at:
            what = f"was delivered token {first} twice"
        elif first > at:
            what = f"lost {first - at} tokens on the way to its client"
        elif first + len(tokens) > len(request.output):
            what = "was delivered tokens that no step sampled"
        else:
            what = "was delivered other tokens than were sampled"
        self.violated(
            seq, f"{id} {what}", expected=expected, got=got, cause=[(request.end_delivered, f"{id}'s end was delivered")], once=request
        )

    def _check_end(self, seq: int, output: Output, request: Request, delivered: int) -> None:
        id, finished, got = request.id, request.finished, str(output.finish_reason)
        cause = [(request.ended, f"{id} finished"), (request.end_delivered, f"{id}'s finish reason was delivered")]
        if finished is None:
            self.violated(seq, f"{id}'s end was delivered while it was live", expected="no finish reason", got=got)
        elif request.end_delivered != NEVER:
            self.violated(seq, f"{id}'s finish reason was delivered twice", expected="once", got=f"{got} again", cause=cause)
        elif output.finish_reason != finished.reason:
            self.violated(seq, f"{id} was told another finish reason than it had", expected=finished.reason, got=got, cause=cause)
        if finished is not None and delivered < len(request.output):
            self.violated(
                seq,
                f"{id} ended with tokens that never reached its client",
                expected=f"{len(request.output)} tokens delivered",
                got=f"{delivered}, missing {listed(request.output[delivered:])}",
                cause=cause[:1],
                once=request,
            )

    def at_end(self, seq: int, closed: Closed) -> None:
        if closed.cut_short:
            return
        for request in self.replay.ending:
            self.violated(
                seq,
                f"{request.id} finished and its client was never told",
                expected="its finish reason delivered once",
                got="no `delivered` with a finish reason",
                cause=[(request.ended, f"{request.id} finished")],
            )
        for flight in self.replay.flights.values():
            self.violated(
                seq,
                f"step {flight.step} never landed",
                expected=f"tokens for {listed(flight.samplers)}",
                got="no `landed`",
                cause=[(flight.launched, f"launched step {flight.step}")],
            )
        for request in self.replay.live():
            if len(request.delivered) < len(request.output):
                self.violated(
                    seq,
                    f"{request.id} has tokens that never reached its client",
                    expected=f"{len(request.output)} tokens delivered",
                    got=f"{len(request.delivered)}",
                    once=request,
                )
