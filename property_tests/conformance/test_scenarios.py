"""Every scenario of scenarios/modes/ holds on our engine, the model explains each of its logs, and logs repeat byte for byte."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
SCENARIOS = sorted(map(str, (ROOT / "scenarios" / "modes").glob("*.yaml")))


def start(arguments: list[str], *, runs: Path, hash_seed: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "harness.cli", *arguments, "--runs", str(runs)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def logs(runs: Path) -> list[bytes]:
    """Every log under `runs`, in an order that the time of the run does not change."""
    return sorted(file.read_bytes() for file in runs.glob("2*/events.r0.jsonl"))


RUNS = {
    "sim": ["run", "--engine", "sim"],
    "torch": ["diff", "--engines", "sim,torch"],
    "torch-async": ["diff", "--engines", "sim,torch", "--set", "engine.async_scheduling=true"],
}


@pytest.mark.parametrize("arguments", RUNS.values(), ids=RUNS)
def test_every_scenario_holds_and_its_log_repeats_under_another_hash_seed(arguments: list[str], tmp_path: Path) -> None:
    verb, *options = arguments
    runs = {seed: tmp_path / seed for seed in ("1", "4242")}
    processes = {seed: start([verb, *SCENARIOS, *options], runs=folder, hash_seed=seed) for seed, folder in runs.items()}
    for process in processes.values():
        output, _ = process.communicate(timeout=900)
        assert process.returncode == 0, output
    first, second = map(logs, runs.values())
    assert len(first) == len(SCENARIOS)
    assert first == second
