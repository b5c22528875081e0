"""A request's books: how many tokens it has, how many it may have, and why it ended."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

from harness.events import Accepted, Blocked, Finished, Landed
from harness.invariants.invariant import Invariant, invariant
from harness.operations import Submit
from harness.replay import Replay, Request


class _Asked(NamedTuple):
    submit: Submit
    limit: int
    """Output tokens that the request may have."""


@invariant("bookkeeping-shape", level=1)
class BookkeepingShape(Invariant):
    """Output stays within max_tokens and max_model_len, across preemption and resume; a request ends by `length` exactly
    at its limit and by `stop` at a token that ends a sequence; its prompt is counted as it was sent."""

    def __init__(self, replay: Replay) -> None:
        super().__init__(replay)
        self._asked: dict[Request, _Asked] = {}
        """What was asked for by requests that are live or blocked."""

    def after_accepted(self, seq: int, event: Accepted) -> None:
        self._came(event.request)

    def after_blocked(self, seq: int, event: Blocked) -> None:
        self._came(event.request)

    def _came(self, id: str) -> None:
        calls = [call.operation for call in self.replay.calls.values() if isinstance(call.operation, Submit) and call.operation.id == id]
        if calls:
            request = self.replay.requests[id]
            self._asked[request] = _Asked(calls[-1], self._limit(request, calls[-1]))

    def before_landed(self, seq: int, event: Landed) -> None:
        requests, asked = self.replay.requests, self._asked
        for id, _ in event.sampled:
            request = requests.get(id)
            due = asked.get(request) if request is not None else None
            if request is not None and due is not None and len(request.output) >= due.limit and request.finished is None:
                self._beyond(seq, event, request, due)

    def _beyond(self, seq: int, event: Landed, request: Request, asked: _Asked) -> None:
        self.violated(
            seq,
            f"step {event.step} sampled a token beyond the limit of {request.id}",
            expected=f"at most {asked.limit} output tokens: max_tokens {asked.submit.max_tokens}{self._of_model(request)}",
            got=f"token {len(request.output) + 1}",
            once=("limit", request),
        )

    def steady_for(self, requests: Sequence[Request]) -> int:
        """Beyond its limit a request was reported."""
        asked = self._asked
        left = [asked[request].limit - len(request.output) for request in requests if request in asked]
        return min((steps for steps in left if steps >= 0), default=sys.maxsize)

    def before_finished(self, seq: int, event: Finished) -> None:
        request = self.replay.requests.get(event.request)
        asked = self._asked.get(request) if request is not None else None
        if request is None or request.finished is not None or asked is None:
            return
        output, (submit, limit) = len(request.output), asked
        if event.reason == "length" and output != limit:
            self._wrong_end(seq, event, f"{limit} output tokens: max_tokens {submit.max_tokens}{self._of_model(request)}", f"{output}")
        elif event.reason == "stop" and (submit.ignore_eos or not request.output or request.output[-1] not in self._eos):
            last = request.output[-1] if request.output else "none"
            wanted = "no such end: ignore_eos was asked for" if submit.ignore_eos else f"a last token of {self._eos}"
            self._wrong_end(seq, event, wanted, f"last token {last}")
        if request.prompt is not None and event.prompt_tokens != len(request.prompt):
            self.violated(
                seq,
                f"{event.request}'s prompt is counted as another length than was sent",
                expected=f"prompt_tokens {len(request.prompt)}",
                got=f"prompt_tokens {event.prompt_tokens}",
            )

    def after_finished(self, seq: int, event: Finished) -> None:
        request = self.replay.requests.get(event.request)
        if request is not None:
            self._asked.pop(request, None)

    def _wrong_end(self, seq: int, event: Finished, expected: str, got: str) -> None:
        self.violated(seq, f"{event.request} ended by `{event.reason}` where that is not so", expected=expected, got=got)

    @property
    def _eos(self) -> tuple[int, ...]:
        return self.replay.opened.eos_token_ids if self.replay.opened else ()

    def _limit(self, request: Request, submit: Submit) -> int:
        most, longest = submit.max_tokens, self._max_model_len
        return most if longest is None or request.prompt is None else min(most, longest - len(request.prompt))

    def _of_model(self, request: Request) -> str:
        if self._max_model_len is None or request.prompt is None:
            return ""
        return f", max_model_len {self._max_model_len} less {len(request.prompt)} of the prompt"

    @property
    def _max_model_len(self) -> int | None:
        """The longest that a request can be. No more than the pool holds: an engine that lets in what cannot fit ends it there."""
        shape = self.replay.opened.engine if self.replay.opened else {}
        length, blocks, size = (shape.get(name) for name in ("max_model_len", "num_blocks", "block_size"))
        if not isinstance(length, int):
            return None
        return min(length, blocks * size) if isinstance(blocks, int) and isinstance(size, int) else length
