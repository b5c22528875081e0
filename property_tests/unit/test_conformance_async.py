"""The model explains logs in which a step is launched before the one ahead of it has landed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest

from harness.backends.sim import SimBackend
from harness.conformance import Explanation, explain
from harness.events import Called, Closed, Delivered, Entry, Event, Landed, Launched
from harness.operations import Abort, Operation, Pause, Prompt, Submit, to_data
from harness.scenario import EngineShape
from harness.trial import opened_event

SHAPE = EngineShape(block_size=4, num_blocks=8, max_model_len=32, async_scheduling=True)


class Recording:
    """Events of the model as an engine, one list for each transaction."""

    def __init__(self) -> None:
        self.engine = SimBackend()
        self.transactions: list[list[Event]] = [[opened_event(SHAPE, self.engine, self.engine.start(SHAPE), digest="", seed=0)]]
        self._ops = 0

    def call(self, operation: Operation) -> list[Event]:
        op, self._ops = self._ops, self._ops + 1
        events = [Called(op=op, operation=to_data(operation), by="client"), *self.engine.apply(op, operation)]
        self.transactions.append(events)
        return events

    def step(self) -> list[Event]:
        self.transactions.append(self.engine.step())
        return self.transactions[-1]

    def drain(self) -> Recording:
        while self.engine.has_work():
            self.step()
        return self


def explained(transactions: Sequence[Sequence[Event]]) -> Explanation:
    events = [event for transaction in transactions for event in transaction]
    return explain([Entry(seq, 0, "r0", event) for seq, event in enumerate([*events, Closed(why="drained", count=len(events))])])


@pytest.fixture
def recording() -> Recording:
    recording = Recording()
    for id in ("r1", "r2"):
        recording.call(Submit(id=id, prompt=Prompt(tokens=3), max_tokens=5))
    recording.step()
    recording.step()
    return recording


def test_a_log_with_a_step_in_flight_is_explained(recording):
    recording.call(Pause(mode="keep"))
    recording.call(Abort(ids=("r1",)))
    transactions = recording.drain().transactions
    flow = [event.step for events in transactions for event in events if isinstance(event, Launched)]
    overlaps = [second.step for first, second in pairwise(transactions[4]) if isinstance(first, Launched) and isinstance(second, Landed)]
    assert (flow, overlaps) == ([1, 2], [1])
    assert explained(transactions).mismatch is None


def test_a_live_engine_may_take_up_a_call_between_a_launch_and_the_landing():
    recording = Recording()
    recording.call(Submit(id="r1", prompt=Prompt(tokens=3), max_tokens=5))
    recording.step()
    model = recording.engine._model
    recording.transactions.append(model.schedule())
    recording.call(Abort(ids=("r1",)))
    recording.transactions.append(model.land(lambda request, position: 7))
    assert explained(recording.drain().transactions).mismatch is None


def test_a_step_that_lands_before_the_next_is_launched_is_not_explained(recording):
    """An engine that says it schedules asynchronously and does not."""
    *scheduled, landed, delivered = recording.step()
    assert isinstance(scheduled[-1], Launched) and isinstance(landed, Landed) and isinstance(delivered, Delivered)
    recording.transactions[-1] = [landed, delivered, *scheduled]
    mismatch = explained(recording.transactions).mismatch
    assert mismatch is not None and mismatch.expected == repr(scheduled[0]) and mismatch.got == repr(landed)


def test_a_step_that_lands_without_all_of_its_tokens_is_not_explained(recording):
    *scheduled, landed, _ = recording.step()
    assert isinstance(landed, Landed)
    short = Landed(step=landed.step, sampled=landed.sampled[:1])
    recording.transactions[-1] = [*scheduled, short]
    mismatch = explained(recording.transactions).mismatch
    assert mismatch is not None and mismatch.got == repr(short)
