"""A request of ours, as its client sees it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from harness.check.promise import Broken
from harness.events import FinishReason, Output
from harness.operations import Submit


class Request:
    """What was asked, and what was heard so far."""

    def __init__(self, submit: Submit) -> None:
        self.submit = submit
        self.id = submit.id
        self.prompt = submit.prompt.token_ids or ()
        self.max_tokens = submit.max_tokens
        self.tokens: list[int] = []
        self.last_heard_s = 0.0
        """When the last token came, on time.monotonic()."""
        self.finish_reason: FinishReason | None = None
        self.answer: dict[str, Any] | None = None
        """As events.Answered describes that of a submit."""
        self.error: Exception | None = None
        """What the call came back with instead of an answer."""
        self.task: asyncio.Task[None] | None = None
        self._news = asyncio.Event()

    @property
    def is_over(self) -> bool:
        return self.answer is not None or self.error is not None

    @property
    def spans(self) -> list[tuple[str, int, int]] | None:
        """Weight versions as the server reports them, if it does."""
        spans = (self.answer or {}).get("weight_versions")
        return None if spans is None else [tuple(span) for span in spans]

    def hear(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            if output.tokens:
                self.last_heard_s = time.monotonic()
            self.tokens += output.tokens
            self.finish_reason = output.finish_reason or self.finish_reason
        self.notify()

    def notify(self) -> None:
        self._news.set()

    async def until_heard(self, count: int, *, within_s: float) -> None:
        """Raises: Broken, if it ends or time is up before so many tokens were heard."""
        await self._until(lambda: len(self.tokens) >= count, within_s, f"{count} tokens")

    async def until_over(self, *, within_s: float) -> None:
        """Raises: Broken, if time is up before it ended."""
        await self._until(lambda: self.is_over, within_s, "its end")

    async def _until(self, condition: Any, within_s: float, what: str) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            left = deadline - time.monotonic()
            if left <= 0 or self.is_over:
                raise Broken(f"{self}: waited {within_s:g} s for {what}" if left <= 0 else f"{self} before {what}")
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), left)
            except TimeoutError:
                continue

    def __str__(self) -> str:
        ending = f"failed ({self.error})" if self.error else f"ended ({self.finish_reason})" if self.is_over else "has not ended"
        return f"{self.id} {ending} after {len(self.tokens)} of {self.max_tokens} tokens"
