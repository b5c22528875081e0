"""Whatever a client sends, made up by schemathesis from the OpenAPI description: an answer that the description foresees, in
any state of the engine, and never a 5xx but the documented 503. `nox -s server` sends more than a thousand requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error, positive_data_acceptance

from engine.server import Server

from .clients import call
from .servers import serving


@pytest.fixture(scope="module")
def rejecting(tiny: Path) -> Iterator[Server]:
    """A server where no pause holds a request, and none takes long."""
    with serving(tiny, late_requests="reject", max_model_len=16, max_num_seqs=64, num_blocks=256) as server:
        yield server


NOT_PROMISED = [not_a_server_error, positive_data_acceptance]
"""503 is an answer, and a well-formed body may name a folder that is not there."""

STATES = {"running": [], "paused": ["/pause?mode=keep"], "updating": ["/pause", "/start_weight_update"], "asleep": ["/sleep"]}


def test_every_request_has_an_answer_that_is_described(rejecting: Server, tiny: Path, request: pytest.FixtureRequest):
    operations = [result.ok() for result in schemathesis.openapi.from_url(f"{rejecting.url}/openapi.json").get_all_operations()]
    strategies = [operation.as_strategy(generation_mode=mode) for operation in operations for mode in GenerationMode]

    @settings(max_examples=2000 if request.config.getoption("--long") else 100, suppress_health_check=list(HealthCheck))
    @given(case=st.one_of(strategies), state=st.sampled_from(sorted(STATES)))
    def check(case: schemathesis.Case, state: str) -> None:
        with httpx.Client(base_url=rejecting.url, timeout=60) as client:
            set_running(client, tiny)
            for path in STATES[state]:
                call(client, path)
        answer = case.call_and_validate(excluded_checks=NOT_PROMISED, timeout=60)
        assert answer.status_code < 500 or answer.status_code == 503, answer.text

    check()


def set_running(client: httpx.Client, checkpoint: Path) -> None:
    """From wherever the last case left the engine: asleep, in a weight session, out of service."""
    call(client, "/wake_up")
    call(client, "/pause")
    client.post("/start_weight_update")  # refused where a session is open
    call(client, "/update_weights", json={"update_info": {"path": str(checkpoint)}})
    call(client, "/finish_weight_update")
    call(client, "/resume")
