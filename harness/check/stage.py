"""A server under check: calls are made, recorded and bounded here, and after each check all is as it was before."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from harness.backends import CallRefused
from harness.backends.http import BrokenProtocol, Client, Dialect, HttpBackend, NoAnswer, Unreachable
from harness.check.metrics import Metrics, read_metrics
from harness.check.promise import Broken, NotCheckable, expect
from harness.check.request import Request
from harness.check.tracing import Tracing
from harness.events import Answered, Asked, Event, Failure, Heard, Mode, Output
from harness.operations import (
    Abort,
    IsPaused,
    IsSleeping,
    Operation,
    Pause,
    Prompt,
    ResetPrefixCache,
    Resume,
    Sleep,
    Submit,
    SwapWeights,
    UpdateWeightVersion,
    WakeUp,
    WeightSource,
    to_data,
)

Record = Callable[[Event], None]
T = TypeVar("T")

ENOUGH_TOKENS = 4
"""So many were heard of a request before anything is done to it."""
QUIET_S = 0.3
"""For how long nothing must be heard before an engine counts as quiet; longer for one that takes longer for a token."""
PROMPT_TOKENS = 48
ATTEMPTS = 3
"""How often requests are started anew that were over too soon."""
POLL_S = 0.02
COME_BACK_S = 2.0
"""How long calls on their way have to come back, once the server is running and our requests were aborted."""


class ForeignTraffic(Exception):
    """Requests that are not ours are on the server."""


class Stage:
    """One server, and our requests on it.

    Args:
        record: what keeps the log.
        bound_s: how long an answer may take, and how long a request may say nothing.
        alone: nobody else uses the server, so whatever its counters show is ours.
    """

    def __init__(self, backend: HttpBackend, record: Record, *, bound_s: float, alone: bool) -> None:
        self.backend = backend
        self.bound_s = bound_s
        self.alone = alone
        self.tracing: Tracing | None = None
        """Set once the server's tokens were found to be a tracer's."""
        self.token_s = 0.01
        """How long a token takes; measured before the checks."""
        self.requests: list[Request] = []
        """All of ours, the first first."""
        self.late_policies: dict[Mode, str] = {}
        """What became of requests that came under a pause, by its mode."""
        self._record = record
        self._calls = 0
        self._on_their_way: set[asyncio.Task[Any]] = set()

    @property
    def dialect(self) -> Dialect:
        return self.backend.dialect

    @property
    def client(self) -> Client:
        """For calls that no operation stands for, ill-formed ones for example: they are not recorded."""
        return self.backend.client

    # Requests.

    def tokens_for(self, seconds: float) -> int:
        """A number of tokens that takes about so long, as far as the model's length has room for it."""
        room = self.dialect.card.max_model_len - PROMPT_TOKENS - 1
        return max(2 * ENOUGH_TOKENS, min(room, round(seconds / self.token_s)))

    def start(self, *, seconds: float = 0.0, max_tokens: int = 0, prompt: Sequence[int] | None = None) -> Request:
        """A request of `max_tokens`, or of about so many `seconds`, on its way; each has a prompt of its own unless told one."""
        number = len(self.requests) + 1
        tokens = tuple(prompt) if prompt is not None else Prompt(tokens=PROMPT_TOKENS, seed=number).token_ids
        submit = Submit(
            id=f"caesura-{number}", prompt=Prompt(tokens=tokens), max_tokens=max_tokens or self.tokens_for(seconds), ignore_eos=True
        )
        request = Request(submit)
        self.requests.append(request)
        request.task = self._send(self._follow(request))
        return request

    async def start_running(self, count: int = 2, *, seconds: float = 0.6) -> list[Request]:
        """Requests that have each given a few tokens and are not over.

        Raises:
            NotCheckable: they were over too soon to do anything to them.
        """
        for attempt in range(ATTEMPTS):  # each twice as long: how fast the server is now is not quite known
            requests = [self.start(seconds=seconds * 2**attempt) for _ in range(count)]
            for request in requests:
                await self.heard(request, ENOUGH_TOKENS)
            if not any(request.is_over for request in requests):
                return requests
            await self.over(*requests)
        raise NotCheckable(f"requests of {self.tokens_for(seconds * 2**ATTEMPTS)} tokens were over before anything could be done to them")

    async def start_frozen(self, count: int = 2, *, seconds: float = 0.6, clear_cache: bool = True) -> list[Request]:
        """Requests that a pause by keep has frozen in the middle of their tokens, and that nothing is heard of.

        Raises:
            NotCheckable: they were over before the pause was.
            Broken: they went on, or were ended, under the pause.
        """
        for attempt in range(ATTEMPTS):
            requests = await self.start_running(count, seconds=seconds * 2**attempt)
            await self.pause("keep", clear_cache=clear_cache)
            await self.expect_quiet(requests, "after the pause was answered")
            if not any(request.is_over for request in requests):
                return requests
            for request in requests:
                expect(request.finish_reason in ("length", None), f"{request}, though keep ends nobody")
            await self.resume()
        raise NotCheckable(f"requests of {requests[0].max_tokens} tokens were over before a pause could freeze them")

    async def complete(self, *, max_tokens: int = 4, prompt: Sequence[int] | None = None) -> Request:
        """A request that has run to its end. Raises Broken if it ended otherwise."""
        request = self.start(max_tokens=max_tokens, prompt=prompt)
        await self.over(request)
        self.expect_complete(request)
        return request

    async def heard(self, request: Request, count: int) -> None:
        """Raises Broken, if so many tokens do not come within the bound."""
        await request.until_heard(count, within_s=self.bound_s)

    async def over(self, *requests: Request) -> None:
        """Raises Broken, if one does not end in time."""
        within_s = self.patience_s()
        for request in requests:
            await request.until_over(within_s=within_s)

    def patience_s(self) -> float:
        """How long requests may take to end: the bound, on top of what their tokens would take one after the other."""
        return self.bound_s + sum(request.max_tokens for request in self.requests if not request.is_over) * self.token_s

    async def expect_quiet(self, requests: Sequence[Request], during: str) -> None:
        """Nothing is heard of any of them for a while. Raises Broken."""
        before = [len(request.tokens) for request in requests]
        await asyncio.sleep(max(QUIET_S, 5 * self.token_s))
        for request, count in zip(requests, before, strict=True):
            expect(len(request.tokens) == count, f"{request.id} gave {len(request.tokens) - count} more tokens {during}")

    def expect_complete(self, *requests: Request) -> None:
        """Each ran to its full length, every token heard once. Raises Broken."""
        for request in requests:
            whole = request.finish_reason == "length" and len(request.tokens) == request.max_tokens
            expect(whole, f"{request}, expected all of them")

    # Calls.

    async def call(self, operation: Operation) -> dict[str, Any]:
        """The answer.

        Raises:
            NotCheckable: this server has no such call.
            CallRefused, NoAnswer, BrokenProtocol, Unreachable: it came back with something else.
        """
        if (reason := self.backend.cannot(operation)) is not None:
            raise NotCheckable(f"the server cannot {reason}")
        return await self._recorded(operation, lambda outputs: None)

    async def pause(self, mode: Mode = "keep", *, clear_cache: bool = True) -> None:
        """One by wait has as much longer as requests take."""
        within_s = self.patience_s() if mode == "wait" else self.bound_s
        try:
            await asyncio.wait_for(self.call(Pause(mode=mode, clear_cache=clear_cache)), within_s)
        except TimeoutError:
            raise NoAnswer(f"a pause by {mode} was not answered within {within_s:g} s") from None

    async def pause_later(self, mode: Mode) -> asyncio.Task[str]:
        """A pause on its way, once the server has taken it up: its flag is set, or the call came back.

        The task's result says how it came back, in words: `paused`, or why not.
        """

        async def come_back() -> str:
            try:
                await self.pause(mode)
            except (CallRefused, NoAnswer, BrokenProtocol) as error:
                return str(error)
            return "paused"

        pause = self._send(come_back())
        while not pause.done() and not await self.is_paused():
            await asyncio.sleep(POLL_S)
        return pause

    async def resume(self) -> None:
        await self.call(Resume())

    async def is_paused(self) -> bool:
        return bool((await self.call(IsPaused()))["is_paused"])

    async def abort(self, *requests: Request) -> int | None:
        """How many the server says it aborted; None if it does not say."""
        return (await self.call(Abort(ids=tuple(request.id for request in requests)))).get("aborted")

    async def reset_prefix_cache(self) -> None:
        await self.call(ResetPrefixCache())

    async def set_version(self, version: str) -> None:
        await self.call(UpdateWeightVersion(version=version))

    async def push(self, folder: str, version: str) -> None:
        """Other weights, from a folder that the server finds."""
        await self.call(SwapWeights(source=WeightSource(checkpoint=folder), version=version))

    async def refused(self, operation: Operation) -> CallRefused | None:
        """How the call was refused; None if it succeeded."""
        try:
            await self.call(operation)
        except CallRefused as refusal:
            return refusal
        return None

    async def is_sleeping(self) -> bool:
        return bool((await self.call(IsSleeping()))["is_sleeping"])

    async def sleep_and_wake(self) -> None:
        """At level 0, which needs no memory that can be given back."""
        await self.call(Sleep(level=0, mode="keep"))
        await self.call(WakeUp())

    async def metrics(self) -> Metrics:
        return await read_metrics(self.client)

    async def some_steps(self) -> None:
        """Time for a few steps."""
        await asyncio.sleep(max(0.05, 3 * self.token_s))

    async def until_none_runs(self, *, within_s: float) -> float:
        """How many seconds it took until the server counted no request any more. Raises Broken."""
        began = time.monotonic()
        while count := (await self.metrics()).requests:
            expect(time.monotonic() - began < within_s, f"{count:g} requests are still counted after {within_s:.1f} s")
            await asyncio.sleep(0.05)
        return time.monotonic() - began

    def expect_tracing(self) -> Tracing:
        """What reads the server's tokens. Raises NotCheckable if they are no tracer's."""
        if self.tracing is None:
            raise NotCheckable("the served checkpoint is no tracer (docs/tracer.md)")
        return self.tracing

    # Between checks.

    async def clear_up(self) -> None:
        """Everything as it was found: none of our requests, running, the original weights and label.

        Raises:
            Broken: something could not be brought back.
            ForeignTraffic: requests are there that are not ours.
        """
        problems = await self.backend.restore(self._restoring)
        if self._on_their_way:
            _, late = await asyncio.wait(self._on_their_way, timeout=COME_BACK_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
            problems = await self.backend.restore(self._restoring)  # one of them may have been a pause
        if problems:
            raise Broken("; ".join(problems))
        if self.alone:
            await self._until_alone()

    async def _until_alone(self) -> None:
        """Counters may lag a moment behind."""
        try:
            await self.until_none_runs(within_s=self.bound_s)
        except Broken as error:
            raise ForeignTraffic(f"{error}, and none is ours: somebody else's, or ours that the server did not let go") from None

    def _send(self, call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A call that nothing waits for yet."""
        task = asyncio.create_task(call)
        self._on_their_way.add(task)
        task.add_done_callback(self._on_their_way.discard)
        return task

    async def _restoring(self, operation: Operation) -> dict[str, Any]:
        return await self._recorded(operation, lambda outputs: None)

    # The log.

    async def _follow(self, request: Request) -> None:
        def hear(outputs: Sequence[Output]) -> None:
            self._record(Heard(outputs=tuple(outputs)))
            request.hear(outputs)

        try:
            request.answer = await self._recorded(request.submit, hear)
        except (CallRefused, BrokenProtocol, Unreachable) as error:
            request.error = error
        except asyncio.CancelledError:
            request.error = BrokenProtocol("we hung up")
            raise
        finally:
            request.notify()

    async def _recorded(self, operation: Operation, hear: Callable[[Sequence[Output]], None]) -> dict[str, Any]:
        number, self._calls = self._calls, self._calls + 1
        self._record(Asked(call=number, operation=to_data(operation)))
        try:
            answer = await self.backend.call(operation, hear)
        except CallRefused as refusal:
            self._record(Answered(call=number, answer=None, error=Failure(refusal.code, str(refusal)), status=refusal.status))
            raise
        self._record(Answered(call=number, answer=answer.content, error=None, status=answer.status))
        return answer.content
