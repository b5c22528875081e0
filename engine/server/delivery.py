"""The way of outputs from the engine to the socket: who still waits for what, and what happens when they hang up.

A pause is answered when every output made before it has been written out. AsyncLLM hands outputs to their
takers before its pause returns; from there to the socket they are a `Delivery`'s, and `Deliveries.written` waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import Request

from ..async_llm import AsyncLLM
from ..completion import RequestOutput, RequestStream
from ..config import SamplingParams
from ..errors import EngineDeadError

SLOW_CLIENT_S = 1.0
"""How long a pause waits for clients that do not read what is sent to them."""


class Disconnected(Exception):
    """The client hung up; nobody reads the answer any more."""


class Delivery:
    """The requests of one call to the server, from their acceptance until their last output is written, or nobody wants it."""

    def __init__(self, llm: AsyncLLM, request: Request, moved: asyncio.Condition) -> None:
        self._llm = llm
        self._request = request
        self._moved = moved
        self._streams: dict[str, RequestStream] = {}
        self._takes: dict[asyncio.Task[RequestOutput], int] = {}  # what is waited for, by the index of the prompt
        self._waiting = False

    @property
    def idle(self) -> bool:
        """Every output that the engine has handed over is written."""
        return self._waiting and not any(stream.ready for stream in self._streams.values()) and not any(take.done() for take in self._takes)

    async def submit(self, requests: Mapping[str, tuple[Sequence[int], SamplingParams]]) -> None:
        """Hand requests in, in this order, each a prompt and its parameters by id; returns when all are accepted.

        Raises:
            EngineError: as `AsyncLLM.generate`, for the first that was refused. `close` ends the others.
        """
        handed_in = (self._llm.add_request(request_id, prompt, params) for request_id, (prompt, params) in requests.items())
        answers = await asyncio.gather(*handed_in, return_exceptions=True)
        self._streams = {
            request_id: answer for request_id, answer in zip(requests, answers, strict=True) if isinstance(answer, RequestStream)
        }
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """News of the requests as it comes, each with its request's place in the order of submission.

        Raises:
            Disconnected: the client hung up.
            EngineDeadError: the engine is dead.
        """
        streams = list(self._streams.values())
        self._takes = {asyncio.create_task(stream.take()): index for index, stream in enumerate(streams)}
        hung_up = asyncio.create_task(self._hung_up())
        try:
            while self._takes:
                await self._note(waiting=True)
                done, _ = await asyncio.wait([*self._takes, hung_up], return_when=asyncio.FIRST_COMPLETED)
                await self._note(waiting=False)
                if hung_up in done:
                    raise Disconnected
                for take in [take for take in self._takes if take in done]:
                    index, output = self._takes.pop(take), take.result()
                    if not output.finished:
                        self._takes[asyncio.create_task(streams[index].take())] = index
                    yield index, output
        finally:
            tasks: list[asyncio.Task[Any]] = [*self._takes, hung_up]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """Abort what has not ended, so that its blocks are free."""
        if unfinished := [request_id for request_id, stream in self._streams.items() if stream.unfinished]:
            with suppress(EngineDeadError):
                await self._llm.abort(unfinished)

    async def _note(self, *, waiting: bool) -> None:
        self._waiting = waiting
        if waiting:
            async with self._moved:
                self._moved.notify_all()

    async def _hung_up(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass


class Deliveries:
    """All deliveries of a server."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._open: set[Delivery] = set()
        self._moved = asyncio.Condition()

    @asynccontextmanager
    async def open(self, request: Request) -> AsyncIterator[Delivery]:
        """A delivery that lasts until the answer is written, or given up."""
        delivery = Delivery(self._llm, request, self._moved)
        self._open.add(delivery)
        try:
            yield delivery
        finally:
            self._open.discard(delivery)
            await delivery.close()
            async with self._moved:
                self._moved.notify_all()

    async def written(self) -> None:
        """Wait until every output that the engine has handed over so far is written, but not long for a client that does not read."""
        behind = set(self._open)

        def caught_up() -> bool:
            behind.intersection_update(delivery for delivery in self._open if not delivery.idle)
            return not behind

        with suppress(TimeoutError):
            async with asyncio.timeout(SLOW_CLIENT_S), self._moved:
                await self._moved.wait_for(caught_up)
