"""docs/server.md: its commands work, and its tables are complete."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra `server` is not installed")

from engine.server import control
from engine.server.errors import STATUS
from harness.checkpoints import ensure, make_tiny

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
START, SESSION = re.findall(r"```sh\n(.*?)```", PAGE, re.S)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The server that the page starts, with a smaller model and on a free port; where it listens."""
    make_tiny(tmp_path / "new-weights", seed=7)
    ensure("tiny")
    words = shlex.split(START.strip().replace("smollm2", "tiny").replace("8000", "0"))
    command = [sys.executable, "-m", "harness.cli", *words[1:]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        found = None
        while found is None:
            line = process.stderr.readline()
            assert line, "the server ended before it stood"
            found = re.search(r"served at http://127.0.0.1:(\d+)", line)
        yield f"localhost:{found[1]}"
        process.terminate()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_session_runs_and_ends_with_the_new_version(server: str, tmp_path: Path):
    session = "set -e\n" + SESSION.replace("localhost:8000", server).replace("curl -s", "curl -s --fail-with-body -w '\\n'")
    done = subprocess.run(["bash", "-c", session], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    completion, paused, is_paused, *_, resumed, version = map(json.loads, done.stdout.splitlines())
    assert completion["usage"]["completion_tokens"] == 8
    assert (paused, is_paused) == ({"status": "paused"}, {"is_paused": True})
    assert (resumed, version) == ({"status": "resumed"}, {"weight_version": "v2"})


def test_the_control_plane_is_listed_whole():
    listed = set(re.findall(r"/[a-z_]+", "".join(line for line in PAGE.splitlines() if re.match(r"\| (GET|POST) ", line))))
    served = {route.path for route in control.router.routes}  # pyright: ignore[reportAttributeAccessIssue]
    assert not served - listed


def test_every_kind_of_refusal_is_listed_with_its_status():
    rows = re.findall(r"^\| ([\d, ]+) \| ([^|]+) \|", PAGE, re.M)
    listed = {(int(code), kind) for codes, kinds in rows for code in codes.split(", ") for kind in re.findall(r"`([a-z-]+)`", kinds)}
    assert {(int(status), kind) for kind, status in STATUS.items()} <= listed
