"""A load generator that others wrote gets every token of every request, while the engine is paused and resumed."""

from __future__ import annotations

import csv
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from engine.server import Server

from .clients import call, metric

LOCUSTFILE = Path(__file__).with_name("locustfile.py")


@pytest.mark.skipif(find_spec("locust") is None, reason="locust is not installed: nox -s server")
def test_locust_gets_every_token_across_pauses(client: httpx.Client, server: Server, tmp_path: Path):
    load = ["--headless", "--users", "8", "--spawn-rate", "8", "--run-time", "20s", "--stop-timeout", "20", "--csv", "load"]
    command = [sys.executable, "-m", "locust", "--locustfile", LOCUSTFILE, "--host", server.url, *load]
    pauses = 0
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as locust:
        while locust.poll() is None:
            if metric(client, "num_requests_running") > 0:
                call(client, "/pause", params={"mode": "keep", "clear_cache": pauses % 2 == 0})
                call(client, "/resume")
                pauses += 1
    with (tmp_path / "load_stats.csv").open() as file:
        total = next(row for row in csv.DictReader(file) if row["Name"] == "Aggregated")
    assert int(total["Request Count"]) > 0 and pauses > 0
    assert int(total["Failure Count"]) == 0, (tmp_path / "load_failures.csv").read_text()
    assert metric(client, "num_requests_running") == metric(client, "kv_cache_usage_perc") == 0
