"""A toy engine that keeps the promises, serves a tracer without a model, and breaks a promise when told to.

It knows of every KV entry which version wrote it, so it can say what a tracer's head would: that is all that
a client sees. Written from the contract; it shares nothing with our engine or model.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from pathlib import Path

from harness.tracer import CodeBook, Decoder, NotATracer

STEP_S = 0.002
SEATS = 4
BLOCK = 16


class Refusal(Exception):
    """A call that the engine refuses, with the status that a server answers."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class FakeRequest:
    """A request, and the version that wrote each of its KV entries."""

    def __init__(self, id: str, prompt: list[int], max_tokens: int, *, parked: bool) -> None:
        self.id = id
        self.tokens = list(prompt)
        self.prompt_tokens = len(prompt)
        self.max_tokens = max_tokens
        self.parked = parked
        self.running = False
        self.entries: list[str] = []
        self.labels: list[str] = []
        self.reason: str | None = None
        self.news: asyncio.Queue[tuple[list[int], str | None]] = asyncio.Queue()

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens


class FakeEngine:
    """Serves `version` of a tracer.

    Args:
        faults: what it does wrong: stale-cache, dropped-token, doubled-token, wrong-label, forgotten-label, deaf-pause, ignored-flag,
            endless-abort, lost-weights, silent-wait.
    """

    def __init__(self, book: CodeBook, version: str = "v1", *, faults: frozenset[str] = frozenset()) -> None:
        self.book = book
        self.version = version
        self.label = "default"
        self.faults = faults
        self.mode: str | None = None
        self.clear_cache = False
        self.sleeping = False
        self.session = False
        self.live: dict[str, FakeRequest] = {}
        self.cache: dict[tuple[int, ...], list[str]] = {}
        self.hits = 0
        self._waits: list[asyncio.Future[None]] = []
        self._after_pause = False

    # The loop.

    async def run(self) -> None:
        while True:
            await asyncio.sleep(STEP_S)
            if self.mode in (None, "wait") or "deaf-pause" in self.faults:
                self._step()
            if self._waits and not self._unfinished():
                self._complete()

    def _step(self) -> None:
        batch = [request for request in self.live.values() if request.running]
        free = SEATS - len(batch)
        for request in [request for request in self.live.values() if not request.running and not request.parked][:free]:
            request.running = True
            request.entries = self._cached(request.tokens)
            self.hits += len(request.entries)
            batch.append(request)
        for request in batch:
            self._sample(request)

    def _sample(self, request: FakeRequest) -> None:
        context = len(request.tokens)
        request.entries += [self.version] * (context - len(request.entries))
        stale = sum(version != self.version for version in request.entries) / context
        token = self._token(self.version, stale, self.book.position(request.tokens[-1]) + 1)
        request.tokens.append(token)
        request.labels.append(self.label)
        over = request.output_tokens == request.max_tokens
        delivered = [token]
        if self._after_pause and self.faults & {"dropped-token", "doubled-token"} and not over:
            self._after_pause = False
            delivered = [] if "dropped-token" in self.faults else [token, token]
        if delivered or over:
            request.news.put_nowait((delivered, "length" if over else None))
        if over:
            self._end(request, "length")

    def _token(self, version: str, stale: float, position: int) -> int:
        book = self.book
        level = 0 if stale == 0 else book.levels - 1 if stale == 1 else bisect_right(book.thresholds, stale)
        return book.prompt_tokens + ((int(version[1:]) - 1) * book.levels + level) * book.period + position % book.period

    def _cached(self, tokens: list[int]) -> list[str]:
        """The entries of the longest run of whole blocks that is cached; never all of the tokens."""
        for count in range((len(tokens) - 1) // BLOCK * BLOCK, 0, -BLOCK):
            if (entries := self.cache.get(tuple(tokens[:count]))) is not None:
                return list(entries)
        return []

    def _end(self, request: FakeRequest, reason: str) -> None:
        request.reason = reason
        for count in range(BLOCK, len(request.entries) + 1, BLOCK):
            self.cache[tuple(request.tokens[:count])] = request.entries[:count]
        del self.live[request.id]

    def _unfinished(self) -> list[FakeRequest]:
        return [request for request in self.live.values() if not request.parked]

    def _complete(self) -> None:
        if self.clear_cache:
            self.reset()
        for wait in self._waits:
            if not wait.done():
                wait.set_result(None)
        self._waits = []

    # What can be asked.

    def submit(self, id: str, prompt: list[int], max_tokens: int) -> FakeRequest:
        if not prompt or max_tokens < 1 or len(prompt) >= self.book.context or max(prompt) >= self.book.vocabulary:
            raise Refusal(400, "a prompt within the model's length and vocabulary, and at least one token are expected")
        request = self.live[id] = FakeRequest(id, prompt, max_tokens, parked=self.mode is not None)
        return request

    def abort(self, ids: list[str] | None) -> int:
        """None: all. How many were live."""
        found = [self.live[id] for id in (list(self.live) if ids is None else ids) if id in self.live]
        for request in found:
            if "endless-abort" in self.faults and request.parked:
                continue
            request.news.put_nowait(([], "abort"))
            self._end(request, "abort")
        return len(found)

    async def pause(self, mode: str, clear_cache: bool) -> None:
        if self.session and mode == "wait" and self.live:
            raise Refusal(409, "a weight session is open")
        if self.mode == "wait" and self._waits and mode == "keep":
            self._supersede()
        self.clear_cache = clear_cache or (self.clear_cache and bool(self._waits))
        self.mode, self._after_pause = mode, True
        if mode == "abort":
            self.abort(None)
        if mode == "wait":
            for request in self.live.values():
                request.parked = False
        if self._unfinished() and mode == "wait" and "silent-wait" not in self.faults:
            wait = asyncio.get_running_loop().create_future()
            self._waits.append(wait)
            await wait
        else:
            self._complete()

    def _supersede(self) -> None:
        for wait in self._waits:
            if not wait.done():
                wait.set_exception(Refusal(409, "superseded by a later call"))
        self._waits = []

    def resume(self) -> None:
        if self.session:
            raise Refusal(409, "a weight session is open")
        if self.sleeping:
            raise Refusal(409, "asleep")
        self._supersede()
        self.mode = None
        for request in self.live.values():
            request.parked = False

    @property
    def is_paused(self) -> bool:
        return self.mode is not None and "ignored-flag" not in self.faults

    def reset(self) -> None:
        if self.mode is None and any(request.running for request in self.live.values()):
            raise Refusal(409, "blocks are held by running requests")
        if "stale-cache" in self.faults:
            return
        self.cache.clear()
        for request in self.live.values():
            request.entries, request.running = [], False

    def start_update(self) -> None:
        if self.mode is None or self._waits:
            raise Refusal(409, "a session needs an effective pause")
        if self.session:
            raise Refusal(409, "a session is open already")
        self.session = True

    def update(self, path: str) -> None:
        if not self.session:
            raise Refusal(409, "no session is open")
        self.load(path)

    def finish_update(self, label: str | None) -> None:
        if not self.session:
            raise Refusal(409, "no session is open")
        self.session = False
        if label is not None and "forgotten-label" not in self.faults:
            self.label = label

    def load(self, path: str) -> None:
        try:
            Decoder.from_folder(path)
        except NotATracer as error:
            raise Refusal(400, str(error)) from None
        if "lost-weights" not in self.faults:
            self.version = Path(path).name

    def set_label(self, label: str) -> None:
        if self.mode is None:
            raise Refusal(409, "the label may change only under a pause")
        self.label = label

    def spans(self, request: FakeRequest) -> list[dict[str, object]]:
        """The version spans of its output."""
        labels = [self.label] * len(request.labels) if "wrong-label" in self.faults else request.labels
        spans: list[dict[str, object]] = []
        for index, label in enumerate(labels):
            if spans and spans[-1]["version"] == label:
                spans[-1]["end"] = index + 1
            else:
                spans.append({"version": label, "start": index, "end": index + 1})
        return spans

    def counts(self) -> dict[str, float]:
        running = sum(request.running for request in self.live.values())
        return {"num_requests_running": running, "num_requests_waiting": len(self.live) - running, "prefix_cache_hits_total": self.hits}
