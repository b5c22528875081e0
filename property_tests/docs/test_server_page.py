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
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `server` is not installed")

from engine.server import control
from engine.server.errors import STATUS
from harness.checkpoints import ensure, make_tiny

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
START, SESSION, RECORD, REPLAY = re.findall(r"```sh\n(.*?)```", PAGE, re.S)


def caesura(command: str) -> tuple[list[str], dict[str, str]]:
    """A command of the page as this tree has it, with a smaller model and on a free port; and its environment."""
    words = shlex.split(command.strip().replace("smollm2", "tiny").replace("8000", "0"))
    return [sys.executable, "-m", "harness.cli", *words[1:]], {**os.environ, "PYTHONPATH": str(ROOT)}


@contextmanager
def serving(start: str, folder: Path) -> Iterator[str]:
    """The server that a command of the page starts; where it listens."""
    make_tiny(folder / "new-weights", seed=7)
    ensure("tiny")
    command, environment = caesura(start)
    with subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        found = None
        while found is None:
            line = process.stderr.readline()
            assert line, "the server ended before it stood"
            found = re.search(r"served at http://127.0.0.1:(\d+)", line)
        yield f"localhost:{found[1]}"
        process.terminate()


def run_session(server: str, folder: Path) -> list[Any]:
    """What the calls of the page answer."""
    session = "set -e\n" + SESSION.replace("localhost:8000", server).replace("curl -s", "curl -s --fail-with-body -w '\\n'")
    done = subprocess.run(["bash", "-c", session], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return list(map(json.loads, done.stdout.splitlines()))


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_session_runs_and_ends_with_the_new_version(tmp_path: Path):
    with serving(START, tmp_path) as server:
        completion, paused, is_paused, *_, resumed, version = run_session(server, tmp_path)
    assert completion["usage"]["completion_tokens"] == 8
    assert (paused, is_paused) == ({"status": "paused"}, {"is_paused": True})
    assert (resumed, version) == ({"status": "resumed"}, {"weight_version": "v2"})


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_a_recorded_session_holds(tmp_path: Path):
    with serving(RECORD, tmp_path) as server:
        run_session(server, tmp_path)
    command, environment = caesura(REPLAY)
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "sim explains torch-live" in done.stdout, done.stdout + done.stderr


def test_the_control_plane_is_listed_whole():
    listed = set(re.findall(r"/[a-z_]+", "".join(line for line in PAGE.splitlines() if re.match(r"\| (GET|POST) ", line))))
    served = {route.path for route in control.router.routes}  # pyright: ignore[reportAttributeAccessIssue]
    assert not served - listed


def test_every_kind_of_refusal_is_listed_with_its_status():
    rows = re.findall(r"^\| ([\d, ]+) \| ([^|]+) \|", PAGE, re.M)
    listed = {(int(code), kind) for codes, kinds in rows for code in codes.split(", ") for kind in re.findall(r"`([a-z-]+)`", kinds)}
    assert {(int(status), kind) for kind, status in STATUS.items()} <= listed
