"""The model explains our engine, whatever is asked of it and in whatever order.

After every operation and step the model must explain what the engine did, event by event; the engine's whole visible state,
the model's and the one replayed from the log must be equal; every invariant watches. At the end the engine is brought back into
service and left running until nothing is live.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings

from harness import cases
from harness.events import Entry
from harness.fuzz.case import Case, run_case
from harness.fuzz.face import Found
from harness.replay import Replay

pytest.importorskip("torch")

from harness.backends.torch import TorchBackend

thorough = settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@thorough
@given(case=cases())
def test_the_model_explains_our_engine(case: Case) -> None:
    explained(case)


@thorough
@given(case=cases(engine={"async_scheduling": True}))
def test_the_model_explains_our_engine_with_a_step_in_flight(case: Case) -> None:
    explained(case)


def explained(case: Case) -> None:
    backend, replay = TorchBackend(), Replay()

    def replayed(entries: Sequence[Entry]) -> None:
        for entry in entries:
            replay.apply(entry)
        assert replay.state() == backend.state(), f"after event {entries[-1].seq} the replayed state differs from the engine's"

    outcome = run_case(case, backend, listener=replayed)
    if not outcome.clean:
        raise Found(outcome, outcome.findings[0])
