"""AsyncLLM, live, on the scenarios of lockstep: the model explains the log that its engine process wrote, and a promise that is
broken there has a file in scenarios/differences.

What a clock decides may miss a scenario's point: that a situation was not reached is nothing against the engine.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from harness.backends import CannotRun, make_live_backend
from harness.scenario import load_scenario
from harness.trial import run_live_trial

from .differences import BROKEN, MODES, violated

QUICK = ("abort_in_every_state", "weights_in_parts")
"""Their shape is one, so that one engine serves both."""


@pytest.fixture(scope="module")
def live():
    """One engine for all scenarios that fit it, as `caesura run` has it."""
    with asyncio.Runner() as runner:
        backend = make_live_backend("vllm-live")

        def run(file, folder, **fields):
            scenario = load_scenario(file)
            scenario = replace(scenario, engine=scenario.engine.model_copy(update=fields))
            try:
                return runner.run(run_live_trial(scenario, backend, folder))
            except CannotRun as refusal:
                pytest.skip(str(refusal))

        yield run
        runner.run(backend.stop())


@pytest.mark.parametrize("file", MODES, ids=lambda file: file.stem)
@pytest.mark.parametrize("scheduling", ["sync", "async"])
def test_vllm_is_explained_and_breaks_only_what_has_a_file(file, scheduling, live, tmp_path, needs_vllm, request):
    if not request.config.getoption("--long", default=False) and (file.stem not in QUICK or scheduling == "async"):
        pytest.skip("with --long: an engine takes half a minute to start, and is lost where vLLM dies of a broken promise")
    trial = live(file, tmp_path, async_scheduling=scheduling == "async")
    explanation = trial.verdict.explanation
    assert explanation is not None and explanation.mismatch is None, explanation
    assert violated(trial) <= BROKEN
