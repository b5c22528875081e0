"""`caesura check` against our own engine and server: a tracer's tokens say that promises hold."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the extra `engine` is not installed")
pytest.importorskip("fastapi", reason="the extra `server` is not installed")

from harness.tracer import make_tracer

from ..server.servers import serving
from .test_check import evidence, inspect

CHECKS = (
    "pause-abort-clear",
    "pause-keep-clear",
    "keep-over-wait",
    "abort-late",
    "label-spans",
    "clear-clears",
    "no-clear-keeps",
    "clear-later",
    "reset-idle",
    "reset-running",
    "update-keep-clear",
    "update-keep-no-clear",
    "update-abort-clear",
    "update-refused",
    "session-holds-pause",
    "tokens-conserved",
    "labels-true",
    "one-ending",
)


def test_our_server_keeps_its_promises(tmp_path: Path):
    make_tracer(tmp_path, versions=2)
    with serving(tmp_path / "v1") as server:
        found = inspect(server.url, tmp_path, *CHECKS)
    assert [found.dialect, found.tracer, found.left] == ["caesura", "v1", []]
    assert evidence(found, "violated") == {}
    assert set(evidence(found, "holds")) == set(CHECKS)
