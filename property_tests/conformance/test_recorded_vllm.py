"""Logs of real vLLM that were recorded on a GPU, judged again by today's invariants and explained again by today's model."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.log import read_log
from harness.scenario import load_scenario
from harness.trial import review

from ..vllm.differences import BROKEN, DIFFERENCES, on_the_page, unreported, violated

RECORDED = sorted((Path(__file__).parents[1] / "gpu" / "recorded-vllm").glob("*.jsonl"))
SHOWN = [(file, difference) for file in RECORDED for difference in DIFFERENCES if file.name.startswith(f"{difference.stem}.")]


@pytest.mark.parametrize("file", RECORDED, ids=[file.stem for file in RECORDED])
def test_a_log_of_vllm_on_a_gpu_is_still_explained(file: Path) -> None:
    trial = review(read_log(file), None)
    explanation = trial.verdict.explanation
    assert trial.opened.device.startswith("NVIDIA"), trial.opened.device
    assert explanation is not None and explanation.mismatch is None, explanation
    assert violated(trial) <= BROKEN | unreported(trial.opened.profile)


@pytest.mark.parametrize(("file", "difference"), SHOWN, ids=[file.stem for file, _ in SHOWN])
def test_a_difference_that_was_recorded_is_the_one_on_the_page(file: Path, difference: Path) -> None:
    trial = review(read_log(file), None)
    profile = trial.opened.profile
    shown = violated(trial) & (set(load_scenario(difference).expect.violates) - unreported(profile))
    assert bool(shown) == (on_the_page(difference.stem, profile) == "there")
