"""The backend `http`: a server at a URL, called as its clients call it. It records nothing itself: level 0."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.backends import Answer, BackendError, CallRefused, EngineInfo
from harness.backends.http.client import BrokenProtocol, Client, NoAnswer, Refused, Unreachable
from harness.backends.http.dialect import Chunk, Dialect, refuse
from harness.backends.http.probe import probe
from harness.events import Output
from harness.operations import (
    Abort,
    FinishWeightUpdate,
    IsPaused,
    Operation,
    Pause,
    Resume,
    Sleep,
    StartWeightUpdate,
    Submit,
    SwapWeights,
    UpdateWeights,
    UpdateWeightVersion,
    WakeUp,
    WeightSource,
)
from harness.scenario import EngineShape

Heard = Callable[[Sequence[Output]], None]
Caller = Callable[[Operation], Awaitable[object]]

SETTLE_S = 0.05
"""Each answer has a connection of its own: what arrives so soon after that to a pause or an abort counts as sent before it."""
ATTEMPTS = 3
"""How often a step of restoring is tried."""


class HttpBackend:
    """A LiveBackend. The server's shape is its own: that of a scenario is not imposed on it."""

    name = "http"
    level = 0

    def __init__(self, url: str, *, key: str | None = None, timeout_s: float = 10.0) -> None:
        self.client = Client(url, key=key, timeout_s=timeout_s)
        self.original = WeightSource(original=True)
        """Where the weights are that it was found with: by default what /v1/models names as root."""
        self._dialect: Dialect | None = None
        self._label: str | None = None
        """The weight version that it was found with."""
        self._live: set[str] = set()
        """Our requests that have not come back."""
        self._touched: set[type[Operation]] = set()
        """Kinds of operation that were called, and that restoring may have to undo."""

    @property
    def dialect(self) -> Dialect:
        assert self._dialect is not None, "not started"
        return self._dialect

    async def start(self, shape: EngineShape, folder: Path) -> EngineInfo:
        """Find out who is there, and note what `restore` will bring back. Raises BackendError."""
        if self._dialect is None:
            self._dialect = await probe(self.client)
        if await self.is_paused():
            raise BackendError(f"{self.client.url} is paused or asleep: somebody is at work on it; resume it first")
        self._label = await self.dialect.weight_version()
        return EngineInfo(self.dialect.card.versions, device="unknown", profile="caesura", eos_token_ids=())

    def tokenize(self, text: str) -> tuple[int, ...]:
        raise BackendError("a server's tokenizer is not asked: give the prompt as token ids")

    def cannot(self, operation: Operation) -> str | None:
        return self.dialect.cannot(operation)

    async def call(self, operation: Operation, heard: Heard) -> Answer:
        """Raises CallRefused, NoAnswer, Unreachable, BrokenProtocol."""
        self._touched.add(type(operation))
        if not isinstance(operation, Submit):
            answer = await self.dialect.call(operation)
            if isinstance(operation, Pause | Sleep | Abort):
                await asyncio.sleep(SETTLE_S)
            return answer
        self._live.add(operation.id)
        answer = await self._generate(operation, heard)
        self._live.discard(operation.id)  # one that was broken off may still be running over there
        return answer

    async def is_paused(self) -> bool:
        return bool((await self.dialect.is_paused(IsPaused())).content["is_paused"])

    async def end(self, why: str) -> None:
        """Raises: BackendError, if the server could not be left as it was found."""
        if left := await self.restore(self._unheard):
            raise BackendError("; ".join(left))

    async def stop(self) -> None:
        await self.client.close()

    async def restore(self, call: Caller) -> list[str]:
        """Leave the server as it was found: running, with none of our requests, its own weights and label.

        Args:
            call: makes the calls that this takes, so that they can be recorded.

        Returns:
            What could not be brought back, a sentence each.
        """
        if self._dialect is None:
            return []
        steps: dict[str, Callable[[Caller], Awaitable[object]]] = {
            "our requests could not be aborted": self._abort_live,
            "it could not be woken": self._wake,
            "its weights could not be brought back": self._bring_weights_back,
            "its version label could not be brought back": self._bring_label_back,
            "it could not be resumed": self._resume,
        }
        problems = []
        try:
            for words, step in steps.items():
                if (problem := await _attempt(step, call)) is not None:
                    problems.append(f"{words}: {problem}")
        except Unreachable as error:  # it is gone, and nothing of it is left to be brought back
            problems.append(str(error))
        return problems

    async def _unheard(self, operation: Operation) -> Answer:
        return await self.call(operation, lambda outputs: None)

    async def _abort_live(self, call: Caller) -> None:
        ours = Abort(ids=tuple(sorted(self._live)))
        if ours.ids and self.cannot(ours) is None:
            await call(ours)
        self._live.clear()

    async def _wake(self, call: Caller) -> None:
        if Sleep in self._touched:
            await call(WakeUp())
            self._touched.discard(Sleep)

    async def _bring_weights_back(self, call: Caller) -> None:
        """Paused by `keep`, so that nobody else's request is lost."""
        if self._touched.isdisjoint({StartWeightUpdate, UpdateWeights, SwapWeights}):
            return
        await call(Pause(mode="keep"))
        if StartWeightUpdate in self._touched:
            with suppress(CallRefused):  # no session was left open
                await call(FinishWeightUpdate())
        # After a session that brought no weights, too: not every engine has its old ones then.
        await call(SwapWeights(source=self.original, version=self._label))
        self._touched -= {StartWeightUpdate, UpdateWeights, SwapWeights}

    async def _bring_label_back(self, call: Caller) -> None:
        if self._label is None or await self.dialect.weight_version() == self._label:
            return
        if not await self.is_paused():
            await call(Pause(mode="keep", clear_cache=False))
        await call(UpdateWeightVersion(version=self._label))

    async def _resume(self, call: Caller) -> None:
        if await self.is_paused():
            await call(Resume())
        if await self.is_paused():
            raise BrokenProtocol("it is still paused after /resume")

    async def _generate(self, operation: Submit, heard: Heard) -> Answer:
        """A request, from its call to its end."""
        generation = self.dialect.submit(operation)
        last, received = Chunk(()), 0
        try:
            async with self.client.stream(generation.path, generation.body, headers=generation.headers) as events:
                async for event in events:
                    chunk = self.dialect.read(event, received)
                    if chunk.tokens or chunk.finish_reason:
                        heard([Output(operation.id, received, chunk.tokens, chunk.finish_reason)])
                    received += len(chunk.tokens)
                    last = chunk.over(last)
        except Refused as error:
            refuse(error.reply)
        if last.finish_reason is None:
            raise BrokenProtocol(f"the stream of {operation.id} ended after {received} tokens without saying why")
        content: dict[str, Any] = {
            "finish_reason": last.finish_reason,
            "prompt_tokens": last.prompt_tokens,
            "output_tokens": last.output_tokens,
            "cached_tokens": last.cached_tokens,
        }
        if last.spans is not None:
            content["weight_versions"] = [list(span) for span in last.spans]
        return Answer({name: value for name, value in content.items() if value is not None}, 200)


async def _attempt(step: Callable[[Caller], Awaitable[object]], call: Caller) -> str | None:
    """Why the step failed, the last time that it was tried; None if it did not. Raises Unreachable."""
    problem = None
    for _ in range(ATTEMPTS):
        try:
            await step(call)
            return None
        except (CallRefused, NoAnswer, BrokenProtocol) as error:
            problem = str(error)
            await asyncio.sleep(0.1)
    return problem
