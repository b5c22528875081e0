"""AsyncLLM, live, on the scenarios of lockstep: the model explains the log that its engine process wrote, and a promise that is
broken there has a file in scenarios/differences.

What a clock decides may miss a scenario's point: that a situation was not reached is nothing against the engine.
"""

from __future__ import annotations

import pytest

from .differences import BROKEN, MODES, live, violated

QUICK = ("abort_in_every_state", "weights_in_parts")
"""Their shape is one, so that one engine serves both."""


@pytest.fixture(scope="module")
def run_live():
    with live() as run:
        yield run


@pytest.mark.parametrize("file", MODES, ids=lambda file: file.stem)
@pytest.mark.parametrize("scheduling", ["sync", "async"])
def test_vllm_is_explained_and_breaks_only_what_has_a_file(file, scheduling, run_live, tmp_path, needs_vllm, request):
    if not request.config.getoption("--long", default=False) and (file.stem not in QUICK or scheduling == "async"):
        pytest.skip("with --long: an engine takes half a minute to start, and is lost where vLLM dies of a broken promise")
    trial = run_live(file, tmp_path, async_scheduling=scheduling == "async")
    explanation = trial.verdict.explanation
    assert explanation is not None and explanation.mismatch is None, explanation
    assert violated(trial) <= BROKEN
