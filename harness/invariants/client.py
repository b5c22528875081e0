"""What the promises mean to clients: judged on their own log, and against what ranks say they handed out if these kept one.

Nothing here needs to see into the engine. What a client cannot be sure of is not held against the engine: in which order
its calls were taken up, and whether what arrives just now was sent before or after another answer. One thing it may rely
on: outputs are heard before the pause that ended them is answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.client import ClientCall, ClientRequest, ClientView
from harness.events import Answered, Asked, Closed, Heard, Output, Returned, VersionSpan
from harness.invariants.invariant import ClientInvariant, client_invariant, listed
from harness.invariants.versions import joined, not_a_partition, spans_in_words
from harness.operations import Abort, FinishWeightUpdate, IsPaused, Pause, Sleep, Submit, SwapWeights, UpdateWeightVersion
from harness.replay import NEVER


def _asked(call: ClientCall) -> tuple[int, str]:
    return call.asked, f"{call.verb} (call {call.number}) asked"


@client_invariant("token-conservation")
class HeardAsGiven(ClientInvariant):
    """A client hears each request's tokens from the first to the last, each once, and what it hears is what was handed out,
    all of it, unless the client itself asked for its abort: that may overtake tokens on their way."""

    def __init__(self, replay: ClientView) -> None:
        super().__init__(replay)
        self._unexplained: dict[ClientRequest, int] = {}
        """Requests of which more was heard than ranks tell of, and when; the log of one may have broken off."""
        self._given_up: set[ClientRequest] = set()
        """Those that an `abort` call of the client names."""

    def after_asked(self, seq: int, event: Asked) -> None:
        call = self.replay.calls.get(event.call)
        if call is not None and isinstance(operation := call.operation, Abort):
            live = self.replay.live.values()
            self._given_up.update(one for one in live if operation.ids == "all" or one.submit.id in operation.ids)

    def before_heard(self, seq: int, event: Heard) -> None:
        heard: dict[str, int] = {}
        for output in event.outputs:
            request = self.replay.request(output.request)
            if request is None:
                self.violated(
                    seq,
                    f"outputs of {output.request} were heard, and no such request is open",
                    expected="outputs of requests that were handed in and have not come back",
                    got=f"{len(output.tokens)} tokens, finish reason {output.finish_reason}",
                    once=("unknown", output.request),
                )
                continue
            # The view takes in the whole event at once: outputs of one request before this one are not in `tokens` yet.
            self._check_place(seq, output, request, len(request.tokens) + heard.get(request.submit.id, 0))
            heard[request.submit.id] = heard.get(request.submit.id, 0) + len(output.tokens)

    def _check_place(self, seq: int, output: Output, request: ClientRequest, at: int) -> None:
        id, first, tokens, _ = output
        if request.end_heard != NEVER:
            what, expected = "was heard of again after its end", f"nothing after event {request.end_heard}"
        elif first < at:
            what, expected = f"had token {first} heard twice", f"from token {at} on"
        elif first > at:
            what, expected = f"lost {first - at} tokens on the way to its client", f"from token {at} on"
        else:
            return
        self.violated(
            seq,
            f"{id} {what}",
            expected=expected,
            got=f"from token {first}: {listed(tokens)}",
            cause=[(request.asked, f"{id} handed in"), (request.end_heard, f"{id}'s end heard")],
            once=request,
        )

    def after_heard(self, seq: int, event: Heard) -> None:
        for id in {output.request for output in event.outputs}:
            request = self.replay.request(id)
            if request is None or not self.replay.ranks:
                continue
            given = self.replay.given_to(request)
            handed_out = given.tokens if given is not None else []
            if len(request.tokens) > len(handed_out):
                self._unexplained.setdefault(request, seq)
            elif request.tokens != handed_out[: len(request.tokens)]:
                self._differ(seq, request, handed_out)

    def _differ(self, seq: int, request: ClientRequest, handed_out: Sequence[int]) -> None:
        self.violated(
            seq,
            f"{request.submit.id} was heard to have other tokens than were handed out",
            expected=listed(handed_out),
            got=listed(request.tokens),
            cause=[(request.asked, f"{request.submit.id} handed in")],
            once=request,
        )

    def before_answered(self, seq: int, event: Answered) -> None:
        request = self.replay.live.get(event.call)
        if request is None or event.answer is None:
            return
        id, told = request.submit.id, event.answer.get("output_tokens", len(request.tokens))
        given = self.replay.given_to(request)
        if told != len(request.tokens):
            self._short(seq, request, f"{id} came back with another number of tokens than were heard", f"output_tokens {told}")
        elif given is not None and len(given.tokens) > len(request.tokens) and request not in self._given_up:
            self._short(seq, request, f"{id} came back before all that was handed out for it was heard", f"{len(given.tokens)} tokens")

    def _short(self, seq: int, request: ClientRequest, sentence: str, expected: str) -> None:
        got, cause = f"{len(request.tokens)} tokens heard", [(request.asked, f"{request.submit.id} handed in")]
        self.violated(seq, sentence, expected=expected, got=got, cause=cause, once=request)

    def at_end(self, seq: int, closed: Closed) -> None:
        if not self.replay.unclosed:
            for request, heard in self._unexplained.items():
                given = self.replay.given_to(request)
                self._differ(heard, request, given.tokens if given is not None else ())
        if closed.cut_short:
            return
        for request in self.replay.live.values():
            given = self.replay.given_to(request)
            if given is not None and len(request.tokens) < len(given.tokens):
                self._short(seq, request, f"{request.submit.id} has tokens that its client never heard", f"{len(given.tokens)} tokens")


@client_invariant("quiet-after-pause")
class NothingHeardWhilePaused(ClientInvariant):
    """When a pause is answered its client has heard everything, and hears no token more before a call asks for more."""

    def before_answered(self, seq: int, event: Answered) -> None:
        call = self.replay.calls.get(event.call)
        if call is None or event.error is not None or not isinstance(call.operation, Pause | Sleep) or not call.owed:
            return
        self.violated(
            seq,
            f"{call.verb} (call {call.number}) was answered before its client had heard what was handed out",
            expected="every output heard that was handed out before",
            got=f"outputs of {listed(call.owed)} on their way",
            cause=[_asked(call)],
        )

    def before_heard(self, seq: int, event: Heard) -> None:
        paused_since = self.replay.paused_since
        if paused_since == NEVER or not (running := [output.request for output in event.outputs if output.tokens]):
            return
        self.violated(
            seq,
            f"tokens of {listed(running)} were heard although a pause had been answered",
            expected="no token before a call that asks for more",
            got=listed(output.tokens for output in event.outputs),
            cause=[(paused_since, "pause answered")],
            once=paused_since,
        )

    def at_end(self, seq: int, closed: Closed) -> None:
        if closed.cut_short:
            return
        for call in self.replay.calls.values():
            if isinstance(call.operation, Pause | Sleep):
                self.violated(
                    seq,
                    f"{call.verb} (call {call.number}) was never answered",
                    expected="an answer or an error within the bound, counted for `wait` from the last request's end",
                    got=f"nothing until the run closed as {closed.why}",
                    cause=[_asked(call)],
                )


@client_invariant("mode-fidelity")
class ModeAsHeard(ClientInvariant):
    """A pause that is answered has ended whom its mode ends, of those that had been heard of before it was asked for; nobody is
    aborted without a call that may abort."""

    def __init__(self, replay: ClientView) -> None:
        super().__init__(replay)
        self._underway: dict[int, tuple[ClientRequest, ...]] = {}
        """By pause call: who was certainly accepted and live when it was asked for."""
        self._aborts: list[tuple[int, tuple[str, ...] | None]] = []
        """Calls that may abort: when each was asked for, and the ids, None if it may be anyone."""

    def after_asked(self, seq: int, event: Asked) -> None:
        live = (request for request in self.replay.live.values() if request.nth != NEVER and request.finish_reason is None)
        self._underway[event.call] = tuple(live)
        operation = self.replay.calls[event.call].operation
        if isinstance(operation, Abort):
            self._aborts.append((seq, None if operation.ids == "all" else operation.ids))
        elif operation is None or (isinstance(operation, Pause | Sleep) and operation.mode in ("abort", None)):
            self._aborts.append((seq, None))

    def before_answered(self, seq: int, event: Answered) -> None:
        call = self.replay.calls.get(event.call)
        underway = self._underway.pop(event.call, ())
        if call is None or event.error is not None or not isinstance(call.operation, Pause | Sleep):
            return
        left = [request.submit.id for request in underway if request.finish_reason is None and request.call in self.replay.live]
        mode = call.operation.mode
        if mode in ("abort", "wait") and left:
            self.violated(
                seq,
                f"{call.verb}({mode}) was answered with requests {'alive' if mode == 'abort' else 'unfinished'}",
                expected=f"the end heard of all {len(underway)} requests that had been heard of before the call",
                got=f"{listed(left)} without an end",
                cause=[_asked(call)],
            )

    def before_heard(self, seq: int, event: Heard) -> None:
        for output in event.outputs:
            request = self.replay.request(output.request)
            if output.finish_reason == "abort" and request is not None:
                self._check_abort(seq, request)

    def _check_abort(self, seq: int, request: ClientRequest) -> None:
        """The abort must have been asked for while the request was on its way or live; one call may overtake another."""
        id = request.submit.id
        if any((ids is None or id in ids) and self._may_reach(asked, request) for asked, ids in self._aborts):
            return
        self.violated(
            seq,
            f"{id} was aborted, and nobody asked for that",
            expected="a call that aborts it, or a pause(abort)",
            got="finish reason abort",
            cause=[(request.asked, f"{id} handed in")],
            once=request,
        )

    def _may_reach(self, asked: int, request: ClientRequest) -> bool:
        return asked > request.asked or any(call.asked == asked for call in self.replay.calls.values())


@client_invariant("one-ending")
class OneAnswer(ClientInvariant):
    """Each submission comes back once, with the end that was heard, unless the run ends with the engine paused or out of service."""

    def before_answered(self, seq: int, event: Answered) -> None:
        request = self.replay.live.get(event.call)
        if request is None or event.answer is None:
            return
        reason = event.answer.get("finish_reason")
        if request.finish_reason is not None and reason != request.finish_reason:
            self.violated(
                seq,
                f"{request.submit.id} came back with another finish reason than was heard",
                expected=str(request.finish_reason),
                got=str(reason),
                cause=[(request.end_heard, "end heard")],
            )
        given = self.replay.given_to(request)
        if given is not None and given.finished is not None and reason not in (None, given.finished.reason):
            expected = given.finished.reason
            self.violated(seq, f"{request.submit.id} came back with another end than it had", expected=expected, got=str(reason))

    def at_end(self, seq: int, closed: Closed) -> None:
        if closed.cut_short or closed.why in ("paused", "out-of-service"):
            return
        for request in self.replay.live.values():
            heard = f"{len(request.tokens)} tokens heard, {'its end too' if request.end_heard != NEVER else 'no end'}"
            self.violated(
                seq,
                f"{request.submit.id} was handed in and never came back",
                expected=f"an end or an error: the run closed as {closed.why}",
                got=heard,
                cause=[(request.asked, f"{request.submit.id} handed in")],
            )


@client_invariant("api-truth")
class EveryCallAnswered(ClientInvariant):
    """Every call is answered, once, within the bound and as the core answered it; what was aborted is not heard of again."""

    def __init__(self, replay: ClientView) -> None:
        super().__init__(replay)
        self._aborted: dict[ClientRequest, ClientCall] = {}
        """Live requests that an abort call reached that was answered, and that call."""

    def before_answered(self, seq: int, event: Answered) -> None:
        call = self.replay.calls.get(event.call)
        if call is None:
            self.violated(seq, f"call {event.call} was answered and was not open", expected="one answer to each call", got="another")
            return
        self._compare_with_core(seq, event, call)
        if isinstance(call.operation, Abort) and event.error is None:
            ids = call.operation.ids
            reached = (request for request in self.replay.live.values() if ids == "all" or request.submit.id in ids)
            # Only of a request that had been heard of is it certain that it had been accepted.
            certain = [one for one in reached if one.asked < call.asked and one.heard_at and one.heard_at[0][1] < call.asked]
            self._aborted.update(dict.fromkeys(certain, call))

    def _compare_with_core(self, seq: int, event: Answered, call: ClientCall) -> None:
        returned = call.returned
        if returned is None or (isinstance(call.operation, Submit) and returned.error is None):
            return  # A submission that was taken on comes back when it ends.
        said, meant = _outcome(event), _outcome(returned)
        if said != meant:
            sentence = f"{call.verb} (call {call.number}) was answered otherwise than the core answered"
            self.violated(seq, sentence, expected=meant, got=said, cause=[_asked(call)])

    def before_heard(self, seq: int, event: Heard) -> None:
        for output in event.outputs:
            request = self.replay.request(output.request)
            if request is None or not output.tokens or (call := self._aborted.get(request)) is None:
                continue
            self.violated(
                seq,
                f"{output.request} went on although its abort had been answered",
                expected="no token more",
                got=listed(output.tokens),
                cause=[_asked(call)],
                once=request,
            )

    def at_end(self, seq: int, closed: Closed) -> None:
        if closed.cut_short:
            return
        for call in self.replay.calls.values():
            if not isinstance(call.operation, Submit | Pause | Sleep):  # one-ending and quiet-after-pause speak of those
                self.violated(
                    seq,
                    f"{call.verb} (call {call.number}) was never answered",
                    expected="an answer or an error within the bound",
                    got=f"nothing until the run closed as {closed.why}",
                    cause=[_asked(call)],
                )


def _outcome(event: Answered | Returned) -> str:
    return f"refused: {event.error.code}" if event.error is not None else str(dict(sorted((event.answer or {}).items())))


@client_invariant("flags-converge")
class FlagsAsAnswered(ClientInvariant):
    """`is_paused` says what the answers to the client's own calls leave no doubt of."""

    def before_answered(self, seq: int, event: Answered) -> None:
        view, call = self.replay, self.replay.calls.get(event.call)
        if call is None or event.answer is None or not isinstance(call.operation, IsPaused):
            return
        said = event.answer.get("is_paused")
        for since, is_so, what in ((view.paused_since, True, "pause answered"), (view.running_since, False, "resume answered")):
            if NEVER < since < call.asked and said is not is_so:
                self.violated(
                    seq,
                    f"is_paused said {said} of an engine that is {'paused' if is_so else 'running'}",
                    expected=str(is_so),
                    got=str(said),
                    cause=[(since, what), _asked(call)],
                )


@client_invariant("bookkeeping-shape")
class BooksAsAnswered(ClientInvariant):
    """Output stays within max_tokens; a request ends by `length` exactly at its limit; prompt and output are counted as they are."""

    def before_heard(self, seq: int, event: Heard) -> None:
        for output in event.outputs:
            request = self.replay.request(output.request)
            if request is None:
                continue
            length, limit = output.first + len(output.tokens), self._limit(request)
            if length > limit:
                self._wrong(seq, request, "has more tokens than it may have", f"at most {limit}", str(length), once=("limit", request))
            if output.finish_reason == "length" and length != limit:
                self._wrong(seq, request, "ended by `length` where that is not so", f"{limit} tokens", str(length))
            elif output.finish_reason == "stop" and request.submit.ignore_eos:
                self._wrong(seq, request, "ended by `stop`", "no such end: ignore_eos was asked for", f"at token {length}")

    def before_answered(self, seq: int, event: Answered) -> None:
        request = self.replay.live.get(event.call)
        if request is None or event.answer is None:
            return
        sent = len(request.submit.prompt.token_ids or ())
        told = event.answer.get("prompt_tokens", sent)
        if told != sent:
            self._wrong(seq, request, "has its prompt counted as another length than was sent", f"prompt_tokens {sent}", str(told))

    def _wrong(self, seq: int, request: ClientRequest, what: str, expected: str, got: str, once: Any = None) -> None:
        cause = [(request.asked, f"{request.submit.id} handed in")]
        self.violated(seq, f"{request.submit.id} {what}", expected=expected, got=got, cause=cause, once=once)

    def _limit(self, request: ClientRequest) -> int:
        """Output tokens that the request may have."""
        longest = (self.replay.opened.engine if self.replay.opened else {}).get("max_model_len")
        most = request.submit.max_tokens
        return min(most, longest - len(request.submit.prompt.token_ids or ())) if isinstance(longest, int) else most


@client_invariant("version-attribution")
class VersionsAsAnswered(ClientInvariant):
    """The spans that a request comes back with partition its output, and each label is of weights that may have been resident
    between the moment after which its tokens were sampled and that at which they were heard."""

    def __init__(self, replay: ClientView) -> None:
        super().__init__(replay)
        self._reported = False
        self._residence: list[tuple[str | None, int, int | None]] = [(None, NEVER, None)]
        """(label, from when on it may have been resident, until when): event numbers. None: the label that was there at first."""

    def unseen(self) -> str | None:
        return None if self._reported else "no request came back with weight versions"

    def after_asked(self, seq: int, event: Asked) -> None:
        if (version := _version(self.replay.calls[event.call])) is not None:
            self._residence.append((version, seq, None))

    def before_answered(self, seq: int, event: Answered) -> None:
        call = self.replay.calls.get(event.call)
        if call is not None and event.error is None and (version := _version(call)) is not None:
            self._supersede(seq, call, version)
        request = self.replay.live.get(event.call)
        versions = (event.answer or {}).get("weight_versions")
        if request is not None and versions is not None:
            self._reported = True
            self._check(seq, request, tuple(VersionSpan(*span) for span in versions))

    def _supersede(self, seq: int, call: ClientCall, version: str) -> None:
        """Labels asked for before this one are resident no more; one that was asked for meanwhile may come after it."""
        self._residence = [
            (label, since, seq if until is None and since < call.asked else until) for label, since, until in self._residence
        ]

    def _check(self, seq: int, request: ClientRequest, spans: Sequence[VersionSpan]) -> None:
        id, cause = request.submit.id, [(request.asked, f"{request.submit.id} handed in")]
        flaw = not_a_partition(tuple(spans), len(request.tokens))
        given = self.replay.given_to(request)
        told = given.finished.spans if given is not None and given.finished is not None else None
        if flaw is not None:
            got = spans_in_words(tuple(spans))
            self.violated(
                seq, f"{id}'s spans do not partition its output", expected="[0, n) without gaps", got=f"{got}: {flaw}", cause=cause
            )
        elif told is not None and joined(tuple(spans)) != joined(told):
            expected, got = spans_in_words(told), spans_in_words(tuple(spans))
            self.violated(seq, f"{id} came back with other spans than the core reported", expected=expected, got=got, cause=cause)
        else:
            self._check_labels(seq, request, spans)

    def _check_labels(self, seq: int, request: ClientRequest, spans: Sequence[VersionSpan]) -> None:
        for version, start, end in spans:
            for index in range(start, end):
                after, heard = request.heard_at[index]
                possible = [label for label, since, until in self._residence if since < heard and (until is None or until > after)]
                if (self._is_first(version) and None in possible) or version in possible:
                    continue
                self.violated(
                    seq,
                    f"{request.submit.id}'s token {index} is labelled {version}, which cannot have been resident when it was sampled",
                    expected=f"one of {listed('the first label' if label is None else label for label in possible)}",
                    got=version,
                    cause=[(after, "not sampled before"), (heard, "heard")],
                    once=(request, version),
                )
                break

    def _is_first(self, version: str) -> bool:
        """It may be the label that was there before any call: nobody asked for it, or it is that of an engine without updates."""
        return version == "default" or all(label != version for label, _, _ in self._residence)


def _version(call: ClientCall) -> str | None:
    """The label that a call asks for."""
    named = isinstance(call.operation, FinishWeightUpdate | SwapWeights | UpdateWeightVersion)
    return call.operation.version if named else None  # type: ignore[union-attr]
