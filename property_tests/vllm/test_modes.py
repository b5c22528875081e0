"""The model under vLLM's profile explains every event of every pause-mode scenario, and a promise that vLLM breaks there has a
file of its own in scenarios/differences."""

from __future__ import annotations

import pytest

from .differences import BROKEN, MODES, run


@pytest.mark.parametrize("file", MODES, ids=lambda file: file.stem)
def test_the_scheduler_is_explained_and_breaks_only_what_has_a_file(file, tmp_path, needs_vllm):
    verdict = run(file, "vllm-scheduler", tmp_path).verdict
    assert verdict.explanation is not None and verdict.explanation.mismatch is None, verdict.explanation.mismatch
    violated = {judgement.invariant for judgement in verdict.judgements if judgement.status == "violated"}
    assert violated <= BROKEN


@pytest.mark.parametrize("name", ["keep_clear_two_requests", "preemption_small_pool", "wait_new_weights", "weights_in_parts"])
def test_the_engine_is_explained_too(name, tmp_path, needs_vllm):
    file = next(file for file in MODES if file.stem == name)
    verdict = run(file, "vllm", tmp_path).verdict
    assert verdict.explanation is not None and verdict.explanation.mismatch is None, verdict.explanation.mismatch
