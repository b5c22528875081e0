"""Which scenarios show that vLLM breaks a promise, and which: what docs/vllm.md says in words."""

from __future__ import annotations

from pathlib import Path

from harness.backends import make_backend
from harness.scenario import load_scenario
from harness.trial import Trial, run_trial

SCENARIOS = Path(__file__).parents[2] / "scenarios"
DIFFERENCES = sorted((SCENARIOS / "differences").glob("*.yaml"))
MODES = sorted((SCENARIOS / "modes").glob("*.yaml"))

DIES_ON_CPU = {"failed_update_serves", "resume_in_session"}
"""Differences after which the real engine's next step breaks: its weights are not there. Its scheduler goes on."""

BROKEN = {promise for file in DIFFERENCES for promise in load_scenario(file).expect.violates}
"""Every promise that vLLM is known to break."""


def run(file: Path, engine: str, folder: Path) -> Trial:
    """The scenario on the engine, with the model following."""
    backend, scenario = make_backend(engine), load_scenario(file)
    info = backend.start(scenario.engine)
    try:
        return run_trial(scenario, backend, info, folder, explain=True)
    finally:
        backend.stop()
