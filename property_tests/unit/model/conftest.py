"""A model to talk to in few words, so that tests read as timelines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from harness.events import Event, Failure, Returned
from harness.model import CAESURA, EngineModel, Profile
from harness.operations import Abort, Operation, Pause, Prompt, Resume, Sleep, Submit, SwapWeights, WakeUp, WeightSource


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Small enough that every limit is near."""

    block_size: int = 4
    num_blocks: int = 8
    max_model_len: int = 32
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 16
    prefix_caching: bool = True
    long_prefill_token_threshold: int = 0
    late_requests: Literal["queue", "reject", "block"] = "queue"
    async_scheduling: bool = False
    host_blocks: int = 0


class Conversation:
    """Numbers the calls from 0; the token sampled at position p is 100 + p unless a test says otherwise."""

    def __init__(self, *, profile: Profile = CAESURA, eos_token_ids: tuple[int, ...] = (), **shape: Any) -> None:
        self.model = EngineModel(Shape(**shape), profile=profile, eos_token_ids=eos_token_ids)
        self.calls = 0

    def call(self, operation: Operation) -> list[Event]:
        op, self.calls = self.calls, self.calls + 1
        return self.model.apply(op, operation)

    def submit(self, request: str, prompt: Sequence[int], *, max_tokens: int = 8, **fields: Any) -> list[Event]:
        return self.call(Submit(id=request, prompt=Prompt(tokens=tuple(prompt)), max_tokens=max_tokens, **fields))

    def abort(self, *ids: str) -> list[Event]:
        return self.call(Abort(ids=ids))

    def pause(self, mode: Literal["abort", "wait", "keep"], *, clear_cache: bool = False) -> list[Event]:
        return self.call(Pause(mode=mode, clear_cache=clear_cache))

    def resume(self) -> list[Event]:
        return self.call(Resume())

    def sleep(self, level: Literal[0, 1, 2] = 1, mode: Literal["abort", "wait", "keep"] | None = None) -> list[Event]:
        return self.call(Sleep(level=level, mode=mode))

    def wake_up(self, *tags: Literal["kv_cache", "weights"]) -> list[Event]:
        return self.call(WakeUp(tags=tags or None))

    def swap(self, version: str | None = None, **fields: Any) -> list[Event]:
        return self.call(SwapWeights(source=WeightSource(original=True), version=version, **fields))

    def step(self, **tokens: int) -> list[Event]:
        """A turn of the loop."""
        if self.model.look_due:
            return self.model.look()
        events = [] if self.model.landing_due else self.model.schedule()
        if self.model.landing_due:
            events += self.model.land(lambda request, position: tokens.get(request, 100 + position))
        return events

    def steps(self, count: int) -> list[Event]:
        return [event for _ in range(count) for event in self.step()]

    def drain(self) -> list[Event]:
        events = []
        while self.model.has_work():
            events += self.step()
        return events

    @property
    def running(self) -> list[str]:
        return [request.id for request in self.model.state().running]

    @property
    def waiting(self) -> list[str]:
        return [request.id for request in self.model.state().waiting]

    @property
    def free(self) -> tuple[int, ...]:
        return self.model.state().free


@pytest.fixture
def engine() -> Callable[..., Conversation]:
    return Conversation


@pytest.fixture
def error() -> Callable[[Sequence[Event]], str | None]:
    """The code with which the call of a transaction was refused, None if it succeeded."""

    def code(events: Sequence[Event]) -> str | None:
        returned = next(event for event in reversed(events) if isinstance(event, Returned))
        assert returned.error is None or isinstance(returned.error, Failure)
        return None if returned.error is None else returned.error.code

    return code


@pytest.fixture
def only() -> Callable[..., list[Event]]:
    """The events of some kinds."""

    def of(events: Sequence[Event], *kinds: type[Event]) -> list[Event]:
        return [event for event in events if isinstance(event, kinds)]

    return of
