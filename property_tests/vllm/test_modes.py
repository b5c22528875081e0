"""The model under vLLM's profile explains every event of every pause-mode scenario, under both ways of scheduling, and a promise
that vLLM breaks there has a file of its own in scenarios/differences."""

from __future__ import annotations

import pytest

from harness.scenario import load_scenario

from .differences import BROKEN, MODES, run, unreported, violated


@pytest.mark.parametrize("file", MODES, ids=lambda file: file.stem)
@pytest.mark.parametrize("scheduling", ["sync", "async"])
@pytest.mark.parametrize("engine", ["vllm-scheduler", "vllm"])
def test_vllm_is_explained_and_breaks_only_what_has_a_file(engine, scheduling, file, tmp_path, needs_vllm, request):
    large = load_scenario(file).engine.checkpoint != "tiny"
    if engine == "vllm" and large and not request.config.getoption("--long", default=False):
        pytest.skip("with --long: the engine takes ten seconds to start with a model of 135 million parameters")
    trial = run(file, engine, tmp_path, async_scheduling=scheduling == "async")
    explanation = trial.verdict.explanation
    assert explanation is not None and explanation.mismatch is None, explanation
    assert violated(trial) <= BROKEN | unreported(trial.opened.profile)
