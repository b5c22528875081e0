"""docs/attach.md, done: a server that records, a loop that knows nothing of us, a verdict."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from harness.log import read_log
from harness.trial import review

LOOP = Path(__file__).parents[2] / "examples" / "attach_loop.py"
START_S = 300


def serve(checkpoint: Path, logs: Path, port: int) -> subprocess.Popen:
    environment = {"CAESURA_LOG": str(logs), "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    options = f"--model {checkpoint} --served-model-name policy --scheduler-cls harness.backends.vllm.Recorder --port {port}"
    shape = "--dtype float32 --enforce-eager --max-model-len 256 --max-num-seqs 8 --block-size 32"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *options.split(), *shape.split()]
    return subprocess.Popen(command, env={**os.environ, **environment}, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)


def wait_until_healthy(server: subprocess.Popen, port: int) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert server.poll() is None, "the server ended while it started"
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
            return
        except OSError:
            time.sleep(1)
    raise AssertionError(f"the server is not healthy after {START_S} s")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_a_loop_that_knows_nothing_of_us_gets_a_verdict(needs_vllm, tmp_path, request):
    if not request.config.getoption("--long", default=False):
        pytest.skip("with --long: a server takes half a minute to start")
    from harness.tracer.checkpoint import make_tracer

    make_tracer(tmp_path / "policy", versions=3)
    port = free_port()
    server = serve(tmp_path / "policy" / "v1", tmp_path / "logs", port)
    try:
        wait_until_healthy(server, port)
        checkpoints = [str(tmp_path / "policy" / version) for version in ("v2", "v3")]
        loop = subprocess.run([sys.executable, LOOP, f"http://127.0.0.1:{port}", *checkpoints], capture_output=True, text=True, timeout=120)
        assert loop.returncode == 0, loop.stderr
    finally:
        server.terminate()
        server.wait(60)
    (run,) = (tmp_path / "logs").iterdir()
    log = read_log(run)
    assert log.closed
    trial = review(log, None)
    assert trial.verdict.explanation.mismatch is None
    assert {judgement.invariant for judgement in trial.verdict.judgements if judgement.status == "violated"} == set()
    assert "request-across-boundary" in trial.coverage
    assert "recomputed-by-new-weights" in trial.coverage
