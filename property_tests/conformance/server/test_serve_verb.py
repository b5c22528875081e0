"""`caesura serve`: starts, says where it listens, stops when it is told to; what cannot be served is one sentence and exit code 64."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from harness.cli import main

from .clients import call, refused, streaming

CAESURA = [sys.executable, "-m", "harness.cli"]
ROOT = Path(__file__).parents[3]


@contextmanager
def serve(*arguments: str, before: Callable[[], None] | None = None, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`caesura serve` as a process, which does `before` first, and where it listens."""
    command = [*CAESURA, "serve", *arguments, "--port", "0"]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "CAESURA_SERVER_DEV_MODE": "0", "VLLM_SERVER_DEV_MODE": "0", **environment}
    with subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True, preexec_fn=before) as process:
        assert process.stderr is not None
        try:
            found = None
            while found is None:
                line = process.stderr.readline()
                assert line, "the server ended before it stood"
                found = re.search(r"served at (http://\S+)", line)
            yield process, found[1]
        finally:
            process.kill()


def test_sigterm_ends_its_requests_and_it():
    with serve("tiny", "--drain", "0", CAESURA_SERVER_DEV_MODE="1") as (process, url), httpx.Client(base_url=url, timeout=60) as client:
        assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
        with streaming(client) as rest:
            call(client, "/pause", params={"mode": "keep"})
            process.send_signal(signal.SIGTERM)
            assert rest()[-1]["finish_reason"] == "abort"
        assert process.wait() == -signal.SIGTERM


def test_ctrl_c_ends_it_and_the_control_plane_is_off_by_default():
    with serve("tiny", "--in-process", "--drain", "0") as (process, url), httpx.Client(base_url=url, timeout=60) as client:
        assert refused(client, "/pause") == (404, "not-found")
        with streaming(client) as rest:
            process.send_signal(signal.SIGINT)
            assert rest()[-1]["finish_reason"] == "abort"
        assert process.wait() == 130


def test_what_cannot_be_served_is_one_sentence_and_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        cases = {
            ("tiny", "--host", "0.0.0.0", "--dev-mode"): "API key",
            ("tiny", "--port", str(taken.getsockname()[1])): "cannot listen",
            (str(tmp_path),): str(tmp_path),
            ("tiny", "--max-num-seqs", "900"): "max_num_batched_tokens",
            ("tiny", "--late-requests", "perhaps"): "queue",
        }
        for arguments, sentence in cases.items():
            with pytest.raises(SystemExit) as ended:
                main(["serve", *arguments])
            assert (ended.value.code, sentence in capsys.readouterr().err) == (64, True), arguments
