"""Our engine running by itself: every scenario of scenarios/modes/ holds on it, and the model explains each of its logs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from harness.log import read_log

ROOT = Path(__file__).parents[2]
MODES = ROOT / "scenarios" / "modes"
SCENARIOS = sorted(map(str, MODES.glob("*.yaml")))
ASYNC = ["--set", "engine.async_scheduling=true"]


def caesura(*arguments: str, runs: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "harness.cli", *arguments, "--runs", str(runs)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def verdicts(*arguments: str, runs: Path) -> list[dict]:
    output, errors = (process := caesura(*arguments, "--json", runs=runs)).communicate(timeout=1200)
    assert process.returncode in (0, 1, 2), errors
    return [json.loads(line) for line in output.splitlines()]


@pytest.mark.parametrize("options", [[], ASYNC], ids=["sync", "async"])
def test_every_scenario_holds_live_and_the_model_explains_it(options: list[str], tmp_path: Path) -> None:
    found = verdicts("run", *SCENARIOS, "--engine", "torch-live-inproc", *options, runs=tmp_path)
    assert {one["scenario"]: one["reasons"] for one in found if one["status"] != "holds"} == {}
    assert len(found) == len(SCENARIOS)
    assert all(one["explanation"]["mismatch"] is None for one in found)


@pytest.mark.parametrize("options", [[], ASYNC], ids=["sync", "async"])
def test_scenarios_hold_with_the_core_in_a_process_of_its_own(options: list[str], tmp_path: Path) -> None:
    files = [str(MODES / name) for name in ("every_call_over_pending_wait.yaml", "weights_in_parts.yaml")]
    found = verdicts("diff", *files, "--engines", "sim,torch-live", *options, runs=tmp_path)
    assert [(one["status"], one["reasons"]) for one in found] == [("holds", [])] * len(files)


@pytest.mark.parametrize("engine", ["torch-live", "torch-live-inproc"])
def test_ctrl_c_ends_a_run_with_whole_logs_and_leaves_no_process(engine: str, tmp_path: Path) -> None:
    file = tmp_path / "long.yaml"
    file.write_text(
        "schema: 1\nname: long\ntimeline:\n  - submit: {id: r1, prompt: {tokens: 6}, max_tokens: 400}\n"
        "  - {when: {request: r1, tokens: 2}, pause: {mode: keep}, as: p1}\n  - {when: {ms: 600000}, resume: {}}\n"
    )
    process = caesura("run", str(file), "--engine", engine, runs=tmp_path / "runs")
    deadline = time.monotonic() + 120
    while not any('"status":"paused"' in log.read_text() for log in tmp_path.glob("runs/2*/events.client.jsonl")):
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    log = read_log(next(tmp_path.glob("runs/2*")))
    assert log.closed and not log.tails
