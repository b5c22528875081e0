"""Clients that hang up, servers told to stop, engines that die: every caller hears of it, other requests are unharmed, no block leaks."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest

from engine.server import Server

from .clients import LONG, SHORT, call, metric, raw, refused, streaming
from .servers import serving


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_ends_its_requests_alone(client: httpx.Client, server: Server, stream: bool, paused: bool):
    body = json.dumps({**LONG, "prompt": [[1, 2], [3, 4]], "n": 2, "stream": stream})
    host, port = client.base_url.host, client.base_url.port
    with streaming(client) as rest:
        with socket.create_connection((host, port)) as ours:
            ours.sendall(raw("/v1/completions", body))
            while metric(client, "num_requests_running") + metric(client, "num_requests_waiting") != 5:
                pass
            if paused:
                call(client, "/pause", params={"mode": "keep", "clear_cache": False})
        while metric(client, "num_requests_running") + metric(client, "num_requests_waiting") > 1:
            pass
        call(client, "/resume")
        assert sum(len(choice["token_ids"]) for choice in rest()) == 400
    assert metric(client, "kv_cache_usage_perc") == 0


def test_a_client_that_does_not_read_holds_no_pause_up_for_long(client: httpx.Client):
    body = json.dumps({**LONG, "prompt": [[index] for index in range(16)], "n": 4, "logprobs": 20, "stream": True})
    with socket.socket() as ours:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        ours.connect((client.base_url.host, client.base_url.port))
        ours.sendall(raw("/v1/completions", body))
        while metric(client, "generation_tokens_total") < 2000:
            pass
        assert call(client, "/pause", params={"mode": "abort"}) == {"status": "paused"}


@pytest.mark.parametrize("mode", ["keep", "wait"])
def test_a_server_told_to_stop_ends_every_call_properly(tiny: Path, mode: str):
    """Requests that a pause holds back and a pause that waits for requests: neither would end by itself."""
    with serving(tiny) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        answers: list[httpx.Response] = []
        whole = Thread(target=lambda: answers.append(httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=30)))
        pause = Thread(target=lambda: answers.append(httpx.post(f"{server.url}/pause", params={"mode": mode}, timeout=30)))
        with streaming(client) as rest:
            whole.start()
            while metric(client, "num_requests_running") < 2:
                pass
            pause.start()
            while metric(client, f'paused{{mode="{mode}"}}') != 1:
                pass
            server.should_exit = True
            assert rest()[-1]["finish_reason"] == "abort"
        whole.join()
        pause.join()
    assert [answer.status_code for answer in answers] == [200, 200]
    assert {"finish_reason": "abort"}.items() <= next(a.json()["choices"][0] for a in answers if "choices" in a.json()).items()


def test_a_server_told_to_stop_lets_requests_run_on_for_a_while(tiny: Path):
    with (
        serving(tiny, config={"drain_s": 60}) as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
        streaming(client) as rest,
    ):
        server.should_exit = True
        assert rest()[-1]["finish_reason"] == "length"


@pytest.fixture
def engine_process(tiny: Path) -> Iterator[tuple[Server, int]]:
    """A server whose engine is another process, and that process's id."""
    before = children()
    with serving(tiny, in_process=False) as server:
        (pid,) = children() - before
        yield server, pid


def children() -> set[int]:
    found: set[int] = set()
    for task in os.listdir("/proc/self/task"):
        found.update(map(int, Path(f"/proc/self/task/{task}/children").read_text().split()))
    return found


@pytest.mark.parametrize("paused", [False, True])
def test_everyone_hears_of_an_engine_that_was_killed(engine_process: tuple[Server, int], paused: bool):
    server, pid = engine_process
    with httpx.Client(base_url=server.url, timeout=30) as client:
        answers: list[dict[str, Any]] = []
        whole = Thread(target=lambda: answers.append(httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=30).json()))
        with httpx.stream("POST", f"{server.url}/v1/completions", json={**LONG, "stream": True}, timeout=30) as stream:
            whole.start()
            while metric(client, "num_requests_running") < 2:
                pass
            if paused:
                call(client, "/pause", params={"mode": "keep"})
            os.kill(pid, signal.SIGKILL)
            *_, error, end = stream.read().decode().strip().split("\n\n")
        whole.join()
        assert json.loads(error.removeprefix("data: "))["error"]["type"] == answers[0]["error"]["type"] == "dead"
        assert end == "data: [DONE]"
        health = client.get("/health")
        assert (health.status_code, health.json()["error"]["type"]) == (503, "dead")
        assert refused(client, "/resume") == (503, "dead")
        assert refused(client, "/v1/completions", json=SHORT) == (503, "dead")
